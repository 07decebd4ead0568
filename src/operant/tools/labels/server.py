"""Serves the labelling page: `operant label replies.jsonl`, or `LabelServer(store)` in a program.

    with Store("replies.labels.sqlite") as store, LabelServer(store, LabelServing(port=8266)) as server:
        print(server.url)      # http://127.0.0.1:8266/#token
        server.run()           # until Ctrl-C; or server.start(): in a thread

The page is a few static files without data. Everything else is a POST with JSON and the token in a header, which no
other site can send: it does not know the token. The checks of Host (DNS rebinding) and Origin (CSRF) hold beside it.
A label is answered only when the store has it on the disk; the page keeps it until then. Replies reach the browser as
JSON and are shown as text only; their sources and the item's id never leave this process.
"""

import asyncio
import hmac
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from operant.bounds import bounded, check_bounds
from operant.net.listening import Listener, is_known_host, url_of
from operant.tools.labels.items import IMPORT, KINDS, SCALE, Content, checked_answer, name_of_labeller
from operant.tools.labels.store import BusyError, Label, Store
from operant.types import OperantError, is_real

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

FOLDER = Path(__file__).parent / "page"
FILES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/style.css": ("style.css", "text/css"),
    "/sortable.js": ("vendor/Sortable.min.js", "text/javascript"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LARGEST_BODY = 100_000
"""Bytes of the largest request: an answer with a long comment."""
LONGEST_LOOK = 600.0
"""Seconds after which a labeller has surely done something else; longer looks count as this."""


@dataclass(frozen=True)
class LabelServing:
    """Where the page is served."""

    host: str = "127.0.0.1"
    """The address to listen on. 0.0.0.0 lets everyone label who can reach this machine and has the token."""
    port: int = bounded(0, at_least=0, below=65536, rule="0 (any free port) to 65535")
    """The port; 0: the one of last time if it is free, so that open pages find the server again, else any."""

    def __post_init__(self) -> None:
        check_bounds(self)


class RefusedError(Exception):
    """A request that gets (HTTP status, sentence) and nothing else."""


class LabelServer(Listener):
    """Listens on the address of the options, for one store. Raises: OperantError as `Listener`."""

    what = "the labelling page"

    def __init__(self, store: Store, options: LabelServing | None = None) -> None:
        options = options or LabelServing()
        self.store, self.token, last = store, store.setting("token"), int(store.setting("port"))
        super().__init__(options.host, *([last, 0] if last and not options.port else [options.port]))
        store.set("port", str(self.port))

    @property
    def url(self) -> str:
        """The address of the page, with its token behind `#`, which browsers never send."""
        return f"{url_of(self.host, self.port)}#{self.token}"

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Let a request pass. headers: by their names in lower case. Raises: RefusedError."""
        host = headers.get("host", "")
        if not is_known_host(host, self.host):
            raise RefusedError(403, f"this page is at {url_of(self.host, self.port)} only")
        if headers.get("origin", f"http://{host}") != f"http://{host}":
            raise RefusedError(403, "a page of another site may not use this one")
        if method == "GET" and path in FILES:
            return
        if path not in ACTIONS:
            raise RefusedError(404, "there is nothing at this address")
        if method != "POST":
            raise RefusedError(405, "use POST")
        if headers.get("sec-fetch-site", "same-origin") != "same-origin":
            raise RefusedError(403, "a page of another site may not use this one")
        if not hmac.compare_digest(headers.get("authorization", "").encode(), f"Bearer {self.token}".encode()):
            raise RefusedError(401, "the token is wrong: open the address that the terminal shows")
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise RefusedError(415, "send JSON")

    def answer(self, path: str, body: bytes) -> dict[str, object]:
        try:
            asked = json.loads(body)
            if not isinstance(asked, dict):
                raise RefusedError(400, "send an object")
            name = name_of_labeller(asked.get("labeller"))
            if name.casefold() == IMPORT:
                raise OperantError(f"{name!r} is the name of labels that came with the files; choose another")
            return ACTIONS[path](self, name, asked)
        except BusyError as error:
            raise RefusedError(503, str(error)) from error
        except (ValueError, RecursionError, OverflowError) as error:  # an OperantError, no JSON, a number too large
            raise RefusedError(400, str(error)) from error

    def next(self, name: str, asked: Mapping[str, object]) -> dict[str, object]:
        return self.state(name, self.store.next_item(name))

    def label(self, name: str, asked: Mapping[str, object]) -> dict[str, object]:
        item = self.store.item_of(asked.get("item"))
        count, answer, key, seconds = len(item.replies), asked.get("answer"), asked.get("key"), asked.get("seconds")
        if not isinstance(key, str) or not 8 <= len(key) <= 100:
            raise OperantError("a label needs a key of 8 to 100 letters, another one for each label")
        seconds = float(seconds) if type(seconds) in (int, float) and is_real(seconds) else None
        if answer is not None:
            places = order(name, item.id, count)
            checked, field = checked_answer(answer, count), KINDS[self.store.kind]
            if field not in checked and not ("ranks" in checked and (field == "best" or "all_bad" in checked)):
                raise OperantError(f"labels are of kind {self.store.kind} now: load the page again")
            if any(not 1 <= rating <= SCALE for rating in checked.get("ratings", ()) if rating is not None):
                raise OperantError(f"ratings are from 1 to {SCALE}")
            answer = moved(checked, [places.index(i) for i in range(count)])
        before = [label.number for label in self.store.labels_of(item.id) if label.labeller == name]
        seconds = None if seconds is None else min(max(seconds, 0.0), LONGEST_LOOK)
        label = self.store.add_label(item.id, name, answer, seconds=seconds, key=f"page {name} {key}")
        again = before not in ([], [label.number])
        notice = "You had labelled this one already; your new label counts." if again else ""
        return self.next(name, asked) | {"stored": label.number, "notice": notice}

    def undo(self, name: str, asked: Mapping[str, object]) -> dict[str, object]:
        number, last = asked.get("label"), self.store.last(name)
        withdrawn = self.store.undo(name, number) if type(number) is int else None
        if withdrawn is None or last is None:
            return self.next(name, asked) | {"notice": "That label was withdrawn or replaced on another page already."}
        self.store.show(withdrawn, name)
        return self.state(name, withdrawn, last if last.number == number else None)

    def state(self, name: str, item_id: str | None, before: Label | None = None) -> dict[str, object]:
        """What the page shows: an item or none, and progress. before: the label to begin with."""
        progress, last = self.store.progress(name), self.store.last(name)
        known = dict[str, object](kind=self.store.kind, scale=SCALE, undo=last and last.number, item=None, notice="")
        known |= {"done": progress.done, "total": progress.done + progress.left, "seconds_left": progress.seconds_left}
        if item_id is None:
            return known
        item = self.store.item(item_id)
        places = order(name, item_id, len(item.replies))
        answer = None if before is None or not before.answer else moved(before.answer, places)
        texts = {"prompt": messages(item.prompt), "replies": [messages(item.replies[place]) for place in places]}
        return known | {"item": {"number": self.store.number_of(item_id), **texts, "answer": answer}}

    async def respond(self, request: "Request") -> "Response":
        from starlette.concurrency import run_in_threadpool
        from starlette.requests import ClientDisconnect
        from starlette.responses import Response

        path, status, kind, body = request.url.path, 200, "application/json", b""
        try:
            self.check(request.method, path, request.headers)
            if path in FILES:
                name, kind = FILES[path]
                data = (FOLDER / name).read_bytes()
            else:
                async with asyncio.timeout(self.patience):
                    async for part in request.stream():
                        body += part
                        if len(body) > LARGEST_BODY:
                            raise RefusedError(413, f"a label has at most {LARGEST_BODY} bytes; shorten the comment")
                data = json.dumps(await run_in_threadpool(self.answer, path, body))
        except (TimeoutError, ClientDisconnect):
            status, data = 408, json.dumps({"error": f"the request was not there after {self.patience:g} seconds"})
        except RefusedError as refused:
            status, data = refused.args[0], json.dumps({"error": refused.args[1]})
        return Response(data, status, HEADERS, media_type=kind)


ACTIONS = {"/next": LabelServer.next, "/label": LabelServer.label, "/undo": LabelServer.undo}
"""What the page may ask for, by path."""


def order(name: str, item_id: str, count: int) -> list[int]:
    """The order in which a labeller sees the replies: entry i is the index of the reply that is shown as number i."""
    places = list(range(count))
    random.Random(f"{name}/{item_id}").shuffle(places)
    return places


def moved(answer: Mapping[str, Any], places: Sequence[int]) -> dict[str, object]:
    """An answer to the same replies in another order: what is said of number i is what was said of `places[i]`."""
    best = {"best": places.index(answer["best"])} if "best" in answer else {}
    lists = {field: [answer[field][i] for i in places] for field in ("ranks", "ratings", "good") if field in answer}
    return {**answer, **best, **lists}


def messages(value: Content) -> list[dict[str, str]]:
    """A prompt or reply as messages with `role`, empty for a plain text, and `text`."""
    if isinstance(value, str):
        return [{"role": "", "text": value}]
    return [{"role": message["role"], "text": message["content"]} for message in value]
