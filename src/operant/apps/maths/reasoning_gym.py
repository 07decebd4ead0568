"""The sets of reasoning-gym as tasks: `--tasks reasoning_gym:countdown --tasks.min-numbers 3`, the extra `reasoning`.

A task holds the set, its options and its index; reasoning-gym makes the problem again where a reply is judged.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from inspect import Parameter, Signature
from itertools import chain
from typing import Any, get_type_hints

from operant.apps.maths.verifier import data_set, need
from operant.import_by_name import nearest
from operant.types import OperantError, describe_error, shown


def named(name: str) -> Callable[..., Iterator[dict[str, object]]]:
    """The function that makes the rows of a set; its arguments are the options of the set, with their defaults.

    Raises: OperantError for an unknown set, with the nearest one, or without the package.
    """
    need("reasoning_gym", "reasoning", f"tasks=reasoning_gym:{name}")
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        hint = nearest(name, list(DATASETS)) or f"; there are {len(DATASETS)}: {', '.join(sorted(DATASETS))}"
        raise OperantError(f"tasks=reasoning_gym:{name}: reasoning-gym has no set {shown(name)}{hint}")
    config = DATASETS[name][1]

    def reasoning_gym(**options: Any) -> Iterator[dict[str, object]]:
        made = json.dumps({"seed": 0} | options, default=str)
        try:
            data = data_set(name, made)
            entry = data[0]
        except Exception as error:  # a set checks its options by assertions
            raise OperantError(f"tasks=reasoning_gym:{name} cannot be made: {describe_error(error)}") from error
        entries = chain([entry], (data[index] for index in range(1, len(data))))
        return (row(entry, {"set": name, "index": index, "options": made}) for index, entry in enumerate(entries))

    usual, kinds = vars(config()) | {"seed": 0}, get_type_hints(config) | {"seed": int}
    names = [f.name for f in fields(config) if f.init]
    reasoning_gym.__annotations__ = {option: kinds[option] for option in names}
    arguments = [Parameter(option, Parameter.KEYWORD_ONLY, default=usual[option]) for option in names]
    reasoning_gym.__signature__ = Signature(arguments)  # type: ignore[attr-defined]
    return reasoning_gym


def row(entry: Mapping[str, Any], target: dict[str, object]) -> dict[str, object]:
    """A problem as the form `maths` reads it. An answer that is no text is left out."""
    return {
        "prompt": entry["question"],
        "completion": entry["answer"] if isinstance(entry["answer"], str) else "",
        "target": target,
    }
