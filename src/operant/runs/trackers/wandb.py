"""The trackers with W&B's API: Weights & Biases itself, and trackio, a small local database.

W&B writes a run to `runs/x/wandb`, and sends it during training if there is an API key; else the run is kept offline.
trackio writes to `runs/x/trackio`, for `TRACKIO_DIR=runs/x/trackio trackio show`.
"""

import importlib
import os
import secrets
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from operant.runs.trackers.base import COLUMNS, PROJECT, ExternalTracker, StepData, edges, quiet
from operant.types import require

INIT_SECONDS, FINISH_SECONDS = 30.0, 60.0
"""How long W&B may take to answer at the start, and to send the rest of the run at the end."""


class WandB(ExternalTracker):
    """Writes to W&B. WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY and the like keep their usual meaning."""

    name = "wandb"

    def __init__(self, run_folder: str | Path, log_message: Callable[[str], object]) -> None:
        super().__init__(run_folder, log_message)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # telemetry about W&B itself is opt-in
        self._package: Any = importlib.import_module(self.name)
        self._run: Any = None

    def begin(self, config: Mapping[str, object]) -> None:
        self.state.setdefault("id", secrets.token_hex(4))
        hooks = sys.exit, sys.excepthook
        try:
            with self._quiet_in_run_folder():
                offline_reason = self._begin(config)
        finally:
            sys.exit, sys.excepthook = hooks  # W&B replaces them, but does not decide how this process ends
        if offline_reason:
            command = f"wandb sync {self._run.settings.sync_dir}"
            self.log_message(f"wandb: {offline_reason}: the run is kept offline, send it with: {command}")
        else:
            self.log_message(f"wandb: {self._run.url or 'WANDB_MODE is disabled, so nothing is written'}")

    def write(self, step: int, data: StepData) -> None:
        row: dict[str, Any] = dict(data.scalars)
        for name, histogram in data.histograms.items():
            row[name] = self._package.Histogram(np_histogram=(list(histogram.counts), edges(histogram)))
        if data.replies:
            row["replies"] = self._package.Table(columns=list(COLUMNS), data=data.replies)
        with self._quiet_in_run_folder():
            self._run.log(row, step=step)

    def end(self, failed: bool) -> None:
        """Send the rest, for at most `FINISH_SECONDS`; unsent data stay on the disk."""
        if self._run is not None:
            with self._quiet_in_run_folder():
                try:
                    self._run.finish(exit_code=int(failed))
                except Exception:  # the service has died; without a teardown, Python would wait for it at exit
                    self._package.teardown()
                    raise

    @contextmanager
    def _quiet_in_run_folder(self) -> Iterator[None]:
        """Suppress output, and keep the files that W&B has still to send in the run folder.

        W&B reads WANDB_DATA_DIR at every call, so it is set for every call.
        """
        set_here = "WANDB_DATA_DIR" not in os.environ
        if set_here:
            os.environ["WANDB_DATA_DIR"] = str(self.folder.resolve() / "data")
        try:
            with quiet():
                yield
        finally:
            if set_here:
                del os.environ["WANDB_DATA_DIR"]

    def _begin(self, config: Mapping[str, object]) -> str:
        """Begin the run online if possible, else offline. Return why it is offline, or an empty string.

        The user is never asked for an API key.
        """
        wandb = self._package
        mode = wandb.setup().settings.mode
        if mode in ("offline", "dryrun"):
            reason = "WANDB_MODE is offline"
        elif mode == "online" and not wandb.login(prompt=False, verify=False):
            reason = "no API key is configured"
        else:
            try:
                self._run = self._init(config)
                return ""
            except (wandb.Error, TimeoutError) as error:
                wandb.teardown()  # otherwise the id counts as taken
                reason = f"no answer from W&B ({' '.join(str(error).split())[:200]})"
        self._run = self._init(config, mode="offline")
        return reason

    def _init(self, config: Mapping[str, object], mode: str | None = None) -> object:
        # The metadata are host, user and command line.
        off = ("disable_git", "disable_code", "x_disable_meta", "x_disable_machine_info", "x_disable_stats")
        settings = {"silent": True, "console": "off", "x_save_requirements": False} | dict.fromkeys(off, True)
        settings |= {"init_timeout": INIT_SECONDS, "finish_timeout": FINISH_SECONDS}
        known = self._package.Settings.model_fields  # settings that begin with x_ may change with the version
        return self._package.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", self.run_folder.resolve().name),
            id=self.state["id"],
            resume=None if mode == "offline" else "allow",
            mode=mode,
            dir=str(self.run_folder),
            config=dict(config),
            reinit="create_new",  # the calling program may have a run of its own
            settings=self._package.Settings(**{name: x for name, x in settings.items() if name in known}),
        )


class Trackio(WandB):
    """Writes to trackio. TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL keep their usual meaning."""

    name = "trackio"

    def begin(self, config: Mapping[str, object]) -> None:
        remote = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL", "").split("?")[0]
        database = use_folder(self.folder)
        path = self.run_folder.resolve()  # other runs may be in a database that TRACKIO_DIR names: the path is unique
        self.state.setdefault("name", str(path) if os.environ.get("TRACKIO_DIR") else path.name)
        warnings.filterwarnings("ignore", module=r"trackio(\.|$)")  # `_raise_if_lost` makes errors of them
        with quiet(), _hub_offline(not remote):
            off = dict.fromkeys(("embed", "auto_log_gpu", "auto_log_cpu"), False)
            self._run = self._package.init(PROJECT, name=self.state["name"], config=dict(config), resume="allow", **off)
        show = f"look with: TRACKIO_DIR={database} trackio show --project {PROJECT}"
        self.log_message(f"trackio: sent to {remote}" if remote else f"trackio: {show}")

    def write(self, step: int, data: StepData) -> None:
        super().write(step, data)
        self._raise_if_lost()

    def end(self, failed: bool) -> None:
        """Write the remaining rows; trackio itself gives up after half a minute."""
        if self._run is not None:
            with quiet():
                self._run.finish()
            self._raise_if_lost()

    def _raise_if_lost(self) -> None:
        """Raise an OperantError if trackio lost data. It writes in another thread, and only warns of failures."""
        lost = sorted(getattr(self._run, "_warned_failures", ()))
        require(not lost, f"trackio could not write all data ({', '.join(lost)}); see that its folder is writable")


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
