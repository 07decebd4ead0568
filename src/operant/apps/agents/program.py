"""A world that is a program: it calls the model as often as it likes, and returns the reward.

def play(task, client):
    reply = client.complete(task.prompt)                         # blocks until the engine has answered
    client.reward(0.1)                                           # of the reply above
    again = client.complete(task.prompt + reply + " Sure?")      # joins the row of the tokens so far
    return float(task.target in again)                           # of the last reply

run = operant.train(policy, tasks, env=play)

`openai.OpenAI(base_url=client.base_url, api_key=client.api_key)` speaks to the same engine.
"""

import asyncio
import inspect
import json
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from numbers import Real
from types import SimpleNamespace
from typing import Any

from operant.apps.agents.protocol import RefusedRequestError, chat_request, completion_request
from operant.import_by_name import Table
from operant.sampling import TokenCount, encode_prompt, render
from operant.types import EnvBase, Failure, OperantError, Step, Task, describe_error, name_of, shown

PROGRAMS = Table("program", "operant.programs", {})
RUNS_OWN = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "stop", "seed"),
    *("logprobs", "top_logprobs", "echo", "stream", "stream_options", "return_token_ids", "tools"),
)
"""Fields that a program may not set: what is trained on is sampled as the run samples."""
MOST_BYTES = 4_000_000
"""Of the body of a request."""


class EpisodeOverError(BaseException):
    """A call after the episode has ended. `except Exception` does not catch it, so that the program ends."""


class AgentWorld(EnvBase):
    """An `Env` whose episodes are calls of a program, `play(task, client)`, in threads of their own.

    play: the function, plain or async, or its name, such as agent.py:play.
    deadline: seconds that a program may take from a reply to its next request, or its end.
    """

    def __init__(self, play: Any, *, deadline: float = 60.0):
        found = PROGRAMS.find(play) if isinstance(play, str) else play
        if not callable(found):
            raise OperantError(f"env.play={shown(play)} is no function of a task and a client")
        if not deadline > 0:
            raise OperantError(f"env.deadline={shown(deadline)}: it must be a number of seconds above 0")
        self.play, self.deadline, self.__name__ = found, deadline, name_of(found)
        self.tokenizer: Any = _Characters()
        self.clients: dict[int, ModelClient] = {}

    def measure(self, count: Callable[[str], int], room: int | None) -> None:
        """Learn the tokenizer, whose chat template makes texts of messages."""
        if isinstance(count, TokenCount):
            self.tokenizer = count.tokenizer

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step]:
        for slot, task in tasks.items():
            if slot in self.clients:  # its episode has outgrown the context
                self.clients[slot].end()
            self.clients[slot] = ModelClient(self.play, task, self.tokenizer)
        return {slot: self.clients[slot].next(self.deadline) for slot in tasks}

    def step(self, replies: Mapping[int, str]) -> dict[int, Step]:
        for slot, reply in replies.items():
            self.clients[slot].give(reply)
        return {slot: self.clients[slot].next(self.deadline) for slot in replies}


class ModelClient:
    """What a program calls: the run's engine, one request at a time."""

    def __init__(self, play: Callable[[Task, "ModelClient"], Any], task: Task, tokenizer: Any):
        self._tokenizer, self._over, self._row, self._paid = tokenizer, False, "", 0.0
        self._requests: queue.Queue[Step] = queue.Queue()
        self._replies: queue.Queue[str | None] = queue.Queue()
        self._one, self._asked, self._pending, self._fault = threading.Lock(), 0, False, ""
        self._fresh = 0
        self.api_key = secrets.token_hex(16)
        threading.Thread(target=self._run, args=(play, task), name="program", daemon=True).start()

    @property
    def base_url(self) -> str:
        """Where an OpenAI client finds the engine, with `api_key`. The server begins with the first program's use."""
        _CLIENTS[self.api_key] = self
        return f"http://127.0.0.1:{_server().server_address[1]}/v1"

    def complete(self, prompt: str, **options: Any) -> str:
        """The reply to a text. Raises: OperantError for options that a program may not set."""
        return self._plainly({"prompt": prompt} | options, "completions")

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """The reply to a conversation, by the chat template. Raises: OperantError as `complete`."""
        return self._plainly({"messages": messages} | options, "chat/completions")

    def reward(self, reward: float) -> None:
        """Pay the last reply. Raises: OperantError for anything but a finite number, and before the first reply."""
        if not (isinstance(reward, Real) and math.isfinite(reward)):
            raise OperantError(f"client.reward({shown(reward)}): it must be a finite number")
        if not self._asked or self._pending:
            raise OperantError("client.reward: there is no reply yet that it could pay")
        self._paid += float(reward)

    def _plainly(self, body: dict[str, Any], path: str) -> str:
        try:
            return self.ask(body, path)
        except RefusedRequestError as error:
            raise OperantError(str(error)) from error

    def ask(self, body: Any, path: str) -> str:
        """The reply to the body of a request. Raises: RefusedRequestError."""
        if self._over:
            raise EpisodeOverError("the episode has ended")
        if isinstance(body, dict) and (named := next((n for n in RUNS_OWN if body.get(n) is not None), None)):
            why = f"{named}={shown(body[named])}: the run's own sampling is used in training; leave it out"
            raise RefusedRequestError(400, why, named)
        if isinstance(body, dict) and body.get("n") not in (None, 1):
            raise RefusedRequestError(400, f"n={shown(body['n'])}: a program asks for one reply at a time", "n")
        policy: Any = SimpleNamespace(tokenizer=self._tokenizer, vocabulary=2**31, context=None, stop_tokens=())
        if path == "completions":
            (ids,) = _one(completion_request(body, policy).prompts)
            text = body["prompt"]
            if not isinstance(text, str) or not text:
                raise RefusedRequestError(400, "prompt: a program gives one text that is not empty", "prompt")
        else:
            (ids,) = chat_request(body, policy).prompts
            text = _same_ids(self._tokenizer, body["messages"], ids)
        with self._one:
            if self._pending:
                self._fault = "the program asked twice at a time, from several threads; let one call follow the other"
                raise RefusedRequestError(409, self._fault)
            self._pending, self._asked = True, self._asked + 1
            joins = self._asked > 1 and path == "completions" and text.startswith(self._row)
            more, self._row = text[len(self._row) :] if joins else text, text
            self._fresh += not joins
            info = {"requests": self._asked, "fresh_rows": self._fresh}
            self._requests.put(Step(more, fresh=not joins, reward=self._take_paid(), info=info))
        reply = self._replies.get()
        self._pending = False  # only now: another thread that asked before could take this reply
        if reply is None:
            raise EpisodeOverError("the episode has ended")
        return reply

    def give(self, reply: str) -> None:
        """Let the program go on with a reply."""
        self._row += reply
        self._replies.put(reply)

    def next(self, deadline: float) -> Step:
        """The next request of the program as a step, or its end."""
        try:
            step = self._requests.get(timeout=deadline)
        except queue.Empty:
            step = _failed("timeout", f"the program neither asked nor ended within {deadline:g} seconds")
        if self._fault:
            step = _failed("raised", self._fault)
        if step.terminated or step.failed is not None:
            self.end()
        return step

    def end(self) -> None:
        """Refuse all further calls."""
        self._over = True
        _CLIENTS.pop(self.api_key, None)
        self._replies.put(None)

    def _take_paid(self) -> float:
        paid, self._paid = self._paid, 0.0
        return paid

    def _run(self, play: Callable[[Task, "ModelClient"], Any], task: Task) -> None:
        try:
            returned = play(task, self)
            if inspect.isawaitable(returned):
                returned = asyncio.run(_awaited(returned))
            self._requests.put(self._last(returned))
        except EpisodeOverError:
            return
        except BaseException as error:  # a program may call sys.exit
            self._requests.put(_failed("raised", describe_error(error)))

    def _last(self, returned: object) -> Step:
        reward = 0.0 if returned is None else returned
        if not self._asked:
            return _failed("raised", "the program ended without a request: let it call client.complete or client.chat")
        if self._pending:
            return _failed("raised", "the program ended while a request of it waited: let it wait for its threads")
        if not (isinstance(reward, Real) and math.isfinite(reward)):
            return _failed("raised", f"the program returned {shown(returned)}; it must return a reward or nothing")
        return Step(reward=self._take_paid() + float(reward), terminated=True)


async def _awaited(returned: Any) -> Any:
    return await returned


def _failed(how: Failure, why: str) -> Step:
    return Step(failed=how, info={"failure": why})


def _one(prompts: list[list[int]]) -> list[list[int]]:
    if len(prompts) != 1:
        raise RefusedRequestError(400, f"{len(prompts)} prompts: a program asks for one reply at a time", "prompt")
    return prompts


def _same_ids(tokenizer: Any, messages: Any, ids: list[int]) -> str:
    """The text of a conversation that has exactly its ids. Raises: RefusedRequestError if there is none."""
    text = render(tokenizer, messages, prompting=True)
    begin = getattr(tokenizer, "bos_token", None) or ""
    for same in (text, text.removeprefix(begin)):
        if encode_prompt(tokenizer, same) == ids:
            return same
    raise RefusedRequestError(400, "the text of the chat template has other token ids than its messages", "messages")


class _Characters:
    """Stands for the tokenizer where a world is checked without a model."""

    bos_token_id, chat_template = None, "{{ messages }}"

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [*map(ord, text)]}

    def apply_chat_template(self, messages: list[dict[str, Any]], tokenize: bool = True, **_: object) -> Any:
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return self(text) if tokenize else text


# --- the same over HTTP -----------------------------------------------------------------------------------------------

_CLIENTS: dict[str, ModelClient] = {}
"""By key."""
_STARTED: list[ThreadingHTTPServer] = []
_STARTING = threading.Lock()


def _server() -> ThreadingHTTPServer:
    with _STARTING:
        if not _STARTED:
            _STARTED.append(ThreadingHTTPServer(("127.0.0.1", 0), _AgentRequests))
            _STARTED[0].daemon_threads = True
            threading.Thread(target=_STARTED[0].serve_forever, name="programs", daemon=True).start()
    return _STARTED[0]


class _AgentRequests(BaseHTTPRequestHandler):
    timeout = 60

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        try:
            status, body = 200, self._answer()
        except RefusedRequestError as refused:
            status, body = refused.status, refused.body
        except EpisodeOverError:
            status, body = 410, RefusedRequestError(410, "the episode of this key has ended").body
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.send_header("x-should-retry", "false")  # the openai client would ask again
        self.end_headers()
        self.wfile.write(raw)

    def _answer(self) -> dict[str, Any]:
        client = _CLIENTS.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if client is None:
            raise RefusedRequestError(401, "no episode has this key: it has ended, or the key is another's")
        path, length = self.path.removeprefix("/v1/"), self.headers.get("Content-Length", "")
        if path not in ("completions", "chat/completions"):
            raise RefusedRequestError(404, f"there is no {shown(self.path)}")
        if not length.isascii() or not length.isdigit() or int(length) > MOST_BYTES:
            raise RefusedRequestError(413, f"Content-Length={shown(length)}: it must be at most {MOST_BYTES}")
        try:
            asked = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise RefusedRequestError(400, "the body is no JSON") from error
        reply, chat = client.ask(asked, path), path != "completions"
        said = {"message": {"role": "assistant", "content": reply}} if chat else {"text": reply}
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": str(asked.get("model", "")),
            "choices": [{"index": 0, "finish_reason": "stop", "logprobs": None, **said}],
        }
