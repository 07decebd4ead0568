"""Problems from a seed whose answers are known: sums, and Countdown.

`tasks=arithmetic` and `tasks=countdown` give those of training, `arithmetic/held-out` and `countdown/held-out` others:
one in five pairs of numbers, and one in five sets of numbers, which training never has in any order.
"""

import operator
import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any, Literal

from operant.types import OperantError, shown

Part = Literal["train", "held-out"]
Order = Literal["units", "usual"]
Row = dict[str, Any]
HELD_OUT = 5
"""One in this many sets of numbers is held out."""
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def is_held_out(numbers: Iterable[int]) -> bool:
    """Whether training has no problem with these numbers, in whatever order."""
    return zlib.crc32(" ".join(map(str, sorted(numbers))).encode()) % HELD_OUT == 0


def arithmetic(
    *,
    count: int = 2000,
    digits: int = 2,
    operations: str = "+",
    order: Order = "units",
    seed: int = 0,
    part: Part = "train",
) -> Iterator[Row]:
    """Problems such as `47+85=`: `prompt`, `completion` (the answer) and `target` as rows.

    count: how many. digits: of each number, 1 to 9. operations: those to draw from, of + - *; no difference is below 0.
    order: `units`, the digits of an answer from the units on (231), as a small model learns it, or `usual` (132).
    seed, part: other seeds give other problems; `held-out` ones have pairs of numbers that `train` never has.
    Raises: OperantError for an option out of range.
    """
    check(count, part)
    if not 1 <= digits <= 9 or not operations or not set(operations) <= set("+-*") or order not in ("units", "usual"):
        raise OperantError(
            f"tasks.digits={digits}, tasks.operations={shown(operations)}, tasks.order={shown(order)}: give 1 to 9 "
            "digits, operations of + - *, and the order units or usual"
        )
    low = 10 ** (digits - 1) if digits > 1 else 0

    def problem(chance: random.Random) -> Row:
        a, b = drawn(lambda: [chance.randint(low, 10**digits - 1) for _ in range(2)], part)
        sign = chance.choice(operations)
        a, b = (max(a, b), min(a, b)) if sign == "-" else (a, b)
        answer = str(OPERATIONS[sign](Fraction(a), Fraction(b)))
        reply = answer[::-1] if order == "units" else answer
        return {"prompt": f"{a}{sign}{b}=", "completion": reply, "target": {"answer": answer, "order": order}}

    return (problem(random.Random(f"arithmetic/{part}/{seed}/{i}")) for i in range(count))


def arithmetic_held_out(
    *, count: int = 256, digits: int = 2, operations: str = "+", order: Order = "units", seed: int = 0
) -> Iterator[Row]:
    """As `arithmetic`, with pairs of numbers that training never has."""
    return arithmetic(count=count, digits=digits, operations=operations, order=order, seed=seed, part="held-out")


def countdown(
    *, count: int = 2000, numbers: str = "3", largest: int = 9, most: int = 50, seed: int = 0, part: Part = "train"
) -> Iterator[Row]:
    """Countdown, `2 5 9 make 43:`: an expression with each number once, such as `5*9-2`, which exists.

    count: how many. numbers: how many a problem has, "3", or a range such as "3-4", of 2 to 6. largest: number.
    most: the largest target; targets and the steps of the known expression are whole and above 0.
    seed, part: other seeds give other problems; `held-out` ones have sets of numbers that `train` never has.
    Raises: OperantError for an option out of range.
    """
    check(count, part)
    span = re.fullmatch(r"([2-6])(?:-([2-6]))?", str(numbers))
    low, high = (int(span[1]), int(span[2] or span[1])) if span else (0, 0)
    if not 2 <= low <= high or not 9 <= largest <= 10_000 or not 10 <= most <= 10_000:
        raise OperantError(
            f"tasks.numbers={shown(numbers)}, tasks.largest={largest}, tasks.most={most}: give 2 to 6 numbers, or a "
            "range such as 3-4, from 1 to a largest of 9 to 10000, and a largest target of 10 to 10000"
        )

    def problem(chance: random.Random) -> Row:
        amount = chance.randint(low, high)
        while True:
            given = drawn(lambda: [chance.randint(1, largest) for _ in range(amount)], part)
            target, expression = composed(chance, given)
            if 0 < target <= most and target not in given:
                break
        asked = f"{' '.join(map(str, given))} make {target}:"
        return {"prompt": asked, "completion": expression, "target": {"numbers": given, "target": target}}

    return (problem(random.Random(f"countdown/{part}/{seed}/{i}")) for i in range(count))


def countdown_held_out(
    *, count: int = 256, numbers: str = "3", largest: int = 9, most: int = 50, seed: int = 0
) -> Iterator[Row]:
    """As `countdown`, with sets of numbers that training never has."""
    return countdown(count=count, numbers=numbers, largest=largest, most=most, seed=seed, part="held-out")


def check(count: int, part: str) -> None:
    """Raises: OperantError for less than one problem, or another part."""
    if count < 1 or part not in ("train", "held-out"):
        raise OperantError(f"tasks.count={count}, tasks.part={shown(part)}: give at least 1, of train or held-out")


def drawn(draw: Callable[[], list[int]], part: Part) -> list[int]:
    """Numbers of this part, drawn until they are."""
    while is_held_out(numbers := draw()) != (part == "held-out"):
        pass
    return numbers


def composed(chance: random.Random, numbers: list[int]) -> tuple[int, str]:
    """A value and an expression of all numbers: pairs are joined at random, in steps that are whole and above 0."""
    left = [(number, str(number), "") for number in numbers]
    while len(left) > 1:
        chance.shuffle(left)
        (a, text_a, last_a), (b, text_b, last_b) = left.pop(), left.pop()
        values = {sign: apply(Fraction(a), Fraction(b)) for sign, apply in OPERATIONS.items()}
        steps = {sign: int(value) for sign, value in values.items() if value.denominator == 1 and value > 0}
        sign = chance.choice([*steps])  # a sum is always one
        text_a = f"({text_a})" if last_a and last_a in "+-" and sign in "*/" else text_a
        text_b = f"({text_b})" if last_b and (sign in "-/" or (last_b in "+-" and sign == "*")) else text_b
        left.append((steps[sign], f"{text_a}{sign}{text_b}", sign))
    return left[0][0], left[0][1]
