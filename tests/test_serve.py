"""`operant serve`: a model behind the OpenAI protocol, asked by the `openai` client and by sockets."""

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from functools import partial
from http.server import ThreadingHTTPServer
from types import SimpleNamespace

import openai
import processes
import pytest
import torch
from cases import cases
from page_commands import snippets
from toys import bare_table, letters, lm

import operant
from operant import OperantError, Policy, Sampling
from operant.apps.agents import server as serving
from operant.apps.agents.protocol import Reply, called, chat_request
from operant.apps.agents.server import ModelServer, ServerOptions
from operant.engines.native.engine import NativeEngine
from operant.net.listening import Responder
from operant.sampling import reply_text, task_key
from operant.tools.cli import main

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.to }}{% endfor %}"
    "{% endfor %}{% if tools %}b{{ tools[0].function.name }}{% endif %}a"
)


def policy_of(kind):
    tokenizer = letters(TEMPLATE)
    return Policy(lm(kind, len(tokenizer)), tokenizer)


@pytest.fixture(scope="module", params=["gpt2", "t5"])
def served(request):
    policy = policy_of(request.param)
    with ModelServer(policy, NativeEngine(policy), "toy", ServerOptions(port=0)) as server:
        server.start()
        yield server


@pytest.fixture(scope="module")
def one():
    policy = policy_of("gpt2")
    with ModelServer(policy, NativeEngine(policy), "toy", ServerOptions(port=0, body_mb=0.01)) as server:
        server.start()
        yield server


def client_of(server):
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)


def generated(server, prompt, sampling, seed, *, number=0, sample=0):
    """The tokens of the engine itself, which reads nothing of the protocol."""
    ids = server.policy.tokenizer(prompt)["input_ids"]
    key = task_key(seed, "probe", 0, prompt, number, sample)
    (made,) = NativeEngine(server.policy).generate([ids], sampling, [key])
    return ids, made


def test_replies_are_the_engines_own_alone_and_beside_others(served):
    # 40 tokens are several rounds; the others come and go, with the same sampling and with another.
    client, sampling = client_of(served), Sampling(max_tokens=40, stop_tokens=served.policy.stop_tokens)
    ids, made = generated(served, "the cab", sampling, 7)
    text = reply_text(served.policy.tokenizer, ids, made.action, sampling)
    asked = {"model": "toy", "prompt": "the cab", "max_tokens": 40, "seed": 7}
    alone = client.completions.create(**asked, extra_body={"return_token_ids": True})
    assert alone.choices[0].token_ids == made.action and alone.choices[0].text == text
    assert alone.choices[0].finish_reason == made.end and alone.usage.completion_tokens == len(made.action)
    others = [{"prompt": "abc" * (k % 4 + 1), "seed": k, "temperature": 1 - k % 2 / 2} for k in range(8)]
    with ThreadPoolExecutor(9) as threads:
        *_, again = threads.map(lambda other: client.completions.create(**asked | other), [*others, {}])
    assert again.choices[0].text == text
    pieces = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].text for p in pieces if p.choices) == text
    assert [p.usage.completion_tokens for p in pieces if p.usage] == [len(made.action)]
    several = client.completions.create(**asked | {"prompt": ["ab", "the cab"]}, n=2)
    _, last = generated(served, "the cab", sampling, 7, number=1, sample=1)
    assert several.choices[3].text == reply_text(served.policy.tokenizer, ids, last.action, sampling)


def test_logprobs_are_those_of_a_plain_forward(served):
    tokenizer, ids = served.policy.tokenizer, letters()("the cab")["input_ids"]
    asked = {"model": "toy", "prompt": "the cab", "max_tokens": 6, "logprobs": 3, "temperature": 0}
    made = client_of(served).completions.create(**asked, extra_body={"return_token_ids": True}).choices[0]
    table = bare_table(served.policy.model, ids, made.token_ids)
    assert made.token_ids == table.argmax(-1).tolist()  # temperature 0 is the likeliest token
    assert made.logprobs.token_logprobs == pytest.approx(table.max(-1).values.tolist(), abs=1e-5)
    for row, told in zip(table, made.logprobs.top_logprobs, strict=True):
        best = {tokenizer.decode([t]): float(row[t]) for t in reversed(row.topk(3).indices.tolist())}
        assert told == pytest.approx(best, abs=1e-5)
    pieces = client_of(served).completions.create(**asked, stream=True, extra_body={"return_token_ids": True})
    streamed = next(iter(pieces)).choices[0]
    assert (streamed.token_ids, streamed.logprobs, streamed.text) == (made.token_ids, made.logprobs, made.text)


def test_an_echoed_prompt_is_scored(one):
    """What lm-eval sends for a log-likelihood: token ids, no new token, the log-probs of the prompt."""
    ids = one.policy.tokenizer("the cab abc")["input_ids"]
    asked = {"model": "toy", "prompt": [ids, ids[:4]], "max_tokens": 0, "echo": True, "logprobs": 1, "seed": 1234}
    first, second = client_of(one).completions.create(**asked).choices
    known = bare_table(one.policy.model, ids[:1], ids[1:]).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert first.logprobs.token_logprobs[0] is None and first.text == "the cab abc"
    assert first.logprobs.token_logprobs[1:] == pytest.approx(known.tolist(), abs=1e-5)
    assert second.logprobs.token_logprobs[1:] == pytest.approx(known[:3].tolist(), abs=1e-5)


def test_conversations_are_rendered_by_the_template_and_scored(one):
    talk = [{"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "cab"}]}]
    asked = {"model": "toy", "messages": talk, "max_tokens": 5, "seed": 3, "logprobs": True, "top_logprobs": 2}
    made = client_of(one).chat.completions.create(**asked, extra_body={"return_token_ids": True})
    choice, ids = made.choices[0], one.policy.tokenizer("the caba")["input_ids"]
    assert choice.prompt_token_ids == ids and choice.message.role == "assistant"
    table = bare_table(one.policy.model, ids, choice.token_ids)
    known = table.gather(-1, torch.tensor(choice.token_ids)[:, None])[:, 0].tolist()
    assert [c.logprob for c in choice.logprobs.content] == pytest.approx(known, abs=1e-5)
    assert [len(c.top_logprobs) for c in choice.logprobs.content] == [2] * 5
    pieces = list(client_of(one).chat.completions.create(**asked, stream=True))
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == choice.message.content
    [told] = [p.choices[0].logprobs for p in pieces if p.choices[0].logprobs]
    assert told.content == choice.logprobs.content and pieces[-1].choices[0].finish_reason == choice.finish_reason


@cases(
    ('b<tool_call>{"name": "go", "arguments": {"to": "c"}}</tool_call>', "go", "b"),
    ('<tool_call>{"name": "go", "arguments": "{\\"to\\": \\"c\\"}"}</tool_call>', "go", ""),
    ("<tool_call>{torn</tool_call>", None, "<tool_call>{torn</tool_call>"),
    ('<tool_call>{"arguments": {}}</tool_call>', None, '<tool_call>{"arguments": {}}</tool_call>'),
)
def test_calls_of_functions_are_read(text, name, left):
    says = SimpleNamespace(decode=lambda ids, **_: "".join(map(chr, ids)))
    calls, rest = called(says, Reply([], [*map(ord, text)], "stop"), text)
    assert [c["function"]["name"] for c in calls] == ([name] if name else []) and rest == left
    assert not calls or json.loads(calls[0]["function"]["arguments"]) == {"to": "c"}


def test_tools_and_their_calls_reach_the_template(one):
    call = {"id": "1", "type": "function", "function": {"name": "go", "arguments": '{"to": "cab"}'}}
    talk = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tool = {"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}}
    made = client_of(one).chat.completions.create(
        model="toy", messages=[*talk, {"role": "tool", "tool_call_id": "1", "content": "den"}], tools=[tool],
        max_tokens=2, extra_body={"return_token_ids": True},
    )  # fmt: skip
    assert made.choices[0].prompt_token_ids == one.policy.tokenizer("abccabdenbgoa")["input_ids"]
    quoting = letters("{% for m in messages %}{{ m.content | tojson }}{% endfor %}a")
    chat_request({"messages": [{"role": "user", "content": 'a "b"\n\u00e9'}]}, Policy(one.policy.model, quoting))


def post(server, path, body, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.socket.getsockname()[1], timeout=20)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, data, {"Content-Type": "application/json"} | headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())["error"]
    finally:
        connection.close()


USER = {"role": "user", "content": "abc"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@cases(
    ("completions", b"{", 400, "no JSON"),
    ("chat/completions", {"messages": [{"role": "assistant", "content": "a", "tool_calls": 5}]}, 400, "'5' is no call"),
    ("completions", [], 400, "JSON object"),
    ("completions", {}, 400, "prompt=None"),
    ("completions", {"prompt": []}, 400, "token ids"),
    ("completions", {"prompt": [99999]}, 400, "0 to 36"),
    ("completions", {"prompt": [True]}, 400, "token ids"),
    ("completions", {"prompt": "a", "colour": 1}, 400, "unknown field 'colour'"),
    ("completions", {"prompt": "a", "\ud800": 1}, 400, "unknown field '\\ud800'"),
    ("completions", {"prompt": "a", "frequency_penalty": 0.5}, 400, "no such thing"),
    ("completions", {"prompt": "a", "temperature": 3}, 400, "0 to 2"),
    ("completions", {"prompt": "a", "top_p": 0}, 400, "top_p=0"),
    ("completions", {"prompt": "a", "max_tokens": 0}, 400, "echo=true"),
    ("completions", {"prompt": "a", "max_tokens": 90}, 400, "context of 64;"),
    ("completions", {"prompt": "a", "n": 1000}, 400, "1 to 128"),
    ("completions", {"prompt": ["a"] * 9, "n": 100}, 400, "at most 128"),
    ("completions", {"prompt": "a", "stop": [""]}, 400, "stop="),
    ("completions", {"prompt": "a", "model": "gpt-4"}, 404, "this server has 'toy'"),
    ("completions", {"prompt": "a" * 10_000_000}, 413, "0.01 MB"),
    ("chat/completions", {"messages": []}, 400, "at least one"),
    ("chat/completions", {"messages": ["hi"]}, 400, "role"),
    ("chat/completions", {"messages": [USER | {"content": [{"type": "image_url"}]}]}, 400, "texts alone"),
    ("chat/completions", {"messages": [USER], "top_logprobs": 2}, 400, "logprobs=true"),
    ("chat/completions", {"messages": [USER], "max_tokens": 1, "max_completion_tokens": 1}, 400, "one of the two"),
    ("chat/completions", {"messages": [USER], "tools": ["go"]}, 400, "list of functions"),
    ("chat/completions", {"messages": [USER], "response_format": {"type": "json_object"}}, 400, "no such thing"),
    ("chat/completions", {"messages": [USER | {"colour": 1}]}, 400, "unknown field 'colour'"),
    ("embeddings", {}, 404, "there are: /health"),
)
def test_what_cannot_be_done_is_refused_in_the_protocols_own_form(path, body, status, said, one):
    found, error = post(one, f"/v1/{path}", body)
    assert (found, said in error["message"]) == (status, True), error
    assert set(error) == {"message", "type", "param", "code"}


def test_the_reply_of_an_encoder_decoder_needs_no_room_beside_the_prompt():
    policy = policy_of("bart")  # 64 positions on each side
    read, chat = serving.protocol.completion_request, serving.protocol.chat_request
    assert read({"prompt": "ab" * 30, "max_tokens": 64}, policy).sampling.max_tokens == 64
    assert chat({"messages": [USER | {"content": "ab" * 29}]}, policy).sampling.max_tokens == 64
    for prompt, tokens in (("a", 65), ("ab" * 33, 1)):
        with pytest.raises(serving.protocol.RefusedRequestError, match="at most 64"):
            read({"prompt": prompt, "max_tokens": tokens}, policy)


def test_a_message_that_the_template_leaves_out_is_refused(one, monkeypatch):
    policy = Policy(one.policy.model, letters("{{ messages[0].content }}{{ messages[-1].content }}a"))
    talk = [{"role": "system", "content": "den"}, {"role": "system", "content": "cab"}, USER]
    for more, why in (({}, r"messages\[1\].*leaves it out"), ({"content": "a" * 70}, "context of 64")):
        with pytest.raises(serving.protocol.RefusedRequestError, match=why):  # the length is looked at first
            chat_request({"messages": [*talk, USER | more]}, policy)
    last = Policy(one.policy.model, letters("{{ messages[1].content }}{{ messages[0].content }}a"))
    assert chat_request({"messages": talk[1:]}, last).prompts  # a system message that stands behind
    begun = list[int]()  # each search begins where the last one has found its message
    text = type("Text", (str,), {"find": lambda self, form, start: begun.append(start) or str.find(self, form, start)})
    monkeypatch.setattr(serving.protocol, "render", lambda *_, **__: text("abcdefgh"))
    chat_request({"messages": [USER | {"content": letter} for letter in "abcdefgh"]}, one.policy)
    assert begun == [0, *range(7)]


@cases(({"Host": "evil.example"}, 403), ({"Origin": "http://evil.example"}, 403), ({"Content-Type": "text/plain"}, 415))
def test_pages_of_other_sites_are_refused(headers, status, one):
    assert post(one, "/v1/completions", {"prompt": "a"}, **headers)[0] == status


def test_a_key_is_asked_for_and_needed_beyond_this_machine(one, monkeypatch):
    with pytest.raises(OperantError, match="set OPERANT_API_KEY"):
        ModelServer(one.policy, one.engine, "toy", ServerOptions(host="0.0.0.0", port=0))
    monkeypatch.setenv("OPERANT_API_KEY", "secret")
    with ModelServer(one.policy, one.engine, "toy", ServerOptions(host="0.0.0.0", port=0)) as server:
        server.start()
        assert post(server, "/v1/completions", {"prompt": "a"})[0] == 401
        assert post(server, "/v1/completions", {"prompt": 5}, Authorization="Bearer secret")[0] == 400


def test_half_a_request_and_silence_end(one, monkeypatch):
    monkeypatch.setattr(ModelServer, "patience", 0.3)
    monkeypatch.setattr(Responder, "timeout", 0.3)
    connect = partial(socket.create_connection, one.socket.getsockname(), timeout=10)
    with connect() as silent, connect() as half, connect() as kept:
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" in kept.recv(1000)
        kept.sendall(b"GET /health HTTP/1.1\r\n")
        half.sendall(HEAD + b"Content-Length: 90\r\n\r\n{")
        assert b"408" in half.recv(1000).splitlines()[0] and silent.recv(1000) == b""
        b"".join(iter(partial(kept.recv, 1000), b""))  # until it is closed
    reads = processes.served(ThreadingHTTPServer(("localhost", 0), Responder))
    with reads as page, socket.create_connection(page.server_address) as slow, pytest.raises(ConnectionError):
        processes.until(lambda: slow.sendall(b"a"), 10)  # never a pause of `timeout` seconds


def test_too_many_requests_wait_elsewhere_and_replies_that_nobody_reads_stop(one):
    one.batches.waiting, slow = 2, threading.Event()
    generate_more = one.engine.generate_more
    one.engine.generate_more = lambda *given: (slow.wait(10), generate_more(*given))[1]
    try:
        body = json.dumps({"prompt": "a", "n": 2}).encode()
        with socket.create_connection(one.socket.getsockname()) as left:
            left.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            processes.until(lambda: len(one.batches._live) == 2)
            status, error = post(one, "/v1/completions", {"prompt": "a"})
            assert status == 429 and "try again" in error["message"]
            assert post(one, "/v1/completions", {"prompt": "a", "n": 3})[0] == 400, "it never fits"
        processes.until(lambda: not one.batches._live)
    finally:
        slow.set()
        del one.engine.generate_more
        one.batches.waiting = 256
    assert client_of(one).completions.create(model="toy", prompt="a", max_tokens=2).usage.completion_tokens == 2


@pytest.mark.slow
def test_the_snippets_of_the_page_run(one, capsys, here):
    """What the second one records is trained on: by the weights that answered, every ratio is 1; others are stale."""
    for snippet in snippets("docs/serving.md"):
        for shown, here in (("http://127.0.0.1:8000/v1", one.url), ("runs/sentiment", "toy"), ("This film", "the cab")):
            assert shown in snippet
            snippet = snippet.replace(shown, here)
        exec(snippet, {})
    assert capsys.readouterr().out.strip()
    others = Policy(lm("gpt2", len(one.policy.tokenizer), seed=1), one.policy.tokenizer)
    for policy, age in ((one.policy, 0.0), (others, 1.0)):
        recorded = {"replies": "calls.jsonl", "algorithm": "grpo", "samples": 4, "batch": 4, "steps": 2, "probes": 0}
        run = operant.train(Policy(deepcopy(policy.model), policy.tokenizer), **recorded, out=f"run-{age}", quiet=True)
        first, second = run.metrics
        assert (first["rollout/staleness"], second["rollout/staleness"]) == (age, age + 1)
        assert (abs(first["rollout/importance_mean"] - 1) < 1e-5) == (age == 0)
        assert (first.get("rollout/engine_gap_max", 1.0) < 1e-5) == (age == 0)


def test_an_error_of_the_engine_is_one_answer_and_the_server_goes_on(one, monkeypatch):
    monkeypatch.setattr(one.engine, "generate_more", lambda *_: 1 / 0, raising=False)
    status, error = post(one, "/v1/completions", {"prompt": "a"})
    assert status == 500 and "ZeroDivisionError" in error["message"]
    monkeypatch.undo()
    made = client_of(one).completions.create(model="", prompt="a", max_tokens=1)
    assert (made.model, made.usage.completion_tokens) == ("toy", 1)


@pytest.mark.parametrize(("stream", "known"), [(True, [1, 2, 4, 8, 16, 32, 40]), (False, [16, 32, 40])])
def test_a_stream_begins_with_a_single_token(one, stream, known):
    asked = {"prompt": "a", "max_tokens": 40, "temperature": 0, "stream": stream}
    request, found = serving.protocol.completion_request(asked, one.policy), []
    request = replace(request, sampling=replace(request.sampling, stop_tokens=()))
    one.batches.start(request, lambda going: found.append(len(going.action)))
    processes.until(lambda: found and found[-1] == 40)
    assert found == known


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_pieces_that_are_remembered_are_those_of_one_call(kind):
    engine, sampling = NativeEngine(policy_of(kind)), Sampling(max_tokens=12, stop_tokens=(-1,))
    prompts, keys = [[3, 4, 5], [6, 7, 8, 9], [3, 4, 5]], [1, 2, 3]
    whole = engine.generate(prompts, sampling, keys)
    with engine.remembering():
        begun = [[] for _ in prompts]
        for _ in range(3):
            pieces = engine.generate_more(prompts, begun, [4] * 3, sampling, keys)
            begun = [[*b, *p.action] for b, p in zip(begun, pieces, strict=True)]
            kept = [row.ids for row in engine.kept._rows.values()]
            assert sorted(kept) == sorted({(*p, *b[:-1]) for p, b in zip(prompts, begun, strict=True)})
    assert begun == [w.action for w in whole]


@cases(
    ([], "expected a run folder or model"),
    (["runs/none"], "runs/none"),
    (["builtin:reviews-lm", "--port", "99999"], "port"),
    (["builtin:reviews-lm", "--colour", "red"], "colour"),
)
def test_mistakes_at_the_command_line_are_one_sentence(words, said, capsys):
    assert main(["serve", *words]) == 2 and said in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_serves_until_ctrl_c():
    words = [sys.executable, "-m", "operant", "serve", "builtin:reviews-lm", "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        client = openai.OpenAI(base_url=process.stdout.readline().split()[0], api_key="none")
        made = client.completions.create(model="builtin:reviews-lm", prompt="This film", max_tokens=4, seed=0)
        words[3:] = ["generate", "builtin:reviews-lm", "--prompt", "This film", "--max-tokens", "4"]
        known = subprocess.run(words, capture_output=True, text=True, check=True)
        assert "This film" + made.choices[0].text == known.stdout.rstrip("\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0 and "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()
