"""What a prompt is worth that makes a frozen model rewrite sentences in another style (RLPrompt, section 4.2).

A rewrite is worth (content + style) / 2: how much it keeps of the sentence, and how probable its style is, both 0 to
100. A prompt draws several groups of rewrites of a sentence, and is worth the mean of the best of each group.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch

from operant.apps.prompts.transfer import TEMPLATE, Rewriter, TransferSource, group_maxima, source_of
from operant.options import Factory, arguments
from operant.rewards.bertscore import BertScore, Tokens, greedy_matching
from operant.rewards.classifier import OF_TASK, Classifier
from operant.rewards.perplexity import Perplexity
from operant.rewards.words import f_measure
from operant.types import Judgement, OperantError, Rollout, Task, require, shown

__all__ = ["StyleTransfer", "TransferQuality"]

PAIRS = 500
"""Most pairs of sentences that `baseline=None` measures."""


class Rewrites(NamedTuple):
    """Rewrites of a sentence with a prompt, and for each of them what it keeps and how probable its style is."""

    texts: list[str]
    content: list[float]
    style: list[float]

    @property
    def scores(self) -> list[float]:
        """What each of them is worth."""
        return [(content + style) / 2 for content, style in zip(self.content, self.style, strict=True)]

    @property
    def best(self) -> int:
        """Index of the best one, the first of equal ones."""
        return max(range(len(self.texts)), key=self.scores.__getitem__)


class StyleTransfer:
    """A `Judgement` of the prompt in each reply, 0 to 100: `StyleTransfer("./gpt2", content_model="./roberta")`.

    model: the frozen task model that rewrites, and template, top_k, temperature, max_tokens, quote, ends, prompt_tokens
    and seed: as of `prompts.transfer.Rewriter`. groups, samples: groups of rewrites, and rewrites of each group.
    content: `bertscore`, F of BERTScore, or `embedding`, the cosine of the means of both texts' token vectors, by the
    hidden states of `content_model` (any model of transformers; `layer`: which of them, None: the last). baseline: x
    counts as (x - baseline) / (1 - baseline), and as 0 below it, so that unrelated sentences have about 0; None: the
    mean over pairs of the tasks' sentences, which is measured once before training.
    style_model: a classifier, which has the label in the target of each task. An empty rewrite is worth 0.
    batch: texts of a pass of content_model and style_model; rows: of rewrites that are decoded at a time.
    The parts are means over rewrites: `content`, `style`, `single` (what one is worth), and those of the best rewrite,
    which is the message: `top_content`, `top_style`.
    Raises: OperantError without a model or content_model, and for a value out of range.
    """

    __name__ = "style_transfer"

    def __init__(
        self,
        model: Any = None,
        *,
        content_model: str | None = None,
        content: Literal["bertscore", "embedding"] = "bertscore",
        layer: int | None = None,
        baseline: float | None = 0.0,
        style_model: str = "builtin:sentiment",
        groups: int = 4,
        samples: int = 32,
        template: str = TEMPLATE,
        top_k: int = 10,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        quote: str = '"',
        ends: str = ".!?",
        prompt_tokens: int = 32,
        seed: int = 0,
        rows: int = 256,
        batch: int = 32,
        device: str | None = None,
    ):
        for name, value in (("model", model), ("content_model", content_model)):
            if value is None or value == "":
                what = "that rewrites sentences" if name == "model" else "whose hidden states compare their content"
                raise OperantError(f"style_transfer.{name} is missing: name the model {what}, a folder or builtin:NAME")
        for name, value, good, rule in (
            ("content", content, content in ("bertscore", "embedding"), "must be bertscore or embedding"),
            ("baseline", baseline, baseline is None or -1 <= baseline < 1, "must be None or lie in [-1, 1)"),
            ("groups", groups, groups >= 1, "must be at least 1"),
            ("samples", samples, samples >= 1, "must be at least 1"),
        ):
            require(good, f"style_transfer.{name}={shown(value)}: it {rule}")
        self.content, self.baseline, self.groups, self.samples = content, baseline, groups, samples
        self.prompt_tokens = prompt_tokens
        self.rewriter = Rewriter(
            model,
            template=template,
            top_k=top_k,
            temperature=temperature,
            max_tokens=max_tokens,
            quote=quote,
            ends=ends,
            prompt_tokens=prompt_tokens,
            seed=seed,
            batch=rows,
            device=device,
        )
        self.reader = BertScore(content_model, layer=layer, batch=batch, device=device)
        self.styles = Classifier(style_model, label=OF_TASK, batch=batch, device=device)
        self.notes: list[str] = []
        """Sentences for the log of a run."""

    def check(self) -> None:
        """Load the models. Raises: OperantError for one that cannot be loaded, or is of another kind."""
        self.styles.check()
        self.reader.check()
        self.rewriter.check()

    def check_task(self, task: Task) -> None:
        """Raises: OperantError for a task without sentence and style, with an unknown style, or that is too long."""
        source = source_of(task)
        self.styles.column(source.style)
        self.rewriter.check_sentence(source.sentence)

    def read_tasks(self, tasks: Sequence[Task]) -> None:
        """With baseline=None, measure it on pairs of sentences. Raises: OperantError if they are all the same."""
        if self.baseline is not None:
            return
        sentences = list(dict.fromkeys(source_of(task).sentence for task in tasks))[: PAIRS + 1]
        if len(sentences) < 2:
            raise OperantError("style_transfer.baseline=None needs tasks with two different sentences: give a number")
        read = self.reader.read(sentences)
        self.baseline = fmean(self.likeness(read[a], read[b]) for a, b in pairwise(sentences))
        self.notes.append(f"style_transfer.baseline={self.baseline:.4f}, over {len(sentences) - 1} pairs of sentences")

    def __call__(self, rollouts: list[Rollout]) -> list[Judgement]:
        """The judgement of the prompt in each last reply. Raises: OperantError as `source_of`."""
        asked = [(rollout.reply, source_of(rollout.task)) for rollout in rollouts]
        return [
            Judgement(
                fmean(group_maxima(rewrites.scores, self.groups)),
                {
                    "content": fmean(rewrites.content),
                    "style": fmean(rewrites.style),
                    "single": fmean(rewrites.scores),
                    "top_content": rewrites.content[rewrites.best],
                    "top_style": rewrites.style[rewrites.best],
                },
                message=rewrites.texts[rewrites.best],
            )
            for rewrites in self.rewrites(asked, self.groups * self.samples, "reward")
        ]

    def rewrites(self, asked: Sequence[tuple[str, TransferSource]], count: int, stream: str) -> list[Rewrites]:
        """`count` rewrites for each prompt and source, with content and style; stream: what they are drawn for."""
        drawn = self.rewriter([(prompt, source.sentence) for prompt, source in asked], count, stream)
        written = [text for texts in drawn for text in texts]
        styles = self.styles.score(written, [source.style for _, source in asked for _ in range(count)])
        read = self.reader.read([*written, *(source.sentence for _, source in asked)])
        found = list[Rewrites]()
        for i, ((_, source), texts) in enumerate(zip(asked, drawn, strict=True)):
            content = [self.kept(read[text], read[source.sentence]) if text else 0.0 for text in texts]
            probable = styles[i * count : (i + 1) * count]
            found.append(Rewrites(texts, content, [100 * p if text else 0.0 for text, p in zip(texts, probable)]))
        return found

    def kept(self, rewrite: Tokens, sentence: Tokens) -> float:
        """How much of the sentence a rewrite keeps, 0 to 100. Raises: OperantError before baseline=None is measured."""
        if self.baseline is None:
            raise OperantError(
                "style_transfer.baseline=None is not measured yet: a run does it on its tasks; elsewhere call "
                "read_tasks(tasks), or give a number"
            )
        return 100 * max(0.0, (self.likeness(rewrite, sentence) - self.baseline) / (1 - self.baseline))

    def likeness(self, rewrite: Tokens, sentence: Tokens) -> float:
        """BERTScore's F, or the cosine of the means; at most 1."""
        if self.content == "bertscore":
            return f_measure(*greedy_matching(rewrite, sentence))
        means = [text.weights @ text.vectors for text in (rewrite, sentence)]
        return float(torch.cosine_similarity(*means, dim=0))


class TransferQuality:
    """Content, style, fluency and their joint mean of held-out prompts, 0 to 100: the metric `style_transfer`.

    reward: a `StyleTransfer`, or its options, which draw and select. `samples` rewrites of each sentence are measured:
    `content`, `style` (the share that has the style asked for), `fluency` (the share that is acceptable), `joint` (the
    mean of the product of the three, RLPrompt's J) and `gm` (the geometric mean of their means) are those of single
    rewrites. Those under `selected/` are of the best rewrite of each sentence by the reward, a choice that flatters
    whatever the reward measures.
    style_judge: a classifier that measures the style; None: that of the reward, though one that was trained on other
    texts is the better judge. fluency_model: a classifier of acceptability, whose label `fluency_label` is good;
    without one, joint and gm are those of content and style. perplexity_model: a language model for `perplexity`, of
    all rewrites by tokens.
    Raises: OperantError for an option that the reward does not have, or refuses.
    """

    def __init__(
        self,
        reward: Any = None,
        *,
        samples: int = 32,
        style_judge: str | None = None,
        fluency_model: str | None = None,
        fluency_label: str = "acceptable",
        perplexity_model: str | None = None,
        batch: int = 32,
        device: str | None = None,
    ):
        require(samples >= 1, f"style_transfer.samples={samples}: it must be at least 1")
        if not isinstance(reward, StyleTransfer):
            reward = StyleTransfer(**arguments(Factory(StyleTransfer), reward or {}, "style_transfer.reward"))
        self.reward, self.samples = reward, samples
        how: dict[str, Any] = {"batch": batch, "device": device}
        self.judge = Classifier(style_judge, label=OF_TASK, **how) if style_judge else reward.styles
        self.fluency = Classifier(fluency_model, label=fluency_label, **how) if fluency_model else None
        self.language = Perplexity(perplexity_model, **how) if perplexity_model else None

    def check(self) -> None:
        """Load the models. Raises: OperantError as the reward's."""
        for part in (self.reward, self.judge, self.fluency, self.language):
            if part is not None:
                part.check()

    def check_task(self, task: Task) -> None:
        """Raises: OperantError as the reward's, and for a style that the judge does not know."""
        self.reward.check_task(task)
        self.judge.column(source_of(task).style)

    def read_tasks(self, tasks: Sequence[Task]) -> None:
        """As the reward."""
        self.reward.read_tasks(tasks)

    def __call__(self, rollouts: list[Rollout]) -> dict[str, list[float] | float | None]:
        """By name, lists with the mean over the rewrites of each rollout, and numbers of all."""
        sources = [source_of(rollout.task) for rollout in rollouts]
        asked = [(rollout.reply, source) for rollout, source in zip(rollouts, sources, strict=True)]
        drawn = self.reward.rewrites(asked, self.samples, "evaluation")
        texts, count = [text for one in drawn for text in one.texts], self.samples
        right = shares(self.judge, texts, [source.style for source in sources for _ in range(count)])
        fluent = shares(self.fluency, texts, [self.fluency.label] * len(texts)) if self.fluency else None
        content = [kept for one in drawn for kept in one.content]
        each = {"content": content, "style": right} | ({} if fluent is None else {"fluency": fluent})
        joint = [100 * math.prod(value / 100 for value in values) for values in zip(*each.values(), strict=True)]
        found = dict[str, list[float] | float | None]()
        for before, places in (
            ("", [range(i * count, (i + 1) * count) for i in range(len(drawn))]),
            ("selected/", [[i * count + one.best] for i, one in enumerate(drawn)]),
        ):
            for name, values in {**each, "joint": joint}.items():
                found[before + name] = [fmean(values[place] for place in of_reply) for of_reply in places]
            means = [fmean(found[before + name]) for name in each]
            found[f"{before}gm"] = math.prod(means) ** (1 / len(means))
            if self.language is not None:
                nats = self.language.nats([("", texts[place]) for of_reply in places for place in of_reply])
                tokens = sum(number for _, number in nats)
                found[f"{before}perplexity"] = math.exp(math.fsum(n for n, _ in nats) / tokens) if tokens else None
        return found


def shares(classifier: Classifier, texts: Sequence[str], labels: Sequence[str | int]) -> list[float]:
    """100 for each text whose most probable label is the given one, 0 for others and for empty texts."""
    likeliest = [max(range(len(of_text)), key=of_text.__getitem__) for of_text in classifier.of_labels(texts)]
    return [
        100.0 * (bool(text) and found == classifier.column(label))
        for text, found, label in zip(texts, likeliest, labels, strict=True)
    ]
