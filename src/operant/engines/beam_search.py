"""Beam search for evaluations, by transformers' own `generate`: it finds likely replies, and draws nothing."""

from collections import defaultdict
from collections.abc import Sequence

import torch

from operant.engines.native.engine import NativeEngine
from operant.engines.transformers import neutral
from operant.machine import beat
from operant.models.policy import Policy
from operant.sampling import Sampling, check_prompts, end_of
from operant.types import Completion, OperantError

ROWS = 256
"""Most beams that are decoded at a time."""


class BeamSearch(NativeEngine):
    """An engine whose `generate` returns the best of `beams` hypotheses.

    length_penalty: a hypothesis of n tokens has the score of their summed log-probs over n ** length_penalty, so larger
    ones prefer longer replies. Temperature, top-k, top-p and min-p do not apply, and neither does the generation_config
    of the model: limits, stop tokens and banned tokens are those of `sampling`. Prompts of equal length share a batch,
    so that no padding changes a number.
    """

    def __init__(self, policy: Policy, *, beams: int = 4, length_penalty: float = 1.0):
        super().__init__(policy)
        if not hasattr(policy.model, "generate") or not hasattr(policy.model, "generation_config"):
            raise OperantError(
                f"evaluation.beams={beams}: the policy {type(policy.model).__name__} is no transformers model, whose "
                "beam search this is; leave it out"
            )
        self.beams, self.length_penalty = beams, length_penalty

    @torch.no_grad()
    def generate(self, prompts: Sequence[list[int]], sampling: Sampling, keys: Sequence[int]) -> list[Completion]:
        """The best hypothesis for each prompt, in their order; `keys` are not used, as nothing is random."""
        check_prompts(self.policy, prompts, sampling)
        if sampling.stop_strings or sampling.guidance:
            name = "stop_strings" if sampling.stop_strings else "guidance"
            raise OperantError(f"evaluation.beams={self.beams} with sampling.{name}: beam search cannot use it")
        by_length = defaultdict[int, list[int]](list)
        for place, prompt in enumerate(prompts):
            by_length[len(prompt)].append(place)
        most, made = max(1, ROWS // self.beams), dict[int, Completion]()
        with neutral(self.policy.model, self.search(sampling)):
            for places in by_length.values():
                for begin in range(0, len(places), most):
                    some = places[begin : begin + most]
                    read = [[*self.policy.virtual, *prompts[place]] for place in some]
                    ids = torch.tensor(read, device=self.policy.device)
                    out = self.policy.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
                    found = out[:, 1 if self.policy.encoder_decoder else ids.shape[1] :].tolist()
                    made |= {place: self.ended(reply, sampling) for place, reply in zip(some, found, strict=True)}
                    beat()
        return [made[place] for place in range(len(prompts))]

    def choose(
        self, prompts: object, options: object, sampling: Sampling, keys: object
    ) -> list[tuple[int, Completion]]:
        """A choice among options is drawn, and no search finds it."""
        raise OperantError(
            f"evaluation.beams={self.beams}: the world offers options, of which one is drawn: leave it out, or draw "
            "the likeliest one, with --evaluation.sampling '{top_k: 1}', in `operant eval` --top-k 1"
        )

    def ended(self, ids: list[int], sampling: Sampling) -> Completion:
        """The completion of ids that padding may follow behind a stop token. It has no log-probs: nothing was drawn."""
        count = end_of(ids, sampling, None)
        return Completion(ids[:count], None, None, "length" if count is None else "stop", self.version)  # pyright: ignore[reportArgumentType]

    def search(self, sampling: Sampling) -> object:
        """transformers' config of this search and nothing else."""
        from transformers import GenerationConfig

        stops = sorted(sampling.stops)
        return GenerationConfig(
            num_beams=self.beams,
            length_penalty=self.length_penalty,
            max_new_tokens=sampling.max_tokens,
            min_new_tokens=sampling.min_tokens if stops and sampling.min_tokens else None,
            pad_token_id=stops[0] if stops else 0,
            eos_token_id=stops or None,
            suppress_tokens=list(sampling.banned) or None,
            decoder_start_token_id=self.policy.start_token if self.policy.encoder_decoder else None,
        )
