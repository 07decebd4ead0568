"""Prompts scored by what a frozen task model answers to them: the reward of RLPrompt (arXiv:2205.12548)."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch

from operant.apps.prompts.baselines import check_names
from operant.apps.prompts.examples import Examples, examples_of
from operant.apps.prompts.measures import CONTENT_FREE, MEASURES, bias
from operant.apps.prompts.task_models import Kind, TaskModel, task_model
from operant.apps.prompts.templates import PromptTemplate, set_named
from operant.sampling import counter
from operant.types import Judgement, OperantError, Rollout, Task, require

__all__ = ["PromptReward"]

Measure = Literal["gap", "gap-historic", "accuracy", "likelihood", "margin"]
Calibration = Literal["none", "mean", "contextual"]
PARTS = ("accuracy", "gap", "likelihood", "margin")
"""Measures that are logged of every prompt, whichever is paid."""


class BestPrompt(NamedTuple):
    """A prompt that was scored, with the means over the times that it was."""

    text: str
    ids: list[int]
    """The policy's tokens of it."""
    score: float
    accuracy: float
    times: int
    step: int
    """The version of the weights that first wrote it."""


class PromptReward:
    """The reply as a prompt, scored on the labelled texts of its task: `PromptReward("./roberta")(rollouts)`.

    model: the task model, as `prompts.task_models.task_model` takes it. template, words: by default those of the
    published set that the target of the task names; a template alone by the kind of the model. kind: masked, causal,
    encoder-decoder or callable; None: as the model's config says. measure: what a score is, the mean over the texts
    (`prompts.measures`). calibrate: `mean` subtracts each class's mean log-prob over the scored texts; `contextual`
    divides by the probabilities on texts without content. examples: texts of a training task that are drawn for each
    step, equally for all prompts; None: all. seed: of these draws. prompt_tokens: tokens of the task model that the
    longest text must leave for the prompt, with which lengths are checked before training. batch_tokens, share,
    cache_gb: as in `prompts.task_models.task_model`; sentences that are kept over steps make scores a quarter quicker,
    and a resumed run different in the last bits. keep: the best prompts that are remembered; a run lists ten of them at
    its end. compare: baselines (`prompts.baselines`) that a run ends with, searches at as many calls as training took.
    Raises: OperantError for an unknown measure, calibration or kind, and for numbers out of range.
    """

    __name__ = "prompt"

    def __init__(
        self,
        model: Any = None,
        *,
        template: str | None = None,
        words: tuple[str, ...] | None = None,
        kind: Kind | None = None,
        measure: Measure = "gap",
        calibrate: Calibration = "none",
        examples: int | None = None,
        seed: int = 0,
        prompt_tokens: int = 20,
        batch_tokens: int | None = None,
        share: bool = True,
        cache_gb: float = 0.0,
        keep: int = 20,
        compare: tuple[str, ...] = ("none", "manual", "random"),
        device: str | None = None,
    ):
        require(model is not None, "reward prompt needs a task model that answers the prompts: prompt:./roberta")
        for option, value, names in (("measure", measure, Measure), ("calibrate", calibrate, Calibration)):
            allowed = get_args(names)
            require(value in allowed, f"reward prompt: {option}={value!r}: it must be one of {', '.join(allowed)}")
        for option, value, least in (("examples", examples, 1), ("prompt_tokens", prompt_tokens, 0), ("keep", keep, 1)):
            if value is not None and value < least:
                raise OperantError(f"reward prompt: {option}={value}: it must be at least {least}")
        self.given, self.kind, self.device = model, kind, device
        self.template = None if template is None else PromptTemplate(template)
        self.words, self.measure, self.calibrate = words and tuple(words), measure, calibrate
        self.compare = compare
        self.examples, self.seed, self.prompt_tokens, self.keep = examples, seed, prompt_tokens, keep
        self.reading: dict[str, Any] = {"batch_tokens": batch_tokens, "share": share, "cache_gb": cache_gb}
        self.notes: list[str] = []
        """Sentences for the log of a run."""
        self._model: TaskModel | None = None
        self._trained: set[Examples] = set()
        """The examples of training tasks, once they are read: only of these, some are drawn."""
        self._best: dict[str, BestPrompt] = {}
        self.calls = 0
        """Prompts x texts that training has cost."""

    @property
    def model(self) -> TaskModel:
        """The task model, loaded when it is first asked for. Raises: OperantError as `task_model`."""
        if self._model is None:
            self._model = task_model(self.given, self.kind, self.device, **self.reading)
            self.notes = self._model.notes
        return self._model

    def __call__(self, rollouts: list[Rollout]) -> list[Judgement]:
        """The judgement of each reply. Equal prompts with equal texts are computed once.

        Raises: OperantError as `check_task`, and as `TaskModel.of_pairs`.
        """
        read = {id(rollout.task): rollout.task for rollout in rollouts}
        step = max((turn.version for rollout in rollouts for turn in rollout.turns), default=0)
        examples_in = {key: examples_of(task) for key, task in read.items()}
        of_task = {key: self.drawn(examples, step) for key, examples in examples_in.items()}
        # Places of rollouts by their examples, and those by template and words: each of these is one call of the model.
        groups: dict[tuple[PromptTemplate, tuple[str, ...]], dict[Examples, list[int]]] = {}
        settings = {examples: self.setting(examples) for examples in dict.fromkeys(of_task.values())}
        for i, rollout in enumerate(rollouts):
            examples = of_task[id(rollout.task)]
            groups.setdefault(settings[examples], {}).setdefault(examples, []).append(i)
        judged: dict[int, Judgement] = {}
        before = self.model.calls
        for (template, words), some in groups.items():
            for i, parts in self._measured(rollouts, some, template, words).items():
                judged[i] = Judgement(parts[self.measure], {name: parts[name] for name in PARTS})
                if not self._trained or examples_in[id(rollouts[i].task)] in self._trained:
                    self.remember(rollouts[i], judged[i], step)
        for text in sorted(self._best, key=lambda text: -self._best[text].score)[self.keep :]:
            del self._best[text]
        if not self._trained or any(examples in self._trained for examples in examples_in.values()):
            self.calls += self.model.calls - before
        return [judged[i] for i in range(len(rollouts))]

    def drawn(self, examples: Examples, step: int) -> Examples:
        """The examples of a step: some of a training task's, with the classes in proportion; all of any other's."""
        if self.examples is None or self.examples >= len(examples) or (self._trained and examples not in self._trained):
            return examples
        key = counter(self.seed, "prompt examples", step, examples.name)
        return examples.shuffled(key).at(range(self.examples))

    def _measured(
        self,
        rollouts: list[Rollout],
        groups: dict[Examples, list[int]],
        template: PromptTemplate,
        words: tuple[str, ...],
    ) -> dict[int, dict[str, float]]:
        free = CONTENT_FREE if self.calibrate == "contextual" else ()
        grids = [
            (list(dict.fromkeys(rollouts[i].reply for i in places)), (*examples.texts, *free))
            for examples, places in groups.items()
        ]
        pairs = [(prompt, text) for prompts, texts in grids for prompt in prompts for text in texts]
        logprobs, begin, found = self.model.of_pairs(template, pairs, words), 0, dict[int, dict[str, float]]()
        for (examples, places), (prompts, texts) in zip(groups.items(), grids, strict=True):
            end = begin + len(prompts) * len(texts)
            of_group = logprobs[begin:end].view(len(prompts), len(texts), len(words))
            scored, begin = of_group[:, : len(examples)], end
            scores = scored - bias(self.calibrate, scored, of_group[:, len(examples) :])
            labels = torch.tensor(examples.labels)
            of_prompts = {name: measure(scores, labels).mean(1).tolist() for name, measure in MEASURES.items()}
            column = {prompt: j for j, prompt in enumerate(prompts)}
            for i in places:
                found[i] = {name: values[column[rollouts[i].reply]] for name, values in of_prompts.items()}
        return found

    def setting(self, examples: Examples) -> tuple[PromptTemplate, tuple[str, ...]]:
        """The template and the words for some examples. Raises: OperantError if no words are known."""
        return self.template or self.model.template_for(examples.name), self._words(examples.name)

    def _words(self, name: str) -> tuple[str, ...]:
        published = set_named(name)
        words = self.words or (published.words if published else None)
        if words is None:
            raise OperantError(
                f"reward prompt: {name!r} is no published set, so the words of its classes are unknown: give them in "
                "the order of the labels, --reward.words terrible,great"
            )
        return words

    def check(self) -> None:
        """Load the task model, and check the baselines, and the template and the words, if they are given.

        Raises: OperantError as `task_model`, `check_names` and `TaskModel.check`.
        """
        model = self.model  # loaded here in any case: `check_task` asks a loaded one only
        check_names(self.compare, model)
        if self.words:
            model.check(self.template or PromptTemplate(model.template), self.words)

    def check_task(self, task: Task) -> None:
        """Raises: OperantError for a task without examples, a label without a word, and what cannot be calibrated.

        Once the model is loaded, also for a text that leaves no room for the prompt, and as `TaskModel.check`.
        """
        examples = examples_of(task)
        words = self._words(examples.name)
        if max(examples.labels) >= len(words):
            raise OperantError(
                f"the task {task.id!r} has the label {max(examples.labels)}, and there are {len(words)} words "
                f"({', '.join(words)}): give a word for each label from 0"
            )
        scored = min(self.examples or len(examples), len(examples))
        if self.calibrate == "mean" and scored < 2:
            raise OperantError(
                f"the task {task.id!r} is scored on {scored} text: the mean over one text is that text itself, and "
                "calibrate=mean would leave nothing; take calibrate=contextual, or more examples"
            )
        if self._model is not None:
            template, words = self.setting(examples)
            self._model.check(template, words)
            lengths = self.model.tokens(template, [("", text) for text in examples.texts])
            if lengths and (most := max(lengths)) + self.prompt_tokens > self.model.longest:
                text = examples.texts[lengths.index(most)]
                raise OperantError(
                    f"the text {text[:60]!r} ... of {examples.name!r} has {most} tokens in its template, and with a "
                    f"prompt of {self.prompt_tokens} it is too long for {self.model.name!r}, which reads "
                    f"{self.model.longest}: texts are not cut; leave it out, or lower --reward.prompt-tokens"
                )

    def read_tasks(self, tasks: Sequence[Task]) -> None:
        """Learn which examples are for training. Raises: OperantError for one class only, or one without a text."""
        self._trained = {examples_of(task) for task in tasks}
        self._check_classes(tasks)

    def read_held_out(self, tasks: Sequence[Task]) -> None:
        """Look at held-out tasks of several texts together. Raises: OperantError as `read_tasks`."""
        self._check_classes([task for task in tasks if len(examples_of(task)) > 1])

    def _check_classes(self, tasks: Sequence[Task]) -> None:
        by_name: dict[str, list[Examples]] = {}
        for examples in map(examples_of, tasks):
            by_name.setdefault(examples.name, []).append(examples)
        for name, some in by_name.items():
            texts, labels = (tuple(x for one in some for x in getattr(one, field)) for field in ("texts", "labels"))
            words = self._words(name)
            Examples(name, texts, labels).check_classes(words, f"reward prompt: {name!r}")

    @property
    def best(self) -> list[BestPrompt]:
        """The best prompts of training so far, the best one first; few texts flatter the best of many prompts."""
        return sorted(self._best.values(), key=lambda prompt: -prompt.score)

    def remember(self, rollout: Rollout, judgement: Judgement, step: int) -> None:
        """Take a judgement into the means of its prompt."""
        old = self._best.get(rollout.reply) or BestPrompt(rollout.reply, rollout.ids, 0.0, 0.0, 0, step)
        score, accuracy, times = judgement.score, judgement.parts["accuracy"], old.times + 1
        assert isinstance(score, float)  # as `_measured` makes it
        self._best[rollout.reply] = old._replace(
            score=old.score + (score - old.score) / times,
            accuracy=old.accuracy + (accuracy - old.accuracy) / times,
            times=times,
        )

    def state_dict(self) -> dict[str, object]:
        """The best prompts, and the calls so far."""
        return {"best": [list(prompt) for prompt in self._best.values()], "calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._best = {prompt[0]: BestPrompt(*prompt) for prompt in state["best"]}
        self.calls = state["calls"]
