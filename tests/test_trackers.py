"""Trackers, read back with the real packages. They change no number and no exit code, and print nothing."""

import html
import json
import os
import re
import signal
import socket
import struct
import sys
import threading

import psutil
import pytest
from cases import cases, slow
from processes import until
from small_runs import TASKS, count_a, model, options, same, told

from operant import OperantError, train
from operant.runs.trackers import base
from operant.runs.trackers.tensorboard import markdown
from operant.runs.trackers.trackers import TRACKERS, Trackers, make_trackers

CONFIG = {"steps": 9, "samples_every": 2, "kl": {"coef": 0.1}}
HISTOGRAM = {"width": 0.25, "start": -1, "counts": [3, 0, 7]}  # 3 in -0.25..0, 7 in 0.25..0.5
DISTRIBUTIONS = {
    "histograms": {"reward": HISTOGRAM, "values": None},
    "blocks": {"gradient": {"block 0": 0.5, "final": float("nan")}},
    "gradients": {"h.0.weight": HISTOGRAM},
}
NASTY = "a|b \\| <script>alert(1)</script>\n| x | `y|z` &amp; [l](http://x) ![i](x) *s* _t_ 1. # ~~d~~ $e$ \x1b[31m"


@pytest.fixture(autouse=True)
def without_settings(monkeypatch):
    for name in [n for n in os.environ if n.startswith(("WANDB", "TRACKIO", "HF_TOKEN"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", os.devnull)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    yield
    if "wandb" in sys.modules and sys.modules["wandb"] is not None:
        sys.modules["wandb"].teardown()  # the service reads its settings once


@pytest.fixture
def listener():
    """Run a server that accepts connections and never answers; yields its address and the list of connections."""
    connections = []
    server = socket.create_server(("127.0.0.1", 0))

    def listen():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            connections.append(connection)

    threading.Thread(target=listen, daemon=True).start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}", connections
    server.close()
    for connection in connections:
        connection.close()


def rows(step, count=40):
    reply = {"query": "why", "reply": NASTY, "reward": 0.5, "kl": [0.25, 0.5], "reply_tokens": 2, "end": "stop"}
    return [reply | {"reward": None, "kl": [None, 0.5], "reply": f"first of {step}"}] + [reply] * (count - 1)


def drive(folder, names, steps):
    """Log steps as a run does; return the trackers that still work, and the messages."""
    messages = []
    trackers = Trackers(None, make_trackers(names, folder, messages.append), messages.append)
    trackers.start(CONFIG)
    for step in steps:
        trackers.rollouts(step, rows(step))
        trackers.distributions(step, DISTRIBUTIONS)
        trackers.log(step, {"step": step, "reward/mean": step / 10, "kl/coef": None, "value/mean": float("nan")})
    alive = list(trackers.active)
    trackers.close()
    return alive, messages


# --- names and tables -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TRACKERS.built_in)
def test_a_missing_package_is_an_error_before_anything_is_written(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    sentence = rf"^trackers={name} needs the package {name}: pip install 'operant\[{name}\]'$"
    with pytest.raises(OperantError, match=sentence):
        train("builtin:reviews-lm", ["a"], len, trackers=name, out=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_package_that_a_tracker_of_ones_own_misses_is_named(tmp_path):
    (tmp_path / "mine.py").write_text("def Mine(*given):\n    import nowhere_at_all\n", encoding="utf-8")
    with pytest.raises(OperantError, match=r"needs the package nowhere_at_all .*: install it"):
        make_trackers([f"{tmp_path}/mine.py:Mine"], tmp_path)


# --- TensorBoard ------------------------------------------------------------------------------------------------------
def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    whole = {"tensors": 0, "scalars": 0, "histograms": 0}
    return EventAccumulator(str(folder / "tensorboard"), size_guidance=whole).Reload()


def texts(folder, name):
    """Return the events of a text, as TensorBoard's server reads them. The accumulator above replaces numbers only."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard")).Reload().Tensors(f"{name}/text_summary")


def test_tensorboard_has_metrics_histograms_replies_and_configuration(tmp_path):
    """Of a run that was resumed, every step once."""
    for steps in ([1, 2, 3, 4], [3, 4, 5]):
        drive(tmp_path, ["tensorboard"], steps)
    written = events(tmp_path)
    assert set(written.Tags()["scalars"]) == {"reward/mean", "blocks/gradient/block 0"}
    assert [(e.step, round(e.value, 6)) for e in written.Scalars("reward/mean")] == [(i, i / 10) for i in range(1, 6)]
    assert [e.step for e in written.Histograms("histograms/reward")] == [1, 2, 3, 4, 5]
    assert set(written.Tags()["histograms"]) == {"histograms/reward", "gradients/h.0.weight"}
    histogram = written.Histograms("histograms/reward")[1].histogram_value
    assert (histogram.min, histogram.max, histogram.num) == (-0.25, 0.5, 10)
    assert list(histogram.bucket_limit) == [0.0, 0.25, 0.5] and list(histogram.bucket) == [3, 0, 7]
    assert (histogram.sum, histogram.sum_squares) == (3 * -0.125 + 7 * 0.375, 3 * 0.125**2 + 7 * 0.375**2)
    replies, [config] = texts(tmp_path, "replies"), texts(tmp_path, "config")
    assert [e.step for e in replies] == [2, 4], "every second step"
    assert replies[0].tensor_proto.string_val[0].count(b"\n") == 2 + 32
    assert b"coef: 0.1" in config.tensor_proto.string_val[0]


def test_a_cell_shows_exactly_its_text():
    from tensorboard.plugin_util import markdown_to_safe_html

    page = markdown_to_safe_html(markdown(("reply", "reward"), [[NASTY, 0.25], ["plain", None]]))
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page, re.S)
    assert len(cells) == 4 and not re.search(r"<(script|a|img|em|strong|code|del)\b", page)
    text = re.sub(r"\s", " ", NASTY.replace("\x1b", " "))
    assert [html.unescape(cell) for cell in cells] == [text, "0.25", "plain", ""]


# --- W&B --------------------------------------------------------------------------------------------------------------
def records(file):
    """Yield the records of a `.wandb` file: a LevelDB log in blocks of 32 KiB, after 7 bytes that name the format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, whole = file.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # the rest of the block is too short for a header
            place += 32768 - place % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # the whole record, or its last part
            yield Record.FromString(whole)
            whole = b""


def history(folder, count):
    """Return (ids, one mapping per step, configuration) of a run; W&B's service may write the last step late."""
    ids, steps, config = set(), [], {}

    def read():
        steps.clear()
        for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
            for record in records(file):
                if record.run.run_id:
                    ids.add(record.run.run_id)
                    config.update({u.key: json.loads(u.value_json) for u in record.run.config.update})
                if record.history.item:
                    row = {"_step": record.history.step.num, "file": file}
                    for item in record.history.item:
                        *outer, last = item.nested_key or [item.key]
                        (row.setdefault(outer[0], {}) if outer else row)[last] = json.loads(item.value_json)
                    steps.append(row)
        return len(steps) >= count

    until(read, 60)
    return ids, steps, config


@pytest.mark.slow
def test_wandb_keeps_a_run_offline_without_an_api_key(tmp_path, capfd):
    _, messages = drive(tmp_path, ["wandb"], [1, 2, 3])
    threading.Event().wait(1.1)  # W&B names folders by the second
    drive(tmp_path, ["wandb"], [3, 4, 5])
    ids, steps, config = history(tmp_path, 5)
    assert len(ids) == 1 and config["kl"] == {"coef": 0.1} and [row["_step"] for row in steps] == [1, 2, 3, 4, 5]
    assert [row["reward/mean"] for row in steps] == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert steps[0]["blocks/gradient/block 0"] == 0.5 and "value/mean" not in steps[0] and "kl/coef" not in steps[0]
    for name in ("histograms/reward", "gradients/h.0.weight"):
        assert steps[0][name] == {"_type": "histogram", "values": [3, 0, 7], "bins": [-0.25, 0.0, 0.25, 0.5]}
    assert ["replies" in row for row in steps] == [False, True, False, True, False]
    table = json.loads((steps[1]["file"].parent / "files" / steps[1]["replies"]["path"]).read_text(encoding="utf-8"))
    assert table["columns"] == list(base.COLUMNS) and len(table["data"]) == 32
    begins = [["first of 2", None, None], [NASTY, 0.5, 0.75]]
    assert table["data"][:2] == [[2, "why", *cells, 2, "stop", None, None] for cells in begins]
    assert "no API key is configured" in messages[0] and f"wandb sync {tmp_path}" in messages[0] and len(messages) == 1
    assert capfd.readouterr() == ("", "")


@cases(("offline", "is offline", 2), ("disabled", "is disabled", 0), slow("online", "no answer from W&B", 2))
def test_wandb_keeps_a_run_here_if_it_must(mode, said, written, tmp_path, monkeypatch, listener, capfd):
    address, connections = listener
    for name, value in {"BASE_URL": address, "API_KEY": "a" * 40, "MODE": mode}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setattr("operant.runs.trackers.wandb.INIT_SECONDS", 1.0)
    alive, messages = drive(tmp_path, ["wandb"], [1, 2])
    assert len(alive) == len(messages) == 1 and said in messages[0] and bool(connections) == (mode == "online")
    assert [row["_step"] for row in history(tmp_path, written)[1]] == [1, 2][:written]
    assert capfd.readouterr() == ("", "")


def test_wandb_is_dropped_if_its_service_dies(tmp_path):
    messages = []
    trackers = Trackers(None, make_trackers(["wandb"], tmp_path, messages.append), messages.append)
    trackers.start({})
    trackers.log(1, {"a": 1.0})
    [service] = [child for child in psutil.Process().children() if "wandb-core" in " ".join(child.cmdline())]
    service.kill()
    until(lambda: trackers.log(2, {"a": 1.0}) or not trackers.active, 10)  # the broken pipe is seen
    assert "tracker WandB failed" in messages[-1]
    trackers.close()
    drive(tmp_path / "next", ["wandb"], [1])  # the next run of this process has a service again
    assert len(history(tmp_path / "next", 1)[1]) == 1


# --- trackio ----------------------------------------------------------------------------------------------------------
def logs(folder):
    """Return name, rows and configuration of the run in a folder, from trackio's own storage."""
    from trackio.sqlite_storage import SQLiteStorage

    from operant.runs.trackers.wandb import use_folder

    use_folder(folder / "trackio")
    (run,) = SQLiteStorage.get_runs("operant")
    return run, SQLiteStorage.get_logs("operant", run), SQLiteStorage.get_run_config("operant", run)


def test_trackio_has_one_folder_per_run_and_continues_a_run(tmp_path, capfd):
    for name in ("one", "two"):  # a second run in one process has its own folder
        drive(tmp_path / name, ["trackio"], [1, 2, 3])
    drive(tmp_path / "one", ["trackio", "trackio"], [3, 4, 5])  # named twice, it is one
    run, written, config = logs(tmp_path / "one")
    assert run == "one" and config["kl"] == {"coef": 0.1}
    assert [(r["step"], r["reward/mean"]) for r in written if "reward/mean" in r] == [(i, i / 10) for i in range(1, 6)]
    first = {key: value for row in written if row["step"] == 2 for key, value in row.items()}
    assert first["blocks/gradient/block 0"] == 0.5 and "value/mean" not in first
    for name in ("histograms/reward", "gradients/h.0.weight"):
        assert first[name] == {"_type": "trackio.histogram", "values": [3, 0, 7], "bins": [-0.25, 0.0, 0.25, 0.5]}
    lines = first["replies"]["_value"]
    assert len(lines) == 32 and list(lines[0]) == list(base.COLUMNS)
    assert [*lines[1].values()] == [2, "why", NASTY, 0.5, 0.75, 2, "stop", None, None]
    assert [r["step"] for r in written if "replies" in r] == [2, 4]
    assert [r["step"] for r in logs(tmp_path / "two")[1] if "reward/mean" in r] == [1, 2, 3]
    assert capfd.readouterr() == ("", "")


def test_trackio_does_not_ask_the_hub_for_a_name(tmp_path, monkeypatch, listener):
    address, connections = listener
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_" + "a" * 30)
    drive(tmp_path, ["trackio"], [1])
    assert connections == [] and constants.HF_HUB_OFFLINE is False


def test_trackio_is_dropped_if_its_disk_fails(tmp_path, recwarn, capfd):
    messages = []
    trackers = Trackers(None, make_trackers(["trackio"], tmp_path, messages.append), messages.append)
    trackers.start({})
    database = tmp_path / "trackio" / "operant.db"
    for file in database.parent.glob("operant.db*"):
        file.unlink()
    database.mkdir()  # no file can be opened under this name any more
    until(lambda: trackers.log(1, {"a": 1.0}) or not trackers.active, 10)
    assert "tracker Trackio failed (OperantError: trackio could not write" in messages[-1]
    assert capfd.readouterr() == ("", "")


# --- whole runs -------------------------------------------------------------------------------------------------------
def test_trackers_change_no_number_and_print_nothing(tmp_path, capfd):
    """Nor does Ctrl-C in a terminal, which every process of the group hears, end what writes for them."""

    def reward(rollouts):
        for child in psutil.Process().children(recursive=True):
            if os.getpgid(child.pid) == os.getpgid(0):
                child.send_signal(signal.SIGINT)
        return count_a(rollouts)

    def run(name, **more):
        given = options(steps=2, quiet=True, samples_every=1, watch_every=1, **more)
        return train(model(), TASKS, reward, out=tmp_path / name, **given)

    plain, watched = run("plain"), run("watched", trackers="tensorboard,wandb,trackio")
    assert capfd.readouterr() == ("", "") and told(plain) == told(watched) and same(plain, watched)
    assert "left out" not in (watched.path / "log.txt").read_text(encoding="utf-8")
    lines, logged = told(watched), history(watched.path, len(watched.metrics))[1]
    assert [row["reward/mean"] for row in logged] == [line["reward/mean"] for line in lines]
    assert any(name.startswith("gradients/") for name in logged[-1]) and "histograms/reward" in logged[0]
    seen = [e.value for e in events(watched.path).Scalars("kl/per_reply")]
    assert seen == pytest.approx([line["kl/per_reply"] for line in lines], rel=1e-6)
    assert [r["reward/mean"] for r in logs(watched.path)[1] if "reward/mean" in r] == [x["reward/mean"] for x in lines]
