"""TRL 1.12.0: its last `PPOTrainer`, with four networks: policy, reference, values (full size) and reward.

The reward must be a sequence classifier that reads the policy's ids; here it is one block of width 8, whose cost is
measured and reported.
"""

import time
import warnings
from copy import deepcopy

warnings.simplefilter("ignore")

import torch  # noqa: E402
from hf_side import ENDLESS, Turn, arguments, cast, dataset, prompts  # noqa: E402
from protocol import Pipe  # noqa: E402
from shapes import configuration, language_model, tokenizer, trained  # noqa: E402
from transformers import GPT2ForSequenceClassification  # noqa: E402
from trl.experimental.ppo import PPOConfig, PPOTrainer  # noqa: E402
from trl.experimental.utils import get_reward  # noqa: E402


def make(spec: dict, turn: Turn) -> PPOTrainer:
    base, words = language_model(spec), tokenizer(spec["shape"]["vocab_size"])
    values, reward = (
        GPT2ForSequenceClassification(_labelled(shape))
        for shape in (spec["shape"], spec["shape"] | {"n_embd": 8, "n_layer": 1, "n_head": 1})
    )
    config = PPOConfig(
        **arguments(spec),
        per_device_train_batch_size=spec["queries"],
        gradient_accumulation_steps=1,
        num_mini_batches=spec["queries"] // spec["minibatch"],
        num_ppo_epochs=spec["epochs"],
        total_episodes=ENDLESS,
        local_rollout_forward_batch_size=spec["queries"],
        num_sample_generations=0,
        response_length=spec["new"],
        temperature=1.0,
        kl_coef=0.2,
    )
    reference, generate = deepcopy(base), base.generate

    def counted(*args, **kwargs):
        start = time.perf_counter()
        out = generate(*args, **kwargs)
        turn.phases["generate"] = time.perf_counter() - start
        turn.tokens += out.sequences[:, spec["query"] :].numel()
        return out

    base.generate = counted
    trainer = PPOTrainer(
        args=config,
        processing_class=words,
        model=base,
        ref_model=reference,
        reward_model=reward,
        value_model=values,
        train_dataset=dataset(input_ids=prompts(spec)),
        callbacks=[turn],
    )
    if config.bf16:  # its own autocast covers only the training passes
        cast(base, "generate")
        cast(trainer.ref_model, "forward")
        cast(values.transformer, "forward")
        cast(reward.transformer, "forward")
    return trainer


def _labelled(shape: dict):
    config = configuration(shape)
    config.num_labels = 1
    return config


@torch.no_grad()
def reward_seconds(trainer: PPOTrainer, spec: dict) -> float:
    """Seconds of the reward network per step."""
    rows = torch.ones(spec["queries"], spec["query"] + spec["new"], dtype=torch.long)
    start = time.perf_counter()
    get_reward(trainer.reward_model, rows, trainer.processing_class.pad_token_id, spec["query"])
    return time.perf_counter() - start


def main() -> None:
    turn = Turn(Pipe())
    spec = turn.pipe.spec
    trainer = make(spec, turn)
    args = trainer.args
    spent = min(reward_seconds(trainer, spec) for _ in range(5))
    kind = "bfloat16" if args.bf16 else "float32"
    turn.ready(
        trainer,
        batch=args.batch_size,
        minibatch=args.mini_batch_size,
        epochs=args.num_ppo_epochs,
        precision=kind,
        trained=trained(trainer.model.parameters()),
        note=f"its reward network is a block of width 8: {1000 * spent:.1f} ms a step",
    )
    trainer.train()


if __name__ == "__main__":
    main()
