"""What is looked at beside the training: held-out tasks, and the probe queries. Nothing of the run changes by it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from operant.runs.build import Built
from operant.runs.config import TrainOptions
from operant.runs.evaluate import Evaluation
from operant.runs.folder import RunFolder
from operant.types import OperantError


class Looks:
    """The looks of a run. `aside` puts back what a look has moved of the user's own: a reward that counts, say."""

    def __init__(
        self,
        built: Built,
        folder: RunFolder,
        options: TrainOptions,
        aside: Callable[[], AbstractContextManager[None]],
    ):
        self.built, self.folder, self.options, self.aside = built, folder, options, aside
        self.before: Evaluation | None = None
        self.probed: dict[str, float] = {}
        """What the probes told once, before training."""
        self._evaluated: tuple[int, Evaluation] | None = None

    def first(self) -> None:
        """Before any step."""
        self.before = self.evaluate()
        self._first_probe()

    def after(self, step: int) -> dict[str, float]:
        """Held-out tasks and probe queries, where this step is one of theirs; as metrics."""
        options, told = self.options, {}
        last = step >= options.steps
        if options.evaluate_every and (last or step % options.evaluate_every == 0):
            evaluation = self.evaluate()
            told |= evaluation.metrics() if evaluation is not None else {}
            told |= self.before.as_before() if self.before is not None else {}
        if last or step % options.probe_every == 0:
            told |= self.probe(step)
        return told | self.probed if step == 1 else told

    def evaluate(self) -> Evaluation | None:
        """Judge the held-out tasks, with the same random numbers every time; None where there are none."""
        step = self.built.learner.progress.step
        if self.built.evaluator is not None and (self._evaluated is None or self._evaluated[0] != step):
            with self.aside():
                self._evaluated = step, self.built.evaluator()
        return self._evaluated[1] if self._evaluated is not None else None

    def probe(self, step: int) -> dict[str, float]:
        """Ask the probe queries and write the answers. A reward that fails on them stops nothing."""
        probes = self.built.probes
        if probes is None:
            return {}
        try:
            with self.aside():
                answers = probes.ask()
            self.folder.probes(step, answers.rows)
            return answers.metrics | self.probed
        except OperantError as error:
            self.folder.say(f"the probe queries of step {step} were left out: {error}")
            return {}

    def _first_probe(self) -> None:
        """What is asked once: the policy before training, the reference, and whether the query decides the score."""
        first, probes = self.probe(0), self.built.probes
        if probes is None or "probe/reward" not in first:
            return
        self.probed["probe/reward_before"] = first["probe/reward"]
        try:
            with self.aside():
                reference, share = probes.ask_reference(), probes.query_share()
            self.probed |= share
            if reference is not None:
                self.probed |= reference.metrics
                self.folder.probes(None, reference.rows)
        except OperantError as error:
            self.folder.say(f"the reference's answers to the probe queries were left out: {error}")

    def as_plain(self) -> dict[str, Any]:
        """What a checkpoint keeps of the looks before training."""
        return {"before": self.before.as_plain() if self.before is not None else None, "probed": self.probed}

    def go_on(self, held: Mapping[str, Any]) -> None:
        """Take it from there."""
        self.before = Evaluation.from_plain(held["before"]) if held["before"] is not None else None
        self.probed = held.get("probed") or {}
