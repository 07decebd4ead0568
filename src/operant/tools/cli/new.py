"""`operant new KIND NAME`: a small part of one's own, and its test, to begin from."""

import keyword
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from operant.storage import atomic_io
from operant.trackers.console import emit
from operant.types import OperantError

TRAINS_WITH = {
    "reward": "operant train letters --reward {name}.py:{name}",
    "world": "operant train --env {name}.py:{world} --tasks builtin:openings/train --steps 3 --max-tokens 6",
    "method": "operant train letters --algorithm {name}.py:{name}",
}
"""Kind: the command that trains with such a part. The files of a kind are `starters/KIND.txt` and `test_KIND.txt`."""


def new(words: Sequence[str], options: dict[str, Any]) -> int:
    """`operant new reward short_reply` writes `short_reply.py` and `test_short_reply.py` into the working directory."""
    if len(words) != 2 or words[0] not in TRAINS_WITH:
        kinds = ", ".join(TRAINS_WITH)
        raise OperantError(f"give a kind ({kinds}) and a name, as in operant new reward short_reply; got {words}")
    kind, name = words
    if not name.isidentifier() or keyword.iskeyword(name) or not name.islower() or name in sys.stdlib_module_names:
        raise OperantError(f"{name!r} cannot be a module: use small letters, digits and _, as in short_reply")
    world = "".join(word.capitalize() for word in name.split("_"))
    files = {Path(f"{name}.py"): f"{kind}.txt", Path(f"test_{name}.py"): f"test_{kind}.txt"}
    for path in files:
        if path.exists():
            raise OperantError(f"{path} exists: choose another name, or move it away")
    for path, starter in files.items():
        text = (Path(__file__).parent / "starters" / starter).read_text(encoding="utf-8")
        atomic_io.write(path, text.replace("NAME", name).replace("CLASS", world))
    test = f"python -m pytest test_{name}.py"
    emit(f"wrote {name}.py and test_{name}.py\n  test   {test}", sys.stdout)
    emit(f"  train  {TRAINS_WITH[kind].format(name=name, world=world)}", sys.stdout)
    return 0
