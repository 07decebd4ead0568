"""A client of OpenAI-compatible endpoints, with the standard library alone: vLLM, llama.cpp, hosted models.

    model = Completions("http://127.0.0.1:8000/v1", "my-model", cache="answers.sqlite", budget_requests=2000)
    model(["Once upon a time"])                          # [" there was a king"]
    model.logprobs(["It was"], [" terrible", " great"])  # [[-4.1, -1.3]]

So a model behind an API can be the task model that a prompt is written for. The cache holds hashes of requests and what
was read from their answers; the key of the endpoint is neither stored nor shown.
"""

import hashlib
import json
import math
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from operant.net.client import Client, NoAnswer
from operant.types import OperantError, require, shown

AROUND = 64
"""Tokens that are reserved for what a server puts around a text, such as the marks of a chat template."""


@dataclass(frozen=True)
class Spent:
    """What a client has used so far."""

    requests: int = 0
    """Requests that were sent, each try counted."""
    tokens: int = 0
    """Tokens of prompts and answers, as the server counts them; where it does not, the most that they may have been."""
    cached: int = 0
    """Answers that came from the cache."""


class Request(NamedTuple):
    """One request: `Request({"model": "m", "prompt": "Hello"}, 0, read)`."""

    body: dict[str, Any]
    """What is sent."""
    mark: Any
    """What tells it from requests with the same body."""
    read: Callable[[Any], Any]
    """From the first choice of the answer to what is wanted of it, as plain data."""


class Completions(Client):
    """A model at an OpenAI-compatible endpoint: texts to texts, `Completions(url, model)(texts)`, or to log-probs.

    url: the address up to `/v1`. chat: ask `/chat/completions`, with `system` as the first message, instead of
    `/completions`. max_tokens, temperature, top_p, stop, seed: of the answers. extra: further fields of each request,
    of which None leaves one out: {"max_completion_tokens": 16, "max_tokens": None}.
    scoring: how `logprobs` reads log-probs: `echo`, those of the whole text, which the server returns with it (vLLM's
    `/completions` does), or `top`, those of the `top_logprobs` likeliest next tokens; None: echo, and top for chat.
    key_variable: the environment variable that holds the key, which is sent if the variable is set.
    cache: an SQLite file of answers, which processes may share; None: in memory. at_once: most requests under way.
    tries: how often a request is sent while there is no connection, no answer within `timeout` seconds, or a status
    that may pass, such as 429 and 503. A server's Retry-After is kept to, up to `longest_wait` seconds.
    budget_requests, budget_tokens: the most that this object spends, each try counted. A request is sent only if the
    most that it may cost still fits: a token for each byte of its texts, 64 for what stands around them, and
    max_tokens. Otherwise it is an error; what was answered before is in the cache.
    Raises: OperantError for a value out of range, an invalid URL, or a cache that cannot be used.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        chat: bool = False,
        system: str = "",
        max_tokens: int = 16,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
        seed: int | None = None,
        extra: Mapping[str, object] | None = None,
        scoring: Literal["echo", "top"] | None = None,
        top_logprobs: int | None = None,
        key_variable: str = "OPENAI_API_KEY",
        cache: str | Path | None = None,
        at_once: int = 8,
        tries: int = 6,
        timeout: float = 60.0,
        longest_wait: float = 60.0,
        budget_requests: int | None = None,
        budget_tokens: int | None = None,
    ):
        limits: dict[str, Any] = {"timeout": timeout, "longest_wait": longest_wait, "tries": tries, "at_once": at_once}
        wording = {"owner": "completions", "wait_option": "completions.longest_wait", "serves": f"a model {model!r}"}
        super().__init__(url, key_variable=key_variable, **limits, **wording)
        scoring = scoring or ("top" if chat else "echo")
        listed = top_logprobs if top_logprobs is not None else (20 if chat else 5)
        for name, value, good, rule in (
            ("scoring", scoring, scoring in ("echo", "top"), "must be echo or top"),
            ("scoring", scoring, not (chat and scoring == "echo"), "must be top for a chat, which is not echoed"),
            ("system", system, chat or not system, "needs chat=True; or put it in front of the texts"),
            ("max_tokens", max_tokens, max_tokens >= 1, "must be at least 1"),
            ("temperature", temperature, temperature >= 0, "must be at least 0, which is greedy"),
            ("top_p", top_p, 0 < top_p <= 1, "must lie in (0, 1]"),
            ("top_logprobs", listed, listed >= 1, "must be at least 1"),
            ("budget_requests", budget_requests, (budget_requests or 0) >= 0, "must not be below 0"),
            ("budget_tokens", budget_tokens, (budget_tokens or 0) >= 0, "must not be below 0"),
        ):
            require(good, f"completions.{name}={shown(value)}: it {rule}")
        self.option = "url"  # a function is called with it, and no run has options of this name
        self.model, self.chat, self.system = model, chat, system
        self.address = f"{self.url}/{'chat/completions' if chat else 'completions'}"
        self.scoring, self.top_logprobs = scoring, listed
        self.budget_requests, self.budget_tokens = budget_requests, budget_tokens
        self.seed = seed
        sampled = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
        stops = [stop] if stop and isinstance(stop, str) else list(stop)
        self.fields = {"model": model, **sampled, "stop": stops or None, **(extra or {})}
        self.cache, self.spent, self._lock = _AnswerCache(cache), Spent(), threading.Lock()
        self.__name__ = f"{model} at {self.url}"

    def __call__(self, texts: Sequence[str]) -> list[str]:
        """The model's answer to each text, in their order.

        With a temperature, equal texts of a call get answers of their own: the second has its own place in the cache,
        and, if there is a `seed`, asks with seed + 1.
        """
        seen, requests = dict[str, int](), list[Request]()
        for text in texts:
            sample = seen.get(text, 0) if self.fields.get("temperature") != 0 else 0
            seen[text] = sample + 1
            own = {} if self.seed is None else {"seed": self.seed + sample}
            requests.append(Request(self.body(text, **own), sample, self.text_of))
        return self.answers(requests)

    def logprobs(self, texts: Sequence[str], continuations: Sequence[str]) -> list[list[float]]:
        """[N][C] the log-prob of each continuation after each text.

        With scoring=top, a continuation has the log-prob of the token that it is, without regard to spaces around it.
        One that is not listed has an upper bound: the least log-prob that is listed, or the log of what the listed
        tokens leave, if that is less.
        Raises: OperantError as a call; for an empty continuation; and for one that does not begin with a token.
        """
        if not continuations or not all(word.strip() for word in continuations):
            raise OperantError(f"completions: the continuations {shown(list(continuations))}: give texts, none empty")
        count = self.top_logprobs
        if self.scoring == "top":
            asked = {"logprobs": True, "top_logprobs": count} if self.chat else {"logprobs": count}
            name = "max_completion_tokens" if self.fields.get("max_completion_tokens") else "max_tokens"
            greedy = {name: 1, "temperature": 0.0, "stop": None}
            listed = self.answers([Request(self.body(t, **greedy, **asked), "top", self.listed) for t in texts])
            return [[listed_logprob(tokens, word) for word in continuations] for tokens in listed]
        asked = {"echo": True, "max_tokens": 0, "logprobs": 1, "temperature": 0.0, "stop": None}
        pairs = [(text, word) for text in texts for word in continuations]
        found = self.answers([Request(self.body(t + w, **asked), w, lambda c, w=w: echoed(c, w)) for t, w in pairs])
        return [found[i : i + len(continuations)] for i in range(0, len(found), len(continuations))]

    # --- requests -----------------------------------------------------------------------------------------------------

    def body(self, text: str, **more: object) -> dict[str, object]:
        """What is sent for a text, without the fields that are None."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = {"messages": [*system, {"role": "user", "content": text}]} if self.chat else {"prompt": text}
        return {name: value for name, value in (self.fields | more | asked).items() if value is not None}

    def answers(self, requests: Sequence[Request]) -> list[Any]:
        """The answers in the order of the requests; those that are the same are sent once.

        Raises: OperantError of the first one that fails; none is sent after it.
        """
        told = (json.dumps([self.address, request.body, request.mark], sort_keys=True) for request in requests)
        keys = [hashlib.sha256(text.encode()).hexdigest() for text in told]
        found = self.cache.known(set(keys))
        self.spend(cached=len(found))
        missing = {key: request for key, request in zip(keys, requests, strict=True) if key not in found}

        def keep(key: str, answer: object) -> None:
            found[key] = self.read(answer, missing[key])
            self.cache.put(key, found[key])

        self.ask_all(self.address, {key: request.body for key, request in missing.items()}, keep)
        return [found[key] for key in keys]

    def once(self, address: str, content: Any) -> Any:
        """The answer to a request that is sent once. Raises: OperantError if it may cost more than the budget."""
        texts = [message["content"] for message in content["messages"]] if self.chat else [content["prompt"]]
        most = max(content.get(name, 0) for name in ("max_tokens", "max_completion_tokens")) * content.get("n", 1)
        sizes = (len(text.encode(errors="replace") if isinstance(text, str) else text) for text in texts)
        reserved, used = sum(sizes) + AROUND + most, None
        kept = "answers are in the cache" if self.cache.path else "name a file with cache, so that answers are kept"
        with self._lock:
            spent = self.spent
            if self.budget_requests is not None and spent.requests >= self.budget_requests:
                raise OperantError(f"completions.budget_requests={self.budget_requests} is spent: raise it ({kept})")
            if self.budget_tokens is not None and spent.tokens + reserved > self.budget_tokens:
                raise OperantError(
                    f"completions.budget_tokens={self.budget_tokens}: {spent.tokens} are spent or under way, and the "
                    f"next request may cost {reserved}: raise it ({kept})"
                )
            self.spent = replace(spent, requests=spent.requests + 1, tokens=spent.tokens + reserved)
        try:
            answer = super().once(address, content)
            usage = answer.get("usage") if isinstance(answer, dict) else None
            counted = usage.get("total_tokens") if isinstance(usage, dict) else None
            used = counted if isinstance(counted, int) and counted >= 0 else None
            return answer
        except NoAnswer as error:
            used = 0 if 0 < error.status < 500 else None
            raise
        finally:
            self.spend(tokens=0 if used is None else used - reserved)

    def spend(self, *, tokens: int = 0, cached: int = 0) -> None:
        """Correct what a request was counted with."""
        with self._lock:
            self.spent = replace(self.spent, tokens=self.spent.tokens + tokens, cached=self.spent.cached + cached)

    # --- answers ------------------------------------------------------------------------------------------------------

    def read(self, answer: Any, request: Request) -> Any:
        """What is read from an answer. Raises: OperantError for one that lacks what was asked for."""
        try:
            return request.read(answer["choices"][0])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, OperantError):
                raise
            lacks = "an answer" if request.read == self.text_of else f"log-probs (completions.scoring={self.scoring})"
            raise OperantError(
                f"{self.address} answered {shown(answer, 300)}, which lacks {lacks}; can it give them?"
            ) from error

    def text_of(self, choice: Any) -> str:
        """The text of a choice; empty if a chat model has written none."""
        text = choice["message"]["content"] if self.chat else choice["text"]
        if not isinstance(text, (str, type(None))):
            raise TypeError("it is no text")
        return text or ""

    def listed(self, choice: Any) -> dict[str, float]:
        """The likeliest next tokens with their log-probs, of which there is at least one."""
        if self.chat:
            listed = dict[str, float]()
            for one in choice["logprobs"]["content"][0]["top_logprobs"]:  # tokens of different bytes may look the same
                listed[one["token"]] = float(np.logaddexp(listed.get(one["token"], -math.inf), one["logprob"]))
        else:
            listed = {token: float(logprob) for token, logprob in choice["logprobs"]["top_logprobs"][0].items()}
        if not listed or not all(map(math.isfinite, listed.values())):
            raise ValueError("there are no log-probs")
        return listed


def listed_logprob(listed: Mapping[str, float], word: str) -> float:
    """The log-prob of a continuation among listed tokens, or an upper bound of it (`Completions.logprobs`)."""
    same = [logprob for token, logprob in listed.items() if token.strip() == word.strip()]
    if same:
        return max(same) + math.log(math.fsum(math.exp(logprob - max(same)) for logprob in same))
    left = 1 - math.fsum(map(math.exp, listed.values()))
    return min(min(listed.values()), math.log(left) if left > 0 else math.inf)


def echoed(choice: Any, word: str) -> float:
    """The log-prob of the tokens of `word`, with which an echoed text ends.

    Raises: OperantError if no token begins where the word does.
    """
    tokens, logprobs = choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]
    length, total = 0, 0.0
    for token, logprob in zip(reversed(tokens), reversed(logprobs), strict=True):
        length, total = length + len(token), total + float(logprob)
        if length >= len(word):
            break
    if length != len(word):
        raise OperantError(
            f"completions: no token of the model begins where the continuation {word!r} does (tokens "
            f"{shown(tokens[-4:])}); begin it with a space if a word is meant"
        )
    if not math.isfinite(total):
        raise ValueError("a log-prob is NaN or infinite")
    return total


# --- answers that are kept --------------------------------------------------------------------------------------------

APPLICATION = 0x6F706172
"""Marks a database as one of answers, among all SQLite files."""
BUSY_SECONDS = 30.0
"""How long a write waits for another process that is writing."""
AT_ONCE = 500
"""Keys of a query: SQLite allows 999 variables in old versions."""


class _AnswerCache:
    """Answers by key, in a file that several threads and processes may use at once; path None: in memory.

    The first answer to a request stays: another process that has asked the same meanwhile does not replace it.
    """

    def __init__(self, path: str | Path | None = None):
        self.path, self._lock = path, threading.Lock()
        with self.explained():
            self._connection = sqlite3.connect(
                ":memory:" if path is None else Path(path).expanduser(),
                timeout=BUSY_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
            (found,) = self._connection.execute("PRAGMA application_id").fetchone()
            (tables,) = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if tables and found != APPLICATION:
                self._connection.close()
                raise OperantError(f"completions.cache={path}: this is a database of something else; choose another")
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute(f"PRAGMA application_id = {APPLICATION}")
            self._connection.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")

    def known(self, keys: Collection[str]) -> dict[str, Any]:
        """The answers to those of the requests that have one."""
        listed, found = list(keys), dict[str, Any]()
        with self.explained():
            for begin in range(0, len(listed), AT_ONCE):
                some = listed[begin : begin + AT_ONCE]
                query = f"SELECT key, answer FROM answers WHERE key IN ({','.join('?' * len(some))})"
                found |= {key: json.loads(answer) for key, answer in self._connection.execute(query, some)}
        return found

    def put(self, key: str, answer: object) -> None:
        with self.explained():
            self._connection.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (key, json.dumps(answer)))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """One thread at a time, and errors of the database as sentences."""
        try:
            with self._lock:
                yield
        except (sqlite3.Error, OSError) as error:
            raise OperantError(
                f"completions.cache={self.path} cannot be used: {error}; is it a file of this cache, in a folder that "
                "is there, on a disk with room?"
            ) from error
