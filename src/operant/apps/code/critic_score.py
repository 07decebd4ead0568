"""A trained outcome critic (`outcome_critic`) as a score of texts: of a program, and of each beginning of it.

critic = CriticScore("runs/critic")
critic.prefixes("Return twice x.\\n", "return x + x")     # P(passed) after each token of the critic's tokenizer
critic.prefixes(problem, reply_ids, policy.tokenizer)    # after each token of the policy's
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from operant.apps.code.outcome_critic import PASSED, OutcomeCritic, ends_of, is_critic
from operant.data.demonstrations import Demonstrations
from operant.storage.hub import find_model
from operant.types import OperantError, Task, Tokenizer, require, said_of, shown


@dataclass(frozen=True)
class Reading:
    """What a critic says of one program of N tokens of its own tokenizer, at N + 1 positions."""

    own: Tensor
    """[N + 1, C] the softmax of the logits of position t, which has read t tokens."""
    pooled: Tensor
    """[N + 1, C] the probability of each outcome for the first t tokens; the last row is that for the program."""
    ends: list[int]
    """[N + 1] characters of the program that each position has read; the first one is 0."""
    program: str
    """Its text."""

    def after(self, ids: Sequence[int], tokenizer: Tokenizer | None) -> list[int]:
        """For each token of another tokenizer, of which the program is made, the last position that has read no more
        than the text until its end."""
        return [bisect_right(self.ends, end) - 1 for end in ends_of(tokenizer, ids, self.program)]


class CriticScore:
    """The probabilities of the outcomes of programs: `CriticScore("runs/critic")`.

    path: a run folder or an exported folder. batch: programs that are read at a time. The critic is loaded by `check`
    or when it is first used. It reads text with its own tokenizer. A problem that is too long is cut at its beginning,
    a program at its end. Raises: OperantError for a batch below 1, or a folder that holds no critic.
    """

    def __init__(self, path: str, *, batch: int = 32, device: str | None = None):
        require(batch >= 1, f"critic {path!r}: batch={batch} must be at least 1")
        self.path, self.batch = path, batch
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")

    @cached_property
    def critic(self) -> OutcomeCritic:
        """The model. Raises: OperantError if it cannot be loaded, or is no outcome critic."""
        with said_of(f"critic {shown(self.path)} cannot be loaded"):
            folder = Path(find_model(self.path))
        remedy = "train one, as in `operant train outcome-critic --trunk MODEL --tasks samples.jsonl`"
        require(is_critic(folder), f"{self.path} is no outcome critic: {remedy}")
        return OutcomeCritic(str(folder)).to(self.device)

    def check(self) -> None:
        """Load the critic. Raises: OperantError as `critic`."""
        _ = self.critic

    def rows(self, attempts: Sequence[tuple[object, str]]) -> list[tuple[list[int], list[int]]]:
        """Of each problem (a text or messages) and program: the ids of both, the program's with an end token."""
        critic = self.critic
        known = Demonstrations(critic.tokenizer, critic.stop_tokens[0], encoder_decoder=critic.encoder_decoder)
        (context, most), rows = critic.room(), []
        for rollout in known.rollouts([Task("", problem, replies=(program,)) for problem, program in attempts]):
            prompt, program = rollout.turns[-1].prompt, rollout.turns[-1].action
            if most is not None:  # a program that is cut keeps no end token
                program = program[: most if critic.encoder_decoder else most - 1]
            if context is not None:
                room = context if critic.encoder_decoder else context - max(len(program), critic.pool_padding)
                prompt = prompt[-room:]
            rows.append((prompt, program))
        return rows

    def read(self, attempts: Sequence[tuple[object, str]]) -> list[Reading]:
        """What the critic says of each problem (a text or messages) and program."""
        rows = self.rows(attempts)
        found = []
        for (_, ids), (_, program), (own, pooled) in zip(rows, attempts, self.critic.read(rows, self.batch)):
            ends = [0, *ends_of(self.critic.tokenizer, ids, program)][: len(ids)]
            found.append(Reading(own.double().softmax(-1), pooled.double().softmax(-1), ends, program))
        return found

    def prefixes(self, problem: object, reply: str | Sequence[int], tokenizer: Tokenizer | None = None) -> list[float]:
        """P(passed) of a reply's beginning until each of its tokens; the last number is that of the whole reply.

        reply: a text, which the critic's tokenizer divides, or ids of `tokenizer`, the policy's.
        Raises: OperantError for ids without that tokenizer.
        """
        if isinstance(reply, str):
            [found] = self.read([(problem, reply)])
            return found.pooled[1:, PASSED].tolist()
        if tokenizer is None:
            raise OperantError("prefixes of ids need the tokenizer that made them: prefixes(problem, ids, tokenizer)")
        text = tokenizer.decode(reply, skip_special_tokens=True)
        [found] = self.read([(problem, text)])
        return found.pooled[found.after(reply, tokenizer), PASSED].tolist()
