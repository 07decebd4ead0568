"""`trl.extras` of TRL 0.11: the best of several samples."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from operant.compat.trl.core import set_seed
from operant.compat.trl.models import SUPPORTED_ARCHITECTURES, PreTrainedModelWrapper
from operant.types import OperantError, Tokenizer


class BestOfNSampler:
    """Draws `sample_size` replies to each query and returns the texts of the `n_candidates` with the highest scores.

    queries_to_scores: scores of a list of texts, each a query with its reply. length_sampler: the number of new tokens
    when called. Raises: OperantError for a model or tokenizer of another kind.
    """

    def __init__(
        self,
        model: PreTrainedModelWrapper,
        tokenizer: Tokenizer,
        queries_to_scores: Callable[[list[str]], Sequence[float]],
        length_sampler: Callable[[], int],
        sample_size: int = 4,
        seed: int | None = None,
        n_candidates: int = 1,
        generation_config: object = None,
    ):
        if seed is not None:
            set_seed(seed)
        if not isinstance(model, SUPPORTED_ARCHITECTURES) or not hasattr(tokenizer, "batch_decode"):
            kinds = f"{type(model).__name__} and {type(tokenizer).__name__}"
            raise OperantError(f"BestOfNSampler takes a model with a value head and a tokenizer, not {kinds}")
        if n_candidates > sample_size:
            raise OperantError(f"n_candidates={n_candidates} of sample_size={sample_size}: draw more, keep fewer")
        self.model, self.tokenizer = model, tokenizer
        self.queries_to_scores, self.length_sampler = queries_to_scores, length_sampler
        self.sample_size, self.n_candidates, self.gen_config = sample_size, n_candidates, generation_config

    def generate(
        self,
        tokenized_query: Tensor | Sequence[int | Tensor | Sequence[int]],
        skip_special_tokens: bool = True,
        device: str | torch.device | None = None,
        **generation_kwargs: object,
    ) -> list[list[str]]:
        """The best texts for each query, best first: ids as a list or a tensor, or a list of these."""
        one = isinstance(tokenized_query, Tensor) and tokenized_query.ndim == 1
        queries = [tokenized_query] if one or isinstance(tokenized_query[0], int) else tokenized_query
        results = []
        self.model.eval()
        for query in queries:
            ids = torch.as_tensor(query).reshape(1, -1).repeat(self.sample_size, 1)
            drawn = self.model.generate(
                ids.to(device or self.model.pretrained_model.device),
                max_new_tokens=self.length_sampler(),
                generation_config=self.gen_config,
                **generation_kwargs,
            )
            texts = self.tokenizer.batch_decode(drawn, skip_special_tokens=skip_special_tokens)
            scores = torch.as_tensor(self.queries_to_scores(texts))
            results.append([texts[i] for i in scores.topk(self.n_candidates).indices])
        return results
