"""trackio: a small local database in `runs/x/trackio`, for `TRACKIO_DIR=runs/x/trackio trackio show`."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from operant.trackers.base import COLUMNS, PROJECT, Copy, Shown, edges, quiet
from operant.types import OperantError


class Trackio(Copy):
    """Writes to trackio. TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL mean what they always mean."""

    name = "trackio"

    def __init__(self, folder: str | Path, say: Callable[[str], Any]) -> None:
        super().__init__(folder, say)
        import trackio  # noqa: F401 - whether it is there

        self._run: Any = None

    def begin(self, config: Mapping[str, Any]) -> None:
        """Begin, or go on with the same run."""
        import trackio

        away = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL", "").split("?")[0]
        place = _place(self.folder)
        self.memory.setdefault("name", self._new_name())
        warnings.filterwarnings("ignore", module=r"trackio(\.|$)")  # `_fail_if_lost` looks at what they say
        with quiet(), _asking_nobody(not away):
            self._run = trackio.init(
                PROJECT,
                name=self.memory["name"],
                config=dict(config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        show = f"look with: TRACKIO_DIR={place} trackio show --project {PROJECT}"
        self.say(f"trackio: sent to {away}" if away else f"trackio: {show}")

    def write(self, step: int, shown: Shown) -> None:
        """Add a row."""
        import trackio

        row: dict[str, Any] = dict(shown.scalars)
        for name, histogram in shown.histograms.items():
            row[name] = trackio.Histogram(np_histogram=(histogram.counts, edges(histogram)))
        if shown.replies:
            row["replies"] = trackio.Table(columns=list(COLUMNS), data=shown.replies)
        self._run.log(row, step=step)
        self._fail_if_lost()

    def shut(self, failed: bool) -> None:
        """Write what is left; trackio itself gives up after half a minute."""
        import trackio

        if self._run is not None:
            with quiet():
                trackio.finish()
            self._fail_if_lost()

    def _new_name(self) -> str:
        """The folder's name; in a database that other runs share, its whole path."""
        path = self.run.resolve()
        return str(path) if os.environ.get("TRACKIO_DIR") else path.name

    def _fail_if_lost(self) -> None:
        """trackio only warns where it cannot write, and from another thread."""
        lost = sorted(getattr(self._run, "_warned_failures", ()))
        if lost:
            raise OperantError(f"trackio could not keep what it was given ({', '.join(lost)})")


def _place(folder: Path) -> Path:
    """Make trackio write to `folder`, unless TRACKIO_DIR says where: it looks there once, when it is imported."""
    if os.environ.get("TRACKIO_DIR"):
        return Path(os.environ["TRACKIO_DIR"])
    places = {"TRACKIO_DIR": folder, "MEDIA_DIR": folder / "media", "ARTIFACTS_DIR": folder / "artifacts"}
    for module in [m for name, m in sys.modules.items() if name.split(".")[0] == "trackio"]:
        for name in places.keys() & vars(module).keys():
            setattr(module, name, places[name])
    return folder


@contextmanager
def _asking_nobody(alone: bool) -> Iterator[None]:
    """Keep trackio, which asks the Hub for the user's name where there is a token, from asking."""
    from huggingface_hub import constants

    held = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = alone or held
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = held
