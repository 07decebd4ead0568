"""The answer in a reply, and exact verdicts on plain numbers and on expressions of given numbers.

marked("<think>6 * 7</think> <answer>42</answer>")   # "42"; also \\boxed{42} and #### 42
number("$1,234.50")                                  # Fraction(2469, 2)
makes("(2+5)*3", [2, 3, 5], 21)                      # "": it does
"""

import ast
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from operant.apps.maths.generated import OPERATIONS

LONGEST = 100
"""Characters of a number, and twice as many of an expression; longer ones are none."""
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d|,\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(rf"([-+]?)({_DIGITS})(?:/({_DIGITS}))?")
_FRACTION = re.compile(r"(?<![\d.,])(\d+\s*)?\\[dt]?frac\s*(\d|\{\s*[-+]?[\d.,]+\s*\})\s*(\d|\{\s*[\d.,]+\s*\})")
_INSIDE = re.compile(r"(?:\d[eE:/.]|\^\s*\{?)$")  # before a part of a larger number, as in 10^3, 12:30 or 3/4/5
_AMOUNT = set(
    "hundred thousand million billion trillion dozen k m bn e i pi x half halve third quarter tenth hundredth "
    "thousandth and or not plus minus times squared cubed factorial".split()
)
"""Words behind a number that change it, and so are no unit."""


def after_thought(reply: str) -> str | None:
    """What stands behind the last thought; None while a thought is not closed."""
    text = reply.rpartition("</think>")[2]
    return None if "<think>" in text else text


def marked(reply: str) -> str | None:
    """The last answer that the reply marks: in <answer>, \\boxed{} or behind ####; None without one."""
    if (text := after_thought(reply)) is None:
        return None
    inside = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    text = inside[-1] if inside else text
    if (box := _boxed(text)) is not None:
        return box
    lines = re.findall(r"####[ \t]*(.*\S)", text)
    return lines[-1] if lines else inside[-1].strip() if inside else None


def _boxed(text: str) -> str | None:
    """What stands in the last \\boxed{}, whose braces balance, or behind a \\boxed without braces."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        bare = re.findall(r"\\boxed\s+([^\s${}]+)", text)
        return bare[-1].rstrip(".,") if bare else None
    depth, begin = 0, text.find("{", start)
    for end in range(begin, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if not depth:
            return text[begin + 1 : end].strip()
    return None


def number(text: str) -> Fraction | None:
    """The exact value of a text that is one number, maybe with a currency, a unit or `x =`; None for anything else."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}|\\mathrm\s*\{([^{}]*)\}", r" \1\2", text.replace("\u2212", "-"))
    marks = r"(?<![\d)])[$\u20ac\u00a3*]+|[$\u20ac\u00a3*]+(?![\d($\u20ac\u00a3*])"  # around a number, not in a product
    text = re.sub(rf"\\[!,;: $%]|%|{marks}|\^\s*\{{?\s*\\circ\s*\}}?", lambda m: "%" if "%" in m[0] else "", text)
    text = _slashed(text.replace("{,}", ",")).replace("%", " ").strip().rstrip(".").strip()
    text = re.sub(r"^[A-Za-z]\w*\s*=\s*", "", text)
    value, _, unit = re.sub(r"^([-+])\s+", r"\1", text).partition(" ")
    words = {re.sub(r"(?<=...)s$", "", word) for word in unit.lower().split()}
    is_unit = re.fullmatch(r"[A-Za-z ]*", unit) and not _AMOUNT & words
    return _value(_NUMBER.fullmatch(value)) if is_unit else None


def _slashed(text: str) -> str:
    """A text whose LaTeX fractions are written as 1/2, and mixed numbers such as 1\\frac{1}{2} and 1 1/2 as 3/2."""

    def slashed(found: re.Match[str]) -> str:
        above, below = found[2].strip("{ }"), found[3].strip("{ }")
        if not found[1] or len(found[0]) > LONGEST:  # which is no number
            return f"{(found[1] or '').strip()}{above}/{below}"
        mixed = above.isdecimal() and below.isdecimal()
        return f"{int(found[1]) * int(below) + int(above)}/{below}" if mixed else found[0]

    mixed = re.sub(r"(?<![\d.,/])(\d+) (\d+)/(\d+)(?![\d/.]\d)", r"\1\\frac{\2}{\3}", text)
    return _FRACTION.sub(slashed, mixed)


def last_number(text: str) -> Fraction | None:
    """The exact value of the last number in a text; None if there is none, or it is a part of a larger one."""
    text = _slashed(text.replace("\u2212", "-").replace("$", "").replace("{,}", ","))
    found = list(_NUMBER.finditer(text))
    before = text[: found[-1].start()] if found else ""
    inside = _INSIDE.search(before) or (before[-1:].isdigit() and not found[-1][1])
    # In "16-3" or "a-3" the sign is an operation.
    return None if inside or not found else _value(found[-1], before[-1:])


def _value(found: re.Match[str] | None, before: str = "") -> Fraction | None:
    if found is None or len(found[0]) > LONGEST:
        return None
    below = Fraction((found[3] or "1").replace(",", ""))
    value = Fraction(found[2].replace(",", "")) / below if below else None
    return -value if value and found[1] == "-" and not (before.isalnum() or before == ")") else value


def is_equal(reply: str, answer: str, *, order: str = "usual", only_marked: bool = False) -> bool | None:
    """Whether the answer in a reply is exactly this number; None if the reply has no answer.

    It is the one that is marked, or else the last number. order: `units`, its digits stand from the units on.
    """
    found, said = marked(reply), after_thought(reply)
    if found is None and (only_marked or said is None):
        return None
    if order == "units":
        found = ((said or "") if found is None else found).strip()
        return found[::-1] == answer if re.fullmatch(r"\d+-?", found) else None
    value = last_number(said or "") if found is None else number(found)
    return (None if found is None else False) if value is None else value == number(answer)


def makes(expression: str, numbers: Sequence[int], target: int, *, every: bool = True) -> str:
    """What is wrong with an expression that must make `target`; empty: nothing.

    It may use + - * / and brackets, each number once, and with `every` all of them. `= target` may follow.
    """
    written = re.sub(r"[\u00d7\u00b7]|\\times|\\cdot", "*", expression).replace("\u00f7", "/").replace("\u2212", "-")
    left, _, right = written.partition("=")
    if right.strip() not in ("", str(target)) or len(left) > 2 * LONGEST or not re.fullmatch(r"[\d\s+\-*/()]+", left):
        return "no expression"
    used: list[int] = []
    try:
        value = _evaluated(ast.parse(left.strip(), mode="eval").body, used)
    except ZeroDivisionError:
        return "divides by 0"
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return "no expression"
    more, fewer = Counter(used) - Counter(numbers), Counter(numbers) - Counter(used)
    if more or (fewer and every):
        return f"uses {next(iter(more))} once more than given" if more else f"leaves out {next(iter(fewer))}"
    return "" if value == target else f"makes {value}"


def _evaluated(node: ast.expr, used: list[int]) -> Fraction:
    """The exact value; the numbers are added to `used`. Raises: ValueError for anything but the four operations."""
    signs = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
    if isinstance(node, ast.BinOp) and type(node.op) in signs:
        return OPERATIONS[signs[type(node.op)]](_evaluated(node.left, used), _evaluated(node.right, used))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    raise ValueError


def is_thought_and_answer(text: str) -> bool:
    """Whether a text is one <think>...</think> and then one <answer>...</answer>, neither empty, and nothing else."""
    found = re.fullmatch(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", text, re.DOTALL)
    tags = all(text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    return found is not None and tags and all(part.strip() for part in found.groups())
