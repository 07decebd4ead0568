"""`torchrun ... --parallel fsdp`: a whole run by ranks with parts of the weights is the run of one process."""

from pathlib import Path

import pytest
from cases import cases
from safetensors.torch import load_file
from small_runs import told
from torchruns import started, write_job

from operant.tools.cli import main

FSDP = ("--parallel", "fsdp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model, tasks and a recipe; the run of one process, and that of two ranks."""
    path = write_job(tmp_path_factory.mktemp("sharded"), "checkpoint: both\nbest: reward/mean\n")
    for name, ranks in (("one", 1), ("two", 2)):
        train(path, name, ranks)
    return path


def train(folder: Path, out: str, ranks: int, *more: str) -> str:
    done = started(folder, out, ranks, str(folder / "recipe.yaml"), *FSDP, "--out", str(folder / out), *more)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def same(one: Path, two: Path, first: int = 0) -> None:
    """The metrics of every step behind the `first` ones, and the exported weights."""
    # Shares of distinct words are those of each rank, as the commonest word is.
    for a, b in zip(told(one, "text/")[first:], told(two, "text/")[first:], strict=True):
        assert a.keys() == b.keys()
        assert not {k: (a[k], b[k]) for k in a if b[k] != pytest.approx(a[k], rel=2e-3, abs=1e-4)}
    for which in ("export", "best"):
        mine, theirs = (load_file(run / which / "model.safetensors") for run in (one, two))
        assert mine.keys() == theirs.keys() and max(float((mine[k] - theirs[k]).abs().max()) for k in mine) < 1e-5


@pytest.mark.slow
def test_two_ranks_write_the_run_of_one_process(folder):
    same(folder / "one", folder / "two")
    for kind in ("step", "light"):
        written = sorted(p.name for p in (folder / "two/checkpoints" / f"{kind}-00003").iterdir())
        shards = [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)]
        assert written == ["manifest.json", *shards, "state.json", "tensors.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("two", 1), ("one", 2)])
def test_a_run_goes_on_with_another_number_of_ranks(folder, name, ranks, tmp_path):
    """The last checkpoint of three steps, and two steps more, as one process makes them without a stop."""
    if not (folder / "five").is_dir():
        train(folder, "five", 1, "--steps", "5")
    done = started(folder, name, ranks, "--resume", str(folder / name), "--steps", "5")
    assert done.returncode == 0, done.stderr[-3000:]
    assert [x["step"] for x in told(folder / name)] == [1, 2, 3, 4, 5]
    same(folder / "five", folder / name, 3)  # the third step was a last one, after which more is measured


@cases(
    (("--parallel", "zero3"), "it must be ddp or fsdp"),
    (("--parallel", "fsdp", "--algorithm", "trpo"), "it moves whole weights"),
    (("--parallel", "fsdp", "--states", "8bit"), "256 numbers share a scale"),
    (("--parallel", "fsdp", "--optimizer.kind", "muon"), "some rows of each matrix"),
    (("--offload", "both"), "set parallel=fsdp"),
    (("--parallel", "fsdp", "--offload", "reference"), "start them by torchrun"),
)
def test_what_cannot_work_is_refused_with_a_sentence(more, why, tmp_path, capsys):
    recipe = write_job(tmp_path) / "recipe.yaml"
    capsys.readouterr()
    assert main(["train", str(recipe), *more, "--out", str(tmp_path / "no")]) == 2
    said = capsys.readouterr().err
    assert why in said and said.count("\n") == 1 and not (tmp_path / "no").exists()
