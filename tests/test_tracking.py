"""The registry of metrics and its page, failing trackers, the console, the table of rollouts."""

import io
import re
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from texts import parts

from operant.metrics.registry import COLUMNS, METRICS, describe, markdown
from operant.runs.folder import RunFolder
from operant.runs.scored_rollouts import as_rows
from operant.runs.trackers.base import ExternalTracker
from operant.runs.trackers.console import Console, before_after
from operant.runs.trackers.notebook import Chart
from operant.runs.trackers.trackers import Trackers
from operant.types import Batch, Rollout, Task, Turn

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_of_metrics_is_the_registry():
    written = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert written == markdown(), "run: python -m operant.metrics.registry > docs/metrics.md"


def test_every_metric_of_trl_has_a_name_here():
    old = [m.old for m in METRICS.values()] + [names for _, names in COLUMNS.values()]
    covered = {re.sub(r" \(.*?\)", "", name) for names in old for name in re.split(r", ", names)}
    assert set(parts("trl_names.txt")["metrics"].split()) <= covered


def test_every_metric_has_a_meaning():
    for metric in METRICS.values():
        assert len(metric.meaning) > 5 and "|" not in metric.meaning, metric.name
    assert [METRICS[name].healthy for name in ("kl/per_reply", "policy/ratio_max")] == ["0 to 10", "at most 200"]
    assert [METRICS["kl/per_reply"].unhealthy(x) for x in (-0.1, -1e-7, 5, 11)] == [True, False, False, True]
    assert describe("reward/taste/sweet/mean") is METRICS["reward/<part>/mean"]
    assert describe("reward/mean") is METRICS["reward/mean"] and describe("nonsense") is None


class RecordingTracker:
    def __init__(self, fails_at=None, error=None):
        self.calls, self.fails_at, self.error = [], fails_at, error or ConnectionError("no route")

    def _add(self, *call):
        if call == self.fails_at:
            raise self.error
        self.calls.append(call)

    def start(self, config):
        self._add("start")

    def note(self, text):
        self._add("note", text)

    def log(self, step, metrics):
        self._add("log", step)

    def rollouts(self, step, rows):
        self._add("rollouts", step)

    def close(self):
        self._add("close")


@pytest.mark.parametrize("fails_at", [("start",), ("log", 2), ("rollouts", 1), ("close",)])
def test_a_tracker_that_raises_is_dropped_once_and_nothing_stops(tmp_path, fails_at):
    messages, folder = [], RunFolder.create(tmp_path / "x", {})
    bad, good = RecordingTracker(fails_at), RecordingTracker()
    trackers = Trackers(folder, [bad, good], messages.append)
    trackers.note("early")
    trackers.start({})
    for step in (1, 2, 3):
        trackers.log(step, {"a": 1.0})
        trackers.rollouts(step, [{"reply": "x"}])
    trackers.close()
    assert len(messages) == 1 and "tracker RecordingTracker failed (ConnectionError: no route)" in messages[0]
    steps = [(kind, step) for step in (1, 2, 3) for kind in ("log", "rollouts")]
    assert good.calls == [("start",), ("note", "early"), *steps, ("close",)]
    assert bad.calls == good.calls[: good.calls.index(fails_at)]
    assert [m["step"] for m in folder.metrics()] == [1, 2, 3]


def test_a_record_that_cannot_be_written_is_written_later(tmp_path, capsys):
    folder, messages, tracker = RunFolder.create(tmp_path / "x", {}), [], RecordingTracker()
    trackers = Trackers(folder, [tracker], messages.append)
    folder.metrics_path.symlink_to("/dev/full")
    for step in (1, 2):
        trackers.log(step, {"a": float(step)})
    assert len(messages) == 1 and "no space left on device" in messages[0]
    assert "metrics are kept in memory" in messages[0] and messages[0] in capsys.readouterr().err
    folder.metrics_path.unlink()
    trackers.log(3, {"a": 3.0})
    assert [m["step"] for m in folder.metrics()] == [1, 2, 3]
    assert tracker.calls == [("log", 1), ("log", 2), ("log", 3)]
    assert len(messages) == 2 and messages[1] == "metrics can be written again"


def test_a_run_has_failed_by_an_error_of_its_own(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(ExternalTracker, "end", lambda self, failed: ended.append(failed))
    try:
        raise KeyError
    except KeyError:  # the program handles it, and trains again
        ExternalTracker(tmp_path, print).close()
        with pytest.raises(ValueError), closing(ExternalTracker(tmp_path, print)):
            raise ValueError from None
    assert ended == [False, True]


def test_ctrl_c_in_a_tracker_is_not_swallowed():
    with pytest.raises(KeyboardInterrupt):
        Trackers(None, [RecordingTracker(("log", 1), KeyboardInterrupt())]).log(1, {})


STEP = {
    "reward/mean": 0.5234, "kl/per_reply": 3.123, "policy/entropy": 2.911, "policy/clip_fraction": 0.123,
    "tokens/per_second": 1234.5, "time/step": 2.0,
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_without_a_terminal():
    out = io.StringIO()
    console = Console(4, every=2, samples_every=3, samples=1, output=out)
    console.start({})
    row = {"query": "The film", "reply": " was\x1b[31m\nfine [/b]", "reward": 0.5, "logprobs": [-1.0]}
    for step in (1, 2, 3, 4):
        console.log(step, STEP)
        console.rollouts(step, [row] * 2)
    console.close()
    lines = out.getvalue().splitlines()
    assert lines[0] == "step 2/4  reward 0.523  KL 3.12  entropy 2.91  clip 0.12  1.2k tok/s  0:02 left"
    assert lines[1] == lines[3] == "  The film |  was [31m fine [/b] [0.50]"
    assert lines[2].startswith("step 4/4") and lines[2].endswith("0:00 left") and len(lines) == 4


def test_a_sample_of_several_turns_is_an_episode():
    out = io.StringIO()
    console = Console(1, samples_every=1, samples=2, output=out)
    row = {"query": "Go?", "logprobs": [-1.0], "reward": None}
    turns = [row | {"rollout": 0, "turn": i, "reply": f" {i}"} for i in range(2)]
    turns[-1]["reward"] = 1.0
    console.rollouts(1, turns + [row | {"rollout": n, "turn": i, "reply": f" {i}"} for n in (1, 2) for i in range(5)])
    assert out.getvalue().splitlines() == ["  Go? |  0 |  1 [1.00]", "  Go? |  0 |  1 | ... 5 turns ... |  4"]


@pytest.mark.parametrize("width", [80, 60])
def test_a_bar_in_a_terminal(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    console = Console(output=out)
    console.start({"steps": 100, "samples_every": 1})
    console.log(12, STEP)
    console.rollouts(12, [{"query": "The film", "reply": " was [bold]fine[/nothing]", "reward": None}])
    console.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "The film |  was [bold]fine[/nothing]" in shown
    last = shown.replace("\r", "\n").strip().splitlines()[-1]
    assert len(last) <= width
    numbers = ["reward 0.523", "KL 3.12", "entropy 2.91", "clip 0.12", "1.2k tok/s"]
    fitting = numbers if width == 80 else numbers[:3]
    for part in ("12/100", "2:56 left", *fitting):  # a narrow window shows fewer numbers, none of them cut
        assert part in last
    assert "…" not in last


def test_characters_that_the_output_cannot_encode_are_replaced():
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    before_after([("café", " 悪い", 0.1, " 良い", 0.9)], out)
    assert raw.getvalue() == b"caf?\n  before  0.100 | ??\n  after   0.900 | ??\n"


def test_before_and_after_in_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    before_after([("The film was", " [red]bad[/red].", 0.1, " a joy", 0.93)], out)
    for part in ("opening", "The film was", "[red]bad[/red].", "0.10", "a joy", "0.93"):
        assert part in out.getvalue()


def test_rows_of_a_table(tmp_path):
    two = [Turn([1, 2], [3], [-0.5], version=4), Turn([9], [5, 6], [-1.0, -2.0], end="length", reward=2.5, version=4)]
    rollouts = [
        Rollout(Task("a", "q"), 0, [Turn([7], [8], [-3.0])], ["left out"], query="q"),
        Rollout(Task("b", "p"), 1, two, ["first", "second \ud800"], query="p"),
    ]
    # Only of the second rollout; it has two rows, because the prompt of its second turn is new.
    rows = {"tokens": [[1, 2, 3], [9, 5, 6]], "mask": [[True] * 3] * 2, "rewards": [[0.0] * 3] * 2}
    rows |= {"actions": [[False, False, True], [False, True, True]], "turns": [[-1, -1, 0], [-1, 1, 1]]}
    rows |= {"episodes": [0, 0], "groups": [1, 1]}
    rows |= {"bootstrap": [0.0], "ref_logprobs": [[9.0, 9.0, -0.25], [9.0, -0.75, -1.75]]}
    batch = Batch(**{name: torch.tensor(values) for name, values in rows.items()})
    table = as_rows(rollouts, [None, [0.25, 0.5]], {"taste": [None, 0.75]}, batch)
    assert [(r["task"], r["group"], r["rollout"], r["turn"]) for r in table] == [
        ("a", 0, 0, 0), ("b", 1, 1, 0), ("b", 1, 1, 1)]  # fmt: skip
    assert [r["reward"] for r in table] == [None, None, 3.25]  # the score, and the environment's reward
    assert [r.get("reward/taste") for r in table] == [None, None, 0.75]
    assert [r["ref_logprobs"] for r in table] == [None, [-0.25], [-0.75, -1.75]]
    assert table[2]["reply"] == "second ?" and table[2]["ids"] == [5, 6] and table[2]["prompt"] == [9]
    assert (table[2]["end"], table[2]["paid"], table[2]["version"]) == ("length", 2.5, 4)

    folder = RunFolder.create(tmp_path / "x", {})
    folder.rollouts(1, table)
    back = pq.read_table(folder.rollouts_path / "step-00001.parquet").to_pylist()
    assert back == [{"reward/taste": None} | row for row in table]
    named = {name for names in COLUMNS for name in names.split(", ")}
    assert {n.replace("reward/taste", "reward/<part>") for n in back[0]} <= named  # every column is documented


def test_the_log_ratio_of_given_replies_is_not_called_kl():
    metrics = {"preference/loss": 0.5, "kl/per_reply": -0.722}
    assert not [text for text in Console().line(1, metrics)[0] if "KL" in text]
    chart = Chart()
    chart.draw = lambda: None
    chart.log(1, metrics)
    assert "KL" not in chart.html()


def test_a_missing_metric_is_left_out():
    out = io.StringIO()
    Console(4, output=out).log(1, {"reward/mean": 1.0, "time/step": 1.0, "policy/entropy": None})
    assert out.getvalue() == "step 1/4  reward 1.000  0:03 left\n"
    for kl, shown in ((-0.004, "KL 0.00"), (-0.02, "KL -0.02")):  # rounding makes no KL negative
        assert Console().line(1, {"kl/per_reply": kl})[0] == [shown]
