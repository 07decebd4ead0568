"""Shared by the sides that use transformers' Trainer: its own loop runs, and a callback ends each step."""

import functools
import tempfile

import torch
from datasets import Dataset
from protocol import Pipe, Steps, queries
from transformers import TrainerCallback

ENDLESS = 1_000_000


class Turn(TrainerCallback):
    """Answers at the end of every step, then waits for the next command."""

    def __init__(self, pipe: Pipe):
        self.pipe, self.tokens, self.steps, self.phases = pipe, 0, None, {}

    def ready(self, trainer, **about) -> None:
        """Answer that the side is ready, before the loop starts."""
        self.steps = Steps(trainer.optimizer if trainer.optimizer is not None else trainer.create_optimizer())
        self.pipe.next(**about)

    def on_step_end(self, args, state, control, **ignored):
        tokens, self.tokens = self.tokens, 0
        self.pipe.next(tokens=tokens, optimizer_steps=self.steps.take(), phases=dict(self.phases))


def arguments(spec: dict) -> dict:
    """Training arguments of both kinds of trainer, without saving, logging or gradient checkpointing."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "bf16": spec["precision"] == "bfloat16",
        "gradient_checkpointing": False,
        "learning_rate": 1.41e-5,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": ENDLESS,
        "disable_tqdm": True,
        "seed": spec["seed"],
    }


def prompts(spec: dict, steps: int = 200) -> list[list[int]]:
    """The prompts of many steps; the trainer cycles through them."""
    return [ids for step in range(steps) for ids in queries(spec, step)]


def dataset(**columns: list) -> Dataset:
    return Dataset.from_dict(columns)


def cast(module: torch.nn.Module, *names: str) -> None:
    """Run methods of a model under bfloat16 autocast, where the trainer does not apply its own."""
    for name in names:
        plain = getattr(module, name)

        @functools.wraps(plain)
        def under(*args, _plain=plain, **kwargs):
            with torch.autocast("cpu", torch.bfloat16):
                return _plain(*args, **kwargs)

        setattr(module, name, under)
