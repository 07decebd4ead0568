"""Selects what the page of a run shows of its prompts: those found in the end, and those of every step.

`found`: rows of prompts and baselines, from `prompts.json`; None before the run has ended. `steps`: number, best and
mean score, and best text of each. `tokens`: the most frequent ones of the first steps and of the last ones.
"""

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from operant.apps.prompts.baselines import Baseline
from operant.apps.prompts.prompt_reward import PARTS
from operant.apps.prompts.templates import PromptTemplate
from operant.tools.report import parquet, prompts
from operant.tools.report.downsample import short
from operant.tools.report.html import spread
from operant.tools.report.replies import Reader

STEPS, TEXT, TOKENS = 500, 400, 16
"""Most steps that are read, characters of a prompt in the chart, and tokens in the table."""
PART_OF_STEPS = 5
"""The first steps are the first fifth of them, and the last ones the last fifth."""
_PARTS_OF_PROMPTS = ({*PARTS}, {"content", "style", "single"})
"""Parts of the scores by which the replies of a run are known to be prompts: for classes, and for rewriting."""


class Written(NamedTuple):
    """The prompts of a step: the best score with its text, the mean score, and how often each token was written."""

    best: float | None
    text: str
    mean: float | None
    tokens: Counter[str]


def embedded(folder: str | Path) -> dict[str, object] | None:
    """Collect the prompts of a run; None where its replies are no prompts.

    Raises: OperantError for a damaged `prompts.json`.
    """
    folder, read = Path(folder), Reader()
    paths, found = parquet.steps(folder / "rollouts"), prompts.read(folder)
    columns = (
        {name.removeprefix("reward/") for name in read(parquet.names, paths[max(paths)]) or ()} if paths else set()
    )
    if not any(parts <= columns for parts in _PARTS_OF_PROMPTS):
        return None if found is None else {"found": outcome(found), "steps": None, "tokens": None}
    known = {step: read(written, paths[step], parquet.stamp(paths[step])) for step in spread(list(paths), STEPS)}
    steps = {step: one for step, one in known.items() if one is not None}
    return {
        "found": found and outcome(found),
        "steps": {
            "step": list(steps),
            "of": len(paths),
            "best": [short(one.best) for one in steps.values()],
            "mean": [short(one.mean) for one in steps.values()],
            "text": [one.text[:TEXT] + "…" * (len(one.text) > TEXT) for one in steps.values()],
        },
        "tokens": frequencies(steps),
    }


@lru_cache(maxsize=2 * STEPS)
def written(path: Path, stamp: parquet.Stamp | None) -> Written:
    """Read the prompts of a step, once for each `stamp` of its file. Raises as `parquet.lines`."""
    table = parquet.lines(path)
    replies, scores = table["reply"].to_pylist(), table["reward"].to_pylist()
    scored = [(score, reply or "") for score, reply in zip(scores, replies, strict=True) if score is not None]
    best, text = max(scored, key=lambda pair: pair[0], default=(None, ""))
    mean = sum(score for score, _ in scored) / len(scored) if scored else None
    every = parquet.tokens(path, range(table.num_rows))
    return Written(best, text, mean, Counter(token for row in every for token in row["tokens"] or ()))


def frequencies(steps: Mapping[int, Written]) -> dict[str, object] | None:
    """Compare the tokens of the first steps with those of the last ones; None for a single step.

    `first`, `last`: the steps, and how many different tokens they wrote. `rows`: [token, its share of the first ones,
    of the last ones], the largest share first.
    """
    count = max(1, len(steps) // PART_OF_STEPS)
    if len(steps) < 2:
        return None
    names, sides = list(steps), [list(steps.values())[:count], list(steps.values())[-count:]]
    sums = [sum((one.tokens for one in side), Counter[str]()) for side in sides]
    shares = {token: [side[token] / (side.total() or 1) for side in sums] for token in sums[0] | sums[1]}
    rows = sorted(shares.items(), key=lambda pair: (-max(pair[1]), pair[0]))[:TOKENS]
    ends = [(names[0], names[count - 1]), (names[-count], names[-1])]
    return {
        **{
            name: {"from": low, "to": high, "different": len(side)}
            for name, (low, high), side in zip(("first", "last"), ends, sums, strict=True)
        },
        "rows": [[token, *map(short, pair)] for token, pair in rows],
    }


def outcome(found: Mapping[str, Any]) -> Mapping[str, object]:
    """Return what `prompts.json` holds with one list of `rows`: prompts, then baselines, each with what to paste."""
    template, rows = PromptTemplate(found["template"]), list[dict[str, object]]()
    for one in found["prompts"]:
        step = one["step"]  # weights after step n write the replies of step n + 1
        when = f"after step {step}" if one["source"] == "greedy" else f"step {step + 1}"
        rows.append(
            {
                "from": f"{one['source']}, {when}",
                **{name: one[name] for name in ("text", "train", "test", "confusion")},
                "score": short(one["score"]),
                "calls": found["calls"],
                "paste": template.render(one["text"], "{sentence}", "{mask}"),
            }
        )
    for row in (Baseline(**row) for row in found["baselines"]):
        lead = template.behind(row.detail.get("examples", "") if row.name == "in-context" else "")
        rows.append(
            {
                "from": prompts.name_of(row),
                "baseline": True,
                **{"text": row.prompt, "train": row.train, "test": row.test, "score": short(row.score)},
                "calls": row.calls,
                # What answers by a trained head is no text to paste.
                "paste": None if row.name == "head" else lead.render(row.prompt, "{sentence}", "{mask}"),
            }
        )
    names = ("task_model", "template", "words", "set", "texts", "measure", "calibrate", "length", "calls", "transfer")
    return {**{name: found[name] for name in names if name in found}, "rows": rows}
