"""Frozen models that answer a prompt: how likely each class's word is where the template asks for one.

    model = task_model("./roberta")                  # or builtin:NAME, a Hub name, (model, tokenizer), a function
    model.check(template, ("terrible", "great"))     # OperantErrors, before anything is trained
    model.word_logprobs(template, prompts, texts, words)   # [P, E, C]

A masked model answers at its mask, a causal one behind the text, an encoder-decoder in its decoder, and a function as
it likes: texts in, and out come texts, or log-probs of words.

Where a causal model reads the sentence before the prompt, the sentence's keys and values are computed once and kept;
all prompts for a sentence are then read as branches of one row. The token ids of each whole text are compared with
those of its sentence, and only equal beginnings are shared, so the numbers are those of whole texts.
"""

import math
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from operant import machine
from operant.apps.prompts.templates import CAUSAL, MASKED, PromptTemplate, set_named
from operant.import_by_name import find_function
from operant.models.capabilities import FAILS
from operant.models.hidden_states import cache_of, named_cache
from operant.models.layout import pad
from operant.models.model_passes import LONGEST, TextModel, encode, load, longest_of
from operant.models.safe_loading import PlainConfig, load_config, load_tokenizer
from operant.storage.hub import find_model
from operant.types import OperantError, Tokenizer, name_of, of_user, require, shown, with_defaults

Kind = Literal["masked", "causal", "encoder-decoder", "callable"]
"""How a task model is asked."""
SENTINEL = "<extra_id_0>"
"""What stands for a mask in the text of a model of T5's kind, and begins its answer."""
FLOOR = -30.0
"""Log-prob of a word that a black-box model does not name, and of one whose probability it says is 0."""
SILENT = 16
"""Answers of a function without any of the words, after which they count as a mistake of the words or the template."""
BRANCHES = 128
"""Most tokens of the prompts that are read as branches of one row."""
PASS = (2048, 65536)
"""Tokens of a pass on a CPU, whose caches hold the numbers of few, and on a GPU."""
TOLERANCE = 1e-3
"""Largest difference of a log-prob with shared sentences, in the trial before the first use: far above rounding."""


class TaskModel:
    """What all task models have. `answer` is that of a kind."""

    name: str
    """Its name in errors and notes."""
    kind: Kind
    """How it is asked."""
    template: str
    """The template that it has unless another one is given."""
    notes: list[str]
    """Sentences for the log of a run."""
    longest: int = LONGEST
    """Most tokens that it reads."""

    def __init__(self, name: str, kind: Kind, template: str):
        self.name, self.kind, self.template = name, kind, template
        self.calls = 0
        """Pairs of a prompt and a text that were answered."""
        self.notes = []

    def template_for(self, name: str) -> PromptTemplate:
        """The template for a set of texts: of a published one its own, for this kind of model, else the model's."""
        published = set_named(name)
        if published is None:
            return PromptTemplate(self.template)
        return PromptTemplate(published.masked if "{mask}" in self.template else published.causal)

    def word_logprobs(
        self, template: PromptTemplate, prompts: Sequence[str], texts: Sequence[str], words: Sequence[str]
    ) -> Tensor:
        """float64 [P, E, C] log-prob of each class's word, for each prompt with each text.

        Raises: OperantError as `of_pairs`.
        """
        pairs = [(prompt, text) for prompt in prompts for text in texts]
        return self.of_pairs(template, pairs, words).view(len(prompts), len(texts), len(words))

    def of_pairs(self, template: PromptTemplate, pairs: Sequence[tuple[str, str]], words: Sequence[str]) -> Tensor:
        """float64 [N, C] the same for pairs (prompt, text). Equal pairs are computed once.

        Raises: OperantError for NaN or infinity, a text that is too long, and as `check` for template and words.
        """
        once = {pair: place for place, pair in enumerate(dict.fromkeys(pairs))}
        self.calls += len(once)
        found = self.answer(template, list(once), words) if once else torch.zeros(0, len(words), dtype=torch.float64)
        if not bool(found.isfinite().all()):
            prompt, text = list(once)[int((~found.isfinite()).any(-1).nonzero()[0])]
            raise OperantError(
                f"task model {self.name!r} returns NaN or infinity for the prompt {shown(prompt)} and the text "
                f"{shown(text)}: try it on that text alone, and take other weights or mend the function"
            )
        return found[[once[pair] for pair in pairs]]

    def check(self, template: PromptTemplate, words: Sequence[str]) -> None:
        """Raises: OperantError for fewer than two words, or equal ones, and for what this kind cannot do."""
        if len(words) < 2 or len(set(words)) < len(words) or not all(word.strip() for word in words):
            raise OperantError(f"words {shown(list(words))}: give a word for each class, at least two different ones")

    def answer(self, template: PromptTemplate, pairs: list[tuple[str, str]], words: Sequence[str]) -> Tensor:
        """float64 [N, C] for different pairs."""
        raise NotImplementedError

    def tokens(self, template: PromptTemplate, pairs: Sequence[tuple[str, str]]) -> list[int]:
        """Number of tokens of each filled template; empty for a model that does not tell."""
        return []


# --- functions --------------------------------------------------------------------------------------------------------


class BlackBox(TaskModel):
    """A function from texts to answers, one each: a text, or a mapping from words to log-probs.

    A text counts for the class whose word occurs first in it, whatever its case; one without any of them counts for no
    class. Raises: OperantError, when called, as `answer`.
    """

    def __init__(self, function: Callable[[list[str]], Sequence[object]], name: str):
        super().__init__(name, "callable", CAUSAL)
        self.function = function
        self._without, self._named = 0, False

    def check(self, template: PromptTemplate, words: Sequence[str]) -> None:
        """Raises: OperantError as any, and for a template with a mask, of which a function knows nothing."""
        super().check(template, words)
        if template.has_mask:
            raise OperantError(
                f"template {shown(template.text)}: {self.name!r} is a function, which has no mask: leave {{mask}} out"
            )

    def answer(self, template: PromptTemplate, pairs: list[tuple[str, str]], words: Sequence[str]) -> Tensor:
        """float64 [N, C]: log-probs as the function returns them; of a text, 0 for its class and `FLOOR` for others.

        Raises: OperantError for answers of another kind or number, for an exception of the function, and if none of its
        first `SILENT` answers names a class.
        """
        filled = [template.render(prompt, text) for prompt, text in pairs]
        answers = ask(self.function, filled, f"task model {self.name!r}")
        found = torch.tensor([read_answer(answer, words, self.name) for answer in answers], dtype=torch.float64)
        self._named = self._named or bool((found > FLOOR).any())
        self._without += len(filled)
        if not self._named and self._without >= SILENT:
            raise OperantError(
                f"task model {self.name!r} has named none of the words {', '.join(words)} in {self._without} answers, "
                f"the last of which is {shown(answers[-1])}: every prompt would have the same score; ask for these "
                "words in the template, or give the words that it answers with"
            )
        return found


def ask(function: Callable[[list[str]], Sequence[object]], texts: list[str], named: str) -> Sequence[object]:
    """What a function answers to texts. Raises: OperantError if it raises, or has not one answer for each."""
    first = f"for {len(texts)} texts, the first of them {shown(texts[0])}"
    with of_user(f"{named} raised ", f" {first}: mend the function"):
        answers = function(texts)
    if not isinstance(answers, Sequence) or isinstance(answers, str) or len(answers) != len(texts):
        raise OperantError(
            f"{named} returned {shown(answers)} for {len(texts)} texts: it must return a list with one answer for "
            "each, in their order"
        )
    return answers


def read_answer(answer: object, words: Sequence[str], name: str) -> list[float]:
    """The log-prob of each word in the answer of a black-box model. Raises: OperantError for what is no answer."""
    if isinstance(answer, str):
        low = answer.lower()
        places = [low.find(word.strip().lower()) for word in words]
        first = min((place for place in places if place >= 0), default=None)
        # Of two words that begin at one place, as in "greater", the longer one is meant.
        lengths = [len(word) if place == first else 0 for word, place in zip(words, places)]
        return [0.0 if n and n == max(lengths) else FLOOR for n in lengths]
    if isinstance(answer, Mapping):
        try:
            row = [float(answer.get(word, FLOOR)) for word in words]
        except (TypeError, ValueError):
            row = []
        if row:
            return [max(number, FLOOR) if not math.isnan(number) else number for number in row]
    raise OperantError(
        f"task model {name!r} answered {shown(answer)}: an answer is a text, or a mapping from words to log-probs"
    )


# --- transformers models ----------------------------------------------------------------------------------------------


class FilledText(NamedTuple):
    """A filled template as the model reads it."""

    ids: list[int]
    place: int
    """Where the answer is read: in `ids`, or in `decoder` if there is one."""
    decoder: Sequence[int] = ()


class TransformerTaskModel(TaskModel):
    """A masked, causal or encoder-decoder model with its tokenizer, in float32 without dropout, and frozen.

    batch_tokens: tokens of a pass, with padding; None: `PASS` of them. share: whether a causal model reads equal
    sentences once. cache_gb: memory of kept sentences; the longest unused ones go first.
    Raises: OperantError for a masked model whose tokenizer has no mask token.
    """

    def __init__(
        self,
        loaded: TextModel,
        kind: Kind,
        name: str,
        *,
        batch_tokens: int | None = None,
        share: bool = True,
        cache_gb: float = 0.5,
    ):
        super().__init__(name, kind, CAUSAL if kind == "causal" else MASKED)
        self.model, self.tokenizer, self.longest, _ = loaded
        self.model.eval().requires_grad_(False)
        self.batch_tokens = batch_tokens or PASS[self.model.device.type == "cuda"]
        self.share, self.cache_gb = share and kind == "causal", cache_gb
        self.mask: str = self.tokenizer.mask_token or ""
        if kind == "masked" and not self.mask:
            raise OperantError(
                f"task model {name!r}: its tokenizer has no mask token, so it cannot fill one: name a masked model of "
                "the kind of BERT, or read it as another kind, --reward.kind causal"
            )
        if kind == "encoder-decoder" and not self.mask and SENTINEL in self.tokenizer.get_vocab():
            self.mask = SENTINEL
        if kind == "encoder-decoder" and not self.mask:
            self.template = CAUSAL
        self._states: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        """Ids of a sentence -> its keys and values [layers, 2, heads, S, D]."""
        self._tried = False
        self._words: dict[tuple[str, ...], list[int]] = {}
        bare, whole = (encode_plain(self.tokenizer, "a", special) for special in (False, True))
        self._trailing = len(whole) - len(bare) - whole.index(bare[0]) if bare and bare[0] in whole else 0

    def check(self, template: PromptTemplate, words: Sequence[str]) -> None:
        """Raises: OperantError as any, for a template with a mask too many or too few, and words of several tokens."""
        super().check(template, words)
        name, why = repr(self.name), ""
        if self.kind == "causal" and template.has_mask:
            why = f"{name} is a causal model, which answers behind the text: leave {{mask}} out"
        elif self.kind == "masked" and not template.has_mask:
            why = f"{name} is a masked model, which answers at its mask: put {{mask}} into it, as in {MASKED!r}"
        elif self.kind == "encoder-decoder" and template.has_mask and not self.mask:
            why = (
                f"the tokenizer of {name} has neither a mask token nor {SENTINEL}: leave {{mask}} out, and the decoder "
                "answers with its first token"
            )
        require(not why, f"template {shown(template.text)}: {why}")
        self.word_ids(words)

    def word_ids(self, words: Sequence[str]) -> list[int]:
        """The token of each class's word: with a space in front of all, or, if that is no token of some, of none.

        Raises: OperantError that names the first word that is not one token either way, or two with one token.
        """
        key = tuple(words)
        if key not in self._words:
            ways = [[encode_plain(self.tokenizer, space + word.strip()) for word in words] for space in (" ", "")]
            good = next((way for way in ways if all(map(self._is_token, way))), None)
            if good is None:  # the first word that is one token neither way, or else not with a space
                either = [i for i in range(len(words)) if not any(self._is_token(way[i]) for way in ways)]
                worst = [*either, *(i for i in range(len(words)) if not self._is_token(ways[0][i]))][0]
                pieces = [self.tokenizer.convert_ids_to_tokens(way[worst]) for way in ways]
                raise OperantError(
                    f"the word {words[worst]!r} is not one token of {self.name!r}: with a space before it {pieces[0]}, "
                    f"without {pieces[1]}; the model answers with one token, so choose words that are one each, all "
                    "with or all without a space before them"
                )
            ids = [way[0] for way in good]
            if len(set(ids)) < len(ids):
                twice = [word for word, token in zip(words, ids) if ids.count(token) > 1]
                raise OperantError(f"the words {twice} are one token of {self.name!r}: choose different ones")
            self._words[key] = ids
        return self._words[key]

    def _is_token(self, ids: list[int]) -> bool:
        return len(ids) == 1 and ids[0] != self.tokenizer.unk_token_id

    def tokens(self, template: PromptTemplate, pairs: Sequence[tuple[str, str]]) -> list[int]:
        """Number of tokens of each filled template."""
        return [len(row.ids) for row in self._rows(template, pairs)]

    def _rows(self, template: PromptTemplate, pairs: Sequence[tuple[str, str]]) -> list[FilledText]:
        filled = [template.render(prompt, text, self.mask) for prompt, text in pairs]
        encoded = [one["input_ids"] for one in encode(self.tokenizer, filled, LONGEST)]
        if self.kind == "causal":
            encoded = [ids[: len(ids) - self._trailing] or ids for ids in encoded]
            return [FilledText(ids, len(ids) - 1) for ids in encoded]
        heads = [template.before("mask", *pair, self.mask) if template.has_mask else "" for pair in pairs]
        if self.kind == "masked":
            mask, rows = self.tokenizer.mask_token_id, list[FilledText]()
            for ids, head in zip(encoded, heads):  # a sentence or prompt may have the mask's text in it too
                places = [place for place, token in enumerate(ids) if token == mask]
                rows.append(FilledText(ids, places[head.count(self.mask)]))
            return rows
        start: list[int] = [self.model.config.decoder_start_token_id]
        if template.has_mask and self.mask == SENTINEL:
            start.append(self.tokenizer.convert_tokens_to_ids(SENTINEL))
        elif template.has_mask:  # BART's decoder repeats the whole text
            whole = [encode_plain(self.tokenizer, head.rstrip(" "), True) for head in heads]
            ends = [len(ids) - (ids[-1:] == [self.tokenizer.eos_token_id]) for ids in whole]
            return [FilledText(ids, end, start + begun[:end]) for ids, begun, end in zip(encoded, whole, ends)]
        return [FilledText(ids, len(start) - 1, start) for ids in encoded]

    def _refuse_long(self, rows: Sequence[FilledText], pairs: Sequence[tuple[str, str]]) -> None:
        """Raises: OperantError that names the first pair that is longer than the model reads."""
        for row, (prompt, text) in zip(rows, pairs, strict=True):
            if max(len(row.ids), len(row.decoder)) > self.longest:
                raise OperantError(
                    f"the text {shown(text)} with the prompt {shown(prompt)} has {len(row.ids)} tokens, and task model "
                    f"{self.name!r} reads at most {self.longest}: texts are not cut; leave long texts out, or take a "
                    "shorter prompt"
                )

    @torch.inference_mode()
    def answer(self, template: PromptTemplate, pairs: list[tuple[str, str]], words: Sequence[str]) -> Tensor:
        """float64 [N, C] log-probs over the whole vocabulary, of different pairs.

        Raises: OperantError for a text that is too long, and as `word_ids`.
        """
        columns, rows = self.word_ids(words), self._rows(template, pairs)
        self._refuse_long(rows, pairs)
        if self._shares(template):
            return self._branched(template, pairs, rows, columns)
        found = torch.zeros(len(pairs), len(columns), dtype=torch.float64)
        for places in by_tokens([max(len(row.ids), len(row.decoder)) for row in rows], self.batch_tokens):
            logits = self._call([rows[place] for place in places])
            found[places] = logits.log_softmax(-1)[:, columns].double().cpu()
        return found

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Ids [B, S], padded on the right, and their mask [B, S]."""
        ids, mask = pad(rows, "right", self.model.device, self.tokenizer.pad_token_id or 0)
        return ids, mask.long()

    def _call(self, rows: Sequence[FilledText]) -> Tensor:
        """Logits [B, V] at the answers of some rows."""
        ids, mask = self._padded([row.ids for row in rows])
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if self.kind == "encoder-decoder":
            inputs["decoder_input_ids"] = self._padded([row.decoder for row in rows])[0]
        return self._logits(inputs, list(range(len(rows))), [row.place for row in rows])

    def _logits(self, inputs: dict[str, Any], rows: list[int], columns: list[int]) -> Tensor:
        """Logits [N, V] at some places of a batch. The head reads only their states, where the model has a trunk."""
        trunk, handle = self.model.base_model, None

        def keep(module: object, args: object, out: Any) -> object:
            out.last_hidden_state = out.last_hidden_state[rows, columns][:, None]
            return out

        if trunk is not self.model:
            handle = trunk.register_forward_hook(keep)
        try:
            with machine.threads(machine.worth(inputs["input_ids"].numel(), machine.largest(self.model))):
                logits = self.model(**named_cache(self.model, inputs), use_cache="past_key_values" in inputs).logits
        finally:
            if handle is not None:
                handle.remove()
        return (logits[rows, columns] if handle is None else logits[:, 0]).float()

    # --- sentences that are read once ---------------------------------------------------------------------------------

    def _shares(self, template: PromptTemplate) -> bool:
        """Whether sentences are shared. The first time, two are read both ways; a model that differs does not share."""
        if not self.share or template.text.index("{sentence}") > template.text.index("{prompt}"):
            return False  # only behind equal sentences do the prompts find equal states
        if not self._tried:
            self._tried = True
            pairs = [(prompt, text) for text in ("a b", "the film") for prompt in (" it is", " so", " all in all,")]
            rows, columns = self._rows(template, pairs), [0, 1]
            try:
                plain = torch.cat([self._call([row]) for row in rows]).log_softmax(-1)[:, columns].cpu()
                far = float((self._branched(template, pairs, rows, columns) - plain).abs().max())
                why = "" if far <= TOLERANCE else f"its log-probs would differ by {far:.2g}"
            except FAILS as error:
                why = f"{type(error).__name__}: {str(error)[:80]}"
            if why:
                self.share = False
                warnings.warn(f"task model {self.name!r} reads each sentence with each prompt: {why}", stacklevel=2)
        return self.share

    def _branched(
        self, template: PromptTemplate, pairs: list[tuple[str, str]], rows: list[FilledText], columns: list[int]
    ) -> Tensor:
        """float64 [N, C] with the sentences read once."""
        texts = list(dict.fromkeys(text for _, text in pairs))
        begun = [template.before("prompt", ".", text).rstrip(" ") for text in texts]
        encoded = encode(self.tokenizer, begun, LONGEST)
        heads = {text: tuple(row["input_ids"]) for text, row in zip(texts, encoded)}
        branches: dict[tuple[int, ...], list[list[tuple[int, int]]]] = {}
        for place, (_, text) in enumerate(pairs):
            head = heads[text]
            ids = rows[place].ids
            differ = (i for i, (one, other) in enumerate(zip(head, ids)) if one != other)
            shared = min(next(differ, len(head)), len(ids) - 1)
            of_text = branches.setdefault(head, [[]])
            if sum(len(rows[other].ids) - n for other, n in of_text[-1]) + len(ids) - shared > BRANCHES and of_text[-1]:
                of_text.append([])
            of_text[-1].append((place, shared))
        work = [(head, branch) for head, of_text in branches.items() for branch in of_text]
        found = torch.zeros(len(pairs), len(columns), dtype=torch.float64)
        widths = [len(head) + sum(len(rows[place].ids) - n for place, n in branch) for head, branch in work]
        for places in by_tokens(widths, self.batch_tokens):
            some = [work[place] for place in places]
            order = [place for _, branch in some for place, _ in branch]
            found[order] = self._read_on(some, rows).log_softmax(-1)[:, columns].double().cpu()
        return found

    def _read_on(self, work: list[tuple[tuple[int, ...], list[tuple[int, int]]]], rows: list[FilledText]) -> Tensor:
        """Logits [N, V] at the ends of all branches, in their order.

        work: ids of a sentence, and its branches: the place of a row, and how many ids it shares with the sentence.
        """
        states = self._read_sentences([head for head, _ in work])
        width = max(len(head) for head, _ in work)
        first = states[0]
        held = first.new_zeros(*first.shape[:2], len(work), first.shape[2], width, first.shape[4])
        for i, state in enumerate(states):
            held[:, :, i, :, : state.shape[3]] = state
        new = [[token for place, n in branch for token in rows[place].ids[n:]] for _, branch in work]
        ids, _ = self._padded(new)
        seen = torch.zeros(len(work), ids.shape[1], width + ids.shape[1], dtype=torch.bool)
        positions = torch.zeros(ids.shape, dtype=torch.long)
        at_row, at_column = list[int](), list[int]()
        for i, (_, branch) in enumerate(work):
            begin = 0
            for place, n in branch:
                end = begin + len(rows[place].ids) - n
                seen[i, begin:end, :n] = True
                seen[i, begin:end, width + begin : width + end] = torch.ones(end - begin, end - begin).tril().bool()
                positions[i, begin:end] = torch.arange(n, n + end - begin)
                at_row.append(i)
                at_column.append(end - 1)
                begin = end
        lowest = torch.finfo(held.dtype).min  # also where padding sees nothing, whose softmax must not be NaN
        mask = torch.zeros(seen.shape, dtype=held.dtype).masked_fill_(~seen, lowest)[:, None]
        inputs = {
            "input_ids": ids,
            "attention_mask": mask.to(ids.device),
            "position_ids": positions.to(ids.device),
            "past_key_values": DynamicCache([(layer[0], layer[1]) for layer in held]),
        }
        return self._logits(inputs, at_row, at_column)

    def _read_sentences(self, heads: list[tuple[int, ...]]) -> list[Tensor]:
        """Keys and values [layers, 2, heads, S, D] of sentences, from memory where they are kept."""
        known = {head: self._states[head] for head in heads if head in self._states}
        missing = [head for head in dict.fromkeys(heads) if head not in known]
        for places in by_tokens([len(head) for head in missing], self.batch_tokens):
            ids, mask = self._padded([missing[place] for place in places])
            with machine.threads(machine.worth(ids.numel(), machine.largest(self.model))):
                layers = cache_of(self.model.base_model(input_ids=ids, attention_mask=mask, use_cache=True)).layers
            kept = torch.stack([torch.stack([layer.keys, layer.values]) for layer in layers])
            for i, place in enumerate(places):
                known[missing[place]] = kept[:, :, i, :, : len(missing[place])].clone()
        for head in known:
            self._states[head] = known[head]
            self._states.move_to_end(head)
        size = sum(state.nbytes for state in self._states.values())
        while size > self.cache_gb * 1e9 and self._states:
            size -= self._states.popitem(last=False)[1].nbytes
        return [known[head] for head in heads]

    # --- what searches and probes ask of a model whose weights are known ----------------------------------------------

    @torch.inference_mode()
    def features(self, template: PromptTemplate, prompt: str, texts: Sequence[str]) -> Tensor:
        """float64 [E, D] the state from which each answer is read: what enters the output head there.

        Raises: OperantError for a text that is too long.
        """
        pairs = [(prompt, text) for text in texts]
        rows, caught = self._rows(template, pairs), list[Tensor]()
        self._refuse_long(rows, pairs)
        gathered = self.model.base_model is not self.model
        found: Tensor | None = None
        for places in by_tokens([max(len(row.ids), len(row.decoder)) for row in rows], self.batch_tokens):
            head = self.model.get_output_embeddings()
            handle = head.register_forward_pre_hook(lambda module, args: caught.append(args[0]))
            try:
                self._call([rows[place] for place in places])
            finally:
                handle.remove()
            states, at = caught.pop(), [rows[place].place for place in places]
            states = states[:, 0] if gathered else states[list(range(len(at))), at]
            found = torch.zeros(len(rows), states.shape[-1], dtype=torch.float64) if found is None else found
            found[places] = states.double().cpu()
        assert found is not None  # there is a text
        return found

    def replacements(
        self,
        template: PromptTemplate,
        prompt: str,
        texts: Sequence[str],
        labels: Sequence[int],
        words: Sequence[str],
        top: int,
    ) -> list[list[int]]:
        """For each token of the prompt, the `top` tokens that would lower the loss most, to first order.

        The loss is -log p(label's word); its gradient is that at the prompt's embeddings, times the embedding of every
        token (HotFlip, arXiv:1712.06751; AutoPrompt, arXiv:2010.15980). Empty if the prompt's tokens cannot be found.
        """
        pairs = [(prompt, text) for text in texts]
        rows, columns = self._rows(template, pairs), torch.tensor(self.word_ids(words))
        begins = [len(template.before("prompt", *pair, self.mask)) for pair in pairs]
        filled = [template.render(*pair, self.mask) for pair in pairs]
        if not self.tokenizer.is_fast:
            return []
        offsets = self.tokenizer(filled, return_offsets_mapping=True)["offset_mapping"]
        spans = [
            [i for i, (start, end) in enumerate(of) if start < begin + len(prompt) and end > max(begin, start)]
            for of, begin in zip(offsets, begins)
        ]
        counts = [len(span) for span in spans]
        count = max(set(counts), key=counts.count)
        good = [place for place, n in enumerate(counts) if n == count]
        table, total = self.model.get_input_embeddings(), 0.0
        for chosen in by_tokens([max(len(rows[i].ids), len(rows[i].decoder)) for i in good], self.batch_tokens):
            places, caught = [good[i] for i in chosen], list[Tensor]()

            def hook(module: object, args: object, out: Tensor, caught: list[Tensor] = caught) -> Tensor:
                caught.append(out.detach().requires_grad_())
                return caught[-1]

            handle = table.register_forward_hook(hook)
            try:
                with torch.enable_grad():
                    logprobs = self._call([rows[place] for place in places]).log_softmax(-1)
                    own = columns[[labels[place] for place in places]].to(logprobs.device)
                    loss = -logprobs.gather(-1, own[:, None]).sum()
                    (gradient,) = torch.autograd.grad(loss, caught[:1])
            finally:
                handle.remove()
            total = total + sum(gradient[i, spans[place]] for i, place in enumerate(places))
        if not count:
            return []
        return (-(total @ table.weight.T)).topk(min(top, table.weight.shape[0])).indices.tolist()


def encode_plain(tokenizer: Tokenizer, text: str, special: bool = False) -> list[int]:
    """The ids of a text, with the tokens that the tokenizer puts around texts or without."""
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def by_tokens(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices in batches of similar length, whose padded size is at most `budget` tokens unless one alone is more."""
    some: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if some and lengths[i] * (len(some) + 1) > budget:
            yield some
            some = []
        some.append(i)
    if some:
        yield some


# --- by name ----------------------------------------------------------------------------------------------------------


def task_model(
    given: object,
    kind: str | None = None,
    device: str | None = None,
    *,
    batch_tokens: int | None = None,
    share: bool = True,
    cache_gb: float = 0.5,
) -> TaskModel:
    """The task model of a folder, `builtin:NAME`, Hub name, `module:function`, function, or (model, tokenizer).

    kind: `masked`, `causal`, `encoder-decoder` or `callable`; None: as its config says. A `TaskModel` is returned as it
    is. The other options are those of `TransformerTaskModel`.
    Raises: OperantError if it cannot be found or loaded, lacks weights, or if the kind is unknown or does not fit.
    """
    if kind is not None and kind not in get_args(Kind):
        raise OperantError(f"kind={kind!r}: a task model is {', '.join(get_args(Kind))}")
    good = (batch_tokens is None or batch_tokens >= 1) and cache_gb >= 0
    require(good, f"batch_tokens={batch_tokens}, cache_gb={cache_gb}: give at least 1 token, and at least 0 GB")
    if isinstance(given, TaskModel) or callable(given):
        made = given if isinstance(given, TaskModel) else BlackBox(given, name_of(given))
        require(kind in (None, made.kind), f"kind={kind!r}: task model {made.name!r} is {made.kind}; leave kind out")
        return made
    options: dict[str, Any] = {"batch_tokens": batch_tokens, "share": share, "cache_gb": cache_gb}
    if isinstance(given, tuple) and len(given) == 2:
        model, tokenizer = given
        require(kind != "callable", f"kind='callable': a {type(model).__name__} is no function; leave kind out")
        return TransformerTaskModel(
            TextModel(model, tokenizer, longest_of(model, tokenizer), []),
            kind or kind_of(model.config, tokenizer),  # type: ignore
            type(model).__name__,
            **options,
        )
    if not isinstance(given, str | os.PathLike) or not str(given).strip():
        raise OperantError(f"task model {shown(given)}: give a folder, builtin:NAME, a Hub name or a function")
    name = str(given)
    if kind == "callable" or (kind is None and names_function(name)):
        return BlackBox(find_function("task model", *name.rpartition(":")[::2]), name)
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    what, folder = f"task model {name!r}", find_model(name)
    config = load_config(folder)
    kind = kind or kind_of(config, load_tokenizer(folder))
    auto = {"masked": AutoModelForMaskedLM, "causal": AutoModelForCausalLM, "encoder-decoder": AutoModelForSeq2SeqLM}
    known = auto[kind]._model_mapping  # what transformers itself looks the class up in
    if type(config) not in known and not with_defaults(config, PlainConfig).auto_map:
        raise OperantError(
            f"{what} is a {config.model_type}, which transformers has no {kind} model of: leave --reward.kind out, and "
            "its config decides"
        )
    if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
        raise OperantError(f"{what}: device={device!r}: no GPU is usable here; leave it out, or take cpu")
    loaded = load(auto[kind], name, what, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if loaded.missing:
        raise OperantError(
            f"{what} lacks weights of a {kind} model ({', '.join(loaded.missing[:3])}): its answers would be random; "
            "name a trained one, or its kind with --reward.kind"
        )
    return TransformerTaskModel(loaded, kind, name, **options)  # type: ignore


def names_function(name: str) -> bool:
    """Whether a name is `module:function` or `file.py:function`, and not `builtin:NAME` or a folder."""
    place, colon, _ = name.rpartition(":")
    return bool(colon) and place != "builtin" and not os.path.isdir(name)


def kind_of(config: object, tokenizer: Tokenizer | None) -> Kind:
    """The kind that a config tells by its architecture, else by whether the tokenizer has a mask token."""
    if with_defaults(config, PlainConfig).is_encoder_decoder:
        return "encoder-decoder"
    names = " ".join(with_defaults(config, PlainConfig).architectures or [])
    if "MaskedLM" in names or "CausalLM" in names or "LMHead" in names:
        return "masked" if "MaskedLM" in names else "causal"
    return "masked" if tokenizer is not None and tokenizer.mask_token else "causal"
