"""The run folder: numbering, the lock, the record, and disks that refuse."""

import errno
import json
import os
from pathlib import Path
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest
import yaml
from disks import largest_file
from processes import Child

from operant.runs.folder import RunFolder, read_config
from operant.runs.resume import cut_after
from operant.types import OperantError


def test_a_new_run_never_writes_into_an_old_folder(tmp_path):
    out, made = tmp_path / "runs" / "sentiment", []
    for seed in range(3):
        with RunFolder.create(out, {"seed": seed}) as folder:
            folder.log(1, {"reward/mean": float(seed)})
            made.append(folder.path.name)
    assert made == ["sentiment", "sentiment-2", "sentiment-3"]
    assert [read_config(tmp_path / "runs" / name)["seed"] for name in made] == [0, 1, 2]


def test_an_empty_folder_is_used_and_a_foreign_one_is_not(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "novel.txt").write_text("chapter one", encoding="utf-8")
    assert RunFolder.create(tmp_path / "empty", {}).path == tmp_path / "empty"
    assert RunFolder.create(tmp_path / "mine", {}).path == tmp_path / "mine-2"


def test_config_is_written_whole_and_in_order(tmp_path):
    config = {"seed": 3, "policy": {"name": "gpt2", "stops": ["é\n", "#"]}, "kl": {"target": None, "coef": 1e-5}}
    folder = RunFolder.create(tmp_path / "x", config)
    text = (folder.path / "config.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text) == {"schema": 3, **config} and read_config(folder.path) == config
    assert list(yaml.safe_load(text)) == ["schema", "seed", "policy", "kl"]
    with pytest.raises(OperantError, match="configuration cannot be written"):
        RunFolder.create(tmp_path / "y", {"reward": object()})
    assert not (tmp_path / "y").exists()
    with pytest.raises(OperantError, match="is not UTF-8; choose another name"):  # its model could not be exported
        RunFolder.create(tmp_path / "r\udcff", {})


def test_metrics_are_strict_json_with_null_for_nan(tmp_path):
    folder = RunFolder.create(tmp_path / "x", {})
    folder.log(1, {"a": 0.1, "b": float("nan"), "c": float("inf"), "step": 1})

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    (line,) = (folder.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line, parse_constant=refuse) == {"step": 1, "a": 0.1, "b": None, "c": None}


def test_a_line_is_on_disk_before_the_run_is_closed(tmp_path):
    killed = Child(lambda: RunFolder.create(tmp_path / "x", {}).log(1, {"a": 0.5}) or os.kill(os.getpid(), 9))
    assert killed.ends() == -9 and RunFolder.open(tmp_path / "x").metrics() == [{"step": 1, "a": 0.5}]


def test_resume_cuts_what_is_played_again_and_a_torn_line(tmp_path):
    folder = RunFolder.create(tmp_path / "x", {})
    for step in range(1, 6):
        folder.log(step, {"a": step / 3})
        folder.rollouts(step, [{"reply": "hello", "reward": 1.0}])
    with open(folder.metrics_path, "a", encoding="utf-8") as file:
        file.write('{"step": 6, "a": 2.')
    assert [m["step"] for m in folder.metrics()] == [1, 2, 3, 4, 5]
    cut_after(folder, 3)
    folder.log(4, {"a": 9.0})
    assert folder.metrics() == [{"step": s, "a": s / 3} for s in (1, 2, 3)] + [{"step": 4, "a": 9.0}]
    assert sorted(p.name for p in folder.rollouts_path.iterdir()) == [f"step-0000{s}.parquet" for s in (1, 2, 3)]


def test_rollouts_keep_columns_that_the_first_row_lacks(tmp_path):
    folder = RunFolder.create(tmp_path / "x", {})
    rows = [{"reply": "a", "reward": None}, {"reply": "b", "reward": 0.5, "reward/taste": 0.25}]
    folder.rollouts(12, rows)
    back = pq.read_table(folder.rollouts_path / "step-00012.parquet").to_pylist()
    assert back == [rows[0] | {"reward/taste": None}, rows[1]]
    folder.rollouts(13, rows[:1])  # nobody was scored: the column is still one of numbers
    assert str(pq.read_schema(folder.rollouts_path / "step-00013.parquet").field("reward").type) == "double"


def test_a_live_process_keeps_others_out_and_a_dead_one_does_not(tmp_path):
    dead = Child(lambda: RunFolder.create(tmp_path / "x", {}) and os._exit(1))
    dead.ends()
    folder = RunFolder.open(tmp_path / "x")
    assert json.loads((tmp_path / "x" / "lock").read_text(encoding="utf-8"))["pid"] == os.getpid()
    assert f"took over from process {dead.pid}" in folder.log_path.read_text(encoding="utf-8")
    with pytest.raises(OperantError, match=f"process {os.getpid()} on .*delete .*lock"):
        RunFolder.open(folder.path)
    folder.close()
    RunFolder.open(folder.path).close()


def test_a_full_disk_is_refused_at_once_and_nothing_is_left(tmp_path):
    with largest_file(100_000), pytest.raises(OperantError, match=r"cannot write .*file too large; free some space"):
        RunFolder.create(tmp_path / "runs" / "x", {})
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for out, why in (("file/x", r"file/x.* choose another \(--out"), ("file", "is a file, and a run writes a folder")):
        with pytest.raises(OperantError, match=why):
            RunFolder.create(tmp_path / out, {})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    for number, said in ((errno.EROFS, "read-only file system"), (errno.EACCES, "permission denied")):
        monkeypatch.setattr(Path, "mkdir", Mock(side_effect=OSError(number, os.strerror(number))))
        with pytest.raises(OperantError, match=f"{said}; choose a folder that you may write to"):
            RunFolder.create(tmp_path / "x", {})


def test_a_wrong_name_lists_the_runs_that_are_there(tmp_path):
    RunFolder.create(tmp_path / "sentiment", {})
    with pytest.raises(OperantError, match=r"sentimnet is not a run folder.*runs in .*: sentiment$"):
        RunFolder.open(tmp_path / "sentimnet")
