"""A number that is NaN or infinite never reaches the weights: the step is refused, and can be made again elsewhere.

The numbers break as they do in practice: a weight so large that a norm overflows, a reward whose square does, a
gradient that a kernel spoils. What must not move is compared to the bit with a copy from before.
"""

import copy
import dataclasses
import functools
import math
import shutil
import subprocess
import sys
import warnings

import pyarrow.parquet as pq
import pytest
import torch
from cases import cases, slow
from rigs import alike, on_ranks, said
from safetensors.torch import load_file
from small_runs import told
from toys import letters, lm

from operant import Learner, OperantError, export
from operant.api import runs
from operant.objectives import losses
from operant.runs.replay import Replayed, replay

QUERIES, REPLIES = [[3, 4, 5], [6, 7]] * 4, [[8, 9, 10], [11, 12, 13, 14]] * 4
SCORES = [1.0, -1.0, 0.5, -0.2, 0.9, -0.7, 0.3, 0.1]
OPTIONS = {"optimizer.lr": 1e-2, "minibatch": 4, "epochs": 2}
ADAPTIVE = {"score.scale": True, "kl.control": "adaptive"}
JUDGED = {"ppo": ADAPTIVE, "rloo": ADAPTIVE, "grpo": {"score.scale": True}, "sft": {}, "distill": {}}
HUGE = 3e38
"""Finite, and nothing of its size can be squared or summed in float32."""


def model(kind="gpt2", **more):
    return lm(kind, tie_word_embeddings=False, **more)


def learner(algorithm="ppo", **more) -> Learner:
    student = Learner(model(), algorithm=algorithm, **OPTIONS | JUDGED[algorithm] | more)
    assert stepped(student)["update/refused"] == 0 and student.refused is None
    return student


def stepped(student: Learner, scores=SCORES) -> dict[str, float]:
    return student.step(QUERIES, REPLIES, *([] if student.algorithm.source == "data" else [scores]))


def held(student: Learner) -> dict:
    """All that may move, but the counter of steps."""
    parts = {name: part.state_dict() for name, part in student.parts().items()}
    parts["progress"] = {k: v for k, v in parts["progress"].items() if k == "episodes"}
    return copy.deepcopy(parts) | {"weights": {k: v.clone() for k, v in student.policy.state_dict().items()}}


def refused(student: Learner, scores=SCORES) -> None:
    """One step that must be refused as a whole, and change nothing."""
    before, step = held(student), student.progress.step
    with pytest.warns(UserWarning, match="a step was refused"):
        told = stepped(student, scores)
    assert student.refused is not None and student.refused.whole and alike(held(student), before)
    assert told["step"] == student.progress.step == step + 1
    assert told["update/refused"] == 1 and not told.get("update/steps") and all(math.isfinite(x) for x in told.values())
    assert student.algorithm.source == "data" or told["reward/mean"] == pytest.approx(sum(scores) / 8)


@torch.no_grad()
def word_without_norm(student: Learner) -> None:
    """Token 12 becomes so large that its layer norm overflows."""
    student.policy.model.transformer.wte.weight[12] = HUGE


# --- where numbers break ----------------------------------------------------------------------------------------------
@cases("ppo", "grpo", "sft", slow("rloo"))
def test_an_overflowing_forward_pass_is_refused(algorithm):
    student = learner(algorithm)
    word_without_norm(student)
    refused(student)
    fault = student.refused.fault
    # Rows with the token alone: in every second one, from its first reply token on (0 times NaN is NaN).
    assert (fault.what, fault.value, fault.column, fault.token) == ("log-prob", "nan", 2, 11)
    assert fault.row == 1 or algorithm == "sft"  # of a minibatch there
    # Given replies are looked at in the update alone; nothing has moved by then.
    assert fault.reply == "11 12 13 14" and student.refused.stage == ("update" if algorithm == "sft" else "observe")
    with torch.no_grad():
        student.policy.model.transformer.wte.weight[12] = 0.1
    assert stepped(student)["update/refused"] == 0 and student.progress.refused == 0


def test_a_return_that_cannot_be_squared_moves_nothing():
    """The reward is a number, and so is the advantage; its squared error is none."""
    student = learner(**{"score.scale": False, "value_clip": None, "minibatch": 8})
    refused(student, [1e30, *SCORES[1:]])
    assert student.refused.stage == "update" and student.refused.fault.what == "loss"
    assert student.refused.fault.value == "inf" and "nothing has changed" in student.refused.message()
    with torch.no_grad():  # nor does a critic that overflows
        student.policy.value_head.net[0].weight.fill_(HUGE)
    refused(student)
    assert student.refused.fault.what == "value"


@cases(
    (lambda gradient: gradient * math.nan, 1, "gradient of model.{}"),
    (lambda gradient: gradient * math.inf, 1, "gradient of model.{}"),
    (lambda gradient: torch.full_like(gradient, 1e25), None, "gradient norm"),  # which alone is infinite
)
def test_a_gradient_that_is_none_is_refused(spoil, count, what):
    student = learner()
    parameters = list(student.policy.model.named_parameters())[3:]
    for _, p in parameters[:count]:
        p.register_hook(spoil)
    refused(student)
    fault = student.refused.fault
    assert fault.what == what.format(parameters[0][0]) and not math.isfinite(float(fault.value))


def test_later_in_an_update_the_optimizer_steps_before_it_stand():
    """The fourth of four gradients is spoilt: three steps were made, and the weights are those after the third."""
    spoilt, whole, calls, snapshots = learner(), learner(), [], []
    original = whole.optimizer.step

    def step(**more):
        original(**more)
        snapshots.append({k: v.clone() for k, v in whole.policy.state_dict().items()})

    whole.optimizer.step = step
    whole.step(QUERIES, REPLIES, SCORES)

    def spoil(gradient):
        calls.append(1)
        return gradient * math.nan if len(calls) >= 4 else gradient

    spoilt.policy.model.transformer.ln_f.weight.register_hook(spoil)
    with pytest.warns(UserWarning, match="the optimizer steps before it stand"):
        told = spoilt.step(QUERIES, REPLIES, SCORES)
    assert told["update/steps"] == 3 and told["update/refused"] == 1 and not spoilt.refused.whole
    assert len(snapshots) == 4 and alike(spoilt.policy.state_dict(), snapshots[2])
    assert alike(spoilt.controller.state_dict(), whole.controller.state_dict())  # the replies were learnt from


VARIANTS = {"bf16": {"model.precision": "bfloat16"}, "trunk": {"model.train_layers": 1}, "lora": {"lora.rank": 2}}
VARIANTS |= {"8bit": {"optimizer.states": "8bit", "model.precision": "bfloat16"}, "critic": {"value.critic": "copy"}}
VARIANTS |= {"hint": {"algorithm": "distill", "teacher.hint": lambda rollout: [7]}}


@cases(*VARIANTS)
def test_it_is_refused_however_the_model_is_trained(name, tmp_path):
    if name == "lora":
        pytest.importorskip("peft")
    student = learner(**VARIANTS[name])
    with torch.no_grad():  # of the last norm, which is trained in none and frozen in some of them
        norm = next(m for n, m in student.policy.model.named_modules() if n.endswith("ln_f"))
        norm.weight.fill_(math.nan)
    refused(student)
    assert student.refused.fault.what == "log-prob"
    student.bundle(tmp_path / "refused")
    if norm.weight.requires_grad or name == "critic":
        again = {option: given for option, given in VARIANTS[name].items() if callable(given)}
        assert replay(tmp_path / "refused", policy=model(), **again).same
    else:  # what is frozen comes from where the run began, and that is not broken
        with pytest.raises(OperantError, match="frozen weights have the hash"):
            replay(tmp_path / "refused", policy=model())


def test_an_impossible_reply_is_the_callers_mistake():
    student = Learner(model(), **OPTIONS, banned=(12,))
    before, step = held(student), student.progress.step
    with pytest.raises(OperantError, match=r"row 1 has token 12 at column 3, which the policy cannot generate"):
        student.step(QUERIES, REPLIES, SCORES)
    assert alike(held(student), before) and student.progress.step == step and student.refused is None


def test_replies_with_log_probs_that_are_none_are_refused():
    student = learner()
    bad = [said(q, r, logprobs=[-1.0] * len(r), values=[0.0] * len(r)) for q, r in zip(QUERIES, REPLIES, strict=True)]
    bad[5] = said(QUERIES[5], REPLIES[5], logprobs=[-1.0, math.nan, -1.0, -1.0], values=[0.0] * 4)
    with pytest.warns(UserWarning, match="the log-prob at row 5"):
        assert student.step(bad, SCORES)["update/refused"] == 1


# --- bundles ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def named(tmp_path):
    """A model that lies in a folder, so that another process can load it."""
    student = Learner(model(vocab=len(letters())), tokenizer=letters(), algorithm="grpo")
    return str(export(student.policy, tmp_path / "model"))


@pytest.mark.slow
def test_the_command_makes_a_step_again_in_another_process(named, tmp_path):
    student = Learner(named, **OPTIONS)
    student.step(QUERIES, REPLIES, SCORES)
    word_without_norm(student)
    refused(student)
    path = student.bundle(tmp_path / "refused" / "step-00002")
    command = [sys.executable, "-m", "operant", "replay", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    reply = student.policy.tokenizer.decode(REPLIES[1])
    assert f"step 2 of ppo on {named}: refused before the update" in done.stdout
    assert f"the log-prob at row 1, column 2 (token 11, {reply[0]!r}) is nan; the reply: {reply!r}" in done.stdout
    assert "repeated: the same" in done.stdout
    assert "first module: the output of model.transformer.h.0.ln_1 has NaN or infinity" in done.stdout
    assert sorted(p.suffix for p in path.iterdir()) == [".json", ".json", ".safetensors"]


@cases("ppo", "sft", slow("grpo"), slow("rloo"))
def test_a_refused_update_is_repeated_from_its_weights(algorithm, tmp_path, monkeypatch):
    """The loss itself breaks in the last optimizer step, at one token; there the replay finds it as well."""
    student = learner(algorithm)
    row, calls = student.algorithm, []

    @functools.wraps(row.loss)
    def broken(out, given, **options):
        told = row.loss(out, given, **options)
        calls.append(1)
        if len(calls) < 4 or told["loss"].shape[1] < 4:  # options are tried on four short rows
            return told
        spoilt = told["loss"].clone()
        spoilt[1, 3] = math.inf
        return told | {"loss": spoilt}

    student.algorithm = dataclasses.replace(row, loss=broken)
    with pytest.warns(UserWarning, match="the loss at row 1, column 3"):
        assert stepped(student)["update/steps"] == 3
    path = student.bundle(tmp_path / "b")
    assert replay(path, policy=model()) == Replayed(student.refused.fault, None, None)  # the loss is whole again
    monkeypatch.setitem(sys.modules["operant.algorithms"].ALGORITHMS, algorithm, student.algorithm)
    done = replay(path, policy=model())
    assert done.same and done.found.what == "loss" and done.found.value == "inf"
    state = load_file(path / "tensors.safetensors")
    weight = next(v for k, v in state.items() if k.endswith("model.transformer.ln_f.weight"))
    assert torch.equal(weight, student.policy.model.transformer.ln_f.weight)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    student = learner()
    word_without_norm(student)
    refused(student)
    path = student.bundle(tmp_path_factory.mktemp("bundles") / "b")
    student.refused = None
    with pytest.raises(OperantError, match="was not refused"):
        student.bundle(path.parent / "c")
    replies = student.generate([[12, 3]] * 3, max_new_tokens=4)  # a policy of NaN draws tokens of its vocabulary
    assert all(0 <= token < 20 for r in replies for token in r.ids)
    return path


def test_without_its_model_a_bundle_says_what_it_needs(bundle):
    with pytest.raises(OperantError, match=r"the policy of .* was a Python object, <GPT2LMHeadModel>"):
        replay(bundle)
    with pytest.raises(OperantError, match=r"another policy than the run began with"):
        replay(bundle, policy=lm("llama"))


def rewritten(path, change):
    path.write_bytes(change(path.read_bytes()))


@cases(
    lambda path: rewritten(path / "tensors.safetensors", lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]),
    lambda path: rewritten(path / "tensors.safetensors", lambda data: data[:-9]),
    lambda path: (path / "state.json").unlink(),
    lambda path: rewritten(path / "manifest.json", lambda data: data.replace(b"refused", b"resume")),
    lambda path: path.rename(path.parent / "elsewhere"),
    lambda path: [file.unlink() for file in path.iterdir()],
)
def test_a_damaged_bundle_is_refused_in_a_sentence(harm, bundle, tmp_path):
    harm(path := shutil.copytree(bundle, tmp_path / "b"))
    with pytest.raises(OperantError, match=r"no bundle of a refused step|is damaged"):
        replay(path, policy=model())


# --- runs -------------------------------------------------------------------------------------------------------------
SMALL = {"probes": 0, "batch": 4, "max_tokens": 6, "optimizer.lr": 1e-3, "checkpoint_minutes": 0.0}
GIVEN = SMALL | {"tasks": ["ab", "c"], "reward": lambda rs: [float(len(r.reply)) for r in rs], "best": "reward/mean"}


def weights_on_disk(path):
    return [load_file(p) for p in path.rglob("*.safetensors") if "refused" not in p.parts]


def test_a_run_stops_after_three_refused_steps(named, tmp_path):
    """The critic's weights are too large for a while: in steps 2 and 3, and from step 5 on."""
    seen, healthy = [], None
    with pytest.raises(OperantError) as failed:
        for run in runs(tmp_path / "r", policy=named, steps=12, **GIVEN):
            seen.append(run.learner.progress.step)
            weight = run.policy.value_head.net[0].weight.data
            if seen[-1] == 3:
                weight.copy_(healthy)
            elif seen[-1] in (1, 4):
                healthy = weight.clone()
                weight.fill_(HUGE)
    path = tmp_path / "r"
    assert seen == [0, 1, 2, 3, 4, 5, 6] and [m["update/refused"] for m in told(path)] == [0, 1, 1, 0, 1, 1, 1]
    text = str(failed.value)
    assert "3 steps in a row were refused, the last one was step 7: the value at row" in text
    assert "--optimizer.lr" in text and f"operant replay {path}/refused/step-00007" in text
    assert sorted(p.name for p in (path / "refused").iterdir()) == ["step-00005", "step-00006", "step-00007"]
    assert replay(path / "refused" / "step-00007").same
    assert all(bool(x.isfinite().all()) for held in weights_on_disk(path) for x in held.values())
    assert "step 2: a step was refused" in (path / "log.txt").read_text(encoding="utf-8")
    assert {m["episodes"] for m in told(path)[4:]} == {8}
    spoken = pq.read_table(path / "rollouts" / "step-00002.parquet").to_pylist()
    known = [x for row in spoken for name in ("values", "logprobs") for x in row[name]]
    assert None in known and all(math.isfinite(x) for x in known if x is not None)


def test_weights_that_are_none_reach_neither_best_nor_export(named, tmp_path):
    student = learner()
    student.policy.value_head.net[0].weight.data[0, 3] = math.inf
    with pytest.raises(OperantError, match=r"value_head\.net\.0\.weight holds 1 numbers"):
        export(student.policy, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(OperantError, match=r"not finite|NaN"):
        for run in runs(tmp_path / "r", policy=named, steps=3, **GIVEN):
            if run.learner.progress.step == 2:
                run.policy.value_head.net[0].weight.data.fill_(math.nan)
    held = weights_on_disk(tmp_path / "r")
    assert held and all(bool(x.isfinite().all()) for weights in held for x in weights.values())


# --- several ranks ----------------------------------------------------------------------------------------------------
def constant(out, given, **options):
    """PPO's loss with an infinite constant in it, of which no gradient tells the other ranks."""
    told = losses.ppo(out, given, **options)
    spoilt = told["loss"].clone()
    spoilt[given.actions] += math.inf
    return told | {"loss": spoilt}


def ranks_work(rank: int, world: int, folder: str) -> dict:
    """Rank 1 alone holds what is bad: a token that overflows, a reward that cannot be squared, a loss."""
    found = {}
    for case in ("observe", "update", "alone"):
        student = Learner(model(), **OPTIONS | {"score.scale": False, "value_clip": None})
        mine = slice(rank, None, 2)  # of the eight, rank 1 has those with token 12
        scores = [1e30, *SCORES[mine][1:]] if case == "update" and rank == 1 else SCORES[mine]
        if case == "observe":
            word_without_norm(student)
        if case == "alone" and rank == 1:
            student.algorithm = dataclasses.replace(student.algorithm, loss=constant)
        before = held(student)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            told = student.step(QUERIES[mine], REPLIES[mine], scores)
        found[case] = {"fault": student.refused.fault, "same": alike(held(student), before), "told": told}
        if rank == 0:
            student.bundle(f"{folder}/{case}")
    return found


@pytest.mark.slow
def test_all_ranks_refuse_together(tmp_path):
    ranks = on_ranks(ranks_work, 2, str(tmp_path))
    for case in ("observe", "update", "alone"):
        first, second = (ranks[r][case] for r in (0, 1))
        assert first["same"] and second["same"] and first["fault"] == second["fault"]
        assert first["fault"].rank == 1 and first["told"]["update/refused"] == 1
        named = [{k for k in one["told"] if not k.startswith("time/")} for one in (first, second)]
        assert named[0] == named[1]
        assert replay(tmp_path / case, policy=model()).same == (case != "alone")  # that loss lives in this file
    assert ranks[0]["observe"]["fault"].what == "log-prob" and ranks[0]["update"]["fault"].what == "loss"
