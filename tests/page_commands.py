"""The commands that stand on the pages."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commands(page):
    """Every `operant ...` line in the code blocks of a page, split into words, without its comment."""
    text = (ROOT / page).read_text(encoding="utf-8")
    fenced = re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.S | re.M)
    blocks = [block for language, block in fenced if not language] + re.findall(r"^    (\S.*)$", text, re.M)
    lines = [line.strip() for block in blocks for line in re.sub(r"\\\n *", "", block).splitlines()]
    lines = [line.removeprefix("WANDB_MODE=offline ") for line in lines]
    lines = [re.sub(r"^torchrun --nproc-per-node \d+ -m ", "", line) for line in lines]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("operant ")]
