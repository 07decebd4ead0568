"""A world in which the policy reads what a reward says about its reply, and replies again: a program is repaired.

runs(env="feedback", env={"reward": "my_rewards:unit_tests", "turns": 3})    # in Python: env=Feedback(reward)
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

from operant.rewards import held_out, judge, read_with, resolve
from operant.rewards.evaluate import name_of
from operant.rewards.failure_policy import IsolationOptions
from operant.rewards.isolated import under
from operant.rewards.wrapper import compared_with_greedy
from operant.sampling import TokenCount
from operant.types import Judgement, RewardFn, Rollout, Step, Task, Turn, require, totals


class Feedback:
    """An `Env` that shows the message of a `Judgement` to the policy as the text of its next turn.

    reward: a function, or a name as in `--reward`. It reads the rollout so far: `reply` is the last reply. turns: the
    largest number of replies; an empty message ends the episode earlier. text: what is put after the reply, with the
    message in place of {message}; a chat model needs the marks of its template here.
    The last reply of the episode is paid its score, 0 if the reward abstains; its judgement is in the rollout's `info`.
    Raises: OperantError for a reward that is unknown or needs greedy replies, no turns, or a text without {message}.
    """

    pays = True
    """The last reply of an episode is paid its score."""

    def __init__(self, reward: Any, turns: int = 2, text: str = "\n{message}\n"):
        require(turns >= 1, f"env.turns={turns}: it must be at least 1")
        marked = f"env.text={text!r}: it must contain {{message}}, where the reward's message is put"
        require("{message}" in text, marked)
        self.reward, self.turns, self.text = resolve(reward), turns, text
        greedy = "env.reward compares with greedy replies, which --reward alone gets: give it there"
        require(not compared_with_greedy(self.reward), greedy)
        self.tokenizer: Any = None
        self.judges = [self.reward]
        self._rollouts: dict[int, Rollout] = {}
        self._played: Mapping[int, Turn] = {}

    def under(self, isolation: IsolationOptions) -> "Feedback":
        """The same world, whose reward has these options unless it has its own."""
        return self._judged_by(under(self.reward, isolation))

    def for_evaluation(self) -> "Feedback":
        """The world of held-out tasks, about which people, for example, are not asked."""
        return self if (reward := held_out(self.reward)) is self.reward else self._judged_by(reward)

    def _judged_by(self, reward: RewardFn) -> "Feedback":
        world = copy(self)
        world.reward, world.judges, world._rollouts = reward, [reward], {}
        return world

    def measure(self, count: Callable[[str], int], room: int | None) -> None:
        """Learn the tokenizer, as a prompt may be messages or ids, and some rewards read tokens."""
        if isinstance(count, TokenCount):
            self.tokenizer = count.tokenizer
            read_with(self.reward, self.tokenizer)

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step]:
        """Begin episodes: the policy reads their tasks."""
        for slot, task in tasks.items():
            query = task.prompt if isinstance(task.prompt, str) else ""
            self._rollouts[slot] = Rollout(task, slot, [], [], query=query)
        return {slot: Step(fresh=True) for slot in tasks}

    def on_turns(self, turns: Mapping[int, Turn]) -> None:
        """The turns whose replies `step` gets next."""
        self._played = turns

    def step(self, replies: Mapping[int, str]) -> dict[int, Step]:
        """Judge the replies; what the reward says about each is the policy's next text."""
        for slot, reply in replies.items():
            turn = self._played.get(slot, Turn([], []))  # there is none where a world is checked without an engine
            known, query = self._rollouts[slot], self._rollouts[slot].query
            if self.tokenizer is not None and not known.turns:
                query = self.tokenizer.decode(turn.prompt, skip_special_tokens=True)
            turns, texts = [*known.turns, turn], [*known.texts, reply]
            self._rollouts[slot] = replace(known, turns=turns, texts=texts, end=turn.end, query=query)
        rollouts = [self._rollouts[slot] for slot in replies]
        judged, steps = judge(self.reward, rollouts), {}
        for i, (slot, score) in enumerate(zip(replies, totals(judged.scores, rollouts))):
            if score is None and (outcome := judged.outcome(i)) in ("error", "timeout"):
                info = {"failure": "; ".join(judged.notes) or "the reward has failed"}
                steps[slot] = Step(failed="timeout" if outcome == "timeout" else "raised", info=info)
                continue
            classes, message = judged.remark(i)
            parts = {name: number for name, values in judged.parts.items() if (number := values[i]) is not None}
            parts.pop(name_of(self.reward), None)  # the score itself
            judgement = Judgement(score, parts, ", ".join(classes)[:40], message)  # a sum has a class for each part
            ended = not message or len(rollouts[i].texts) == self.turns
            text, paid = ("", score or 0.0) if ended else (self.text.replace("{message}", message), 0.0)
            steps[slot] = Step(text, reward=paid, terminated=ended, info={"judgement": judgement})
        return steps
