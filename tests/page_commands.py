"""What stands on the pages: the commands, the snippets, and the text of a section."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADING = re.compile(r"^(#+) (.*)\n", re.MULTILINE)


def anchor(heading: str) -> str:
    """The name by which a link finds a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading).lower()).strip().replace(" ", "-")


def without_code(text: str) -> str:
    """The text with its code blocks blanked, so that every character keeps its place."""
    return re.sub(r"^ *```.*?^ *```", lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.DOTALL | re.MULTILINE)


def read(page: str) -> str:
    """The text of a page, or of one section with those below it: `docs/code.md#a-critic-of-programs`."""
    name, _, wanted = page.partition("#")
    text = (ROOT / name).read_text(encoding="utf-8")
    if not wanted:
        return text
    found = list(HEADING.finditer(without_code(text)))
    [first] = [m for m in found if anchor(m[2]) == wanted]
    ends = [m.start() for m in found if m.start() > first.start() and len(m[1]) <= len(first[1])]
    return text[first.start() : min(ends, default=len(text))]


def snippets(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", read(page), re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[list[str]]:
    """Every `operant ...` line in the code blocks of a page or section, split into words, without its comment."""
    text = read(page)
    fenced = re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in fenced if language in ("", "sh")]
    blocks += re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    lines = [line.strip() for block in blocks for line in re.sub(r"\\\n *", "", block).splitlines()]
    lines = [re.sub(r"^(\w+=\w+ )*(torchrun .*-m (?=operant ))?", "", line) for line in lines]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("operant ")]
