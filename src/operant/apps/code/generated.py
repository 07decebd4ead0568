"""Programming problems from a seed: a statement, tests and a reference solution, which has been run on the tests.

A problem composes one to three operations on a list, a text, words or a number, or is a small class:

    Write f(xs): keep the even numbers, then return the sum.
    assert f([4, 7, 2]) == 6

`tasks=programs` gives those of training, `tasks=programs/held-out` others, whose compositions training never has.
Without any of its operations, with another number in one, or as a program of `TRIVIAL`, the reference fails a test.
"""

import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from operant.types import OperantError

Part = Literal["train", "held-out"]
Function = Callable[[Any], Any]
HELD_OUT = 5
"""One in this many compositions of two or more operations is held out."""
EXAMPLES, TESTS = 2, 4
"""Tests that the prompt shows, and those that decide."""
LEVELS = (1, 2, 3)
CLASSES = 0.12
"""The share of problems that ask for a class."""


class Operation(NamedTuple):
    """A step from a value of kind `of` to one of kind `to`. {n} is a number, {c} a letter, drawn for each problem."""

    of: str
    to: str
    code: str
    phrases: tuple[str, ...]
    """Of which one says it in the statement: what comes after "then"."""


VARIABLES = {"list": "xs", "text": "s", "words": "ws", "number": "n"}


def _operations(table: str) -> list[Operation]:
    """From lines "kind kind | code | phrase / phrase"."""
    cells = [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]
    return [
        Operation(of, to, code, tuple(phrases.split(" / ")))
        for kinds, code, phrases in cells
        for of, to in [kinds.split()]
    ]


_STEPS, _UPDATES = (Path(__file__).parent / "operations.txt").read_text(encoding="utf-8").split("\n\n")
OPERATIONS, UPDATES = _operations(_STEPS), _operations(_UPDATES)
WORDS = (
    "red blue green cat dog bird sun moon star tree leaf river stone bread apple chair table lamp door window garden "
    "music paper silver gold summer winter"
).split()
LARGEST = 10_000
"""Numbers beyond this size, and texts and lists with more items, occur nowhere in a reference."""
LETTERS = "abdeilmnorst"
TRIVIAL = (
    "x", "0", "1", "-1", "None", "''", "[]", "len(x)", "sum(x)", "max(x)", "min(x)", "sorted(x)", "x[::-1]", "x[0]",
    "x[-1]", "str(x)", "x.upper()", "x.split()", "x + 1", "x * 2",
)  # fmt: skip
"""Expressions of the argument that solve no problem of two or more operations, and few of one."""


def programs(
    *, count: int = 2000, levels: str = "1-3", seed: int = 0, part: Part = "train", classes: float = CLASSES
) -> Iterator[dict[str, object]]:
    """Problems as rows: `prompt`, `completion` (the reference), `tests`, `examples` (those in the prompt), `level`.

    count: how many; the first ones of a seed do not depend on it. levels: operations of a problem, "2", or "1-3" in
    equal shares. part: `train` or `held-out`; the latter has no problem of one operation. classes: the share of
    problems that ask for a class. Any seed gives other problems.
    """
    span = re.fullmatch(r"([1-3])(?:-([1-3]))?", str(levels))
    low, high = (int(span[1]), int(span[2] or span[1])) if span else (0, 0)
    if part not in ("train", "held-out") or count < 1 or not 0 <= classes <= 1:
        asked = f"tasks.count={count}, tasks.part={part!r}, tasks.classes={classes}"
        raise OperantError(f"{asked}: give at least one problem, of train or held-out, and a share from 0 to 1")
    if not (2 if part == "held-out" else 1) <= low <= high:
        how = "give a number of operations from 1 to 3, or a range such as 1-3"
        why = "held-out problems have at least 2, because training has all single operations"
        raise OperantError(f"tasks.levels={levels!r}: {how}; {why}")
    return (_problem(f"programs/{part}/{seed}/{number}", low, high, part, classes) for number in range(count))


def held_out(
    *, count: int = 256, levels: str = "2-3", seed: int = 0, classes: float = CLASSES
) -> Iterator[dict[str, object]]:
    """As `programs`, of compositions that no problem of training has."""
    return programs(count=count, levels=levels, seed=seed, part="held-out", classes=classes)


def _problem(seed: str, low: int, high: int, part: Part, classes: float) -> dict[str, object]:
    chance = random.Random(seed)
    level, make = chance.randint(low, high), _of_class if chance.random() < classes else _of_function
    while (made := make(chance, level, part)) is None:
        pass
    return made | {"level": level, "verified": True}


def is_held_out(composition: str, level: int) -> bool:
    """Whether training never has this composition: the codes of its operations, before their numbers are drawn."""
    return level > 1 and zlib.crc32(composition.encode()) % HELD_OUT == 0


def _of_function(chance: random.Random, level: int, part: Part) -> dict[str, object] | None:
    kind = start = chance.choice(("list", "list", "text", "text", "number", "words"))
    steps: list[Operation] = []
    for _ in range(level):
        steps.append(chance.choice([operation for operation in OPERATIONS if operation.of == kind]))
        kind = steps[-1].to
    if is_held_out(" | ".join(step.code for step in steps), level) != (part == "held-out"):
        return None
    drawn = [_drawn(chance, step) for step in steps]
    inputs = [_value(chance, start) for _ in range(EXAMPLES + TESTS)]
    argument, codes, others = VARIABLES[start], [code for code, _ in drawn], list[Function]()
    for i, step in enumerate(steps):  # without this operation where the kinds allow it, and with another number in it
        if step.of == step.to or i == len(steps) - 1:
            others.append(_chain(codes[:i] + codes[i + 1 :], steps[:i] + steps[i + 1 :]))
        if "{n}" in step.code:
            other = re.sub(r"\d+", lambda number: str(int(number[0]) + 1), codes[i], count=1)
            others.append(_chain([*codes[:i], other, *codes[i + 1 :]], steps))
    others += [_function("x", code) for code in TRIVIAL] if level > 1 else []
    found = _outputs(_chain(codes, steps), inputs)
    if found is None or _too_easy(found, others, inputs):
        return None
    lines = [f"    {VARIABLES[step.to]} = {code}\n" for code, step in zip(codes[:-1], steps)]
    body = "".join(lines) + f"    return {codes[-1]}"
    tests = [f"assert f({value!r}) == {output!r}" for value, output in zip(inputs, found, strict=True)]
    phrases = ", then ".join(phrase for _, phrase in drawn)
    return _row(f"Write f({argument}): {phrases}.", tests, f"def f({argument}):\n{body}")


def _of_class(chance: random.Random, level: int, part: Part) -> dict[str, object] | None:
    """A class with a number, a method that changes it and one that reads it, after `level` - 1 operations."""
    update = chance.choice(UPDATES)
    steps = [chance.choice([one for one in OPERATIONS if one.of == one.to == "number"]) for _ in range(level - 1)]
    if is_held_out(" | ".join(step.code for step in (update, *steps)), level) != (part == "held-out"):
        return None
    first, (changed, phrase) = chance.randint(0, 9), _drawn(chance, update)
    drawn = [_drawn(chance, step) for step in steps]
    inputs = [[chance.randint(-9, 20) for _ in range(chance.randint(1, 3))] for _ in range(EXAMPLES + TESTS)]

    def runs(first: int, changed: str, codes: list[str], kinds: list[Operation]) -> Function:
        read, put = _chain(codes, kinds), _function("n, y", changed.replace("self.n", "n"))

        def run(values: list[int]) -> object:
            n = first
            for y in values:
                n = put(n, y)
            return read(n)

        return run

    codes = [code for code, _ in drawn]
    found = _outputs(runs(first, changed, codes, steps), inputs)
    others = [runs(first + 1, changed, codes, steps), runs(first, "n", codes, steps)]
    others += [runs(first, changed, codes[:i] + codes[i + 1 :], steps[:i] + steps[i + 1 :]) for i in range(len(codes))]
    if found is None or _too_easy(found, others, inputs):
        return None
    *lines, returned = ["self.n", *codes]
    read = "".join(f"        n = {line}\n" for line in lines)
    reference = (
        f"class Box:\n    def __init__(self):\n        self.n = {first}\n"
        f"    def put(self, y):\n        self.n = {changed}\n        return self\n"
        f"    def get(self):\n{read}        return {returned}"
    )
    asked = "".join(f", then {phrase}" for _, phrase in drawn)
    tests = [
        f"assert Box(){''.join(f'.put({y})' for y in values)}.get() == {output!r}"
        for values, output in zip(inputs, found, strict=True)
    ]
    statement = f"Write a class Box with a number n that starts at {first}. put(y) {phrase}. get(): take n{asked}."
    return _row(statement, tests, reference)


def _row(statement: str, tests: list[str], reference: str) -> dict[str, object]:
    shown = tests[:EXAMPLES]
    prompt = "\n".join([statement, *shown, ""])
    return {"prompt": prompt, "completion": reference, "tests": tests[EXAMPLES:], "examples": shown}


def _drawn(chance: random.Random, operation: Operation) -> tuple[str, str]:
    """Code and phrase of an operation with numbers and letters."""
    c, d = chance.sample(LETTERS, 2)
    values = {"n": chance.randint(2, 4 if ":" in operation.code or "s *" in operation.code else 9), "c": c, "d": d}
    return operation.code.format(**values), chance.choice(operation.phrases).format(**values)


def _value(chance: random.Random, kind: str) -> object:
    if kind == "list":
        return [chance.randint(-9, 12) for _ in range(chance.randint(4, 7))]
    if kind == "number":
        return chance.choice((chance.randint(0, 9), chance.randint(10, 99), chance.randint(100, 999)))
    words = [chance.choice(WORDS) for _ in range(chance.randint(2, 4))]
    return words if kind == "words" else " ".join(words)


@cache
def _function(arguments: str, code: str) -> Callable[..., object]:
    return eval(f"lambda {arguments}: {code}")


def _chain(codes: list[str], steps: list[Operation]) -> Function:
    functions = [_function(VARIABLES.get(step.of, "n"), code) for code, step in zip(codes, steps, strict=True)]

    def run(value: object) -> object:
        for function in functions:
            value = function(value)
            if (abs(value) if isinstance(value, int) else len(value)) > LARGEST:
                raise ValueError(f"{value!r:.40} is too large")
        return value

    return run


def _outputs(function: Function, inputs: Sequence[object]) -> list[object] | None:
    """What a function returns for each input; None if it raises, or a result is too long for a prompt."""
    try:
        found = [function(value) for value in inputs]
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError):
        return None
    return None if any(len(repr(value)) > 60 for value in found) else found


def _too_easy(found: list[object], others: list[Function], inputs: Sequence[object]) -> bool:
    """Whether a constant or one of other programs passes the tests that decide."""
    decide, given = found[EXAMPLES:], inputs[EXAMPLES:]
    return all(value == decide[0] for value in decide) or any(_outputs(other, given) == decide for other in others)
