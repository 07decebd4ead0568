"""Serves a model by the OpenAI protocol: `operant serve runs/x`.

    with ModelServer(policy, engine, "my-model", ServerOptions(port=8000)) as server:
        print(server.url)      # http://127.0.0.1:8000/v1
        server.run()           # until Ctrl-C; or server.start(): in a thread

GET  /health, /v1/models
POST /v1/completions, /v1/chat/completions

A page of another site cannot use it: the checks of Host and Origin hold, and bodies have to be JSON.
"""

import asyncio
import hmac
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from operant.apps.agents import protocol
from operant.apps.agents.batches import Batches, Going
from operant.apps.agents.protocol import Json, ModelRequest, RefusedRequestError, Reply, answer, chunk, event, whole
from operant.bounds import bounded, check_bounds
from operant.models.policy import Policy
from operant.models.reference import fingerprint
from operant.net.listening import Listener, is_known_host, is_local, url_of
from operant.sampling import ReplyText
from operant.types import Engine, OperantError, require

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

READ_ON = 100e6
"""Bytes of a body too large that are read and forgotten: a client that still sends reads no answer."""


@dataclass(frozen=True)
class ServerOptions:
    """Where and for whom a model is served."""

    host: str = "127.0.0.1"
    """The address to listen on. 0.0.0.0 serves everyone who can reach this machine and has the key."""
    port: int = bounded(8000, at_least=0, below=65536, rule="0 (any free port) to 65535")
    """The port to listen on. 0: any free port."""
    key_variable: str = "OPERANT_API_KEY"
    """The environment variable of the key that clients have to send; without it, this machine alone is served."""
    max_tokens: int = bounded(1024, at_least=1, rule="at least 1")
    """Tokens of the longest reply to a conversation whose request names no number."""
    waiting: int = bounded(256, at_least=1, rule="at least 1")
    """The most replies that clients wait for at a time; further requests are asked to try again."""
    rows: int = bounded(64, at_least=1, rule="at least 1")
    """The most replies that are decoded together."""
    body_mb: float = bounded(4.0, above=0, rule="above 0")
    """MB of the largest request."""

    def __post_init__(self) -> None:
        check_bounds(self)


class ModelServer(Listener):
    """Listens on the address of the options, for one model.

    Raises: OperantError as `Listener`, for other machines without a key, and for a policy without a tokenizer.
    """

    what = "serving a model"

    def __init__(self, policy: Policy, engine: Engine, name: str, options: ServerOptions | None = None) -> None:
        self.options = options = options or ServerOptions()
        self.policy, self.engine, self.name, self.started = policy, engine, name, int(time.time())
        self.key, self.fingerprint = os.environ.get(options.key_variable, ""), fingerprint(policy)
        if policy.tokenizer is None:
            raise OperantError(f"{name} has no tokenizer, so it cannot be served: save one in its folder")
        why = f"lets other machines ask, and there is no key: set {options.key_variable}, or leave --host out"
        require(self.key or is_local(options.host), f"--host {options.host} {why}")
        super().__init__(options.host, options.port)
        self.batches = Batches(policy, engine, waiting=options.waiting, rows=options.rows)

    @property
    def url(self) -> str:
        return url_of(self.host, self.port) + "v1"

    def stop(self) -> None:
        super().stop()
        self.batches.__exit__()

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Let a request pass. headers: by their names in lower case. Raises: RefusedRequestError."""
        host = headers.get("host", "")
        if not is_known_host(host, self.options.host):
            raise RefusedRequestError(403, f"this server is at {self.url} only")
        if headers.get("origin", f"http://{host}") != f"http://{host}":
            raise RefusedRequestError(403, "a page of another site may not use this server")
        if path not in _PATHS:
            raise RefusedRequestError(404, f"there is nothing at {path[:100]}; there are: {', '.join(_PATHS)}")
        if method != _PATHS[path]:
            raise RefusedRequestError(405, f"use {_PATHS[path]}")
        sent = headers.get("authorization", "").removeprefix("Bearer ")
        if self.key and path != "/health" and not hmac.compare_digest(sent.encode(), self.key.encode()):
            why = f"the key is wrong: send that of {self.options.key_variable} as a bearer token"
            raise RefusedRequestError(401, why)
        if method == "POST" and headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise RefusedRequestError(415, "send JSON, with the content type application/json")

    def read(self, path: str, body: bytes) -> ModelRequest:
        """The request of a body. Raises: RefusedRequestError."""
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RefusedRequestError(400, f"the body is no JSON: {error}") from error
        make = protocol.chat_request if path.endswith("/chat/completions") else protocol.completion_request
        request = make(fields, self.policy, self.options.max_tokens)
        if request.model not in ("", self.name):
            raise RefusedRequestError(404, f"model={request.model[:100]!r}: this server has {self.name!r}", "model")
        return replace(request, model=self.name, fingerprint=self.fingerprint)

    def models(self) -> Json:
        about = {"id": self.name, "object": "model", "created": self.started, "owned_by": "operant"}
        return {"object": "list", "data": [about | {"max_model_len": self.policy.context}]}

    async def body_of(self, received: "Request") -> bytes:
        data, size, most = b"", 0, self.options.body_mb * 1e6
        async for part in received.stream():
            size += len(part)
            data += part if size <= most else b""
            if size > most + READ_ON:
                break
        if size > most:
            raise RefusedRequestError(413, f"a request has at most {self.options.body_mb:g} MB (--body-mb)")
        return data

    async def respond(self, request: "Request") -> "Response":
        from starlette.concurrency import run_in_threadpool
        from starlette.requests import ClientDisconnect
        from starlette.responses import JSONResponse, Response, StreamingResponse

        path = request.url.path
        try:
            self.check(request.method, path, request.headers)
            if path == "/health":
                return JSONResponse({"status": "ok"})
            if path == "/v1/models":
                return JSONResponse(self.models())
            body = await asyncio.wait_for(self.body_of(request), self.patience)
            asked = await run_in_threadpool(self.read, path, body)
            if asked.stream:
                return StreamingResponse(_stream(self, asked), media_type="text/event-stream")
            work, left = asyncio.ensure_future(_answer(self, asked)), asyncio.ensure_future(_gone(request))
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            left.cancel()
            if not work.done():  # nobody reads the answer
                work.cancel()
                return Response(status_code=499)
            return JSONResponse(work.result())
        except (TimeoutError, ClientDisconnect):
            refused = RefusedRequestError(408, f"the request was not there after {self.patience:g} seconds")
        except Exception as error:
            refused = protocol.refusal(error)
        text = json.dumps(refused.body)  # which escapes what a request quotes and UTF-8 lacks
        return Response(text, refused.status, {"Connection": "close"}, media_type="application/json")


_PATHS = {"/health": "GET", "/v1/models": "GET", "/v1/completions": "POST", "/v1/chat/completions": "POST"}
"""What may be asked for, and how."""


async def _pieces(batches: Batches, request: ModelRequest) -> AsyncIterator[tuple[Going, list[int], str | None]]:
    """Each reply of a request after each round, its tokens so far, and its end. Replies that nobody reads any more are
    forgotten."""
    loop, ready = asyncio.get_running_loop(), asyncio.Queue[tuple[Going, list[int], str | None]]()

    def tell(going: Going) -> None:
        with suppress(RuntimeError):  # the server has ended, and its loop is closed
            loop.call_soon_threadsafe(ready.put_nowait, (going, going.action, going.end))

    replies = batches.start(request, tell)
    try:
        left = len(replies)
        while left:
            going, action, end = await ready.get()
            if going.error is not None:
                raise going.error
            left -= end is not None
            yield going, action, end
    finally:
        batches.stop(replies)


async def _answer(server: ModelServer, request: ModelRequest) -> Json:
    ended = {going.index: going async for going, _, end in _pieces(server.batches, request) if end is not None}
    return answer(request, [ended[i].reply() for i in sorted(ended)], server.policy.tokenizer)


async def _stream(server: ModelServer, request: ModelRequest) -> AsyncIterator[str]:
    """The events of a streamed answer. A reply that may hold calls of functions, and one whose log-probs, token ids or
    prompt are wanted, is sent as a whole at its end."""
    tokenizer, texts, replies = server.policy.tokenizer, dict[int, ReplyText](), list[Reply]()
    at_end = bool(request.tools) or request.alternatives is not None or request.echo or request.ids
    try:
        async for going, action, end in _pieces(server.batches, request):
            i = going.index
            if i not in texts:
                texts[i] = ReplyText(tokenizer, going.prompt, request.sampling)
                if request.chat:
                    yield event(chunk(request, i, {"role": "assistant", "content": ""}))
            if end is not None:
                replies.append(going.reply())
            if at_end:
                for piece in whole(request, i, answer(request, replies[-1:], tokenizer)["choices"][0]) if end else ():
                    yield event(piece)
            else:
                text = "".join(texts[i].add(token) for token in action[len(texts[i].action) :])
                if end is not None and texts[i].whole.startswith(texts[i].shown):
                    text += texts[i].rest()
                if text or end:
                    yield event(chunk(request, i, {"content": text} if text else {}, end))
        if request.usage:
            yield event(protocol.usage_chunk(request, protocol.usage(request, replies)))
        yield protocol.STREAM_END
    except Exception as error:
        yield event(protocol.refusal(error).body)


async def _gone(request: "Request") -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(0.2)
