"""BERTScore (Zhang et al., 2020, arXiv:1904.09675): greedy matching of tokens by the cosine of their hidden states."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from operant.models.model_passes import TextModel, encode, load, passes
from operant.rewards.text_scores import MEASURES, OfMeasures, of_several, references
from operant.rewards.words import f_measure
from operant.types import OperantError, Rollout, Task, require


class Tokens(NamedTuple):
    """The tokens of a text."""

    vectors: Tensor
    """[T, D] hidden states of length 1."""
    weights: Tensor
    """[T] weight of each in the means: 0 of the tokenizer's special ones."""


def greedy_matching(reply: Tokens, reference: Tokens) -> tuple[float, float]:
    """Precision and recall: the weighted mean over one text's tokens of the largest cosine with one of the other's.

    Both are 0 if a text has no weight, such as an empty one.
    """
    cosines, mine, theirs = reply.vectors @ reference.vectors.T, reply.weights, reference.weights
    if not (mine.sum() > 0 and theirs.sum() > 0):
        return 0.0, 0.0
    return float((cosines.amax(1) * mine).sum() / mine.sum()), float((cosines.amax(0) * theirs).sum() / theirs.sum())


class BertScore(OfMeasures):
    """BERTScore of each reply, -1 to 1 and mostly above 0, without the authors' rescaling by a baseline.

    model: a folder, `builtin:NAME` or Hub name of any model of transformers; of an encoder-decoder its encoder is used.
    layer: whose hidden states are compared, from 0 (embeddings); None: the last (the authors take 17 of roberta-large,
    9 of bert-base-uncased, 5 of distilbert-base-uncased). idf: weigh each token by log((N + 1) / (texts with it + 1))
    over the N references of the run's tasks, which are frozen before the first reply; otherwise all weigh the same.
    measure: `f`, `precision` or `recall`; None: as a reward f, as a metric all three. several: of several references,
    `max` or `mean`. batch: texts of a pass. Longer texts than the model reads are cut at the end.
    """

    __name__ = "bertscore"
    reads_start = True
    """As a metric of a run, `model` is by default the one that the run begins from."""

    def __init__(
        self,
        model: str | None = None,
        *,
        layer: int | None = None,
        idf: bool = False,
        measure: str | None = None,
        several: str = "max",
        batch: int = 32,
        device: str | None = None,
    ):
        if not model:
            raise OperantError(
                "bertscore.model is missing: name the model whose hidden states are compared, a folder or a Hub name, "
                "as in {bertscore: {model: roberta-large, layer: 17}}"
            )
        self.choose_measure(measure)
        require(batch >= 1, f"bertscore: batch={batch} must be at least 1")
        self.model, self.layer, self.idf, self.batch = model, layer, idf, batch
        self.several = of_several(self.__name__, several)
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._loaded: TextModel | None = None
        self._weights: dict[int, float] | None = None
        self._unseen = 1.0

    def check(self) -> None:
        """Load the model. Raises: OperantError if it cannot be found, lacks weights, or has no such layer."""
        self.loaded()

    def loaded(self) -> TextModel:
        """The model, loaded at the first call. Raises: OperantError as `check`."""
        if self._loaded is None:
            from transformers import AutoModel

            what = f"bertscore.model={self.model!r}"
            found = load(AutoModel, self.model, what, self.device)
            encoder = found.model.get_encoder() if found.model.config.is_encoder_decoder else found.model
            # The pooler reads the first token for classifiers, and checkpoints of language models have none.
            if missing := [name for name in found.missing if "pooler" not in name]:
                raise OperantError(f"{what} lacks weights ({', '.join(missing[:3])}); is it a model of transformers?")
            layers = found.model.config.get_text_config().num_hidden_layers
            if self.layer is not None and not 0 <= self.layer <= layers:
                raise OperantError(f"bertscore.layer={self.layer}: {self.model} has layers 0 (embeddings) to {layers}")
            self._loaded = found._replace(model=encoder)
        return self._loaded

    def read_tasks(self, tasks: Sequence[Task]) -> None:
        """Freeze the weights of the tokens on the references of tasks, if idf is asked for."""
        if self.idf:
            texts = [text for task in tasks for text in references(task)]
            counts = Counter[int]()
            for one in self._encoded(texts):
                counts.update(set(one["input_ids"]))
            self._unseen = math.log(len(texts) + 1)
            self._weights = {token: math.log((len(texts) + 1) / (n + 1)) for token, n in counts.items()}

    def numbers(self, rollouts: list[Rollout]) -> dict[str, list[float]]:
        """Lists of F, precision and recall; of several references, each is joined by itself."""
        given = [(r.reply, self.references(r.task)) for r in rollouts]
        read = self.read([text for reply, texts in given for text in (reply, *texts)])
        found = dict[str, list[float]]({name: [] for name in MEASURES})
        for reply, texts in given:
            each = [greedy_matching(read[reply], read[text]) for text in texts]
            values = [(f_measure(p, r), p, r) for p, r in each]
            for name, of_references in zip(MEASURES, zip(*values)):
                found[name].append(float(self.several(of_references)))
        return found

    @torch.inference_mode()
    def read(self, texts: Iterable[str]) -> dict[str, Tokens]:
        """The tokens of each text, on the CPU."""
        if self.idf and self._weights is None:
            how = "a run takes them from its tasks; elsewhere call read_tasks(tasks)"
            raise OperantError(f"bertscore with idf has no references to weigh tokens by yet: {how}")
        model, tokenizer, *_ = self.loaded()
        listed, read, weights = list(dict.fromkeys(texts)), dict[str, Tokens](), self._weights
        encoded, special = self._encoded(listed), set(tokenizer.all_special_ids)
        for rows, _, out in passes(model, tokenizer, encoded, self.batch, output_hidden_states=True):
            states = out.hidden_states[-1 if self.layer is None else self.layer].float().cpu()
            for row, vectors in zip(rows, states):
                ids = encoded[row]["input_ids"]
                known = [1.0 if weights is None else weights.get(token, self._unseen) for token in ids]
                counted = [0.0 if token in special else weight for token, weight in zip(ids, known)]
                unit = torch.nn.functional.normalize(vectors[: len(ids)], dim=-1)
                read[listed[row]] = Tokens(unit, torch.tensor(counted))
        return read

    def _encoded(self, texts: Sequence[str]) -> list[dict[str, list[int]]]:
        loaded = self.loaded()
        return encode(loaded.tokenizer, [text.strip() for text in texts], loaded.longest) if texts else []
