"""TRL 0.11.4: the classic `PPOTrainer`, generate + step, with a value head and a copy of the model as reference."""

import time
import warnings
from contextlib import nullcontext

warnings.simplefilter("ignore")

import torch  # noqa: E402
from protocol import Pipe, Steps, queries, rewards  # noqa: E402
from shapes import language_model, tokenizer, trained  # noqa: E402
from transformers import LogitsProcessor, LogitsProcessorList  # noqa: E402
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer  # noqa: E402


class Lengths(LogitsProcessor):
    """Ends row i exactly at its drawn length."""

    def __init__(self, lengths: list, query: int, end: int):
        self.lengths, self.query, self.end = torch.tensor(lengths), query, end

    def __call__(self, ids, scores):
        due = self.lengths == ids.shape[1] - self.query + 1
        scores[:, self.end] = torch.where(due, 1e9, -torch.inf)
        return scores


def make(spec: dict, base: torch.nn.Module, words) -> PPOTrainer:
    low = spec["precision"] == "bfloat16"
    config = PPOConfig(
        exp_name="bench",
        batch_size=spec["queries"],
        mini_batch_size=spec["minibatch"],
        gradient_accumulation_steps=1,
        ppo_epochs=spec["epochs"],
        seed=spec["seed"],
        accelerator_kwargs={"cpu": True} | ({"mixed_precision": "bf16"} if low else {}),
    )
    if spec["lengths"] is None:
        base.generation_config.eos_token_id = None  # every reply has its full length
    model = AutoModelForCausalLMWithValueHead.from_pretrained(base)
    return PPOTrainer(config, model, ref_model=None, tokenizer=words)  # None: a copy of the whole model


def main() -> None:
    pipe = Pipe()
    spec = pipe.spec
    ragged = spec["lengths"] is not None
    words = tokenizer(spec["shape"]["vocab_size"], inside=ragged)
    trainer = make(spec, language_model(spec), words)
    generation = {
        "max_new_tokens": spec["new"],
        "do_sample": True,
        "top_k": 0,
        "top_p": 1.0,
        "pad_token_id": words.pad_token_id,
    }
    generation |= {
        "eos_token_id": words.eos_token_id if ragged else None,
        "batch_size": spec["queries"],
        "return_prompt": False,
    }
    if ragged:
        generation["logits_processor"] = LogitsProcessorList(
            [Lengths(spec["lengths"], spec["query"], words.eos_token_id)]
        )
    low = spec["precision"] == "bfloat16"
    steps = Steps(trainer.optimizer)
    # TRL casts its training passes by itself; `generate` goes past that.
    casting = (lambda: torch.autocast("cpu", torch.bfloat16)) if low else nullcontext
    config, step = trainer.config, 0
    about = {"batch": config.batch_size, "minibatch": config.mini_batch_size, "epochs": config.ppo_epochs}
    about |= {"precision": spec["precision"], "trained": trained(trainer.model.parameters())}
    pipe.next(**about)
    while True:
        prompts = [torch.tensor(ids) for ids in queries(spec, step)]
        start = time.perf_counter()
        with casting(), torch.no_grad():
            replies = trainer.generate(prompts, **generation)
        generate_seconds = time.perf_counter() - start
        scores = [torch.tensor(x) for x in rewards(spec, step, len(replies))]
        trainer.step(prompts, replies, scores)
        step += 1
        pipe.next(
            tokens=sum(len(r) for r in replies), optimizer_steps=steps.take(), phases={"generate": generate_seconds}
        )


if __name__ == "__main__":
    main()
