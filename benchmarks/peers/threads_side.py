"""operant: PPO steps on a shape, with a number of threads or the number that the library chooses."""

import time

import torch
from protocol import Pipe
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from operant import Learner


def model(shape: dict):
    torch.manual_seed(0)
    kind = {"gpt2": (GPT2Config, GPT2LMHeadModel), "llama": (LlamaConfig, LlamaForCausalLM)}[shape["kind"]]
    return kind[1](kind[0](**shape["config"], bos_token_id=0, eos_token_id=0, pad_token_id=0))


def main() -> None:
    pipe = Pipe()
    spec = pipe.spec
    options = {"max_tokens": spec["tokens"], "fixed_length": True, "threads": spec["threads"], "watch_every": 0}
    learner = Learner(model(spec["shape"]), **options, **spec["options"])
    queries = [[3 + (7 * i + j) % 90 for j in range(8)] for i in range(spec["replies"])]
    pipe.next(threads=torch.get_num_threads(), parameters=sum(p.numel() for p in learner.policy.model.parameters()))
    while True:
        start = time.perf_counter()
        replies = learner.generate(queries)
        metrics = learner.step(replies, [float(r.ids[0] % 7) for r in replies])
        phases = {name: metrics[f"time/{name}"] for name in ("generate", "observe", "update")}
        pipe.next(seconds=time.perf_counter() - start, phases=phases, peak_mb=0.0)


if __name__ == "__main__":
    main()
