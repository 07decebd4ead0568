"""Every change of the disk goes through one seam; if it fails, the old file or the new one is complete."""

import errno

import pytest
from disks import FULL, named

from operant.storage import atomic_io
from operant.types import OperantError


def test_a_file_is_written_synced_and_renamed_in_that_order(tmp_path, watch):
    seam = watch()
    atomic_io.write(tmp_path / "a", "text")
    order = ("write", "fsync", "rename", "fsync_folder")
    assert [step[:2] for step in seam.seen] == [(when, name) for name in order for when in ("before", "after")]
    assert seam.done()[2:] == [("rename", "a"), ("fsync_folder", tmp_path.name)] and named(tmp_path) == ["a"]


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("at", range(8))
def test_a_failing_disk_leaves_the_old_file_or_the_new(tmp_path, watch, at, stays):
    atomic_io.write(tmp_path / "a", "old")
    watch(at, FULL, stays=stays)
    with pytest.raises(OperantError, match=r"cannot write .*/a: no space left on device; free some space there"):
        atomic_io.write(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == ("new" if at >= 5 else "old") and named(tmp_path) == ["a"]


def test_an_exception_that_ends_the_process_is_not_changed(tmp_path, watch):
    atomic_io.write(tmp_path / "a", "old")
    watch(3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        atomic_io.write(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old" and named(tmp_path) == ["a"]


def test_every_missing_folder_is_created_and_its_parent_synced(tmp_path, watch):
    seam = watch()
    atomic_io.mkdir(tmp_path / "a" / "b")
    assert seam.done() == [("mkdir", "a"), ("fsync_folder", tmp_path.name), ("mkdir", "b"), ("fsync_folder", "a")]
    atomic_io.mkdir(tmp_path / "a" / "b")
    assert len(seam.seen) == 8
    with pytest.raises(FileExistsError):
        atomic_io.mkdir(tmp_path / "a" / "b", exist_ok=False)


def test_a_folder_is_replaced_and_the_old_one_stays_until_then(tmp_path, watch):
    def made(text):
        atomic_io.mkdir(tmp_path / "new")
        atomic_io.write_and_sync(tmp_path / "new" / "f", text)

    made("old")
    atomic_io.replace_folder(tmp_path / "new", tmp_path / "best")
    made("new")
    seam = watch()
    atomic_io.replace_folder(tmp_path / "new", tmp_path / "best")
    order = [("rename", "best.old"), ("rename", "best"), ("fsync_folder", tmp_path.name), ("remove_tree", "best.old")]
    assert seam.done() == order and (tmp_path / "best" / "f").read_text() == "new" and named(tmp_path) == ["best"]


def test_a_failed_replacement_restores_the_old_folder(tmp_path, watch):
    for name in ("best", "new"):
        atomic_io.mkdir(tmp_path / name)
        atomic_io.write_and_sync(tmp_path / name / "f", name)
    watch(2, FULL)  # before the second rename
    with pytest.raises(OSError):
        atomic_io.replace_folder(tmp_path / "new", tmp_path / "best")
    assert (tmp_path / "best" / "f").read_text() == "best" and named(tmp_path) == ["best", "new"]


def test_all_other_operations_go_through_the_seam(tmp_path, watch):
    seam = watch()
    atomic_io.append_text(tmp_path / "lines", atomic_io.strict_json({"a": 1}) + "\n")
    atomic_io.append_text(tmp_path / "lines", "torn")
    atomic_io.truncate(tmp_path / "lines", 9)
    assert (tmp_path / "lines").read_text() == '{"a": 1}\n'
    atomic_io.remove(tmp_path / "lines")
    atomic_io.remove(tmp_path / "lines")  # it is not there: nothing happens
    atomic_io.remove_tree(tmp_path / "nothing")
    assert [operation for operation, _ in seam.done()] == ["append", "append", "truncate", "fsync", "remove"]


def test_deleting_a_link_does_not_delete_its_target(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "f").write_text("text", encoding="utf-8")
    for name in ("link", "nowhere"):
        (tmp_path / name).symlink_to(tmp_path / ("mine" if name == "link" else "nothing"))
        atomic_io.remove_tree(tmp_path / name)
    assert named(tmp_path) == ["mine"] and named(tmp_path / "mine") == ["f"]


def test_only_a_folder_that_cannot_be_synced_is_ignored(tmp_path, monkeypatch):
    def refuses(code):
        def fsync(descriptor):
            raise OSError(code, "no")

        monkeypatch.setattr(atomic_io.os, "fsync", fsync)

    refuses(errno.EINVAL)  # as some network file systems report
    atomic_io.sync_folder(tmp_path)
    refuses(errno.EIO)
    with pytest.raises(OSError):
        atomic_io.sync_folder(tmp_path)


def test_what_a_resume_needs_is_written_through_the_seam():
    """They change the disk only with the functions of atomic_io.py."""
    import operant

    root = atomic_io.Path(operant.__file__).parent
    modules = ("storage/checkpoint", "storage/checkpoint_store", "storage/manifest", "storage/state_codec")
    words = ("os.replace(", "os.rename(", ".rename(", "rmtree(", ".unlink(", ".mkdir(", "write_text(", "write_bytes(")
    for module in (*modules, "models/loading", "training/saved_learner", "runs/run"):
        source = (root / f"{module}.py").read_text(encoding="utf-8")
        used = [w for w in words if w in source.replace("atomic_io.rename(", "").replace("atomic_io.mkdir(", "")]
        assert not used, f"{module}.py uses {used}"
