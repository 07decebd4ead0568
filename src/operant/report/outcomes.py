"""What runs came to: the numbers of each and of each group, and the same in words.

final = finals(group, held_out=True)     # {"reward": Interval(18.1, 0.4, 3), "kl": ..., "empty": ..., "top_word": ...}
brief("runs/letters")                    # "reward 7.52 -> 18.1 on held-out tasks, KL 8.3"
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from operant.report.downsample import short
from operant.report.runs import SEED, Group, Told, read_run, spoken
from operant.report.summary import Interval, interval

FINALS = ("reward", "kl", "empty", "top_word")
Finals = Mapping[str, Interval | None]

# --- numbers ----------------------------------------------------------------------------------------------------------


def finals(group: Group, held_out: bool) -> Finals:
    """Means over the runs of a group, from the held-out tasks or from the last steps."""
    return {name: interval([run.final(name, held_out) for run in group.runs]) for name in FINALS}


def run_row(run: Told, group: int, held_out: bool, base: str | Path) -> dict[str, Any]:
    """One run, for a table. base: the folder that the link to its report starts from."""
    report = run.folder / "report.html"
    return {
        "name": run.name,
        "group": group,
        "seed": run.config.get(SEED),
        "steps": [run.history.step, run.config.get("steps")],
        "before": short(run.before),
        "word": run.held_out.get("word"),
        "findings": [{"name": f.name, "level": f.level, "message": f.message} for f in run.findings],
        "report": Path(os.path.relpath(report, base)).as_posix() if report.is_file() else None,
    } | {name: short(run.final(name, held_out)) for name in FINALS}


def group_row(group: Group, final: Finals) -> dict[str, Any]:
    """One group, for a table."""
    before = interval([run.before for run in group.runs])
    return {
        "label": group.label,
        "values": {name: spoken(value) for name, value in group.values.items()},
        "number": _only_number(group),
        "n": len(group.runs),
        "final": {name: _told(found) for name, found in {"before": before, **final}.items()},
        "findings": _named(group),
    }


def _only_number(group: Group) -> float | None:
    """Of groups that differ in one number: it orders their colours."""
    values = list(group.values.values())
    known = len(values) == 1 and isinstance(values[0], (int, float)) and not isinstance(values[0], bool)
    return float(values[0]) if known else None


def _told(found: Interval | None) -> dict[str, Any] | None:
    return None if found is None else {"mean": short(found.mean), "half": short(found.half), "n": found.n}


def _named(group: Group) -> list[dict[str, Any]]:
    """Finding names of a group, and in how many of its runs."""
    counts: dict[tuple[str, str], list[str]] = {}
    for run in group.runs:
        for finding in run.findings:
            counts.setdefault((finding.name, finding.level), []).append(finding.message)
    order = {"problem": 0, "warning": 1, "note": 2}
    found = sorted(counts.items(), key=lambda item: (order[item[0][1]], -len(item[1])))
    return [{"name": name, "level": level, "runs": len(said), "message": said[0]} for (name, level), said in found]


# --- in words ---------------------------------------------------------------------------------------------------------


def sentence(groups: Sequence[Group], ends: Sequence[Finals], held_out: bool) -> str:
    """Which setting got the highest reward, and which of those that are sane."""
    where = "on held-out tasks" if held_out else "over the last steps"
    known = [(found.mean, i) for i, final in enumerate(ends) if (found := final["reward"])]
    if not known:
        return "No run has finished a step yet."
    best, problems = max(known)[1], [[f["name"] for f in _named(g) if f["level"] == "problem"] for g in groups]
    said = f"The highest reward {where} is {_one(best, groups, ends)}"
    if problems[best]:
        said += f", but the diagnosis calls it {' and '.join(problems[best][:2]).replace('_', ' ')}"
        sane = [(mean, i) for mean, i in known if not problems[i]]
        said += f". Without a problem: {_one(max(sane)[1], groups, ends)}" if sane else ", and no setting is without"
    return said + "."


def _one(place: int, groups: Sequence[Group], ends: Sequence[Finals]) -> str:
    kl = ends[place]["kl"]
    at = f" at a KL of {_plus_minus(kl)} nats" if kl else ""
    return f"{_plus_minus(ends[place]['reward'])}, with {groups[place].label}{at}"


def _plus_minus(found: Interval | None, percent: bool = False) -> str:
    if found is None:
        return "–"
    scale, unit = (100, " %") if percent else (1, "")
    half = "" if found.half is None or percent else f" ± {found.half * scale:.3g}"
    return f"{found.mean * scale:.3g}{half}{unit}"


def table(data: Mapping[str, Any]) -> str:
    """The groups as lines of text: what differs, number of runs, reward, KL, empty replies, findings."""
    names = list(data["groups"][0]["values"])
    head = [*names, "runs", "before", "reward", "KL", "empty", "found"]
    lines = [[*(group["values"][n] for n in names), str(group["n"]), *_cells(group)] for group in data["groups"]]
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in [head, *lines])


def _cells(group: Mapping[str, Any]) -> list[str]:
    final = {k: Interval(**v) if v else None for k, v in group["final"].items()}
    found = ", ".join(f"{f['name']} ({f['runs']})" for f in group["findings"] if f["level"] != "note")
    numbers = [_plus_minus(final[name], name == "empty") for name in ("before", "reward", "kl", "empty")]
    return [*numbers, found or "nothing"]


def brief(folder: str | Path) -> str:
    """What a run came to, in a few words."""
    run = read_run(Path(folder))
    held_out = "reward" in run.held_out
    reward, kl = (run.final(name, held_out) for name in ("reward", "kl"))
    pair = [Interval(value, None, 1) if value is not None else None for value in (run.before, reward, kl)]
    said = f"reward {_plus_minus(pair[0])} -> {_plus_minus(pair[1])}{' on held-out tasks' if held_out else ''}"
    found = ", ".join(finding.name for finding in run.findings if finding.level != "note")
    return said + (f", KL {_plus_minus(pair[2])}" if pair[2] else "") + (f" ({found})" if found else "")
