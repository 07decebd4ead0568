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
import os
import queue
import secrets
import select
import tempfile
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from numbers import Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from operant.apps.agents.protocol import (
    ModelRequest,
    RefusedRequestError,
    Reply,
    answer,
    chat_request,
    chunk,
    completion_request,
    read_messages,
    whole,
)
from operant.import_by_name import Table
from operant.sampling import TokenCount, encode_prompt, render
from operant.sandbox.levels import Limits
from operant.sandbox.process import SupervisedProcess
from operant.types import EnvBase, Failure, OperantError, Step, Task, Turn, describe_error, name_of, shown

PROGRAMS = Table("program", "operant.programs", {})
RUNS_OWN = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "stop", "seed"),
    *("logprobs", "top_logprobs", "echo"),
)
"""Fields that a program may not set: what is trained on is sampled as the run samples."""
MOST_BYTES = 4_000_000
"""Of the body of a request."""
PATHS = ("completions", "chat/completions")


class EpisodeOverError(BaseException):
    """A call after the episode has ended. `except Exception` does not catch it, so that the program ends."""


class AgentWorld(EnvBase):
    """An `Env` whose episodes are calls of a program, `play(task, client)`, in threads of their own.

    play: the function, plain or async, or its name, such as agent.py:play.
    command: instead of `play`, a command of the shell that is started for each episode. Its environment has
        OPENAI_BASE_URL, OPENAI_API_KEY and OPERANT_TASK, the path of the task as JSON; the last line that it prints is
        its reward. All processes that it started end with it.
    deadline: seconds that a program may take from a reply to its next request, or its end.
    ignore: fields of requests that the run's own sampling replaces, such as temperature; others are refused.
    """

    def __init__(
        self, play: Any = None, *, command: str | None = None, deadline: float = 60.0, ignore: Sequence[str] = ()
    ):
        if (play is None) == (command is None):
            raise OperantError("give a program: env.play=agent.py:play, or env.command='python agent.py'")
        found = PROGRAMS.find(play) if isinstance(play, str) else play
        if command is not None:
            found = partial(run_command, command)
        if not callable(found):
            raise OperantError(f"env.play={shown(play)} is no function of a task and a client")
        if not deadline > 0:
            raise OperantError(f"env.deadline={shown(deadline)}: it must be a number of seconds above 0")
        if unknown := [name for name in ignore if name not in RUNS_OWN]:
            raise OperantError(f"env.ignore={shown(unknown[0])}: it may name {', '.join(RUNS_OWN)}")
        self.play, self.deadline, self.__name__ = found, deadline, command or name_of(found)
        self.ignore = frozenset(ignore)
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
            self.clients[slot] = ModelClient(self.play, task, self.tokenizer, self.ignore)
        return self._steps(tasks)

    def on_turns(self, turns: Mapping[int, Turn]) -> None:
        for slot, turn in turns.items():
            self.clients[slot].turn = turn

    def step(self, replies: Mapping[int, str]) -> dict[int, Step]:
        for slot, reply in replies.items():
            self.clients[slot].give(reply)
        return self._steps(replies)

    def _steps(self, slots: Iterable[int]) -> dict[int, Step]:
        due = time.monotonic() + self.deadline  # of all programs: they have been computing side by side
        return {slot: self.clients[slot].next(due, self.deadline) for slot in slots}


@dataclass
class Conversation:
    """The last conversation of a row: what was asked, and the text of its prompt with a mark for each reply."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    marked: str
    replies: list[int]
    """The places of the row's own replies among the messages."""


class ModelClient:
    """What a program calls: the run's engine, one request at a time."""

    def __init__(
        self,
        play: Callable[[Task, "ModelClient"], Any],
        task: Task,
        tokenizer: Any,
        ignore: Container[str] = (),
    ):
        self._tokenizer, self._ignore, self._over, self._paid = tokenizer, ignore, False, 0.0
        self._requests: queue.Queue[Step] = queue.Queue()
        self._replies: queue.Queue[str | None] = queue.Queue()
        self._one, self._asked, self._pending, self._fault = threading.Lock(), 0, False, ""
        self._fresh, self._late, self._process = 0, 0, os.getpid()
        self._numbers: dict[str, float] = {}
        self._row, self._reply = "", ""
        """The text of the last prompt and its reply, and that of the reply."""
        self._chat: Conversation | None = None
        self.turn: Turn | None = None
        """The tokens of the last reply; None before the first, and where a world is checked without an engine."""
        self.api_key = secrets.token_hex(16)
        threading.Thread(target=self._run, args=(play, task), name="program", daemon=True).start()

    @property
    def base_url(self) -> str:
        """Where an OpenAI client finds the engine, with `api_key`. The server begins with the first program's use."""
        _CLIENTS[self.api_key] = self
        return f"http://127.0.0.1:{_server().server_address[1]}/v1"

    @property
    def over(self) -> bool:
        """Whether the episode has ended."""
        return self._over

    def complete(self, prompt: str, **options: Any) -> str:
        """The reply to a text. Raises: OperantError for options that a program may not set."""
        return self._plainly({"prompt": prompt} | options, "completions")["text"]

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """The reply to a conversation, by the chat template. Raises: OperantError as `complete`."""
        return self.message(messages, **options)["content"] or ""

    def message(self, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        """As `chat`, the reply as a message: with `tools=[...]`, its calls are its `tool_calls`."""
        return self._plainly({"messages": messages} | options, "chat/completions")["message"]

    def reward(self, reward: float) -> None:
        """Pay the last reply. Raises: OperantError for anything but a finite number, and before the first reply."""
        if not (isinstance(reward, Real) and math.isfinite(reward)):
            raise OperantError(f"client.reward({shown(reward)}): it must be a finite number")
        if not self._asked or self._pending:
            raise OperantError("client.reward: there is no reply yet that it could pay")
        self._paid += float(reward)

    def report(self, **numbers: float) -> None:
        """Log numbers of this episode: a run has the mean of each as the metric `world/NAME`."""
        self._numbers |= numbers

    def _plainly(self, body: dict[str, Any], path: str) -> dict[str, Any]:
        try:
            _, answered = self.ask(body, path)
        except RefusedRequestError as error:
            raise OperantError(str(error)) from error
        return answered["choices"][0]

    def ask(self, body: Any, path: str) -> tuple[ModelRequest, dict[str, Any]]:
        """The body of a request, read, and that of its answer. Raises: RefusedRequestError."""
        if self._over:
            self._late += 1  # a program that catches the exception and asks on would take a core for itself
            time.sleep(min(1.0, 0.01 * self._late))
            raise EpisodeOverError("the episode has ended")
        if os.getpid() != self._process:
            raise RefusedRequestError(409, "a process that the program has forked cannot use its client")
        request, text = self._read(body, path)
        chat = self._conversation(request, body) if request.chat else None
        with self._one:
            if self._pending:
                self._fault = "the program asked twice at a time, from several threads; let one call follow the other"
                raise RefusedRequestError(409, self._fault)
            if chat is not None and (more := self._continued(chat)) is not None:
                joins, text = True, self._row + more
            else:
                joins = self._asked > 0 and not request.chat and text.startswith(self._row)
                more = text[len(self._row) :] if joins else text
            self._pending, self._asked, self._fresh = True, self._asked + 1, self._fresh + (not joins)
            if joins:
                more = more.removeprefix(self._unsaid())
            self._row, self._chat = text, chat
            info = {"requests": self._asked, "fresh_rows": self._fresh}
            self._requests.put(Step(more, fresh=not joins, reward=self._take_paid(), info=info))
        text = self._replies.get()
        if text is None:
            raise EpisodeOverError("the episode has ended")
        turn = self.turn or Turn([], [])
        reply = Reply(turn.prompt, turn.action, "stop" if turn.end == "stop" else "length", text=text)
        answered = answer(replace(request, prompts=[turn.prompt]), [reply], self._tokenizer)
        if chat is not None:
            chat.replies.append(len(chat.messages))
            chat.messages += read_messages([answered["choices"][0]["message"]])
        self._pending = False  # only now: another thread that asked before could take this reply
        return request, answered

    def _read(self, body: Any, path: str) -> tuple[ModelRequest, str]:
        """A request and the text of its prompt."""
        if isinstance(body, dict):
            body = {name: value for name, value in body.items() if name not in self._ignore}
            if named := next((name for name in RUNS_OWN if body.get(name) not in (None, False)), None):
                why = f"{named}={shown(body[named])}: the run's own sampling is used in training; leave it out"
                raise RefusedRequestError(400, f"{why}, or let the run ignore it (--env.ignore {named})", named)
            if body.get("n") not in (None, 1):
                raise RefusedRequestError(400, f"n={shown(body['n'])}: a program asks for one reply at a time", "n")
        policy: Any = SimpleNamespace(tokenizer=self._tokenizer, vocabulary=2**31, context=None, stop_tokens=())
        if path != "completions":
            request = chat_request(body, policy)
            text = render(self._tokenizer, read_messages(body["messages"]), prompting=True, tools=request.tools)
            return request, _same_ids(self._tokenizer, text, request.prompts[0])
        request = completion_request(body, policy)
        if not isinstance(body["prompt"], str) or not body["prompt"]:
            raise RefusedRequestError(400, "prompt: a program gives one text that is not empty", "prompt")
        return request, body["prompt"]

    def _conversation(self, request: ModelRequest, body: Mapping[str, Any]) -> Conversation:
        """What is asked now; the replies of the row so far are marks in its text, if it goes on from them."""
        messages, last, tools = read_messages(body["messages"]), self._chat, request.tools
        if last is not None and last.tools == tools and messages[: len(last.messages)] == last.messages:
            own = last.replies.copy()
            marks = [{"role": "assistant", "content": _mark(i)} if i in own else m for i, m in enumerate(messages)]
            with suppress(OperantError):  # of a template that wants the calls of its messages, say
                return Conversation(messages, tools, render(self._tokenizer, marks, prompting=True, tools=tools), own)
        return Conversation(messages, tools, render(self._tokenizer, messages, prompting=True, tools=tools), [])

    def _continued(self, chat: Conversation) -> str | None:
        """What stands behind the last reply in the text of a conversation that goes on from it; None if none does."""
        if self._chat is None or not chat.replies:
            return None
        before, mark, more = chat.marked.partition(_mark(chat.replies[-1]))
        return more if mark and before == self._chat.marked else None

    def _unsaid(self) -> str:
        """What the row has behind the text of the last reply: a stop token or string, which a program may repeat."""
        if self.turn is None or self.turn.end != "stop" or not self.turn.action:
            return ""
        whole = str(self._tokenizer.decode(self.turn.action, skip_special_tokens=False))
        if whole.startswith(self._reply):
            return whole[len(self._reply) :]
        return str(self._tokenizer.decode(self.turn.action[-1:], skip_special_tokens=False))

    def give(self, reply: str) -> None:
        """Let the program go on with a reply."""
        self._row, self._reply = self._row + reply, reply
        self._replies.put(reply)

    def next(self, due: float, deadline: float) -> Step:
        """The next request of the program as a step, or its end. due: until when it is waited for."""
        try:
            step = self._requests.get(timeout=max(0.001, due - time.monotonic()))
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
        info = {"numbers": self._numbers} if self._numbers else {}
        return Step(reward=self._take_paid() + float(reward), terminated=True, info=info)


def run_command(command: str, task: Task, client: ModelClient) -> float | None:
    """Play an episode by a command of the shell. Raises: OperantError if it fails, or prints no reward."""
    with tempfile.TemporaryDirectory(prefix="operant-") as folder, open(Path(folder, "output"), "w+b") as output:
        path = Path(folder, "task.json")
        path.write_text(json.dumps(asdict(task), default=str), encoding="utf-8")
        own = {"OPENAI_BASE_URL": client.base_url, "OPENAI_API_KEY": client.api_key, "OPERANT_TASK": str(path)}
        argv = ["/usr/bin/env", *(f"{name}={value}" for name, value in own.items()), "/bin/sh", "-c", command]
        process = SupervisedProcess(argv, Limits(processes=None), output=output.fileno())
        try:
            while process.ended is None and not client.over:
                if select.select([process.control], [], [], 0.1)[0]:
                    process.receive()
        finally:
            process.end()
        if client.over:
            raise EpisodeOverError("the episode has ended")
        output.seek(0)
        lines = output.read().decode("utf-8", errors="replace").strip().splitlines()
    last = lines[-1] if lines else ""
    if process.ended != "ended with exit status 0":
        raise OperantError(f"{command} {process.ended}: {last[-300:]}")
    try:
        return float(last)
    except ValueError as error:
        raise OperantError(f"{command} ended with the line {shown(last)}; the last line must be its reward") from error


async def _awaited(returned: Any) -> Any:
    return await returned


def _failed(how: Failure, why: str) -> Step:
    return Step(failed=how, info={"failure": why})


def _mark(place: int) -> str:
    """What stands for the reply at a place of a conversation, in a text whose other parts are wanted."""
    return f"operant-reply-{place}-{_SECRET}"


_SECRET = secrets.token_hex(8)


def _same_ids(tokenizer: Any, text: str, ids: list[int]) -> str:
    """The text, without a beginning that the tokenizer adds by itself. Raises: RefusedRequestError if neither has the
    ids of its messages."""
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


class _AgentServer(ThreadingHTTPServer):
    request_queue_size = 1024  # all programs of a step ask at once, and who finds no place tries again a second later


def _server() -> ThreadingHTTPServer:
    with _STARTING:
        if not _STARTED:
            _STARTED.append(_AgentServer(("127.0.0.1", 0), _AgentRequests))
            _STARTED[0].daemon_threads = True
            threading.Thread(target=_STARTED[0].serve_forever, name="programs", daemon=True).start()
    return _STARTED[0]


class _AgentRequests(BaseHTTPRequestHandler):
    timeout = 60

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        kind = "application/json"
        try:
            request, answered = self._answer()
            status, raw = 200, json.dumps(answered)
            if request.stream:
                kind, raw = "text/event-stream", "".join(_events(request, answered))
        except RefusedRequestError as refused:
            status, raw = refused.status, json.dumps(refused.body)
        except EpisodeOverError:
            status, raw = 410, json.dumps(RefusedRequestError(410, "the episode of this key has ended").body)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw.encode())))
        self.send_header("x-should-retry", "false")  # the openai client would ask again
        self.end_headers()
        self.wfile.write(raw.encode())

    def _answer(self) -> tuple[ModelRequest, dict[str, Any]]:
        client = _CLIENTS.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if client is None:
            raise RefusedRequestError(401, "no episode has this key: it has ended, or the key is another's")
        path, length = self.path.removeprefix("/v1/"), self.headers.get("Content-Length", "")
        if path not in PATHS:
            raise RefusedRequestError(404, f"there is no {shown(self.path)}")
        if not length.isascii() or not length.isdigit() or int(length) > MOST_BYTES:
            raise RefusedRequestError(413, f"Content-Length={shown(length)}: it must be at most {MOST_BYTES}")
        try:
            asked = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise RefusedRequestError(400, "the body is no JSON") from error
        return client.ask(asked, path)


def _events(request: ModelRequest, answered: dict[str, Any]) -> Iterator[str]:
    """A streamed answer, whose only piece is the whole reply."""
    pieces = whole(request, 0, answered["choices"][0])
    if request.usage:
        pieces.append(chunk(request) | {"choices": [], "usage": answered["usage"]})
    for piece in pieces:
        yield f"data: {json.dumps(piece)}\n\n"
    yield "data: [DONE]\n\n"
