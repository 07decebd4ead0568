"""What a trained prompt is compared with: no prompt, manual ones, searches at equal calls, examples, a trained head.

    setting = Classification(model, PromptTemplate("{sentence}{prompt}"), ("terrible", "great"), train, test)
    rows = compare(setting, ["none", "manual", "halving+mean"], calls=100_000)

A call is one prompt with one text. Prompts are chosen, and calibrations fitted, on training texts alone; the accuracy
on the others is measured once a prompt is chosen, and costs no calls.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from operant.apps.prompts.examples import Examples
from operant.apps.prompts.measures import CALIBRATIONS, CONTENT_FREE, MEASURES, accuracy, bias
from operant.apps.prompts.task_models import TaskModel, TransformerTaskModel
from operant.apps.prompts.templates import PromptTemplate
from operant.import_by_name import nearest
from operant.sampling import counter, text_tokens, uniforms
from operant.types import OperantError, require, shown

MANUAL = ("It was", "It is", "All in all, it was", "The movie is", "In summary, the movie was", "I think it was")
"""Prompts for reviews, written by hand."""
FEWEST = 8
"""Texts of the first round of successive halving."""
AT_ONCE = 64
"""Prompts that a search scores in one call of the task model."""
DECAYS = (1.0, 10.0, 100.0, 1000.0, 10_000.0)
"""Strengths of the decay that a trained head chooses from."""


class Vocabulary:
    """The tokens that a search writes prompts of: those of a tokenizer that are text by themselves, or given words.

    Raises: OperantError for fewer than two.
    """

    def __init__(self, tokenizer: Any = None, words: Sequence[str] = ()):
        """tokenizer: of the task model or of a policy. words: instead of it, joined by spaces."""
        self.tokenizer, self.words = tokenizer, list(words)
        self.ids = list(range(len(self.words))) if tokenizer is None else text_tokens(tokenizer)
        require(len(self.ids) >= 2, "a search for prompts needs a vocabulary: give a tokenizer, or at least two words")

    def write(self, ids: Sequence[int]) -> str:
        """The prompt of some tokens."""
        return " ".join(self.words[i] for i in ids) if self.tokenizer is None else self.tokenizer.decode(list(ids))

    def prompts(self, count: int, length: int, seed: int) -> list[str]:
        """Different random prompts, at most `count`."""
        return list(dict.fromkeys(map(self.write, self.draw(count, length, seed, "random search"))))

    def draw(self, count: int, length: int, *key: int | str) -> list[list[int]]:
        """`count` random prompts of `length` tokens, from counters with this key."""
        places = torch.stack([uniforms([counter(*key, i) for i in range(count)], place) for place in range(length)], 1)
        return [[self.ids[i] for i in row] for row in (places * len(self.ids)).long().tolist()]


@dataclass(frozen=True)
class Classification:
    """A task model with the texts that prompts for it are chosen and measured on.

    Raises: OperantError for what the model cannot answer, an unknown measure or calibration, and missing classes.
    """

    model: TaskModel
    """What answers."""
    template: PromptTemplate
    """What sentence and prompt are filled into."""
    words: tuple[str, ...]
    """The word of each label."""
    train: Examples
    """What prompts are chosen, and calibrations fitted, on."""
    test: Examples
    """Held-out texts."""
    dev: Examples | None = None
    """More held-out texts, whose accuracy is measured too."""
    measure: str = "gap"
    """By which a prompt is chosen (`measures.MEASURES`)."""
    calibrate: str = "none"
    """One of `measures.CALIBRATIONS`."""
    lead: str = ""
    """Examples before every text."""

    def __post_init__(self) -> None:
        for name, value, known in (("measure", self.measure, MEASURES), ("calibrate", self.calibrate, CALIBRATIONS)):
            require(value in known, f"{name}={shown(value)}: it must be one of {', '.join(known)}")
        self.model.check(self.template, self.words)
        for what, examples in (("train", self.train), ("test", self.test), ("dev", self.dev)):
            if examples is not None:
                if max(examples.labels) >= len(self.words):
                    raise OperantError(f"the {what} texts have the label {max(examples.labels)}, which has no word")
                examples.check_classes(self.words, f"the {what} texts of {examples.name!r}")

    def logprobs(self, prompts: Sequence[str], examples: Examples) -> Tensor:
        """float64 [P, E, C]."""
        template = self.template.behind(self.lead)
        parts = [
            self.model.word_logprobs(template, prompts[i : i + AT_ONCE], examples.texts, self.words)
            for i in range(0, len(prompts), AT_ONCE)
        ]
        return torch.cat(parts)

    def bias(self, prompts: Sequence[str], scored: Tensor) -> Tensor:
        """What the calibration subtracts [P, 1, C], from the log-probs [P, E, C] of training texts."""
        free = scored
        if self.calibrate == "contextual":
            free = self.logprobs(prompts, Examples("", CONTENT_FREE, (0,) * len(CONTENT_FREE)))
        return bias(self.calibrate, scored, free)

    def scores(self, prompts: Sequence[str], examples: Examples | None = None) -> Tensor:
        """[P] the mean measure on training texts, or on some of them."""
        examples = examples or self.train
        found = self.logprobs(prompts, examples)
        return self.measured(found - self.bias(prompts, found), examples)

    def measured(self, scores: Tensor, examples: Examples) -> Tensor:
        """[P] the mean measure of calibrated log-probs [P, E, C]."""
        return MEASURES[self.measure](scores, torch.tensor(examples.labels)).mean(1)

    def calls_for(self, prompts: int) -> int:
        """Calls that the scores of so many prompts on all training texts cost."""
        return prompts * (len(set(self.train.texts)) + len(CONTENT_FREE) * (self.calibrate == "contextual"))


@dataclass(frozen=True)
class Baseline:
    """What a baseline found: its prompt, what that cost, and how well it does."""

    name: str
    """One of `NAMES`."""
    prompt: str
    """What it chose; empty if its prompt is fixed."""
    calls: int
    """Prompts x texts that choosing it cost."""
    train: float
    """Accuracy on training texts."""
    test: float
    """Accuracy on held-out texts."""
    dev: float | None = None
    """Accuracy on more held-out texts, if there are any."""
    calibrate: str = "none"
    """The calibration that was used throughout."""
    seed: int = 0
    """Of its random numbers."""
    score: float | None = None
    """Its measure on training texts."""
    detail: dict[str, object] = field(default_factory=dict)
    """More about it, such as the number of prompts that were tried."""


def chosen(setting: Classification, name: str, prompt: str, calls: int, seed: int = 0, **detail: object) -> Baseline:
    """The row of a prompt that cost so many calls: its accuracies, with the calibration of the training texts."""
    found = setting.logprobs([prompt], setting.train)
    offset = setting.bias([prompt], found)
    right = {"train": accuracy(found - offset, torch.tensor(setting.train.labels))}
    for what, examples in (("test", setting.test), ("dev", setting.dev)):
        if examples is not None:
            right[what] = accuracy(setting.logprobs([prompt], examples) - offset, torch.tensor(examples.labels))
    means: dict[str, Any] = {what: float(x.mean()) for what, x in right.items()}
    score = float(setting.measured(found - offset, setting.train))
    return Baseline(name, prompt, calls, calibrate=setting.calibrate, seed=seed, score=score, detail=detail, **means)


def manual(setting: Classification, prompts: Sequence[str] = MANUAL) -> Baseline:
    """The best on training texts of prompts written by hand; a space joins them to a sentence that ends without one.

    Raises: OperantError without a prompt.
    """
    require(prompts, "manual: there is no prompt; give at least one")
    glued = " " if re.search(r"\S\{prompt\}", setting.template.text) else ""
    written, before = [glued + prompt.strip() for prompt in prompts], setting.model.calls
    scores = setting.scores(written)
    calls = setting.model.calls - before
    return chosen(setting, "manual", written[int(scores.argmax())], calls, tried=len(written))


def random_search(
    setting: Classification, vocabulary: Vocabulary, *, calls: int, length: int = 5, seed: int = 0
) -> Baseline:
    """The best on all training texts of as many random prompts of `length` tokens as `calls` pay for.

    Raises: OperantError for calls that do not pay for one prompt.
    """
    count = calls // setting.calls_for(1)
    require(count >= 1, f"calls={calls}: one prompt costs {setting.calls_for(1)}; give more calls or fewer texts")
    prompts = vocabulary.prompts(count, length, seed)
    before = setting.model.calls
    scores = setting.scores(prompts)
    used = setting.model.calls - before
    return chosen(setting, "random", prompts[int(scores.argmax())], used, seed, tried=len(prompts))


def halving_search(
    setting: Classification, vocabulary: Vocabulary, *, calls: int, length: int = 5, seed: int = 0
) -> Baseline:
    """Random search by successive halving (Jamieson and Talwalkar, 2016, arXiv:1502.07943).

    All prompts are scored on few training texts; in each round the better half is scored on as many texts again, so
    that the last ones are scored on all. A round costs about as much as any other, and no pair is computed twice.
    Raises: OperantError for calls that do not pay for two prompts.
    """
    texts = setting.train.shuffled(counter(seed, "halving"))
    sizes = [len(texts)]
    while sizes[0] // 2 >= max(FEWEST, len(setting.words)):
        sizes.insert(0, sizes[0] // 2)
    free = len(CONTENT_FREE) * (setting.calibrate == "contextual")
    # Prompt i of the best-first order survives to round r if i < count / 2^r.
    price = sum((end - begin) / 2**r for r, (begin, end) in enumerate(pairwise([0, *sizes]))) + free
    count = int(calls / price)
    require(count >= 2, f"calls={calls}: two prompts cost {2 * price:.0f}; give more calls or fewer texts")
    prompts = vocabulary.prompts(count, length, seed)
    tried, before, scores = len(prompts), setting.model.calls, torch.zeros(len(prompts))
    known = torch.zeros(len(prompts), 0, len(setting.words), dtype=torch.float64)
    contextual = setting.bias(prompts, known) if setting.calibrate == "contextual" else known
    for begin, end in pairwise([0, *sizes]):
        if begin:
            best = scores.topk(max(len(prompts) // 2, 1)).indices
            prompts, known, contextual = [prompts[i] for i in best], known[best], contextual[best]
        known = torch.cat([known, setting.logprobs(prompts, texts.at(range(begin, end)))], 1)
        offset = contextual if setting.calibrate == "contextual" else setting.bias(prompts, known)
        scores = setting.measured(known - offset, texts.at(range(end)))
    used = setting.model.calls - before
    return chosen(setting, "halving", prompts[int(scores.argmax())], used, seed, tried=tried, rounds=len(sizes))


def greedy_search(
    setting: Classification,
    vocabulary: Vocabulary,
    *,
    calls: int,
    length: int = 5,
    seed: int = 0,
    candidates: int = 16,
    gradient_texts: int = 32,
) -> Baseline:
    """Coordinate search: one token of the prompt after another is replaced by the best of some candidates.

    They are the tokens that the gradient of a model's own embeddings prefers (AutoPrompt, Shin et al. 2020,
    arXiv:2010.15980), on `gradient_texts` training texts, which cost a call each; of a black-box model, or where the
    prompt is read as other tokens than it was written with, random ones. The search ends with the calls.
    Raises: OperantError for calls that do not pay for one prompt.
    """
    if calls < setting.calls_for(1):
        raise OperantError(f"calls={calls}: one prompt costs {setting.calls_for(1)}; give more calls or fewer texts")
    model, first = setting.model, setting.model.calls
    tokens = vocabulary.tokenizer.get_vocab() if hasattr(vocabulary.tokenizer, "get_vocab") else None
    equal = isinstance(model, TransformerTaskModel) and tokens == model.tokenizer.get_vocab()
    (ids,), allowed, turn = vocabulary.draw(1, length, seed, "greedy"), set(vocabulary.ids), 0
    best, used = float(setting.scores([vocabulary.write(ids)])), 0
    while model.calls - first + used + gradient_texts * equal + setting.calls_for(1) <= calls:
        place, tokens = turn % length, list[int]()
        if equal and isinstance(model, TransformerTaskModel):
            mixed = setting.train.shuffled(counter(seed, "gradient", turn))
            some = mixed.at(range(min(gradient_texts, len(setting.train))))
            prompt, template = vocabulary.write(ids), setting.template.behind(setting.lead)
            found = model.replacements(template, prompt, some.texts, some.labels, setting.words, candidates * 8)
            used += len(some)
            tokens = [token for token in found[place] if token in allowed] if len(found) == length else []
        tokens = tokens or [token for (token,) in vocabulary.draw(candidates, 1, seed, "greedy", turn)]
        room = (calls - used - (model.calls - first)) // setting.calls_for(1)
        better = [[*ids[:place], token, *ids[place + 1 :]] for token in tokens if token != ids[place]]
        better = better[: min(candidates, room)]
        turn += 1
        if not better:
            if turn > 100 * length:  # every candidate is the token that is there
                break
            continue
        scores = setting.scores([vocabulary.write(one) for one in better])
        if float(scores.max()) > best:
            best, ids = float(scores.max()), better[int(scores.argmax())]
    spent = model.calls - first + used
    return chosen(setting, "greedy", vocabulary.write(ids), spent, seed, turns=turn, gradient=equal)


def in_context(setting: Classification, *, shots: int = 1, tries: int = 1, seed: int = 0, prompt: str = "") -> Baseline:
    """`shots` training texts of each class with their words before every text; of several draws the best in training.

    Raises: OperantError if examples and text are longer than the model reads.
    """
    leads = [written_out(setting, shots, counter(seed, "in-context", i), prompt) for i in range(max(tries, 1))]
    before, settings = setting.model.calls, [replace(setting, lead=lead) for lead in leads]
    place = int(torch.cat([one.scores([prompt]) for one in settings]).argmax()) if len(settings) > 1 else 0
    used = setting.model.calls - before
    return chosen(settings[place], "in-context", prompt, used, seed, examples=leads[place])


def written_out(setting: Classification, shots: int, key: int, prompt: str) -> str:
    """`shots` training texts of each class, as the template writes them with their words, one on each line."""
    order = setting.train.shuffled(key)
    picked = [
        i for label in range(len(setting.words)) for i in [j for j, n in enumerate(order.labels) if n == label][:shots]
    ]
    lines = list[str]()
    for text, label in order.at(sorted(picked)):
        word = setting.words[label].strip()
        filled = setting.template.render(prompt, text, word)
        lines.append(filled if setting.template.has_mask else f"{filled} {word}")
    return "".join(line + "\n" for line in lines)


def head(setting: Classification, *, decay: float | None = None, prompt: str = "") -> Baseline:
    """Logistic regression on the states from which the model answers, after the `prompt`; the model stays frozen.

    decay: weight of half the squared norm of the weights, beside the summed loss of standardised states; None: that of
    `DECAYS` with the best accuracy on the left-out quarters of the training texts.
    Raises: OperantError for a black-box model, which has no states.
    """
    check_names(("head",), model := setting.model)
    assert isinstance(model, TransformerTaskModel)  # as just checked
    # In an order in which every quarter has the classes in proportion.
    given = {"train": setting.train.shuffled(counter(0, "head")), "test": setting.test, "dev": setting.dev}
    split = {what: examples for what, examples in given.items() if examples is not None}
    states = {what: model.features(setting.template, prompt, examples.texts) for what, examples in split.items()}
    labels = {what: torch.tensor(examples.labels) for what, examples in split.items()}
    centre, scale = states["train"].mean(0), states["train"].std(0) + 1e-6
    states = {what: (x - centre) / scale for what, x in states.items()}
    if decay is None:
        x, y, classes, fold = states["train"], labels["train"], len(setting.words), torch.arange(len(setting.train)) % 4
        right = dict.fromkeys(DECAYS, 0.0)
        for one, left_out in ((one, fold == part) for one in DECAYS for part in range(4)):
            weights = logistic_regression(x[~left_out], y[~left_out], classes, one)
            right[one] += float(accuracy((x[left_out] @ weights[:-1] + weights[-1])[None], y[left_out]).sum())
        decay = max(DECAYS, key=lambda one: (right[one], one))
    weights = logistic_regression(states["train"], labels["train"], len(setting.words), decay)
    found = {
        what: float(accuracy((x @ weights[:-1] + weights[-1])[None], labels[what]).mean()) for what, x in states.items()
    }
    detail = {"decay": decay}
    return Baseline("head", prompt, len(setting.train), found["train"], found["test"], found.get("dev"), detail=detail)


def logistic_regression(x: Tensor, labels: Tensor, classes: int, decay: float) -> Tensor:
    """Weights [D + 1, C], the last row the bias, of the states x [N, D] of the labels [N]."""
    weights = torch.zeros(x.shape[1] + 1, classes, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        fit = torch.nn.functional.cross_entropy(x @ weights[:-1] + weights[-1], labels, reduction="sum")
        value = fit + decay / 2 * weights[:-1].square().sum()
        value.backward()
        return value

    solver.step(loss)  # type: ignore[arg-type]
    return weights.detach()


NAMES = ("none", "manual", "random", "halving", "greedy", "in-context", "head")
"""Baselines by name; behind all but `head` may stand `+mean` or `+contextual`, the calibration."""
USUAL = (
    *("none", "none+contextual", "none+mean", "manual", "manual+contextual", "manual+mean"),
    *("random", "random+mean", "halving", "halving+mean", "greedy", "greedy+mean", "in-context", "in-context+mean"),
)
"""What `compare` runs by default; `head` too, if the task model is not a function."""


def check_names(names: Sequence[str], model: TaskModel) -> None:
    """Raises: OperantError for a name of no baseline, and for `head` with a black-box model."""
    for name in names:
        base, plus, calibrate = name.partition("+")
        if base not in NAMES or (plus and (calibrate not in CALIBRATIONS or base == "head")):
            raise OperantError(
                f"baseline {name!r} is unknown{nearest(base, NAMES)}; names: {', '.join(NAMES)}, each but head also "
                "with +mean or +contextual"
            )
        good = base != "head" or isinstance(model, TransformerTaskModel)
        require(good, f"head: {model.name!r} is a function, whose states cannot be read: leave this baseline out")


def compare(
    setting: Classification,
    names: Sequence[str] | None = None,
    *,
    calls: int = 10_000,
    length: int = 5,
    seeds: Sequence[int] = (0,),
    vocabulary: Vocabulary | None = None,
    prompts: Sequence[str] = MANUAL,
) -> list[Baseline]:
    """Run baselines by name, `halving+mean`, one row each and of searches and examples one for each seed.

    calls: what each search may cost. vocabulary: of the searches; None: the model's own tokens. prompts: manual ones.
    Raises: OperantError for an unknown name, before anything runs, and as the baselines.
    """
    white = isinstance(setting.model, TransformerTaskModel)
    names = list(names) if names is not None else [*USUAL, *(["head"] if white else [])]
    check_names(names, setting.model)
    for what, number in (("length", length), ("seeds", len(seeds))):
        require(number >= 1, f"{what}={number}: it must be at least 1")
    if vocabulary is None and any(name.partition("+")[0] in SEARCHES for name in names):
        vocabulary = Vocabulary(setting.model.tokenizer if isinstance(setting.model, TransformerTaskModel) else None)
    rows = list[Baseline]()
    for name in names:
        base, _, calibrate = name.partition("+")
        own = replace(setting, calibrate=calibrate) if calibrate else setting
        if base in SEARCHES:
            rows += [SEARCHES[base](own, vocabulary, calls=calls, length=length, seed=seed) for seed in seeds]
        elif base == "in-context":
            rows += [in_context(own, seed=seed) for seed in seeds]
        elif base == "manual":
            rows.append(manual(own, prompts))
        else:
            rows.append(head(own) if base == "head" else chosen(own, "none", "", 0))
    return rows


SEARCHES: dict[str, Callable[..., Baseline]] = {
    "random": random_search,
    "halving": halving_search,
    "greedy": greedy_search,
}
"""Baselines that spend calls on prompts of a vocabulary."""
