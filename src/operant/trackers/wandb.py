"""Weights & Biases: a run in `runs/x/wandb`. It is sent during training if there is an API key, else kept offline."""

import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from operant.trackers.base import PROJECT, ExternalTracker, StepData, as_row, quiet

INIT_SECONDS, FINISH_SECONDS = 30.0, 60.0
"""How long W&B may take to answer at the start, and to send the rest of the run at the end."""


class WandB(ExternalTracker):
    """Writes to W&B. WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY and the like keep their usual meaning."""

    name = "wandb"

    def __init__(self, run_folder: str | Path, log_message: Callable[[str], Any]) -> None:
        super().__init__(run_folder, log_message)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # telemetry about W&B itself is opt-in
        import wandb

        self._wandb: Any = wandb
        self._run: Any = None

    def begin(self, config: Mapping[str, Any]) -> None:
        """Begin or continue the run; it is kept offline if W&B does not answer."""
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
            self.log_message(f"wandb: {self._run.url}")

    def write(self, step: int, data: StepData) -> None:
        """Add to the row of the step. W&B closes a row when the next step begins."""
        row = as_row(self._wandb, data)
        with self._quiet_in_run_folder():
            self._run.log(row, step=step)

    def end(self, failed: bool) -> None:
        """Send the rest, for at most `FINISH_SECONDS`; unsent data stay on the disk."""
        if self._run is not None:
            with self._quiet_in_run_folder():
                try:
                    self._run.finish(exit_code=int(failed))
                except Exception:  # the service has died; without a teardown, Python would wait for it at exit
                    self._wandb.teardown()
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

    def _begin(self, config: Mapping[str, Any]) -> str:
        """Begin the run online if possible, else offline. Return why it is offline, or an empty string.

        The user is never asked for an API key.
        """
        wandb = self._wandb
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

    def _init(self, config: Mapping[str, Any], mode: str | None = None) -> Any:
        """Call `wandb.init` without output, with timeouts, and without any data about the machine or the code."""
        settings = {
            "silent": True,
            "console": "off",
            "init_timeout": INIT_SECONDS,
            "finish_timeout": FINISH_SECONDS,
            "disable_git": True,
            "disable_code": True,
            "x_save_requirements": False,
            "x_disable_meta": True,  # host, user, command line
            "x_disable_machine_info": True,
            "x_disable_stats": True,
        }
        known = self._wandb.Settings.model_fields  # settings that begin with x_ may change with the version
        return self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", self.run_folder.resolve().name),
            id=self.state["id"],
            resume=None if mode == "offline" else "allow",
            mode=mode,
            dir=str(self.run_folder),
            config=dict(config),
            reinit="create_new",  # the calling program may have a run of its own
            settings=self._wandb.Settings(**{name: x for name, x in settings.items() if name in known}),
        )
