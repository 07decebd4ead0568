"""Golden runs: twenty steps of each algorithm, with weights from a fixed stream of integers.

GPT-2's architecture computes in float64 from end to end, so its numbers are the same on every machine to a few units in
the sixteenth digit; the steps are small, so that twenty of them do not amplify the differences. The other
architectures compute their norms in float32 for any input, and are compared to the fourth digit.

`python -m tests.golden` rewrites the files, after a change that is documented to change numbers.
"""

import json
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from toys import lm

from operant import Learner, Rollout, Task, Turn

STEPS, FOLDER = 20, Path(__file__).parent / "golden"
ALGORITHMS = ("ppo", "grpo", "rloo", "gigpo", "rejection", "sft", "distill", "decision", "ilql")
ALGORITHMS += ("dpo", "online-dpo", "kto", "a2c", "trpo", "nlpo", "reinforce", "coderl", "soft_q")
ALGORITHMS += ("dapo", "dr-grpo", "gspo", "cispo", "sapo", "dppo", "opo", "pass-at-k", "vapo")
ALGORITHMS += ("reinforce++", "reinforce++-baseline")
ISLANDS = ("llama", "qwen2", "gpt_neox", "t5")
RUNS = {name: ("gpt2", name) for name in ALGORITHMS} | {f"ppo-{kind}": (kind, "ppo") for kind in ISLANDS}
"""The architecture and the algorithm of each file."""
OPTIONS = {"optimizer.lr": 3e-4, "optimizer.warmup": 0.2, "optimizer.schedule": "linear"}
OPTIONS |= {"optimizer.weight_decay": 0.01, "optimizer.max_grad_norm": 0.5, "update.epochs": 2, "update.minibatch": 4}
OPTIONS |= {"update.micro_tokens": 40, "sampling.max_tokens": 8, "sampling.temperature": 0.9, "seed": 3}
ABSENT = "absent"
"""An option that the method does not have."""
MORE = {
    "a2c": {"update.epochs": 1, "loss.entropy_coef": 0.01},
    "trpo": {"update.epochs": ABSENT, "update.minibatch": ABSENT, "update.critic_minibatch": 4},
    "nlpo": {"sampling.top_p": 0.8, "sampling.top_p_least": 5, "mask.every": 3},
    "reinforce": {"update.epochs": 1, "advantage.gamma": 0.97},
    "coderl": {"update.epochs": 1, "advantage.gamma": 0.97, "loss.given_coef": 0.5, "kl.loss_coef": 0.05},
    "ppo": {
        "score.scale": True,
        "kl.control": "adaptive",
        "kl.horizon": 200,
        "loss.entropy_coef": 0.01,
        "advantage.gamma": 0.97,
    },
    "grpo": {"score.scale": True, "kl.coef": 0.0, "kl.loss_coef": 0.05, "kl.loss_kind": "k3"},
    "rloo": {"score.scale": True, "kl.kind": "k2", "kl.coef": 0.05, "loss.clip_high": 0.28},
    "dapo": {"kl.loss_coef": 0.05},
    "dr-grpo": {"kl.loss_coef": 0.05},
    "gspo": {"kl.loss_coef": 0.05, "loss.clip": 0.01, "loss.clip_high": 0.02},
    "cispo": {"kl.loss_coef": 0.05, "loss.high": 1.01, "loss.low": 0.02},
    "sapo": {"kl.loss_coef": 0.05, "loss.temperature": 3.0},
    "dppo": {"kl.loss_coef": 0.05, "loss.max_distance": 0.002},
    "opo": {"update.epochs": 1, "kl.loss_coef": 0.05},
    "pass-at-k": {"kl.loss_coef": 0.05, "advantage.k": 2},
    "vapo": {"kl.loss_coef": 0.05, "advantage.alpha": 0.5, "advantage.right": 0.8},
    "reinforce++": {"kl.coef": 0.05, "advantage.gamma": 0.97},
    "reinforce++-baseline": {"kl.loss_coef": 0.05},
    "gigpo": {"kl.loss_coef": 0.05, "advantage.omega": 0.5},
    "rejection": {"kl.loss_coef": 0.05, "kl.coef": 0.02, "loss.entropy_coef": 0.01},
    "sft": {},
    "distill": {"teacher.hint": lambda rollout: [rollout.turns[0].prompt[-1], 5], "teacher.rate": 0.3},
    "decision": {"condition.template": lambda value: [3 + round(abs(value)) % 20]},
    "dpo": {"loss.label_smoothing": 0.1, "loss.beta": 0.5},
    "online-dpo": {"loss.kind": "ipo", "loss.beta": 0.3},
    "kto": {"loss.bad_weight": 0.7},
    "soft_q": {"loss.forward_share": 0.4, "target.rate": 0.2, "advantage.standardise": "step"},
    "ilql": {"value.layers": 1, "value.init": "normal", "advantage.gamma": 0.9, "loss.awac_beta": 0.5},
}
METRICS = """loss/total policy/loss policy/entropy policy/approx_kl policy/ratio_max policy/ratio_std
policy/allowed_tokens trust/kl trust/improvement
policy/clip_fraction policy/advantage_std value/loss value/mean value/prediction value/explained_variance
returns/mean returns/std supervised/loss preference/loss preference/margin distill/divergence ilql/q ilql/value_loss
soft_q/a soft_q/v soft_q/target_v
kl/per_reply kl/per_token kl/k3 kl/paid kl/in_loss kl/coef
given/loss reward/mean reward/scaled_mean reward/return rollout/logprob_mean rollout/ref_logprob_mean
rollout/reply_tokens select/threshold select/score update/grad_norm update/grad_norm_clipped
update/lr update/steps""".split()
"""Metrics that are recorded if a run has them."""


def settle(module: torch.nn.Module) -> None:
    """Fill every parameter with uniform numbers of PCG64, whose stream is fixed, seeded by its name."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            seed = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
            x = np.random.Generator(np.random.PCG64(seed)).random(p.numel()) * 2 - 1
            norm = p.ndim == 1 and name.endswith("weight")
            p.copy_(torch.from_numpy(1 + 0.2 * x if norm else 0.4 * x).view(p.shape))


def made(kind: str, algorithm: str, **more) -> Learner:
    model = lm(kind, vocab=24).double()
    settle(model)
    options = {name: value for name, value in (OPTIONS | MORE[algorithm] | more).items() if value is not ABSENT}
    learner = Learner(model, algorithm=algorithm, total_steps=STEPS, **options)
    if learner.policy.value_head is not None:
        settle(learner.policy.value_head)
    return learner


def score(prompt: list[int], reply: list[int]) -> float:
    return sum((5 * a + 3 * i + prompt[-1]) % 7 for i, a in enumerate(reply)) / 7 - 0.1 * len(reply)


def prompts(step: int) -> list[list[int]]:
    return [[(7 * step + 5 * i + 3 * j) % 21 + 3 for j in range(1 + (step + i) % 4)] for i in range(4)]


def step(learner: Learner, number: int) -> tuple[list[list[int]], dict[str, float]]:
    """Two replies to each prompt (fixed ones if the algorithm learns from data) and the metrics of a step on them."""
    asked = [p for p in prompts(number) for _ in range(2)]
    data = [[(11 * number + 7 * i + k * k) % 21 + 3 for k in range(2 + i)] for i in range(8)]
    if learner.algorithm.source == "data":
        labels = [[float((number + i) % 2) for i in range(8)]] * learner.algorithm.needs.labels
        return data, learner.step(asked, data, *labels)
    tasks = [Task(f"{number}/{p}", p) for p in asked]
    replies = learner.play(tasks)
    scores: list[float | None] = [score(p, r.ids) for p, r in zip(asked, replies, strict=True)]
    ids, given = [r.ids for r in replies], zip(tasks, data, strict=True)
    if learner.algorithm.source == "both":
        replies = replies + [Rollout(task, 0, [Turn(task.prompt, own)], [""], demonstrated=True) for task, own in given]
        scores += [None] * len(data)
    return ids, learner.learn(replies, scores)


def run(name: str, learner: Learner | None = None, steps: int = STEPS) -> dict:
    """The numbers of a run: metrics of every step, the last replies, and two sums of each final parameter."""
    learner = learner or made(*RUNS[name])
    history, replies = {}, []
    for number in range(steps):
        replies, metrics = step(learner, number)
        for key in METRICS:
            if key in metrics:
                history.setdefault(key, []).append(metrics[key])
    ends = {name: p.detach().double() for name, p in learner.policy.named_parameters()}
    sums = {name: [float(p.sum()), float(p.square().sum())] for name, p in ends.items()}
    return {"replies": replies} | history | sums


def read(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def write(name: str) -> None:
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in run(name).items()]
    (FOLDER / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def farthest(mine: dict, right: dict) -> tuple[float, str]:
    """The largest difference relative to the number or to 0.001, whichever is larger, and the name of that number."""
    gaps = {
        name: max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(mine[name], right[name], strict=True))
        for name in right
        if name != "replies"
    }
    assert mine.keys() == right.keys()
    name = max(gaps, key=lambda n: gaps[n])
    return gaps[name], name
