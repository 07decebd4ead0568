"""Two ranks log and learn the same as one process: metrics are pooled as sums and counts, statistics over all ranks."""

import math
import time
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import cases
from rigs import DEALT, REPLIES, SCORES, on_ranks, said
from toys import lm

from operant import Batch, Learner, OperantError, Policy, Task, ValueOptions, distributed, machine
from operant.metrics import collect
from operant.objectives.advantages import whiten
from operant.rewards import judge
from operant.rewards.combine import weighted
from operant.rewards.shaping import RunningMoments
from operant.runs.parts import PeriodicEvaluation
from operant.runs.scored_rollouts import Probes
from operant.tally import Tally
from operant.types import StoppedError

UNEVEN = [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]]
"""Three clipped tokens of 3, and none of 5: 3 / 8 of all, where a mean of two means would say a half."""
OPTIONS = {"epochs": 2, "micro_tokens": 30, "score.scale": True, "stop_tokens": (2,), "lr": 1e-3, "max_grad_norm": 1.0}
OPTIONS |= {"minibatch": 1, "update.ratio_threshold": 1.2, "update.target_kl": 100.0}
OPTIONS |= {"kl.control": "adaptive", "kl.horizon": 50}
"""One reply in each minibatch, so one of the two ranks has no action in it; some ratios are above the threshold."""
PARTS = {"critic": {"value.critic": "copy"}, "trunk": {"model.train_layers": 1}, "idle": {"loss.value_coef": 0.0}}
"""Where parameters have no gradient: a separate critic's output head, a frozen trunk; or one of 0, a value head."""
PARTS = {name: {"minibatch": 4, **more} for name, more in PARTS.items()}
PARTS["trust region"] = {"algorithm": "trpo", "fisher_share": 0.6, "critic_minibatch": 4}
PARTS["replay"] = {"algorithm": "soft_q", "minibatch": 4, "replay.share": 0.6}
PARTS |= {"unread": {"algorithm": "reinforce"}, "of ilql": {}}  # with a value head or Q heads, which no loss reads
CRITICS = {"unread": ValueOptions(), "of ilql": ValueOptions(actions=True)}


def learnt(which: list[int]) -> tuple[dict, dict]:
    """Metrics of two steps on these replies; and what is left of the learner."""
    policy = Policy(lm(), value=ValueOptions(init="zero"))
    learner = Learner(policy, reference=Policy(lm(seed=1)), **OPTIONS)
    logged = {}
    for step in range(2):
        queries, replies = ([torch.tensor(REPLIES[i][side]) for i in which] for side in (0, 1))
        metrics = learner.step(queries, replies, [SCORES[i] * (step + 1) for i in which])
        logged |= {f"{step}/{k}": v for k, v in metrics.items() if not k.startswith("time/")}
    held = {"coef": learner.controller.coef, "mean": learner.moments.mean, "var": learner.moments.var}
    return logged, held | {"weights": torch.cat([p.detach().flatten() for p in policy.parameters()])}


def learnt_in_parts(which: list[int]) -> dict[str, torch.Tensor]:
    """How far one step moves what is trained; with so large an eps, as the gradient says."""
    moved = {}
    for name, more in PARTS.items():
        model = lm("llama").double()  # its output head is a matrix of its own; a small step is lost in float32
        model.unused = torch.nn.Parameter(torch.ones(3).double())  # as a vision tower, which no text reads
        options = {"max_tokens": 12, "optimizer.eps": 1.0, "watch_every": 0, "stop_tokens": (2,), "micro_tokens": 20}
        learner = Learner(Policy(model, value=CRITICS[name]) if name in CRITICS else model, **options, **more)
        before = [p.detach().clone() for p in learner.policy.trainable()]
        queries, replies = ([torch.tensor(REPLIES[i][side]) for i in which] for side in (0, 1))
        learner.step(queries, replies, [SCORES[i] for i in which])
        after = learner.policy.trainable()
        moved[name] = torch.cat([(a.detach() - b).flatten() for a, b in zip(after, before, strict=True)])
    return moved


def numbers() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(6, 9, generator=draw) * 3 + 2, torch.rand(6, 9, generator=draw) < 0.6


def probed() -> list[str]:
    """What a rank hears where the engine fails on rank 1, and where the reward fails, which the first rank asks."""
    learner, heard = Learner(lm(), max_tokens=4, stop_tokens=(2,)), []

    def fails(rollouts):
        raise ValueError(f"no judge on rank {distributed.rank()}")

    def plays(tasks, **how):
        if not heard and distributed.rank() == 1:
            raise OperantError("no engine on rank 1")
        return play(tasks, **how)

    play, learner.play = learner.play, plays
    for _ in range(2):
        with pytest.raises(OperantError) as raised:
            Probes(learner, [Task("a", [5, 6]), Task("b", [7])], fails).ask()
        heard.append(str(raised.value))
    return heard


def judged_slowly() -> tuple[int, str]:
    """How often a rank beats while the other one works for a second, and by whose word it goes on."""
    distributed.store, before = dist.distributed_c10d._get_default_store(), machine.beats
    try:
        told = distributed.on_first(lambda: time.sleep(1) or f"rank {distributed.rank()}")
        distributed.together(lambda: time.sleep(distributed.rank()))
    finally:
        distributed.store = None
    return machine.beats - before, told


def stopped(rank: int) -> list[str]:
    """What a rank raises where rank 1 alone stops, where both do, and where rank 0 stops and rank 1 fails."""

    def raises(kinds):
        if kinds[rank] is not None:
            raise kinds[rank](f"rank {rank}")

    kinds = []
    for of_ranks in ((None, StoppedError), (StoppedError, StoppedError), (StoppedError, OperantError)):
        with pytest.raises(OperantError) as raised:
            distributed.together(partial(raises, of_ranks))
        kinds.append(raised.type.__name__)
    return kinds


def probed_apart(rank: int) -> list[float]:
    """Scored tokens of replies that differ between ranks; the ranks' number after a reward of one rank's alone."""
    learner, tasks = Learner(lm(), max_tokens=4 + rank, fixed_length=True), [Task("a", [5, 6]), Task("b", [7])]
    rows, _ = Probes(learner, tasks, lambda rs: [[1.0] * r.count for r in rs]).ask()
    probes = Probes(learner, tasks, lambda rs: [1.0 if r.count > 4 else None for r in rs])
    parts = SimpleNamespace(learner=learner, evaluator=None, probes=probes)
    PeriodicEvaluation(parts, SimpleNamespace(probes=lambda *rows: None), None, nullcontext).before_training()
    return [*[len(row["returns"]) for row in rows], distributed.total_float(1.0)]


def ranks_work(rank: int, world: int) -> dict:
    x, where = numbers()
    rows = slice(0, 4) if rank == 0 else slice(4, 6)
    white = {(u, m): whiten(x[rows], where[rows], unbiased=u, shift_mean=m) for u, m in ((0, 0), (1, 1))}
    moments = RunningMoments()
    for part in ([SCORES[0:4], SCORES[4:5]], [SCORES[5:7], []]):
        moments.update(part[rank])
    tally = Tally()
    tally.mean("clipped", UNEVEN[rank])
    tally.spread("clipped_std", UNEVEN[rank])
    tally.extreme("clipped_max", UNEVEN[rank][0])
    mixed = weighted({"a": (lambda rs: [1.0 + r.group for r in rs], 0.7), "b": (lambda rs: [10.0] * len(rs), 0.3)})
    judged = judge(mixed, [said([5], [6], group=i) for i in DEALT[rank]])
    told = {"white": white, "moments": (moments.count, moments.mean, moments.var, moments.std), "used": judged.scores}
    told |= {"tally": distributed.pool(tally.merge(collect.of_judged(judged))).result(), "learnt": learnt(DEALT[rank])}
    told |= {"parts": learnt_in_parts(DEALT[rank]), "probed": probed()}
    return told | {"slowly": judged_slowly(), "apart": probed_apart(rank), "stopped": stopped(rank)}


@pytest.fixture(scope="module")
def ranks():
    return on_ranks(ranks_work, 2)


@cases((0, 0), (1, 1))
def test_whitening_is_over_all_ranks(unbiased, shift, ranks):
    x, where = numbers()
    picked = x[where].double()
    truth = (picked - picked.mean()) / (picked.var(correction=unbiased) + 1e-8).sqrt() + (1 - shift) * picked.mean()
    mine = torch.cat([ranks[r]["white"][unbiased, shift] for r in (0, 1)])
    assert torch.allclose(mine[where].double(), truth, atol=1e-6) and not mine[~where].any()


@pytest.mark.parametrize("rank", [0, 1])
def test_numbers_of_all_ranks_by_hand(rank, ranks):
    """The reward is 0.7 (1 + i) + 0.3 x 10 for attempt i; its parts are logged without their weights."""
    mean, logged = math.fsum(SCORES) / 7, ranks[rank]["tally"]
    var = math.fsum((s - mean) ** 2 for s in SCORES) / 7
    std = (var * 7 / 6) ** 0.5
    assert ranks[rank]["moments"] == pytest.approx((7, mean, var, std))
    assert logged["clipped"] == 3 / 8 and logged["clipped_max"] == 1.0
    assert logged["clipped_std"] == pytest.approx((3 / 8 * 5 / 8) ** 0.5)
    assert ranks[rank]["used"] == pytest.approx([0.7 * (1 + i) + 3.0 for i in DEALT[rank]])
    assert pytest.approx(4.0) in logged.values()  # the mean of part a over all seven
    assert ranks[rank]["learnt"][0]["0/reward/scaled_mean"] == pytest.approx(mean / std, rel=1e-5)


def test_an_advantage_of_rounding_is_none_beside_all_ranks(monkeypatch):
    """A sum over ranks in another order leaves 1e-9 where one rank has 0; another rank has an advantage of 1."""
    monkeypatch.setattr(collect, "distributed", SimpleNamespace(largest_float=lambda x: max(x, 1.0)))
    batch = Batch.given([[3]] * 3, [[4, 5]] * 3)
    advantages = torch.tensor([[0.0, 1e-9, 0.0], [0.0, 0.0, 0.0], [0.0, 0.5, 0.5]])
    tally = Tally()
    collect.of_advantages(tally, batch.with_(advantages=advantages, weights=batch.actions.float()))
    assert tally.result()["policy/advantage_zero"] == pytest.approx(2 / 3)


def test_two_ranks_log_and_learn_the_same_as_one_process(ranks):
    """Every metric of two steps, the controller and the moments; both ranks end with the same weights, to the bit."""
    truth, held = learnt(list(range(7)))
    assert 0 < truth["0/policy/skipped_steps"] < 1, "some steps are above the threshold, not all"
    for logged, mine in (ranks[rank]["learnt"] for rank in (0, 1)):
        assert logged == pytest.approx(truth, rel=2e-3, abs=1e-4)
        for name in ("coef", "mean", "var"):
            assert mine[name] == pytest.approx(held[name], rel=1e-5), name
        assert torch.equal(mine["weights"], ranks[0]["learnt"][1]["weights"])


def test_two_ranks_move_what_one_process_moves_without_gradients(ranks):
    for name, right in learnt_in_parts(list(range(7))).items():
        for rank in (0, 1):
            apart = (ranks[rank]["parts"][name] - right).norm() / right.norm()
            assert float(apart) < 1e-5, (name, rank, float(apart))


def test_what_fails_in_the_probes_of_one_rank_is_heard_on_all(ranks):
    (engine, reward), other = (ranks[rank]["probed"] for rank in (0, 1))
    assert "no engine on rank 1" in engine and "no judge on rank 0" in reward and [engine, reward] == other


def test_the_first_rank_judges_equal_replies_and_the_others_wait_alive(ranks):
    assert all(told == "rank 0" and beats > 5 for beats, told in (ranks[rank]["slowly"] for rank in (0, 1)))
    assert [ranks[rank]["apart"] for rank in (0, 1)] == [[4, 4, 2], [5, 5, 2]]


def test_a_stop_of_one_rank_is_one_of_all_unless_another_fails(ranks):
    assert ranks[0]["stopped"] == ["StoppedError", "StoppedError", "HeardError"]
    assert ranks[1]["stopped"] == ["StoppedError", "StoppedError", "OperantError"]
