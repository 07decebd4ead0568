"""`operant migrate FILE`: the diff that moves a script, or an RL4LMs configuration, to operant."""

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from operant.storage import atomic_io
from operant.tools.migrate import migrated
from operant.trackers.console import emit
from operant.types import OperantError, require


def migrate(words: Sequence[str], options: dict[str, Any]) -> int:
    """`operant migrate FILE [--write]` prints a unified diff, or the recipe of a YAML file."""
    require(len(words) == 1, "give one file, as in operant migrate train.py: a Python script, or an RL4LMs .yml")
    path = Path(words[0])
    try:
        old = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else f"it cannot be read: {error}"
        raise OperantError(f"{path}: {why}; give a Python script, or an RL4LMs .yml") from error
    new, recipe = migrated(old, path), path.suffix != ".py"
    if options.pop("write", False):
        target = path.with_name(f"{path.stem}.operant.yaml") if recipe else path
        if recipe and target.exists():
            raise OperantError(f"{target} exists: move it away, or print the recipe without --write")
        atomic_io.write(target, new)
        print(f"wrote {target}")
        return 0
    lines = new.splitlines()
    if not recipe:
        lines = list(difflib.unified_diff(old.splitlines(), lines, str(path), str(path), lineterm=""))
    for line in lines:
        emit(line, sys.stdout)
    return 0
