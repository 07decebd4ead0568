"""Write `src/operant/tools/cli/known_options.json`: what `--help` says of each option, without importing torch.

    {"options": {"kl.coef": [text, rule, alone]}, "methods": {"ppo": {"values", "defaults", "traits"}},
     "parts": {"reward:builtin": {"label": null}}, "presets": {}, "declared": {"module:Name": {"out": null}}}

A rule is what the code itself answers to wrong values: `at least 1`, `resume, light or both`. alone: the option may
stand without a value, for true.
"""

import json
import re
from contextlib import suppress
from inspect import Parameter
from typing import Any

from operant.algorithms import ALGORITHMS, preset_names, presets
from operant.data.forms import ROW_FORMS
from operant.data.sources import SOURCES
from operant.engines import ENGINES
from operant.envs import ENVS
from operant.import_by_name import find
from operant.options import compose, defaults, kinds, names
from operant.rewards import NAMES
from operant.runs.config import OWN, config_schema
from operant.runs.named_parts import groups
from operant.tools.cli.commands import COMMANDS
from operant.tools.cli.parser import sentences
from operant.training.optimizer import USED, unused
from operant.training.options import checked_options, option_names
from operant.types import OperantError

WRONG = (-1e9, -1.0, 0.0, 1e9, "?")
"""Values of which some are outside the bounds of any number, and no choice."""
SAID_BY_THE_TYPE = r"a whole number of at most 64 bits|a finite number \(up to.*?\)|text"
SHORT = {"a whole number of at most 64 bits": "a whole number", "text": ""}


def known_options() -> str:
    """The text of the file."""
    options: dict[str, Any] = {}
    methods = {}
    for method, algorithm in ALGORITHMS.items():
        schema = config_schema(method, {})
        used = [*names(OWN), *option_names(algorithm)]
        for full, (group, name) in names(schema).items():
            if full in used and full not in options:
                options[full] = _about(schema, full, sentences(schema[group]).get(name, ""), method)
        ours = {full: defaults(schema[group])[name] for full, (group, name) in names(schema).items() if full in used}
        traits = [algorithm.source, *(["groups"] if algorithm.needs.samples > 1 else [])]
        traits += [f"kl in the {place}" for place in algorithm.kl[:1]]  # where it is usually charged
        traits += ["labels"] if algorithm.needs.labels else ["demonstrations"] if algorithm.source == "data" else []
        traits += [] if algorithm.needs.policy else ["language model"]
        methods[method] = {"values": ours, "defaults": dict(algorithm.defaults), "traits": traits}
    declared = {}
    for spec in (spec for command in COMMANDS.values() for spec in command.declared):
        made = find("options", *spec.split(":"))
        declared[spec] = defaults(made)
        options |= {
            f"{spec}.{name}": _about({"": made}, name, sentences(made).get(name, "")) for name in defaults(made)
        }
    options["preset"] = (options["preset"][0], preset_names(), False)
    whole = {"options": options, "methods": methods, "parts": _parts(), "presets": presets(), "declared": declared}
    whole["unused"] = {kind: sorted(f"optimizer.{name}" for name in unused(kind)) for kind in USED}
    return json.dumps(whole, indent=0, default=list, ensure_ascii=False) + "\n"


def _parts() -> dict[str, dict[str, Any]]:
    """The options of the built-in parts, by kind and name."""
    named = [("reward", name, f"{name}:x") for name, row in NAMES.items() if name != "isolated" and not row.of_another]
    tables = {"env": ENVS, "engine": ENGINES, "form": ROW_FORMS, "tasks": SOURCES}
    named += [(kind, name, name) for kind, table in tables.items() for name in table.built_in]
    found = {}
    for kind, name, value in named:
        made = groups({kind: value})
        own = defaults(made[kind]) if made else {}
        found[f"{kind}:{name}"] = {option: None if x is Parameter.empty else x for option, x in own.items()}
    return found


def _about(schema: dict[str, Any], full: str, text: str, method: str = "") -> tuple[str, str, bool]:
    group = names(schema)[full][0]
    rules = [
        rule
        for wrong in WRONG
        for rule in re.findall(
            rf"^(?:\w+\.)?{full.rpartition('.')[2]}=.*?: it must (?:be |lie )(.*)",
            _refusal({group: schema[group]}, full, wrong, method),
        )
    ]
    only_types = {rule for rule in rules if re.fullmatch(rf"({SAID_BY_THE_TYPE})(, or none)?", rule)}
    best = next((rule for rule in rules if rule not in only_types), rules[0] if rules else "")
    best = re.sub(r"^None or|, or none; else no .*", lambda m: "none or" if m[0][0] == "N" else ", or none", best)
    best = re.sub(SAID_BY_THE_TYPE, lambda m: SHORT.get(m[0], "a number"), best).strip(", ")
    kind = kinds(schema)[full]
    best = "" if best in ("none", "or none") else best
    if kind in (int | None, float | None, str | None) and "none" not in best.lower():
        best = f"{best}, or none" if best else "none, or text"
    return text, best, kind is bool


def _refusal(schema: dict[str, Any], full: str, value: Any, method: str) -> str:
    with suppress(TypeError):
        try:
            compose(schema, {full: value})
            if method and full.startswith(("loss.", "advantage.")):
                checked_options(method, {full: value})
        except OperantError as error:
            return str(error)
    return ""
