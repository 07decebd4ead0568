"""Generation by a vLLM server that this process starts, in an environment of its own, as vLLM pins other versions.

Nothing of vLLM is imported here: its command `vllm serve` is run with the policy's exported folder, and asked as any
other server (`openai.py`).
"""

import atexit
import os
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any

from operant import distributed
from operant.engines.openai import OpenAIEngine, Reply, check_exported
from operant.machine import beat
from operant.models.loading import replace_export
from operant.models.policy import Policy
from operant.sandbox.process import Limits, SupervisedProcess
from operant.types import OperantError, require, shown

HOST = "127.0.0.1"
"""The server is reached from this machine alone."""
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
"""No telemetry, nothing from the Hub, and the paths with which weights are loaded."""
LOOK_EVERY = 0.2
"""Seconds between two questions to a server that is starting."""
PATIENCE = 2.0
"""Seconds after a failed request in which the end of the server may still become known."""


class VLLMEngine(OpenAIEngine):
    """A vLLM server on the loopback interface that ends with this process, and is started again if it dies.

    python: that of an environment with vLLM. args: further arguments of `vllm serve`, such as
    `--gpu-memory-utilization 0.4 --dtype float32`. port: of the server; 0: a free one. folder: where the policy is
    written for it, with room for its weights twice; None: a temporary folder. start_timeout: seconds until it must be
    ready. restarts: how often it may be started again. at_once, timeout: as of `OpenAIEngine`.
    A restart loses nothing: the server loads the newest weights, and is asked again for the replies that are missing.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        python: Path | None = None,
        args: str = "",
        port: int = 0,
        folder: Path | None = None,
        at_once: int = 256,
        timeout: float = 600.0,
        start_timeout: float = 900.0,
        restarts: int = 3,
    ):
        check_exported(policy, "vllm")
        remedy = "python -m venv VENV, VENV/bin/pip install vllm, and --engine.python VENV/bin/python"
        require(python is not None, f"engine=vllm needs an environment of its own, with vLLM in it: {remedy}")
        self.command = Path(os.path.abspath(Path(python).expanduser())).with_name("vllm")
        missing = f"engine.python={shown(str(python))}: there is no {self.command}"
        require(self.command.is_file(), f"{missing}. vLLM needs its own environment, {remedy}")
        if distributed.world() > 1:
            raise OperantError(
                f"engine=vllm with {distributed.world()} ranks: each would start a server; start one yourself "
                "(docs/engines.md), and use engine=openai"
            )
        require(restarts >= 0, f"engine.restarts={restarts}: it must be at least 0")
        require(0 <= port < 65536, f"engine.port={port}: it must lie in 0..65535; 0 is a free one")
        with socket.socket() as free:
            try:
                free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                free.bind((HOST, port))
            except OSError as error:
                raise OperantError(f"engine.port={port}: {error.strerror}; leave it out for a free one") from error
            port = free.getsockname()[1]
        self.args, self.port, self.start_timeout, self.restarts = shlex.split(args), port, start_timeout, restarts
        self.home = Path(tempfile.mkdtemp(prefix="operant-vllm-"))
        self.process: SupervisedProcess | None = None
        atexit.register(self.close)
        where = self.home / "policy" if folder is None else folder
        try:
            url = f"http://{HOST}:{port}/v1"
            super().__init__(policy, url=url, model="policy", folder=where, at_once=at_once, timeout=timeout, tries=3)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the server with everything that it has started, and delete the temporary folder."""
        atexit.unregister(self.close)
        if self.process is not None:
            self.process.end()
        shutil.rmtree(self.home, ignore_errors=True)

    @property
    def runs(self) -> bool:
        if self.process is None:
            return False
        self.process.receive()
        return self.process.ended is None

    def survives(self) -> bool:
        """Whether the server runs after an error: its end is known a moment later than a connection that broke."""
        end = time.monotonic() + PATIENCE
        while self.runs and time.monotonic() < end:
            time.sleep(LOOK_EVERY)
        return self.runs

    def load(self, policy: Policy) -> None:
        """Let the server load the exported policy: one that runs, or a new one."""
        if self.process is None:
            assert self.folder is not None
            replace_export(policy, self.folder)
            self.start(policy.tokenizer is not None)
            return
        try:
            super().load(policy)
        except OperantError:
            if self.survives():
                raise
            self.restart()

    def ask(self, requests: Mapping[int, dict[str, Any]], answers: dict[int, Reply]) -> None:
        """Send the requests that have no answer yet, again after each restart."""
        while len(answers) < len(requests):
            if not self.runs:
                self.restart()
            try:
                super().ask({i: request for i, request in requests.items() if i not in answers}, answers)
            except OperantError:
                if self.survives():
                    raise

    def restart(self) -> None:
        if not self.restarts:
            raise OperantError(f"vLLM has died, and engine.restarts are spent. {self.said()}")
        self.restarts -= 1
        self.start(self.policy.tokenizer is not None)

    def start(self, tokenizer: bool) -> None:
        told = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
        apart = [shutil.which("env") or "env", "-u", "PYTHONPATH", "-u", "PYTHONHOME", *told]
        own = ["--host", HOST, "--port", str(self.port), "--served-model-name", "policy"]
        own += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        own += [] if tokenizer else ["--skip-tokenizer-init"]
        with open(self.home / "server.log", "ab") as log:
            argv = [*apart, str(self.command), "serve", str(self.folder), *own, *self.args]
            self.process = SupervisedProcess(argv, Limits(processes=None, level="sub-reaper"), output=log.fileno())
        end = time.monotonic() + self.start_timeout
        while self.runs and time.monotonic() < end:
            beat()
            try:
                self.client.fetch(f"http://{HOST}:{self.port}/health", timeout=5).close()
            except (OSError, HTTPException):
                time.sleep(LOOK_EVERY)
            else:
                return
        late = f"is not ready after engine.start_timeout={self.start_timeout:g} seconds"
        raise OperantError(f"vLLM {late if self.runs else 'ended at its start'}. {self.said()}")

    def said(self) -> str:
        text = (self.home / "server.log").read_text(encoding="utf-8", errors="replace")
        return f"Its last lines: {' | '.join(text.strip().splitlines()[-5:])[-1500:] or 'none'}"
