"""Models with a value head, as `trl.models` of TRL 0.11 has them: any transformers model, and `v_head` beside it.

    model = AutoModelForCausalLMWithValueHead.from_pretrained("gpt2", peft_config=LoraConfig(task_type="CAUSAL_LM"))
    logits, loss, value = model(**tokenizer("This film", return_tensors="pt"))

The folder that `save_pretrained` writes is a plain transformers folder whose weights have `v_head.*` beside the others.
An adapter's is one of peft's, with the head in `pytorch_model.bin`.
"""

import json
import warnings
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from operant.compat.trl.core import lacking
from operant.types import OperantError, require

__getattr__ = lacking(__name__)
HEAD_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Where the weights of a value head may be, in the order of asking."""


class SummaryHead(nn.Module):
    """TRL's value head: dropout and one linear layer, [..., D] -> [..., 1], in the layer's own dtype.

    config: of the model, whose `summary_dropout_prob` overrules the argument. width: D; None: by the config.
    """

    def __init__(self, config: Any, *, summary_dropout_prob: float = 0.1, width: int | None = None, **unused: object):
        super().__init__()
        dropout = getattr(config, "summary_dropout_prob", summary_dropout_prob)
        dropout = summary_dropout_prob if dropout is None else dropout
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        if width is None:  # some models project their hidden states before the output, as OPT-350m
            width = getattr(config, "word_embed_proj_dim", None) or config.get_text_config(decoder=True).hidden_size
        self.summary = nn.Linear(width, 1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.summary(self.dropout(hidden_states).to(self.summary.weight))


ValueHead = SummaryHead
"""TRL's name, which a class of the core has already."""


class PreTrainedModelWrapper(nn.Module):
    """A transformers or peft model (`pretrained_model`) with a value head (`v_head`).

    summary_dropout_prob: of the head; the model's config overrules it. v_head_init_strategy: None, or "normal" with the
    standard deviation `v_head_initializer_range` and a bias of 0.
    Raises: OperantError for a model without an output head.
    """

    transformers_parent_class: Any = AutoModelForCausalLM
    is_encoder_decoder = False
    lm_head_namings: tuple[str, ...] = ("lm_head", "embed_out")
    supported_args = ("summary_dropout_prob", "v_head_initializer_range", "v_head_init_strategy")
    supported_modules = ("v_head",)

    def __init__(
        self,
        pretrained_model: Any,
        summary_dropout_prob: float = 0.1,
        v_head_initializer_range: float = 0.2,
        v_head_init_strategy: str | None = None,
        score_module: nn.Module | None = None,
        rm_adapter_name: str | None = None,
    ):
        super().__init__()
        self.pretrained_model, self.config = pretrained_model, pretrained_model.config
        self.is_peft_model = hasattr(pretrained_model, "peft_config") and hasattr(pretrained_model, "base_model")
        self.is_sequential_parallel = False
        for size in ("8bit", "4bit"):
            setattr(self, f"is_loaded_in_{size}", bool(getattr(pretrained_model, f"is_loaded_in_{size}", False)))
        head = pretrained_model.get_output_embeddings()
        if head is None:
            auto = self.transformers_parent_class.__name__
            raise OperantError(f"a {type(pretrained_model).__name__} has no language model head: load it with {auto}")
        self.v_head = SummaryHead(self.config, summary_dropout_prob=summary_dropout_prob, width=head.weight.shape[-1])
        if v_head_init_strategy == "normal":
            nn.init.normal_(self.v_head.summary.weight, std=v_head_initializer_range)
            nn.init.zeros_(self.v_head.summary.bias)
        elif v_head_init_strategy is not None:
            raise OperantError(f"v_head_init_strategy={v_head_init_strategy!r}: it is None or 'normal'")
        self.supports_rm_adapter = score_module is not None
        self.rm_adapter_name, self.policy_adapter_name = rm_adapter_name, "default"
        if score_module is not None:
            self.score = score_module

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: object, *model_args: object, **kwargs: object) -> Self:
        """Load a name, a folder (also one of peft's), or take a model that is loaded already.

        peft_config: put a new adapter onto it. is_trainable: go on training the adapter of the folder. reward_adapter:
        a folder of peft's with a score head, for `compute_reward_score`. The value head's arguments are those of the
        class; the others go to transformers.
        Raises: OperantError for something else, or arguments that do not fit together.
        """
        name = pretrained_model_name_or_path
        config, trainable = kwargs.pop("peft_config", None), kwargs.pop("is_trainable", False)
        reward, reward_name = kwargs.pop("reward_adapter", None), kwargs.pop("reward_adapter_name", "reward_adapter")
        own = {key: kwargs.pop(key) for key in cls.supported_args if key in kwargs}
        of_kbit = ("use_gradient_checkpointing", "gradient_checkpointing_kwargs")
        kbit = {key: kwargs.pop(key) for key in of_kbit if key in kwargs}
        if config is not None:
            from peft import PeftConfig

            if not isinstance(config, PeftConfig):
                raise OperantError(f"peft_config is a {type(config).__name__}: give a peft.PeftConfig, as LoraConfig")
        require(reward is None or isinstance(reward, str), "reward_adapter: give the folder or name as a text")
        if isinstance(name, (str, Path)):
            name = str(name)
            model, loaded = cls._load(name, model_args, kwargs, trainable), cls._head(name, kwargs)
        elif isinstance(name, nn.Module) and hasattr(name, "config"):
            model, loaded = name, {k: x for k, x in name.state_dict().items() if k.startswith("v_head.")}
        else:
            raise OperantError(f"from_pretrained takes a name, a folder or a transformers model, not {type(name)}")
        if config is not None and hasattr(model, "peft_config"):
            warnings.warn("peft_config is ignored: the model has an adapter already", stacklevel=2)
        elif config is not None:
            from peft import get_peft_model, prepare_model_for_kbit_training

            if getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False):
                model = prepare_model_for_kbit_training(model, **kbit)
            model = get_peft_model(model, config)
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise OperantError("PPO does not train prompt tuning here: take LoRA, or operant's own soft prompts")
        if reward is not None:
            if not hasattr(model, "peft_config"):
                raise OperantError("reward_adapter needs a model with an adapter: give peft_config as well")
            own |= {"score_module": add_reward_adapter(model, reward, reward_name), "rm_adapter_name": reward_name}
        made = cls(model, **own)
        made.post_init(loaded)
        return made

    @classmethod
    def _load(cls, name: str, args: tuple[object, ...], kwargs: dict[str, object], trainable: bool) -> nn.Module:
        """The transformers model, in an adapter where the folder or repository has one.

        Raises: OperantError for load_in_8bit and load_in_4bit where they cannot work.
        """
        asked = {key: kwargs.pop(key) for key in ("load_in_8bit", "load_in_4bit") if key in kwargs}
        if key := next((key for key, value in asked.items() if value), None):
            from transformers import BitsAndBytesConfig
            from transformers.utils import is_bitsandbytes_available

            if not (torch.cuda.is_available() and is_bitsandbytes_available()):
                why = 'needs a GPU and bitsandbytes: pip install "operant[quantise]", or leave it out'
                raise OperantError(f"{key}=True {why}")
            kwargs.setdefault("device_map", {"": torch.cuda.current_device()})
            kwargs = kwargs | {"quantization_config": BitsAndBytesConfig(**asked)}
        if "quantization_config" not in kwargs:  # weights came in float32 then; today's transformers asks their file
            kwargs["dtype"] = kwargs.pop("torch_dtype", kwargs.get("dtype", torch.float32))
        if _file(name, "adapter_config.json", kwargs.get("token")) is None:
            return cls.transformers_parent_class.from_pretrained(name, *args, **kwargs)
        from peft import PeftConfig, PeftModel

        base = PeftConfig.from_pretrained(name).base_model_name_or_path
        model = cls.transformers_parent_class.from_pretrained(base, *args, **kwargs)
        return PeftModel.from_pretrained(model, name, is_trainable=trainable)

    @classmethod
    def _head(cls, name: str, kwargs: Mapping[str, object]) -> dict[str, Tensor]:
        """The weights `v_head.*` that are saved with a model; {} if there are none."""
        from safetensors import safe_open
        from transformers.modeling_utils import load_state_dict

        paths = [_file(name, file, kwargs.get("token")) for file in HEAD_FILES]
        found: list[str] = []
        for path in filter(None, paths):
            if path.endswith(".json"):
                where = json.loads(Path(path).read_text(encoding="utf-8"))["weight_map"]
                shards = sorted({file for key, file in where.items() if key.startswith("v_head.")})
                found += filter(None, [_file(name, file, kwargs.get("token")) for file in shards])
            else:
                found.append(path)
        for path in found:
            if path.endswith(".safetensors"):
                with safe_open(path, "pt") as file:
                    known = {key: file.get_tensor(key) for key in file.keys() if key.startswith("v_head.")}  # noqa: SIM118
            else:  # tensors alone, no pickled programs
                known = {k: x for k, x in load_state_dict(path, weights_only=True).items() if k.startswith("v_head.")}
            if known:
                return known
        return {}

    def post_init(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take the `v_head.*` of a state dictionary, and bring the head to the device of the language model's."""
        known = {k.removeprefix("v_head."): x for k, x in state_dict.items() if k.startswith("v_head.")}
        self.v_head.load_state_dict(known, strict=bool(known))
        places = getattr(self.pretrained_model, "hf_device_map", None)
        if places is None:
            return
        if {"cpu", "disk"} & set(map(str, places.values())) and len(set(places.values())) > 1:
            raise OperantError("a model with a value head cannot be offloaded: leave out device_map, or use a GPU")
        self.v_head.to(self.pretrained_model.get_output_embeddings().weight.device)
        self.is_sequential_parallel = len(set(places.values())) > 1

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """The weights by transformers' names, and those of the head as `v_head.*`; of an adapter the head's alone."""
        found = {} if self.is_peft_model else self.pretrained_model.state_dict(*args, **kwargs)
        return found | {f"v_head.{key}": x for key, x in self.v_head.state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> Any:
        """Restore what `state_dict` returned."""
        self.post_init(state_dict)
        inner = {key: x for key, x in state_dict.items() if not key.startswith("v_head.")}
        return self.pretrained_model.load_state_dict(inner, strict=strict and not self.is_peft_model, assign=assign)

    def save_pretrained(self, save_directory: str | Path, **kwargs: object) -> None:
        """Write a folder that `from_pretrained` reads, and transformers (or peft) without the value head."""
        if self.is_peft_model:
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            torch.save(self.state_dict(), Path(save_directory) / "pytorch_model.bin")
        else:
            kwargs.setdefault("state_dict", self.state_dict())
        self.pretrained_model.save_pretrained(save_directory, **kwargs)

    def push_to_hub(self, *args: object, **kwargs: object) -> Any:
        """Push the model and its head, as transformers' `push_to_hub` does."""
        self.pretrained_model.v_head = self.v_head
        try:
            return self.pretrained_model.push_to_hub(*args, **kwargs)
        finally:
            del self.pretrained_model.v_head

    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: object = None,
        attention_mask: Tensor | None = None,
        return_past_key_values: bool = False,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None, Tensor, *tuple[object, ...]]:
        """(logits [B, T, V] in float32, the loss if there are `labels`, the value of each state [B, T]), and the cache
        behind them if asked. Of an encoder-decoder T are the tokens of the decoder."""
        kwargs |= {"input_ids": input_ids, "attention_mask": attention_mask, "output_hidden_states": True}
        if past_key_values is not None:
            kwargs["past_key_values"] = past_key_values
        out = self.pretrained_model(**kwargs)
        states = out.decoder_hidden_states if self.is_encoder_decoder else out.hidden_states
        value = self.v_head(states[-1].to(self.v_head.summary.weight.device)).squeeze(-1)
        found = (out.logits.float(), out.loss, value)
        return (*found, out.past_key_values) if return_past_key_values else found

    def generate(self, *args: object, **kwargs: object) -> Any:
        """transformers' `generate` of the model inside."""
        return self.pretrained_model.generate(*args, **kwargs)

    def prepare_inputs_for_generation(self, *args: object, **kwargs: object) -> dict[str, object]:
        return self.pretrained_model.prepare_inputs_for_generation(*args, **kwargs)

    def gradient_checkpointing_enable(self, *args: object, **kwargs: object) -> None:
        self.pretrained_model.gradient_checkpointing_enable(*args, **kwargs)

    def gradient_checkpointing_disable(self) -> None:
        self.pretrained_model.gradient_checkpointing_disable()

    def enable_input_require_grads(self) -> None:
        self.pretrained_model.enable_input_require_grads()

    @torch.no_grad()
    def compute_reward_score(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: object) -> Tensor:
        """Scores [B, T, labels] of the reward adapter at each token. The model is in evaluation mode afterwards.

        Raises: OperantError for a model that was loaded without one.
        """
        require(self.supports_rm_adapter, "this model has no reward adapter: load it with reward_adapter=FOLDER")
        self.pretrained_model.set_adapter(self.rm_adapter_name)
        self.pretrained_model.eval()
        try:
            kwargs |= {"input_ids": input_ids, "attention_mask": attention_mask, "output_hidden_states": True}
            states = self.pretrained_model(**kwargs, return_dict=True).hidden_states[-1]
            return self.score(states.to(self.score.weight))
        finally:
            self.pretrained_model.set_adapter(self.policy_adapter_name)


class AutoModelForCausalLMWithValueHead(PreTrainedModelWrapper):
    """Any causal language model of transformers with a value head."""

    transformers_parent_class = AutoModelForCausalLM


class AutoModelForSeq2SeqLMWithValueHead(PreTrainedModelWrapper):
    """Any encoder-decoder of transformers with a value head on the decoder's states."""

    transformers_parent_class = AutoModelForSeq2SeqLM
    lm_head_namings = ("lm_head", "embed_out", "output_projection")
    is_encoder_decoder = True


SUPPORTED_ARCHITECTURES = (AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead)


def _file(name: str, file: str, token: object = None) -> str | None:
    """The path of a file in a folder or, if it can be reached, in a repository of the Hub; None without one."""
    from transformers.utils import cached_file

    quiet = ("missing_entries", "connection_errors", "gated_repo")
    return cached_file(name, file, token=token, **{f"_raise_exceptions_for_{what}": False for what in quiet})


def add_reward_adapter(model: Any, adapter: str, name: str) -> nn.Linear:
    """Load a reward model's adapter beside the policy's, and return its score head, frozen.

    Raises: OperantError for an adapter without a score head.
    """
    from transformers.modeling_utils import load_state_dict

    model.load_adapter(adapter, name, is_trainable=False)
    path = _file(adapter, "adapter_model.safetensors") or _file(adapter, "adapter_model.bin")
    weights = load_state_dict(path) if path else {}
    parts = {key.rpartition(".")[2]: x for key, x in weights.items() if ".score." in f".{key}"}
    require("weight" in parts, f"{adapter} holds no score head: train it with task_type='SEQ_CLS' and save_pretrained")
    labels, width = parts["weight"].shape
    score = nn.Linear(width, labels, bias="bias" in parts)
    score.load_state_dict(parts)
    return score.to(model.device, model.dtype).requires_grad_(False)


def create_reference_model(
    model: PreTrainedModelWrapper, num_shared_layers: int | None = None, pattern: str | None = None
) -> PreTrainedModelWrapper:
    """A frozen copy in evaluation mode. With `num_shared_layers` everything before that block is frozen in `model` as
    well, and the copy has the same tensors there. `pattern`: the name of a block, such as "transformer.h.{layer}".

    Raises: OperantError for a block that the model does not have.
    """
    parameters, shared = list(model.named_parameters()), list[nn.Parameter]()
    if num_shared_layers is not None:
        if pattern is None:  # of an encoder-decoder the last of the longest stacks, which is the decoder's
            lists = [(len(m), i, name) for i, (name, m) in enumerate(model.named_modules()) if type(m) is nn.ModuleList]
            pattern = f"{max(lists)[2]}.{{layer}}." if lists else "-"
        first = pattern.format(layer=num_shared_layers)
        start = next((i for i, (name, _) in enumerate(parameters) if first in name), None)
        if start is None:
            raise OperantError(f"num_shared_layers={num_shared_layers}: no parameter is called {first}*; give fewer")
        shared = [p.requires_grad_(False) for _, p in parameters[:start]]
    copy = deepcopy(model, {id(p): p for p in shared})
    return copy.requires_grad_(False).eval()
