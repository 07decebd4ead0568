"""An engine: the native one, asked several times for each prompt, of which the likeliest reply is kept."""

from collections.abc import Sequence
from typing import Any

from operant import Sampling
from operant.engines.native.engine import NativeEngine
from operant.types import Completion


class BestOf:
    """Keeps the likeliest of `tries` replies. A server elsewhere would be called here in the same way.

    The kept replies are no sample of the policy, which a run's diagnosis says (other_sampler); use it to evaluate.
    Options: --engine best_of --engine.tries 4
    """

    def __init__(self, policy: Any, *, tries: int = 4):
        self.inner, self.tries = NativeEngine(policy), tries

    def sync(self, policy: Any, version: int) -> None:
        """Take new weights: a server would be sent them."""
        self.inner.sync(policy, version)

    def generate(self, prompts: Sequence[list[int]], sampling: Sampling, keys: Sequence[int]) -> list[Completion]:
        """One completion for each prompt, in their order."""
        several = [prompt for prompt in prompts for _ in range(self.tries)]
        made = self.inner.generate(several, sampling, [key + i for key in keys for i in range(self.tries)])
        groups = [made[i : i + self.tries] for i in range(0, len(made), self.tries)]
        return [max(group, key=lambda one: sum(one.logprobs)) for group in groups]

    def choose(self, prompts: Any, options: Any, sampling: Sampling, keys: Any) -> list[tuple[int, Completion]]:
        """Draw one of the given replies for each prompt."""
        return self.inner.choose(prompts, options, sampling, keys)
