"""A policy without weights, as a configuration would build it, and what each phase of a step holds on top of it."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from operant.algorithms import find
from operant.memory_plan.phantom import Memory, solid
from operant.models import lora as adapters
from operant.models.frozen_trunk import Trunk
from operant.models.hidden_states import Modes
from operant.models.logprobs import BUDGET
from operant.models.options import ModelOptions, recomputing
from operant.models.policy import Policy
from operant.models.safe_loading import load_config, load_tokenizer
from operant.models.value_head import ValueOptions
from operant.runs.config import Config
from operant.storage.hub import find_config
from operant.training.gradient_norms import SAMPLE


def config_of(name: Any) -> Any:
    """The transformers config of a policy's name; of a model or Policy from Python, its own."""
    if not isinstance(name, str):
        return getattr(name, "config", None) or name.model.config
    return load_config(find_config(name))


def tokenizer_of(name: Any) -> Any:
    """The tokenizer beside the config; None where there is none."""
    return load_tokenizer(find_config(name)) if isinstance(name, str) else getattr(name, "tokenizer", None)


class Sketch:
    """A policy of phantoms: what it holds, and the peaks of what is done with it, in bytes."""

    def __init__(self, config: Any, run: Config, memory: Memory):
        self.run, self.memory, self.config = run, memory, config
        self.options: ModelOptions = run.learner["model"]
        self.policy = self._policy(config)
        self.trained = self.policy.trainable()
        critic = run.learner["value"].critic if find(run.train.algorithm).needs.critic else None
        self.critic = None if critic is None else self._critic(config if critic == "copy" else config_of(critic))
        self.trained += self.critic.trainable() if self.critic is not None else []
        self.width = self.policy.head.weight.shape[1] * self.policy.head.weight.element_size()

    def _policy(self, config: Any) -> Policy:
        value, lora = self.run.learner["value"], self.run.learner["lora"]
        model = self._model(config, lora if lora.on else None)
        policy = Policy(model, modes=Modes())
        if find(self.run.train.algorithm).needs.critic and value.critic is None:
            policy.value_head = _value_head(policy, value)
        if self.options.train_layers is not None:
            policy.trunk = Trunk(model, self.options)
            reach = self._ids(1, 2, 2)
            with torch.enable_grad():
                head = self.options.train_head
                policy.trunk.freeze(model, policy.head, lambda: model(**reach, use_cache=False), train_head=head)
            policy.trunk.learn_to_skip(lambda: model(**reach, use_cache=False))
        elif self.options.train_head is not None:
            policy.head.requires_grad_(self.options.train_head)
        return policy

    def _critic(self, config: Any) -> Policy:
        critic = Policy(self._model(config), modes=Modes())
        critic.value_head = _value_head(critic, self.run.learner["value"])
        return critic

    def _model(self, config: Any, lora: adapters.LoraOptions | None = None) -> Any:
        from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

        auto = AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else AutoModelForCausalLM
        with solid(), torch.device("meta"):  # phantoms cannot be moved about, as peft does
            model = auto.from_config(config, dtype=self.options.dtype).eval()
            if lora is not None:
                model = adapters.adapt(model, lora)
        return appear(model)

    # --- what is held all the time ------------------------------------------------------------------------------------

    def held(self) -> dict[str, float]:
        """Bytes by name."""
        low = [p for p in self.trained if p.element_size() < 4]  # these have a master and its gradient beside them
        watched = self.run.learner["learner"].watch_every
        moments = 2.1 if self.run.learner["optimizer"].states == "8bit" else 8.0
        return {
            "weights": _bytes(self.policy.parameters()) + _bytes(self.policy.buffers()),
            "critic network": _bytes(self.critic.parameters()) if self.critic is not None else 0.0,
            "reference": self._reference(),
            "optimizer": moments * _count(self.trained) + 8.0 * _count(low),
            "close look": 4.0 * sum(min(p.numel(), SAMPLE) for p in self.trained) if watched else 0.0,
        }

    def _reference(self) -> float:
        given = self.run.train.reference
        if given in (None, "none") or "reference" not in find(self.run.train.algorithm).copies:
            return 0.0
        if given == "copy":
            return _bytes(p for p in self.policy.model.parameters() if p.requires_grad)
        return _bytes(self._model(config_of(given)).parameters())

    # --- what a phase holds on top ------------------------------------------------------------------------------------

    @torch.no_grad()
    def generation(self, rows: int, prompt: int, reply: int) -> dict[str, float]:
        """Reading the prompts, and the cache of whole rows; a float64 copy of the logits is drawn from."""
        before = self.memory.peak().now
        out = self.policy.model(**self._ids(rows, prompt, 1), use_cache=True)
        reading, cache = self.memory.most - before, _cache_bytes(out.past_key_values)
        whole = cache * (prompt + reply) / max(prompt, 1)
        return {"cache": whole, "drawing": max(reading - cache, 24.0 * rows * self.policy.vocabulary)}

    @torch.no_grad()
    def observation(self, rows: int, prompt: int, reply: int) -> dict[str, float]:
        """A pass without gradients, by the reference say."""
        before = self.memory.peak().now
        self._loss(rows, prompt, reply)
        return {"a pass": float(self.memory.most - before)}

    def update(self, rows: int, prompt: int, reply: int, *, again: bool) -> dict[str, float]:
        """Forward and backward of a micro-batch; `again`: beside the gradients of one before it."""
        gradients = _bytes(self.trained)
        with torch.enable_grad():
            before = self.memory.peak().now
            for _ in range(2 if again else 1):
                self.memory.peak()
                self._loss(rows, prompt, reply).backward()
        most = float(self.memory.most - before)
        for p in self.trained:
            p.grad = None
        return {"gradients": min(gradients, most), "activations": max(most - gradients, 0.0)}

    def _loss(self, rows: int, prompt: int, reply: int) -> Tensor:
        """Something to descend on that costs what the objective costs."""
        policy = self.policy
        states = self._states(policy, rows, prompt, reply)
        loss = _scored(policy, states).sum()
        if policy.value_head is not None:
            loss = loss + policy.value_head(states.float()).sum()
        if self.critic is not None and self.critic.value_head is not None:
            loss = loss + self.critic.value_head(self._states(self.critic, rows, prompt, reply).float()).sum()
        return loss

    def _states(self, policy: Policy, rows: int, prompt: int, reply: int) -> Tensor:
        """[rows * reply, D] what enters the head before each action."""
        caught: list[Tensor] = []

        def catch(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            caught.append(args[0][:, -reply:].reshape(-1, args[0].shape[-1]))
            return (args[0][:1, :0],)

        hook = policy.head.register_forward_pre_hook(catch)
        given = self._ids(rows, prompt, reply)
        with ExitStack() as during:
            during.callback(hook.remove)
            if policy.trunk is not None and self.options.states_gb:
                width = given["decoder_input_ids" if policy.encoder_decoder else "input_ids"].shape[1]
                kept = policy.head.weight.new_zeros(rows, width, policy.head.weight.shape[1])
                during.enter_context(policy.trunk.starting_from(kept))
            if self.options.gradient_checkpointing and torch.is_grad_enabled():
                during.enter_context(recomputing(policy.blocks()))
            policy.model(**given, use_cache=False)
        return caught[0]

    def _ids(self, rows: int, prompt: int, reply: int) -> dict[str, Tensor]:
        if getattr(self.config, "is_encoder_decoder", False):
            ids = {"input_ids": (rows, prompt), "decoder_input_ids": (rows, reply)}
        else:
            ids = {"input_ids": (rows, prompt + reply - 1)}
        return {name: torch.zeros(shape, dtype=torch.long) for name, shape in ids.items()}


def appear(model: nn.Module) -> nn.Module:
    """Parameters and buffers of no device become phantoms of one; tied ones stay tied."""
    made: dict[int, Any] = {}

    def phantom(old: Tensor) -> Tensor:
        if id(old) not in made:
            new = torch.empty(old.shape, dtype=old.dtype, device="cpu")
            made[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
        return made[id(old)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, old in held.items():
                if old is not None:
                    held[name] = phantom(old)
    return model


class _Swept(torch.autograd.Function):
    """What the loss head keeps and makes of logits [n, V]: themselves, and their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.new_zeros(len(logits), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return torch.empty_like(ctx.saved_tensors[0])


def _scored(policy: Policy, states: Tensor) -> Tensor:
    """One number a state [N, D] -> [N], in the chunks of `logprobs.score`."""
    chunks = states.split(max(1, BUDGET // policy.vocabulary))

    def one(chunk: Tensor) -> Tensor:
        return _Swept.apply(policy.logits(chunk))  # type: ignore[return-value]

    if len(chunks) == 1 or not torch.is_grad_enabled():
        return torch.cat([one(chunk) for chunk in chunks])
    return torch.cat([checkpoint(one, chunk, use_reentrant=False) for chunk in chunks])  # type: ignore[misc]


def _value_head(policy: Policy, options: ValueOptions) -> Any:
    """The size of `heads.ValueHead`, without its numbers."""
    width = policy.head.weight.shape[1]
    if options.layers == 1:
        return nn.Linear(width, 1)
    return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 1))


def _count(tensors: Any) -> int:
    return sum(t.numel() for t in tensors)


def _bytes(tensors: Any) -> float:
    """Of distinct tensors: a tied weight is held once."""
    return float(sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values()))


def _cache_bytes(cache: Any) -> float:
    layers: Sequence[Any] = getattr(cache, "layers", None) or cache.self_attention_cache.layers
    return _bytes(t for layer in layers for t in (layer.keys, layer.values))
