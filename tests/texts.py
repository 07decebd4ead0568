"""Files of texts: programs, scripts and what is typed."""

import json
import re
import shlex
from pathlib import Path


def parts(file):
    """The texts of a file of `tests/` by the headings (`### name`) that they stand under."""
    texts = (Path(__file__).parent / file).read_text(encoding="utf-8")
    return {name: text for name, text in re.findall(r"^### (.*)\n((?:(?!### ).*\n)*)", texts, re.M)}


def mistyped(section):
    """What is typed after `operant` or its command, as words, and what is said of it: a part of `mistyped.txt`."""
    lines = [line.partition(" => ") for line in parts("mistyped.txt")[section].splitlines()]
    return [(shlex.split(words), said) for words, _, said in lines]


def read_rows(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def write_rows(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
