"""The one HTTP client, with the standard library alone: for models behind an endpoint, engines and worlds elsewhere.

    client = Client("http://127.0.0.1:8000/v1", owner="engine", tries=3)
    client.ask(f"{client.url}/completions", {"model": "m", "prompt": "Hello"})     # {"choices": ...}

It sends JSON and reads JSON. What finds no connection, no answer in time, or a status that may pass is sent again;
whatever fails is a sentence that names the address, the reason and the option to look at, and never shows the key.
"""

import json
import os
import random
import threading
import time
import urllib.parse
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPResponse
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from operant.machine import beat
from operant.net.listening import is_local
from operant.types import OperantError, require, shown

PASSING = (408, 425, 429, 500, 502, 503, 504, 529)
"""Statuses after which a request is sent again."""
FIRST_WAIT = 0.5
"""Seconds before the second try; they double with each further one."""
Key = TypeVar("Key")


class NoAnswer(OperantError):
    """A request without an answer. status: what came instead; 0: nothing. late: nothing in time. passes: whether the
    same request may be answered when it is sent again, `after` the seconds that the server asks to wait."""

    def __init__(self, sentence: str, *, status: int = 0, late: bool = False, passes: bool = True, after: float = 0.0):
        super().__init__(sentence)
        self.status, self.late, self.passes, self.after = status, late, passes, after


class Client:
    """Requests to the server at `url`, each of which is sent up to `tries` times.

    owner: what the options belong to, such as `engine`: errors name `engine.url`. timeout: seconds for an answer.
    longest_wait: most seconds between two tries; a server that asks for more (Retry-After) is refused with a sentence
    that names `wait_option`, or, without one, asked again by then. at_once: most requests under way. passing: statuses
    that may pass. most_bytes: of an answer. key_variable: the environment variable whose text is sent as the key, if it
    is set. proxied: whether the environment's proxies are used, which is never for this machine. serves: what a server
    at another address would not have, such as `a model 'm'`.
    """

    def __init__(
        self,
        url: str,
        *,
        owner: str,
        timeout: float = 60.0,
        tries: int = 6,
        longest_wait: float = 60.0,
        wait_option: str = "",
        at_once: int = 1,
        passing: Collection[int] = PASSING,
        most_bytes: int = 16 << 20,
        key_variable: str = "",
        proxied: bool = True,
        serves: str = "",
    ):
        require(at_once >= 1, f"{owner}.at_once={shown(at_once)}: it must be at least 1")
        require(0 < timeout < 1e9, f"{owner}.timeout={shown(timeout)}: it must be above 0 seconds and below 1e9")
        require(tries >= 1, f"{owner}.tries={shown(tries)}: it must be at least 1")
        require(longest_wait >= 0, f"{owner}.longest_wait={shown(longest_wait)}: it must be at least 0 seconds")
        self.option = f"{owner}.url"
        """The option that errors name as that of the address."""
        direct = is_local(host_of(url, self.option)) or not proxied  # one's own machine is never behind a proxy
        # A redirection is an answer like others: nothing is sent to another address.
        stays = type("Stays", (HTTPRedirectHandler,), {"redirect_request": lambda *_: None})
        self.fetch = build_opener(ProxyHandler({} if direct else None), stays).open
        self.url, self.timeout, self.tries, self.at_once = url.rstrip("/"), timeout, tries, at_once
        self.longest_wait, self.wait_option, self.passing = longest_wait, wait_option, passing
        self.most_bytes, self.key_variable, self.serves = most_bytes, key_variable, serves

    def ask_all(self, address: str, contents: Mapping[Key, object], keep: Callable[[Key, object], None]) -> None:
        """Send requests, `at_once` at a time, and call `keep(key, answer)` for each, in any order and from threads.

        Raises: OperantError of the first one that fails; none is sent after it.
        """
        failures, stop = list[BaseException](), threading.Event()

        def one(key: Key, content: object) -> None:
            try:
                if not stop.is_set():
                    keep(key, self.ask(address, content, stop))
                    beat()
            except BaseException as error:
                failures.append(error)
                stop.set()

        with ThreadPoolExecutor(self.at_once, thread_name_prefix="requests") as pool:
            try:
                for future in [pool.submit(one, key, content) for key, content in contents.items()]:
                    future.result()
            finally:  # an interruption ends the others too
                stop.set()
        if failures:
            raise failures[0]

    def ask(self, address: str, content: object, stop: threading.Event | None = None) -> Any:
        """The answer to a request, sent up to `tries` times, as plain data.

        Raises: OperantError if the server refuses the request, or answers with no JSON; a `NoAnswer` if none comes.
        """
        stop, failure = stop or threading.Event(), NoAnswer("")
        for attempt in range(self.tries):
            if attempt:  # not to the second, so that clients do not come back together
                wait = FIRST_WAIT * 2 ** min(attempt - 1, 60) * random.uniform(0.75, 1.25)
                stop.wait(min(max(failure.after, wait), self.longest_wait))
            require(not stop.is_set(), f"{address}: another request has failed")
            try:
                return self.once(address, content)
            except NoAnswer as error:
                self.refuse(error)
                failure = error
        raise NoAnswer(f"{failure} ({self.tries} tries); {self.remedy}", late=failure.late) from failure

    def once(self, address: str, content: object) -> Any:
        """The answer to a request that is sent once. Raises: as `ask`."""
        answer = self.send(address, json.dumps(content))
        try:
            return json.loads(answer)
        except (ValueError, RecursionError) as error:
            what = f"{shown(answer)}, which is no JSON object"
            raise OperantError(f"{address} answered {what}; does another program listen there?") from error

    def send(self, address: str, body: str) -> str:
        """Post a JSON text once; what the server answers, without the key, which some repeat in their errors.

        Raises: NoAnswer for any answer but a success; OperantError for one that is too long.
        """
        key = self.key()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            with self.fetch(Request(address, body.encode(), headers), timeout=self.timeout) as response:
                return without(key * (len(key) >= 16), self.received(address, response))  # and not a word such as EMPTY
        except HTTPError as error:
            said = ""
            with error, suppress(OSError, HTTPException):  # it may break off
                said = without(key, error.read(2000))
            why, after = f"status {error.code}: {reason_in(said)}", seconds_in(error.headers.get("Retry-After"))
            passes = error.code in self.passing and "insufficient_quota" not in said
            raise NoAnswer(f"{address} answered with {why}", status=error.code, passes=passes, after=after) from error
        except (OSError, HTTPException, UnicodeError) as error:  # too late, refused, reset, cut in the middle
            cause = error.reason if isinstance(error, URLError) else error
            late = isinstance(cause, TimeoutError)
            why = f"has not answered in {self.timeout:g} s" if late else f"cannot be reached: {cause}"
            raise NoAnswer(f"{address} {why}", late=late) from error

    def received(self, address: str, response: HTTPResponse) -> bytes:
        """The content of a response.

        Raises: OperantError for one that is too long, TimeoutError for one that drips, OSError for one that is cut.
        """
        data, end, most = b"", time.monotonic() + self.timeout, self.most_bytes
        while part := response.read1(1 << 20):
            data += part
            if time.monotonic() > end:
                raise TimeoutError
            if len(data) > most:
                raise OperantError(f"{address} answered more than {most >> 20} MB; does another program listen there?")
        if response.length:  # `read1` does not complain of a connection that ended early
            raise OSError("its answer ended in the middle")
        return data

    def key(self) -> str:
        """The key; empty if there is none. Raises: OperantError for one that no header can hold, without showing it."""
        key = os.environ.get(self.key_variable, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise OperantError(f"the environment variable {self.key_variable} holds signs that no key has; set it anew")
        return key

    @property
    def remedy(self) -> str:
        """What to look at if nothing answers."""
        return f"does the server run, and is {self.option}={self.url} its address?"

    def refuse(self, error: NoAnswer) -> None:
        """Raises: OperantError for what waiting does not change, or what takes longer than is waited for."""
        if error.passes:
            if not self.wait_option or error.after <= self.longest_wait:
                return
            limit = f"{self.wait_option}={self.longest_wait:g}"
            advice = f"it asks to wait {error.after:.0f} s, and {limit}: raise it, or try again later"
        elif error.status in (401, 403) and self.key_variable:
            known = "is set" if os.environ.get(self.key_variable) else "is not set"
            advice = f"the key is that of the environment variable {self.key_variable}, which {known}"
        elif error.status == 404:
            serves = f"does the server have {self.serves}, and " if self.serves else ""
            advice = f"{serves}is {self.option}={self.url} its address?"
        elif 300 <= error.status < 400:
            advice = "it leads elsewhere, and the key is not sent there: give that address"
        else:
            advice = "change what is asked for, or choose another model or endpoint" if self.serves else ""
        raise OperantError(f"{error}; {advice}".removesuffix("; ")) from error


def host_of(url: object, option: str) -> str:
    private, host = None, None
    with suppress(ValueError):
        parts = urllib.parse.urlsplit(url if isinstance(url, str) else "")
        private = parts.username or parts.password or parts.query
        host = parts.hostname if parts.scheme in ("http", "https") and parts.port != 0 else None
    require(not private, f"{option} holds a user, password or query, which are not sent: a key goes into key_variable")
    rule = "it must be an address such as http://127.0.0.1:8000/v1, and must begin with http:// or https://"
    require(host, f"{option}={shown(url)}: {rule}")
    return host or ""


def without(key: str, answer: bytes) -> str:
    """An answer as text, without the key."""
    text = answer.decode(errors="replace")
    return text.replace(key, "[key]") if key else text


def reason_in(answer: str) -> str:
    """The message of an error, in the form of OpenAI's API or of a world's server, or the answer as it is."""
    with suppress(ValueError, KeyError, AttributeError, RecursionError):
        error = (content := json.loads(answer)).get("error", content)
        return shown(error["message"] if isinstance(error, dict) else error, 500)
    return shown(answer, 500)


def seconds_in(retry_after: str | None) -> float:
    """Seconds to wait by a header Retry-After, a number or a date; 0 without one that can be read."""
    with suppress(ValueError, TypeError):
        text = (retry_after or "0").strip()
        number = text.replace(".", "", 1).isdecimal()
        return float(text[:9]) if number else max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    return 0.0
