"""Evaluation during training: held-out tasks and probe prompts. It does not change the training."""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from operant import distributed
from operant.runs.config import TrainOptions
from operant.runs.evaluate import Evaluation
from operant.runs.folder import RunFolder
from operant.runs.parts import RunParts
from operant.storage import atomic_io
from operant.types import OperantError


class PeriodicEvaluation:
    """Evaluates held-out tasks and probe prompts before training, every few steps, and after the last step.

    isolated_state: a context manager that restores the state of the reward, the environment and the task source.
    """

    def __init__(
        self,
        parts: RunParts,
        folder: RunFolder,
        options: TrainOptions,
        isolated_state: Callable[[], AbstractContextManager[None]],
    ):
        self.parts, self.folder, self.options, self.isolated_state = parts, folder, options, isolated_state
        self.before: Evaluation | None = None
        """The held-out tasks before training."""
        self.probed: dict[str, float] = {}
        """Metrics of the probe prompts that are measured only before training."""
        self._latest: tuple[int, Evaluation] | None = None
        """The latest evaluation of the held-out tasks, and its step."""
        self.started = False
        """Whether the initial policy has been evaluated."""

    def before_training(self) -> None:
        """Evaluate the initial policy; also measure the reference and how much of the score the prompt determines."""
        self.before, self.started = self.evaluate(), True
        first, probes = self.probe(0), self.parts.probes
        if probes is None or "probe/reward" not in first:
            return
        self.probed["probe/reward_before"] = first["probe/reward"]
        try:
            with self.isolated_state():
                reference, share = probes.ask_reference(), probes.query_share()
            self.probed |= share
            if reference is not None:
                rows, metrics = reference
                self.probed |= metrics
                self.folder.probes(None, rows)
        except OperantError as error:
            self.folder.log_message(f"the reference's answers to the probe prompts were left out: {error}")

    def after_step(self, step: int) -> dict[str, float]:
        """Evaluate held-out tasks and probe prompts if they are due after this step, and return their metrics."""
        options, metrics = self.options, {}
        last = step >= options.steps
        if options.evaluate_every and (last or step % options.evaluate_every == 0):
            evaluation = self.evaluate()
            metrics |= evaluation.metrics() if evaluation is not None else {}
            metrics |= self.before.as_before() if self.before is not None else {}
        if last or step % options.probe_every == 0:
            metrics |= self.probe(step)
        return metrics | self.probed if step == 1 else metrics

    def after_training(self, warn: Callable[[str], object]) -> Evaluation | None:
        """Evaluate the held-out tasks, and write `evaluation.json`. warn: is told if the disk refuses it."""
        after, evaluator = self.evaluate(), self.parts.evaluator
        if after is None or evaluator is None:
            return None
        labels = evaluator.judged_labels()
        results = {"before": self.before.as_plain() if self.before else None, "after": after.as_plain()}
        if distributed.rank() == 0:
            try:
                content = json.dumps(results | ({"labels": labels} if labels else {}), indent=1)
                atomic_io.write(self.folder.path / "evaluation.json", content)
            except OperantError as error:
                warn(str(error))
        return after

    def evaluate(self) -> Evaluation | None:
        """Evaluate the held-out tasks, with the same random numbers every time; None if there are no such tasks."""
        step = self.parts.learner.progress.step
        if self.parts.evaluator is not None and (self._latest is None or self._latest[0] != step):
            with self.isolated_state():
                self._latest = step, self.parts.evaluator()
        return self._latest[1] if self._latest is not None else None

    def probe(self, step: int) -> dict[str, float]:
        """Answer the probe prompts, write the answers and return their metrics. An error of the reward is logged."""
        probes = self.parts.probes
        if probes is None:
            return {}
        try:
            with self.isolated_state():
                rows, metrics = probes.ask()
            self.folder.probes(step, rows)
            return metrics | self.probed
        except OperantError as error:
            self.folder.log_message(f"the probe prompts of step {step} were left out: {error}")
            return {}

    def state_dict(self) -> dict[str, Any]:
        """The evaluation before training, as plain data."""
        before = self.before.as_plain() if self.before is not None else None
        return {"before": before, "probed": self.probed, "started": self.started}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; further keys are ignored."""
        self.before = Evaluation.from_plain(state["before"]) if state["before"] is not None else None
        self.probed = state.get("probed") or {}
        self.started = state.get("started", True)
