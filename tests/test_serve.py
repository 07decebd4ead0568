"""The live page of a run, with a real server and real requests."""

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
from urllib.parse import urlencode

import pytest

from operant.runs.folder import RunFolder
from operant.tools.cli import main
from operant.tools.report.replies import Index
from operant.tools.report.server import Server, Serving, is_known_host, serve
from operant.types import OperantError

REPLIES = {
    1: [(" a Great film", 0.5, [-1.0, -2.0], "stop"), (" bad", 0.25, [-3.0], "length"), (" odd", None, None, "stop")],
    2: [(" great again", 0.75, [-1.5, -0.5, -1.0], "stop"), (" ÄRGER", -1.0, [-0.25], "length")],
}


def rows(replies):
    return [
        {
            "task": str(i),
            "query": "It was",
            "reply": reply,
            "reward": reward,
            "reply_tokens": len(logprobs or [0]),
            "end": end,
            "tokens": None if logprobs is None else [f"{j}" for j in range(len(logprobs))],
            "logprobs": logprobs,
            "ref_logprobs": None if logprobs is None else [x - 0.5 for x in logprobs],
        }
        for i, (reply, reward, logprobs, end) in enumerate(replies)
    ]


@pytest.fixture
def folder(tmp_path):
    run = RunFolder.create(tmp_path / "a<b", {"steps": 9})
    for step, replies in REPLIES.items():
        run.rollouts(step, rows(replies))
        run.log(step, {"reward/mean": 0.5})
    (run.path / "probes").mkdir()
    (run.path / "rollouts" / "step-00001.parquet").rename(run.path / "probes" / "step-00000.parquet")
    run.rollouts(1, rows(REPLIES[1]))
    yield run
    run.close()


@pytest.fixture
def site(folder):
    with Server(folder.path, Serving(serve=True, port=0)) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def request(site, path, method="GET", **headers):
    """Send a request; returns (status, headers, body)."""
    connection = http.client.HTTPConnection(*site.server_address[:2], timeout=20)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode("utf-8")
    connection.close()
    return answer.status, answer.headers, body


def found(site, **parameters):
    status, _, body = request(site, f"/replies.json?{urlencode(parameters)}")
    assert status == 200, body
    return json.loads(body)


def texts(answer):
    return [row["reply"] for row in answer["rows"]]


# --- the table -------------------------------------------------------------------------------------------------------


def test_every_reply_is_there_newest_step_first(site):
    answer = found(site)
    assert texts(answer) == [" great again", " ÄRGER", " a Great film", " bad", " odd"]
    assert answer["total"] == 5 and answer["steps"] == [1, 2] and answer["available"] == {"steps": 2, "replies": 5}
    assert answer["rows"][0] == {
        "step": 2, "row": 0, "query": "It was", "reply": " great again", "reward": 0.75, "kl": 1.5, "reply_tokens": 3,
        "end": "stop", "outcome": None, "message": None,
    }  # fmt: skip


def test_search_sees_query_and_reply_in_any_case(site):
    assert texts(found(site, search="GREAT")) == [" great again", " a Great film"]
    assert texts(found(site, search="ärg")) == [" ÄRGER"]
    assert found(site, search="it was")["total"] == 5
    assert found(site, search="was a")["total"] == 0, "query and reply are separate"
    assert found(site, search="%_.*")["total"] == 0, "the search is not a pattern"


def test_unknown_values_are_sorted_last_in_both_orders(site):
    assert [r["reward"] for r in found(site, sort="reward")["rows"]] == [0.75, 0.5, 0.25, -1.0, None]
    assert [r["reward"] for r in found(site, sort="reward", descending=0)["rows"]] == [-1.0, 0.25, 0.5, 0.75, None]
    assert [r["kl"] for r in found(site, sort="kl")["rows"]] == [1.5, 1.0, 0.5, 0.5, None]
    assert texts(found(site, sort="kl"))[2:4] == [" ÄRGER", " bad"], "equal: the newest step first"
    assert [r["end"] for r in found(site, sort="end", descending=0)["rows"]] == ["length"] * 2 + ["stop"] * 3
    assert [r["reply_tokens"] for r in found(site, sort="reply_tokens")["rows"]] == [3, 2, 1, 1, 1]


def test_pages_and_steps(site):
    assert texts(found(site, offset=1, limit=2)) == [" ÄRGER", " a Great film"]
    assert found(site, offset=1, limit=2)["total"] == 5
    assert texts(found(site, offset=5)) == []
    assert texts(found(site, step=1, search="great")) == [" a Great film"]
    assert found(site, step=7)["total"] == 0


def test_tokens_of_one_reply(site):
    status, _, body = request(site, "/tokens.json?step=2&row=0")
    tokens = json.loads(body)
    assert status == 200 and tokens["tokens"] == ["0", "1", "2"] and tokens["logprobs"] == [-1.5, -0.5, -1.0]
    assert tokens["ref_logprobs"] == [-2.0, -1.0, -1.5] and tokens["values"] is None
    assert json.loads(request(site, "/tokens.json?of=probes&step=0&row=1")[2])["logprobs"] == [-3.0]
    assert json.loads(request(site, "/tokens.json?step=1&row=2")[2])["tokens"] is None
    for gone in ("step=2&row=5", "step=3&row=0", "of=reference&row=0"):
        assert request(site, f"/tokens.json?{gone}")[0] == 404


def test_probes(site):
    probes = json.loads(request(site, "/probes.json")[2])["probes"]
    assert probes["steps"] == [0] and probes["reference"] is None
    assert [q["query"] for q in probes["queries"]] == ["It was"] * 3
    assert probes["policy"][0]["reward"] == [0.5, 0.25, None]


# --- while the run is in progress ------------------------------------------------------------------------------------


def test_new_changed_and_removed_steps_are_noticed(site, folder):
    assert found(site)["total"] == 5
    folder.rollouts(3, rows([(" third", 0.1, [-1.0], "stop")]))
    assert texts(found(site, step=3)) == [" third"] and found(site)["total"] == 6
    folder.rollouts(3, rows([(" other", 0.1, [-1.0], "stop")]))  # as long as before
    assert texts(found(site, step=3)) == [" other"]
    folder.cut_after(1)
    assert found(site)["steps"] == [1] and found(site)["total"] == 3
    folder.rollouts(2, rows([(" again", 0.2, [-1.0], "stop")]))
    assert texts(found(site, search="a"))[0] == " again"


def test_only_changed_files_are_read_again(folder, monkeypatch):
    from operant.tools.report import parquet

    read, original = [], parquet.lines
    monkeypatch.setattr(parquet, "lines", lambda path: (read.append(path.name), original(path))[1])
    index = Index(folder.path)
    index.find()
    index.find(search="great")
    assert read == ["step-00001.parquet", "step-00002.parquet"]
    folder.rollouts(3, rows(REPLIES[1]))
    index.find()
    assert read[2:] == ["step-00003.parquet"]


def test_a_damaged_file_is_noted_until_it_is_complete(site, folder):
    path = folder.path / "rollouts" / "step-00002.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    answer = found(site)
    assert answer["total"] == 3 and len(answer["notes"]) == 1 and "step-00002.parquet" in answer["notes"][0]
    assert request(site, "/tokens.json?step=2&row=0")[0] == 500
    path.write_bytes(whole)
    assert found(site)["total"] == 5 and found(site)["notes"] == []


def test_a_run_without_replies_yet(tmp_path):
    answer = Index(tmp_path).find(search="x", sort="reward")
    nothing = {"steps": [], "outcomes": [], "rows": [], "notes": []}
    assert answer == {"total": 0, "available": {"steps": 0, "replies": 0}} | nothing


# --- refused requests ------------------------------------------------------------------------------------------------


def test_the_page_is_live_and_has_its_security_headers(site):
    status, headers, body = request(site, "/")
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    assert '<meta name="live"' in body and "great again" not in body.split('id="data"')[1]
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert json.loads(request(site, "/data.json")[2])["name"] == "a<b"


@pytest.mark.parametrize("path", ["/nothing", "/../config.yaml", "/config.yaml", "/replies.json/", "/data.json%00"])
def test_there_are_no_other_paths(site, path):
    status, headers, body = request(site, path)
    assert status == 404 and "there is nothing at" in json.loads(body)["error"]
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_nothing_but_get(site, method):
    status, headers, _ = request(site, "/data.json", method)
    assert status == 405 and headers["Allow"] == "GET"


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("sort=tokens", "sort='tokens'"),
        ("limit=0", "limit=0"),
        ("limit=501", "limit=501"),
        ("limit=-1", "limit='-1'"),
        ("offset=x", "offset='x'"),
        ("step=1.5", "step='1.5'"),
        ("step=²", "step='²'"),
        ("step=99999999999999999999", "whole number"),
        ("descending=yes", "it must be 0 or 1"),
        ("page=2", "'page' is unknown"),
        ("step=1&step=2", "appears twice"),
        ("search=%ff", "not well-formed"),
    ],
)
def test_a_wrong_parameter_is_explained(site, query, sentence):
    status, _, body = request(site, "/replies.json?" + query.replace("²", "%C2%B2"))
    assert status == 400 and sentence in json.loads(body)["error"]


def test_a_host_name_of_another_site_is_refused(site):
    for host in ("evil.example", "evil.example:8265", "127.0.0.1.evil.example", "localhost.evil", "192.0.2.1", "[", ""):
        assert request(site, "/replies.json", Host=host)[0] == 403, host
    for host in ("localhost", "localhost:9999", "127.0.0.1:1", "[::1]:8265"):  # a tunnel changes the port
        assert request(site, "/replies.json", Host=host)[0] == 200, host


def test_a_server_for_everyone_accepts_addresses_but_no_unknown_names(folder):
    with Server(folder.path, Serving(serve=True, host="0.0.0.0", port=0)) as running:
        assert running.url.startswith("http://127.0.0.1:")
    assert all(is_known_host(name, "0.0.0.0") for name in ("192.0.2.1:80", socket.gethostname(), "localhost"))
    assert not is_known_host("evil.example", "0.0.0.0") and not is_known_host(None, "0.0.0.0")


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["report"], "expected a run folder"),
        (["report", "a", "--sreve"], "did you mean 'serve'"),
        (["report", "a", "--port", "80"], "--serve"),
        (["report", "--serve", "nowhere"], "nowhere is not a run folder"),
        (["report", "a", "--serve", "--port", "many"], "port='many'"),
        (["report", "a", "--serve", "--port", "70000"], "port=70000"),
    ],
)
def test_wrong_arguments_of_report_are_explained(words, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert sentence in capsys.readouterr().err


def test_a_port_in_use_and_a_foreign_address_are_explained(site, folder):
    with pytest.raises(OperantError, match="in use; choose another --port"):
        serve(folder.path, Serving(serve=True, port=site.server_address[1]))
    with pytest.raises(OperantError, match="--host must be an address of this machine"):
        serve(folder.path, Serving(serve=True, host="192.0.2.1", port=0))


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is sent as a signal")
def test_ctrl_c_ends_it_quietly(folder):
    command = [sys.executable, "-m", "operant", "report", "--serve", str(folder.path), "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    try:
        process = subprocess.Popen(command, **pipes)
    finally:
        signal.signal(signal.SIGINT, handler)
    line = process.stdout.readline()
    assert line.startswith("http://127.0.0.1:") and "Ctrl-C to end" in line
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0 and error == ""
