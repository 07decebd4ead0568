"""The OpenAI protocol: bodies of requests to token ids and sampling, completions to answers.

    request = completion_request(body, policy)       # of POST /v1/completions
    request = chat_request(body, policy)             # of POST /v1/chat/completions
    answer(request, replies)                         # the body of the answer

A field that would change a reply in a way that the engine does not know is refused, never ignored.
"""

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from operant.models.policy import Policy
from operant.sampling import PlainTokenizer, Sampling, encode_prompt, render, reply_text, task_key, token_pieces
from operant.types import OperantError, Tokenizer, shown, with_defaults

Json = dict[str, Any]
"""An object of JSON, such as a body, a message, or a call of a function."""
MOST_CHOICES = 128
"""Most replies of one request, over all its prompts."""
MOST_ALTERNATIVES = 20
"""Most alternatives with log-probs at a place."""
COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions where a request has none, as at OpenAI."""


class RefusedRequestError(Exception):
    """A request that gets an HTTP status and an error in the protocol's own form: (status, message, field)."""

    def __init__(self, status: int, message: str, field: str | None = None):
        super().__init__(message)
        self.status = status
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error"}
        kind = kinds.get(status, "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": field, "code": None}}


def wrong(field: str, why: str) -> RefusedRequestError:
    """The refusal of a request for one of its fields."""
    return RefusedRequestError(400, why, field)


def refusal(error: Exception) -> RefusedRequestError:
    """What a client reads of an exception."""
    if isinstance(error, RefusedRequestError):
        return error
    return RefusedRequestError(400 if isinstance(error, OperantError) else 500, f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class ModelRequest:
    """What a request asks for."""

    prompts: list[list[int]]
    """The token ids of each prompt; a conversation is one."""
    names: list[str]
    """What the random numbers of each prompt go by: its last text, as in `operant generate --prompt`."""
    sampling: Sampling
    model: str
    chat: bool
    n: int
    """Replies to each prompt."""
    seed: int
    stream: bool
    usage: bool
    """Whether a stream ends with the number of tokens."""
    alternatives: int | None
    """How many alternatives of each token an answer has, with log-probs; None: no log-probs."""
    echo: bool
    """Whether answers begin with the prompt."""
    tools: list[Json] | None
    """The functions that an answer may call."""
    ids: bool
    """Whether answers have the token ids, too."""
    no_reply: bool
    """Whether prompts are scored and nothing is generated: `max_tokens` is 0."""
    id: str
    created: int
    fingerprint: str = ""
    """Of the weights that answer."""

    def keys(self) -> list[int]:
        """The random-number key of each reply: equal seeds and prompts at equal places give equal replies."""
        places = [(i, name, sample) for i, name in enumerate(self.names) for sample in range(self.n)]
        return [task_key(self.seed, "probe", 0, name, i, sample) for i, name, sample in places]


class Reply(NamedTuple):
    """A reply that has ended."""

    prompt: list[int]
    action: list[int]
    end: str
    """stop or length, as of a `Completion`."""
    scored: "list[Scored] | None" = None
    """Of each token, those of the prompt first where it is echoed."""
    text: str | None = None
    """Its text, if that is not what the sampling of the request makes of the tokens."""


class Scored(NamedTuple):
    """The log-prob of a token at temperature 1, and the likeliest tokens of its place."""

    token: int
    logprob: float | None
    """None of the first token of a text."""
    best: list[tuple[int, float]]


# --- requests ---------------------------------------------------------------------------------------------------------

UNREAD = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
"""Fields that change no reply."""
IDLE: Mapping[str, tuple[object, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("auto", "none"),
    "function_call": (),
    "functions": (),
    "reasoning_effort": (),
    "prediction": (),
    "audio": (),
}
"""Fields that ask for what the engine does not do exactly, and the values with which they ask for nothing."""
SHARED = (
    *("model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stream"),
    *("stream_options", "logprobs", "return_token_ids"),
)
COMPLETION = (*SHARED, "prompt", "echo")
CHAT = (*SHARED, "messages", "max_completion_tokens", "top_logprobs", "tools")


class _Body:
    """The fields of a body, each read once and with its type."""

    def __init__(self, body: object, known: Sequence[str]):
        if not isinstance(body, dict):
            raise RefusedRequestError(400, "the body must be a JSON object")
        self.fields = {name: value for name, value in body.items() if value is not None}
        for name, value in self.fields.items():
            if name in IDLE and value not in IDLE[name]:
                raise wrong(name, f"{name}={shown(value)}: the engine has no such thing; leave it out")
            if name not in (*known, *UNREAD, *IDLE):
                raise wrong(name[:100], f"unknown field {name[:100]!r}; there are: {', '.join(known)}")

    def number(self, name: str, kind: type, default: Any, least: float, most: float) -> Any:
        value = self.fields.get(name, default)
        right = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
        if value is not default and not (right and least <= value <= most):
            what = "a whole number" if kind is int else "a number"
            raise wrong(name, f"{name}={shown(value)}: it must be {what} from {least:g} to {most:g}")
        return value

    def flag(self, name: str) -> bool:
        value = self.fields.get(name, False)
        if not isinstance(value, bool):
            raise wrong(name, f"{name}={shown(value)}: it must be true or false")
        return value


def completion_request(body: object, policy: Policy, most: int = 1024) -> ModelRequest:
    """The request of a body of /v1/completions. `most`: tokens of the longest reply where the context has no end.

    Raises: RefusedRequestError for fields that are unknown, of a wrong type, or that the engine cannot do exactly.
    """
    fields = _Body(body, COMPLETION)
    asked = fields.fields.get("prompt")
    several = isinstance(asked, list) and bool(asked) and all(isinstance(p, (str, list)) for p in asked)
    prompts = asked if several else [asked]
    for prompt in prompts:
        ids = isinstance(prompt, list) and prompt and all(isinstance(t, int) and type(t) is int for t in prompt)
        if not (isinstance(prompt, str) or ids):
            raise wrong("prompt", f"prompt={shown(prompt)}: it must be a text, token ids, or a list of either")
    echo, tokens = fields.flag("echo"), fields.number("max_tokens", int, COMPLETION_TOKENS, 0, 1_000_000)
    if not tokens and not echo:
        raise wrong("max_tokens", "max_tokens=0 without echo asks for nothing: give echo=true too")
    known = fields.number("logprobs", int, None, 0, MOST_ALTERNATIVES)
    if echo and known is not None and policy.encoder_decoder:
        raise wrong("echo", "the prompt of an encoder-decoder has no log-probs: leave echo out")
    read = [_ids(policy, prompt, "prompt") for prompt in prompts]
    names = [prompt if isinstance(prompt, str) else str(prompt) for prompt in prompts]
    return _request(fields, policy, read, names, tokens, most, alternatives=known, echo=echo)


def chat_request(body: object, policy: Policy, most: int = 1024) -> ModelRequest:
    """The request of a body of /v1/chat/completions, by the chat template of the policy's tokenizer.

    Raises: RefusedRequestError as `completion_request`, and for messages that the template refuses or leaves out.
    """
    fields = _Body(body, CHAT)
    tools = None if fields.fields.get("tool_choice") == "none" else fields.fields.get("tools") or None
    named = isinstance(tools, list) and all(isinstance(t, dict) and isinstance(t.get("function"), dict) for t in tools)
    if tools is not None and not named:
        raise wrong("tools", f"tools={shown(tools)}: it must be a list of functions")
    if tools is not None and "tools" not in str(policy.tokenizer.chat_template):
        raise wrong("tools", "the chat template of this model knows no tools: leave tools out")
    messages = read_messages(fields.fields.get("messages"))
    try:
        text = render(policy.tokenizer, messages, prompting=True, tools=tools)
        ids = encode_prompt(policy.tokenizer, messages, tools)
    except OperantError as error:
        raise wrong("messages", str(error)) from error
    wanted, top = fields.flag("logprobs"), fields.number("top_logprobs", int, 0, 0, MOST_ALTERNATIVES)
    if top and not wanted:
        raise wrong("top_logprobs", f"top_logprobs={top} without logprobs: give logprobs=true too")
    names = [name for name in ("max_tokens", "max_completion_tokens") if name in fields.fields]
    if len(names) > 1:
        raise wrong(names[0], "max_tokens and max_completion_tokens: give one of the two")
    tokens = fields.number(names[0], int, None, 1, 1_000_000) if names else None
    known, last, at = top if wanted else None, messages[-1]["content"], 0
    request = _request(fields, policy, [ids], [last], tokens, most, alternatives=known, tools=tools)
    for i, message in enumerate(messages):  # whose length fits
        if message["role"] == "assistant":
            continue
        own = message["content"].strip()
        forms = own, json.dumps(own, ensure_ascii=False)[1:-1]  # as it is, or as `tojson` writes it
        # Most templates keep the order: a search that always began at the front would be quadratic.
        places = (text.find(form, start) for start in (at, 0) for form in forms)
        at = next((place for place in places if place >= 0), -1)
        if at < 0:
            why = "the chat template leaves it out (a second system message?)"
            raise wrong("messages", f"messages[{i}] of role {message['role']!r}: {why}")
    return request


def _request(
    fields: _Body,
    policy: Policy,
    prompts: list[list[int]],
    names: list[str],
    tokens: int | None,
    most: int,
    *,
    alternatives: int | None,
    echo: bool = False,
    tools: list[Json] | None = None,
) -> ModelRequest:
    n = fields.number("n", int, 1, 1, MOST_CHOICES)
    if n * len(prompts) > MOST_CHOICES:
        raise wrong("n", f"{len(prompts)} prompts times n={n}: at most {MOST_CHOICES} replies")
    stream, options = fields.flag("stream"), fields.fields.get("stream_options", {})
    if not isinstance(options, dict) or set(options) - {"include_usage"}:
        raise wrong("stream_options", f"stream_options={shown(options)}: it may have include_usage")
    context, room, longest = policy.context, most, max(map(len, prompts))
    if context is not None:
        room = (policy.positions["decoder"] or most) if policy.encoder_decoder else context - longest
    tokens = max(1, min(most, room)) if tokens is None else tokens
    if context is not None and (why := policy.misfit(longest, tokens)) is not None:
        raise wrong("prompt", f"a prompt {why}; lower max_tokens or the prompt")
    sampling, model = _sampling(fields, policy, tokens), fields.fields.get("model", "")
    if not isinstance(model, str):
        raise wrong("model", f"model={shown(model)}: it must be a text")
    return ModelRequest(
        prompts=prompts,
        names=names,
        sampling=sampling,
        model=model,
        chat="messages" in fields.fields,
        n=n,
        seed=fields.number("seed", int, secrets.randbits(62), -(2**63), 2**63 - 1),
        stream=stream,
        usage=bool(options.get("include_usage", False)),
        alternatives=alternatives,
        echo=echo,
        tools=tools,
        ids=fields.flag("return_token_ids"),
        no_reply=not tokens,
        id=f"{'chatcmpl' if 'messages' in fields.fields else 'cmpl'}-{secrets.token_hex(12)}",
        created=int(time.time()),
    )


def _sampling(fields: _Body, policy: Policy, tokens: int) -> Sampling:
    stops = fields.fields.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not (isinstance(stops, list) and len(stops) <= 16 and all(isinstance(s, str) and s for s in stops)):
        raise wrong("stop", f"stop={shown(stops)}: it must be a text or up to 16 texts")
    temperature = fields.number("temperature", float, 1.0, 0, 2)
    try:
        return Sampling(
            temperature=temperature or 1.0,
            max_tokens=max(tokens, 1),
            stop_tokens=policy.stop_tokens,
            stop_strings=tuple(stops),
            top_k=fields.number("top_k", int, 0, 0, 1_000_000) if temperature else 1,
            top_p=fields.number("top_p", float, 1.0, 0, 1),
            min_p=fields.number("min_p", float, 0.0, 0, 1),
        )
    except OperantError as error:
        raise RefusedRequestError(400, str(error).removeprefix("sampling.")) from error


def _ids(policy: Policy, prompt: str | list[int], field: str) -> list[int]:
    try:
        ids = encode_prompt(policy.tokenizer, prompt)
    except OperantError as error:
        raise wrong(field, str(error)) from error
    if not ids or min(ids) < 0 or max(ids) >= policy.vocabulary:
        why = f"ids go from 0 to {policy.vocabulary - 1}" if ids else "it has no tokens"
        raise wrong(field, f"{field}={shown(prompt)}: {why}")
    return ids


def read_messages(given: object) -> list[Json]:
    """The messages as templates read them: contents are texts, and the arguments of calls are objects."""
    if not isinstance(given, list) or not given:
        raise wrong("messages", "messages must be a list of at least one message")
    out = []
    for i, message in enumerate(given):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("system", "developer", "user", "assistant", "tool"):
            why = "a role of system, developer, user, assistant or tool is missing"
            raise wrong("messages", f"messages[{i}]={shown(message)}: {why}")
        content, calls = message.get("content"), message.get("tool_calls")
        if isinstance(content, list):
            odd = next((p for p in content if not isinstance(p, dict) or not isinstance(p.get("text"), str)), None)
            if odd is not None:
                raise wrong("messages", f"messages[{i}]: the model reads texts alone, and {shown(odd)} is none")
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str) and not (content is None and role == "assistant" and calls):
            raise wrong("messages", f"messages[{i}]: its content must be a text")
        known = {"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "annotations", "audio"}
        if more := next((name for name in message if name not in known and message[name] is not None), None):
            raise wrong("messages", f"messages[{i}] has the unknown field {more[:100]!r}")
        named = {key: message[key] for key in ("name", "tool_call_id") if key in message}
        listed = calls if isinstance(calls, list) else [str(calls)]
        asked = {"tool_calls": [_call(call, i) for call in listed]} if calls else {}
        out.append({"role": role, "content": content or "", **named, **asked})
    return out


def _call(call: Any, place: int) -> Json:
    """A call of a function, with its arguments as the object that templates expect."""
    try:
        function, arguments = call["function"], call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        named = {"name": function["name"], "arguments": arguments}
        return {"type": "function", "id": call.get("id"), "function": named}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise wrong("messages", f"messages[{place}]: {shown(call)} is no call of a function") from error


# --- answers ----------------------------------------------------------------------------------------------------------

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def answer(request: ModelRequest, replies: Sequence[Reply], tokenizer: Tokenizer) -> Json:
    """The body of the answer to a request. replies: `n` to each prompt, in order."""
    choices = []
    for i, reply in enumerate(replies):
        if (text := reply.text) is None:
            text = "" if request.no_reply else reply_text(tokenizer, reply.prompt, reply.action, request.sampling)
        choice: Json = {"index": i, "finish_reason": reply.end}
        if request.chat:
            calls, left = called(tokenizer, reply, text, request.tools) if request.tools else ([], text)
            message: Json = {"role": "assistant", "content": left or ("" if not calls else None)}
            choice["message"] = message | ({"tool_calls": calls} if calls else {})
            choice["finish_reason"] = "tool_calls" if calls else reply.end
        else:
            choice["text"] = (tokenizer.decode(reply.prompt) if request.echo else "") + text
        choice["logprobs"] = None if reply.scored is None else _logprobs(request, reply.scored, tokenizer)
        if request.ids:
            choice |= {"prompt_token_ids": reply.prompt, "token_ids": reply.action}
        choices.append(choice)
    kind = "chat.completion" if request.chat else "text_completion"
    about = {"id": request.id, "object": kind, "created": request.created, "model": request.model}
    return about | {"system_fingerprint": request.fingerprint, "choices": choices, "usage": usage(request, replies)}


def usage(request: ModelRequest, replies: Sequence[Reply]) -> dict[str, int]:
    read, written = sum(map(len, request.prompts)), sum(len(reply.action) for reply in replies)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def chunk(request: ModelRequest, index: int = 0, new: Mapping[str, object] = {}, end: str | None = None) -> Json:
    """A piece of a streamed answer: what a message gains."""
    choice: Json = {"index": index, "finish_reason": end, "logprobs": None}
    about = {"id": request.id, "created": request.created, "model": request.model}
    if request.chat:
        return about | {"object": "chat.completion.chunk", "choices": [choice | {"delta": new}]}
    return about | {"object": "text_completion", "choices": [choice | {"text": new.get("content", "")}]}


STREAM_END = "data: [DONE]\n\n"


def event(body: Mapping[str, object]) -> str:
    """A piece of a streamed answer as it is sent."""
    return f"data: {json.dumps(body)}\n\n"


def usage_chunk(request: ModelRequest, tokens: Mapping[str, int]) -> Json:
    return chunk(request) | {"choices": [], "usage": tokens}


def whole(request: ModelRequest, index: int, choice: Mapping[str, Any]) -> list[Json]:
    """A choice of an answer as one piece of a stream, and its end."""
    new = choice["message"] if request.chat else {"content": choice["text"]}
    if calls := new.get("tool_calls"):
        new = new | {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}
    piece = chunk(request, index, new)
    names = ("logprobs", "prompt_token_ids", "token_ids")
    piece["choices"][0] |= {name: choice[name] for name in names if name in choice}
    return [piece, chunk(request, index, {}, choice["finish_reason"])]


def called(tokenizer: Any, reply: Reply, text: str, tools: list[Json] | None = None) -> tuple[list[Json], str]:
    """The calls in a reply, and its other text: by the tokenizer's own template of responses, else those that stand
    between <tool_call> and </tool_call>. What is no call stays text."""
    whole, calls, left = tokenizer.decode(reply.action, skip_special_tokens=False), [], text
    try:
        if with_defaults(tokenizer, PlainTokenizer).response_template:
            parsed = tokenizer.parse_response(whole, prefix=tokenizer.decode(reply.prompt), tools=tools)
            calls = [call.get("function", call) for call in parsed.get("tool_calls") or []]
            left = parsed.get("content") or ""
        else:
            calls = [json.loads(match[1]) for match in _CALL.finditer(whole)]
            left = _CALL.sub("", text).strip() if calls else text
        named = [{"name": str(call["name"]), "arguments": json.dumps(_arguments(call))} for call in calls]
    except Exception:  # the template is the model's own, and the text anything
        return [], text
    return [{"id": f"call_{i}", "type": "function", "function": function} for i, function in enumerate(named)], left


def _arguments(call: Json) -> Json:
    """The arguments of a call, also of a model that has written them as a text. What are none get a name of no tool."""
    found = call.get("arguments") or {}
    with suppress(ValueError):
        found = json.loads(found) if isinstance(found, str) else found
    return found if isinstance(found, dict) else {"arguments": found}


def _logprobs(request: ModelRequest, scored: Sequence[Scored], tokenizer: Tokenizer) -> Json:
    def text(token: int) -> str:
        return token_pieces(tokenizer, [token])[0]

    if request.chat:
        content = [
            _told(text(token), logprob) | {"top_logprobs": [_told(text(t), x) for t, x in best]}
            for token, logprob, best in scored
        ]
        return {"content": content, "refusal": None}
    pieces = [text(token) for token, _, _ in scored]
    # Two tokens may have one text: the likelier one stands for both. The token itself is always there.
    best = [
        None if logprob is None else {piece: logprob} | {text(t): x for t, x in reversed(alternatives)}
        for piece, (_, logprob, alternatives) in zip(pieces, scored, strict=True)
    ]
    return {
        "tokens": pieces,
        "token_logprobs": [logprob for _, logprob, _ in scored],
        "top_logprobs": best if request.alternatives else None,
        "text_offset": [sum(map(len, pieces[:i])) for i in range(len(pieces))],
    }


def _told(text: str, logprob: float | None) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", errors="replace"))}
