"""Logs of other libraries, written by their own writers: planted faults are found, and what cannot be read is said."""

import json
import math
import random

import pytest
from cases import cases, slow
from processes import until

from operant import OperantError, diagnose
from operant.metrics.registry import METRICS, describe
from operant.tools.cli import main
from operant.tools.report.diagnosis import verdict
from operant.tools.report.diagnosis.foreign import LIBRARIES, audit_log
from operant.tools.report.diagnosis.history import FINDINGS
from operant.tools.report.diagnosis.logs import read_log

NAMES = {
    "grpo": "reward kl entropy clip_ratio/region_mean completions/mean_length grad_norm learning_rate",
    "verl": "critic/score/mean actor/kl_loss actor/entropy actor/pg_clipfrac response_length/mean actor/grad_norm"
    " actor/lr",
    "openrlhf": "reward kl entropy_loss ppo_clip_ratio response_length policy_loss actor_lr",
}
"""What a library logs: reward, KL a token, entropy, clip fraction, tokens of a reply, a norm, the learning rate."""
FAULTS = {
    "healthy": lambda s: {},
    "high_kl": lambda s: {1: 0.01 * 1.15**s},
    "entropy": lambda s: {2: 2 * 0.8**s},
    "clipping": lambda s: {3: 0.5},
    "flat": lambda s: {0: 0.3 + 0.01 * (-1) ** s},
    "not_finite": lambda s: {5: math.nan} if s > 30 else {},
}


def rows(library, fault, steps=40):
    """One mapping a step; a healthy run gains 0.4 of reward in noise of 0.02, and moves by 1 to 2 nats a reply."""
    noise, out = random.Random(0), []
    for step in range(1, steps + 1):
        gain, length = 0.3 + 0.4 * step / steps + noise.gauss(0, 0.02), 50 + noise.gauss(0, 1)
        numbers = [gain, 0.02 + 0.0005 * step, 2 - 0.01 * step, 0.05, length, 1.0, 1e-5]
        for place, value in FAULTS[fault](step).items():
            numbers[place] = value
        out.append(dict(zip(NAMES[library].split(), numbers, strict=True)))
    return out


def trainer_state(path, table):
    from transformers.trainer_callback import TrainerState

    state = TrainerState(log_history=[{**row, "epoch": s / 10, "step": s} for s, row in enumerate(table, 1)])
    state.save_to_json(str(path / "trainer_state.json"))
    return path


def verl_console(path, table):
    """`verl.utils.logger.aggregate_logger.concat_dict_to_str`, behind what Ray prints before a line."""
    told = [" - ".join(f"{name}:{value!r}" for name, value in row.items()) for row in table]
    lines = [f"(pid=7) step:{step} - {numbers}" for step, numbers in enumerate(told, 1)]
    (path / "train.log").write_text("\n".join(["Loading checkpoint shards: 100%", *lines]))
    return path / "train.log"


def openrlhf_console(path, table):
    lines = [f"2026-11-26 10:00:00 INFO ✨ Global step {s}: {row}" for s, row in enumerate(table, 1)]
    (path / "train.log").write_text("\n".join(lines))
    return path / "train.log"


@pytest.mark.parametrize("fault", FAULTS)
@cases(("grpo", trainer_state), ("verl", verl_console), ("openrlhf", openrlhf_console))
def test_a_planted_fault_is_found(library, write, fault, tmp_path, capsys):
    audit = audit_log(path := write(tmp_path, rows(library, fault)))
    findings, named = diagnose(audit.history), LIBRARIES[library]
    assert audit.title == named["title"] and audit.history.step == 40 and len(audit.understood) == 7
    assert [finding.name for finding in findings] == ([] if fault == "healthy" else [fault])
    assert ("nothing looks wrong" in verdict(audit.history, findings)) == (fault == "healthy")
    assert ("did not learn" in verdict(audit.history, findings)) == (fault == "flat")
    assert main(["diagnose", str(path)]) == 0
    printed = capsys.readouterr().out
    if findings:
        assert f"--optimizer.lr is {named['options']['optimizer.lr']}" in printed and findings[0].cause in printed
        assert "operant re" not in printed  # no remedy of operant's own runs
    assert "not checked" in printed and "critic (no value/explained_variance)" in printed


def wandb_offline(path, table, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(project="p", dir=str(path), mode="offline") as run:
        for step, row in enumerate(table, 1):
            run.log({f"train/{name}": x for name, x in row.items()} | {"train/global_step": step})
    until(lambda: len(read_log(path / "wandb")) >= len(table), 60)  # its service may write late
    return path / "wandb"


def tensorboard_events(path, table, monkeypatch):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(path)) as writer:
        for step, row in enumerate(table, 1):
            for name, x in row.items():
                writer.add_scalar(f"train/{name}", x, step)
        writer.add_text("sample", "text is no metric", 1)
    return path


def json_lines(path, table, monkeypatch):
    """verl's own file, whose last line is being written."""
    lines = [json.dumps({"step": s, "data": row, "id": "\u2028"}, ensure_ascii=False) for s, row in enumerate(table, 1)]
    (path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 41, "da')
    return path / "metrics.jsonl"


def table_of_w_and_b(path, table, monkeypatch):
    names = [*table[0]]
    head = ["Step", *(f"run - {name}{end}" for name in names for end in ("", "__MIN"))]
    body = [[s, *(cell for name in names for cell in (row[name], 0))] for s, row in enumerate(table, 1)]
    text = "\n".join(",".join(map(str, cells)) for cells in (head, *body))
    (path / "export.csv").write_text(text, encoding="utf-8-sig")  # a spreadsheet has been at it
    return path / "export.csv"


@cases(tensorboard_events, json_lines, table_of_w_and_b, slow(wandb_offline))
def test_every_writer_is_read_back(write, tmp_path, monkeypatch):
    table = rows("verl", "not_finite")
    for step, (row, found) in enumerate(zip(table, read_log(write(tmp_path, table, monkeypatch)), strict=True), 1):
        found = {name.removeprefix("train/"): x for name, x in found.items() if not name.startswith("_")}
        assert found == pytest.approx({"step": step, **row}, rel=1e-6, nan_ok=True)


def test_kl_of_a_reply_is_that_of_its_tokens_together(tmp_path):
    table = rows("grpo", "healthy")
    history = audit_log(trainer_state(tmp_path, table)).history
    expected = [row["kl"] * row["completions/mean_length"] for row in table]
    assert history.values("kl/per_reply") == pytest.approx(expected)
    without = [{name: x for name, x in row.items() if name != "completions/mean_length"} for row in table]
    fallen = [row | {"entropy": 2.0 - 0.04 * i} for i, row in enumerate(without)]
    found = diagnose(audit_log(trainer_state(tmp_path, fallen)).history)
    assert "unmeasured" not in {finding.name for finding in found}  # it has the KL of a token


def test_a_tracker_of_transformers_has_its_names_with_slashes(tmp_path):
    head = "step,train/rewards/accuracies,train/rewards/margins,train/loss,eval/loss"
    (tmp_path / "log.csv").write_text(f"{head}\n1,0.7,0.1,0.5,0.6\n2,0.7,0.1,0.5,0.4\n3,0.7,0.1,0.5,0.5\n")
    audit = audit_log(tmp_path / "log.csv")
    assert [finding.name for finding in diagnose(audit.history)] == ["overfits"]
    assert audit.unchecked([])["evaluate/preference/accuracy"] == ["guesses"]  # no pairs are held out


@cases(
    ("nothing.json", None, "there is no file"),
    ("half.json", b'{"log_history": [{"step"', "not valid JSON"),
    ("other.json", b'{"loss": 1}', "no log_history"),
    ("some.jsonl", b'{"loss": 1\n{"loss": 2}', "line 1: invalid JSON"),
    ("list.jsonl", b"[1]\n", "line 1 is"),
    ("words.log", b"nothing to see\n", "no metrics that can be read"),
    ("names.csv", b"step,apples\n1,2\n", "none of its 1 names is a metric of operant.*apples"),
    ("two.csv", b"Step,a - loss,b - loss\n1,2,3\n", "several columns of loss"),
    ("picture.bin", b"\x89PNG\0\0\0", "no text"),
    ("run.wandb", b":W&B", "no metrics"),
    ("other.wandb", b"RIFF0000", "does not begin as a file of W&B"),
    ("odd.wandb", b":W&B\x1e\xbe\0" + b"\0\0\0\0\x03\0\x01\xff\xff\xff", "broken at byte"),
    ("events.out.tfevents.1", b"\0" * 100, "zeros alone"),
)
def test_a_broken_log_is_a_sentence(name, data, why, tmp_path, capsys):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(OperantError, match=why) as raised:
        audit_log(tmp_path / name)
    assert name in str(raised.value)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").touch()
    with pytest.raises(OperantError, match="new has logged no step yet"):
        audit_log(tmp_path / "new")
    assert main(["diagnose", str(tmp_path / name)]) != 0 and "Traceback" not in capsys.readouterr().err


def test_the_names_are_metrics_and_those_of_trl_are_the_registrys():
    named = {ours for library in LIBRARIES.values() for ours in library["names"].values()}
    needed = {one for entry in FINDINGS.values() for need in entry.get("needs", ()) for one in need.split("|")}
    assert [name for name in named | needed if describe(name) is None] == []
    old = {theirs: m.name for m in METRICS.values() for theirs in m.old.split(", ") if "(" not in theirs}
    differ = {name for name, ours in LIBRARIES["ppo"]["names"].items() if old.get(name, ours) != ours}
    assert differ == {"objective/scores"}  # unscaled in the second PPOTrainer, where it is all there is
