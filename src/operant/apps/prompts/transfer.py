"""Text style transfer by prompts (RLPrompt, Deng et al. 2022, section 4.2): a frozen language model writes on behind

    {prompt} "{sentence}" "

until it closes the quotation, and what it has written is the rewrite. `style_transfer` says what rewrites are worth.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from operant.apps.prompts.task_models import ask, names_function
from operant.apps.prompts.templates import PromptTemplate
from operant.engines.native.engine import NativeEngine
from operant.import_by_name import find_function
from operant.models.loading import load_policy
from operant.models.policy import Policy
from operant.sampling import Sampling, counter, encode_prompt, reply_text
from operant.types import OperantError, Task, name_of, require, shown

TEMPLATE = '{prompt} "{sentence}" "'


class TransferSource(NamedTuple):
    """A sentence, and the style that it shall have: a label of the classifier of styles."""

    sentence: str
    style: str | int


def source_of(task: Task) -> TransferSource:
    """What a task asks for: `task.target = {"sentence": "i hate it", "style": "positive"}`."""
    target = task.target
    if not isinstance(target, Mapping) or not isinstance(sentence := target.get("sentence"), str):
        sentence = ""
    style = target.get("style") if isinstance(target, Mapping) else None
    if not sentence.strip() or not isinstance(style, (str, int)) or isinstance(style, bool):
        raise OperantError(
            f"style transfer: the target of the task {task.id!r} is {shown(target)}; it must hold a sentence and the "
            'style that it shall have, as {"sentence": "i hate it", "style": "positive"} or --form style_transfer'
        )
    return TransferSource(sentence, style)


def group_maxima(scores: Sequence[float], groups: int) -> list[float]:
    """The largest score of each of `groups` equal parts, in order. RLPrompt's "bootstrap": no sample is drawn twice."""
    size = len(scores) // groups
    return [max(scores[begin : begin + size]) for begin in range(0, groups * size, size)]


class Rewriter:
    """Rewrites of sentences by a frozen model: `Rewriter("builtin:reviews-lm")([("Say it well:", "i hate it")], 4)`.

    model: a folder, `builtin:NAME` or Hub name of a causal model, or a function from texts to texts, such as a
    `Completions`, or its name as `module:function`; a function draws by its own settings.
    template: has {prompt} and {sentence}; behind it the model writes the rewrite, which ends before `quote`, or with
    the first of the signs `ends` (RLPrompt's rule; empty: only the quote ends it). top_k, temperature: how tokens are
    drawn; top_k=0: from all. max_tokens: most tokens of a rewrite; None: 1.5 n and at least n + 10 for a sentence of n.
    prompt_tokens: tokens of the task model that a prompt may have; sentences that leave no room are refused beforehand.
    seed: random numbers depend on seed, sentence, prompt and number of the rewrite alone, so that a resumed run draws
    the same, in whatever batch. batch: rows that are decoded at a time.
    """

    def __init__(
        self,
        model: Any,
        *,
        template: str = TEMPLATE,
        top_k: int = 10,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        quote: str = '"',
        ends: str = ".!?",
        prompt_tokens: int = 32,
        seed: int = 0,
        batch: int = 256,
        device: str | None = None,
    ):
        require(quote, "style transfer: quote='': give the sign that ends a rewrite")
        for name, value, least in (("batch", batch, 1), ("prompt_tokens", prompt_tokens, 0)):
            require(value >= least, f"style transfer: {name}={value} must be at least {least}")
        if isinstance(model, str) and names_function(model):
            model = find_function("task model", *model.rpartition(":")[::2])
        self.model, self.template = model, PromptTemplate(template)
        self.function = model if callable(model) and not isinstance(model, (Policy, torch.nn.Module)) else None
        require(not self.template.has_mask, f"template {shown(template)}: a rewrite has no {{mask}}; leave it out")
        longest = 1 if max_tokens is None else max_tokens
        self.sampling = Sampling(temperature, longest, top_k=top_k, stop_strings=(quote,))
        self.prompt_tokens, self.max_tokens, self.seed, self.batch = prompt_tokens, max_tokens, seed, batch
        self.quote, self.ends = quote, ends
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._engine: Any = None

    def check(self) -> None:
        if self.function is None and self._engine is None:
            policy = load_policy(self.model)
            named = f"the task model {shown(self.model)}"
            if not isinstance(policy, Policy) or policy.encoder_decoder:
                raise OperantError(f"style transfer: {named} does not write on behind a text; name a causal model")
            if policy.tokenizer is None:
                raise OperantError(f"style transfer: {named} has no tokenizer, which it needs to read text")
            self._engine = NativeEngine(policy.to(self.device), batch=self.batch)
            self.sampling = replace(self.sampling, stop_tokens=policy.stop_tokens)

    def check_sentence(self, sentence: str) -> None:
        """Raises: OperantError for a sentence that leaves no room for a prompt and its rewrite."""
        self.check()
        if self.function is None:
            policy = self._engine.policy
            tokens = len(encode_prompt(policy.tokenizer, self.template.render("", sentence))) + self.prompt_tokens
            if (why := policy.misfit(tokens, self.most_tokens(sentence))) is not None:
                raise OperantError(
                    f"style transfer: the sentence {shown(sentence)} with its template and {self.prompt_tokens} tokens "
                    f"for the prompt {why}: leave it out, lower max_tokens or prompt_tokens, or choose another model"
                )

    def most_tokens(self, sentence: str) -> int:
        count = len(encode_prompt(self._engine.policy.tokenizer, sentence))
        return self.max_tokens or max(math.ceil(1.5 * count), count + 10)

    def __call__(self, pairs: Sequence[tuple[str, str]], samples: int, stream: str = "reward") -> list[list[str]]:
        """`samples` rewrites for each pair of prompt and sentence; of equal pairs they are equal, and drawn once.

        stream: the use of the rewrites; those of another use are drawn anew.
        Raises: OperantError for a prompt that leaves no room in the model's context, and for a function that raises, or
        does not return a text for each.
        """
        self.check()
        once = list(dict.fromkeys(pairs))
        written = self.asked(once, samples) if self.function is not None else self.drawn(once, samples, stream)
        each = [[self.cut(text) for text in written[i : i + samples]] for i in range(0, len(written), samples)]
        found = dict(zip(once, each, strict=True))
        return [found[pair] for pair in pairs]

    def drawn(self, pairs: Sequence[tuple[str, str]], samples: int, stream: str) -> list[str]:
        """What the model writes, `samples` texts for each pair."""
        engine, tokenizer = self._engine, self._engine.policy.tokenizer
        prompts = [encode_prompt(tokenizer, self.template.render(*pair)) for pair in pairs for _ in range(samples)]
        most = [self.most_tokens(sentence) for _, sentence in pairs for _ in range(samples)]
        keys = [counter(self.seed, stream, sentence, prompt) for prompt, sentence in pairs]
        sampling = replace(self.sampling, max_tokens=max(most, default=1))
        completions = engine.generate(prompts, sampling, [counter(key, i) for key in keys for i in range(samples)])
        # The limit of a sentence cuts a rewrite that the limit of the longest one lets go on.
        return [
            reply_text(tokenizer, prompt, completion.action[:limit], sampling)
            for prompt, completion, limit in zip(prompts, completions, most, strict=True)
        ]

    def asked(self, pairs: Sequence[tuple[str, str]], samples: int) -> list[str]:
        """What the function answers, `samples` texts for each pair. Raises: OperantError as a call."""
        function: Any = self.function
        texts = [self.template.render(*pair) for pair in pairs for _ in range(samples)]
        name = f"style transfer: the task model {name_of(function)}"
        answers = ask(lambda texts: list(function(texts)), texts, name) if texts else []
        if not all(isinstance(text, str) for text in answers):
            raise OperantError(f"{name} returned {shown(answers)}; it must return a text for each")
        return [str(text) for text in answers]

    def cut(self, text: str) -> str:
        """The rewrite in a text that the model wrote: until the closing quote, or with the first sign that ends it."""
        text = text.partition(self.quote)[0].strip()
        end = re.search(f"[{re.escape(self.ends)}]", text) if self.ends else None
        return text if end is None else text[: end.end()]
