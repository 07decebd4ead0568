"""trackio: a small local database in `runs/x/trackio`, for `TRACKIO_DIR=runs/x/trackio trackio show`."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from operant.trackers.base import PROJECT, ExternalTracker, StepData, as_row, quiet
from operant.types import OperantError


class Trackio(ExternalTracker):
    """Writes to trackio. TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL keep their usual meaning."""

    name = "trackio"

    def __init__(self, run_folder: str | Path, log_message: Callable[[str], Any]) -> None:
        super().__init__(run_folder, log_message)
        import trackio

        self._trackio: Any = trackio
        self._run: Any = None

    def begin(self, config: Mapping[str, Any]) -> None:
        """Begin or continue the run."""
        remote = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL", "").split("?")[0]
        database = use_folder(self.folder)
        path = self.run_folder.resolve()  # other runs may be in a database that TRACKIO_DIR names: the path is unique
        self.state.setdefault("name", str(path) if os.environ.get("TRACKIO_DIR") else path.name)
        warnings.filterwarnings("ignore", module=r"trackio(\.|$)")  # `_raise_if_lost` makes errors of them
        with quiet(), _hub_offline(not remote):
            self._run = self._trackio.init(
                PROJECT,
                name=self.state["name"],
                config=dict(config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        show = f"look with: TRACKIO_DIR={database} trackio show --project {PROJECT}"
        self.log_message(f"trackio: sent to {remote}" if remote else f"trackio: {show}")

    def write(self, step: int, data: StepData) -> None:
        """Add a row."""
        self._run.log(as_row(self._trackio, data), step=step)
        self._raise_if_lost()

    def end(self, failed: bool) -> None:
        """Write the remaining rows; trackio itself gives up after half a minute."""
        if self._run is not None:
            with quiet():
                self._trackio.finish()
            self._raise_if_lost()

    def _raise_if_lost(self) -> None:
        """Raise an OperantError if trackio lost data. It writes in another thread, and only warns of failures."""
        lost = sorted(getattr(self._run, "_warned_failures", ()))
        if lost:
            raise OperantError(f"trackio could not write all data ({', '.join(lost)}); see that its folder is writable")


def use_folder(folder: Path) -> Path:
    """Make trackio write to `folder` unless TRACKIO_DIR is set, and return where it writes.

    trackio reads TRACKIO_DIR only when it is imported, so the paths in its modules are changed.
    """
    if os.environ.get("TRACKIO_DIR"):
        return Path(os.environ["TRACKIO_DIR"])
    paths = {"TRACKIO_DIR": folder, "MEDIA_DIR": folder / "media", "ARTIFACTS_DIR": folder / "artifacts"}
    for module in [m for name, m in sys.modules.items() if name.split(".")[0] == "trackio"]:
        for name in paths.keys() & vars(module).keys():
            setattr(module, name, paths[name])
    return folder


@contextmanager
def _hub_offline(local: bool) -> Iterator[None]:
    """If `local`, set huggingface_hub offline: with a token, trackio would ask the Hub for the user's name."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = local or before
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
