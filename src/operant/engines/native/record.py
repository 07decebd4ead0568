"""Records the tokens that decoding generates, and makes completions of them."""

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from operant.models.policy import Policy
from operant.sampling import Sampling, stop_table
from operant.types import Completion, End


class Record:
    """Tokens, log-probs and values of N replies, each [N, max_tokens], and which of the replies have ended."""

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        version: int,
        begun: Sequence[Sequence[int]] = (),
        more: Sequence[int] = (),
        *,
        fed: bool = False,
    ):
        """begun: tokens that each reply begins with, before at most `more` new ones; fed: they are fed one by one."""
        shape, device = (len(prompts), sampling.max_tokens), policy.device
        self.sampling, self.version = sampling, version
        self.prompts = prompts
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(shape, dtype=policy.numbers, device=device)
        self.values = torch.zeros_like(self.logprobs) if policy.value_head is not None else None
        none = torch.zeros(shape[0], dtype=torch.long)
        self.begun = torch.tensor([len(ids) for ids in begun]) if begun else none
        """[N] number of the first tokens of each reply that earlier calls have drawn: its completion has the others."""
        self.first = none if fed else self.begun
        """[N] place in each reply of the first token that is drawn or fed; those before it are part of the prompt."""
        self.limits = torch.full(shape[:1], sampling.max_tokens)
        if begun:
            self.limits = (self.begun + torch.tensor(more)).clamp(max=sampling.max_tokens)
        for i, ids in enumerate(begun):
            self.tokens[i, : len(ids)] = torch.tensor(ids, dtype=torch.long)
        self.lengths = self.limits.to(device, copy=True)
        self.ended = torch.zeros(shape[0], dtype=torch.bool, device=device)
        stops = sorted(sampling.stops)
        self.stops = torch.zeros(max([policy.vocabulary, *(s + 1 for s in stops)]), dtype=torch.bool, device=device)
        self.stops[stops] = True
        strings = () if sampling.fixed_length else sampling.stop_strings
        self.table = stop_table(policy.tokenizer, strings) if strings else None
        self.flags = torch.from_numpy(self.table.flags).to(device) if self.table else None
        self.allowed: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        """One entry per step: the replies, the number of ids that each could draw, and these ids."""
        self.read: dict[int, Tensor] = {}
        """With a trunk: the trunk states [len(prompt), D] of each reply's prompt."""
        self.below: list[tuple[Tensor, Tensor, Tensor]] = []
        """With a trunk: one entry per step: the replies, the positions of the tokens that were fed, their states."""

    def write(
        self, live: Tensor, places: Tensor, ids: Tensor, logprobs: Tensor, values: Tensor | None, kept: Tensor | None
    ) -> None:
        """Record the tokens at positions `places` [B] of the replies `live` [B].

        `kept` [B, V]: the tokens that could be drawn. Tokens after the end of a reply are recorded, but never used.
        """
        at = (live, places)
        self.tokens[at], self.logprobs[at] = ids, logprobs
        if self.values is not None and values is not None:
            self.values[at] = values.to(self.values)
        if kept is not None:
            ragged = kept.nonzero()[:, 1].to(torch.int32)
            self.allowed.append(tuple(x.cpu().numpy() for x in (live, kept.sum(1), ragged)))
        stopped = self.stops[ids]
        if self.table is not None and self.flags is not None:
            least = self.sampling.min_tokens
            flagged = self.flags[ids.clamp(max=len(self.flags) - 1)] & ~stopped & (places + 1 >= least)
            for i in flagged.nonzero().squeeze(1).tolist():
                reply = self.tokens[live[i], : int(places[i]) + 1]
                stopped[i] = self.table.ends(reply.tolist(), least)
        fresh = stopped & ~self.ended[live]
        self.lengths[live] = torch.where(fresh, places + 1, self.lengths[live])
        self.ended[live] |= fresh

    def completions(self) -> list[Completion]:
        tokens, logprobs = self.tokens.tolist(), self.logprobs.tolist()
        values = self.values.tolist() if self.values is not None else None
        lengths = self.lengths.tolist()
        allowed, states = self._allowed(lengths), self._states(lengths)
        out = []
        for i, (n, ended) in enumerate(zip(lengths, self.ended.tolist(), strict=True)):
            end: End = "stop" if ended else "length"
            new = slice(int(self.begun[i]), n)
            own = values[i][new] if values is not None else None
            drawn = allowed[i][int(self.begun[i] - self.first[i]) :] if allowed else None
            more = {"allowed": drawn, "states": states[i] if states else None}
            out.append(Completion(tokens[i][new], logprobs[i][new], own, end, self.version, **more))
        return out

    def _allowed(self, lengths: list[int]) -> list[list[Sequence[int]]] | None:
        """The ids that could be drawn at each position of each reply, in arrays: there may be thousands at each."""
        if not self.allowed:
            return None
        out: list[list[Sequence[int]]] = [[] for _ in lengths]
        first = self.first.tolist()
        for live, counts, ids in self.allowed:
            for i, own in zip(live.tolist(), np.split(ids, counts.cumsum()[:-1]), strict=True):
                if len(out[i]) < lengths[i] - first[i]:
                    out[i].append(array("i", own.tobytes()))
        return out

    def _states(self, lengths: list[int]) -> list[Tensor] | None:
        """The trunk states [len(prompt) + len(action) - 1, D] of each prompt and reply."""
        if not self.read:
            return None
        first = self.first.tolist()
        counts = [len(p) + n - m - 1 for p, n, m in zip(self.prompts, lengths, first, strict=True)]
        like = self.read[0]
        flat = like.new_empty(sum(counts), like.shape[1])
        parts = list(flat.split(counts))
        for i, part in enumerate(parts):
            part[: len(self.prompts[i])] = self.read[i]
        begins = torch.tensor([0, *counts[:-1]], device=like.device).cumsum(0)
        begins += torch.tensor([len(p) - m for p, m in zip(self.prompts, first, strict=True)], device=like.device)
        for live, places, states in self.below:
            used = places < self.lengths[live] - 1
            flat[(begins[live] + places)[used]] = states[used]
        return parts
