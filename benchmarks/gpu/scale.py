"""Tokens a second and memory as batch, length and layers grow 1x to 16x: cost must grow with the tokens, no faster."""

from typing import Any

import transformers as t

from benchmarks.gpu import peak
from benchmarks.gpu.place import Place, queries, scores

BASE = {"batch": 16, "length": 32, "layers": 2}
WORST = 1.5
"""Allowed ratio of the cost per token at 16x to that at 4x; at smaller sizes the fixed costs of a step dominate."""


def main(place: Place, report: Any) -> None:
    found: dict[str, Any] = {}
    good = True
    for axis in BASE:
        for times in place.sized((1, 2, 4, 8, 16), (1, 2)):
            found |= {f"{axis} x{times}/{k}": v for k, v in measured(place, BASE | {axis: BASE[axis] * times}).items()}
            report(**found)
        if not place.tiny:
            growth = found[f"{axis} x16/us_a_token"] / found[f"{axis} x4/us_a_token"]
            found[f"{axis}/growth"] = growth / (4 if axis == "layers" else 1)
            good &= found[f"{axis}/growth"] < WORST
    report(**found, good=good)


def measured(place: Place, size: dict[str, int]) -> dict[str, float]:
    """One step of generation and learning, after a warm-up step."""
    width, vocabulary, heads = place.sized((768, 50_257, 12), (32, 100, 2))
    shape = {"n_layer": size["layers"], "n_embd": width, "n_head": heads, "vocab_size": vocabulary}
    before = peak.reset()
    model = t.GPT2LMHeadModel(t.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).eval().to(place.device)
    options = {"max_tokens": size["length"], "sampling.fixed_length": True, "epochs": 1, "watch_every": 0}
    learner = place.learner(model, **options)

    def step() -> None:
        replies = learner.generate(queries(size["batch"], 8))
        learner.step(replies, scores(replies))

    step()
    seconds = min(place.seconds(step) for _ in range(place.sized(3, 1)))
    tokens = size["batch"] * size["length"]
    return {"tokens_per_s": tokens / seconds, "us_a_token": 1e6 * seconds / tokens, "gb": peak.most() - before}
