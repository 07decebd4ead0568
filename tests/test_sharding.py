"""`learner.parallel=fsdp`: ranks that have parts of the weights learn what one process learns; any number resumes."""

from functools import cache
from pathlib import Path

import pytest
import torch
from cases import cases, slow, slow_but
from rigs import REPLIES, SCORES, gap, on_ranks, state_of
from toys import lm

from operant import Learner
from operant.apps.rlhf.reward_model import RewardModel

BASE = {"max_tokens": 12, "stop_tokens": (2,), "micro_tokens": 20, "optimizer.eps": 1.0}
BASE |= {"optimizer.lr": 1e-3, "watch_every": 1, "minibatch": 4, "epochs": 1}
"""With so large an eps, weights move as the gradients say; some minibatches have several micro-batches."""
CASES = {
    "value head, tied": ("gpt2", {}),
    "critic network, untied": ("llama", {"value.critic": "copy"}),
    "encoder and decoder, recomputed": ("t5", {"model.gradient_checkpointing": True}),
    "adapter, exact KL": ("llama", {"lora.rank": 2, "kl.loss_coef": 0.1, "kl.loss_kind": "reverse"}),
    "trunk": ("gpt2", {"model.train_layers": 1}),
    "offload": ("gpt2", {"learner.offload": "both", "loss.value_coef": 0.0}),
    "follows": ("gpt2", {"algorithm": "soft_q", "target.rate": 0.5, "mask.by": "policy"}),
    "rejection": ("gpt2", {"algorithm": "rejection", "learner.select": "top:4"}),
    "sft": ("llama", {"algorithm": "sft"}),
    "float32": ("gpt2", {"value.init": "zero"}),
    "bfloat16": ("gpt2", {"model.precision": "bfloat16", "optimizer.lr": 0.1}),
    "reward model": ("reward model", {"algorithm": "reward-model", "minibatch": 1}),
    "dpo": ("gpt2", {"algorithm": "dpo", "minibatch": 1}),
}


COARSE = {"float32": 3e-5, "bfloat16": 0.15}
"""Cases that are not in float64, and how far they may be from one process. With averages for sums it would be 0.5."""


def made(name: str, parallel: str = "fsdp", **more) -> Learner:
    kind, options = CASES[name]
    model = RewardModel("builtin:reviews-lm", normalise="none") if kind == "reward model" else lm(kind)
    model = model if name in COARSE else model.double()
    several = {"learner.parallel": parallel} | ({} if parallel == "fsdp" else {"learner.offload": "none"})
    return Learner(model, **BASE | options | several | more)


def stepped(learner: Learner, which: list[int], times: float = 1.0) -> dict[str, float]:
    """Metrics of a step on these replies, or on demonstrations or pairs of them."""
    queries, replies = ([torch.tensor(REPLIES[i][side]) for i in which] for side in (0, 1))
    if learner.named["algorithm"] == "sft":
        return learner.step(queries, replies)
    if learner.named["algorithm"] in ("dpo", "reward-model"):  # each rank has whole pairs
        pairs = [(2 * i, 2 * i + 1) for i in which if i < 3]
        queries = [torch.tensor(REPLIES[pair[0]][0]) for pair in pairs for _ in pair]
        replies = [torch.tensor(REPLIES[i][1]) for pair in pairs for i in pair]
        return learner.step(queries, replies, [1.0, 0.0] * len(pairs))
    return learner.step(queries, replies, [SCORES[i] * times for i in which])


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in learner.policy.trainable()])


def learnt(name: str, which: list[int], parallel: str = "fsdp") -> dict:
    """How far two steps move what is trained, their metrics, and what this rank has."""
    learner = made(name, parallel)
    before, told = weights(learner), []
    for step in range(2):
        told.append({k: v for k, v in stepped(learner, which, step + 1.0).items() if not k.startswith("time/")})
    held = [x for values in learner.optimizer.state.values() for x in values.values() if x.ndim]
    sizes = {"states": sum(x.numel() for x in held), "trained": len(before)}
    return {"moved": weights(learner) - before, "metrics": told, "sizes": sizes}


DAILY = ("adapter, exact KL",)
"""A checkpoint's next step compares others with one process, every day."""


def work(rank: int, world: int, names: list[str], parallel: str = "fsdp") -> dict:
    return {name: learnt(name, dealt(rank, world), parallel) for name in names}


@cache
def ranks_of(daily: bool) -> list[dict]:
    return on_ranks(work, 2, [name for name in CASES if (name in DAILY) == daily], deadline=400)


@pytest.mark.parametrize("name", slow_but(DAILY, CASES))
def test_two_ranks_with_parts_of_weights_learn_as_one_process(name):
    ranks, truth = ranks_of(name in DAILY), learnt(name, list(range(7)), "ddp")
    assert float(truth["moved"].norm()) > 0
    for rank in (0, 1):
        mine = ranks[rank][name]
        assert gap(mine["moved"], truth["moved"]) < COARSE.get(name, 1e-9), (name, rank)
        for one, two in zip(truth["metrics"], mine["metrics"], strict=True):
            assert one.keys() == two.keys()
            odd = {k: (one[k], two[k]) for k in one if two[k] != pytest.approx(one[k], rel=1e-5, abs=1e-7)}
            assert not odd or name in COARSE, odd
    states = [ranks[rank][name]["sizes"]["states"] for rank in (0, 1)]
    assert sum(states) == truth["sizes"]["states"] and max(states) < 0.6 * sum(states)


MANY = ["value head, tied", "adapter, exact KL", "trunk"]


@pytest.mark.slow
@cases((4, "fsdp"), (8, "ddp"), (8, "fsdp"))
def test_more_ranks_learn_the_same_also_one_without_replies(world, parallel):
    """Of eight ranks, the last one has no reply at all."""
    ranks = on_ranks(work, world, MANY, parallel, deadline=900)
    for name in MANY:
        truth = learnt(name, list(range(7)), "ddp")["moved"]
        assert max(gap(mine[name]["moved"], truth) for mine in ranks) < 1e-9, name


# --- checkpoints ------------------------------------------------------------------------------------------------------
SAVED = ("value head, tied", "follows", "bfloat16")


def saved(rank: int, world: int, folder: Path) -> dict:
    which, out = dealt(rank, world), {}
    for name in SAVED:
        learner = made(name)
        stepped(learner, which)
        for kind in ("resume", "light"):
            state_of(learner).save(folder / name, 1, {"began": rank}, kind=kind)
        before = weights(learner)
        stepped(learner, which)
        out[name] = (before, weights(learner))
    return out


def resumed(rank: int, world: int, folder: Path, parallel: str = "fsdp") -> dict:
    """What the second step moves after resuming, and the weights of the light checkpoint."""
    which, out = dealt(rank, world), {}
    for name in SAVED:
        learner, light = made(name, parallel), made(name, parallel)
        step, extra = state_of(learner).load(folder / name / "step-00001")
        assert (step, extra) == (1, {"began": 0})
        stepped(learner, which)
        state_of(light).load(folder / name / "light-00001", fresh_optimizer=True)
        out[name] = (weights(light), weights(learner))
    return out


def dealt(rank: int, world: int) -> list[int]:
    return [i for i in range(len(REPLIES)) if i % world == rank]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> tuple[Path, dict]:
    path = tmp_path_factory.mktemp("saved")
    return path, on_ranks(saved, 2, path, deadline=400)[0]


@cases((2, 1, "fsdp"), slow(2, 2, "fsdp"), slow(2, 2, "ddp"), slow(2, 4, "fsdp"), slow(1, 2, "fsdp"))
def test_a_checkpoint_resumes_on_any_number_of_ranks(began, world, parallel, folder, tmp_path):
    path, truth = folder if began == 2 else (tmp_path, saved(0, 1, tmp_path))
    found = resumed(0, 1, path) if world == 1 else on_ranks(resumed, world, path, parallel, deadline=400)[0]
    for name in SAVED:
        assert torch.equal(found[name][0], truth[name][0]), "a light checkpoint has the weights themselves"
        assert gap(found[name][1], truth[name][1]) < COARSE.get(name, 1e-9)


def test_every_rank_writes_its_rows_and_torch_reads_them(folder):
    """torch's own reader of such files finds the weights; a light checkpoint has these alone."""
    import torch.distributed.checkpoint as dcp

    path, truth = folder
    light, resume = (path / SAVED[0] / f"{kind}-00001" for kind in ("light", "step"))
    sizes = [file.stat().st_size for file in sorted(light.glob("shard-*"))]
    assert len(sizes) == 2 and max(sizes) < 0.6 * sum(sizes)
    whole = 3 * sum(sizes)  # weights and two moments
    assert 0.9 * whole < sum(file.stat().st_size for file in resume.glob("shard-*")) < 1.1 * whole
    found = dcp.HuggingFaceStorageReader(str(light)).read_metadata().state_dict_metadata
    mine = {name: torch.zeros(about.size, dtype=about.properties.dtype) for name, about in found.items()}
    dcp.load(mine, storage_reader=dcp.HuggingFaceStorageReader(str(light)), no_dist=True)
    learner = made(SAVED[0])
    with torch.no_grad():
        for name, p in learner.policy.named_parameters():
            p.copy_(mine[f"policy.{name}"])
    assert torch.equal(weights(learner), truth[SAVED[0]][0])
