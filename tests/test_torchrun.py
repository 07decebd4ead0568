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
    path = write_job(tmp_path_factory.mktemp("torchrun"))
    for name, ranks in (("one", 1), ("two", 2)):
        done = started(path, name, ranks)
        assert done.returncode == 0, done.stderr[-2000:]
        (path / f"{name}.txt").write_text(done.stdout, encoding="utf-8")
    return path


@pytest.mark.slow
def test_an_error_of_all_ranks_is_printed_once(tmp_path, monkeypatch, capsys):
    wrong = started(tmp_path, "run", 2, "letters", "--lrr", "3")
    assert wrong.returncode != 0 and "option 'lrr' is unknown" in wrong.stderr
    # The other rank names itself: on a busy machine it may speak, too, or alone.
    assert wrong.stderr.count("operant: option 'lrr'") <= 1
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("operant.tools.cli.ALONE", 0.0)
    for met, said in ((False, "operant: rank 1: option 'lrr' is"), (True, "operant: option 'lrr' is")):
        monkeypatch.setattr("operant.distributed.met", met)
        assert main(["train", "letters", "--lrr", "3"]) == 2 and said in capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_write_the_run_of_one_process(folder):
    """Replies, rewards, advantages, KL, controller and updates of three steps, to rounding; and weights."""
    assert len(told(folder / "two")) == 3
    for one, two in zip(told(folder / "one"), told(folder / "two"), strict=True):
        assert one.keys() == two.keys()
        assert not {k: (one[k], two[k]) for k in one if two[k] != pytest.approx(one[k], rel=2e-3, abs=1e-4)}
    tables = [pq.read_table(folder / name / "rollouts/step-00002.parquet").to_pylist() for name in ("one", "two")]
    one, two = (sorted(row["ids"] for row in table) for table in tables)
    assert one == two and [row["rollout"] for row in tables[1]] == [*range(8)], "no two attempts have one number"
    one, two = (load_file(folder / n / "export/model.safetensors") for n in ("one", "two"))
    start = load_file(folder / "model/model.safetensors")
    moved = sum(float((one[k] - start[k]).double().square().sum()) for k in one) ** 0.5
    apart = sum(float((one[k] - two[k]).double().square().sum()) for k in one) ** 0.5
    assert moved > 0 and apart < 1e-3 * moved, (apart, moved)
    said = (folder / "two.txt").read_text(encoding="utf-8")
    assert said.count("step 3/3") == 1 and said.count("report:") == 1, "only the first rank speaks, and writes"
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == ["model", "one", "two"]


@pytest.mark.slow
def test_fewer_prompts_than_ranks_end_every_rank(folder):
    few = started(folder, "few", 2, str(folder / "recipe.yaml"), "--batch", "2", "--out", str(folder / "few"))
    assert few.returncode != 0 and "1 prompts a step for 2 ranks" in few.stderr and not (folder / "few").exists()
