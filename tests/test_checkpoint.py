"""RunState: snapshots in memory and checkpoints on disk are bit-identical, complete or absent."""

import json
import shutil

import pytest
import torch
from cases import cases
from disks import Box, quiet
from rigs import alike
from torch import nn

from operant.runs.checkpoints import restore, snapshot
from operant.storage import atomic_io
from operant.storage.checkpoint import RunState, newest_whole
from operant.types import OperantError


def trained():
    """A model and its Adam optimizer with two parameter groups, after a few steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    groups = [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[2].parameters(), "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.99), amsgrad=True)
    for _ in range(3):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    model(torch.arange(8.0).view(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_nested_state_is_lossless(tmp_path):
    shared = torch.randn(30, 40)
    given = {0: {"0": True, 1: 1, "one": 1.0}, "list": [None, (1, (2.5,)), [], {}, "é\n\x00"]}
    tensors = [torch.tensor(7), torch.zeros(0, 3), torch.ones(2, dtype=torch.bfloat16), torch.arange(5)[1::2]]
    given |= {"tensors": tensors, "bool": torch.tensor([True, False]), "big": 2**80, "small": 5e-324}
    given["shared"] = {"a": shared, "b": shared, "view": shared.view(-1), "part": shared[1], "turned": shared.t()}
    given |= {"a.b": torch.tensor(1.0), "a": {"b": torch.tensor(2.0)}}
    state = RunState()
    box, path = state.register("box", Box(given)), state.save(tmp_path, 0, extra={"best": (0.1 + 0.2, 2)}).path
    box.state = None
    assert state.load(path, quiet) == (0, {"best": (0.1 + 0.2, 2)}) and alike(given, box.state)
    assert (path / "tensors.safetensors").stat().st_size < 4 * shared.nbytes, "a and b are tied: written once"


def test_a_step_that_failed_never_was(tmp_path):
    model, optimizer = trained()
    state = RunState()
    for name, part in (("model", model), ("optimizer", optimizer), ("box", Box({"position": 3}))):
        state.register(name, part)
    before = snapshot(state, state.parts)
    kept = json.dumps(before["box"]), {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(2):  # a snapshot can be used twice: its tensors are nobody's
        step(model, optimizer)
        state.parts["box"].state["position"] += 1
        restore(state, before)
        assert json.dumps(state.parts["box"].state) == kept[0] and alike(dict(model.state_dict()), kept[1])
    twin = trained()
    step(model, optimizer)
    step(*twin)
    assert alike(dict(optimizer.state_dict()), dict(twin[1].state_dict()))
    assert list(snapshot(state, ["box"])) == ["box"]


def test_a_part_that_is_missing_unknown_or_another_is_named(tmp_path):
    state = RunState()
    first, path = state.register("first", Box(1)), state.save(tmp_path, 1).path
    first.state = 2
    state.register("second", Box(1))
    with pytest.raises(OperantError, match="lacks second"):
        state.load(path, quiet)
    with pytest.raises(OperantError, match="holds first"):
        RunState().load(path, quiet)
    assert first.state == 2
    with pytest.raises(OperantError, match="'first' is registered already"):
        state.register("first", Box())
    with pytest.raises(OperantError, match=r"'x' \(int\) has no state_dict"):
        state.register("x", 3)
    small, large = RunState(), RunState()
    small.register("critic", nn.Linear(2, 3))
    large.register("critic", nn.Linear(2, 4))
    with pytest.raises(OperantError, match=r"part 'critic' of .* does not fit"):
        large.load(small.save(tmp_path, 2).path, quiet)


def test_two_checkpoints_stay_and_none_of_an_abandoned_run(tmp_path):
    state = RunState()
    box = state.register("x", Box(0))

    def save(step):
        box.state = step
        state.save(tmp_path, step)
        return sorted(p.name for p in tmp_path.iterdir())

    kept = [save(s) for s in (1, 2, 3, 99_999, 100_000)]
    assert kept[2:4] == [["step-00002", "step-00003"], ["step-00003", "step-99999"]]
    assert newest_whole(tmp_path).name == "step-100000" and save(99_998) == ["step-99998"]


@cases(
    (torch.tensor([1.0, float("nan")]), "holds NaN or infinity"),
    (torch.tensor([float("-inf")]), "holds NaN or infinity"),
    (float("nan"), "holds NaN or infinity"),
    ([1, {2}], "1 is of type set"),
)
def test_what_is_not_finite_never_reaches_the_disk(poison, said, tmp_path):
    state = RunState()
    box, whole = state.register("policy", Box({"weight": torch.ones(2)})), state.save(tmp_path, 1).path
    box.state["weight"] = poison
    with pytest.raises(OperantError, match=rf"policy\.weight\.?.*{said}"):
        state.save(tmp_path, 2)
    assert list(tmp_path.iterdir()) == [whole]


def test_another_version_or_thread_count_is_a_warning(tmp_path, monkeypatch):
    state = RunState()
    state.register("x", Box(1))
    path, heard = state.save(tmp_path, 1).path, []
    state.load(path, heard.append)
    assert heard == []
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    state.load(path, heard.append)
    assert len(heard) == 1 and f"made with threads {threads}, here is {threads + 1}" in heard[0]


def test_a_kill_while_a_step_is_saved_again_loses_nothing(tmp_path, monkeypatch):
    state = RunState()
    box = state.register("x", Box("old"))
    path = state.save(tmp_path, 5).path
    box.state = "new"

    def killed(when, operation, where):
        if (when, operation, where) == ("before", "rename", path):
            raise KeyboardInterrupt

    monkeypatch.setattr(atomic_io, "seam", killed)
    with pytest.raises(KeyboardInterrupt):
        state.save(tmp_path, 5)
    monkeypatch.undo()
    state.load(newest_whole(tmp_path), quiet)
    assert box.state == "old"
    box.state = "new"
    (tmp_path / ".step-00005.tmp").mkdir()  # as a kill -9 leaves it
    shutil.copytree(tmp_path / "step-00005.old", tmp_path / "aside")
    state.save(tmp_path, 5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["aside", "step-00005"]
    (tmp_path / "aside").rename(tmp_path / "step-00005.old")  # killed before the old one was taken away
    box.state = None
    assert state.load(newest_whole(tmp_path), quiet) == (5, None) and box.state == "new"
