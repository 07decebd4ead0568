"""Makes rollouts of demonstrations: replies from a data set that a model is trained on.

    rollouts = Demonstrations(tokenizer, stop=policy.stop_tokens[0]).rollouts(tasks)

A reply is encoded once, and ends with a stop token, so that the model learns to stop. In a chat, the template decides
how an answer ends, and each answer is one turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from operant.sampling import encode_more, encode_prompt, encode_text, render
from operant.types import End, OperantError, Reply, Rollout, Task, Tokenizer, Turn, require

MOST_REPLIES = 1 << 16
"""Most replies of one task."""
OPENING = 8
"""Number of first tokens of a text without a prompt that become the prompt when the model shall continue the text."""


@dataclass(frozen=True)
class Demonstrations:
    """Makes rollouts of the replies in `Task.replies`."""

    tokenizer: Tokenizer | None
    stop: int | None
    """The token that ends a reply; None: none is appended."""
    everything: bool = False
    """Train on prompts as well as replies."""
    longest: int | None = None
    """Most tokens of a row, prompt and reply together. Longer replies are cut at the end."""
    encoder_decoder: bool = False

    def rollouts(self, tasks: Sequence[Task], places: Sequence[int] | None = None) -> list[Rollout]:
        """One rollout for each reply of each task, whose last turn is paid its label, if there is one.

        `places`: indices of the tasks among all tasks of the step.

        Raises: OperantError for a reply without a token to learn; it names the task.
        """
        made = []
        for place, task in zip(places or range(len(tasks)), tasks):
            for number, reply in enumerate(task.replies):
                turns, texts = self._turns(task, reply)
                query = self._query(task, turns)
                end: End = turns[-1].end if len(turns) == 1 else "world"
                where = place * MOST_REPLIES + number
                if task.scores:
                    turns[-1] = replace(turns[-1], reward=task.scores[number])
                made.append(Rollout(task, place, turns, texts, end, {}, query, place=where, demonstrated=True))
        return made

    def opening(self, task: Task) -> Task:
        """The task with a prompt to generate from. A text without a prompt is continued from its first tokens."""
        if task.prompt:
            return task
        (turn, *_), _ = self._turns(task, task.replies[0])
        return replace(task, prompt=(turn.prompt + turn.action)[:OPENING])

    def _query(self, task: Task, turns: list[Turn]) -> str:
        return self._decoded(turns[0].prompt)

    def _turns(self, task: Task, reply: Any) -> tuple[list[Turn], list[str]]:
        if isinstance(reply, list) and reply and isinstance(reply[0], dict):
            pairs, texts = self._answers(task, reply), [m["content"] for m in reply if m["role"] == "assistant"]
        else:
            pairs, whole = [self._pair(task, reply)], reply if isinstance(reply, str) else self._decoded(reply)
            texts = [whole if task.prompt else whole.removeprefix(self._decoded(pairs[0][0]))]
        if self.everything:  # the last row contains all tokens before it, and its first token cannot be predicted
            tokens = pairs[-1][0] + pairs[-1][1]
            pairs, texts = [(tokens[:1], tokens[1:])], [self._decoded(tokens[1:])]
        made = [(self._turn(*pair), text) for pair, text in zip(pairs, texts, strict=True)]
        usable = [(turn, text) for turn, text in made if turn is not None]
        if not usable:
            length = len(pairs[0][0])
            if self.longest is not None and length >= self.longest:
                raise OperantError(
                    f"task {task.id!r}: its prompt of {length} tokens leaves nothing to learn from within "
                    f"data.max_length={self.longest}: raise that, or leave long rows out with --data.max-chars N"
                )
            raise OperantError(f"task {task.id!r}: its prompt or reply is empty, so there is nothing to learn from")
        # The text of a reply that was cut is decoded again, because bits per byte are counted by the learnt tokens.
        texts = [text if turn.end == "stop" else self._decoded(turn.action) for turn, text in usable]
        return [turn for turn, _ in usable], texts

    def _pair(self, task: Task, reply: str | list[int]) -> tuple[list[int], list[int]]:
        """(prompt, action) of a reply that is a text or ids, or of a text without a prompt."""
        stop = [] if self.stop is None else [self.stop]
        if isinstance(reply, list):
            return encode_prompt(self.tokenizer, task.prompt), [*reply, *stop]
        if not task.prompt:
            if self.encoder_decoder:
                why = "an encoder-decoder reads one and writes the reply; give rows with prompt and completion"
                raise OperantError(f"task {task.id!r} has no prompt: {why}")
            whole = encode_prompt(self.tokenizer, reply)
            whole += stop if whole[-1:] != stop else []
            return whole[:1], whole[1:]
        prompt = encode_prompt(self.tokenizer, task.prompt)
        if isinstance(task.prompt, str) and not self.encoder_decoder:
            whole = encode_prompt(self.tokenizer, task.prompt + reply)
            if whole[: len(prompt)] == prompt:  # the tokenizer encodes the prompt in the same way before the reply
                return prompt, whole[len(prompt) :] + stop
        return prompt, self._plain(reply) + stop

    def _plain(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise OperantError("the policy has no tokenizer: give replies as token ids")
        return encode_more(self.tokenizer, text)

    def _answers(self, task: Task, reply: list[dict[str, str]]) -> list[tuple[list[int], list[int]]]:
        """(prompt, action) of each assistant message. A prompt keeps the ids of earlier turns if their text is equal.

        Raises: OperantError if the chat template writes a prompt and its answer in different ways.
        """
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
                    f"task {task.id!r}: the chat template writes the text before an answer differently from the "
                    "prompt, so training and sampling would differ; give prompt and completion as text"
                )
            ids = ids + self._plain(asked[len(text) :]) if text and asked.startswith(text) else self._plain(asked)
            action = self._plain(answered[len(asked) :])
            pairs.append((ids, action))
            ids, text = ids + action, answered
        require(pairs, f"task {task.id!r}: the reply has no message with role 'assistant', so nothing can be learnt")
        return pairs

    def _turn(self, prompt: list[int], action: list[int]) -> Turn | None:
        room = len(action) if self.longest is None else self.longest - (0 if self.encoder_decoder else len(prompt))
        if not prompt or not action or room < 1:
            return None
        return Turn(prompt, action[:room], end="stop" if room >= len(action) else "length")

    def _decoded(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True) if self.tokenizer is not None else ""


@dataclass(frozen=True)
class WholeTexts(Demonstrations):
    """Makes rollouts of prompts and replies as one text, for a model that scores texts with its own tokenizer.

    The text is encoded as `rewards.Classifier` encodes it, and ends without a stop token. All but its first token
    counts as the reply.
    """

    tokenizer: Tokenizer

    def _query(self, task: Task, turns: list[Turn]) -> str:
        return whole_text(self.tokenizer, task, "" if isinstance(task.prompt, str) else [])

    def _turns(self, task: Task, reply: Reply) -> tuple[list[Turn], list[str]]:
        text = whole_text(self.tokenizer, task, reply)
        ids = encode_text(self.tokenizer, text, truncation=True, max_length=self.longest)
        require(len(ids) >= 2, f"task {task.id!r}: prompt and reply are {len(ids)} of at least 2 tokens together")
        return [Turn(ids[:1], ids[1:])], [reply if isinstance(reply, str) else self._decoded(ids[1:])]


def whole_text(tokenizer: Tokenizer | None, task: Task, reply: Reply) -> str:
    """Prompt and reply as one text: joined, decoded from ids, or written by the chat template."""
    prompt = task.prompt
    if isinstance(prompt, str) and isinstance(reply, str):
        return prompt + reply
    if any(isinstance(message, dict) for message in [*prompt, *reply]):
        before = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        after = reply if isinstance(reply, list) else [{"role": "assistant", "content": reply}]
        return render(tokenizer, [*before, *after], prompting=False)
    both = [x if isinstance(x, str) else tokenizer.decode(x, skip_special_tokens=True) for x in (prompt, reply)]
    return "".join(both)
