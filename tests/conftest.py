"""Fixtures of several test files. They import what they need when they are asked for."""

import gc
import os
import uuid
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path, config):
    """For the slow tests alone, files without any are not even imported."""
    if config.getoption("markexpr") == "slow" and collection_path.suffix == ".py":
        return True if "slow" not in collection_path.read_text(encoding="utf-8") else None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What the imports leave lives as long as the process: no search for garbage looks at it, now or in a test."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def power():
    """Nothing that a test writes has to outlast a loss of power, which costs most of the time of a small run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def tidy():
    """A run without a folder of its own goes to runs/ of the working tree: no test may leave one there."""
    runs = Path(__file__).parents[1] / "runs"
    before = {*runs.glob("*")}
    yield
    left = sorted(path.name for path in {*runs.glob("*")} - before)
    assert not left, f"this test, or one beside it, left runs/{left[0]}: give out=tmp_path, or change to that folder"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working folder, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def watch(monkeypatch):
    """A function that puts a disk that is watched, and that refuses, at the seam of `atomic_io`, and returns it."""
    from disks import Watched

    from operant.storage import atomic_io

    def put(*given, **more):
        monkeypatch.setattr(atomic_io, "seam", seam := Watched(*given, **more))
        return seam

    return put


@pytest.fixture
def mark(monkeypatch):
    """A mark in the environment of every process that is started from here on."""
    from isolation import MARK

    value = f"test-{uuid.uuid4()}"
    monkeypatch.setenv(MARK, value)
    return value


@pytest.fixture(scope="module")
def kept():
    """What plays worlds: an engine, its tokenizer and how it samples."""
    from toys import letters, lm

    from operant import Policy, Sampling, ValueOptions
    from operant.engines.native.engine import NativeEngine

    policy = Policy(lm("llama", 40, spread=0.1), letters(), value=ValueOptions(init="normal"))
    return {"engine": NativeEngine(policy), "tokenizer": letters(), "sampling": Sampling(max_tokens=3)}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty Hub cache; returns a function that puts a snapshot of `name` into it."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def put(name: str, commit: str = "abc", **files: str) -> Path:
        root = tmp_path / "cache" / ("models--" + name.replace("/", "--"))
        (root / "refs").mkdir(parents=True, exist_ok=True)
        (root / "refs" / "main").write_text(commit, encoding="utf-8")
        snapshot = root / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for file, text in files.items():
            (snapshot / file.replace("__", ".")).write_text(text, encoding="utf-8")
        return snapshot

    return put


@pytest.fixture
def soon(monkeypatch):
    """Live pages ask their server many times a second."""
    from operant.tools.report import html

    read = html._read
    monkeypatch.setattr(html, "_read", lambda name: read(name).replace("POLL_INTERVAL = 4000", "POLL_INTERVAL = 100"))


@pytest.fixture(scope="module")
def browser():
    from browsing import chromium

    with chromium() as running:
        yield running
