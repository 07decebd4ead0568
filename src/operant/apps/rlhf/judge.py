"""A language model as a judge: how likely each word of a scale is behind a question about the reply.

    judge:./llama                                          # a folder, builtin:NAME or Hub name
    judge:http://127.0.0.1:8000/v1#llama                   # a chat model at an OpenAI-compatible endpoint

The score is the mean of the scale, whose words are worth 1 to 0 in equal steps, over the model's probabilities of its
words (G-Eval, arXiv:2303.16634). The probabilities of other words are left out.
"""

import warnings
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch

from operant.data import load_tasks
from operant.engines.completions import Completions
from operant.rewards.perplexity import Perplexity
from operant.sampling import template_of
from operant.types import OperantError, Rollout, require, shown

TEMPLATE = "{query}\n\nReply: {reply}\n\nIs this a good reply? Answer yes or no.\nAnswer:"
RARE = 0.01
"""Mean probability of all words of a scale, below which it is no scale of the model's."""
Ask = Callable[[Sequence[str], Sequence[str]], Sequence[Sequence[float]]]
"""[N] texts and [C] words -> [N][C] log-probs of the words behind each text."""


class ModelJudge:
    """Scores of replies by another model: `ModelJudge("./llama")(rollouts)`, each in [0, 1].

    model: a folder, `builtin:NAME` or a Hub name, or URL#MODEL of an endpoint, whose key is in OPENAI_API_KEY.
    template: the question, with {query}, {reply} and {target}; of an endpoint, and of a model with a chat template, it
    is a user's message. words: the scale, the best one first; at an endpoint each is one token. gold: a file of
    labelled replies, as a reward model reads them: the log says before training how far the judge agrees. cache:
    a file of an endpoint's answers. batch: texts of a pass.
    """

    def __init__(
        self,
        model: str,
        *,
        template: str = TEMPLATE,
        words: str = "yes,no",
        gold: str | None = None,
        cache: str | None = None,
        batch: int = 16,
        device: str | None = None,
    ):
        self.model, self.template, self.gold, self.__name__ = model, template, gold, "judge"
        self.words, self.notes = [word.strip() for word in words.split(",")], list[str]()
        try:
            missing = template.format(query="", reply="\0", target="").count("\0") == 0
        except (LookupError, ValueError, AttributeError, TypeError):
            missing = True
        if missing:
            raise OperantError(
                f"judge.template={shown(template)}: it must contain {{reply}}, and may contain {{query}} and "
                "{target}; other braces are doubled"
            )
        if len(set(self.words)) < max(2, len(self.words)) or not all(self.words):
            raise OperantError(f"judge.words={words!r}: name at least two different words, the best one first: yes,no")
        self._local: Perplexity | None = None
        self._warned = False
        if model.startswith(("http://", "https://")):
            url, _, name = model.partition("#")
            require(name, f"judge:{model}: name the model behind the address, as in {model}#llama")
            self._ask: Ask = Completions(url, name, chat=True, cache=cache).logprobs
        elif cache is not None:
            raise OperantError(f"judge.cache={cache} with judge:{model}: only an endpoint's answers are kept")
        else:
            self._local = Perplexity(model, batch=batch, device=device)
            self._ask = self._by_model

    def check(self) -> None:
        """Load the model, and compare it with the gold file. Raises: OperantError for what is missing."""
        if self._local is not None:
            self._local.check()
        if self.gold is not None and not self.notes:
            right, of = self.agreement(self.gold)
            labels = f"{right:g} of {of} labels of {self.gold} ({right / of:.0%}; chance 50%)"
            self.notes.append(f"judge:{self.model} agrees with {labels}")

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        return self.scores([(r.query, r.reply, r.task.target) for r in rollouts])

    def scores(self, judged: Sequence[tuple[str, str, object]]) -> list[float]:
        """One score for each query, reply and target (None: empty). Equal ones are asked once."""
        texts = [
            self.template.format(query=query, reply=reply, target="" if target is None else target)
            for query, reply, target in judged
        ]
        once = [*dict.fromkeys(texts)]
        if not once:
            return []
        worth = torch.linspace(1, 0, len(self.words), dtype=torch.float64)
        logprobs = torch.tensor(self._ask(once, self.words), dtype=torch.float64)
        share = float(logprobs.exp().sum(-1).mean())
        if share < RARE and not self._warned:
            self._warned = True
            warnings.warn(
                f"judge:{self.model} gives the words {', '.join(self.words)} {share:.1e} of its probability, so its "
                "scores say little: ask for these words in judge.template, or name those that it answers with",
                stacklevel=2,
            )
        found = dict(zip(once, (logprobs.softmax(-1) @ worth).tolist(), strict=True))
        return [found[text] for text in texts]

    def agreement(self, gold: str) -> tuple[float, int]:
        """Of how many labels the judge thinks the same, and their number; a tie of its scores counts half.

        Of several replies to a prompt, each two with different labels are one; of a single one, good is a score above
        a half.
        """
        tasks = load_tasks(gold, with_replies=True, labelled=True)
        judged = [(_text(task.prompt), _text(reply), task.target) for task in tasks for reply in task.replies]
        scores, gaps = iter(self.scores(judged)), list[float]()
        for task in tasks:
            pairs = [(label, next(scores)) for label in task.scores]
            pairs += [(0.5, 0.5)] if len(pairs) == 1 else []
            gaps += [(s - t) * (1 if a > b else -1) for (a, s), (b, t) in combinations(pairs, 2) if a != b]
        require(gaps, f"judge.gold={gold}: no two labels of a prompt differ, so there is nothing to agree with")
        return sum(1.0 if gap > 0 else 0.5 if gap == 0 else 0.0 for gap in gaps), len(gaps)

    def _by_model(self, texts: Sequence[str], words: Sequence[str]) -> list[list[float]]:
        assert self._local is not None  # otherwise an endpoint is asked
        self._local.check()
        chat = template_of(self._local.policy.tokenizer)
        asked: list[tuple[Any, str]] = [
            ([{"role": "user", "content": text}], word) if chat else (text, f" {word}")
            for text in texts
            for word in words
        ]
        nats = iter(self._local.nats(asked))
        return [[-next(nats)[0] for _ in words] for _ in texts]


def _text(part: object) -> str:
    """A prompt or a reply as text: of messages their contents."""
    if isinstance(part, str):
        return part
    if isinstance(part, list) and all(isinstance(message, dict) for message in part):
        return "\n".join(message["content"] for message in part)
    raise OperantError(f"judge.gold: {shown(part)} is no text, and a judge reads texts: write texts or messages")
