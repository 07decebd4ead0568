"""Checkpoints on disk: written in a safe order, recognised when damaged, kept as configured."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from cases import cases
from disks import FULL, Box, named, quiet

from operant import OperantError, machine
from operant.storage import atomic_io, manifest
from operant.storage.checkpoint import RunState, about, newest_whole, to_resume
from operant.storage.checkpoint_store import Retention, verify


def content(value):
    return {"n": value, "x": torch.full((5,), float(value))}


@pytest.fixture
def state():
    return RunState()


@pytest.fixture
def box(state):
    return state.register("policy", Box(content(0)))


@pytest.fixture
def put(state, box):
    """A function that saves a step, and is its number."""

    def save(folder, value, keep=2, every=0, spare=(), **more):
        box.state = content(value)
        return state.save(folder, value, retention=Retention(keep, every, frozenset(spare)), **more)

    return save


# --- the order of operations ------------------------------------------------------------------------------------------
def test_files_are_synced_before_the_name_and_old_ones_go_last(put, tmp_path, watch):
    for step in (1, 2):
        put(tmp_path, step)
    seam = watch()
    put(tmp_path, 3)
    new, old, here, files = ".step-00003.tmp", ".step-00001.tmp", ("fsync_folder", tmp_path.name), []
    for name in ("tensors.safetensors", "state.json", "manifest.json"):
        files += [("write", name), ("fsync", name)]
    whole = [("mkdir", new), here, *files, ("fsync_folder", new), ("rename", "step-00003"), here]
    assert seam.done() == [*whole, ("rename", old), ("remove_tree", old)]


@pytest.mark.parametrize("again, keep", [(False, 2), (True, 2), (False, 1)])
def test_a_kill_at_any_moment_of_a_save_loses_nothing(state, box, put, tmp_path, monkeypatch, again, keep):
    """The folder is copied before and after every operation, in the state in which a kill would leave it."""
    for step in (1, 2, 3) if again else (1, 2):
        put(tmp_path / "run", step, keep=keep)
    copies = []

    def copied(when, operation, path):
        copies.append(tmp_path / f"{len(copies)}-{when}-{operation}")
        shutil.copytree(tmp_path / "run", copies[-1])

    monkeypatch.setattr(atomic_io, "seam", copied)
    put(tmp_path / "run", 3, keep=keep)
    monkeypatch.undo()
    assert len(copies) >= 22
    found = []
    for copy in copies:
        warned = []
        path = newest_whole(copy, warned.append)
        assert warned == [] and path is not None, copy.name
        step, _ = state.load(path, quiet)
        assert box.state["n"] == step and bool((box.state["x"] == step).all())
        found.append(step)
        put(copy, 4, keep=keep)
        assert named(copy) == [f"step-0000{step}", "step-00004"][-keep:], copy.name
    assert found == sorted(found) and {found[0], found[-1]} == ({3} if again else {2, 3})


@pytest.mark.parametrize("stays", [False, True])
def test_a_full_disk_at_any_moment_of_a_save_loses_nothing(put, tmp_path, watch, stays):
    for step in (1, 2, 3):
        seam = watch()
        put(tmp_path / "0", step)
    errors = set()
    for at in range(len(seam.seen)):  # of the save of step 3
        folder = tmp_path / f"full-{at}"
        for step in (1, 2):
            put(folder, step)
        before = {p: p.read_bytes() for p in (folder / "step-00002").iterdir()}
        watch(at, FULL, stays=stays)
        with pytest.raises(OperantError) as refused:
            put(folder, 3)
        watch()
        errors.add(str(refused.value).replace(str(folder), "FOLDER"))
        warned = []
        path = newest_whole(folder, warned.append)
        assert warned == [] and path.name in ("step-00002", "step-00003")
        assert path.name == "step-00003" or not list(folder.glob(".*")), "litter"
        assert {p: p.read_bytes() for p in before} == before, "the older checkpoint was changed"
        put(folder, 4)
        assert named(folder)[-1] == "step-00004" and len(named(folder)) == 2, "litter"
    (said,) = errors
    assert said.startswith("cannot save the checkpoint FOLDER/step-00003: no space left on device; free some space")


# --- damage -----------------------------------------------------------------------------------------------------------
def test_any_flipped_bit_of_the_manifest_is_noticed(put, tmp_path):
    path = put(tmp_path, 1, lengths={"metrics.jsonl": 1000}).path
    whole = (path / "manifest.json").read_bytes()
    assert verify(path) is None
    for place in range(len(whole)):
        for bit in range(8) if place % 29 == 0 else (place % 8,):
            data = bytearray(whole)
            data[place] ^= 1 << bit
            (path / "manifest.json").write_bytes(data)
            assert verify(path, hashes=False), f"bit {bit} of byte {place}: {data[place - 20 : place + 20]}"


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
def test_any_flipped_bit_and_any_length_of_a_file_is_noticed(put, tmp_path, name):
    path = put(tmp_path, 1).path
    whole = (path / name).read_bytes()
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << (place % 8)
        (path / name).write_bytes(data)
        assert verify(path) == f"{name} was changed since it was written"
    for size in (*range(0, len(whole), 9), len(whole) + 1):
        (path / name).write_bytes((whole + b"\0")[:size])
        assert verify(path) == f"{name} has {size} bytes, not {len(whole)}"


def changed(change, *, rehashed=True):
    """Damage that changes a manifest, with or without a correct new hash of itself."""

    def damage(path):
        content = manifest.read(path)
        change(content)
        content["sha256"] = manifest._hash_of(content) if rehashed else "0" * 64
        (path / "manifest.json").write_text(json.dumps(content), encoding="utf-8")

    return damage


def text(content):
    return lambda path: (path / "manifest.json").write_bytes(content)


def to_itself(path):
    """A manifest that no system can open."""
    (path / "manifest.json").unlink()
    (path / "manifest.json").symlink_to("manifest.json")


@cases(
    (changed(lambda m: m["files"].update({"../../outside": {"size": 6}})), "'../../outside', which is outside"),
    (changed(lambda m: m["files"].update({"/etc/passwd": {"size": 1, "sha256": "0"}})), "which is outside the folder"),
    (changed(lambda m: m["files"].pop("state.json")), "names state.json"),
    (changed(lambda m: m["files"].update({"a\0": {"size": 1}})), "manifest.json|null"),
    (changed(lambda m: m["files"].update({".": {"size": 1}})), "not a file"),
    (changed(lambda m: m["files"].update({"x" * 999: {"size": 1}})), "cannot be read"),
    (changed(lambda m: m["files"].update({"state.json": 3})), "manifest.json cannot be read"),
    (changed(lambda m: m.update(files=[])), "manifest.json cannot be read"),
    (changed(lambda m: m.update(kind="weights")), "of kind 'weights'"),
    (changed(lambda m: m.update(step=3)), "of step 3"),
    (changed(lambda m: m.update(step=True)), "of step True"),
    (changed(lambda m: m.update(schema="2")), "no schema"),
    (changed(lambda m: m.update(schema=0)), "no schema"),
    (changed(lambda m: m.pop("made_by")), "does not say which versions and machine made it"),
    (changed(lambda m: m.update(lengths={"../../x": 1})), "do not belong to the run"),
    (changed(lambda m: m.update(lengths={"metrics.jsonl": -1})), "do not belong to the run"),
    (changed(lambda m: m.update(lengths={"metrics.jsonl": 1.5})), "do not belong to the run"),
    (changed(lambda m: m.update(time="later"), rehashed=False), "manifest.json was changed"),
    (text(b"[" * 200_000), "manifest.json cannot be read"),
    (text(b'{"schema": 1' + b"0" * 9999 + b"}"), "manifest.json cannot be read"),
    (text(b"\xff\xfe{}"), "manifest.json cannot be read"),
    (text(b"[1]"), "manifest.json cannot be read"),
    (text(b"null"), "manifest.json cannot be read"),
    (text(b" " * (1 << 24) + b"{}"), "too many for a manifest"),
    (lambda path: [p.unlink() for p in path.iterdir()], "manifest.json is missing"),
    (to_itself, r"manifest\.json cannot be read \(.*symbolic links\)"),
    (lambda path: (path / "tensors.safetensors").unlink(), "tensors.safetensors is missing"),
    (lambda path: (path / "state.json").unlink(), "state.json is missing"),
)
def test_a_damaged_checkpoint_is_named_and_skipped(damage, message, state, put, tmp_path):
    (tmp_path / "outside").write_text("secret", encoding="utf-8")
    older, newer = (put(tmp_path / "c", step).path for step in (9, 10))
    damage(newer)
    warned = []
    assert newest_whole(tmp_path / "c", warned.append) == older and len(warned) == 1 and "step-00010" in warned[0]
    with pytest.raises(OperantError, match=message) as refused:
        state.load(newer, quiet)
    assert "is damaged" in str(refused.value)
    shutil.rmtree(older)
    assert newest_whole(tmp_path / "c", quiet) is None


class Trap:
    """A pickle that runs a function when it is opened."""

    def __reduce__(self):
        return Path.touch, (Trap.path,)


def test_a_pickle_is_not_opened(state, put, tmp_path):
    path = put(tmp_path, 1).path
    Trap.path = tmp_path / "opened"
    (path / "tensors.safetensors").write_bytes(pickle.dumps(Trap()))
    manifest.write(path, manifest.read(path), ["tensors.safetensors", "state.json"])
    assert verify(path) is None  # its hash is correct
    with pytest.raises(OperantError, match=r"tensors\.safetensors is not a safetensors file"):
        state.load(path, quiet)
    assert not Trap.path.exists()


@cases(
    b"[]",
    b"{}",
    b'{"parts": {"policy": {"tensor": "nobody"}}, "extra": null}',
    b'{"parts": {"policy": {"dict": 3}}, "extra": null}',
    b'{"parts": {"policy": {"what": 3}}, "extra": null}',
    b'{"parts": {"policy": {}}, "extra": null}',
    b'{"parts": [], "extra": null}',
    b'{"parts": {"policy": ' + b"[" * 300_000 + b"]" * 300_000 + b'}, "extra": null}',
    b'{"parts": {"policy": ' + b"[" * 900 + b"]" * 900 + b"}",
)
def test_invalid_state_is_reported_and_nothing_is_loaded(data, state, box, put, tmp_path):
    path = put(tmp_path, 1).path
    (path / "state.json").write_bytes(data)
    manifest.write(path, manifest.read(path), ["tensors.safetensors", "state.json"])
    box.state = "mine"
    with pytest.raises(OperantError, match="is damaged"):
        state.load(path, quiet)
    assert box.state == "mine"


def test_a_newer_schema_is_not_damage_and_is_not_skipped(state, put, tmp_path):
    path = put(tmp_path, 1).path
    changed(lambda m: m.update(schema=3, kind="delta"))(path)
    assert newest_whole(tmp_path) == path
    with pytest.raises(OperantError, match="has schema 3, this operant reads up to 2; use the one that wrote it"):
        state.load(path, quiet)


# --- retention --------------------------------------------------------------------------------------------------------
def test_the_newest_every_nth_and_the_spared_ones_stay(put, tmp_path):
    for step in range(1, 24):
        put(tmp_path, step, keep=2, every=10, spare=[7])
    assert named(tmp_path) == [f"step-000{step}" for step in ("07", "10", "20", "22", "23")]
    put(tmp_path, 24, keep=1, every=10, spare=[23])  # another one is the best now
    assert named(tmp_path) == [f"step-000{step}" for step in ("10", "20", "23", "24")]
    for step in (0, 1, 2):  # step 0 is no nth step
        put(tmp_path / "all", step, keep=1, every=1 if step else 0)
    assert named(tmp_path / "all") == ["step-00001", "step-00002"]


def test_each_kind_is_counted_by_itself(put, tmp_path):
    for step in (1, 2, 3):
        for kind in ("resume", "light"):
            put(tmp_path, step, kind=kind)
    assert named(tmp_path) == ["light-00002", "light-00003", "step-00002", "step-00003"]
    assert newest_whole(tmp_path).name == "step-00003"
    assert newest_whole(tmp_path, kinds=("light",)).name == "light-00003"
    put(tmp_path, 4, kind="light")
    assert newest_whole(tmp_path, kinds=("resume", "light")).name == "light-00004"
    assert to_resume(tmp_path, quiet).name == "step-00003"
    assert to_resume(tmp_path, quiet, fresh_optimizer=True).name == "light-00004"


def test_a_complete_one_is_not_deleted_because_of_damaged_ones(put, tmp_path):
    for path in [put(tmp_path, step, keep=3).path for step in (1, 2, 3)][1:]:
        (path / "state.json").unlink()
    put(tmp_path, 4)
    assert named(tmp_path) == ["step-00001", "step-00004"]


def test_other_files_and_folders_stay(put, tmp_path):
    others = ["step-", "step-x", "step-00001.tar.gz", "step-00001.bak", "lighthouse", "notes", "step-" + "9" * 30]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "step-00009").write_text("a file", encoding="utf-8")
    for step in (1, 2, 3):
        put(tmp_path, step)
    assert newest_whole(tmp_path).name == "step-00003"
    assert named(tmp_path) == sorted([*others, "step-00009", "step-00002", "step-00003"])


# --- manifest and loading ---------------------------------------------------------------------------------------------
def test_the_manifest_has_kind_step_machine_threads_and_lengths(put, tmp_path):
    lengths = {"metrics.jsonl": 1234, "distributions.jsonl": 0}
    info = about(put(tmp_path, 12, lengths=lengths).path)
    assert (info["schema"], info["kind"], info["step"], info["lengths"]) == (2, "resume", 12, lengths)
    assert info["made_by"] == machine.about() and info["made_by"]["threads"] == torch.get_num_threads()
    assert about(put(tmp_path, 12, kind="light").path)["kind"] == "light"


@cases("light", "resume")
def test_light_is_refused_without_a_fresh_optimizer(kind, state, box, put, tmp_path):
    """With one, everything but the optimizer is loaded."""
    other, tasks = state.register("optimizer", Box("moments")), state.register("tasks", Box(7))
    path = put(tmp_path, 1, kind=kind).path
    for load in (lambda: state.load(path, quiet), lambda: to_resume(tmp_path, quiet)) if kind == "light" else ():
        with pytest.raises(OperantError, match=r"light-00001 is light: .*--fresh-optimizer resumes with these weights"):
            load()
    box.state, other.state, tasks.state, renewed = None, "fresh", 0, []
    other.renew = lambda: renewed.append(True)
    assert state.load(path, quiet, fresh_optimizer=True) == (1, None)
    assert (box.state["n"], other.state, renewed) == (1, "fresh", [True])
    assert tasks.state == (0 if kind == "light" else 7)


def test_damage_is_a_warning_by_default(put, tmp_path):
    (put(tmp_path, 1).path / "state.json").unlink()
    with pytest.warns(UserWarning, match="state.json is missing"):
        assert newest_whole(tmp_path) is None
