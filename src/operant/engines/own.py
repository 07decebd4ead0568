"""The engine of a policy that generates its own replies."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import getattr_static

from operant.models.base import PolicyBase
from operant.sampling import Sampling
from operant.types import Completion, OperantError, require


class OwnEngine:
    """Calls `policy.generate`. `policy` is the policy in training, so `sync` copies no weights."""

    def __init__(self, policy: PolicyBase):
        if not hasattr(policy, "generate") or getattr_static(type(policy), "generate", None) is PolicyBase.generate:
            raise OperantError(f"policy {type(policy).__name__} lacks a method `generate`: write it, or name an engine")
        self.sync(policy, policy.version)

    def sync(self, policy: PolicyBase, version: int) -> None:
        self.policy, self.version = policy, version

    def generate(self, prompts: Sequence[list[int]], sampling: Sampling, keys: Sequence[int]) -> list[Completion]:
        made = self.policy.generate(prompts, sampling, keys)
        counts = f"{len(made)} completions for {len(prompts)} prompts: return one each, in their order"
        require(len(made) == len(prompts), f"{type(self.policy).__name__}.generate returned {counts}")
        return [replace(completion, version=self.version) for completion in made]

    def choose(
        self, prompts: Sequence[list[int]], options: Sequence[list[list[int]]], sampling: Sampling, keys: Sequence[int]
    ) -> list[tuple[int, Completion]]:
        choose: Callable[..., list[tuple[int, Completion]]] | None = getattr(self.policy, "choose", None)
        if choose is None:
            raise OperantError(f"{type(self.policy).__name__} has no method choose, which the world's choices need")
        made = choose(prompts, options, sampling, keys)
        return [(index, replace(completion, version=self.version)) for index, completion in made]
