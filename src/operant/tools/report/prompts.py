"""What a run that writes prompts has found: `prompts.json` in its folder, for `operant prompt show` and the page.

`task_model`, `template`, `words`, `set`, `measure`, `calibrate`, `length`, `calls` of training and last choice; then
`prompts`    the best ones of training, measured again on all training texts, and the final greedy one: text, ids,
             source, step, train and test accuracy, score, and confusion [labels][answers] on the held-out texts
`baselines`  no prompt, a manual one, and random search at as many calls as training took
`transfer`   only where it was measured: task_model, prompt and test accuracy of each pair

The page of a run (`embedded`) shows the rows of prompts and baselines (`found`), of each step its best and mean score
and best text (`steps`), and the most frequent tokens of the first steps and of the last ones (`tokens`).
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from operant.apps.prompts.baselines import Baseline, Classification, Vocabulary, compare
from operant.apps.prompts.examples import examples_of
from operant.apps.prompts.measures import accuracy
from operant.apps.prompts.prompt_reward import PARTS, PromptReward
from operant.apps.prompts.templates import PromptTemplate
from operant.rewards import parts_of
from operant.runs.run import Observer, Run
from operant.sampling import Sampling
from operant.storage import atomic_io
from operant.tools.report import parquet
from operant.tools.report.diagnosis.history import read_json
from operant.tools.report.downsample import short
from operant.tools.report.html import spread
from operant.tools.report.replies import Reader
from operant.tools.report.summary import aligned
from operant.types import OperantError

FILE = "prompts.json"
SOURCES = {"greedy": "likeliest of the policy"}
"""How `lines` calls a source: a baseline is called greedy, too."""
MEASURED = 10
"""Best prompts of training that are measured again."""


class PromptsObserver(Observer):
    """At the end of a run whose replies are prompts for one set of texts, measures the best ones beside baselines."""

    name = "prompts"

    def at_end(self, run: Run) -> None:
        rewards: list[PromptReward] = parts_of(run.parts.reward, PromptReward)
        if run.interrupted or len(rewards) != 1 or len(run.parts.tasks) != 1 or not rewards[0].best:
            return
        found = summary(run, rewards[0])
        atomic_io.write(run.path / FILE, json.dumps(found, ensure_ascii=False, indent=1))
        for line in lines(found):
            run.folder.log_message(line)


def summary(run: Run, reward: PromptReward) -> dict[str, object]:
    """What `prompts.json` holds. Searches get as many calls of the task model as training and its last choice."""
    train = examples_of(run.parts.tasks[0])
    held_out = examples_of(run.parts.held_out[0]) if run.parts.held_out else train
    template, words = reward.setting(train)
    known = {"measure": reward.measure, "calibrate": reward.calibrate}
    setting = Classification(reward.model, template, words, train, held_out, **known)
    found = [measured(setting, one.text, one.ids, "best in training", one.step) for one in reward.best[:MEASURED]]
    greedy = run.learner.play(run.parts.tasks, sampling=greedily(run), stream="evaluate")[0]
    found.append(measured(setting, greedy.reply, greedy.ids, "greedy", len(run.metrics)))
    found.sort(key=lambda prompt: -prompt["score"])
    calls, length = reward.calls + setting.calls_for(len(found)), run.learner.sampling.max_tokens
    vocabulary = Vocabulary(run.policy.tokenizer)
    compared = list[Baseline]()
    for name in reward.compare:
        try:
            compared += compare(setting, [name], calls=calls, length=length, vocabulary=vocabulary)
        except OperantError as error:  # examples in the prompt may be too long: the run's own prompts are kept
            note = f"the baseline {name!r} is left out: {error}"
            run.folder.log_message(note)
            run.trackers.note(note)
    texts = {"train": len(train), "test": len(held_out), "of": held_out.name, "held_out": bool(run.parts.held_out)}
    return {
        "task_model": reward.model.name,
        "template": template.text,
        "words": list(words),
        "set": train.name,
        "texts": texts,
        **known,
        "length": length,
        "calls": calls,
        "prompts": found,
        "baselines": [asdict(row) for row in compared],
    }


def greedily(run: Run) -> Sampling:
    return replace(run.learner.sampling, top_k=1, truncation="stored")


def measured(setting: Classification, text: str, ids: Sequence[int], source: str, step: int) -> dict[str, Any]:
    on_train = setting.logprobs([text], setting.train)
    offset = setting.bias([text], on_train)
    answers = setting.logprobs([text], setting.test) - offset
    labels = torch.tensor(setting.test.labels)
    confusion = torch.zeros(len(setting.words), len(setting.words), dtype=torch.long)
    confusion.index_put_((labels, answers[0].argmax(-1)), torch.ones_like(labels), accumulate=True)
    return {
        "text": text,
        "ids": list(ids),
        "source": source,
        "step": step,
        "score": float(setting.measured(on_train - offset, setting.train)),
        "train": float(accuracy(on_train - offset, torch.tensor(setting.train.labels)).mean()),
        "test": float(accuracy(answers, labels).mean()),
        "confusion": confusion.tolist(),
    }


def read(folder: Path) -> dict[str, Any] | None:
    return read_json(folder / FILE) or None


def lines(found: dict[str, Any]) -> list[str]:
    texts = found["texts"]
    rows = [("prompt", "from", "calls", f"train ({texts['train']})", f"held-out ({texts['test']})")]
    best, calls = found["prompts"][0], f"{found['calls']:,}"
    greedy = next(one for one in found["prompts"] if one["source"] == "greedy")
    for one in [best, *([greedy] if greedy is not best else [])]:
        origin = SOURCES.get(one["source"], one["source"])
        rows.append((repr(one["text"]), origin, calls, f"{one['train']:.3f}", f"{one['test']:.3f}"))
    rows += [row_of(Baseline(**row)) for row in found["baselines"]]
    how = f"prompts for {found['task_model']}, chosen by {found['measure']} on {texts['train']} texts of {found['set']}"
    return [f"{how}; held-out: {texts['of']}", *aligned(rows)]


def row_of(row: Baseline) -> tuple[str, str, str, str, str]:
    return repr(row.prompt), name_of(row), f"{row.calls:,}", f"{row.train:.3f}", f"{row.test:.3f}"


def name_of(row: Baseline) -> str:
    return row.name if row.calibrate == "none" else f"{row.name}, {row.calibrate} calibration"


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
    folder, reader = Path(folder), Reader()
    paths, found = parquet.steps(folder / "rollouts"), read(folder)
    names = (reader(parquet.names, paths[max(paths)]) or ()) if paths else ()
    columns = {name.removeprefix("reward/") for name in names}
    if not any(parts <= columns for parts in _PARTS_OF_PROMPTS):
        return None if found is None else {"found": outcome(found), "steps": None, "tokens": None}
    known = {step: reader(written, paths[step], parquet.stamp(paths[step])) for step in spread(list(paths), STEPS)}
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
        known = {name: one[name] for name in ("text", "train", "test", "confusion")}
        known |= {"score": short(one["score"]), "calls": found["calls"]}
        paste = template.render(one["text"], "{sentence}", "{mask}")
        rows.append({"from": f"{one['source']}, {when}", **known, "paste": paste})
    for row in (Baseline(**row) for row in found["baselines"]):
        lead = template.behind(row.detail.get("examples", "") if row.name == "in-context" else "")
        known = {"text": row.prompt, "train": row.train, "test": row.test}
        known |= {"score": short(row.score), "calls": row.calls}
        # What answers by a trained head is no text to paste.
        paste = None if row.name == "head" else lead.render(row.prompt, "{sentence}", "{mask}")
        rows.append({"from": name_of(row), "baseline": True, **known, "paste": paste})
    names = ("task_model", "template", "words", "set", "texts", "measure", "calibrate", "length", "calls", "transfer")
    return {**{name: found[name] for name in names if name in found}, "rows": rows}
