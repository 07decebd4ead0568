"""Workers that answer requests as JSON lines before a deadline, and are replaced if they fail.

pool = Pool(Job("operant.sandbox.reward_call:judge_plain", "my_rewards:politeness"), Limits(), size=2)
pool.start(60.0)
responses = pool.run([[...], [...]], until=time.monotonic() + 30, allowance=lambda: 5.0)
responses[0].outcome      # "ok", "error" or "timeout"
pool.close()

Whatever a worker does, `run` returns within `until` + 2 s, and an answer to one request is never taken for another's.
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
from typing import Any, Literal

from operant.sandbox.process import Limits, SupervisedProcess
from operant.types import OperantError

BOOT = """import sys, json
sys.path[:] = json.loads(sys.argv[1])
from operant.sandbox.worker import main
main(sys.argv[2])"""
MAX_PRINTED = 2000
"""Bytes of a worker's output that are kept for messages, the last ones."""
MAX_ANSWER = 64 << 20
"""Bytes that an answer may have more than its request."""
START = 60.0
"""Seconds in which a worker must start and import its job, or the timeout of a request if that is longer."""
LATE = "has not answered in time"


@dataclass(frozen=True)
class Job:
    """The job of a pool's workers: each calls `make`, a `module:function`, once with a plain `argument`.

    It returns the function that answers the requests.
    """

    make: str
    argument: Any


@dataclass(frozen=True)
class Response:
    outcome: Literal["ok", "error", "timeout"]
    content: Any = None
    reason: str = ""
    reusable: bool = False
    """Whether the worker can take another request: it has answered, or has raised an exception."""


class Worker:
    """One worker process. It starts, then waits for a request, then works on it; `index` is the request's number."""

    def __init__(self, job: Job, limits: Limits):
        try:
            argument = json.dumps(job.argument, default=os.fspath).encode() + b"\n"
        except TypeError as error:
            raise OperantError(f"a worker process gets plain data and paths alone: {error}") from error
        requests, self.requests = os.pipe()
        self.answers, answers = os.pipe()
        self.output, output = os.pipe()
        for fd in (self.requests, self.answers, self.output):
            os.set_blocking(fd, False)
        setup = {"requests": requests, "answers": answers, "make": job.make}
        argv = [sys.executable, "-c", BOOT, json.dumps(list(map(str, sys.path))), json.dumps(setup)]
        try:
            self.process = SupervisedProcess(argv, limits, fds=[requests, answers], output=output)
        except OSError as error:
            why = f"{error}; is memory or the limit of processes used up?"
            raise OperantError(f"a worker process cannot be started: {why}") from error
        finally:
            for fd in (requests, answers, output):
                os.close(fd)
        self.ready, self.begun = False, time.monotonic()
        self.start_failure: Response | None = None
        self.index: int | None = None
        self.deadline = float("inf")
        self._printed = b""
        # The argument may have megabytes, such as a tokenizer; a program's own arguments have at most 128 kB each.
        self._unsent = memoryview(argument)
        self._received, self._lines = bytearray(), deque[bytes]()
        self._max_answer, self._token = MAX_ANSWER, ""
        self._closed_since: float | None = None
        self.flush()

    def register(self, selector: selectors.BaseSelector) -> None:
        """Wait with `selector` for whatever the worker may send or take."""
        answers = [self.answers] if self._closed_since is None else []
        for source in (*answers, self.output, self.process.control):
            selector.register(source, selectors.EVENT_READ, self)
        if self._unsent:
            selector.register(self.requests, selectors.EVENT_WRITE, self)

    def send(self, index: int, request: object) -> None:
        """Send a request; `response` returns the response to it."""
        self._token = os.urandom(8).hex()  # so that an answer cannot be written before its request is known
        line = json.dumps({"id": self._token, "request": request}).encode() + b"\n"
        self._unsent, self._max_answer = memoryview(bytes(self._unsent) + line), MAX_ANSWER + len(line)
        self.index, self._printed, self.deadline = index, b"" if self.ready else self._printed, float("inf")
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self.requests, self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = memoryview(b"")  # the worker has closed the pipe; `response` finds out why

    def receive(self) -> None:
        self.process.receive()
        self._receive_answers()
        with suppress(OSError):
            self._printed = (self._printed + os.read(self.output, 1 << 16))[-MAX_PRINTED:]
        if not self.ready and self.start_failure is None and self._lines:
            first = self._parse(self._lines.popleft())
            self.ready = first.get("answer") == {"ready": True}
            if not self.ready:
                self.start_failure = Response("error", reason=str(first.get("error", "does not start")) + self._tail())

    def _receive_answers(self) -> None:
        try:
            data = os.read(self.answers, 1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data and self._closed_since is None:
            self._closed_since = time.monotonic()
        self._received += data
        if b"\n" in data:
            *lines, self._received = self._received.split(b"\n")
            self._lines += lines

    def response(self) -> Response | None:
        """The response to the request; None while there is none."""
        if self.start_failure is not None:
            return self.start_failure
        if self.ready and self._lines:
            message = self._parse(self._lines.popleft())
            if message.get("id") != self._token or not {"answer", "error"} & set(message):
                return Response("error", reason="wrote something else than its answer to the pipe for answers")
            if "answer" in message:
                return Response("ok", message["answer"], reusable=True)
            return Response("error", reason=f"raised {message['error']}" + self._tail(), reusable=True)
        if len(self._received) > self._max_answer:
            return Response("error", reason=f"answered with more than {self._max_answer / 1e6:.0f} MB")
        if self.process.ended is not None:
            return Response("error", reason=self.process.ended + self._tail())
        if self._closed_since is not None and time.monotonic() - self._closed_since > 0.3:
            return Response("error", reason="closed the pipe for answers" + self._tail())
        return None

    def _parse(self, line: bytes) -> dict[str, object]:
        """A line as a JSON object; empty if it is none."""
        with suppress(ValueError, RecursionError):
            if len(line) <= self._max_answer and isinstance(message := json.loads(line), dict):
                return message
        return {}

    def _tail(self) -> str:
        """The end of the worker's output, for a message."""
        text = self._printed.decode("utf-8", errors="replace").strip()
        return f"; it printed ...{text[-300:]!r}" if text else ""

    @property
    def usable(self) -> bool:
        """Whether it can take a request: it runs, and has sent nothing that was not requested."""
        running = self.process.ended is None and self.start_failure is None and self._closed_since is None
        return running and not self._lines and not self._received

    def close(self, patience: float = 1.0) -> None:
        self.process.end(patience)
        for fd in (self.requests, self.answers, self.output):
            with suppress(OSError):
                os.close(fd)


class Pool:
    """Workers that all do the same `job`; they live from one `run` to the next."""

    def __init__(self, job: Job, limits: Limits, size: int = 1):
        self.job, self.limits, self.size = job, limits, size
        self.workers, self.patience = list[Worker](), START  # seconds that a worker may take to start
        self.left_behind = 0
        """Number of orphans that all requests so far have left behind, and that were killed."""
        self._lock, self._owner = threading.Lock(), os.getpid()
        weakref.finalize(self, _end, self.workers)

    def start(self, seconds: float) -> None:
        """Start the workers and wait until all are ready. Raises: OperantError with the reason if one is not."""
        with self._owned():
            self._fill()
            self.patience, end = max(START, seconds), time.monotonic() + seconds
            while not all(worker.ready for worker in self.workers):
                self._wait(end)
                failure = next((w.response() for w in self.workers if not w.ready), None)
                if failure is not None or time.monotonic() > end:
                    self._drop(self.workers)
                    raise OperantError(failure.reason if failure else f"was not ready after {seconds:g} s")

    @property
    def level(self) -> str:
        """How the running workers are isolated and limited, for a log; empty if none runs."""
        return next((worker.process.describe() for worker in self.workers if worker.ready), "")

    def run(
        self,
        requests: Sequence[object],
        *,
        until: float,
        allowance: Callable[[], float | None] = lambda: None,
        keep_orphans: bool = False,
    ) -> list[Response]:
        """The response to each request, before `until` in `time.monotonic()`.

        `allowance` is called when work on a request begins, and returns the seconds for it, or None. `keep_orphans`:
        leave processes alone that a worker has started and that have lost their parent, as a server has that a later
        request still needs; they are killed by the next `run` without it, and when the worker ends.
        """
        responses: dict[int, Response] = {}
        waiting, had = deque(range(len(requests))), 0
        with self._owned():
            try:
                while len(responses) < len(requests) and time.monotonic() < until:
                    self._assign(waiting, requests)
                    had = max(had, len(self.workers))
                    self._wait(until)
                    for worker in [worker for worker in self.workers if worker.index is not None]:
                        self._collect(worker, responses, until, allowance)
            finally:
                old = time.monotonic() - self.patience  # one that starts is let to finish that
                self._drop([w for w in self.workers if w.index is not None or not (w.ready or w.begun > old)])
                if not keep_orphans:
                    self._kill_orphans()
                if len(self.workers) < had:
                    self._fill()  # they start while the run goes on
        return [responses.get(i) or Response("timeout", reason=LATE) for i in range(len(requests))]

    def close(self) -> None:
        """End the workers; the next `run` starts new ones."""
        with self._owned():
            self._drop(self.workers)

    def _owned(self) -> threading.Lock:
        """The pool's lock. In a forked copy of the run, the workers belong to the original: the copy starts its own."""
        if os.getpid() != self._owner:
            self._lock, self._owner = threading.Lock(), os.getpid()
            self._drop(self.workers)
        return self._lock

    def _fill(self) -> None:
        self.workers += [Worker(self.job, self.limits) for _ in range(self.size - len(self.workers))]

    def _drop(self, workers: list[Worker]) -> None:
        _end(workers)
        self.workers[:] = [worker for worker in self.workers if worker not in workers]

    def _free(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.index is None]

    def _assign(self, waiting: deque[int], requests: Sequence[object]) -> None:
        """Send waiting requests to free workers; those that are not usable any more are replaced."""
        for worker in self._free():
            worker.receive()
        self._drop([w for w in self._free() if not w.usable and (w.ready or not waiting)])
        if len(self._free()) < len(waiting):
            self._fill()
        for worker in [w for w in self._free() if w.ready or w.response() is not None][: len(waiting)]:
            index = waiting.popleft()
            worker.send(index, requests[index])

    def _wait(self, until: float) -> None:
        """Wait until a worker sends something or a deadline passes, and receive it."""
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                worker.register(selector)
            first = min([until, *(worker.deadline for worker in self.workers)])
            ready = selector.select(max(min(first - time.monotonic(), 0.2), 0))
        for worker in {id(key.data): key.data for key, _ in ready}.values():
            worker.flush()
            worker.receive()

    def _collect(
        self, worker: Worker, responses: dict[int, Response], until: float, allowance: Callable[[], float | None]
    ) -> None:
        assert worker.index is not None  # it is busy
        now = time.monotonic()
        if worker.ready and worker.deadline == float("inf"):
            worker.deadline = min(until, now + (allowance() or float("inf")))
        response = worker.response() or (Response("timeout", reason=LATE) if now >= worker.deadline else None)
        if response is None:
            return
        responses[worker.index], worker.index, worker.deadline = response, None, float("inf")
        if not response.reusable:
            self._drop([worker])

    def _kill_orphans(self) -> None:
        running = [worker.process for worker in self.workers if worker.ready and worker.process.level]
        for process in running:
            process.kill_orphans()
        end = time.monotonic() + 0.5
        while time.monotonic() < end and any(p.orphans_killed is None and p.ended is None for p in running):
            self._wait(end)
        self.left_behind += sum(process.orphans_killed or 0 for process in running)


def _end(workers: Sequence[Worker]) -> None:
    """End workers together, so that the slow ones are waited for only once."""
    for worker in workers:
        worker.process.request_end()
    end = time.monotonic() + 1.0
    for worker in workers:
        worker.close(max(end - time.monotonic(), 0.05))
