"""RunState: snapshots in memory and checkpoints on disk are bit-identical, complete or absent."""

import json
import shutil

import pytest
import torch
from disks import Box, largest_file, named, quiet
from rigs import alike
from torch import nn

from operant.runs.checkpoints import restore, snapshot
from operant.storage import atomic_io
from operant.storage.checkpoint import RunState, newest_whole
from operant.types import OperantError


def trained(seed=0, steps=3):
    """A model and its Adam optimizer with two parameter groups, after a few steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    groups = [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[2].parameters(), "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.99), amsgrad=True)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    model(torch.arange(8.0).view(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model, optimizer, box=None):
    state = RunState()
    state.register("model", model)
    state.register("optimizer", optimizer)
    state.register("box", box or Box())
    return state


@pytest.fixture
def state():
    return RunState()


@pytest.fixture
def box(state):
    """The only part of the state."""
    return state.register("x", Box("old"))


def test_adam_comes_back_and_goes_on_bit_identically(tmp_path):
    model, optimizer = trained()
    path = state_of(model, optimizer).save(tmp_path, 3, extra={"best": (0.1 + 0.2, 2)}).path
    other, other_optimizer = trained(seed=1, steps=1)
    assert state_of(other, other_optimizer).load(path, quiet) == (3, {"best": (0.1 + 0.2, 2)})
    assert alike(dict(optimizer.state_dict()), dict(other_optimizer.state_dict()))
    for _ in range(2):
        step(model, optimizer)
        step(other, other_optimizer)
    assert alike(dict(model.state_dict()), dict(other.state_dict()))


def test_nested_state_is_lossless(state, box, tmp_path):
    shared = torch.randn(3, 4)
    given = {
        0: {"0": True, 1: 1, "one": 1.0},
        "list": [None, (1, (2.5,)), [], {}, "é\n\x00"],
        "tensors": [torch.tensor(7), torch.zeros(0, 3), torch.ones(2, dtype=torch.bfloat16), torch.arange(5)[1::2]],
        "bool": torch.tensor([True, False]),
        "shared": {"a": shared, "b": shared, "view": shared.view(-1), "part": shared[1], "turned": shared.t()},
        "a.b": torch.tensor(1.0),
        "a": {"b": torch.tensor(2.0)},
        "big": 2**80,
        "small": 5e-324,
    }
    box.state = given
    path = state.save(tmp_path, 0).path
    box.state = None
    state.load(path, quiet)
    assert alike(given, box.state)


def test_tied_weights_are_written_once(state, box, tmp_path):
    weight = nn.Parameter(torch.randn(1000, 10))
    box.state = {"embed": weight, "head": weight.detach()}
    path = state.save(tmp_path, 0).path
    assert 40_000 < (path / "tensors.safetensors").stat().st_size < 41_000


def test_a_step_that_failed_never_was(tmp_path):
    model, optimizer = trained()
    state = state_of(model, optimizer, Box({"position": 3}))
    before = snapshot(state, state.parts)
    kept = json.dumps(before["box"]), {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(2):  # a snapshot can be used twice: its tensors are nobody's
        step(model, optimizer)
        state.parts["box"].state["position"] += 1
        restore(state, before)
        assert json.dumps(state.parts["box"].state) == kept[0]
        assert alike(dict(model.state_dict()), kept[1])
    twin = trained()
    step(model, optimizer)
    step(*twin)
    assert alike(dict(optimizer.state_dict()), dict(twin[1].state_dict()))
    assert list(snapshot(state, ["box"])) == ["box"]


def test_registering_twice_or_without_methods_is_an_error():
    state = RunState()
    state.register("kl", Box())
    with pytest.raises(OperantError, match="'kl' is registered already"):
        state.register("kl", Box())
    with pytest.raises(OperantError, match=r"'x' \(int\) has no state_dict"):
        state.register("x", 3)


def test_a_missing_or_unknown_part_loads_nothing(tmp_path):
    state = RunState()
    first = state.register("first", Box(1))
    path = state.save(tmp_path, 1).path
    first.state = 2
    state.register("second", Box(1))
    with pytest.raises(OperantError, match="lacks second"):
        state.load(path, quiet)
    with pytest.raises(OperantError, match="holds first"):
        RunState().load(path, quiet)
    assert first.state == 2


def test_a_part_that_does_not_fit_is_named(tmp_path):
    state = RunState()
    state.register("critic", nn.Linear(2, 3))
    path = state.save(tmp_path, 1).path
    other = RunState()
    other.register("critic", nn.Linear(2, 4))
    with pytest.raises(OperantError, match=r"part 'critic' of .* does not fit"):
        other.load(path, quiet)


def test_two_checkpoints_stay_and_none_of_an_abandoned_run(state, box, tmp_path):
    def save(step):
        state.save(tmp_path, step)
        return named(tmp_path)

    kept = [save(step) for step in (1, 2, 3, 99_999, 100_000)]
    assert kept[2:4] == [["step-00002", "step-00003"], ["step-00003", "step-99999"]]
    assert newest_whole(tmp_path).name == "step-100000"
    assert save(99_998) == ["step-99998"]


def test_a_step_can_be_saved_again(state, box, tmp_path):
    state.save(tmp_path, 5)
    box.state = "new"
    path = state.save(tmp_path, 5).path
    assert named(tmp_path) == ["step-00005"]
    assert state.load(path, quiet) and box.state == "new"


def test_a_kill_while_a_step_is_saved_again_loses_nothing(state, box, tmp_path, monkeypatch):
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
    assert newest_whole(tmp_path).name == "step-00005"


@pytest.mark.parametrize("poison", [torch.tensor([1.0, float("nan")]), torch.tensor([float("-inf")]), float("nan")])
def test_what_is_not_finite_never_reaches_the_disk(state, box, tmp_path, poison):
    whole = state.save(tmp_path, 1).path
    box.state = {"head": {"weight": poison}}
    with pytest.raises(OperantError, match=r"x\.head\.weight holds NaN or infinity"):
        state.save(tmp_path, 2)
    assert list(tmp_path.iterdir()) == [whole]


def test_what_cannot_be_written_is_named(state, box, tmp_path):
    box.state = {"items": [1, {2}]}
    with pytest.raises(OperantError, match=r"x\.items\.1 is of type set"):
        state.save(tmp_path, 1)


def test_a_full_disk_leaves_the_last_checkpoint(state, box, tmp_path):
    whole = state.save(tmp_path, 1).path
    box.state = torch.randn(100_000)
    with (
        largest_file(50_000),
        pytest.raises(OperantError, match=r"cannot save the checkpoint .*step-00002: .*; free some space"),
    ):
        state.save(tmp_path, 2)
    assert list(tmp_path.iterdir()) == [whole] and newest_whole(tmp_path) == whole


def test_another_version_or_thread_count_is_a_warning(state, box, tmp_path, monkeypatch):
    path = state.save(tmp_path, 1).path
    heard = []
    state.load(path, heard.append)
    assert heard == []
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    state.load(path, heard.append)
    assert len(heard) == 1 and f"made with threads {threads}, here is {threads + 1}" in heard[0]
