"""Pages and blocks that are made of what the code says: methods, faults by symptom, papers, memory, the gallery."""

import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from benchmarks.methods import METHODS as RUN_WITH
from torch import nn

from operant import algorithms
from operant.algorithms import ALGORITHMS, METHODS
from operant.metrics.registry import METRICS
from operant.options import defaults
from operant.runs.config import config_schema, recipes
from operant.tools.cli.parser import as_typed, sentences
from operant.tools.report.diagnosis.history import FINDINGS
from operant.training.optimizer import OptimizerOptions

DOCS = Path(__file__).parent
WRITTEN = [*sorted(DOCS.glob("*.md")), DOCS / "methods/ppo.md"]
"""Every page but those of methods, which are made of their files."""
GOLDEN = DOCS.parent / "tests/golden"
FAMILIES = {
    "With a critic": "ppo a2c trpo nlpo vapo",
    "Without a critic": "reinforce reinforce++ rloo opo",
    "Several replies to a prompt": "grpo dapo dr-grpo gspo cispo sapo dppo maxrl pass-at-k gigpo reinforce++-baseline",
    "Imitation": "sft rejection decision distill coderl",
    "From labels": "reward-model dpo online-dpo kto outcome-critic",
    "Q values": "ilql soft_q",
}
GROUPS = ("loss", "advantage", "teacher", "condition", "mask", "target", "replay")
"""The options that a method has of its own, or means in its own way."""
CURVES = {
    "policy-gradients": ("a2c trpo nlpo reinforce", "algorithms.md#five-methods-over-seeds-and-rates"),
    "recipes": ("grpo", "tasks.md#keyword"),
    "preference-frontier": ("reward-model dpo online-dpo kto rejection", "rlhf.md#what-a-given-number-of-labels-buys"),
}
"""Figure: the methods that it shows, and the page that has its numbers and the controls. PPO's is on its own page."""
TABLES = {
    "rloo": "algorithms.md#the-main-job-by-each-of-them",
    "coderl": "code.md#measured",
    "outcome-critic": "code.md#measured",
    "soft_q": "prompts.md#measured",
}
"""Where a method was measured without a figure."""
SUMS = "maths.md#which-method-needs-how-much"
"""The protocol and all rows of benchmarks/methods.py."""
ALSO = {
    "maxrl": "grpo",
    "reward-model": "dpo",
}
"""A method without a golden run: the one whose metrics it shares."""


def file_of(method: str) -> str:
    """`reinforce++` -> methods/reinforce-pp.md."""
    return f"methods/{METHODS[method].rpartition('.')[2].replace('_', '-')}.md"


def method_pages() -> dict[str, str]:
    """The page of every method but PPO, whose page is written by hand."""
    return {file_of(name): _method_page(name) for name in METHODS if name != "ppo"}


def titles() -> dict[str, tuple[str, str]]:
    """What each method is called, and its sentence: the first line of its file."""
    lines = {name: (inspect.getdoc(import_module(module)) or "").partition("\n")[0] for name, module in METHODS.items()}
    return {name: tuple(re.split(r": | (?=with)", line, maxsplit=1)) for name, line in lines.items()}  # type: ignore


def families() -> str:
    """The methods by family, each with its sentence and its page."""
    text, told = "", titles()
    assert sorted(" ".join(FAMILIES.values()).split()) == sorted(METHODS), "name every method in one family"
    for family, names in FAMILIES.items():
        text += f"\n**{family}**\n\n"
        for name in names.split():
            text += f"- [`{name}`]({file_of(name)}): {told[name][1].removesuffix('.')}\n"
    return text


def _method_page(name: str) -> str:
    row, (title, sentence) = ALGORITHMS[name], titles()[name]
    docstring = (inspect.getdoc(import_module(METHODS[name])) or "").partition("\n\n")[2]
    docstring = re.sub(r"\]\((?!https?:)", "](../", docstring)
    page = f"# {title}\n\n{sentence[0].upper()}{sentence[1:]}\n\n{_command(name, docstring)}\n{docstring}\n"
    page += _relatives(name)
    page += f"\n## Its own defaults\n\n{_defaults(name)}" if row.defaults else ""
    page += f"\n## Its options\n\n{options}" if (options := _options(name)) else ""
    page += f"\n## What to watch\n\n{to_watch(name)}"
    return page + (f"\n## Measured\n\n{measured}" if (measured := _measured(name)) else "")


def _measured(name: str) -> str:
    """The figures that show the method, its numbers on sums, and where others stand."""
    parts = []
    for figure, (shown, where) in CURVES.items():
        if name in shown.split():
            made = f"Made by `python -m benchmarks.{figure.replace('-', '_')}`; [numbers and controls](../{where})."
            parts.append(f"![measured curves](../figures/{figure}.svg)\n\n{made}\n")
    if on_sums(name):
        parts.append(f"![right sums over replies, by method](../figures/methods.svg)\n\n{on_sums(name)}")
    if name in TABLES:
        parts.append(f"[Numbers and controls](../{TABLES[name]}){' of another task' if parts else ''}.\n")
    found = _result("methods")
    if not parts and name in found["methods"]:
        parts.append(f"Not measured here yet. `{found['command']} --keep --only {name}` measures it on sums.\n")
    return "\n".join(parts)


def on_sums(name: str) -> str:
    """How many sums are right when the method's runs end, beside GRPO's and the control's."""
    found = _result("methods")
    rows = [row for row in found["rows"] if row["task"] == "arithmetic"]

    def end(method: str) -> str:
        own = [row["curve"][-1] for row in rows if row["method"] == method]
        return f"{median(last[3] for last in own):.2f} after {median(last[1] for last in own):,.0f} replies"

    seeds = [row["seed"] for row in rows if row["method"] == name]
    if not seeds:
        return ""
    changed = {option: x for option, x in RUN_WITH[name].items() if name != "sft" and option != "algorithm"}
    asked = "".join(f", with `{option}={as_typed(value)}`" for option, value in changed.items())
    step, most = ("one update", "75 s") if name == "sft" else ("eight updates", "60 steps")
    text = f"Of held-out sums {end('start').partition(' ')[0]} are right at the start. In steps of {step}{asked}, "
    text += f"runs end at {end(name)} (medians of {len(seeds)} seeds; a run ends at 0.60, or after {most})"
    text += f", those of `grpo` at {end('grpo')}" if name != "grpo" else ""
    text += f". The control, `grpo` with shuffled verdicts, ends at {end('grpo, shuffled').partition(' ')[0]}."
    return f"{text}\nMade by `{found['command']}`; [protocol and all methods](../{SUMS}).\n"


def _command(name: str, docstring: str) -> str:
    """How it is started, unless its own text begins with that."""
    own = [recipe for recipe, path in recipes().items() if _algorithm(path) == name]
    lines = [f"operant train {recipe}" for recipe in own if recipe not in STARTED_OTHERWISE]
    lines += [f"operant train sentiment --algorithm {name}"] * ("\noperant train" not in docstring)
    shown = "".join(f"{line}\n" for line in lines)
    presets = [preset for preset, options in algorithms.presets().items() if options.get("algorithm") == name]
    chosen = (
        f"Presets: {', '.join(f'`{preset}`' for preset in presets)} (`--preset {presets[0]}`).\n" if presets else ""
    )
    return (f"```\n{shown}```\n" if shown else "") + ("\n" + chosen if chosen else "")


STARTED_OTHERWISE = ("sft", "reward-model", "outcome-critic", "code", "prompt", "maths")
"""Recipes that need a file or a model of one's own: the method's own text has the command."""


def _algorithm(path: Path) -> str:
    found = re.search(r"^algorithm: (\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else ""


def _relatives(name: str) -> str:
    """Its row of the table of GRPO's relatives, with GRPO's."""
    text = (DOCS / "algorithms.md").read_text(encoding="utf-8").partition("## GRPO's relatives")[2]
    text = text.partition("\n## ")[0]
    head = re.search(r"^\| method .*\n\|---.*\n", text, re.MULTILINE)
    rows = {found[1]: found[0] for found in re.finditer(r"^\| `([^`]+)` \|.*\n", text, re.MULTILINE)}
    if not head or name not in rows:
        return ""
    shown = "".join(rows[each] for each in dict.fromkeys(("grpo", name)))
    note = (
        "[All of its relatives](../algorithms.md#grpos-relatives-which-differs-how); a dash is as in the row of `grpo`."
    )
    return f"\n## Beside its relatives\n\n{head[0]}{shown}\n{note}\n"


def _defaults(name: str) -> str:
    """One row per option whose default is another one than in general."""
    general = {f"{g}.{n}" if g else n: v for g, made in config_schema("ppo").items() for n, v in defaults(made).items()}
    table = "| option | in general | here |\n|---|---|---|\n"
    for option, value in ALGORITHMS[name].defaults.items():
        found = general.get(option, general.get(f"learner.{option}"))
        table += f"| `{option}` | {'' if option not in general else as_typed(found)} | {as_typed(value)} |\n"
    return table


def _options(name: str) -> str:
    known, table = config_schema(name), ""
    groups = (*GROUPS, "update") if name == "trpo" else GROUPS
    for group in (group for group in groups if group in known):
        meanings = sentences(known[group])
        for option, usual in defaults(known[group]).items():
            value = ALGORITHMS[name].defaults.get(f"{group}.{option}", usual)
            typed, meaning = str(as_typed(value)).replace("\n", r"\n"), meanings[option].replace("|", r"\|")
            table += f"| `{group}.{option}` | {typed} | {meaning} |\n"
    return f"| option | default | meaning |\n|---|---|---|\n{table}" if table else ""


def to_watch(name: str) -> str:
    """The metrics that a run of the method logs and that have a healthy range, and where the rest stands."""
    table = "| metric | healthy | meaning |\n|---|---|---|\n"
    for metric in (METRICS[logged] for logged in _logged(name)):
        meaning = re.split(r"[:;] | \(", metric.meaning)[0]
        table += f"| `{metric.name}` | {re.split(r'[:;] ', metric.healthy)[0]} | {meaning} |\n"
    return f"{table}\nOtherwise: [faults by symptom](../faults.md). All metrics: [metrics](../metrics.md).\n"


def _logged(name: str) -> list[str]:
    file = GOLDEN / f"{ALSO.get(name, name)}.json"
    logged = set(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else set()
    groups = {"reward-model": {"Labelled replies"}, "outcome-critic": {"Outcome critics"}}
    groups |= {one: {"Labelled replies"} for one in ("dpo", "online-dpo", "kto")} | {"sft": {"Supervised training"}}
    if name == "reward-model":
        logged = {metric for metric in logged if not metric.startswith(("kl/", "policy/"))}
    return [m.name for m in METRICS.values() if m.healthy and (m.name in logged or m.group in groups.get(name, ()))]


# --- faults -------------------------------------------------------------------------------------------------------

PLACES = {
    "The reward": "reward select abstained",
    "KL": "kl rollout/likelihood",
    "The replies": "text rollout",
    "The update": "policy update trust loss",
    "The critic": "value",
    "Games and worlds": "game actions rollout/outgrown",
    "Held-out tasks": "evaluate {metric} preference",
}
USUAL = {
    "kl_cause": "nothing, or too little, is paid for leaving the reference",
    "kl_remedy": "a higher price: twice `--kl.coef`, or `--kl.loss_coef` for GRPO and its relatives",
    "higher_price": "a higher `--kl.coef`",
    "warm_start": "an `sft` run on played games first",
    "liked": "the reward likes it",
    "rate": "",
}


def faults() -> str:
    """The page of faults: symptom, cause and remedy of each finding of the diagnosis."""
    page = FAULTS
    found = {place: [name for name in FINDINGS if _place(name) == place] for place in PLACES}
    assert sum(map(len, found.values())) == len(FINDINGS)
    for place, names in found.items():
        page += f"\n## {place}\n"
        for name in names:
            entry = FINDINGS[name]
            cause = entry.get("causes") or _filled(entry["cause"])
            remedy = entry.get("remedies") or _filled(entry["remedy"])
            curves = ", ".join(f"`{metric}`" for metric in entry["metrics"] if "{" not in metric)
            page += f"\n### {entry['symptom']}\n\n- **Cause**: {cause}.\n- **Remedy**: {remedy}.\n"
            page += f"- Shown by {curves}; reported as a {entry['level']}.\n" if curves else ""
    return page


FAULTS = """# Faults by symptom

What goes wrong in a run, by what you see. A run looks for these by itself, every few seconds, and names them with its
own numbers in the report and in `operant report RUN`, and all but notes on the console; from Python
`operant.diagnose(learner)`. An error that stops a command has [a page of its own](mistakes.md). This page is generated
from the diagnosis: `make docs`.
"""


def _place(name: str) -> str:
    shown = (FINDINGS[name]["metrics"] or ["text"])[0]
    starts = {start: place for place, words in PLACES.items() for start in words.split()}
    return starts[max((start for start in starts if shown.startswith(start)), key=len)]


def _filled(sentence: str) -> str:
    text = re.sub(r"\{(\w+)(?::[^}]*)?\}", lambda found: USUAL.get(found[1], "{" + found[1] + "}"), sentence)
    assert "{" not in text, f"give the finding a cause or remedy without numbers of a run: {text}"
    return text


# --- papers -------------------------------------------------------------------------------------------------------

ARXIV = re.compile(r"(?:\[([^\]]+)\]\(https://)?ar[xX]iv(?:\.org/abs/|:)(\d{4}\.\d{4,5})")
NAMED = re.compile(r"[A-Z].* (19|20)\d\d")
SOURCE = DOCS.parent / "src/operant"
PAGES_OF_METHODS = {module.removeprefix("operant.").replace(".", "/") + ".py": name for name, module in METHODS.items()}


def papers() -> str:
    """One row per paper whose number stands in the source: what of it is here, its presets, and where it was tried."""
    places, names = _papers()
    presets = _presets_of_papers()
    page = PAPERS
    for number in sorted(places):
        here = [
            f"[`{PAGES_OF_METHODS[p]}`]({file_of(PAGES_OF_METHODS[p])})"
            for p in places[number]
            if p in PAGES_OF_METHODS
        ]
        here += [f"[{p}](../src/operant/{p})" for p in places[number] if p not in PAGES_OF_METHODS]
        tried = {where for p in places[number] for methods, where in CURVES.values() if _method(p) in methods.split()}
        tried |= {"methods/ppo.md#measured-curves"} if "algorithms/ppo.py" in places[number] else set()
        tried |= {SUMS for p in places[number] if on_sums(_method(p))}
        tried |= {TABLES[_method(p)] for p in places[number] if _method(p) in TABLES}
        measured = ", ".join(f"[{Path(where.partition('.')[0]).name}]({where})" for where in sorted(tried))
        chosen = ", ".join(f"`{preset}`" for preset in presets.get(number, ()))
        name = f"{names[number]}, " if number in names else ""
        link = f"[{name}arXiv:{number}](https://arxiv.org/abs/{number})"
        page += f"| {link} | {', '.join(here)} | {chosen} | {measured} |\n"
    return page + _citation()


PAPERS = """# Papers

The papers that the source cites, by date: the method or the file that follows each, its preset where the
published settings are one, and the page with the numbers measured here. This page is generated: `make docs`.

| paper | here | preset | measured here |
|---|---|---|---|
"""


def _citation() -> str:
    """How operant is cited, from CITATION.cff."""
    known = yaml.safe_load((DOCS.parent / "CITATION.cff").read_text(encoding="utf-8"))
    authors = " and ".join(f"{{{author['name']}}}" for author in known["authors"])
    lines = {"title": known["title"], "author": authors, "year": 2026, "version": known["version"]}
    shown = ",\n".join(f"  {name} = {{{text}}}" for name, text in lines.items())
    return f"{CITATION}\n```bibtex\n@software{{operant,\n{shown}\n}}\n```\n"


CITATION = """
## Citation

If operant is of use in your work, cite it with the version that you used (`operant doctor` prints it), and the paper of
the method, too. [CITATION.cff](../CITATION.cff) is for reference managers.
"""


def _method(place: str) -> str:
    return PAGES_OF_METHODS.get(place, "")


def _papers() -> tuple[dict[str, list[str]], dict[str, str]]:
    """Number -> the files that name it, methods first; number -> authors and year, where a link says them."""
    places: dict[str, list[str]] = {}
    names: dict[str, str] = {}
    files = [path for path in sorted(SOURCE.rglob("*")) if path.suffix in (".py", ".yaml", ".toml")]
    for path in [*files, *WRITTEN]:
        text, place = path.read_text(encoding="utf-8"), str(path.relative_to(DOCS.parent)).removeprefix("src/operant/")
        if place == "docs/papers.md":
            continue
        for name, number in ARXIV.findall(text):
            if NAMED.fullmatch(name):
                names.setdefault(number, name)
            if path.suffix != ".md" and place not in places.setdefault(number, []):
                places[number].append(place)
    return {number: sorted(found, key=lambda p: p not in PAGES_OF_METHODS) for number, found in places.items()}, names


def _presets_of_papers() -> dict[str, list[str]]:
    """Number -> the presets whose comment, above their name, gives it."""
    found: dict[str, list[str]] = {}
    for path in SOURCE.glob("algorithms/*.py"):
        for comment, name in re.findall(
            r"((?:^ *#.*\n)+) *\"([\w-]+)\": \{", path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            for _, number in ARXIV.findall(comment):
                found.setdefault(number, []).append(name)
    return found


# --- memory -------------------------------------------------------------------------------------------------------

SIZES = {"124M": 0.124, "355M": 0.355, "1B": 1.0, "1.6B": 1.6, "7B": 7.0, "20B": 20.0, "70B": 70.0}
"""Billions of weights."""


def memory() -> str:
    """One row per size: gigabytes of weights, gradients, Adam's states and a reference copy, by what is trained."""

    def of_weight(size: int, trained: float) -> float:
        one = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16 if size < 4 else torch.float32)
        kept = size + OptimizerOptions().state_bytes(one) + size  # gradient, states, the reference's copy
        return size + trained * kept

    ways = {"float32, all trained": (4, 1.0), "bfloat16, all trained": (2, 1.0)}
    ways |= {"bfloat16, the top sixth": (2, 1 / 6), "bfloat16, an adapter": (2, 0.0)}
    table = f"| weights | {' | '.join(ways)} |\n|---|{'---|' * len(ways)}\n"
    for name, billions in SIZES.items():
        cells = [f"{billions * of_weight(*way):,.{1 if billions < 10 else 0}f} GB" for way in ways.values()]
        table += f"| {name} | {' | '.join(cells)} |\n"
    return table + f"| bytes a weight | {' | '.join(f'{of_weight(*way):.0f}' for way in ways.values())} |\n"


def planned() -> str:
    """One row per command: the plan and what was measured."""
    results = _result("memory-plan")
    table = "| command | planned | measured |\n|---|---|---|\n"
    for row in results["rows"].values():
        command = re.sub(r"\{folder\}/|/tmp/\S*/", "", row["command"]).removesuffix(" --steps 2")
        table += f"| `{command}` | {row['planned_gb']:.2f} GB | {row['measured_gb']:.2f} GB |\n"
    return f"{table}\nOf one process, imports and reward model included. Made by `{results['command']}`.\n"


def _result(name: str) -> Any:
    return json.loads((DOCS.parent / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))


# --- the gallery --------------------------------------------------------------------------------------------------


def gallery() -> dict[str, str]:
    """The blocks of docs/gallery.md, from the results of benchmarks."""
    found = _result("gallery")
    return {
        "reviews": _reviews(),
        "keyword": _told("keyword"),
        "chat": _told("chat"),
        "rooms": _rooms(found),
        "program": _program(found),
        "prompts": _prompts(),
    }


def _quoted(text: str) -> str:
    return f"`{' '.join(text.split()).replace('|', '/')}`"


def _reviews() -> str:
    results = _result("kl-samples")
    paid, free = (next(run for run in results["runs"] if run["run"] == kind) for kind in ("with", "without"))
    table = "| prompt | with a price on KL | without |\n|---|---|---|\n"
    for one, other in zip(paid["replies"][:4], free["replies"][:4]):
        table += f"| {_quoted(one['query'])} | {_quoted(one['reply'])} | {_quoted(other['reply'])} |\n"
    return f"{table}\nThe first prompts of the run. Made by `{results['command']}`.\n"


def _told(recipe: str) -> str:
    results = _result("recipes")
    run = next(run for run in results["runs"] if run["recipe"] == recipe and not run["control"])
    table = "| prompt | before | after |\n|---|---|---|\n"
    for reply in run["replies"][:4]:
        table += f"| {' | '.join(_quoted(reply[key]) for key in ('query', 'before', 'after'))} |\n"
    return f"{table}\nHeld-out prompts of seed {run['seed']}. Made by `{results['command']}`.\n"


def _rooms(found: dict[str, Any]) -> str:
    games = found["rooms"]
    text = f"It won {games['won']} of {games['games']} games. The first that it won:\n\n"
    text += f"```text\n{games['first won'].strip()}\n```\n\nThe end of the first that it did not win:\n\n"
    return f"{text}```text\n{games['first lost'].strip()}\n```\n\nMade by `{found['command']}`.\n"


def _program(found: dict[str, Any]) -> str:
    told = found["programs"]
    before, after = told["before"], told["after"]
    text = f"With {told['samples']} programs a problem and as many in a second round, {told['solved']} of "
    text += f"{told['problems']} problems were solved. The first that a {after['how']} program solves:\n\n"
    text += f"```text\n{after['prompt'].strip()}\n```\n\nA program of the first round, and the answer of its tests:\n\n"
    said = before["examples_message"] or before["message"]
    text += f"```text\n{before['completion'].strip()}\n\n{before['outcome']}: {said}\n"
    text += f"```\n\nThe {after['how']} one, which passes the hidden tests:\n\n"
    text += f"```text\n{after['completion'].strip()}\n```\n\n"
    return f"{text}Made by `{found['command']}`.\n"


def _prompts() -> str:
    results = _result("prompts")
    shown = {"none+mean": "no prompt", "manual+mean": "written by a person", "soft_q": "found by soft Q-learning"}
    shown |= {"random+mean": "the best of random ones", "soft_q, shuffled": "found with shuffled labels"}
    table = "| prompt | text | accuracy on held-out reviews |\n|---|---|---|\n"
    for name, title in shown.items():
        for row in [row for row in results["rows"] if row["name"] == name][:2]:
            table += f"| {title}, seed {row['seed']} | {_quoted(row['prompt'])} | {row['test']:.3f} |\n"
    return f"{table}\nThe first two seeds of each. Made by `{results['command']}`.\n"


# --- experiments --------------------------------------------------------------------------------------------------

NOT_TOLD = ("log.md", "index.md")


def experiments() -> str:
    """One row per script of benchmarks/ whose command a page names: the block of benchmarks/README.md."""
    told = {path: path.read_text(encoding="utf-8") for path in WRITTEN if path.name not in NOT_TOLD}
    table = "| what | command | page |\n|---|---|---|\n"
    for path in sorted((DOCS.parent / "benchmarks").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        command = f"python -m benchmarks.{path.stem}"
        what = re.sub(r"[:;,.] *`python -m [^`]*`.*|\.?\"*$", "", text.partition('"""')[2].partition("\n")[0]).strip()
        pages = [page for page, said in told.items() if re.search(rf"{re.escape(command)}\b(?!_)", said)]
        links = [f"[{told[page].partition(chr(10))[0].removeprefix('# ')}]({_there(page)})" for page in pages]
        links += [f"[figure]({_there(file)})" for file in FIGURES if file.name in text]
        if pages:
            table += f"| {what} | `{command}` | {', '.join(links)} |\n"
    return table


FIGURES = sorted((DOCS / "figures").glob("*.svg"))


def _there(path: Path) -> str:
    """A file of docs/, as a link of benchmarks/README.md."""
    return f"../docs/{path.relative_to(DOCS)}"
