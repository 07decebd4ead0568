"""A world behind HTTP: `Http(url)` plays in it, and `serve(env)` offers any world in this way.

    server = serve(Maze(), port=8000)                  # where the world is; it stays until server.close()
    operant train --env http --env.url http://127.0.0.1:8000 --tasks mazes.jsonl

Every request is a POST of a JSON object with `session` (a text that is different for each run) and `number` (counted
from 1; the same number again asks for the same answer, and steps nothing). Slots are texts there, because JSON has no
other keys:

    /about                                     -> {"pays": true, "most": null, "games": false}
    /games  {"split": "train"}                 -> {"tasks": [{"id": "a", "prompt": "Go!"}]}
    /reset  {"tasks": {"0": {"id": ..., ...}}} -> {"steps": {"0": {"text": "A door."}}}
    /step   {"replies": {"0": "open it"}}      -> {"steps": {"0": {"reward": 1.0, "terminated": true}}}

A step has the fields of `operant.Step` that are not their defaults. An error is {"error": sentence} with status 500.
"""

import json
import threading
import uuid
from collections.abc import Callable, Mapping
from http.server import ThreadingHTTPServer
from typing import Any, Literal

from operant.net.client import Client, NoAnswer
from operant.net.listening import Responder
from operant.rollouts import answers
from operant.sandbox.serialise import step_to_plain, task_from_plain, task_to_plain
from operant.types import Env, EnvBase, Failure, OperantError, Step, Task, describe_error, require, shown, with_defaults

__all__ = ["Http", "serve"]

MAX_BYTES = 64 << 20
"""Most bytes of an answer or a request."""
LONGEST_WAIT = 2.0
"""Most seconds between two tries: an episode waits for no longer."""
PASSING = (502, 503, 504)
"""Statuses after which a request is sent again: a world's own error has 500."""
SESSIONS = 100
"""Runs whose last answer a server keeps."""
NO_REPLIES = {"replies": (), "references": ()}
"""Fields of a task that need not be sent."""


class Http:
    """An `Env` whose episodes are played by a server at `url`, which is not trusted: its answers are checked.

    timeout: seconds for an answer. tries: how often a request is sent while there is no connection, no answer in time,
    or a status of 502 to 504. After that, as after an answer that is not allowed, its episodes fail and are left out of
    training; the run goes on. waves: as for worlds in worker processes (docs/worlds.md).
    Raises: OperantError for a URL that is not http or https.
    """

    def __init__(self, url: str, *, timeout: float = 60.0, tries: int = 3, waves: int = 1):
        require(waves >= 1, f"env.waves={waves}: it must be at least 1")
        limits: dict[str, Any] = {"timeout": timeout, "longest_wait": LONGEST_WAIT, "tries": tries}
        self.client = Client(url, owner="env", passing=PASSING, most_bytes=MAX_BYTES, proxied=False, **limits)
        self.url = self.__name__ = self.client.url
        self.session, self.number, self.waves = uuid.uuid4().hex, 0, waves
        self.about: dict[str, Any] = {}

    def check(self) -> None:
        """Ask the server about its world. Raises: OperantError if it does not answer as a world does."""
        self.about = self.ask("about", {})
        most = self.about.get("most")
        if not isinstance(self.about.get("pays"), bool) or not (most is None or (isinstance(most, int) and most > 0)):
            raise OperantError(f"world {self.url}: /about answered {shown(self.about)}, which is no world's answer")

    def known(self, name: str) -> Any:
        """What the server says about its world. Raises: OperantError if it does not answer."""
        if not self.about:
            self.check()
        return self.about.get(name)

    @property
    def pays(self) -> bool:
        """Whether the world pays rewards."""
        return self.known("pays")

    @property
    def most(self) -> int | None:
        """The largest number of episodes at the same time; None: no limit."""
        return self.known("most")

    @property
    def games(self) -> Callable[[Literal["train", "test"]], list[Task]] | None:
        """What returns the world's own tasks for a split; None if it has none."""
        return self.tasks_of if self.known("games") else None

    def tasks_of(self, split: Literal["train", "test"]) -> list[Task]:
        """The world's own tasks. Raises: OperantError if the server does not return tasks."""
        found = self.ask("games", {"split": split}).get("tasks")
        try:
            return [task_from_plain({**NO_REPLIES, **plain}) for plain in found]
        except (TypeError, KeyError) as error:
            raise OperantError(f"world {self.url}: /games answered {shown(found)}, which are no tasks") from error

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step]:
        """Begin episodes. Raises: OperantError for a task that is no plain data."""
        return self.steps("reset", "tasks", {slot: task_to_plain(task) for slot, task in tasks.items()})

    def step(self, replies: Mapping[int, str]) -> dict[int, Step]:
        """Send each reply to its episode."""
        return self.steps("step", "replies", replies)

    def steps(self, call: str, name: str, given: Mapping[int, object]) -> dict[int, Step]:
        """The server's step for each slot; if there is none, how its episode has failed.

        Raises: OperantError if a failure stops the run.
        """
        kind: Failure = "raised"
        try:
            answer = self.ask(call, {name: {str(slot): value for slot, value in given.items()}}).get("steps")
            if not isinstance(answer, dict) or set(answer) != {str(slot) for slot in given}:
                slots = shown(sorted(answer)) if isinstance(answer, dict) else shown(answer)
                asked = shown([str(slot) for slot in given])
                raise OperantError(f"/{call} was called with slots {asked} and answered for {slots}")
            return {slot: self.read(answer[str(slot)]) for slot in given}
        except NoAnswer as error:
            kind, why = "timeout" if error.late else "crashed", str(error)
        except OperantError as error:
            why = str(error)
        return {slot: Step(failed=kind, info={"failure": why}) for slot in given}

    def read(self, plain: Any) -> Step:
        """A step of the server; one that is not allowed fails its episode alone."""
        step, why = answers.read_step(plain)
        if step is not None and why is None:
            return step
        why = why or f"answered with {shown(plain)}, which are not the fields of a Step"
        return Step(failed="raised", info={"failure": why})

    def ask(self, call: str, content: dict[str, object]) -> dict[str, Any]:
        """The server's answer to a request, which is sent up to `tries` times.

        Raises: OperantError with the reason if there is none: a `NoAnswer` if the server may be there later.
        """
        self.number, address = self.number + 1, f"{self.url}/{call}"
        answer = self.client.ask(address, {"session": self.session, "number": self.number, **content})
        what = f"{shown(answer)}, which is no JSON object"
        require(isinstance(answer, dict), f"{address} answered {what}; does another program listen there?")
        return answer


class WorldServer(ThreadingHTTPServer):
    """Offers a world over HTTP, to any number of runs: each has slots of its own. `serve` starts one."""

    request_queue_size = 128  # with 5, connections that come at the same time are reset on a busy machine

    def __init__(self, env: Env, port: int, host: str):
        try:
            super().__init__((host, port), WorldRequest)
        except (OSError, OverflowError) as error:
            raise OperantError(f"a world cannot be served at {host}:{port}: {error}; choose another port") from error
        self.env, self.lock = env, threading.Lock()
        self.slots: dict[tuple[str, str], int] = {}
        self.last: dict[str, tuple[int, int, str]] = {}
        self.tasks: dict[int, Task] = {}
        self.thread = threading.Thread(target=self.serve_forever, name="world server", daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]}:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def answered(self, call: str, content: Any) -> tuple[int, str]:
        """Status and body of the answer. The answer to a request that is repeated is not computed again."""
        with self.lock:
            session, number = "", 0
            try:
                session, number = str(content.pop("session")), int(content.pop("number"))
                if (last := self.last.get(session)) and last[0] == number:
                    return last[1:]
                status, answer = 200, getattr(self, f"answer_{call}")(session, **content)
            except Exception as error:
                status, answer = 500, {"error": describe_error(error)}
            self.last.pop(session, None)
            self.last[session] = number, status, json.dumps(answer)
            while len(self.last) > SESSIONS:
                del self.last[next(iter(self.last))]
            return self.last[session][1:]

    def answer_about(self, session: str) -> dict[str, object]:
        env = with_defaults(self.env, EnvBase)
        return {"pays": bool(env.pays), "most": env.most, "games": env.games is not None}

    def answer_games(self, session: str, split: str) -> dict[str, object]:
        return {"tasks": [task_to_plain(task) for task in self.env.games(split)]}  # pyright: ignore

    def answer_reset(self, session: str, tasks: dict[str, Any]) -> dict[str, object]:
        own = {slot: self.slots.setdefault((session, slot), len(self.slots)) for slot in tasks}
        given = {own[slot]: task_from_plain({**NO_REPLIES, **task}) for slot, task in tasks.items()}
        self.tasks |= given
        steps = answers.reset(self.env, given)
        return {"steps": {slot: step_to_plain(steps[own[slot]]) for slot in tasks}}

    def answer_step(self, session: str, replies: dict[str, str]) -> dict[str, object]:
        if new := [slot for slot in replies if (session, slot) not in self.slots]:
            raise OperantError(f"slot {new[0]} has no episode here; was the server started again?")
        own = {slot: self.slots[session, slot] for slot in replies}
        steps = answers.step(self.env, {own[slot]: reply for slot, reply in replies.items()}, self.tasks)
        return {"steps": {slot: step_to_plain(steps[own[slot]]) for slot in replies}}


class WorldRequest(Responder):
    """One request to a `WorldServer`."""

    server: WorldServer

    def do_POST(self) -> None:
        size, kind = self.headers.get("Content-Length", ""), self.headers.get_content_type()
        if kind != "application/json":  # so that no web page can send it
            return self.send_error(415, "the content must be application/json")
        if not size.isdecimal() or int(size) > MAX_BYTES:
            return self.send_error(413, "the content must have a length, of at most 64 MB")
        try:
            content = json.loads(self.rfile.read(int(size)))
        except (ValueError, RecursionError):
            return self.send_error(400, "the content is no JSON")
        self.respond(*self.server.answered(self.path.strip("/"), content))


def serve(env: Env, port: int = 0, host: str = "127.0.0.1") -> WorldServer:
    """Start a thread that offers a world at `server.url`, until `server.close()`; port 0: any that is free.

    Anybody who can reach the port can play. A script that does nothing else waits with `server.thread.join()`.
    Raises: OperantError for a port that is taken or not allowed.
    """
    return WorldServer(env, port, host)
