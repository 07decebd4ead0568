"""Summarises runs: a mean and a 95 % interval over the seeds of each group, as numbers, tables and sentences.

interval([7.1, 7.4, 6.9])                # Interval(mean=7.13, half=0.625, n=3)
final = finals(group, held_out=True)     # {"reward": Interval(18.1, 0.4, 3), "kl": ..., "empty": ..., "top_word": ...}
brief("runs/letters")                    # "reward 7.52 -> 18.1 on held-out tasks, KL 8.3"

The interval is that of Student's t: one run has none, and that of two runs is wide.
"""

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from operant.diagnosis.intervals import t_quantile
from operant.report.downsample import short
from operant.report.runs import SEED, Group, RunRecord, as_text, read_run

FINALS = ("reward", "kl", "empty", "top_word")


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its confidence interval, which is None where there is only one value."""

    mean: float
    half: float | None
    n: int


Finals = Mapping[str, Interval | None]

# --- intervals --------------------------------------------------------------------------------------------------------


def interval(values: Sequence[float | None]) -> Interval | None:
    """Compute the interval of the finite values; None where there are none."""
    known = [float(v) for v in values if v is not None and math.isfinite(v)]
    if not known:
        return None
    n = len(known)
    half = t_quantile(n - 1) * statistics.stdev(known) / math.sqrt(n) if n > 1 else None
    return Interval(statistics.fmean(known), half, n)


# --- results of runs and groups ---------------------------------------------------------------------------------------


def finals(group: Group, held_out: bool) -> Finals:
    """Summarise a group's results after training, from the held-out tasks or from the last steps."""
    return {name: interval([run.final(name, held_out) for run in group.runs]) for name in FINALS}


def run_row(run: RunRecord, group: int, held_out: bool, base: str | Path) -> dict[str, Any]:
    """Return one run as a row of a table. base: the folder that the link to its report is relative to."""
    report = run.folder / "report.html"
    return {
        "name": run.name,
        "group": group,
        "seed": run.config.get(SEED),
        "steps": [run.history.step, run.config.get("steps")],
        "before": short(run.before),
        "findings": [{"name": f.name, "level": f.level, "message": f.message} for f in run.findings],
        "report": Path(os.path.relpath(report, base)).as_posix() if report.is_file() else None,
    } | {name: short(run.final(name, held_out)) for name in FINALS}


def group_row(group: Group, final: Finals) -> dict[str, Any]:
    """Return one group as a row of a table; `number`, the value of its only option if numeric, orders the colours."""
    intervals = {"before": interval([run.before for run in group.runs]), **final}
    values = list(group.values.values())
    numeric = len(values) == 1 and isinstance(values[0], (int, float)) and not isinstance(values[0], bool)
    return {
        "label": group.label,
        "values": {name: as_text(value) for name, value in group.values.items()},
        "number": float(values[0]) if numeric else None,
        "n": len(group.runs),
        "final": {
            name: found and {"mean": short(found.mean), "half": short(found.half), "n": found.n}
            for name, found in intervals.items()
        },
        "findings": _counted_findings(group),
    }


def _counted_findings(group: Group) -> list[dict[str, Any]]:
    """List the findings of a group, worst first, with the number of its runs that have them."""
    messages: dict[tuple[str, str], list[str]] = {}
    for run in group.runs:
        for finding in run.findings:
            messages.setdefault((finding.name, finding.level), []).append(finding.message)
    order = ("problem", "warning", "note")
    found = sorted(messages.items(), key=lambda item: (order.index(item[0][1]), -len(item[1])))
    return [{"name": name, "level": level, "runs": len(each), "message": each[0]} for (name, level), each in found]


# --- sentences --------------------------------------------------------------------------------------------------------


def sentence(groups: Sequence[Group], ends: Sequence[Finals], held_out: bool) -> str:
    """Name the setting with the highest reward and, if the diagnosis found problems in it, the best without any."""
    known = [(found.mean, i) for i, final in enumerate(ends) if (found := final["reward"])]
    if not known:
        return "No run has finished a step yet."
    problems = [[f["name"] for f in _counted_findings(g) if f["level"] == "problem"] for g in groups]
    best = max(known)[1]
    where = "on held-out tasks" if held_out else "over the last steps"
    text = f"The highest reward {where} is {_reward_and_kl(groups[best], ends[best])}"
    if len(groups) == 1:
        text = f"The reward {where} is {_plus_minus(ends[0]['reward'])}{_at_kl(ends[0])}"
    if problems[best]:
        text += f", but the diagnosis reports {' and '.join(problems[best][:2]).replace('_', ' ')}"
        sound = [(mean, i) for mean, i in known if not problems[i]]
        if sound:
            best = max(sound)[1]
            text += f". The highest without problems is {_reward_and_kl(groups[best], ends[best])}"
        elif len(groups) > 1:
            text += "; every setting has problems"
    return text + "."


def _reward_and_kl(group: Group, final: Finals) -> str:
    return f"{_plus_minus(final['reward'])}, with {group.label}{_at_kl(final)}"


def _at_kl(final: Finals) -> str:
    return f" at a KL of {_plus_minus(final['kl'])} nats" if final["kl"] else ""


def _plus_minus(found: Interval | None, percent: bool = False) -> str:
    """Format `18.1 ± 0.4`, or `–` where unknown; percent: format a share, without its interval."""
    if found is None:
        return "–"
    if percent:
        return f"{found.mean * 100:.3g} %"
    return f"{found.mean:.3g}" + ("" if found.half is None else f" ± {found.half:.3g}")


def table(data: Mapping[str, Any]) -> str:
    """Format the groups of a comparison as lines of text: differing options, number of runs, results, findings."""
    names = list(data["groups"][0]["values"])
    lines = [[*names, "runs", "before", "reward", "KL", "empty", "findings"]]
    for group in data["groups"]:
        final = {name: Interval(**found) if found else None for name, found in group["final"].items()}
        numbers = [_plus_minus(final[name], name == "empty") for name in ("before", "reward", "kl", "empty")]
        findings = ", ".join(f"{f['name']} ({f['runs']})" for f in group["findings"] if f["level"] != "note")
        values = [group["values"][name] for name in names]
        lines.append([*values, str(group["n"]), *numbers, findings or "none"])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def brief(folder: str | Path) -> str:
    """Summarise the result of a run in a few words."""
    run = read_run(Path(folder))
    held_out = "reward" in run.held_out
    before, reward, kl = map(interval, ([run.before], [run.final("reward", held_out)], [run.final("kl", held_out)]))
    text = f"reward {_plus_minus(before)} -> {_plus_minus(reward)}{' on held-out tasks' if held_out else ''}"
    findings = ", ".join(finding.name for finding in run.findings if finding.level != "note")
    return text + (f", KL {_plus_minus(kl)}" if kl else "") + (f" ({findings})" if findings else "")
