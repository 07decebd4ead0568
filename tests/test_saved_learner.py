"""A learner that was saved and is loaded goes on bit for bit like the one that was not.

`python tests/test_saved_learner.py FOLDER` is another process that loads every case and goes on.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import letters, lm, on_disk

from operant import Learner, OperantError
from operant.models.reference import digest
from operant.storage import atomic_io

TIMES = ("time/", "tokens/per_second", "memory/")
QUERIES = ["ab", "ba", "ab", "the"]
ADAM = {"optimizer.lr": 1e-2, "sampling.max_tokens": 6, "learner.seed": 3}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ppo": ({"policy": "gpt2"} | ADAM | {"score.normalise": True, "kl.coef": 0.2, "kl.control": "adaptive"}, {}),
    "grpo, LoRA": ({"policy": "gpt2", "algorithm": "grpo", "lora.rank": 2} | ADAM, {}),
    "t5": ({"policy": "t5", "schedule": "linear", "total_steps": 9, "score.truncate_token": "<s>"} | ADAM, {}),
    "own critic": ({"policy": "gpt2", "value.critic": "gpt2"} | ADAM, {}),
    "reference": ({"policy": "gpt2", "reference": "other"} | ADAM, {}),
    "objects": (
        {"policy": "gpt2", "sampling.max_tokens": 6},
        {"optimizer": sgd, "lr_scheduler": halving, "tokenizer": letters()},
    ),
}
"""Options that have names, and Python objects, which are given again. Names of models are folders beside the saves."""


def made(case: str, folder: Path) -> Learner:
    named, objects = CASES[case]
    of_models = [name for name in ("policy", "reference", "value.critic") if name in named]
    given = named | {name: str(folder / named[name]) for name in of_models}
    return Learner(given.pop("policy"), **given, **objects)


def go_on(learner: Learner, steps: int) -> list[dict[str, float]]:
    """Train in a loop of one's own; the metrics that do not measure time."""
    found = []
    for _ in range(steps):
        replies = [*learner.generate(QUERIES[:2]), *learner.generate(QUERIES[2:] + QUERIES[:2])]
        metrics = learner.step(replies, [float(len(reply.reply) + reply.reply.count("a")) for reply in replies])
        found.append({name: x for name, x in metrics.items() if not name.startswith(TIMES)})
    return found


def state(learner: Learner, metrics: list[dict[str, float]]) -> dict[str, Any]:
    weights = digest(learner.policy.state_dict())
    return {"weights": weights, "history": len(learner.history), "metrics": [repr(sorted(m.items())) for m in metrics]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("learners")
    for name, model in (("gpt2", lm(vocab=40)), ("other", lm(vocab=40, seed=1)), ("t5", lm("t5", vocab=40))):
        on_disk(folder / name, model)
    saves, whole = folder / "saves", {}
    for case in CASES:
        learner = made(case, folder)
        go_on(learner, 1)
        learner.save(saves / case)
        go_on(learner, 1)
        learner.generate(QUERIES[:1])  # an attempt of the step that comes next
        assert learner.save(saves / case) == saves / case
        whole[case] = state(learner, go_on(learner, 1))
    for name in ("gpt2", "other", "t5"):  # they may change, or disappear
        atomic_io.remove_tree(folder / name)
    return saves, whole


def loaded(saves: Path, case: str) -> dict[str, Any]:
    learner = Learner.load(saves / case, **CASES[case][1])
    return state(learner, go_on(learner, 1))


@pytest.mark.parametrize("case", CASES)
def test_a_loaded_learner_goes_on_bit_for_bit(saved: tuple[Path, dict], case: str) -> None:
    torch.manual_seed(5)  # no chance of this process counts
    folder, whole = saved
    assert loaded(folder, case) == whole[case] and whole[case]["history"] == 3


@pytest.mark.slow
def test_in_another_process_it_goes_on_bit_for_bit(saved: tuple[Path, dict]) -> None:
    folder, whole = saved
    done = subprocess.run([sys.executable, __file__, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == whole


def test_one_complete_save_stays(saved: tuple[Path, dict]) -> None:
    folder, _ = saved
    assert sorted(path.name for path in (folder / "ppo").iterdir()) == ["learner.json", "start", "step-00002"]
    begun = sorted(path.name for path in (folder / "reference/start").iterdir())
    assert begun == ["manifest.json", "policy", "reference"]


def test_a_save_that_fails_leaves_the_one_before(saved: tuple[Path, dict], monkeypatch, tmp_path: Path) -> None:
    folder, _ = saved
    learner = Learner.load(folder / "ppo")
    learner.save(tmp_path / "x")
    go_on(learner, 1)

    def full(when: str, operation: str, path: Path) -> None:
        if operation == "rename" and path.name == "step-00003":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic_io, "seam", full)
    with pytest.raises(OperantError, match="no space left"):
        learner.save(tmp_path / "x")
    assert Learner.load(tmp_path / "x").progress.step == 2


def _files(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}", encoding="utf-8")
    return folder


REFUSED: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "nothing there": (lambda saves, new: Learner.load(new / "x"), "x does not exist: Learner.save writes"),
    "a run": (lambda saves, new: Learner.load(_files(new / "x", "config.yaml")), "the folder of a run, not of a lear"),
    "a model": (lambda saves, new: Learner.load(_files(new / "x", "config.json")), "is a model, not a saved learner"),
    "a broken mark": (lambda saves, new: Learner.load(_files(new / "x", "learner.json")), "damaged, or of a newer"),
    "an object missing": (
        lambda saves, new: Learner.load(saves / "objects", optimizer=sgd),
        r"with tokenizer=<\w+>, lr_scheduler=<function>, .* Learner.load\('.*', tokenizer=..., lr_scheduler=...\)",
    ),
    "an object too many": (
        lambda saves, new: Learner.load(saves / "ppo", policy=lm(vocab=40)),
        r"policy=.*: the learner in .* has policy='.*gpt2', which is loaded with it; leave it out",
    ),
    "another option": (lambda saves, new: Learner.load(saves / "ppo", kl={"coef": 0.3}), "kl.coef=0.2; leave it out"),
    "into something else": (
        lambda saves, new: Learner.load(saves / "ppo").save(_files(new / "x", "thesis.tex")),
        "x is there already and is no folder of a saved learner: choose another one",
    ),
    "into another learner": (
        lambda saves, new: Learner.load(saves / "ppo").save(saves / "t5"),
        r"holds a learner that began from other weights \(policy .*t5, hash .*; this one: .*\): choose another folder",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_why(saved: tuple[Path, dict], tmp_path: Path, case: str) -> None:
    act, message = REFUSED[case]
    with pytest.raises(OperantError, match=message):
        act(saved[0], tmp_path)


if __name__ == "__main__":
    print(json.dumps({case: loaded(Path(sys.argv[1]), case) for case in CASES}))
