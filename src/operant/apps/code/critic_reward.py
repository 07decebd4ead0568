r"""A critic's share in a reward: what each token of a program is paid for the program's outcome (CodeRL).

With the score $r$ of a program $W$ by another reward, its outcome $y$, the critic's distribution $q_t$ at the position
that has read $t$ tokens and its prediction $p_t$ for them (`outcome_critic`), token $t$ is paid, by `returns`:

| returns | paid to token $t$ |
|---|---|
| `coderl` | $q_{t-1}(y) (r(W) - r(W_b))$, with $W_b$ the policy's greedy reply (the code of arXiv:2207.01780) |
| `coderl_after` | $q_t(y) (r(W) - r(W_b))$: of the state that has read the token, and not of that which predicts it |
| `group` | $q_t(y) (r(W) - \bar r)$, with $\bar r$ the mean over the replies to the same prompt |
| `difference` | $V_t - V_{t-1}$, and the last token also $r(W) - V_T$; $V_t = \sum_c p_t(c)\, v_c$ |
| `plain` | $r(W)$, without the critic |

- With the discount `advantage.gamma=0` a token's advantage is what it is paid, so that the loss of `reinforce` is
  CodeRL's sum of $-\log\pi(a_t)\, r_t$; the method `coderl` has that as its default. The payments of `difference` sum
  to $r - V_0$ and are differences of a potential, so they also suit `gamma=1`: what is still to come is then
  $r - V_{t-1}$, the score less the critic's value of the state.
- $q > 0$, so the sign of an update comes from the score alone. A return of `coderl` is 0 where the reply has the same
  score as the greedy one, and at most 0 where the greedy program passes: it then only pushes down.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from statistics import fmean
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from operant import distributed
from operant.apps.code.critic_score import CriticScore, Reading
from operant.apps.code.outcome_critic import PASSED
from operant.rewards import resolve
from operant.rewards.evaluate import Judged, check, check_greedy, judge, name_of
from operant.rewards.wrapper import Wrapper, held_out
from operant.types import OUTCOMES, Batch, OperantError, RewardFn, Rollout, Total, require

__all__ = ["CriticReward"]

RETURNS = ("coderl", "coderl_after", "group", "difference", "plain")
WORTH = (-1.0, -0.6, -0.3, 1.0)
"""What CodeRL pays for each of `OUTCOMES`."""


class CriticReward(Wrapper):
    """Pays each token of a program by its outcome and a critic: `CriticReward("runs/critic", tests, returns="group")`.

    path: the critic, a run or an exported folder. reward: the reward that scores whole replies and names their
    outcomes, as `tests` does. returns: see above. worth: of `difference`, the value v of each outcome, from a compile
    error to a pass. refresh: learning rate at which the critic is trained further (AdamW, one pass over the replies of
    each step after they were paid, `batch` at a time); 0: it stays as it is. batch: programs of a pass.
    Held-out replies are judged by the other reward alone.
    Raises: OperantError for an unknown `returns`, or a number that is out of range.
    """

    __name__ = "critic"
    reads_tokens = True

    def __init__(
        self,
        path: str,
        reward: RewardFn,
        *,
        returns: str = "coderl",
        worth: Sequence[float] = WORTH,
        refresh: float = 0.0,
        batch: int = 32,
        device: str | None = None,
    ):
        require(returns in RETURNS, f"critic:{path} with returns={returns!r}: it must be one of {', '.join(RETURNS)}")
        if len(worth) != len(OUTCOMES):
            raise OperantError(f"critic:{path} with worth={worth!r}: give a number for each of {', '.join(OUTCOMES)}")
        require(refresh >= 0, f"critic:{path} with refresh={refresh!r}: a learning rate must be at least 0")
        self.scorer, self.reward, self.returns = CriticScore(path, batch=batch, device=device), reward, returns
        self.worth = torch.tensor(list(worth), dtype=torch.float64)
        self.refresh = refresh
        self.greedy: list[Rollout] = []

    @property
    def wants_greedy(self) -> bool:
        """Whether it needs the policy's greedy reply to each prompt (`see_greedy`)."""
        return self.returns in ("coderl", "coderl_after")

    def for_held_out(self) -> RewardFn:
        """The reward that pays, without the critic."""
        return held_out(self.reward)

    def see_greedy(self, rollouts: list[Rollout]) -> None:
        """Take the greedy replies to the prompts of the next call."""
        self.greedy[:] = rollouts

    def check(self) -> None:
        """Load the critic. Raises: OperantError if it cannot be loaded, or is refreshed on several ranks."""
        check(self.reward)
        self.scorer.check()
        if self.refresh and distributed.world() > 1:
            raise OperantError(
                f"critic:{self.scorer.path} with refresh={self.refresh:g} on {distributed.world()} ranks: each would "
                "train another critic; leave it out, or train on one rank"
            )

    def judged(self, rollouts: list[Rollout]) -> Judged:
        """Pay each token. A reply from which the other reward abstains is left out.

        Raises: OperantError if that reward names no outcome, or scores each token; or for `coderl` without greedy
        replies, and `group` without several replies to a prompt.
        """
        judged = judge(self.reward, rollouts)
        if any(isinstance(score, list) for score in judged.scores):
            raise OperantError(f"reward {name_of(self.reward)!r} scores each token: a critic needs one score a reply")
        known = [i for i, score in enumerate(judged.scores) if score is not None]
        true = [outcome_of(judged.remark(i).classes, self.reward, rollouts[i]) for i in known]
        attempts = [(problem_of(rollouts[i]), rollouts[i].reply) for i in known]
        baselines = self._baselines(rollouts, judged)
        scores: list[Total] = [None] * len(rollouts)
        shown: list[list[float] | None] = [None] * len(rollouts)
        right: list[float | None] = [None] * len(rollouts)
        passed: list[float | None] = [None] * len(rollouts)
        for i, outcome, reading in zip(known, true, self.scorer.read(attempts), strict=True):
            places = self._places(rollouts[i], reading)
            before = [0.0] * (rollouts[i].count - len(places))
            right[i] = float(int(reading.pooled[-1].argmax()) == outcome)
            passed[i] = float(reading.pooled[-1, PASSED])
            shown[i] = before + reading.pooled[places, PASSED].tolist()
            score, baseline = judged.scores[i], baselines[i]
            if baseline is not None and not isinstance(score, list) and score is not None:
                scores[i] = before + self._paid(reading, places, outcome, score, baseline) or 0.0
        if self.refresh and known:
            self._learn(self.scorer.rows(attempts), true)
        own = {"critic/accuracy": right, "critic/passed": passed}
        return Judged(scores, judged.parts | own, judged.outcomes, judged.notes, judged.remarks, shown)

    def _baselines(self, rollouts: list[Rollout], judged: Judged) -> list[float | None]:
        """What is subtracted from the score of each reply; None: it is unknown, and the reply is left out."""
        if self.wants_greedy:
            paid = judge(self.reward, self.greedy).scores
            greedy = dict(zip((one.task.id for one in self.greedy), paid, strict=True))
            check_greedy(self, rollouts, greedy)
            return [greedy[rollout.task.id] for rollout in rollouts]  # type: ignore[misc]  # no list, as above
        if self.returns != "group":
            return [0.0] * len(rollouts)
        of_group: dict[int, list[float]] = defaultdict(list)
        for rollout, score in zip(rollouts, judged.scores):
            if score is not None and not isinstance(score, list):
                of_group[rollout.group].append(score)
        if of_group and max(map(len, of_group.values())) == 1:
            raise OperantError("returns=group with one reply to each prompt pays nothing: give --samples 2 or more")
        return [fmean(of_group[rollout.group]) if rollout.group in of_group else None for rollout in rollouts]

    def _places(self, rollout: Rollout, reading: Reading) -> list[int]:
        """For each action of the last turn, the critic's position that has read the program until its end."""
        turn = rollout.turns[-1]
        if turn.options is not None or not turn.trained:  # a choice among given replies is one action
            return [len(reading.ends) - 1] * turn.count
        if self.tokenizer is None:
            raise OperantError(
                "reward 'critic' needs the policy's tokenizer, to place its scores: a run passes it; elsewhere "
                "call operant.rewards.read_with(reward, policy.tokenizer)"
            )
        return reading.after(turn.action, self.tokenizer)

    def _paid(self, reading: Reading, places: list[int], outcome: int, score: float, baseline: float) -> list[float]:
        """What each action of the last turn is paid."""
        if self.returns == "plain":
            return [score] * len(places)
        if self.returns != "difference":
            read = [0, *places] if self.returns == "coderl" else places  # the state that predicts, or has read
            return (reading.own[read[: len(places)], outcome] * (score - baseline)).tolist()
        values = reading.pooled @ self.worth
        paid = values[places].diff(prepend=values[:1])
        if len(paid):
            paid[-1] += score - values[places[-1]]
        return paid.tolist()

    def _learn(self, rows: list[tuple[list[int], list[int]]], true: list[int]) -> None:
        """One pass over the programs, an optimizer step for each `batch` of them."""
        critic, size = self.scorer.critic, self.scorer.batch
        for i in range(0, len(rows), size):
            batch = Batch.given([prompt for prompt, _ in rows[i : i + size]], [own for _, own in rows[i : i + size]])
            out = critic.forward(batch).outcomes
            assert out is not None  # a critic returns them
            last = batch.mask.sum(1).to(out.device) - 1
            pooled = out[torch.arange(len(out), device=out.device), last]
            loss = cross_entropy(pooled, torch.tensor(true[i : i + size], device=out.device))
            self.optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(critic.trainable(), 1.0)
            if not bool(torch.isfinite(norm)):
                raise OperantError("the critic's gradient is NaN or infinite: lower its learning rate, refresh")
            self.optimizer.step()
            self.optimizer.zero_grad()

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW over the critic's weights, made when it is first used."""
        return torch.optim.AdamW(self.scorer.critic.trainable(), lr=self.refresh, weight_decay=0.0)

    def state_dict(self) -> dict[str, object]:
        """The weights and the optimizer of a critic that is refreshed, and the state of the other reward."""
        inner = {"reward": self.reward.state_dict()} if hasattr(self.reward, "state_dict") else {}  # type: ignore
        if not self.refresh:
            return inner
        weights = {name: p.detach() for name, p in self.scorer.critic.named_parameters() if p.requires_grad}
        return inner | {"weights": weights, "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises: OperantError if the weights are those of another critic."""
        if "reward" in state:
            self.reward.load_state_dict(state["reward"])  # type: ignore
        if "weights" not in state:
            return
        own = {name: p for name, p in self.scorer.critic.named_parameters() if p.requires_grad}
        if {k: p.shape for k, p in own.items()} != {k: x.shape for k, x in state["weights"].items()}:
            raise OperantError(f"{self.scorer.path} is another critic than the run was started with")
        for name, weight in own.items():
            weight.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])


def outcome_of(classes: Sequence[str], reward: RewardFn, rollout: Rollout) -> int:
    """The number of the outcome among the classes that a reward has named."""
    found = [OUTCOMES.index(name) for c in classes if (name := c.rpartition("/")[2]) in OUTCOMES]
    if len(found) == 1:
        return found[0]
    raise OperantError(
        f"reward {name_of(reward)!r} names {len(found) or 'no'} outcomes of task {rollout.task.id!r} "
        f"({', '.join(classes) or 'none'}): a critic needs one of {', '.join(OUTCOMES)} (a Judgement's outcome), as "
        "the reward `tests` names it"
    )


def problem_of(rollout: Rollout) -> object:
    """What stands before the last reply: text, or messages."""
    messages = any(isinstance(message, dict) for message in rollout.task.prompt)
    return rollout.messages[:-1] if messages else rollout.text.removesuffix(rollout.reply)


def critic(
    path: str,
    *,
    of: Any = "tests",
    of_options: Mapping[str, Any] | None = None,
    returns: str = "coderl",
    worth: tuple[float, ...] = WORTH,
    refresh: float = 0.0,
    batch: int = 32,
    device: str | None = None,
) -> RewardFn:
    """The reward `of`, with `of_options`, paid to each token as a critic says; the other options are those of
    `CriticReward`."""
    inner = resolve(of, of_options)
    return CriticReward(path, inner, returns=returns, worth=worth, refresh=refresh, batch=batch, device=device)
