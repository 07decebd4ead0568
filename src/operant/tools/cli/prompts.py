"""`operant prompt`: show what a run of prompts has found, search without training, try prompts with other models."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from operant.apps.prompts.baselines import MANUAL, Classification, Vocabulary, chosen, compare
from operant.apps.prompts.examples import Examples, examples_of
from operant.apps.prompts.task_models import TransformerTaskModel, task_model
from operant.apps.prompts.templates import PromptTemplate, set_named
from operant.data import load_tasks
from operant.data.sources import held_out_of
from operant.runs.folder import read_config
from operant.runs.named_parts import form
from operant.runs.trackers.console import emit, emit_json
from operant.storage import atomic_io
from operant.tools.cli.arguments import Options, counted, new_file, refuse, taken
from operant.tools.report import prompts as kept
from operant.tools.report.summary import aligned
from operant.types import OperantError, require

WHAT = "show RUN, search --tasks FOLDER --task-model MODEL, or transfer RUN --task-model MODEL"


def prompt(words: Sequence[str], options: Options) -> int:
    """`operant prompt show runs/prompt`, `operant prompt search ...`, `operant prompt transfer ...`."""
    commands = {"show": show, "search": search, "transfer": transfer}
    require(words and words[0] in commands, f"{' '.join(['operant prompt', *words])}: say what to do: {WHAT}")
    return commands[words[0]](words[1:], options)


def show(words: Sequence[str], options: Options) -> int:
    """Print the best prompt of a run, ready to paste, and the table on standard error."""
    everything, found = bool(options.pop("json", False)), _found(words, options, "show")
    if everything:
        emit_json(found, indent=1)
        return 0
    emit("\n".join(kept.lines(found)), sys.stderr)
    best = found["prompts"][0]["text"]
    print(f"\nin its template, {found['template']!r}:", file=sys.stderr)
    emit(PromptTemplate(found["template"]).text.replace("{prompt}", best))
    return 0


def search(words: Sequence[str], options: Options) -> int:
    """Compare prompts that no policy has written: none, manual ones, searches at equal calls, examples, a head."""
    require(not words, f"operant prompt search takes options alone: leave {' '.join(words)!r} out")
    names = options.pop("baselines", None)
    own: dict[str, Any] = {"calls": taken(options, "calls", 10_000), "length": taken(options, "length", 5)}
    own |= {"seeds": range(taken(options, "seeds", 1)), "prompts": tuple(options.pop("manual", None) or MANUAL)}
    out, source = new_file("out", options.pop("out", None)), options.pop("vocabulary", None)
    setting = _setting(options)
    if source is not None:
        model = task_model(source)
        if not isinstance(model, TransformerTaskModel):
            other = "name a model, as in --vocabulary ./gpt2"
            raise OperantError(f"--vocabulary {source}: a function has no tokens: {other}")
        own["vocabulary"] = Vocabulary(model.tokenizer)
    rows = compare(setting, None if names is None else names.split(","), **own)
    cells = [("prompt", "from", "seed", "calls", f"train ({len(setting.train)})", f"held-out ({len(setting.test)})")]
    for row in rows:
        written, name, *rest = kept.row_of(row)
        cells.append((written, name, str(row.seed), *rest))
    emit("\n".join(aligned(cells)))
    if out is not None:
        atomic_io.write(out, json.dumps([vars(row) for row in rows], ensure_ascii=False, indent=1))
    return 0


def transfer(words: Sequence[str], options: Options) -> int:
    """Measure the best prompts of a run with other task models; the run's `prompts.json` keeps what comes out."""
    names, count = options.pop("task_model", None), counted(options, "best", 3)
    held_out, device, given = (options.pop(name, None) for name in ("tasks", "device", "template"))
    require(names is not None, "operant prompt transfer needs the models to try: --task-model ./gpt2,./roberta")
    found, config = _found(words, options, "transfer"), read_config(Path(words[0]))
    train, test = _examples(str(config["tasks"])), _examples(held_out or str(config.get("evaluate") or config["tasks"]))
    known, rows = {"measure": found["measure"], "calibrate": found["calibrate"]}, list[dict[str, Any]]()
    for name in names.split(","):
        model = task_model(name, None, device)
        own = found["template"] if name == found["task_model"] else None
        template = PromptTemplate(given or own) if given or own else model.template_for(train.name)
        setting = Classification(model, template, tuple(found["words"]), train, test, **known)
        for text in ["", *(one["text"] for one in found["prompts"][:count])]:
            of = {"task_model": name, "template": template.text, "prompt": text}
            rows.append(of | {"test": chosen(setting, "", text, 0).test})
    again = {(row["task_model"], row["prompt"]) for row in rows}
    old = [row for row in found.get("transfer", ()) if (row["task_model"], row["prompt"]) not in again]
    found["transfer"] = old + rows
    atomic_io.write(Path(words[0]) / kept.FILE, json.dumps(found, ensure_ascii=False, indent=1))
    table = [("prompt", "task model", "template", f"held-out ({len(test)})")]
    table += [(repr(row["prompt"]), row["task_model"], row["template"], f"{row['test']:.3f}") for row in rows]
    emit("\n".join(aligned(table)))
    return 0


def _found(words: Sequence[str], options: Mapping[str, object], command: str) -> dict[str, Any]:
    """What the one run among the words has found."""
    require(len(words) == 1, f"operant prompt {command} takes one run, as in operant prompt {command} runs/prompt")
    refuse(options, options, f": operant prompt {command} has no such option")
    found = kept.read(Path(words[0]))
    if found is None:
        read_config(words[0])  # refuses what is no run
        lacks = f"{words[0]} has no {kept.FILE}, which a complete run with one prompt for all texts writes"
        how = f"(operant train --resume {words[0]}); with form.conditioned there is none"
        raise OperantError(f"{lacks}: go on with one that was stopped {how}")
    return found


def _examples(source: str) -> Examples:
    return examples_of(load_tasks(source, form=form("prompt", {}))[0])


def _setting(options: Options) -> Classification:
    """The task model and texts that the options name."""
    source, name = options.pop("tasks", None), options.pop("task_model", None)
    require(None not in (source, name), "operant prompt search needs --tasks FOLDER and --task-model MODEL")
    held_out = options.pop("evaluate", None) or held_out_of(source)
    known = {key: options.pop(key) for key in ("measure", "calibrate") if key in options}
    words, template = options.pop("words", None), options.pop("template", None)
    model = task_model(name, None, options.pop("device", None))
    refuse(options, options, ": operant prompt search has no such option")
    train = _examples(source)
    published = set_named(train.name)
    chosen_words = tuple(words.split(",")) if words else published.words if published else ()
    require(chosen_words, f"{source!r} is no published set: name the words of its classes, --words terrible,great")
    test = train if held_out is None else _examples(held_out)
    shape = model.template_for(train.name) if template is None else PromptTemplate(template)
    return Classification(model, shape, chosen_words, train, test, **known)
