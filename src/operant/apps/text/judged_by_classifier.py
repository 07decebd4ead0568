"""Scores by a classifier of transformers: whether a summary follows from its source, and which intent a reply has; and
RL4LMs' reward of dialogues: the predicted intent of a reply, and another score beside it."""

from statistics import fmean
from typing import Any

from operant.rewards import resolve
from operant.rewards.classifier import Classifier
from operant.rewards.combine import weighted
from operant.rewards.text_scores import Score, target_of
from operant.rewards.words import sentences
from operant.types import OperantError, RewardFn, Rollout, Task, require, said_of


class ByClassifier(Score):
    """A score that asks a classifier."""

    needs_references = False
    classifier: Classifier

    def choose_classifier(self, model: str | None, example: str, **options: object) -> None:
        """Raises: OperantError that names the option, if there is no model."""
        require(model, f"{self.__name__}.model is missing: name a classifier, a folder or a Hub name, {example}")
        self.classifier = Classifier(model, **options)
        self.parts = (self.classifier,)

    def check(self) -> None:
        self.classifier.check()


class Consistency(ByClassifier):
    """How far the source of a reply entails it, 0 to 1, as SummaC's zero-shot model (arXiv:2111.09525).

    For each sentence of the reply, the largest probability of entailment by a sentence of the source; their mean. An
    empty reply has 0. model: a classifier of pairs (premise, hypothesis), trained on natural language inference. label:
    the name or number of its label for entailment. The source is the prompt as text, or a text in `task.target`, or in
    its key `field`. batch: pairs of a pass.
    """

    __name__ = "consistency"

    def __init__(
        self,
        model: str | None = None,
        *,
        label: str = "entailment",
        source: str = "prompt",
        field: str | None = None,
        batch: int = 32,
        device: str | None = None,
    ):
        require(source in ("prompt", "target"), f"consistency: source={source!r}: it must be prompt or target")
        if field is not None and source == "prompt":
            raise OperantError(f"consistency.field={field!r}: it is a key of the target; set consistency.source=target")
        self.source, self.field = source, field
        self.choose_classifier(model, "that knows entailment", label=label, batch=batch, device=device)

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        sources = [r.query if self.source == "prompt" else self._target(r.task) for r in rollouts]
        sides = [(sentences(source), sentences(r.reply)) for source, r in zip(sources, rollouts, strict=True)]
        pairs = [(premise, text) for source, reply in sides for text in reply for premise in source]
        found = iter(self.classifier.score(pairs))
        each = [[max((next(found) for _ in source), default=0.0) for _ in reply] for source, reply in sides]
        return [fmean(of_sentences) if of_sentences else 0.0 for of_sentences in each]

    def check_task(self, task: Task) -> None:
        if self.source == "target":
            self._target(task)

    def _target(self, task: Task) -> str:
        target: Any = target_of(task, self.field, "score 'consistency'")
        good = isinstance(target, str) and target.strip()
        require(good, f"score 'consistency': the target of the task {task.id!r} is no text: it must be a source")
        return target


class Intent(ByClassifier):
    """1 if a classifier gives the reply the label that the target of its task names, above every other label; else 0.

    A tie is 0. model: a folder, `builtin:NAME` or Hub name. field: the key of `task.target` that has the label, by name
    or number. text: what the classifier reads, the `reply`, or `text`, query and reply.
    """

    __name__ = "intent"

    def __init__(
        self,
        model: str | None = None,
        *,
        field: str | None = None,
        text: str = "reply",
        batch: int = 32,
        device: str | None = None,
    ):
        own = {"label": 0, "text": text, "batch": batch, "device": device}
        self.choose_classifier(model, "whose labels are the intents", **own)
        self.field = field

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        columns = [self._column(rollout.task) for rollout in rollouts]
        found = self.classifier.of_labels([getattr(rollout, self.classifier.text) for rollout in rollouts])
        rest = [labels[:column] + labels[column + 1 :] for labels, column in zip(found, columns, strict=True)]
        pairs = zip(found, columns, rest, strict=True)
        return [float(all(labels[column] > other for other in others)) for labels, column, others in pairs]

    def check_task(self, task: Task) -> None:
        self._column(task)

    def _column(self, task: Task) -> int:
        with said_of(f"task {task.id!r}"):
            return self.classifier.column(target_of(task, self.field, "score 'intent'"))


def intent(
    model: str | None = None,
    *,
    intent_coef: float = 1.0,
    auto_coef: float = 0.0,
    auto: str = "meteor",
    field: str | None = None,
    text: str = "reply",
    batch: int = 32,
    device: str | None = None,
) -> RewardFn:
    """intent_coef [predicted intent == target] + auto_coef * the reward `auto`, as RL4LMs' `intent_accuracy`.

    The other options are those of `Intent`.
    """
    right = Intent(model, field=field, text=text, batch=batch, device=device)
    both = {"intent": (right, intent_coef)} | ({auto: (resolve(auto), auto_coef)} if auto_coef else {})
    return weighted(both, "intent")
