"""TRL 1.16.0: `GRPOTrainer` and `RLOOTrainer`, with transformers' generate or its continuous batching."""

import time
import warnings

warnings.simplefilter("ignore")

import torch  # noqa: E402
from hf_side import ENDLESS, Turn, arguments, cast, dataset, prompts  # noqa: E402
from protocol import Pipe  # noqa: E402
from shapes import language_model, tokenizer, trained  # noqa: E402
from transformers.generation import ContinuousBatchingConfig  # noqa: E402, F401, counted among the imports
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # noqa: E402

KINDS = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}
PAGE = 32
"""Tokens per block of the paged cache; a query with its reply fits into one."""


class Scores:
    """A reward of random numbers, which also counts the tokens of the replies."""

    __name__ = "scores"

    def __init__(self, turn: Turn):
        self.turn = turn

    def __call__(self, prompts, completions, completion_ids, **ignored):
        self.turn.tokens += sum(len(ids) for ids in completion_ids)
        return torch.randn(len(completion_ids)).tolist()


def make(spec: dict, turn: Turn):
    """A trainer that takes one optimizer step per batch, on all samples of all prompts."""
    settings, trainer = KINDS[spec["algorithm"]]
    rows = spec["queries"] * spec["groups"]
    options = arguments(spec) | {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": 1,
        "num_generations": spec["groups"],
        "max_completion_length": spec["new"],
        "num_iterations": spec["epochs"],
        "beta": 0.0,
        "max_steps": ENDLESS,
        "max_grad_norm": 1.0,
    }
    if spec.get("continuous"):
        blocks = 2 * rows * (1 + (spec["query"] + spec["new"]) // PAGE)
        paged = {"page_size": PAGE, "num_blocks": blocks, "max_batch_tokens": rows * spec["query"]}
        options |= {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": paged}
    model = language_model(spec)
    model.generation_config.eos_token_id = None  # every reply has its full length
    if spec["precision"] == "bfloat16":
        cast(model, "generate")
    timed(model, turn, "generate_batch" if spec.get("continuous") else "generate")
    texts = [" ".join(f"t{i}" for i in ids) for ids in prompts(spec)]
    return trainer(
        model=model,
        reward_funcs=Scores(turn),
        args=settings(**options),
        train_dataset=dataset(prompt=texts),
        processing_class=tokenizer(spec["shape"]["vocab_size"]),
        callbacks=[turn],
    )


def timed(model, turn: Turn, name: str) -> None:
    plain = getattr(model, name)

    def measured(*args, **kwargs):
        start = time.perf_counter()
        out = plain(*args, **kwargs)
        turn.phases["generate"] = time.perf_counter() - start
        return out

    setattr(model, name, measured)


def main() -> None:
    turn = Turn(Pipe())
    trainer = make(turn.pipe.spec, turn)
    args = trainer.args
    turn.ready(
        trainer,
        batch=args.generation_batch_size,
        minibatch=args.per_device_train_batch_size * args.gradient_accumulation_steps,
        epochs=args.num_iterations,
        precision="bfloat16" if args.bf16 else "float32",
        trained=trained(trainer.model.parameters()),
    )
    trainer.train()


if __name__ == "__main__":
    main()
