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
from collections.abc import Awaitable, Callable, Collection, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from operant.apps.agents import protocol
from operant.apps.agents.protocol import Json, ModelRequest, RefusedRequestError, Reply, answer, read_messages, whole
from operant.import_by_name import Table
from operant.net.listening import Responder
from operant.sampling import PlainTokenizer, TokenCount, encode_prompt, render
from operant.sandbox.levels import Limits
from operant.sandbox.process import SupervisedProcess
from operant.types import (
    MAX_TURNS,
    EnvBase,
    Failure,
    OperantError,
    Step,
    Task,
    Tokenizer,
    Turn,
    describe_error,
    is_real,
    name_of,
    require,
    shown,
    with_defaults,
)

Play = Callable[[Task, "ModelClient"], Any]
PROGRAMS = Table("program", "operant.programs", {})
RUNS_OWN = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "stop", "seed"),
    *("logprobs", "top_logprobs", "echo"),
)
"""Fields that a program may not set: what is trained on is sampled as the run samples."""
MOST_BYTES = 4_000_000
"""Of the body of a request."""


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

    branches = True
    at_once = math.inf  # programs that compute at the same time: each waits for its turn

    def __init__(
        self, play: Any = None, *, command: str | None = None, deadline: float = 60.0, ignore: Sequence[str] = ()
    ):
        if (play is None) == (command is None):
            raise OperantError("give a program: env.play=agent.py:play, or env.command='python agent.py'")
        found = play if command is None else partial(run_command, command)
        found = PROGRAMS.find(found) if isinstance(found, str) else found
        require(callable(found), f"env.play={shown(play)} is no function of a task and a client")
        require(deadline > 0, f"env.deadline={shown(deadline)}: it must be a number of seconds above 0")
        if unknown := [name for name in ignore if name not in RUNS_OWN]:
            raise OperantError(f"env.ignore={shown(unknown[0])}: it may name {', '.join(RUNS_OWN)}")
        self.play, self.deadline, self.__name__ = found, deadline, command or name_of(found)
        self.ignore = frozenset(ignore)
        self.tokenizer: Any = _Characters()
        self.room: int | None = None
        self.clients: dict[int, ModelClient] = {}

    def measure(self, count: Callable[[str], int], room: int | None) -> None:
        """Learn the tokenizer, whose chat template makes texts of messages, and the longest prompt."""
        self.room = room
        if isinstance(count, TokenCount):
            self.tokenizer = count.tokenizer

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step]:
        self.on_leave([*tasks])
        for slot, task in tasks.items():
            self.clients[slot] = ModelClient(self.play, task, self.tokenizer, self.ignore, self.room)
        return self._steps(tasks)

    def on_turns(self, turns: Mapping[int, Turn]) -> None:
        for slot, turn in turns.items():
            self.clients[slot].turn = turn

    def step(self, replies: Mapping[int, str]) -> dict[int, Step]:
        for slot, reply in replies.items():
            self.clients[slot].give(reply)
        return self._steps(replies)

    def on_leave(self, slots: Sequence[int]) -> None:
        for client in [self.clients[slot] for slot in slots if slot in self.clients]:
            client.end()

    def _steps(self, slots: Collection[int]) -> dict[int, Step]:
        deadline = self.deadline * max(1, len(slots) / self.at_once)
        due = time.monotonic() + deadline  # of all programs: they have been computing side by side
        return {slot: self.clients[slot].next(due, deadline) for slot in slots}


@dataclass
class Conversation:
    """The last conversation of a row: what was asked, and the text of its prompt with a mark for each reply."""

    messages: list[Json]
    tools: list[Json] | None
    marked: str
    replies: list[int]
    """The places of the row's own replies among the messages."""


@dataclass(eq=False)
class OpenRow:
    """A row that the next request may continue."""

    text: str
    """Of its prompt and its last reply."""
    reply: str
    turn: Turn | None
    """The tokens of the last reply; None where a world is checked without an engine."""
    number: int
    """Of that turn in the episode."""
    chat: Conversation | None

    def unsaid(self, tokenizer: Tokenizer) -> str:
        """What the row has behind the text of the last reply: a stop token or string, which a program may repeat."""
        if self.turn is None or self.turn.end != "stop" or not self.turn.action:
            return ""
        whole = str(tokenizer.decode(self.turn.action, skip_special_tokens=False))
        if whole.startswith(self.reply):
            return whole[len(self.reply) :]
        return str(tokenizer.decode(self.turn.action[-1:], skip_special_tokens=False))

    def continued(self, chat: Conversation) -> str | None:
        """What stands behind the last reply in the text of a conversation that goes on from it; None if none does."""
        if self.chat is None or not chat.replies:
            return None
        before, mark, more = chat.marked.partition(_mark(chat.replies[-1]))
        return more if mark and before == self.chat.marked else None


class ModelClient:
    """What a program calls: the run's engine, one request at a time."""

    def __init__(self, play: Play, task: Task, tokenizer: Any, ignore: Container[str] = (), room: int | None = None):
        self._tokenizer, self._ignore, self._room = tokenizer, ignore, room
        self.over = False
        """Whether the episode has ended."""
        self._paid: dict[int, float] = {}
        """By the number of a turn."""
        self._requests: queue.Queue[Step] = queue.Queue()
        self._replies: queue.Queue[str | None] = queue.Queue()
        self._one, self._asked, self._pending, self._fault = threading.Lock(), 0, False, ""
        self._fresh, self._late, self._process = 0, 0, os.getpid()
        self._numbers: dict[str, float] = {}
        self.answered = True
        """Whether the last reply is an answer that can be judged, and no call of a tool."""
        self._rows: list[OpenRow] = []
        """The row of the last reply; beside it the other branches of a request for several."""
        self._turns, self._choices = 0, range(0)
        """The number of replies so far, and which of them answered the last request."""
        self.turn: Turn | None = None
        """The tokens of the last reply; None before the first, and where a world is checked without an engine."""
        self.api_key = secrets.token_hex(16)
        threading.Thread(target=self._run, args=(play, task), name="program", daemon=True).start()

    @property
    def base_url(self) -> str:
        """Where an OpenAI client finds the engine, with `api_key`. The server begins with the first program's use."""
        _CLIENTS[self.api_key] = self
        with _STARTING:
            return f"http://127.0.0.1:{_server().server_address[1]}/v1"

    def complete(self, prompt: str, **options: object) -> Any:
        """The reply to a text; with `n=4` a list of four. Raises: OperantError for what a program may not set."""
        return self._plainly({"prompt": prompt} | options, "completions", lambda choice: choice["text"])

    def chat(self, messages: list[Json], **options: object) -> Any:
        """The reply to a conversation, by the chat template; with `n=4` a list of four. Raises: as `complete`."""
        said = self.message(messages, **options)
        return [one["content"] or "" for one in said] if isinstance(said, list) else said["content"] or ""

    def message(self, messages: list[Json], **options: object) -> Any:
        """As `chat`, the reply as a message: with `tools=[...]`, its calls are its `tool_calls`."""
        return self._plainly({"messages": messages} | options, "chat/completions", lambda choice: choice["message"])

    def reward(self, reward: float, choice: int | None = None) -> None:
        """Pay the last reply. choice: which of several replies to the last request.

        Raises: OperantError for anything but a finite number, before the first reply, and for several without a choice.
        """
        require(is_real(reward), f"client.reward({shown(reward)}): it must be a finite number")
        if self.over:
            raise EpisodeOverError("the episode has ended")
        require(self._asked and not self._pending, "client.reward: there is no reply yet that it could pay")
        known = type(choice) is int and 0 <= choice < len(self._choices)
        if not known and (choice is not None or len(self._choices) > 1):
            last = len(self._choices) - 1
            raise OperantError(f"client.reward(..., choice={shown(choice)}): say which reply is paid, 0 to {last}")
        number = self._choices[int(choice or 0)]
        self._paid[number] = self._paid.get(number, 0.0) + float(reward)

    def report(self, **numbers: float) -> None:
        """Log numbers of this episode: a run has the mean of each as the metric `world/NAME`. Raises: OperantError."""
        if wrong := [name for name, number in numbers.items() if not is_real(number)]:
            raise OperantError(f"client.report({wrong[0]}={shown(numbers[wrong[0]])}): it must be a finite number")
        self._numbers |= numbers

    def _plainly(self, body: Json, path: str, read: Callable[[Json], Any]) -> Any:
        try:
            _, answered = self.ask(body, path)
        except RefusedRequestError as error:
            raise OperantError(str(error)) from error
        found = [read(choice) for choice in answered["choices"]]
        return found if body.get("n") is not None else found[0]

    def ask(self, body: Any, path: str) -> tuple[ModelRequest, Json]:
        """The body of a request, read, and that of its answer. Raises: RefusedRequestError."""
        if self.over:
            self._late += 1  # a program that catches the exception and asks on would take a core for itself
            time.sleep(min(1.0, 0.01 * self._late))
            raise EpisodeOverError("the episode has ended")
        if os.getpid() != self._process:
            raise RefusedRequestError(409, "a process that the program has forked cannot use its client")
        request, text = self._read(body, path)
        with self._one:
            if self._pending:
                self._fault = "the program asked twice at a time, from several threads; let one call follow the other"
                raise RefusedRequestError(409, self._fault)
            if self._turns + request.n >= MAX_TURNS:
                self._fault = f"the program asked for {MAX_TURNS} replies or more: let it end"
                self._requests.put(_failed("raised", self._fault))
                raise RefusedRequestError(409, self._fault)
            size, room = len(request.prompts[0]), self._room or math.inf
            if not self._asked and not 0 < size <= room:  # later the episode ends there, with the value of its state
                why = f"the prompt has {size} tokens, and a reply needs 1 to {room:g}"
                raise RefusedRequestError(400, f"{why}: change it, or lower sampling.max_tokens")
            row, more, chat = self._joined(request, body, text)
            self._pending, self._asked, self._fresh = True, self._asked + 1, self._fresh + (row is None)
            step = Step(more, fresh=row is None, info=self._info(), **self._take_paid())
            if row is not None:
                text = row.text + more
                at = None if row.number == self._turns - 1 else row.number
                step = replace(step, text=more.removeprefix(row.unsaid(self._tokenizer)), at=at)
                self._rows.remove(row)
            else:
                self._rows.clear()
            self._choices = range(self._turns, self._turns + request.n)
            self._requests.put(step)
        said = [self._replied()]
        for _ in self._choices[1:]:
            self._requests.put(Step(fresh=True, at=self._choices[0]))
            said.append(self._replied())
        known = [(reply, turn or Turn([], [])) for reply, turn in said]
        replies = [Reply(t.prompt, t.action, "stop" if t.end == "stop" else "length", text=reply) for reply, t in known]
        answered = answer(replace(request, prompts=[replies[0].prompt]), replies, self._tokenizer)
        for number, (reply, turn), choice in zip(self._choices, said, answered["choices"], strict=True):
            if chat is not None:
                messages = chat.messages + read_messages([choice["message"]])
                own = replace(chat, messages=messages, replies=[*chat.replies, len(chat.messages)])
            self._rows.append(OpenRow(text + reply, reply, turn, number, None if chat is None else own))
        self._pending = False  # only now: another thread that asked before could take this reply
        return request, answered

    def _joined(self, request: ModelRequest, body: Json, text: str) -> tuple[OpenRow | None, str, Conversation | None]:
        """The row that a request continues, what it adds to it, and its conversation; without a row, its whole text."""
        for row in sorted(reversed(self._rows), key=lambda row: -len(row.text)):  # one may begin as another
            if request.chat:
                chat = self._conversation(request, body, row.chat)
                if (more := row.continued(chat)) is not None:
                    return row, more, chat
            elif text.startswith(row.text):
                return row, text[len(row.text) :], None
        return None, text, self._conversation(request, body, None) if request.chat else None

    def _replied(self) -> tuple[str, Turn | None]:
        """The next reply of the engine, and its tokens."""
        text = self._replies.get()
        if text is None:
            raise EpisodeOverError("the episode has ended")
        self._turns += 1
        return text, self.turn

    def _read(self, body: Any, path: str) -> tuple[ModelRequest, str]:
        """A request and the text of its prompt."""
        if isinstance(body, dict):
            body = {name: value for name, value in body.items() if name not in self._ignore}
            if named := next((n for n in RUNS_OWN if not (body.get(n) is None or body[n] is False)), None):
                why = f"{named}={shown(body[named])}: the run's own sampling is used in training; leave it out"
                raise RefusedRequestError(400, f"{why}, or let the run ignore it (--env.ignore {named})", named)
        policy: Any = SimpleNamespace(tokenizer=self._tokenizer, vocabulary=2**31, context=None, stop_tokens=())
        if path != "completions":
            request = protocol.chat_request(body, policy)
            text = render(self._tokenizer, read_messages(body["messages"]), prompting=True, tools=request.tools)
            begin = with_defaults(self._tokenizer, PlainTokenizer).bos_token or ""  # which it adds again to a text
            for same in (text, text.removeprefix(begin)):
                if encode_prompt(self._tokenizer, same) == request.prompts[0]:
                    return request, same
            why = "the text of the chat template has other token ids than its messages"
            raise RefusedRequestError(400, why, "messages")
        request = protocol.completion_request(body, policy)
        if not isinstance(body["prompt"], str) or not body["prompt"]:
            raise RefusedRequestError(400, "prompt: a program gives one text that is not empty", "prompt")
        return request, body["prompt"]

    def _conversation(self, request: ModelRequest, body: Mapping[str, Any], last: Conversation | None) -> Conversation:
        """What is asked now; the replies of the row of `last` are marks in its text, if it goes on from them."""
        messages, tools = read_messages(body["messages"]), request.tools
        if last is not None and last.tools == tools and messages[: len(last.messages)] == last.messages:
            own = last.replies.copy()
            marks = [{"role": "assistant", "content": _mark(i)} if i in own else m for i, m in enumerate(messages)]
            with suppress(OperantError):  # of a template that wants the calls of its messages, say
                return Conversation(messages, tools, render(self._tokenizer, marks, prompting=True, tools=tools), own)
        return Conversation(messages, tools, render(self._tokenizer, messages, prompting=True, tools=tools), [])

    def give(self, reply: str) -> None:
        """Let the program go on with a reply."""
        self._replies.put(reply)

    def next(self, due: float, deadline: float) -> Step:
        """The next request of the program as a step, or its end. due: until when it is waited for."""
        try:
            step = self._requests.get(timeout=min(max(0.001, due - time.monotonic()), threading.TIMEOUT_MAX))
        except queue.Empty:
            step = _failed("timeout", f"the program neither asked nor ended within {deadline:g} seconds")
        if self._fault:
            step = _failed("raised", self._fault)
        if step.terminated or step.failed is not None:
            self.end()
        return step

    def end(self) -> None:
        """Refuse all further calls."""
        self.over = True
        _CLIENTS.pop(self.api_key, None)
        self._replies.put(None)

    def _info(self) -> Json:
        """What the rollout says of the program, also where its episode outgrows the context."""
        known = {"requests": self._asked, "fresh_rows": self._fresh, "unanswered": not self.answered}
        return known | ({"numbers": dict(self._numbers)} if self._numbers else {})

    def _take_paid(self) -> Json:
        """What was paid since the last step, as `Step` takes it."""
        paid, self._paid = self._paid, {}
        return {"reward": paid.pop(self._turns - 1, 0.0), "paid": paid}

    def _run(self, play: Play, task: Task) -> None:
        try:
            returned = play(task, self)
            if inspect.isawaitable(returned):
                returned = asyncio.run(_awaited(returned))
            self._requests.put(self._last(returned))
        except BaseException as error:  # a program may call sys.exit
            if not isinstance(error, EpisodeOverError):
                self._requests.put(_failed("raised", f"the program failed: {describe_error(error)}"))

    def _last(self, returned: object) -> Step:
        reward = 0.0 if returned is None else returned
        if not self._asked:
            return _failed("raised", "the program ended without a request: let it call client.complete or client.chat")
        if self._pending:
            return _failed("raised", "the program ended while a request of it waited: let it wait for its threads")
        if not is_real(reward):
            return _failed("raised", f"the program returned {shown(returned)}; it must return a reward or nothing")
        paid = self._take_paid()
        return Step(reward=paid["reward"] + float(reward), paid=paid["paid"], terminated=True, info=self._info())


def run_command(command: str, task: Task, client: ModelClient) -> float | None:
    """Play an episode by a command of the shell. Raises: OperantError if it fails, or prints no reward."""
    with tempfile.TemporaryDirectory(prefix="operant-") as folder, open(Path(folder, "output"), "w+b") as output:
        path = Path(folder, "task.json")
        path.write_text(json.dumps(asdict(task), default=str), encoding="utf-8")
        own = {"OPENAI_BASE_URL": client.base_url, "OPENAI_API_KEY": client.api_key, "OPERANT_TASK": str(path)}
        argv, limits, control = ["/bin/sh", "-c", command], Limits(processes=None), select.poll()
        process = SupervisedProcess(argv, limits, output=output.fileno(), environment=own)
        control.register(process.control, select.POLLIN)  # `select.select` takes no descriptor above 1,023
        try:
            while process.ended is None and not client.over:
                if control.poll(100):
                    process.receive()
        finally:
            process.end()
        if client.over:
            raise EpisodeOverError("the episode has ended")
        output.seek(0)
        lines = output.read().decode("utf-8", errors="replace").strip().splitlines()
    last = lines[-1] if lines else ""
    said = f": {last[-300:]}" if last else ""
    require(process.ended == "ended with exit status 0", f"{command} {process.ended}{said}")
    try:
        return float(last)
    except ValueError as error:
        raise OperantError(f"{command} ended with the line {shown(last)}; the last line must be its reward") from error


async def _awaited(returned: Awaitable[object]) -> object:
    return await returned


def _failed(how: Failure, why: str) -> Step:
    return Step(failed=how, info={"failure": why})


def _mark(place: int) -> str:
    """What stands for the reply at a place of a conversation, in a text whose other parts are wanted."""
    return f"operant-reply-{place}-{_SECRET}"


_SECRET = secrets.token_hex(8)


class _Characters:
    """Stands for the tokenizer where a world is checked without a model."""

    bos_token_id, chat_template = None, "{{ messages }}"

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [*map(ord, text)]}

    def apply_chat_template(self, messages: list[Json], tokenize: bool = True, **_: object) -> Any:
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return self(text) if tokenize else text


# --- the same over HTTP -----------------------------------------------------------------------------------------------

_CLIENTS: dict[str, ModelClient] = {}
"""By key."""
_STARTING = threading.Lock()


class _AgentServer(ThreadingHTTPServer):
    request_queue_size = 1024  # all programs of a step ask at once, and who finds no place tries again a second later

    def handle_error(self, *_: object) -> None:
        """Say nothing of a program that has gone away and reads no answer."""


@cache
def _server() -> ThreadingHTTPServer:
    """The server of this process, which begins with the first call."""
    server = _AgentServer(("127.0.0.1", 0), _AgentRequests)
    threading.Thread(target=server.serve_forever, name="programs", daemon=True).start()
    return server


class _AgentRequests(Responder):
    def do_POST(self) -> None:
        kind = "application/json"
        try:
            status, (kind, raw) = 200, self._answer()
        except Exception as error:
            refused = protocol.refusal(error)
            status, raw = refused.status, json.dumps(refused.body)
        self.respond(status, raw, kind, x_should_retry="false")  # the openai client would ask again

    do_GET = do_POST

    def _answer(self) -> tuple[str, str]:
        """The content type of an answer, and its body."""
        path = (self.command, self.path.removeprefix("/v1/"))
        if path == ("GET", "models"):
            about = {"id": "policy", "object": "model", "created": 0, "owned_by": "operant"}
            return "application/json", json.dumps({"object": "list", "data": [about]})
        length = self.headers.get("Content-Length", "")
        known = length.isascii() and length.isdigit() and len(length) < 10
        body, left = b"", int(length) if known else 0
        try:  # before anything is refused: who has not sent all of it would read no answer
            while left and (body := self.rfile.read(min(left, MOST_BYTES))):
                left -= len(body)
        except TimeoutError as error:
            raise RefusedRequestError(408, f"the request was not there after {self.timeout} seconds") from error
        if not known or int(length) > MOST_BYTES:
            raise RefusedRequestError(413, f"Content-Length={shown(length)}: it must be at most {MOST_BYTES}")
        if (client := _CLIENTS.get(self.headers.get("Authorization", "").removeprefix("Bearer "))) is None:
            raise RefusedRequestError(401, "no episode has this key: it has ended, or the key is another's")
        if path[0] != "POST" or path[1] not in ("completions", "chat/completions", "rewards"):
            raise RefusedRequestError(404, f"there is no {shown(self.path)}")
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RefusedRequestError(400, "the body is no JSON") from error
        try:
            if path[1] == "rewards":
                if not (isinstance(asked, dict) and {"reward"} <= asked.keys() <= {"reward", "choice"}):
                    raise RefusedRequestError(400, f"{shown(asked)}: give `reward`, and of several replies `choice`")
                client.reward(**asked)
                return "application/json", "{}"
            request, answered = client.ask(asked, path[1])
        except EpisodeOverError as error:
            raise RefusedRequestError(410, str(error)) from error
        if request.stream:  # each reply in one piece
            pieces = [piece for i, choice in enumerate(answered["choices"]) for piece in whole(request, i, choice)]
            pieces += [protocol.usage_chunk(request, answered["usage"])] * request.usage
            return "text/event-stream", "".join(map(protocol.event, pieces)) + protocol.STREAM_END
        return "application/json", json.dumps(answered)
