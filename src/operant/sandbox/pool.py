"""Workers that answer JSON lines until a deadline, and are replaced where they do not.

pool = Pool(Job("operant.sandbox.reward_job:reward", "my_rewards:politeness"), Limits(), size=2)
pool.start(60.0)
replies = pool.run([[...], [...]], until=time.monotonic() + 30, allowance=lambda: 5.0)
replies[0].outcome      # "ok", "error" or "timeout"
pool.close()

Whatever a worker does, `run` is back within `until` + 2 s, and what is said of one request is said of no other.
"""

import json
import os
import selectors
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from operant.sandbox.process import Box, Limits
from operant.types import OperantError

BOOT = """import sys, json
sys.path[:] = json.loads(sys.argv[1])
from operant.sandbox.worker import main
main(sys.argv[2])"""
PRINTED = 2000
"""Bytes of what a worker prints that are kept, the last ones."""
ANSWER = 4 << 20
"""Bytes that an answer may have, beside as many as its request has."""
LATE = "has not answered in time"


@dataclass(frozen=True)
class Job:
    """What the workers of a pool do: `make`, a `module:function`, is called there once, with a plain `argument`."""

    make: str
    argument: Any


@dataclass(frozen=True)
class Reply:
    """What came of a request."""

    outcome: str
    """ok | error | timeout."""
    answer: Any = None
    why: str = ""
    """Where it is not ok."""
    alive: bool = False
    """Whether the worker can be asked again: it has answered, or raised."""


class Worker:
    """One box that is asked and answers. It is busy from the request on; it starts until it says that it is ready."""

    def __init__(self, job: Job, limits: Limits):
        requests, self.requests = os.pipe()
        self.answers, answers = os.pipe()
        self.output, output = os.pipe()
        for fd in (self.requests, self.answers, self.output):
            os.set_blocking(fd, False)
        told = {"requests": requests, "answers": answers, "make": job.make, "argument": job.argument}
        argv = [sys.executable, "-c", BOOT, json.dumps(list(map(str, sys.path))), json.dumps(told)]
        try:
            self.box = Box(argv, limits, fds=[requests, answers], output=output)
        except OSError as error:
            raise OperantError(
                f"a worker process cannot be started: {error}; is memory or the limit of processes used up?"
            ) from error
        finally:
            for fd in (requests, answers, output):
                os.close(fd)
        self.ready = False
        self.failed: Reply | None = None
        """Why it did not start."""
        self.place: int | None = None
        """Which request it works at."""
        self.deadline = float("inf")
        self.printed = b""
        self._unsent, self._heard, self._limit, self._token = memoryview(b""), bytearray(), ANSWER, ""
        self._silent_since: float | None = None
        self._lines: deque[bytes] = deque()

    @property
    def sources(self) -> list[Any]:
        """What to wait for."""
        open_pipe = [self.answers] if self._silent_since is None else []
        return [*open_pipe, self.output, self.box.control]

    def ask(self, place: int, request: Any) -> None:
        """Hand it a request, whose answer `reply` will be."""
        self._token = os.urandom(8).hex()  # an answer that was made up before the question is none
        line = json.dumps({"id": self._token, "ask": request}).encode() + b"\n"
        self._unsent, self._limit = memoryview(line), ANSWER + len(line)
        self.place, self.printed, self.deadline = place, b"", float("inf")
        self.push()

    @property
    def unsent(self) -> bool:
        return bool(self._unsent)

    def push(self) -> None:
        """Send on what the pipe takes."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self.requests, self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = memoryview(b"")  # it reads no more: how it ended is told elsewhere

    def pull(self) -> None:
        """Take in what it has said, printed, and what its keeper tells."""
        self.box.hear()
        self._listen()
        with suppress(OSError):
            self.printed = (self.printed + os.read(self.output, 1 << 16))[-PRINTED:]
        if not self.ready and self.failed is None and self._lines:
            first = self._parsed(self._lines.popleft())
            self.ready = first.get("answer") == {"ready": True}
            if not self.ready:
                self.failed = Reply("error", why=str(first.get("error", "does not start")) + self._said())

    def _listen(self) -> None:
        try:
            said = os.read(self.answers, 1 << 20)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said and self._silent_since is None:
            self._silent_since = time.monotonic()
        self._heard += said
        if b"\n" in said:
            *lines, self._heard = self._heard.split(b"\n")
            self._lines += lines

    def reply(self) -> Reply | None:
        """What came of the request; None while nothing has."""
        if self.failed is not None:
            return self.failed
        if self.ready and self._lines:
            return self._read(self._parsed(self._lines.popleft()))
        if len(self._heard) > self._limit:
            return Reply("error", why=f"answered with more than {self._limit / 1e6:.0f} MB")
        if self.box.ended is not None:
            return Reply("error", why=self.box.ended + self._said())
        if self._silent_since is not None and time.monotonic() - self._silent_since > 0.3:
            return Reply("error", why="closed the pipe that its answer is expected on" + self._said())
        return None

    def _read(self, told: dict[str, Any]) -> Reply:
        if told.get("id") != self._token or not {"answer", "error"} & set(told):
            return Reply("error", why="wrote something else than its answer to the pipe that is kept for it")
        if "answer" in told:
            return Reply("ok", told["answer"], alive=True)
        return Reply("error", why=f"raised {told['error']}" + self._said(), alive=True)

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            told = json.loads(line) if len(line) <= self._limit else None
        except (ValueError, RecursionError):
            told = None
        return told if isinstance(told, dict) else {}

    def _said(self) -> str:
        """What it has printed, for a message."""
        text = self.printed.decode("utf-8", errors="replace").strip()
        return f"; it printed ...{text[-300:]!r}" if text else ""

    @property
    def clean(self) -> bool:
        """Whether it waits for a request, and has said nothing that nobody has asked for."""
        return self.box.ended is None and self._silent_since is None and not self._lines and not self._heard

    def close(self, patience: float = 1.0) -> None:
        self.box.end(patience)
        for fd in (self.requests, self.answers, self.output):
            with suppress(OSError):
                os.close(fd)


class Pool:
    """Workers that all do the same `job`; they live from one `run` to the next."""

    def __init__(self, job: Job, limits: Limits, size: int = 1):
        self.job, self.limits, self.size = job, limits, size
        self.workers: list[Worker] = []
        self.left_behind = 0
        """Processes that the requests so far have left behind, and that were killed."""
        self._lock, self._owner = threading.Lock(), os.getpid()
        weakref.finalize(self, _end, self.workers)

    def start(self, seconds: float) -> None:
        """Start the workers and wait until all are ready. Raises: OperantError with why one is not."""
        with self._owned():
            self._fill()
            end = time.monotonic() + seconds
            while not all(worker.ready for worker in self.workers):
                self._wait(end)
                why = next((w.failed or w.reply() for w in self.workers if not w.ready), None)
                if why is not None or time.monotonic() > end:
                    self._drop(self.workers)
                    raise OperantError(why.why if why else f"was not ready after {seconds:g} s")

    @property
    def level(self) -> str:
        """What holds the workers that run now, in words; empty where none does."""
        return next((worker.box.describe() for worker in self.workers if worker.ready), "")

    def run(
        self, requests: Sequence[Any], *, until: float, allowance: Callable[[], float | None] = lambda: None
    ) -> list[Reply]:
        """A reply to each request. `until` in `time.monotonic()`; `allowance` is asked for the seconds of the next."""
        replies: list[Reply | None] = [None] * len(requests)
        waiting = deque(range(len(requests)))
        with self._owned():
            try:
                while None in replies and time.monotonic() < until:
                    self._hand_out(waiting, requests)
                    self._wait(until)
                    for worker in [w for w in self.workers if w.place is not None]:
                        self._attend(worker, replies, until, allowance)
            finally:
                late = [w for w in self.workers if w.place is not None]
                self._drop(late)
                self._sweep()
                if late:
                    self._fill()  # they start while the run goes on
        return [reply or Reply("timeout", why=LATE) for reply in replies]

    def close(self) -> None:
        """End the workers; the next `run` starts others."""
        with self._owned():
            self._drop(self.workers)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _owned(self) -> threading.Lock:
        """The lock. In a forked copy of the run, the workers are the other's: new ones are started."""
        if os.getpid() != self._owner:
            self._lock, self._owner = threading.Lock(), os.getpid()
            self._drop(self.workers)
        return self._lock

    def _fill(self) -> None:
        self.workers += [Worker(self.job, self.limits) for _ in range(self.size - len(self.workers))]

    def _drop(self, workers: list[Worker]) -> None:
        """End these, all at once; who is slow to die is waited for together."""
        _end(workers)
        self.workers[:] = [w for w in self.workers if w not in workers]

    def _hand_out(self, waiting: deque[int], requests: Sequence[Any]) -> None:
        for worker in [w for w in self.workers if w.place is None]:
            worker.pull()
        self._drop([w for w in self.workers if w.place is None and not (w.clean and w.failed is None)])
        if len([w for w in self.workers if w.place is None]) < len(waiting):
            self._fill()
        for worker in [w for w in self.workers if w.place is None][: len(waiting)]:
            place = waiting.popleft()
            worker.ask(place, requests[place])

    def _wait(self, until: float) -> None:
        """Until somebody has something to say, or a deadline is there; take in what was said."""
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                for source in worker.sources:
                    selector.register(source, selectors.EVENT_READ, worker)
                if worker.unsent:
                    selector.register(worker.requests, selectors.EVENT_WRITE, worker)
            first = min([until, *(w.deadline for w in self.workers)])
            ready = selector.select(max(min(first - time.monotonic(), 0.2), 0))
        for worker in {id(key.data): key.data for key, _ in ready}.values():
            worker.push()
            worker.pull()

    def _attend(
        self, worker: Worker, replies: list[Reply | None], until: float, allowance: Callable[[], float | None]
    ) -> None:
        """Note what a busy worker has answered; end it where that was wrong or its time is over."""
        assert worker.place is not None  # it is busy
        now = time.monotonic()
        if worker.ready and worker.deadline == float("inf"):
            worker.deadline = min(until, now + (allowance() or float("inf")))
        reply = worker.reply() or (Reply("timeout", why=LATE) if now >= worker.deadline else None)
        if reply is None:
            return
        replies[worker.place], worker.place, worker.deadline = reply, None, float("inf")
        if not reply.alive:
            self._drop([worker])

    def _sweep(self) -> None:
        """Kill what the requests have left behind in the workers that stay."""
        asked = [w for w in self.workers if w.ready and w.box.level]
        for worker in asked:
            worker.box.sweep()
        end = time.monotonic() + 0.5
        while time.monotonic() < end and any(w.box.left is None and w.box.ended is None for w in asked):
            self._wait(end)
        self.left_behind += sum(w.box.left or 0 for w in asked)


def _end(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.box.ask_end()
    end = time.monotonic() + 1.0
    for worker in workers:
        worker.close(max(end - time.monotonic(), 0.05))
