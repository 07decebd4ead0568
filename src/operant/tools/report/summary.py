"""Summarises runs: a mean and a 95 % interval over the seeds of each group, as numbers, tables and sentences.

    brief("runs/letters")                    # "reward 7.52 -> 18.1 and KL 8.3 on held-out tasks"

The interval is that of Student's t: one run has none, and that of two runs is wide.
"""

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from operant.metrics.games import numbers
from operant.tools.report.diagnosis.history import RECENT, counted
from operant.tools.report.diagnosis.intervals import t_quantile, wilson
from operant.tools.report.diagnosis.progress import EARLY, progress
from operant.tools.report.downsample import short
from operant.tools.report.runs import SEED, Group, RunRecord, as_text, read_run

_LISTED = 8
"""Most options that the console names as different."""


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its confidence interval, which is None where there is only one value."""

    mean: float
    half: float | None
    n: int


@dataclass(frozen=True)
class Result:
    """A number of several runs before and after training, and its change within each run; None where it is unknown."""

    before: Interval | None
    after: Interval | None
    change: Interval | None


def interval(values: Sequence[float | None]) -> Interval | None:
    known = [float(v) for v in values if v is not None and math.isfinite(v)]
    if not known:
        return None
    n = len(known)
    half = t_quantile(n - 1) * statistics.stdev(known) / math.sqrt(n) if n > 1 else None
    return Interval(statistics.fmean(known), half, n)


def results(runs: Sequence[RunRecord], held_out: bool) -> dict[str, Result]:
    """Summarise what runs reached on the held-out tasks, or else in the first step and the last ones, by name."""
    names = ["reward", "kl", "empty", "top_word"]
    if held_out:
        names = list(dict.fromkeys(name for run in runs for judged in run.held_out.values() for name in judged))
    found = {}
    for name in names:
        pairs = [[run.result(name, held_out, when) for when in ("before", "after")] for run in runs]
        changes = [after - before for before, after in pairs if before is not None and after is not None]
        found[name] = Result(*(interval(values) for values in (*zip(*pairs), changes)))
    return {name: result for name, result in found.items() if result.before or result.after}


def row(runs: Sequence[RunRecord]) -> dict[str, object]:
    """Return the results of runs as a row of a table, as JSON can hold it: `held_out` and `training`, by name."""
    return {
        where: {name: _plain(asdict(result)) for name, result in results(runs, where == "held_out").items()}
        for where in ("held_out", "training")
    }


def game_row(name: str, games: Sequence[Mapping[str, object]]) -> dict[str, str]:
    """Return the results of a player of text games as a row of a table, by column.

    games: records as in `metrics.games`. The interval of the share that was won is Wilson's.
    """
    each, n, won = [numbers(game) for game in games], len(games), sum(bool(game["won"]) for game in games)
    low, high = wilson(won / n, n)
    means = {key: interval([found[key] for found in each]) for key in ("score", "turns", "turns_to_win")}
    return {
        "player": name,
        "games": str(n),
        "won": f"{won} ({100 * won / n:.0f} %)",
        "95 %": f"{100 * low:.0f} to {100 * high:.0f} %",
    } | {key.replace("_", " "): _plus_minus(mean) for key, mean in means.items()}


def _plain(value: object) -> object:
    return {name: _plain(inner) for name, inner in value.items()} if isinstance(value, Mapping) else short(value)


def run_row(run: RunRecord, group: int, base: str | Path) -> dict[str, object]:
    """Return one run as a row of a table. base: the folder that the link to its report is relative to."""
    report = run.folder / "report.html"
    return {
        "name": run.name,
        "group": group,
        "seed": run.config.get(SEED),
        "steps": [run.history.step, run.config.get("steps")],
        "findings": [{"name": f.name, "level": f.level, "message": f.message} for f in run.findings],
        "collapsed": int(run.collapsed),
        "seconds": short(sum(run.history.values("time/step"))),
        "report": Path(os.path.relpath(report, base)).as_posix() if report.is_file() else None,
    } | row([run])


def group_row(group: Group) -> dict[str, object]:
    return {
        "name": group.name,
        "values": {name: as_text(value) for name, value in group.values.items()},
        "n": len(group.runs),
        "measure": group.runs[0].measure,
        "findings": _counted_findings(group),
        "collapsed": sum(run.collapsed for run in group.runs),
        "seconds": short(statistics.fmean(sum(run.history.values("time/step")) for run in group.runs)),
    } | row(group.runs)


class CountedFinding(TypedDict):
    """A finding and the number of runs that have it."""

    name: str
    level: str
    runs: int
    message: str


def _counted_findings(group: Group) -> list[CountedFinding]:
    """List the findings of a group, worst first, with the number of its runs that have them."""
    messages: dict[tuple[str, str], list[str]] = {}
    for run in group.runs:
        for finding in run.findings:
            messages.setdefault((finding.name, finding.level), []).append(finding.message)
    order = ("problem", "warning", "note")
    found = sorted(messages.items(), key=lambda item: (order.index(item[0][1]), -len(item[1])))
    return [{"name": name, "level": level, "runs": len(each), "message": each[0]} for (name, level), each in found]


def sentences(groups: Sequence[Group], held_out: bool) -> list[str]:
    """Say which group reached the highest reward, whether that is more than before training, and how sure that is.

    The first sentence is the headline. groups: with one reward. held_out: judge by the held-out tasks, else by the
    first step and the last ones.
    """
    found = [(group, results(group.runs, held_out)) for group in groups]
    known = [(group, own, own["reward"]) for group, own in found if "reward" in own and own["reward"].after]
    if not known:
        begun = any(run.history.metrics for group in groups for run in group.runs)
        return ["No run has a reward: compare their losses." if begun else "No run has finished a step yet."]
    longest = max(run.history.step for group, *_ in known for run in group.runs)
    where = "on held-out tasks" if held_out else f"over the last {counted(min(RECENT, longest), 'step')}"
    best = max(known, key=_height)
    lines = _comparison(best, known, where, "before training" if held_out else "in the first step")
    if longest < EARLY and not (held_out and best[0].runs[0].history.supervised):
        lines.insert(0, f"Too early to say ({longest} step{'s' * (longest != 1)}).")
    if troubles := _problems(best[0]):
        lines.append(f"Do not trust it: the diagnosis reports {' and '.join(troubles[:2]).replace('_', ' ')}.")
        sound = [one for one in known if not _problems(one[0])]
        if sound:
            group, own, reward = max(sound, key=_height)
            lines.append(f"The highest without problems is {_plus_minus(reward.after)}{_with(group, own)}.")
        elif len(known) > 1:
            lines.append("Every setting has problems.")
    return lines


_Known = tuple[Group, Mapping[str, Result], Result]


def _height(one: _Known) -> float:
    return one[2].after.mean if one[2].after else -math.inf


def _problems(group: Group) -> list[str]:
    return [f["name"] for f in _counted_findings(group) if f["level"] == "problem"]


def _comparison(best: _Known, known: Sequence[_Known], where: str, start: str) -> list[str]:
    group, own, reward = best
    change, alone, what = reward.change, len(known) == 1, group.runs[0].measure
    after = _plus_minus(reward.after)
    if change is None or reward.before is None:
        first = f"The {'' if alone else 'highest '}{what} {where} is {after}{_with(group, own)}"
    elif all(other.change and other.change.mean <= 0 for *_, other in known):
        none = "Not better" if alone else "No setting ended better"
        first = f"{none} than {start}: the {'' if alone else 'highest '}{what} {where} is {after}"
        first += f"{_with(group, own)}, and was {_plus_minus(reward.before)} {start}"
    else:
        first = f"The {'' if alone else 'highest '}{what} {where} is {after}{_with(group, own)}; "
        by = f"{change.mean:+.3g}" + ("" if change.half is None else f" ± {change.half:.2g}")
        first += f"{start} it was {_plus_minus(reward.before)} ({by}"
        # The highest of k settings has had k chances to look like a rise, so it is held to 1 - 5 % / k (Bonferroni).
        rise, freedom = abs(change.mean), max(change.n - 1, 1)
        wider = t_quantile(freedom, 1 - 0.05 / len(known)) / t_quantile(freedom)
        if change.half is not None and rise <= wider * change.half:
            first += f", which is within noise{f' for the highest of {len(known)}' if rise > change.half else ''}"
        first += ")"
    if reward.after.half is None:
        return [f"{first}.", "That is one run: another seed may end elsewhere."]
    ends = [(other, other[2].after) for other in known if other is not best]
    mean, reach = reward.after.mean, reward.after.half
    near = [other for other, end in ends if abs(end.mean - mean) <= (end.half or 0.0) + reach]
    if not near:
        return [f"{first}."]
    others = f"those of {len(near)} other settings" if len(near) > 1 else f"that of {near[0][0].name}"
    return [f"{first}.", f"Its interval overlaps {others}."]


def _with(group: Group, own: Mapping[str, Result]) -> str:
    kl = own["kl"].after if "kl" in own else None
    return f", with {group.name}" + (f", at a KL of {_plus_minus(kl)} nats" if kl else "")


def _plus_minus(found: Interval | None, percent: bool = False) -> str:
    """Format `18.1 ± 0.4`, or `–` where unknown; percent: format a share, without its interval."""
    if found is None:
        return "–"
    if percent:
        return f"{found.mean * 100:.3g} %"
    return f"{found.mean:.3g}" + ("" if found.half is None else f" ± {found.half:.2g}")


def table(data: Mapping[str, Any]) -> str:
    """Format a comparison as lines of text: a row for each group, the options that differ, and the verdicts.

    A row also has the runs' own metrics of the held-out tasks, after training.
    """
    measures = sorted({group["measure"] for group in data["groups"]})
    head = ["", "runs", "before", " or ".join(measures), "KL", "empty", *data["metrics"]]
    lines = [[*head, "collapsed", "seconds", "findings"]]
    for group in data["groups"]:
        where = group["held_out" if data["rewards"][group["reward"]]["held_out"] else "training"]
        ends = {
            (name, when): Interval(**found) if (found := where.get(name, {}).get(when)) else None
            for name in ("reward", "kl", "empty")
            for when in ("before", "after")
        }
        cells = [ends["reward", "before"], ends["reward", "after"], ends["kl", "after"]]
        findings = ", ".join(f"{f['name']} ({f['runs']})" for f in group["findings"] if f["level"] != "note")
        numbers = [*map(_plus_minus, cells), _plus_minus(ends["empty", "after"], percent=True)]
        own = [group["held_out"].get(name, {}).get("after") for name in data["metrics"]]
        numbers += [_plus_minus(Interval(**found) if found else None) for found in own]
        ended = [f"{group['collapsed']} of {group['n']}", f"{group['seconds']:.3g}"]
        lines.append([group["name"], str(group["n"]), *numbers, *ended, findings or "none"])
    text = "\n".join(aligned(lines))
    differ, more = ", ".join(data["options"][:_LISTED]), len(data["options"]) - _LISTED
    lines = [f"They differ in: {differ}{f' and {more} more options' if more > 0 else ''}."] if differ else []
    lines += [""] + [(f"{r['name']}: " if r["name"] else "") + " ".join(r["verdict"]) for r in data["rewards"]]
    return "\n".join([text, *lines, *data["notes"]])


def aligned(rows: Sequence[Sequence[str]] | Sequence[Mapping[str, str]]) -> list[str]:
    """Rows of equally many cells as lines, with each column as wide as its longest cell.

    Cells by the name of their column have these names above them.
    """
    cells = [[*row] for row in rows[:1] if isinstance(row, Mapping)]
    cells += [[*row.values()] if isinstance(row, Mapping) else [*row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def brief(folder: str | Path) -> str:
    run = read_run(Path(folder))
    held_out = "after" in run.held_out
    own = results([run], held_out)
    reward, kl = (own.get(name, Result(None, None, None)) for name in ("reward", "kl"))
    loss = progress(run.history) if run.history.supervised and reward.after is None else None
    text = loss.text if loss else f"{run.measure} {_plus_minus(reward.before)} -> {_plus_minus(reward.after)}"
    text += f" and KL {_plus_minus(kl.after)}" if kl.after else ""
    findings = ", ".join(finding.name for finding in run.findings if finding.level != "note")
    where = " on held-out tasks" if held_out else f" in the last {counted(min(RECENT, run.history.step), 'step')}"
    return text + ("" if loss else where) + (f" ({findings})" if findings else "")
