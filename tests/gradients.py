"""The gradient of given replies: PPO's by its formulas, and what the library makes of the same batch."""

import copy
from functools import partial

import torch
from rigs import Caught, said
from toys import lm

from operant import Batch, Policy, Sampling, ValueOptions
from operant.models.options import ModelOptions
from operant.objectives import losses
from operant.objectives.advantages import normalised
from operant.rollouts.collate import collate
from operant.training.objective import Objective
from operant.training.optimizer import OptimizerOptions
from operant.training.update import UpdateOptions, update

LENGTHS = [3, 16, 4, 9, 5, 12, 7, 3, 10]
COEF, HORIZON = 0.1, 20
LOSS = partial(losses.ppo, clip=0.2, value_clip=0.2, value_coef=COEF)


def attempts() -> list[tuple[list[int], list[int]]]:
    draw = torch.Generator().manual_seed(5)

    def ids(n: int) -> list[int]:
        return torch.randint(3, 20, (n,), generator=draw).tolist()

    return [(ids(1 + i % 4), ids(n)) for i, n in enumerate(LENGTHS)]


def facts(i: int) -> dict[str, torch.Tensor]:
    """What is known of attempt i, [A] each: advantages, returns, old values, and how far old log-probs are off."""
    draw = torch.Generator().manual_seed(100 + i)
    return {name: torch.randn(LENGTHS[i], generator=draw) for name in ("advantages", "returns", "values", "shift")}


def batch_of(which: list[int], policy: Policy) -> Batch:
    """These attempts as a batch; the old log-probs are up to half a nat from the policy's, so that some are clipped."""
    pairs = attempts()
    batch = collate([said(*pairs[i]) for i in which], [0.0] * len(which))
    filled = {name: torch.zeros(batch.tokens.shape) for name in ("advantages", "returns", "values", "logprobs")}
    with torch.no_grad():
        now = policy.forward(batch).logprobs
    for row, i in enumerate(which):
        at, known = batch.actions[row], facts(i)
        for name in ("advantages", "returns", "values"):
            filled[name][row][at] = known[name]
        filled["logprobs"][row][at] = now[row][at] + 0.3 * known["shift"]
    return batch.with_(**filled)


def made_policy(kind: str = "gpt2", packing: str = "auto") -> Policy:
    torch.manual_seed(3)
    return Policy(lm(kind), value=ValueOptions(init="normal"), options=ModelOptions(packing=packing))


def truth(policy: Policy, which: list[int], per: str, *, whitened: bool = False) -> torch.Tensor:
    """The gradient by the formulas, in float64; `which` is the whole minibatch, whoever holds it."""
    twin, head = copy.deepcopy(policy.model).double(), copy.deepcopy(policy.value_head.net[0]).double()
    pairs, tokens = attempts(), sum(LENGTHS[i] for i in which)
    every = torch.cat([facts(i)["advantages"] for i in which]).double()
    total = torch.zeros((), dtype=torch.float64)
    for i in which:
        (prompt, reply), known = pairs[i], {k: v.double() for k, v in facts(i).items()}
        n = len(reply)
        out = twin(torch.tensor([prompt + reply]), output_hidden_states=True)
        span = slice(len(prompt) - 1, len(prompt) - 1 + n)
        now = out.logits[0, span].log_softmax(-1)[range(n), reply]
        value = (out.hidden_states[-1][0, span] @ head.weight.T + head.bias).squeeze(-1)
        ratio = torch.exp(now - (now.detach() + 0.3 * known["shift"]))
        advantage = known["advantages"]
        if whitened:
            advantage = (advantage - every.mean()) / (every.var(correction=0) + 1e-8).sqrt()
        surrogate = -torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2))
        near = known["values"] + (value - known["values"]).clamp(-0.2, 0.2)
        error = 0.5 * torch.maximum((value - known["returns"]) ** 2, (near - known["returns"]) ** 2)
        share = {"token": 1 / tokens, "episode": 1 / n / len(which), "sequence": 1 / len(which)}
        total = total + (surrogate + COEF * error).sum() * share.get(per, 1 / len(which) / HORIZON)
    total.backward()
    held = [*twin.parameters(), head.weight, head.bias]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in held])


def caught(policy: Policy, batch: Batch, *, per="token", micro=8192, minibatch=None, step=0, whitened=False):
    """The gradient of each optimizer step of one epoch, and how many forward passes with gradient it took."""
    optimizer = Caught([*policy.model.parameters(), *policy.value_head.parameters()])
    passes = []
    hook = policy.model.register_forward_pre_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    whiten = partial(normalised, unbiased=False) if whitened else None
    objective, plain = Objective(LOSS, per=per, horizon=HORIZON, whiten=whiten), OptimizerOptions(max_grad_norm=None)
    known = {"options": UpdateOptions(epochs=1, minibatch=minibatch, micro_tokens=micro), "sampling": Sampling()}
    update(policy, optimizer, batch, objective, optimizer_options=plain, step=step, **known)
    hook.remove()
    return optimizer.gradients, sum(passes)
