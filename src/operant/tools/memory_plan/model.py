"""The memory of a policy, and of each phase of a step, measured on a policy whose tensors have no memory."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils.checkpoint import checkpoint

from operant.algorithms import find
from operant.models import lora as adapters
from operant.models import output_mlp as output_mlps
from operant.models import soft_prompt as soft_prompts
from operant.models.adapters import check_alone
from operant.models.frozen_trunk import Trunk
from operant.models.hidden_states import Modes, cache_of
from operant.models.logprobs import BUDGET
from operant.models.options import ModelOptions, recomputing
from operant.models.policy import Policy
from operant.models.safe_loading import LanguageModel, PlainConfig, load_config, load_tokenizer
from operant.models.twins import in_halves
from operant.models.value_head import ValueOptions
from operant.rewards.classifier import Classifier
from operant.runs.config import Config
from operant.storage.hub import find_config
from operant.tools.memory_plan.fake_tensors import Memory
from operant.training.optimizer import RateOptions
from operant.training.update import SAMPLE
from operant.types import Tokenizer, with_defaults


def config_of(name: Any) -> Any:
    """The transformers config of a model: by name, as a .json file, or that of a model or Policy from Python."""
    if not isinstance(name, str):
        return with_defaults(name, LanguageModel).config or name.model.config
    return load_config(name if _is_file(name) else find_config(name))


def _is_file(name: str) -> bool:
    """Whether a model is named by its config alone, in a file of any name."""
    return name.endswith(".json") and Path(name).is_file()


def tokenizer_of(name: object) -> Tokenizer | None:
    """The tokenizer of a model, by name or from Python; None if it has none."""
    if not isinstance(name, str):
        return with_defaults(name, LanguageModel).tokenizer
    return load_tokenizer(Path(name).parent if _is_file(name) else find_config(name))


class MemoryModel:
    """A policy of fake tensors, as a configuration would build it; its methods measure memory in bytes.

    It is made and used inside `fake_tensors()`.
    """

    def __init__(self, config: Any, run: Config, memory: Memory):
        self.run, self.memory, self.config = run, memory, config
        self.options: ModelOptions = run.learner["model"]
        self.algorithm, value = find(run.train.algorithm), run.learner["value"]
        model = self._make_model(config, trained=True)
        self.policy = policy = Policy(model, modes=Modes())
        if self.algorithm.needs.critic and value.critic is None:
            policy.value_head = _value_head(policy, value)
        if self.options.train_layers is not None:
            policy.trunk = Trunk(model, self.options)
            ids, head = self._ids(1, 2, 2), self.options.train_head
            with torch.enable_grad():
                policy.trunk.freeze(model, policy.head, lambda: model(**ids, use_cache=False), train_head=head)
            policy.trunk.learn_to_skip(lambda: model(**ids, use_cache=False))
        elif self.options.train_head is not None:
            for p in policy.head.parameters(recurse=False):
                p.requires_grad_(self.options.train_head)
        self.trained = policy.trainable()
        self.critic: Policy | None = None
        if self.algorithm.needs.critic and value.critic is not None:
            its_config = config if value.critic == "copy" else config_of(value.critic)
            self.critic = Policy(self._make_model(its_config), modes=Modes())
            self.critic.value_head = _value_head(self.critic, value)
            self.trained += self.critic.trainable()
        self.bytes_of_state = self.policy.head.weight.shape[1] * self.policy.head.weight.element_size()

    def _make_model(self, config: Any, trained: bool = False) -> nn.Module:
        """The model, with the adapter or soft prompt of the run if it is the one that is trained."""
        from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        with unset_fake_temporarily(), torch.device("meta"):  # peft moves weights, which fake tensors do not allow
            model = auto.from_config(config, dtype=self.options.dtype).eval()
            lora, soft = self.run.learner["lora"], self.run.learner["soft_prompt"]
            mlp = self.run.learner["output_mlp"]
            check_alone(lora, soft, mlp, self.options)
            if trained and lora.on:
                model = adapters.adapt(model, lora)
            if trained and soft.on:
                width = model.get_input_embeddings().embedding_dim
                model = soft_prompts.attach(model, torch.empty(soft.tokens, width))
            if trained and mlp.on:
                model = output_mlps.attach(model, output_mlps.first_layers(model, mlp, seed=0))
        return meta_to_fake(model)

    def permanent(self) -> dict[str, float]:
        """Bytes that are allocated during the whole run, by what they are used for."""
        trained = bytes_of(p for p in self.policy.model.parameters() if p.requires_grad)
        learner, optimizer = self.run.learner["learner"], self.run.learner.get("optimizer", RateOptions())
        copies = {*self.algorithm.copies, *({"mask", "target"} & {*self.algorithm.options})} - {"reference"}
        if "mask" in self.run.learner and self.run.learner["mask"].by == "policy":
            copies.discard("mask")
        heads = self.policy.value_head
        values = len(self.algorithm.with_values) * bytes_of(heads.parameters()) if heads is not None else 0.0
        named, reference = self.run.train.reference, 0.0
        if named == "copy" and "reference" in self.algorithm.copies:  # it shares every weight that is not trained
            reference = trained
        elif named not in (None, "none") and "reference" in self.algorithm.copies:
            reference = bytes_of(self._make_model(config_of(named)).parameters())
        return {
            "weights": bytes_of(self.policy.parameters()) + bytes_of(self.policy.buffers()),
            "critic network": bytes_of(self.critic.parameters()) if self.critic is not None else 0.0,
            "reference": reference,
            "other copies": (len(copies) + self.run.learner["update"].copies) * trained + values,
            "optimizer": optimizer.state_bytes(self.policy, *([] if self.critic is None else [self.critic])),
            "kept gradients": bytes_of(self.trained) if learner.keep_gradients else 0.0,
            "weight samples": 4.0 * sum(min(p.numel(), SAMPLE) for p in self.trained) * bool(learner.watch_every),
        }

    def units(self) -> tuple[float, float]:
        """Bytes of the largest block, and of all weights of policy and critic that are in no block."""
        models = [self.policy] if self.critic is None else [self.policy, self.critic]
        blocks = [bytes_of(block.parameters()) for model in models for stack in model.blocks() for block in stack]
        return max(blocks), sum(bytes_of(model.parameters()) for model in models) - sum(blocks)

    @torch.no_grad()
    def generation(self, rows: int, prompt: int, reply: int) -> dict[str, float]:
        """Bytes of generation: the cache of whole rows, and the larger of prefill and a float64 copy of the logits."""
        before = self.memory.peak().now
        out = self.policy.model(**self._ids(rows, prompt, 1), use_cache=True)
        prefill, cache = self.memory.most - before, cache_of(out)
        layers: Sequence[Any] = (cache.self_attention_cache if hasattr(cache, "self_attention_cache") else cache).layers
        cached = bytes_of(x for layer in layers for x in (layer.keys, layer.values) if x is not None)
        grown = reply if self.policy.encoder_decoder else (prompt + reply) / max(prompt, 1)
        return {"cache": cached * grown, "sampling": max(prefill - cached, 24.0 * rows * self.policy.vocabulary)}

    @torch.no_grad()
    def scoring(self, rows: int, prompt: int, reply: int) -> dict[str, float]:
        """Bytes of a forward pass without gradients, for example of the reference."""
        before = self.memory.peak().now
        self._loss(rows, prompt, reply)
        return {"forward pass": float(self.memory.most - before)}

    def update(self, rows: int, prompt: int, reply: int, *, accumulates: bool) -> dict[str, float]:
        """Bytes of the forward and backward pass of a micro-batch.

        accumulates: the gradients of an earlier micro-batch are there already.
        """
        gradients, own = bytes_of(self.trained), self.run.learner["learner"]
        on_cpu = own.threads == "auto" and self.policy.device.type == "cpu"
        of_twin = gradients if on_cpu and in_halves(self.policy.model, rows * (prompt + reply)) else 0.0
        with torch.enable_grad():
            before = self.memory.peak().now
            for _ in range(2 if accumulates else 1):
                self.memory.peak()
                self._loss(rows, prompt, reply).backward()
        most = float(self.memory.most - before)
        for p in self.trained:
            p.grad = None
        own_ones = 0.0 if own.keep_gradients else min(gradients, most)
        return {"gradients": own_ones + of_twin, "activations": max(most - gradients, 0.0)}

    def _loss(self, rows: int, prompt: int, reply: int) -> Tensor:
        """A loss that takes as much memory as the objective."""
        policy = self.policy
        states = self._states(policy, rows, prompt, reply)
        chunks = states.split(max(1, BUDGET // policy.vocabulary))  # those of `logprobs.score`

        def score(chunk: Tensor) -> Tensor:
            return _LossOfLogits.apply(policy.logits(chunk))  # type: ignore[return-value]

        if len(chunks) == 1 or not torch.is_grad_enabled():
            loss = torch.cat([score(chunk) for chunk in chunks]).sum()
        else:
            scored = [checkpoint(score, chunk, use_reentrant=False) for chunk in chunks]
            loss = torch.cat(scored).sum()  # type: ignore[misc]
        if policy.value_head is not None:  # Q values exist in chunks, as logits do
            outputs = [*policy.value_head.parameters()][-1].numel()
            loss = loss + policy.value_head(states[: max(1, BUDGET // outputs)].float()).sum()
        if self.critic is not None and self.critic.value_head is not None:
            loss = loss + self.critic.value_head(self._states(self.critic, rows, prompt, reply).float()).sum()
        return loss

    def _states(self, policy: Policy, rows: int, prompt: int, reply: int) -> Tensor:
        """Return the hidden states [rows * reply, D] that the output head gets before each action."""
        caught: list[Tensor] = []

        def catch(module: object, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            caught.append(args[0][:, -reply:].reshape(-1, args[0].shape[-1]))
            return (args[0][:1, :0],)

        hook = policy.head.register_forward_pre_hook(catch)
        ids = self._ids(rows, prompt, reply)
        with ExitStack() as during:
            during.callback(hook.remove)
            if policy.trunk is not None and self.options.states_gb:
                length = ids["decoder_input_ids" if policy.encoder_decoder else "input_ids"].shape[1]
                cached = policy.head.weight.new_zeros(rows, length, policy.head.weight.shape[1])
                during.enter_context(policy.trunk.starting_from(cached))
            if self.options.gradient_checkpointing and torch.is_grad_enabled():
                during.enter_context(recomputing(policy.blocks()))
            policy.model(**ids, use_cache=False)
        return caught[0]

    def _ids(self, rows: int, prompt: int, reply: int) -> dict[str, Tensor]:
        """Token ids of the model's inputs, all 0."""
        shapes = {"input_ids": (rows, prompt + reply - 1)}
        if self.config.is_encoder_decoder:
            shapes = {"input_ids": (rows, prompt), "decoder_input_ids": (rows, reply)}
        return {name: torch.zeros(shape, dtype=torch.long) for name, shape in shapes.items()}


@torch.no_grad()
def classifier_memory(classifier: Classifier, tokens: int, memory: Memory) -> float:
    """Bytes of a classifier that judges texts of so many tokens: its float32 weights, and one call."""
    from transformers import AutoModelForSequenceClassification

    config = config_of(classifier.name)
    with unset_fake_temporarily(), torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    meta_to_fake(model)
    longest = with_defaults(config.get_text_config(), PlainConfig).max_position_embeddings or tokens
    ids = torch.zeros(classifier.batch, min(tokens, longest), dtype=torch.long)
    before = memory.peak().now
    model(input_ids=ids, attention_mask=torch.ones_like(ids))
    return bytes_of(model.parameters()) + bytes_of(model.buffers()) + memory.most - before


def meta_to_fake(model: nn.Module) -> nn.Module:
    """Replace the parameters and buffers on the meta device by fake tensors on the CPU; tied ones stay tied."""
    made: dict[int, Any] = {}

    def fake(old: Tensor) -> Tensor:
        if id(old) not in made:
            new = torch.empty(old.shape, dtype=old.dtype, device="cpu")
            made[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
        return made[id(old)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is not None:
                    tensors[name] = fake(old)
    return model


class _LossOfLogits(torch.autograd.Function):
    """Takes the memory of the loss head on logits [n, V]: it saves the logits and returns their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.new_zeros(len(logits), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return torch.empty_like(ctx.saved_tensors[0])


def _value_head(policy: Policy, options: ValueOptions) -> Any:
    """A head of the size of `models.value_head.ValueHead`, with the Q values of every token if there are some."""
    width, outputs = policy.head.weight.shape[1], 1 + 2 * policy.vocabulary * options.actions
    if options.layers == 1:
        return nn.Linear(width, outputs)
    return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, outputs))


def bytes_of(tensors: Iterable[Tensor]) -> float:
    """Bytes of distinct tensors: a tied weight counts once."""
    return float(sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values()))
