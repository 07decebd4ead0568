"""The engine `ray`: actors of Ray, on this machine or on a cluster, each with the policy's weights and an engine.

The prompts of a call are dealt over the actors by their estimated tokens. A reply depends on its prompt and key alone,
so it is the same however many actors there are; its log-probs may differ in their last bits, as batches are smaller.
An actor that dies is started again with the current weights, and its prompts are asked again, as the same batch.

The policy travels once. After an update only the weights that training changes are put into Ray's object store, once,
and every actor loads them.
"""

import inspect
from collections.abc import Mapping, Sequence
from copy import deepcopy
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from operant.engines import ENGINES
from operant.models.loading import Trained
from operant.models.policy import Policy
from operant.models.reference import shared
from operant.models.twins import deal
from operant.sampling import Sampling
from operant.sandbox.ray import ENGINE, RayActors, RaySession, answers, ask_all
from operant.types import Completion, EngineParts, OperantError, require

__all__ = ["RayEngine"]


class RayEngine(RayActors):
    """Generates in actors of Ray, which have weights of their own: a step may train while they generate.

    actors: number of actors. inner: the engine in each of them; None: native for a transformers model, otherwise own.
    inner_options: its options. address: the cluster (`host:port` or `auto`); None: a Ray of this process alone, which
    `close` ends. cpus, gpus: what Ray reserves for an actor; with a GPU, it generates there.
    threads: of torch, in each actor. parts: parts of a call for each actor; more than one balance replies of unequal
    lengths, as an actor that is done takes the next part. restarts: actors that may die within a call.
    Raises: OperantError for a wrong option, if Ray is not installed or does not answer, or lacks room for the actors.
    """

    own_weights = True
    """The actors have copies of the weights, which change only by `sync`."""

    def __init__(
        self,
        policy: Trained,
        *,
        actors: int = 2,
        inner: str | None = None,
        inner_options: Mapping[str, Any] | None = None,
        address: str | None = None,
        cpus: float = 1.0,
        gpus: float = 0.0,
        threads: int = 1,
        parts: int = 1,
        restarts: int = 3,
    ):
        self.check_options(locals())
        divided = isinstance(policy, Policy) and policy.shards is not None
        require(not divided, "engine=ray with parallel=fsdp: its actors have whole copies; use parallel=ddp")
        self.inner = inner or ("native" if isinstance(policy, Policy) else "own")
        options = dict(inner_options or {})
        try:
            inspect.signature(ENGINES.find(self.inner)).bind(policy, **options)
        except TypeError as error:
            raise OperantError(
                f"engine.inner_options={options} do not fit the engine {self.inner!r}: {error}"
            ) from error
        if EngineParts.of(ENGINES.find(self.inner)).generate_more is None:
            self.generate_more = None  # pyright: ignore[reportAttributeAccessIssue]
        self.about = {"inner": self.inner, "options": options, "threads": threads, "on_gpu": gpus > 0}
        self.parts, self.restarts = actors * parts, restarts
        self.session = RaySession(ENGINE, address=address, count=actors, cpus=cpus, gpus=gpus)
        self.actors = []
        try:
            self.session.begin()
            self._ship(policy, policy.version)
            self.actors = [self._start() for _ in range(actors)]
            answers([actor.ready.remote() for actor in self.actors], ENGINE)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def check_options(options: Mapping[str, object]) -> None:
        """Raises: OperantError for options that are out of range, or if Ray is not installed. No model is needed."""
        for name, least in (("actors", 1), ("threads", 1), ("parts", 1), ("restarts", 0)):
            require(least <= options[name] < inf, f"engine.{name}={options[name]!r}: it must be at least {least:g}")
        require(options["inner"] != "ray", "engine.inner=ray: an actor needs an engine of another kind, such as native")
        given = {name: options[name] for name in ("address", "cpus", "gpus")}
        RaySession(ENGINE, count=options["actors"], **given)

    def sync(self, policy: Trained, version: int) -> None:
        """Copy the weights of `policy`; later calls use them, also if one that is under way has not ended.

        If only the weights that training changes differ, they alone are sent.
        """
        import ray

        own = moving(policy, self.kept)
        if outline(policy, own) != self.outline:
            self._ship(policy, version)
            for actor in self.actors:
                actor.become.remote(self.skeleton, self.weights, version)
            return
        self.version, self.weights = version, ray.put(as_arrays(own))
        for actor in self.actors:
            actor.load.remote(self.weights, version)

    def generate(self, prompts: Sequence[list[int]], sampling: Sampling, keys: Sequence[int]) -> list[Completion]:
        """One reply for each prompt. Raises: OperantError as the inner engine, or if too many actors die."""
        sizes = [len(prompt) + sampling.max_tokens for prompt in prompts]
        return self._ask("generate", sizes, (prompts, keys), sampling)

    def generate_more(
        self,
        prompts: Sequence[list[int]],
        begun: Sequence[Sequence[int]],
        more: Sequence[int],
        sampling: Sampling,
        keys: Sequence[int],
    ) -> list[Completion]:
        """Further tokens of replies that have begun. Raises: OperantError as `generate`."""
        sizes = [len(prompt) + len(ids) + n for prompt, ids, n in zip(prompts, begun, more, strict=True)]
        return self._ask("generate_more", sizes, (prompts, begun, more, keys), sampling)

    def choose(
        self, prompts: Sequence[list[int]], options: Sequence[list[list[int]]], sampling: Sampling, keys: Sequence[int]
    ) -> list[tuple[int, Completion]]:
        """Draw one option for each prompt. Raises: OperantError as `generate`."""
        sizes = [len(prompt) + sum(map(len, among)) for prompt, among in zip(prompts, options, strict=True)]
        return self._ask("choose", sizes, (prompts, options, keys), sampling)

    def _ask(self, method: str, sizes: list[int], columns: Sequence[Sequence[object]], sampling: Sampling) -> list[Any]:
        """The answers of the actors for each row of the columns, in order. Parts are answered in any order."""
        require(self.actors, "engine ray is closed: make another one")
        parts = [part for part in deal(sizes, self.parts) if part]

        def ask(actor: Any, rows: list[int]) -> Any:
            return actor.ask.remote(method, [[column[row] for row in rows] for column in columns], sampling)

        remedy = "raise engine.restarts above the deaths to expect, or lower engine.actors if they ran out of memory"
        found = ask_all(self.actors, parts, ask, self._start, ENGINE, self.restarts, remedy)
        answered = {row: answer for rows, part in zip(parts, found) for row, answer in zip(rows, part, strict=True)}
        return [answered[row] for row in range(len(sizes))]

    def _ship(self, policy: Trained, version: int) -> None:
        import ray

        self.kept = shared(policy)
        own = moving(policy, self.kept)
        self.policy, self.outline, self.version = policy, outline(policy, own), version
        self.skeleton, self.weights = ray.put(without(policy, own, self.kept)), ray.put(as_arrays(own))

    def _start(self) -> Any:
        return self.session.actor(Actor, self.skeleton, self.weights, self.version, self.about)


class Actor:
    """What runs in a process of Ray: the policy, and an engine with its weights."""

    def __init__(self, skeleton: Trained, weights: Mapping[str, np.ndarray], version: int, about: Mapping[str, Any]):
        torch.set_num_threads(about["threads"])
        self.about = about
        self.become(skeleton, weights, version)

    def become(self, skeleton: Trained, weights: Mapping[str, np.ndarray], version: int) -> None:
        named = named_weights(skeleton)
        for name, array in weights.items():
            named[name].data = as_tensor(array, named[name])
        self.policy: Any = skeleton.to("cuda") if self.about["on_gpu"] else skeleton
        self.policy.version = version
        self.engine = ENGINES.find(self.about["inner"])(self.policy, **self.about["options"])
        self.engine.sync(self.policy, version)

    @torch.no_grad()
    def load(self, weights: Mapping[str, np.ndarray], version: int) -> None:
        """Use other weights of the same policy. They stay at their addresses."""
        named = named_weights(self.policy)
        for name, array in weights.items():
            named[name].copy_(as_tensor(array, named[name]))
        self.policy.version = version
        self.engine.sync(self.policy, version)

    def ask(self, method: str, given: list[list[object]], sampling: Sampling) -> list[Any]:
        """Call the engine. given: its arguments, but for the sampling, which comes before the keys."""
        return getattr(self.engine, method)(*given[:-1], sampling, given[-1])

    def ready(self) -> None:
        """Return once the actor has been made."""


def named_weights(policy: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that a policy generates with; a tied one appears once. A critic network is no part."""
    named, left_out = [*policy.named_parameters(), *policy.named_buffers()], isinstance(policy, Policy)
    return {name: weight for name, weight in named if not (left_out and name.startswith("critic."))}


def moving(policy: nn.Module, kept: Mapping[int, object]) -> dict[str, Tensor]:
    """The weights of a policy, by name, that are not among the objects `kept`."""
    return {name: weight.detach() for name, weight in named_weights(policy).items() if id(weight) not in kept}


def without(policy: Trained, own: Mapping[str, Tensor], kept: Mapping[int, object]) -> Trained:
    """A copy of the policy on the CPU, without its critic network; in place of the weights `own` it has one number."""
    memo: dict[int, object] = dict(kept) | {id(policy.tokenizer): policy.tokenizer}
    memo |= {id(policy.critic): None} if isinstance(policy, Policy) else {}
    for name, weight in named_weights(policy).items():
        made = weight.new_zeros((), device="cpu").expand(weight.shape) if name in own else weight.detach().cpu()
        parameter = isinstance(weight, nn.Parameter)
        memo[id(weight)] = nn.Parameter(made, requires_grad=weight.requires_grad) if parameter else made
    return deepcopy(policy, memo)


def as_arrays(weights: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Copies of weights as bytes, which Ray's actors on one machine read from the same memory."""
    return {name: weight.cpu().contiguous().view(-1).view(torch.uint8).numpy() for name, weight in weights.items()}


def as_tensor(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.tensor(array).view(like.dtype).view(like.shape)


def outline(policy: nn.Module, own: Mapping[str, Tensor]) -> object:
    """What is equal for policies that differ in the numbers of the weights `own` alone: class, config and shapes."""
    return type(policy).__name__, repr(getattr(policy, "config", None)), {name: x.shape for name, x in own.items()}
