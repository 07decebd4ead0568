"""The client of OpenAI-compatible endpoints, against a server whose failures are written down beforehand."""

import contextlib
import math
import re
import socket
import sqlite3
import time
from email.utils import formatdate

import pytest
from cases import cases
from completion_server import Server
from page_commands import snippets
from processes import Child

from operant.engines.completions import Completions, Spent
from operant.net import client as http_client
from operant.types import OperantError

KEY = "sk-very-secret-0123456789"


@pytest.fixture
def serve():
    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(Server(*args, **options))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(http_client, "FIRST_WAIT", 0.001)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def echo(body):
    return {"text": body["prompt"].upper()}


def client(server, **options):
    return Completions(server.url, "m", **{"timeout": 5.0} | options)


# --- requests and the cache -------------------------------------------------------------------------------------------
def test_what_is_sent_and_what_comes_back(serve):
    server = serve(echo)
    assert client(server, stop=["\n"], extra={"best_of": 1, "top_p": None})(["a", "b", "a"]) == ["A", "B", "A"]
    fields = {"model": "m", "max_tokens": 16, "temperature": 0.0, "stop": ["\n"], "best_of": 1}
    assert sorted(server.seen, key=str) == [fields | {"prompt": "a"}, fields | {"prompt": "b"}]
    assert set(server.paths) == {"/v1/completions"}
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    chat = serve(lambda body: {"message": {"content": body["messages"][-1]["content"] * 2}})
    assert client(chat, chat=True, system="Be brief.", stop="END")(["ab"]) == ["abab"]
    assert (chat.paths, chat.seen[0]["stop"]) == (["/v1/chat/completions"], ["END"])
    assert [message["role"] for message in chat.seen[0]["messages"]] == ["system", "user"]


def test_an_answer_in_the_cache_is_not_asked_for_again(serve, tmp_path):
    server, path = serve(echo), tmp_path / "answers.sqlite"
    first = client(server, cache=path)
    assert (first(["a", "b"]), first(["b"]), len(server.seen)) == (["A", "B"], ["B"], 2)
    again = client(server, cache=path)
    assert again(["b", "a", "c"]) == ["B", "A", "C"]
    assert [body["prompt"] for body in server.seen[2:]] == ["c"]
    assert (again.spent.requests, again.spent.cached) == (1, 2)
    client(server, cache=path, max_tokens=8)(["a"])  # another request
    assert len(server.seen) == 4
    assert not any(KEY.encode() in file.read_bytes() for file in tmp_path.iterdir())


def test_draws_of_the_same_text_differ_and_are_kept(serve, tmp_path):
    count = iter(range(100))
    server = serve(lambda body: {"text": f"{body['seed']}:{next(count)}"})
    options = {"cache": tmp_path / "a", "extra": {"temperature": 1.0}, "seed": 5, "at_once": 1}
    assert client(server, **options)(["x", "x", "y", "x"]) == ["5:0", "6:1", "5:2", "7:3"]
    assert client(server, **options)(["x", "y", "x", "x", "x"]) == ["5:0", "5:2", "6:1", "7:3", "8:4"]


def test_two_processes_share_a_cache(serve, tmp_path):
    server, path, texts = serve(echo), tmp_path / "answers.sqlite", [str(i) for i in range(40)]
    workers = [Child(lambda: client(server, cache=path)(texts) != texts) for _ in "ab"]
    assert [worker.ends(60) for worker in workers] == [0, 0]
    assert 40 <= (sent := len(server.seen)) <= 80
    assert client(server, cache=path)(texts) == texts
    assert len(server.seen) == sent


# --- failures ---------------------------------------------------------------------------------------------------------
@cases(([429, 500, 503], 4), (["cut", 502], 3), ([(429, {"Retry-After": "0"})], 2))
def test_what_may_pass_is_tried_again(script, sent, serve):
    server = serve(echo, script)
    asked = client(server)
    assert asked(["a"]) == ["A"]
    assert (len(server.seen), asked.spent.requests) == (sent, sent)


def test_a_server_says_how_long_to_wait(serve):
    server = serve(echo, [(429, {"Retry-After": "0.1"})])
    client(server)(["a"])
    assert server.times[1] - server.times[0] >= 0.09
    assert 1 < http_client.seconds_in(formatdate(time.time() + 3, usegmt=True)) <= 3


def test_waits_double_until_the_longest(serve, monkeypatch):
    monkeypatch.setattr(http_client, "FIRST_WAIT", 0.04)
    server = serve(echo, [500] * 4)
    client(server, longest_wait=0.1)(["a"])
    gaps = [after - before for before, after in zip(server.times, server.times[1:])]
    for gap, least in zip(gaps, (0.03, 0.06, 0.1, 0.1), strict=True):
        assert least <= gap < least + 0.2


def test_a_slow_server_is_asked_again_and_then_named(serve):
    server = serve(echo, delay=0.3)
    with pytest.raises(OperantError, match=r"has not answered in 0\.1 s \(2 tries\)"):
        client(server, timeout=0.1, tries=2)(["a"])
    assert len(server.seen) == 2


@cases(
    (401, r"status 401.*variable OPENAI_API_KEY, which is set", 1),
    (404, r"status 404.*does the server have a model 'm', and is url=http://127.0.0.1:\d+/v1 its address", 1),
    (400, r"status 400", 1),
    ((302, {"Location": "http://127.0.0.1:1/"}), r"status 302.*the key is not sent there", 1),
    ((429, {}, b'{"error": {"message": "pay", "code": "insufficient_quota"}}'), r"status 429: 'pay'", 1),
    ((429, {"Retry-After": "3600"}), r"asks to wait 3600 s, and completions.longest_wait=60", 1),
    (b"<html>hello</html>", r"answered '<html>hello</html>', which is no JSON", 1),
    (b'{"choices": []}', r"lacks an answer", 1),
    (b'{"choices": [{"text": 3}]}', r"lacks an answer", 1),
    (b"[]", r"lacks an answer", 1),
    (503, r"status 503.*\(3 tries\)", 3),
)
def test_a_refusal_is_a_sentence_without_the_key(step, why, sent, serve):
    server = serve(echo, [step] * 3)
    with pytest.raises(OperantError, match=why) as raised:
        client(server, tries=3)(["a"])
    assert len(server.seen) == sent and KEY not in str(raised.value) + repr(raised.value.__cause__)


def test_a_missing_key_is_named_a_broken_one_is_not_shown_and_a_word_may_be_said(serve, monkeypatch):
    server = serve(echo, [401])
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(OperantError, match="OPENAI_API_KEY, which is not set"):
        client(server)(["a"])
    assert "Authorization" not in server.headers[0]
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1\nsk-2")
    with pytest.raises(OperantError, match="signs that no key has") as raised:
        client(server)(["a"])
    assert "sk-1" not in str(raised.value)
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    assert client(server)(["empty"]) == ["EMPTY"]


def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(OperantError, match=r"cannot be reached: .*refused \(2 tries\); does the server run"):
            Completions(url, "m", tries=2)(["a"])


def test_a_server_that_breaks_off_loses_no_answer(serve, tmp_path):
    """It resets the connection of the third text; afterwards it is asked for the rest alone."""

    def reply(body):
        if body["prompt"] == "c" and len(server.seen) < 5:
            raise ConnectionResetError
        return echo(body)

    server, path = serve(reply), tmp_path / "a"
    with pytest.raises(OperantError, match=r"\(2 tries\)"):
        client(server, cache=path, at_once=1, tries=2)(["a", "b", "c", "d"])
    assert [body["prompt"] for body in server.seen] == ["a", "b", "c", "c"]
    assert client(server, cache=path)(["a", "b", "c", "d"]) == ["A", "B", "C", "D"]
    assert sorted(body["prompt"] for body in server.seen[4:]) == ["c", "d"]


# --- budget and concurrency -------------------------------------------------------------------------------------------
def test_several_requests_are_under_way_at_once(serve):
    server, texts = serve(echo, delay=0.05), [str(i) for i in range(8)]
    assert client(server, at_once=4)(texts) == texts and server.most == 4


def test_a_budget_of_requests_is_never_exceeded(serve, tmp_path):
    server = serve(echo, [500])
    asked = client(server, budget_requests=5, at_once=3, cache=tmp_path / "a")
    with pytest.raises(OperantError, match=r"budget_requests=5 is spent: raise it \(answers are in the cache"):
        asked([str(i) for i in range(9)])
    assert len(server.seen) == asked.spent.requests == 5
    assert client(server, cache=tmp_path / "a")([str(i) for i in range(9)]) == [str(i) for i in range(9)]
    assert len(server.seen) == 5 + 9 - 4  # one of the five was a failure


def test_a_budget_counts_the_most_that_a_request_may_cost(serve):
    """A request of 10 bytes may cost 10 + 64 + 16 = 90 tokens, and the server counts 12 of each."""
    server = serve(echo)
    server.usage = {"total_tokens": 12}
    asked = client(server, budget_tokens=120, at_once=1)
    with pytest.raises(OperantError, match=r"budget_tokens=120: 36 are spent or under way, and .* may cost 90"):
        asked([f"{i:010}" for i in range(9)])
    assert asked.spent == Spent(requests=3, tokens=36, cached=0)
    server.usage = None  # a server that does not count: what was reserved stays spent
    silent = client(server, budget_tokens=200, at_once=1)
    with pytest.raises(OperantError, match="180 are spent"):
        silent([f"{i:010}" for i in range(3)])


# --- log-probs --------------------------------------------------------------------------------------------------------
LOGPROBS = {"It": None, " was": -0.5, " gre": -1.25, "at": -0.25, " bad": -3.0}


def scores(body):
    tokens = re.findall("It| was| gre|at| bad", body["prompt"])
    assert "".join(tokens) == body["prompt"] and (body["echo"], body["max_tokens"]) == (True, 0)
    return {"text": "", "logprobs": {"tokens": tokens, "token_logprobs": [LOGPROBS[token] for token in tokens]}}


def test_log_probs_of_continuations_are_those_of_an_echo(serve):
    server = serve(scores)
    asked = client(server)
    assert asked.logprobs(["It was", "It"], [" great", " bad"]) == [[-1.5, -3.0], [-1.5, -3.0]]
    assert asked.logprobs(["It was great"], [" bad"]) == [[-3.0]]
    with pytest.raises(OperantError, match="no token of the model begins where the continuation 'reat' does"):
        asked.logprobs(["It was g"], ["reat"])  # cut inside of a token
    assert client(server).logprobs(["It was gre"], ["at"]) == [[-0.25]]
    with pytest.raises(OperantError, match=r"lacks log-probs \(completions.scoring=echo\)"):
        client(serve(echo)).logprobs(["It was"], [" great"])


LISTED = {" great": math.log(0.5), "great": math.log(0.125), " fine": math.log(0.25)}


@pytest.mark.parametrize("chat", [False, True])
def test_log_probs_of_the_likeliest_tokens(serve, chat):
    """`great` has .5 + .125; `bad` is not listed, so it has at most what is left, 1 - .875."""

    def reply(body):
        assert body["max_tokens"] == 1 and body["top_logprobs" if chat else "logprobs"] == 7
        listed = [{"token": token, "logprob": prob - math.log(2)} for token, prob in [*LISTED.items()] * 2]
        return {"logprobs": {"content": [{"top_logprobs": listed}]} if chat else {"top_logprobs": [LISTED]}}

    server = serve(reply)
    (found,) = client(server, chat=chat, scoring="top", top_logprobs=7).logprobs(["It was"], [" great", " bad", "fine"])
    assert found == pytest.approx([math.log(0.625), math.log(0.125), math.log(0.25)], abs=1e-12)
    assert len(server.seen) == 1


# --- options ----------------------------------------------------------------------------------------------------------
def test_a_file_that_is_no_cache_is_refused(tmp_path):
    other, text = tmp_path / "other.sqlite", tmp_path / "notes.txt"
    with contextlib.closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE t (x)")
    text.write_text("notes " * 300, encoding="utf-8")
    before, none = (other.read_bytes(), text.read_bytes()), tmp_path / "no" / "a"
    for path, why in ((other, "of something else"), (text, "not a database"), (none, "unable to open")):
        with pytest.raises(OperantError, match=why):
            Completions("http://a/v1", "m", cache=path)
    assert (other.read_bytes(), text.read_bytes()) == before
    with pytest.raises(OperantError, match="holds a user, password or query") as raised:
        Completions("https://me:sk-1@host/v1", "m")
    assert "sk-1" not in str(raised.value)


def test_the_snippet_of_the_page_runs(serve, capsys, here):
    server = serve(lambda body: scores(body) if body.get("echo") else {"text": " there was a king"})
    snippet = "\n".join(snippets("docs/prompts.md#models-behind-an-endpoint"))
    exec(snippet.replace("http://127.0.0.1:8000/v1", server.url), {})
    answer, logprobs, spent, classes = capsys.readouterr().out.splitlines()
    assert (answer, logprobs) == ("[' there was a king']", "[[-3.0, -1.5]]")
    assert spent.startswith("Spent(requests=3, ") and classes == "[[[-3.0, -1.5]]]"
    assert len(server.seen) == 3  # the classes are those of the cache
