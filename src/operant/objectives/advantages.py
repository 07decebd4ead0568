"""Advantages: how much better than expected each action was. Pure functions over [E, A], and conversion to [B, T].

The recursions run over the actions of an episode only. Padding and the environment's text are left out, so they can
neither decay a reward nor change a mean.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from operant import distributed
from operant.tally import ROUNDING
from operant.types import Batch, OperantError, require


@dataclass(frozen=True)
class Turns:
    """The turns of E episodes of A actions; K is the largest number of turns of an episode. Padding is 0."""

    place: Tensor
    """[E, A] int: the number of the action's turn among the turns of its episode that have actions; K at padding."""
    count: Tensor
    """[E, K] int: the number of actions of each turn."""

    @staticmethod
    def of(turns: Tensor) -> "Turns":
        """Make it from the turn of each action, [E, A] as in `Batch.turns`, -1 at padding."""
        opens = turns != torch.cat([torch.full_like(turns[:, :1], -1), turns[:, :-1]], 1)
        number = opens.cumsum(1) - 1
        most = int(torch.where(turns >= 0, number, -1).max()) + 1 if turns.numel() else 0
        place = torch.where(turns >= 0, number, most)
        return Turns(place, place.new_zeros(len(turns), most + 1).scatter_add(1, place, place * 0 + 1)[:, :most])

    @property
    def position(self) -> Tensor:
        """[E, A] int: the index of each action within its turn."""
        begins = torch.cat([self.count.cumsum(1) - self.count, self.count.sum(1, keepdim=True)], 1)
        return torch.arange(self.place.shape[1], device=self.place.device) - begins.gather(1, self.place)

    def summed(self, x: Tensor) -> Tensor:
        """[E, A] -> [E, K] the sum over each turn."""
        most = self.count.shape[1]
        return x.new_zeros(len(x), most + 1).scatter_add(1, self.place, x)[:, :most]

    def mean(self, x: Tensor) -> Tensor:
        """[E, A] -> [E, K] the mean over each turn."""
        return self.summed(x) / self.count.clamp(min=1)

    def first(self, x: Tensor) -> Tensor:
        """[E, A] -> [E, K] at the first action of each turn."""
        return self.summed(torch.where(self.position == 0, x, 0))

    def last(self, x: Tensor) -> Tensor:
        """[E, A] -> [E, K] at the last action of each turn."""
        follows = torch.cat([self.place[:, 1:], torch.full_like(self.place[:, :1], -1)], 1)
        return self.summed(torch.where(self.place != follows, x, 0))

    def spread(self, x: Tensor) -> Tensor:
        """[E, K] -> [E, A] the number of its turn for each action."""
        return torch.cat([x, torch.zeros_like(x[:, :1])], 1).gather(1, self.place) if x.shape[1] else x


def gae(rewards: Tensor, values: Tensor, next_values: Tensor, discounts: Tensor, lambdas: Tensor) -> Tensor:
    """Generalised advantage estimation (arXiv:1506.02438, equation 16), all arguments [E, A].

    delta_a = r_a + discount_a * next_value_a - value_a;  A_a = delta_a + discount_a * lambda_a * A_{a+1}.
    `discounts[e, a]` stands between action a and the next one, so it alone says where turns and episodes end.
    """
    surprise = rewards + discounts * next_values - values
    decay = discounts * lambdas
    advantages = torch.zeros_like(rewards)
    ahead = rewards.new_zeros(len(rewards))
    for a in reversed(range(rewards.shape[1])):
        advantages[:, a] = ahead = surprise[:, a] + decay[:, a] * ahead
    return advantages


def by_turn(turns: Tensor, inside: float, between: float, numbers: torch.dtype = torch.float32) -> Tensor:
    """[E, A] a rate for each action: `inside` if another token of its turn follows, `between` at the end of a turn."""
    rates = torch.tensor([inside, between, 0.0], dtype=numbers, device=turns.device)
    following = torch.cat([turns[:, 1:], torch.full_like(turns[:, :1], -1)], 1)
    return torch.where(turns < 0, rates[2], torch.where(following == turns, rates[0], rates[1]))


def whiten(x: Tensor, where: Tensor, *, unbiased: bool = False, shift_mean: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) of the numbers where `where` is True, over all ranks together; 0 elsewhere.

    `x` and `where` (bool) have the same shape, which is also that of the result.
    `unbiased`: divide the variance by n - 1, as TRL and RL4LMs do. `shift_mean=False` keeps the mean. A deviation that
    is no larger than rounding counts as 0.
    """
    mean, deviation = moments(x, where, unbiased=unbiased)
    return _whitened(x, where, mean, deviation, keep=0.0 if shift_mean else mean)


def _whitened(x: Tensor, where: Tensor, mean: float, deviation: float, keep: float = 0.0) -> Tensor:
    """(x - mean) / deviation + keep at `where`, 0 elsewhere. With a deviation of 0, the result is `keep`."""
    centred = x[where].double() - mean
    scaled = centred / deviation if deviation else torch.zeros_like(centred)
    return torch.zeros_like(x).masked_scatter(where, (scaled + keep).to(x.dtype))


def moments(x: Tensor, where: Tensor, *, unbiased: bool = False) -> tuple[float, float]:
    """Mean and sqrt(var + 1e-8) of the numbers of `x` where `where` (bool, in the same shape) is True, over all ranks.

    They are computed in two passes in float64. The deviation is 0 if it is no larger than rounding, or if there are no
    numbers. Every rank must call.
    """
    picked = x[where].double()
    count = distributed.total_float(float(picked.numel()))
    if count == 0:
        return 0.0, 0.0
    mean = distributed.total_float(float(picked.sum())) / count
    square = distributed.total_float(float(((picked - mean) ** 2).sum()))
    variance = square / max(count - unbiased, 1.0)
    size = distributed.largest_float(float(picked.abs().max()) if picked.numel() else 0.0)
    return mean, (variance + 1e-8) ** 0.5 if variance**0.5 > ROUNDING * size else 0.0


def normalised(batch: Batch, where: Tensor, *, unbiased: bool = False) -> Batch:
    """The batch with its advantages whitened over `where` ([B, T] bool), and `price` scaled with them."""
    mean, deviation = moments(batch.advantages, where, unbiased=unbiased)
    price = batch.price / deviation if batch.price is not None and deviation else batch.price
    return batch.with_(advantages=_whitened(batch.advantages, where, mean, deviation), price=price)


def episode_index(batch: Batch) -> Tensor:
    """[E, A] flat indices (row * T + column) of each episode's actions, in order of time; -1 is padding."""
    row, column = batch.actions.nonzero(as_tuple=True)
    order = torch.argsort(batch.episodes[row], stable=True)
    flat = (row * batch.tokens.shape[1] + column)[order]
    counts = torch.bincount(batch.episodes[row], minlength=len(batch.bootstrap))
    if not len(counts):
        return flat.new_zeros(0, 0)
    return torch.nn.utils.rnn.pad_sequence(list(flat.split(counts.tolist())), batch_first=True, padding_value=-1)


def gather(x: Tensor, index: Tensor, fill: float = 0) -> Tensor:
    """[B, T] -> [E, A]."""
    return torch.where(index >= 0, x.flatten()[index.clamp(min=0)], fill)


def scatter(x: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    """[E, A] -> [B, T], 0 off actions."""
    out = x.new_zeros(shape).flatten()
    out[index[index >= 0]] = x[index >= 0]
    return out.view(shape)


def discounts_of(batch: Batch, index: Tensor, gamma: float, turn_gamma: float) -> Tensor:
    """[E, L] what each action of an episode discounts the next one by: see `with_gae`."""
    discounts = by_turn(gather(batch.turns, index, -1), gamma, gamma * turn_gamma, batch.values.dtype)
    if batch.skipped is None:
        return discounts
    return discounts * (gamma * turn_gamma) ** gather(batch.skipped, index).to(discounts)


def with_gae(
    batch: Batch,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    turn_gamma: float = 1.0,
    turn_lam: float | None = None,
    level: str = "token",
    whiten_scope: str = "rollout",
    unbiased: bool = False,
    whiten_rewards: bool = False,
) -> Batch:
    """GAE over whole episodes.

    The discount is `gamma` between the tokens of a reply, and `gamma * turn_gamma` between the last token of a turn and
    the next turn or the bootstrapped state of a cut episode; lambda there is `turn_lam` (None: `lam`). Each turn in
    between that is not trained on discounts by `gamma * turn_gamma` once more; lambda applies once, because no value is
    estimated there. `level`: token, or each turn as one action, whose reward is sum_t gamma^t r_t and whose value is
    that of its first token (`turn_first`) or the mean over its tokens (`turn_mean`). All tokens of a turn then have its
    advantage and its target of the critic. `whiten_scope`: rollout | minibatch (done by the update) | none.
    `whiten_rewards`: scale rewards, without changing their mean.
    Raises: OperantError for an unknown `level` or `whiten_scope`, or a rate outside 0..1.
    """
    if level not in ("token", "turn_first", "turn_mean"):
        raise OperantError(f"advantage.level={level!r}: it must be token, turn_first or turn_mean")
    check_options(whiten_scope, gamma=gamma, lam=lam, turn_gamma=turn_gamma, turn_lam=turn_lam or 0.0)
    rewards, price = batch.rewards, batch.price
    if whiten_rewards:
        mean, deviation = moments(rewards, batch.actions, unbiased=unbiased)
        rewards = _whitened(rewards, batch.actions, mean, deviation, keep=mean)
        price = price / deviation if price is not None and deviation else price
    index = episode_index(batch)
    turns, values = gather(batch.turns, index, -1), gather(batch.values, index)
    discounts = discounts_of(batch, index, gamma, turn_gamma)
    lambdas = by_turn(turns, lam, lam if turn_lam is None else turn_lam, values.dtype)
    rewards, lengths, shape = gather(rewards, index), (index >= 0).sum(1), batch.tokens.shape
    whole = None if level == "token" else Turns.of(turns)
    if whole is not None:
        inside = gamma ** whole.position.to(values)
        rewards, lengths = whole.summed(rewards * inside), (whole.count > 0).sum(1)
        values = whole.first(values) if level == "turn_first" else whole.mean(values)
        discounts, lambdas = whole.last(discounts), whole.last(lambdas)
        price = price * scatter(inside, index, shape) if price is not None else None
    advantages = gae(rewards, values, next_values(values, lengths, batch.bootstrap), discounts, lambdas)
    returns = advantages + values
    if whole is not None:
        advantages, returns = whole.spread(advantages), whole.spread(returns)
    batch = batch.with_(
        advantages=scatter(advantages, index, shape), returns=scatter(returns, index, shape), price=price
    )
    return normalised(batch, batch.actions, unbiased=unbiased) if whiten_scope == "rollout" else batch


def check_options(whiten_scope: str = "none", **rates: float) -> None:
    """Raises: OperantError for an unknown `whiten_scope`, and for a rate outside 0..1."""
    if whiten_scope not in ("rollout", "minibatch", "none"):
        raise OperantError(f"advantage.whiten_scope={whiten_scope!r}: it must be rollout, minibatch or none")
    for name, rate in rates.items():
        require(0 <= rate <= 1, f"advantage.{name}={rate}: it must lie in 0..1")


def with_returns(batch: Batch, *, gamma: float = 1.0, turn_gamma: float = 1.0, whiten_scope: str = "none") -> Batch:
    """Give every action the discounted sum of the rewards from it on: GAE with lambda 1 and values of 0.

    `gamma`, `turn_gamma` and `whiten_scope`: see `with_gae`. Raises: OperantError as `with_gae`.
    """
    check_options(whiten_scope, gamma=gamma, turn_gamma=turn_gamma)
    plain = batch.with_(values=torch.zeros_like(batch.rewards), bootstrap=torch.zeros_like(batch.bootstrap))
    found = with_gae(plain, gamma=gamma, lam=1.0, turn_gamma=turn_gamma, whiten_scope=whiten_scope)
    return batch.with_(advantages=found.advantages, price=found.price)


def next_values(values: Tensor, lengths: Tensor, bootstrap: Tensor) -> Tensor:
    """[E, A] the value of the state after each action: that of the next action, and `bootstrap` [E] after the last."""
    if not values.shape[1]:
        return values
    ahead = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    last = (lengths - 1).clamp(min=0)[:, None]
    return ahead.scatter(1, last, bootstrap.to(values)[:, None])
