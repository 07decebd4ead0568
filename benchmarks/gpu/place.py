"""The device and the size of the parts: models with random weights, created on the device, and timing."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

TINY = {"vocab_size": 200, "layers": 3, "width": 64, "heads": 4}
"""The shape of every model with `--tiny`."""


@dataclass(frozen=True)
class Place:
    """The device, and whether the shapes are the real ones."""

    tiny: bool

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    def sized(self, real: Any, tiny: Any) -> Any:
        return tiny if self.tiny else real

    def sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any]) -> float:
        """Wall-clock seconds of one call, including all work that it queued on the device."""
        self.sync()
        start = time.perf_counter()
        work()
        self.sync()
        return time.perf_counter() - start

    def updates(self, learner: Any, step: Callable[[], Any], times: int) -> list[float]:
        """Wall-clock seconds of the update in each of `times` steps, including all work that it queued."""
        seconds: list[float] = []
        rule, update = learner.rule, learner.rule.update

        def timed(*args: Any, **kwargs: Any) -> Any:
            out: list[Any] = []
            seconds.append(self.seconds(lambda: out.append(update(*args, **kwargs))))
            return out[0]

        rule.update = timed  # the learner's own clock does not wait for the device
        try:
            for _ in range(times):
                step()
        finally:
            rule.update = update
        return seconds

    def learner(self, model: Any, *, precision: str = "bfloat16", **options: Any) -> Any:
        """A learner around a model (or one of a named shape), on the device, with the options by name."""
        from operant.training.learner import Learner

        model = self.model(model, precision) if isinstance(model, str) else model
        reference = options.pop("reference", "copy")
        fixed = {"model.precision": precision, "device": self.device} | options
        return Learner(model, reference=reference, **fixed)

    def model(self, name: str, precision: str = "bfloat16") -> Any:
        """A model of a named shape with random weights, created on the device."""
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        with torch.device(self.device):
            return AutoModelForCausalLM.from_config(config(name, self.tiny), dtype=getattr(torch, precision)).eval()


def config(name: str, tiny: bool) -> Any:
    """The configuration of a shape: gpt2, gpt2-xl, small, neo-1.3b, llama-1b, neox-20b."""
    import transformers as t

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    layers, width, heads = (TINY["layers"], TINY["width"], TINY["heads"]) if tiny else SHAPES[name]
    vocabulary = TINY["vocab_size"] if tiny else VOCABULARIES[name]
    common = {"vocab_size": vocabulary, **ends}
    family = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    match name:
        case "neo-1.3b":
            kinds = [[["global", "local"], layers // 2]] + [[["global"], 1]] * (layers % 2)
            shape = {"num_layers": layers, "hidden_size": width, "num_heads": heads, "attention_types": kinds}
            return t.GPTNeoConfig(**shape, **common)
        case "llama-1b":
            grouped = {"num_key_value_heads": max(1, heads // 4), "intermediate_size": 4 * width}
            return t.LlamaConfig(**family, **grouped, tie_word_embeddings=True, max_position_embeddings=4096, **common)
        case "neox-20b":
            return t.GPTNeoXConfig(**family, intermediate_size=4 * width, **common)
    return t.GPT2Config(n_layer=layers, n_embd=width, n_head=heads, **common)


SHAPES = {
    "small": (4, 256, 4),
    "gpt2": (12, 768, 12),
    "gpt2-xl": (48, 1600, 25),
    "neo-1.3b": (24, 2048, 16),
    "llama-1b": (16, 2048, 32),
    "neox-20b": (44, 6144, 64),
}
"""(layers, width, heads) by name."""
VOCABULARIES = {
    "small": 4096,
    "gpt2": 50_257,
    "gpt2-xl": 50_257,
    "neo-1.3b": 50_257,
    "llama-1b": 128_256,
    "neox-20b": 50_432,
}


def queries(count: int, width: int) -> list[list[int]]:
    """Different prompts of one length."""
    return [[3 + (7 * i + j) % 90 for j in range(width)] for i in range(count)]


def scores(replies: Any) -> list[float]:
    """A cheap reward: the share of even ids."""
    return [sum(t % 2 == 0 for t in r.ids) / len(r.ids) for r in replies]
