"""Trained reward models as a reward: one, or an ensemble. Each reads text with its own tokenizer, and never changes."""

from pathlib import Path
from statistics import fmean

import torch

from operant.data.demonstrations import whole_text
from operant.options import read_mapping
from operant.rewards.classifier import Classifier
from operant.sampling import template_of
from operant.types import Message, OperantError, Rollout, Task, require

__all__ = ["RewardModelScore"]


class RewardModelScore:
    """Scores of prompts with replies: `RewardModelScore("runs/rm-1,runs/rm-2")(rollouts)`.

    models: run folders, folders of classifiers with one label, or Hub names, separated by commas. combine, of several:
    `mean`, `min`, or `lower`: the mean less the standard deviation over the models. minus_reference: subtract the score
    of the task's first reference (a reply that a person wrote) where there is one. steps: the model has learnt from
    labels of steps (a process reward model): the reply until the end of each of its lines is scored, and the score of
    the reply is the `min` (Lightman et al. 2023), `mean` or `last` of them; `none`: the whole reply. batch: texts of a
    pass.
    Raises: OperantError for an unknown `combine` or `steps`, no model, or `combine` of one model.
    """

    def __init__(
        self,
        models: str,
        *,
        combine: str = "mean",
        minus_reference: bool = False,
        steps: str = "none",
        batch: int = 32,
        device: str | None = None,
    ):
        names = [name.strip() for name in models.split(",") if name.strip()]
        exports = [Path(name).expanduser() / "export" for name in names]  # of run folders
        names = [str(export) if export.is_dir() else name for name, export in zip(names, exports)]
        if not names or combine not in ("mean", "min", "lower"):
            raise OperantError(f"reward_model:{models} with combine={combine!r}: name a model, and mean, min or lower")
        if combine != "mean" and len(names) == 1:
            raise OperantError(
                f"reward_model:{models} with combine={combine}: there is one model; name several, separated by commas, "
                "or leave combine out"
            )
        good = steps in ("none", "min", "mean", "last")
        require(good, f"reward_model:{models} with steps={steps!r}: it must be none, min, mean or last")
        self.combine, self.minus_reference, self.steps = combine, minus_reference, steps
        self.members = [Classifier(name, label=0, output="logit", batch=batch, device=device) for name in names]
        self.__name__ = "reward_model"

    def check(self) -> None:
        """Load the models. Raises: OperantError for one that cannot be loaded, or has several labels."""
        for member in self.members:
            try:
                member.check()
            except OperantError as error:
                raise OperantError(_not_finished(member.name) or str(error)) from error
            labels = f"{member.name} has {member.labels} labels: use classifier:{member.name}#LABEL"
            require(member.labels == 1, f"reward_model:{labels}")

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        replies = [rollout.messages[len(rollout.messages) - len(rollout.texts) :] for rollout in rollouts]
        asked = [(r.task, reply, r.text.removesuffix(r.reply), r.reply) for r, reply in zip(rollouts, replies)]
        scores = self._of_replies(asked)
        if self.minus_reference:
            known = [(i, rollout) for i, rollout in enumerate(rollouts) if rollout.task.references]
            first = [(r.task, r.task.references[0], r.query, r.task.references[0]) for _, r in known]
            for (i, _), score in zip(known, self._of_replies(first), strict=True):
                scores[i] -= score
        return scores

    def _of_replies(self, attempts: list[tuple[Task, str | list[Message], str, str]]) -> list[float]:
        """One score for each task, reply as messages, the text before the last reply, and that reply."""
        if self.steps == "none":
            return self._scores([(task, reply, head + text) for task, reply, head, text in attempts])
        parts, counts = list[tuple[Task, str | list[Message], str]](), list[int]()
        for task, reply, head, text in attempts:
            lines = text.split("\n")
            ends = [i + 1 for i, line in enumerate(lines) if line.strip()] or [len(lines)]
            for part in ("\n".join(lines[:end]) for end in ends):
                messages = [*reply[:-1], {**reply[-1], "content": part}] if isinstance(reply, list) else part
                parts.append((task, messages, head + part))
            counts.append(len(ends))
        combine = {"min": min, "mean": fmean, "last": lambda scores: scores[-1]}[self.steps]
        return [combine(scores.tolist()) for scores in torch.tensor(self._scores(parts)).double().split(counts)]

    def _scores(self, attempts: list[tuple[Task, str | list[Message], str]]) -> list[float]:
        """One score for each task, reply, and both as one text."""
        if not attempts:
            return []
        found = list[list[float]]()
        for member in self.members:
            templated = template_of(member.tokenizer) is not None
            texts = list[str]()
            for task, reply, text in attempts:  # messages are written by the chat template of this model, if it has one
                is_chat = isinstance(task.prompt, list) and any(isinstance(message, dict) for message in task.prompt)
                texts.append(whole_text(member.tokenizer, task, reply) if templated and is_chat else text)
            found.append(member.score(texts))
        of_models = torch.tensor(found, dtype=torch.float64)
        if self.combine == "min":
            return of_models.amin(0).tolist()
        mean = of_models.mean(0)
        return (mean if self.combine == "mean" else mean - of_models.std(0, correction=0)).tolist()


def _not_finished(name: str) -> str:
    """What is said of a name that cannot be loaded, if it is a run: its kind, or that its training has not ended."""
    folder = Path(name).expanduser()
    run = next((place for place in (folder, folder.parent) if (place / "config.yaml").is_file()), None)
    if run is None:
        return ""
    config = read_mapping(run / "config.yaml")
    if config.get("policy") == "reward_model":
        return f"reward_model:{run} has no model yet, as its training has not ended: operant train --resume {run}"
    return (
        f"reward_model:{run} is a run of {config.get('algorithm', 'ppo')}, which trains a policy: name a run "
        "that trains a reward model (operant train reward-model --tasks PAIRS)"
    )
