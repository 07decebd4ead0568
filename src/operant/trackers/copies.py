"""The trackers that come with operant, by name.

    copies = make_trackers(["tensorboard", "wandb"], "runs/sentiment", say=folder.say)

Each is an extra: `pip install 'operant[wandb]'`.
"""

import difflib
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from operant.trackers.base import Copy
from operant.trackers.tensorboard import TensorBoard
from operant.trackers.trackio import Trackio
from operant.trackers.wandb import WandB
from operant.types import OperantError

TRACKERS: dict[str, type[Copy]] = {made.name: made for made in (TensorBoard, WandB, Trackio)}


def make_trackers(names: Iterable[str], folder: str | Path, say: Callable[[str], Any] = warnings.warn) -> list[Copy]:
    """A tracker for each name, once, none of them begun. folder: the run folder. say: takes what goes into its log.

    Raises: OperantError for an unknown name, with the nearest, and for a package that is not installed.
    """
    return [_made(name, folder, say) for name in dict.fromkeys(names)]


def _made(name: str, folder: str | Path, say: Callable[[str], Any]) -> Copy:
    if name not in TRACKERS:
        near = difflib.get_close_matches(name, TRACKERS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(TRACKERS)}"
        raise OperantError(f"trackers={name!r} is unknown; {hint}")
    try:
        return TRACKERS[name](folder, say)
    except ImportError as error:
        why = "" if (error.name or "").split(".")[0] == name else f" ({error})"
        raise OperantError(f"trackers={name} needs the package {name}{why}: pip install 'operant[{name}]'") from error
