"""One whole PPO step with its peak memory at the shapes of GPT-2 XL, GPT-Neo 1.3B and GPT-NeoX 20B, in bfloat16.

Of steps that train all weights, the update's FLOP/s are given, too (`flops.py` says which are counted).
"""

from typing import Any

from benchmarks.gpu import flops, peak
from benchmarks.gpu.place import Place, queries, scores

ROWS = {
    "gpt2-xl full": ("gpt2-xl", {}),
    "neo-1.3b full": ("neo-1.3b", {}),
    "neox-20b trunk": ("neox-20b", {"model.train_layers": "auto"}),
    "neox-20b lora": ("neox-20b", {"lora.rank": 16}),
}


def main(place: Place, report: Any) -> None:
    good = True
    for name, (shape, options) in ROWS.items():
        try:
            report(**{f"{name}/{k}": v for k, v in measured(place, shape, options).items()})
        except Exception as error:  # a shape that does not fit must not stop the others
            report(**{f"{name}/error": f"{type(error).__name__}: {error}"[:300]})
            good = False
    report(good=good)


def measured(place: Place, shape: str, options: dict[str, Any]) -> dict[str, float]:
    """Seconds of building, of the first and of the second step, and the peak memory."""
    replies, tokens = place.sized((32, 24), (4, 4))
    peak.reset()
    fixed = {"max_tokens": tokens, "sampling.fixed_length": True, "epochs": 2, "minibatch": replies // 2}
    built: list[Any] = []
    build = place.seconds(lambda: built.append(place.learner(shape, **fixed, **options)))
    learner = built.pop()

    def step() -> None:
        generated = learner.generate(queries(replies, 8))
        learner.step(generated, scores(generated))

    first, seconds = place.seconds(step), place.seconds(step)
    (updated,) = place.updates(learner, step, 1)
    trained = sum(p.numel() for p in learner.policy.trainable())
    whole = sum(p.numel() for p in learner.policy.parameters())
    sizes = {"parameters_m": whole / 1e6, "trained_m": trained / 1e6}
    if not options:
        work = fixed["epochs"] * flops.flops(learner.policy, replies * (8 + tokens), replies * tokens)
        sizes["update_tflops"] = work / updated / 1e12
        sizes["mfu"] = sizes["update_tflops"] / flops.nominal(sizes["update_tflops"])
    return {"build_seconds": build, "first_seconds": first, "step_seconds": seconds, "gb": peak.most(), **sizes}
