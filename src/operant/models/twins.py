"""Two halves of a batch side by side: one in this thread, one in a second thread with a twin of the model.

Threads that share a matrix product wait for each other in every product, by spinning: on a busy machine a step takes
several times as long as with one thread. Halves wait for each other once. A twin shares the weights, and no gradients.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from copy import deepcopy
from typing import TypeVar

import torch
from torch import Tensor, nn

from operant import distributed, machine
from operant.models.base import PolicyBase
from operant.models.kernels import hooked
from operant.models.policy import Policy

First = TypeVar("First")
Second = TypeVar("Second")
MOST = 1 << 26
"""Parameters of the largest model that is computed by halves. Both read all weights, and a twin has gradients too."""
LEAST = 1e8
"""Multiplications of a matrix product from which on halves pay: with less, threads mostly wait for Python's lock."""
LONG = 1 << 20
"""Numbers from which on a pass over them is worth a second thread: with less, it has hardly begun."""
_twins: ContextVar[dict[int, tuple[Policy, list[tuple[Tensor, Tensor]]]] | None] = ContextVar("twins", default=None)
"""By the id of a policy its twin, and their parameters; None outside `side_by_side`."""


def in_halves(model: nn.Module, tokens: int) -> bool:
    """Whether batches of so many tokens are computed in two halves: by sizes and torch's number of threads alone."""
    pays = sum(p.numel() for p in model.parameters()) <= MOST and tokens * machine.largest(model) >= LEAST
    return pays and torch.get_num_threads() > 1 and distributed.world() == 1


@contextmanager
def side_by_side(policy: Policy | PolicyBase, tokens: int) -> Iterator[None]:
    """Inside this context, torch has as many threads as so many tokens are worth, and small policies have twins.

    With twins each thread has half of them, also between the halves, where others would wait in a loop.
    """
    halved = isinstance(policy, Policy) and in_halves(policy.model, tokens)
    count = torch.get_num_threads() // 2 if halved else machine.worth(tokens, machine.largest(policy.model))
    token = _twins.set({} if halved else None)
    try:
        with machine.threads(count):
            yield
    finally:
        _twins.reset(token)


def twin_of(policy: object) -> Policy | None:
    """The twin of a policy inside `side_by_side`, without gradients; None outside, and where there can be none.

    A parameter with a hook has none: the hook would see half of its gradient.
    """
    twins = _twins.get()
    if twins is None or not isinstance(policy, Policy) or policy._twice:
        return None
    if id(policy) not in twins:
        known = {id(p): nn.Parameter(p.data, requires_grad=p.requires_grad) for p in policy.parameters()}
        pairs = [(p, known[id(p)]) for p in policy.parameters()]
        known |= {id(thing): thing for thing in (*policy.buffers(), policy.tokenizer)}
        twins[id(policy)] = deepcopy(policy, known), pairs
    twin, pairs = twins[id(policy)]
    if any(hooked(mine) for mine, _ in pairs):
        return None
    twin.modes = policy.modes
    for mine, other in pairs:
        other.requires_grad, other.grad = mine.requires_grad, None
    return twin


def twins_of(*policies: object) -> list[Policy | None] | None:
    """The twins of policies, None for None; None where one of them has no twin, so that nothing is halved."""
    found = [twin_of(policy) for policy in policies]
    missing = [policy for policy, twin in zip(policies, found, strict=True) if policy is not None and twin is None]
    return None if missing else found


def both(first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
    """The results of two calls, of which `second` runs in a thread of its own, with as many of torch's threads.

    Raises what one of them raises, after both have ended.
    """
    gradients, inside, count = torch.is_grad_enabled(), copy_context(), torch.get_num_threads()

    def beside() -> Second:
        with torch.set_grad_enabled(gradients):
            return inside.run(second)

    with ThreadPoolExecutor(1, "twin", torch.set_num_threads, (count,)) as thread:
        other = thread.submit(beside)
        return first(), other.result()


def dealt(groups: Iterable[list[int]], lengths: Sequence[int]) -> list[list[list[int]]]:
    """Groups of rows in two halves with nearly as many tokens."""
    groups = [*groups]
    sizes = [sum(lengths[row] for row in rows) for rows in groups]
    return [[groups[index] for index in half] for half in deal(sizes, 2)]


def deal(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """The indices of `sizes` in so many parts of nearly equal sums, each in order.

    The largest comes first, and goes to the part that is smallest so far, so the parts depend on the sizes alone.
    """
    dealt, sums = [list[int]() for _ in range(parts)], [0] * parts
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        smallest = sums.index(min(sums))
        dealt[smallest].append(index)
        sums[smallest] += sizes[index]
    return [sorted(part) for part in dealt]


def in_parts(run: Callable[[list[Tensor]], object], tensors: list[Tensor]) -> object:
    """Call `run` with the tensors: with two parts of them side by side where twins are, if they are long."""
    sizes = [tensor.numel() for tensor in tensors]
    if not _twins.get() or sum(sizes) < LONG:
        return run(tensors)
    first, second = ([tensors[index] for index in part] for part in deal(sizes, 2))
    return both(lambda: run(first), lambda: run(second))


@torch.no_grad()
def add_gradients(policy: nn.Module, twin: nn.Module) -> None:
    """Add the gradients of the twin to those of the policy."""
    for mine, other in zip(policy.parameters(), twin.parameters(), strict=True):
        if other.grad is not None:
            mine.grad = other.grad if mine.grad is None else mine.grad.add_(other.grad)
            other.grad = None
