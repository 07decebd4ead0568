"""100 steps of 256 reviews: GPT-2's shape in full, 4 epochs, minibatch 64, a reward the size of DistilBERT."""

import time
from typing import Any

import torch

from benchmarks.gpu import peak
from benchmarks.gpu.place import Place, queries

STEPS, BAR = 100, 60.0


def main(place: Place, report: Any) -> None:
    replies, tokens = place.sized((256, 24), (8, 4))
    options = {"max_tokens": tokens, "sampling.fixed_length": True, "epochs": 4, "minibatch": replies // 4}
    learner, reward = place.learner("gpt2", **options), classifier(place)
    peak.reset()
    start, phases = time.perf_counter(), {}
    for step in range(place.sized(STEPS, 2)):
        generated = learner.generate(queries(replies, 8))
        begun = time.perf_counter()
        scores = reward(generated)
        judged = time.perf_counter() - begun
        metrics = learner.step(generated, scores) | {"time/reward": judged}
        for name in ("generate", "reward", "observe", "advantage", "update"):
            phases[name] = phases.get(name, 0.0) + metrics[f"time/{name}"]
        place.sync()
        taken, done = time.perf_counter() - start, step + 1
        each = {f"{name}_seconds": seconds / done for name, seconds in phases.items()}
        report(steps=done, step_seconds=taken / done, hundred_seconds=100 * taken / done, gb=peak.most(), **each)
    report(good=place.tiny or 100 * taken / done < BAR)


def classifier(place: Place) -> Any:
    """A reward with the cost of a sentiment classifier: DistilBERT's shape with random weights."""
    import transformers as t

    small = {"dim": 32, "hidden_dim": 64, "n_layers": 1, "n_heads": 2, "vocab_size": 200} if place.tiny else {}
    with torch.device(place.device):
        model = t.DistilBertForSequenceClassification(t.DistilBertConfig(**small)).eval().to(torch.bfloat16)

    @torch.no_grad()
    def reward(rollouts: list[Any]) -> list[float]:
        ids = torch.tensor([r.turns[-1].prompt + r.ids for r in rollouts], device=place.device)
        logits = model(ids % model.config.vocab_size).logits
        return logits.float().softmax(-1)[:, 1].tolist()

    return reward
