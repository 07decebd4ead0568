"""`torchrun --nproc-per-node 2 -m operant train`: two processes write the run of one, in one folder."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file
from small_runs import told
from torchruns import started, write_job

from operant.tools.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A job; and the run of one process, and that of two."""
    path = write_job(tmp_path_factory.mktemp("torchrun"))
    for name, ranks in (("one", 1), ("two", 2)):
        done = started(path, name, ranks)
        assert done.returncode == 0, done.stderr[-2000:]
        (path / f"{name}.txt").write_text(done.stdout, encoding="utf-8")
    return path


@pytest.mark.slow
def test_an_error_of_all_ranks_is_printed_once_and_that_of_one_rank_is_not_lost(tmp_path, monkeypatch, capsys):
    wrong = started(tmp_path, "run", 2, "letters", "--lrr", "3")
    assert wrong.returncode != 0 and "option 'lrr' is unknown" in wrong.stderr
    # The other rank names itself: on a busy machine it may speak, too, or alone.
    assert wrong.stderr.count("operant: option 'lrr'") <= 1
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("operant.tools.cli.ALONE", 0.0)
    for met, said in ((False, "operant: rank 1: option 'lrr' is"), (True, "operant: option 'lrr' is")):
        monkeypatch.setattr("operant.distributed.met", met)
        assert main(["train", "letters", "--lrr", "3"]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_write_the_metrics_of_one_process(folder):
    """Replies, rewards, advantages, KL, controller and updates of three steps, to rounding."""
    assert len(told(folder / "two")) == 3
    for one, two in zip(told(folder / "one"), told(folder / "two"), strict=True):
        assert one.keys() == two.keys()
        assert not {k: (one[k], two[k]) for k in one if two[k] != pytest.approx(one[k], rel=2e-3, abs=1e-4)}


@pytest.mark.slow
def test_every_reply_of_every_rank_is_in_the_folder(folder):
    one, two = (
        sorted(map(tuple, (r["ids"] for r in pq.read_table(folder / n / "rollouts/step-00002.parquet").to_pylist())))
        for n in ("one", "two")
    )
    assert len(two) == 8 and one == two


@pytest.mark.slow
def test_the_weights_are_those_of_one_process(folder):
    one, two = (load_file(folder / n / "export/model.safetensors") for n in ("one", "two"))
    start = load_file(folder / "model/model.safetensors")
    moved = sum(float((one[k] - start[k]).double().square().sum()) for k in one) ** 0.5
    apart = sum(float((one[k] - two[k]).double().square().sum()) for k in one) ** 0.5
    assert moved > 0 and apart < 1e-3 * moved, (apart, moved)


@pytest.mark.slow
def test_only_the_first_rank_speaks_and_writes(folder):
    said = (folder / "two.txt").read_text(encoding="utf-8")
    assert said.count("step 3/3") == 1 and said.count("report:") == 1
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == ["model", "one", "two"]


@pytest.mark.slow
def test_two_ranks_go_on_where_two_ranks_stopped(folder):
    """The last checkpoint of three steps, and one step more of four."""
    config = folder / "two/config.yaml"
    config.write_text(config.read_text(encoding="utf-8").replace("steps: 3", "steps: 4"), encoding="utf-8")
    done = started(folder, "two", 2, "--resume", str(folder / "two"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert [x["step"] for x in told(folder / "two")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_fewer_prompts_than_ranks_and_a_reward_that_fails_end_every_rank(folder):
    recipe = str(folder / "recipe.yaml")
    few = started(folder, "few", 2, recipe, "--batch", "2", "--out", str(folder / "few"))
    assert few.returncode != 0 and "1 prompts a step for 2 ranks" in few.stderr
    (folder / "odd.py").write_text(
        "def odd(rs):\n    if any('h' in r.query for r in rs): raise ValueError('no')\n    return [1.0] * len(rs)\n",
        encoding="utf-8",
    )
    odd = started(folder, "odd", 2, recipe, "--reward", "odd.py:odd", "--probes", "0", "--evaluate", "none", "--out",
                  str(folder / "odd"))  # fmt: skip
    assert odd.returncode != 0 and "raised ValueError: no" in odd.stderr
    assert not (folder / "few").exists()
