"""One writer per run folder: locks of living and dead processes; of many that start together, one wins."""

import errno
import json
import os
import socket
import time

import pytest
from processes import Child, until

from operant.runs import lock
from operant.types import OperantError

pytestmark = pytest.mark.skipif(os.name == "nt", reason="forks")


def held(path, **other):
    """Writes a lock as this process would, with some values of its holder changed."""
    assert lock.take_free(path)
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | other), encoding="utf-8")


def in_use():
    return pytest.raises(OperantError, match="in use by process")


def left_behind(path, **other):
    """Writes a lock whose owner has ended since: the kernel's own lock has gone with it."""
    held(path, **other)
    lock._held.pop(path).release()


def left_by_a_dead_process(path):
    assert Child(lambda: 0 if lock.take_free(path) else 1).ends() == 0 and path.exists()


@pytest.mark.slow
def test_of_many_starters_at_one_stale_lock_one_wins(tmp_path, monkeypatch):
    """Each process reads the lock and waits before it acts on it."""
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        left_by_a_dead_process(folder / "lock")
        seen, go = lock._owner, folder / "go"
        monkeypatch.setattr(lock, "_owner", lambda path, seen=seen: (seen(path), time.sleep(0.02))[0])

        def start(folder=folder, go=go):
            until(go.exists)
            try:
                lock.take(folder / "lock")
            except OperantError:
                return 3
            (folder / f"won-{os.getpid()}").touch()
            until((folder / "over").exists)
            return 0

        children = [Child(start) for _ in range(8)]
        go.touch()
        until(lambda children=children: sum(not child.running() for child in children) >= 7 or None, within=60)
        (folder / "over").touch()
        assert sorted(child.ends() for child in children) == [0] + [3] * 7
        (winner,) = folder.glob("won-*")
        assert json.loads((folder / "lock").read_text(encoding="utf-8"))["pid"] == int(winner.name[4:])
        monkeypatch.undo()


@pytest.mark.parametrize("other", [{"boot": "another"}, {"pid": os.getppid()}], ids=["restarted", "number reused"])
def test_what_has_ended_holds_no_lock(other, tmp_path):
    left_behind(tmp_path / "lock", **other)
    assert lock.take(tmp_path / "lock").items() >= other.items()


def test_another_machine_cannot_be_asked(tmp_path):
    left_behind(tmp_path / "lock", boot="another", host="elsewhere", since="noon")
    with pytest.raises(OperantError, match=rf"process {os.getpid()} on elsewhere, since noon.*if it is gone, delete"):
        lock.take(tmp_path / "lock")
    left_behind(tmp_path / "clone", boot="another", machine="a machine of the same name")
    with in_use():
        lock.take(tmp_path / "clone")


def test_the_same_job_on_another_machine_has_ended(tmp_path, monkeypatch):
    """torchrun starts one first rank at a time; another job, or no job, cannot be asked."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    lock._place.cache_clear()
    left_behind(tmp_path / "lock", boot="another", host="elsewhere")
    assert lock.take(tmp_path / "lock")["host"] == "elsewhere"
    for other in ("job-8", None):
        left_behind(tmp_path / f"lock-{other}", boot="another", host="elsewhere", job=other)
        with in_use():
            lock.take(tmp_path / f"lock-{other}")
    lock._place.cache_clear()


def test_a_container_on_this_machine_is_asked_through_the_kernel(tmp_path):
    """Its pids mean nothing here; the kernel's file lock shows whether it lives."""
    path, over = tmp_path / "lock", tmp_path / "over"

    def hold():
        held(path, space="pid:[1]")
        until(over.exists)
        return 0

    child = Child(hold)
    until(lambda: path.exists() and "pid:[1]" in path.read_text(encoding="utf-8"))
    with in_use():
        lock.take(path)
    over.touch()
    assert child.ends() == 0 and lock.take(path)["space"] == "pid:[1]"


def test_an_older_lock_and_a_torn_one_are_understood(tmp_path):
    old = {"pid": os.getppid(), "host": socket.gethostname(), "born": "1", "since": "noon"}
    (tmp_path / "lock").write_text(json.dumps(old), encoding="utf-8")
    assert lock.take(tmp_path / "lock") == old
    (tmp_path / "torn").write_text('{"pid": 1', encoding="utf-8")
    assert lock.take(tmp_path / "torn")["pid"] is None
    (tmp_path / "empty").touch()
    assert lock.take(tmp_path / "empty") is None


def test_a_process_that_its_owner_has_forked_does_not_hold_it(tmp_path):
    path, over = tmp_path / "lock", tmp_path / "over"

    def own():
        assert lock.take_free(path)
        if os.fork() == 0:  # it outlives its parent
            until(over.exists)
            os._exit(0)
        return 0

    assert Child(own).ends() == 0 and lock.take(path)["pid"] != os.getpid()
    over.touch()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_folder_without_locks_asks_for_the_process(number, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    assert lock.take_free(tmp_path / "lock") and not lock.take_free(tmp_path / "lock")
    with pytest.raises(OperantError, match=f"in use by process {os.getpid()} on"):
        lock.take(tmp_path / "lock")
    lock.release(tmp_path / "lock")
    left_by_a_dead_process(tmp_path / "lock")
    assert lock.take(tmp_path / "lock")["pid"] != os.getpid()


def test_letting_go_leaves_another_ones_lock(tmp_path):
    held(tmp_path / "lock", pid=os.getppid(), host="x")
    lock.release(tmp_path / "lock")
    assert (tmp_path / "lock").exists()
