"""Given replies to rollouts: what somebody else wrote, as rows that a model is trained on.

    rollouts = demonstrated(tasks, tokenizer, stop=policy.stop_tokens[:1])

Text becomes ids once. A reply ends with a stop token, so that the model learns to stop; in a chat the template says how
an answer ends. Messages become one turn an answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from operant.rollouts.chat import encode_prompt, render
from operant.types import End, OperantError, Rollout, Task, Turn

SEVERAL = 1 << 16
"""Replies that one task may have."""
OPENING = 8
"""Tokens of a text without a prompt that stand for one where the model is to go on with it."""


@dataclass(frozen=True)
class Demonstrations:
    """How given replies become rows."""

    tokenizer: Any
    stop: int | None
    """Ends a reply; None: nothing does."""
    everything: bool = False
    """Train on prompts, too, and not on the replies alone."""
    longest: int | None = None
    """Tokens of a row, prompt and reply; what is beyond them is cut off at the end."""
    encoder_decoder: bool = False

    def rollouts(self, tasks: Sequence[Task], places: Sequence[int] | None = None) -> list[Rollout]:
        """One for each reply of each task. `places`: where the tasks stand among all of a step.

        Raises: OperantError for a reply without a token to learn, naming the task.
        """
        made = []
        for place, task in zip(places or range(len(tasks)), tasks):
            for number, reply in enumerate(task.replies):
                turns, texts = self._turns(task, reply)
                query = self._decoded(turns[0].prompt)
                end: End = turns[-1].end if len(turns) == 1 else "world"
                made.append(Rollout(task, place, turns, texts, end, {}, query, place=place * SEVERAL + number))
        return made

    def opening(self, task: Task) -> Task:
        """The task as a policy is asked it: of a text without a prompt, its first tokens."""
        if task.prompt:
            return task
        (turn, *_), _ = self._turns(task, task.replies[0])
        return replace(task, prompt=(turn.prompt + turn.action)[:OPENING])

    def _turns(self, task: Task, reply: Any) -> tuple[list[Turn], list[str]]:
        if isinstance(reply, list) and reply and isinstance(reply[0], dict):
            pairs, texts = self._answers(task, reply), [m["content"] for m in reply if m["role"] == "assistant"]
        else:
            pairs, said = [self._pair(task, reply)], reply if isinstance(reply, str) else self._decoded(reply)
            texts = [said if task.prompt else said.removeprefix(self._decoded(pairs[0][0]))]
        if self.everything:
            pairs = [_all_of(pairs)]
            texts = [self._decoded(pairs[0][1])]
        made = [(self._turn(task, *pair), text) for pair, text in zip(pairs, texts, strict=True)]
        kept = [(turn, text) for turn, text in made if turn is not None]
        if not kept:
            raise OperantError(
                f"task {task.id!r}: nothing is left to learn from; its prompt alone is too long, or empty"
            )
        # The text is that of the tokens that are learnt, also of a reply that was cut: bits are counted by its bytes.
        texts = [text if turn.end == "stop" else self._decoded(turn.action) for turn, text in kept]
        return [turn for turn, _ in kept], texts

    def _pair(self, task: Task, reply: str | list[int]) -> tuple[list[int], list[int]]:
        """(prompt, action) of a text or ids behind a prompt, or of a text alone."""
        stop = [] if self.stop is None else [self.stop]
        if isinstance(reply, list):
            return encode_prompt(self.tokenizer, task.prompt), [*reply, *stop]
        if not task.prompt:
            if self.encoder_decoder:
                raise OperantError(
                    f"task {task.id!r} has no prompt: an encoder-decoder reads one and writes the reply; give rows "
                    "with prompt and completion"
                )
            whole = encode_prompt(self.tokenizer, reply)
            whole += stop if whole[-1:] != stop else []
            return whole[:1], whole[1:]
        prompt = encode_prompt(self.tokenizer, task.prompt)
        if isinstance(task.prompt, str) and not self.encoder_decoder:
            return prompt, self._behind(prompt, task.prompt, reply) + stop
        return prompt, self._plain(reply) + stop

    def _behind(self, prompt: list[int], text: str, reply: str) -> list[int]:
        """The ids of a reply as they are behind its prompt, where the tokenizer keeps the prompt's own ids there."""
        whole = encode_prompt(self.tokenizer, text + reply)
        return whole[len(prompt) :] if whole[: len(prompt)] == prompt else self._plain(reply)

    def _plain(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise OperantError("the policy has no tokenizer: give replies as token ids")
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _answers(self, task: Task, reply: list[dict[str, str]]) -> list[tuple[list[int], list[int]]]:
        """(prompt, action) of each assistant's message; a prompt goes on from the ids before it where the text does."""
        before = task.prompt if isinstance(task.prompt, list) else [{"role": "user", "content": task.prompt}]
        messages = [*before, *reply]
        pairs: list[tuple[list[int], list[int]]] = []
        ids, text = list[int](), ""
        for i in range(len(before), len(messages)):
            if messages[i]["role"] != "assistant":
                continue
            asked = render(self.tokenizer, messages[:i], prompting=True)
            answered = render(self.tokenizer, messages[: i + 1], prompting=False)
            if not answered.startswith(asked):
                raise OperantError(
                    f"task {task.id!r}: the chat template writes an answer otherwise than it asks for one, so what is "
                    "trained would not be what is sampled; give prompt and completion as text"
                )
            ids = ids + self._plain(asked[len(text) :]) if text and asked.startswith(text) else self._plain(asked)
            action = self._plain(answered[len(asked) :])
            pairs.append((ids, action))
            ids, text = ids + action, answered
        return pairs

    def _turn(self, task: Task, prompt: list[int], action: list[int]) -> Turn | None:
        """The turn, cut at the longest row; None where nothing of the reply is left."""
        room = len(action) if self.longest is None else self.longest - (0 if self.encoder_decoder else len(prompt))
        if not prompt or not action or room < 1:
            return None
        return Turn(prompt, action[:room], end="stop" if room >= len(action) else "length")

    def _decoded(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True) if self.tokenizer is not None else ""


def _all_of(pairs: list[tuple[list[int], list[int]]]) -> tuple[list[int], list[int]]:
    """Every token but the first of the last row, which holds the ones before it."""
    whole = pairs[-1][0] + pairs[-1][1]
    return whole[:1], whole[1:]
