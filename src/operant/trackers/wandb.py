"""Weights & Biases: a run in `runs/x/wandb`, sent as it goes where there is an API key, kept offline elsewhere."""

import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from operant.trackers.base import COLUMNS, PROJECT, Copy, Shown, edges, quiet

INIT_SECONDS, FINISH_SECONDS = 30.0, 60.0
"""How long W&B may take to answer at the start, and to take what is left at the end."""


class WandB(Copy):
    """Writes to W&B. WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY and their like mean what they always mean."""

    name = "wandb"

    def __init__(self, folder: str | Path, say: Callable[[str], Any]) -> None:
        super().__init__(folder, say)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # their own telemetry: nobody asked for it
        import wandb  # noqa: F401 - whether it is there

        self._run: Any = None

    def begin(self, config: Mapping[str, Any]) -> None:
        """Begin, or go on with the same run. Where W&B does not answer, the run is kept offline."""
        self.memory.setdefault("id", secrets.token_hex(4))
        hooks = sys.exit, sys.excepthook
        try:
            with self._at_home():
                why = _why_offline()
                if not why:
                    why = self._try_online(config)
                if why:
                    self._run = self._init(config, mode="offline")
        finally:
            sys.exit, sys.excepthook = hooks  # how this process ends is none of W&B's business
        send = f"the run is kept offline, send it with: wandb sync {self._run.settings.sync_dir}"
        self.say(f"wandb: {why}: {send}" if why else f"wandb: {self._run.url}")

    def write(self, step: int, shown: Shown) -> None:
        """Add to the step; W&B closes it when the next one comes."""
        import wandb

        row: dict[str, Any] = dict(shown.scalars)
        for name, histogram in shown.histograms.items():
            row[name] = wandb.Histogram(np_histogram=(list(histogram.counts), edges(histogram)))
        if shown.replies:
            row["replies"] = wandb.Table(columns=list(COLUMNS), data=shown.replies)
        with self._at_home():
            self._run.log(row, step=step)

    def shut(self, failed: bool) -> None:
        """Send what is left, for a minute at most; what was not sent stays on the disk."""
        if self._run is not None:
            import wandb

            with self._at_home():
                try:
                    self._run.finish(exit_code=int(failed))
                except Exception:  # its service is gone: else it would be asked again when Python ends
                    wandb.teardown()
                    raise

    @contextmanager
    def _at_home(self) -> Iterator[None]:
        """Quiet, and with the files that wait to be sent in the run folder: W&B looks up where, time and again."""
        ours = "WANDB_DATA_DIR" not in os.environ
        if ours:
            os.environ["WANDB_DATA_DIR"] = str(self.folder.resolve() / "data")
        try:
            with quiet():
                yield
        finally:
            if ours:
                del os.environ["WANDB_DATA_DIR"]

    def _try_online(self, config: Mapping[str, Any]) -> str:
        """Begin; or else why not."""
        import wandb

        try:
            self._run = self._init(config)
            return ""
        except (wandb.Error, TimeoutError) as error:
            wandb.teardown()  # else the id counts as taken
            return f"no answer from W&B ({' '.join(str(error).split())[:200]})"

    def _init(self, config: Mapping[str, Any], mode: Any = None) -> Any:
        import wandb

        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", self.run.resolve().name),
            id=self.memory["id"],
            resume=None if mode == "offline" else "allow",
            mode=mode,
            dir=str(self.run),
            config=dict(config),
            reinit="create_new",  # the program around us may have a run of its own
            settings=_settings(),
        )


def _why_offline() -> str:
    """Why nothing is to be sent; empty where it is. Nobody is asked for a key."""
    import wandb

    mode = wandb.setup().settings.mode
    if mode in ("offline", "dryrun"):
        return "WANDB_MODE is offline"
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        return "no API key is configured"
    return ""


def _settings() -> Any:
    """Silent, with ends to its patience; and only what operant tells leaves the machine."""
    import wandb

    wanted = {
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
    known = wandb.Settings.model_fields  # a name that begins with x_ may be another one tomorrow
    return wandb.Settings(**{name: value for name, value in wanted.items() if name in known})
