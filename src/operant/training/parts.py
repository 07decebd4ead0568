"""What a learner is made of: its policy, engine, world and options, and all state that changes during training."""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch
from torch.optim import Optimizer

from operant import machine
from operant.algorithms import DEFAULT, Algorithm, find, left_out_message
from operant.algorithms import preset as find_preset
from operant.engines import ENGINES
from operant.envs import SingleTurn
from operant.import_by_name import Lazy
from operant.models.logprobs import DIVERGENCES
from operant.models.policy import Policy
from operant.models.policy_state import PolicyState
from operant.models.reference import PolicyCopy
from operant.objectives.advantages import normalised
from operant.objectives.kl import controller
from operant.options import values
from operant.rewards.shaping import RunningMoments
from operant.rollouts.play import Attempts
from operant.sampling import Sampling
from operant.training.nonfinite import RefusedStep
from operant.training.objective import PER, Objective
from operant.training.options import OptionGroups, check_length, check_reference, learner_options
from operant.training.own_optimizer import OwnOptimizer, check_given, with_kind
from operant.training.setup import configured_sampling, load_trained_policy, make_copies, prepare_engine, tell_room
from operant.training.update import find_rule
from operant.types import Batch, Engine, EngineParts, Env, EnvBase, OperantError, Rollout, require, shown, with_defaults

if TYPE_CHECKING:
    from operant.keywords import LearnerArguments, OptimizerKeywords

SOMETIMES = Lazy(
    {
        "wanted": "operant.rollouts.prompts:Wanted",
        "buffer": "operant.training.replay_buffer:ReplayBuffer",
        "check": "operant.training.sharding:check",
        "divide": "operant.training.sharding:divide",
        "updating": "operant.training.sharding:updating",
        "optimizer": "operant.training.sharding:DividedOptimizer",
        "bundle": "operant.training.refused_step:write",
        "plain_option": "operant.training.saved_learner:plain_option",
        "save": "operant.training.saved_learner:save",
        "external": "operant.rollouts.external:to_rollouts",
        "load": "operant.training.saved_learner:load",
    }
)
"""What only some learners need, by their method, on several ranks, from elsewhere, or on disk; imported for these."""


def name_of_model(model: object) -> str | None:
    """The name of a model, which another process can load; for a Python object, its class in angle brackets."""
    return model if model is None else str(model) if isinstance(model, (str, Path)) else f"<{type(model).__name__}>"


class Progress:
    """The number of steps, of episodes that were trained on, and of refused steps in a row up to now."""

    def __init__(self) -> None:
        self.step, self.episodes, self.refused = 0, 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "episodes": self.episodes, "refused": self.refused}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.step, self.episodes, self.refused = state["step"], state["episodes"], state.get("refused", 0)


@dataclass(frozen=True)
class LastStep:
    """The data of the last training step."""

    rollouts: list[Rollout]
    """All rollouts that were passed to the step."""
    scores: Sequence[Any]
    """One for each rollout, as the reward returned it."""
    batch: Batch
    places: list[int]
    """The indices of the rollouts in the batch."""


class LearnerParts:
    """What a learner is made of. `Learner` documents the arguments, and is what to do with it."""

    def __init__(
        self,
        policy: object,
        *,
        tokenizer: Any = None,
        reference: object = "copy",
        algorithm: str | Algorithm | None = None,
        preset: str | None = None,
        engine: Engine | Callable[[Policy], Engine] | None = None,
        env: Env | None = None,
        total_steps: int | None = None,
        optimizer: "OptimizerKeywords | Optimizer | Callable[[list[torch.nn.Parameter]], Optimizer] | None" = None,
        lr_scheduler: object = None,
        composed: OptionGroups | None = None,
        **options: "Unpack[LearnerArguments]",
    ):
        name: Any = algorithm or find_preset(preset).get("algorithm", DEFAULT)
        self.algorithm = find(name)
        if composed is not None and (beside := ([] if preset is None else ["preset"]) + sorted(options)):
            how = "give these to runs.config.configure, or leave composed out"
            raise OperantError(f"{', '.join(beside)} beside composed=, which has every option already: {how}")
        if composed is None:
            optimizer, by_name = with_kind(optimizer, cast(Mapping[str, Any], options))
            without_kl = dict.fromkeys(("kl.coef", "kl.loss_coef"), 0.0) if reference is None else {}
            composed, left_out = learner_options(name, preset, by_name, above=without_kl)
            if left_out:
                warnings.warn(left_out_message(f"preset {preset}", left_out, f"algorithm={name}"), stacklevel=2)
        self.options = composed.copy()
        """All options by group."""
        self.own = self.options["learner"]
        self.kl = self.options["kl"]
        check_length(self.options, total_steps)
        check_reference(self.options, name, reference)
        check_given(self.options, optimizer, lr_scheduler)
        is_made = hasattr(engine, "generate") and not inspect.isclass(engine)
        usable = engine is None or is_made or callable(engine)
        require(usable, f"engine={shown(engine)}: give an engine, or a function that makes one from the policy")
        if self.own.parallel == "fsdp":
            SOMETIMES["check"](self.algorithm.update, self.options)
        self.named = {"policy": name_of_model(policy), "reference": name_of_model(reference)}
        self.named["algorithm"] = name if isinstance(name, str) else "an algorithm of your own"
        others = {"tokenizer": tokenizer, "engine": engine, "env": env}
        others |= {"algorithm": name, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
        self.given = self.named | {argument: name_of_model(thing) for argument, thing in others.items()}
        """What the constructor was given: names, and the classes of objects in angle brackets."""
        self.copied: dict[str, str] = {}
        """Of a loaded learner: the names of the models that its folder has copies of, by the path of the copy."""
        self.policy = load_trained_policy(policy, name, self.options, tokenizer)
        """The `Policy` in training."""
        self.sampling = configured_sampling(self.options, self.policy)
        self.reference, self.copies = make_copies(self.algorithm, self.policy, reference, self.options)
        mask = self.copies.get("mask") if "mask" in self.algorithm.options else None
        if self.own.parallel == "fsdp":  # the mask is read while replies are generated, so it stays whole
            SOMETIMES["divide"](self.policy, [copy for copy in self.all_copies if copy is not mask], self.own)
        self.engine = cast(Engine, engine if is_made else cast(Any, engine or default_engine)(self.policy))
        if is_made and not EngineParts.of(self.engine).own_weights:
            self.engine.sync(self.policy, 0)  # another learner may have used it
        prepare_engine(self.engine, self.own, name, mask)
        self.env = env or SingleTurn()
        tell_room(self.env, self.policy, self.sampling)
        own = None if optimizer is None else OwnOptimizer(self.policy, optimizer, lr_scheduler)
        self.rule = find_rule(self.algorithm.update)(self.policy, self.options, own)
        self.wanted = SOMETIMES["wanted"](self.options["condition"]) if "condition" in self.options else None
        """The returns that play asks for; None: prompts state none."""
        replay, kept = self.options.get("replay"), (self.own.seed, self.own.max_staleness)
        self.buffer = SOMETIMES["buffer"](replay, *kept) if replay and replay.share else None
        """Earlier replies; None: a step learns from its own replies alone."""
        self.controller, self.moments = controller(self.kl), RunningMoments()
        self.total_steps, self.progress = total_steps, Progress()
        self.budget, self.clock = self.options["update"].budget(), machine.Clock()
        self.attempts = Attempts()
        """The attempts that `generate` has made since the last step."""
        self.last_step: LastStep | None = None
        self.updating = False
        """True during the optimizer steps of an update, and still True after one of them raised."""
        self.refused: RefusedStep | None = None
        """The last step, if it was refused because of NaN or infinity."""
        self.history: list[dict[str, float]] = []
        """The metrics of the steps so far; of more than `HISTORY` steps, the first ones and the last."""
        self.distributions: dict[str, Any] = {}
        """Of the last step: `histograms`, norms by `blocks`, and every `watch_every` steps `gradients` by tensor."""

    @property
    def all_copies(self) -> list[PolicyCopy]:
        """The reference and the other copies of the policy."""
        return [*([self.reference] if self.reference is not None else []), *self.copies.values()]

    @property
    def rescores(self) -> bool:
        """Whether log-probs and values are computed again, instead of taking those of the engine."""
        usual = self.policy.rounds or EngineParts.of(self.engine).own_numbers
        return self.own.importance != "none" or (usual if self.own.rescore is None else self.own.rescore)

    @property
    def pays(self) -> bool:
        """Whether the environment pays rewards."""
        return with_defaults(self.env, EnvBase).pays

    @property
    def between_turns(self) -> float:
        """The discount from a turn to the next one."""
        return math.prod(self.options["advantage"].get(rate, 1.0) for rate in ("gamma", "turn_gamma"))

    @contextmanager
    def present(self, only: Policy | None = None) -> Iterator[None]:
        """Inside this context, the copies of the policy, or the one whose policy is `only`, are whole on every rank."""
        with ExitStack() as stack:
            for copied in self.all_copies:
                if only is None or copied.policy is only:
                    stack.enter_context(copied.present())
            yield

    def objective(self, sampling: Sampling) -> Objective:
        """The objective that the update minimises. Without a reference, it has no KL term."""
        reference = self.reference.policy if self.reference is not None else None
        loss, advantage, per = self.options["loss"], self.options["advantage"], self.options["update"].per
        whitens = advantage.get("whiten_scope") == "minibatch"
        return Objective(
            loss=partial(self.algorithm.loss, **loss),
            unit=self.algorithm.unit,
            per=self.algorithm.per if per is None else PER[per],
            horizon=sampling.max_tokens,
            entropy_gradient=bool(loss.get("entropy_coef")),
            divergences=(loss["divergence"],) if "divergence" in loss else DIVERGENCES,
            likeliest=loss.get("likeliest"),
            whiten=partial(normalised, unbiased=advantage.get("unbiased", False)) if whitens else None,
            kl=self.options["kl"] if reference is not None else None,
            reference=reference,
        )

    def option_values(self) -> dict[str, object]:
        """Every option by its full name."""
        return {f"{group}.{k}": v for group, made in self.options.items() for k, v in values(made).items()}

    def parts(self) -> dict[str, Any]:
        """All state that changes, by the name under which it is registered in `RunState`."""
        shards, rule = self.policy.shards, dict(self.rule.parts())
        optimizer = rule.pop("optimizer", None)
        if optimizer is not None and shards is not None:
            optimizer = SOMETIMES["optimizer"](optimizer, shards)
        parts = {
            "policy": PolicyState(self.policy, shards),
            "optimizer": optimizer,
            **{f"update/{name}": part for name, part in rule.items()},
            "controller": self.controller,
            "moments": self.moments,
            "progress": self.progress,
            "budget": self.budget,
            "wanted": self.wanted,
            "replay": self.buffer,
            "reference": self.reference,
            **{f"shadow/{name}": copied for name, copied in self.copies.items()},
        }
        return {name: part for name, part in parts.items() if part is not None}


def default_engine(policy: object) -> Engine:
    """The engine in this process: native for a transformers model, and otherwise the policy's own `generate`."""
    return ENGINES.find("native" if isinstance(policy, Policy) else "own")(policy)
