"""A model's name gives a folder, or within seconds an error with alternatives."""

import json
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from cases import cases
from published import a_model

from operant.storage import hub
from operant.types import OperantError


@pytest.fixture
def builtin(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "BUILTIN", tmp_path / "builtin")
    return a_model(tmp_path / "builtin" / "reviews-lm")


def test_a_name_that_gives_no_model_says_why(builtin, tmp_path):
    assert hub.find_model("builtin:reviews-lm") == str(builtin)
    for name, said in (
        (tmp_path, r"no config\.json"),
        (str(tmp_path / "nothing"), "no such folder"),
        ("./nothing", "no such folder"),
        ("builtin:review-lm", "did you mean 'builtin:reviews-lm'"),
    ):
        with pytest.raises(OperantError, match=said):
            hub.find_model(name)


def test_the_cache_serves_offline_but_not_half_a_download(builtin, cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail("the network was asked"))
    whole = cache("a/whole", config__json="{}", model__safetensors="")
    assert hub.find_model("a/whole") == str(whole)
    cache("a/half", config__json="{}")
    shards = json.dumps({"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}})
    cache("a/shards", **{"config__json": "{}", "model.safetensors.index__json": shards, "model-1__safetensors": ""})
    for name in ("a/none", "a/half", "a/shards"):
        with pytest.raises(OperantError, match=rf"'{name}' .* cannot be downloaded .*folder.*builtin:reviews-lm"):
            hub.find_model(name)


def test_a_hub_that_hangs_is_left_after_the_deadline(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "CONNECT_SECONDS", 0.2)
    never, start = threading.Event(), time.monotonic()
    with pytest.raises(OperantError, match="did not answer"):
        hub.reach("model", "gpt2", lambda: never.wait(30))
    assert time.monotonic() - start < 5
    never.set()


class Refused(Exception):
    """What the Hub answers with a status."""

    def __init__(self, status):
        self.response = SimpleNamespace(status_code=status)


@cases((Refused(404), "no such model"), (ConnectionError("name resolution"), "cannot be downloaded .ConnectionError"))
def test_a_refused_name_is_no_network_trouble(error, said, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(OperantError, match=said):
        hub.reach("model", "gpt2", Mock(side_effect=error))


@pytest.fixture
def asked(cache, tmp_path, monkeypatch):
    """A Hub on which every model is at the commit 3333; what it is asked for: name, revision, and how."""
    import huggingface_hub

    asked = []

    def model_info(self, name, revision, timeout):
        asked.append(((name, revision), timeout))
        return SimpleNamespace(sha="3333")

    def snapshot(name, revision, allow_patterns):
        asked.append(((name, revision), allow_patterns))
        return str(a_model(tmp_path / "down"))

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    return asked


def test_what_is_downloaded_holds_no_pickles_and_no_code(asked, tmp_path, monkeypatch):
    assert hub.find_model("a/b") == str(tmp_path / "down")
    [((name, _), seconds), (_, patterns)] = asked
    assert (name, seconds) == ("a/b", hub.CONNECT_SECONDS)
    assert not any(p.endswith((".bin", ".py", ".pt", "*")) for p in patterns)
    gated = Mock(side_effect=Refused(403))  # the name may be read, and the files may not
    monkeypatch.setattr("huggingface_hub.snapshot_download", gated)
    with pytest.raises(OperantError, match="you may not read it"):
        hub.find_model("a/b")


# --- revisions --------------------------------------------------------------------------------------------------------
def test_a_name_is_pinned_to_its_current_commit(cache, builtin, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    first = cache("a/model", "1111", config__json="{}", model__safetensors="")
    assert hub.pinned("a/model") == "a/model@1111"
    second = cache("a/model", "2222", config__json="{}", model__safetensors="")  # the branch has moved on
    assert hub.find_model("a/model") == str(second)
    assert hub.find_model("a/model@1111") == hub.find_config("a/model@1111") == str(first)
    assert hub.find_model("a/model@main") == str(second)
    assert hub.pinned("a/model@main") == "a/model@2222" and hub.pinned("a/model@1111") == "a/model@1111"


def test_what_is_no_hub_name_is_pinned_as_it_is(builtin, tmp_path):
    folder = a_model(tmp_path / "mine@home")
    for given in (str(folder), folder, "builtin:reviews-lm", None, 3):
        assert hub.pinned(given) is given
    assert hub.find_model(folder) == str(folder)


@cases("", "../../etc", "a/../b", "/abs", ".hidden", "a b", "a\0", "a\n", "x" * 200, "a@b")
def test_an_invalid_revision_is_refused_before_any_request(revision, cache, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail("the network was asked"))
    for find in (hub.find_model, hub.find_config):
        with pytest.raises(OperantError, match="is not a revision; give a branch, tag or commit after @"):
            find(f"a/model@{revision}")


def test_a_revision_that_the_cache_lacks_is_asked_for_by_it(asked, cache, tmp_path, monkeypatch):
    cache("a/model", "1111", config__json="{}", model__safetensors="")
    assert hub.find_model("a/model@v1.0") == str(tmp_path / "down")
    assert [name for name, _ in asked] == [("a/model", "v1.0")] * 2
    assert hub.pinned("a/model@v1.0") == "a/model@3333" and len(asked) == 3 and asked[2] == asked[0]  # not fetched
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OperantError, match=r"'a/model@v2' is not on this machine and cannot be downloaded"):
        hub.find_model("a/model@v2")
