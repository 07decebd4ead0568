"""Other prompts for the same replies: with a hint that only a teacher reads, or with the return of what follows.

A prompt keeps its token ids. What is added is encoded by itself, and put before or behind them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from operant.bounds import bounded, check_bounds
from operant.import_by_name import Table
from operant.rollouts.play import Opening
from operant.sampling import encode_more, encode_prompt
from operant.types import Judgement, OperantError, Rollout, Task, Tokenizer, Turn, shown

Added = str | list[int]
"""What is added to a prompt: a text, or token ids."""


def add(tokenizer: Tokenizer | None, task: Task, prompt: list[int], before: Added, behind: Added) -> list[int]:
    """The prompt between two additions. Of a chat's first prompt, they are put around its last message.

    A beginning-of-text token stays in front.
    """
    messages = [message for message in task.prompt if isinstance(message, dict)]
    of_text = isinstance(before, str) and isinstance(behind, str)
    if messages and of_text and prompt == encode_prompt(tokenizer, messages):
        *others, last = messages
        return encode_prompt(tokenizer, [*others, {**last, "content": before + last["content"] + behind}])
    begins = int(tokenizer is not None and prompt[:1] == [tokenizer.bos_token_id])
    return [*prompt[:begins], *_ids(tokenizer, before), *prompt[begins:], *_ids(tokenizer, behind)]


def _ids(tokenizer: Tokenizer | None, added: Added) -> list[int]:
    if isinstance(added, list):
        return added
    if not added:
        return []
    if tokenizer is None:
        raise OperantError(f"{shown(added)} is put into prompts, and the policy has no tokenizer: give token ids")
    return encode_more(tokenizer, added)


def with_prompts(rollout: Rollout, prompt_of: Callable[[int, Turn], list[int]]) -> Rollout:
    """The rollout with other prompts, and without what is known of its replies behind the old ones.

    `prompt_of(index, turn)`: the prompt of a turn that opens a row. Turns that go on in the row go on from it.
    """
    turns: list[Turn] = []
    row, new = list[int](), list[int]()
    for index, turn in enumerate(rollout.turns):
        if turn.trained:  # the prompt of the next trained turn contains any other
            goes_on = bool(row) and turn.prompt[: len(row)] == row
            prompt = new + turn.prompt[len(row) :] if goes_on else prompt_of(index, turn)
            row, new = turn.prompt + turn.action, prompt + turn.action
            turn = replace(turn, prompt=prompt, logprobs=None, values=None, allowed=None, states=None)
        turns.append(turn)
    return replace(rollout, turns=turns)


def target(rollout: Rollout) -> str:
    """The target of the task, or the answer in it."""
    known = rollout.task.target
    answer = known.get("answer") if isinstance(known, Mapping) else known
    if answer is None:
        what = "target" if known is None else "answer in its target"
        give = "give the tasks one, or name another hint: feedback, answer, sibling, or module:function"
        raise OperantError(f"teacher.hint=target: task {rollout.task.id!r} has no {what} to tell the teacher; {give}")
    return str(answer)


def feedback(rollout: Rollout) -> object:
    """The world's feedback on the episode: `info["feedback"]`, or the message of `info["judgement"]`."""
    judgement = rollout.info.get("judgement")
    own = isinstance(judgement, Mapping)  # it comes from a world in another process
    message = judgement.get("message") if own else judgement.message if isinstance(judgement, Judgement) else ""
    return rollout.info.get("feedback") or message or ""


def answer(rollout: Rollout) -> list[list[int]]:
    """What the world answered to each reply, as token ids: the next prompt, or the text that it appended."""
    answers, ahead = list[list[int]](), rollout.following or []
    for turn in reversed(rollout.turns):
        before = turn.prompt + turn.action
        answers.append(ahead[len(before) :] if ahead[: len(before)] == before else ahead)
        ahead = turn.prompt or ahead
    return answers[::-1]


def sibling(rollouts: Sequence[Rollout], scores: Sequence[float | None], right: float) -> list[object]:
    """For each rollout the best other reply to its prompt, if that scores at least `right`; otherwise `feedback`.

    scores: one for each rollout, with what its world paid.
    """
    if rollouts and all(score is None for score in scores):
        raise OperantError("teacher.hint=sibling: the replies have no scores; give a reward, or name another hint")
    known = [(score, i) for i, score in enumerate(scores) if score is not None and score >= right]
    good = [i for _, i in sorted(known, key=lambda one: -one[0])]
    best = [next((i for i in good if i != at and rollouts[i].group == r.group), None) for at, r in enumerate(rollouts)]
    replies = [rollout.reply or rollout.turns[-1].action for rollout in rollouts]  # ids where nothing decodes them
    return [feedback(r) if i is None else replies[i] for i, r in zip(best, rollouts, strict=True)]


HINTS = Table("hint", "operant.hints", {"target": target, "feedback": feedback, "answer": answer, "sibling": sibling})
"""Functions from a rollout to the hint that its teacher reads; `sibling` is one of all rollouts."""


@dataclass(frozen=True)
class TeacherOptions:
    """The teacher of a method that learns from hints: what it reads, where that stands, and which weights it has."""

    hint: Any = "target"
    """What the teacher reads beside the prompt: target (of the task), feedback (`info["feedback"]` of the rollout, or
    the message of its judgement), answer (the world's answer to each reply), sibling (the best right reply to the
    same prompt, else feedback), or module:function, from Python also a function: from a rollout to a text or token
    ids, or to a list with one of these for each turn. Empty: nothing."""
    right: float = 1.0
    """The least score of a right reply, for the hint `sibling`."""
    template: str = "{hint}\n{prompt}"
    """Where the hint stands: before or behind {prompt}."""
    rate: float = bounded(0.0, at_least=0, at_most=1)
    """A copy of the policy as teacher follows it by this share of the distance after each step. 0: the teacher stays
    the first policy; 1: it is the policy itself, as it was before the step."""

    def __post_init__(self) -> None:
        if not callable(self.hint):
            HINTS.find(self.hint)
        if self.template.count("{prompt}") != 1 or self.template.count("{hint}") != 1:
            raise OperantError(f"teacher.template={self.template!r}: it must hold {{hint}} and {{prompt}}, once each")
        check_bounds(self, "teacher")


def with_hints(
    rollouts: Sequence[Rollout], scores: Sequence[float | None], tokenizer: Tokenizer | None, options: TeacherOptions
) -> list[Rollout]:
    """The rollouts as the teacher reads them: with its hint in the prompt that opens each row.

    scores: one for each rollout. Raises: OperantError for a hint that is no text or ids, or that differs between the
    turns of one row.
    """
    hint = options.hint if callable(options.hint) else HINTS.find(options.hint)
    hints = sibling(rollouts, scores, options.right) if hint is sibling else map(hint, rollouts)
    return [_with_hint(r, tokenizer, told, options.template) for r, told in zip(rollouts, hints, strict=True)]


def _with_hint(rollout: Rollout, tokenizer: Tokenizer | None, hint: object, template: str) -> Rollout:
    each = isinstance(hint, (list, tuple)) and not all(isinstance(token, int) for token in hint)
    hints = list(hint) if each else [hint] * len(rollout.turns)
    if len(hints) != len(rollout.turns) or not all(isinstance(one, (str, list, type(None))) for one in hints):
        what = f"teacher.hint gave {shown(hint)} for task {rollout.task.id!r} of {len(rollout.turns)} turns"
        how = "give a text or token ids for all of them, or a list with one of these for each"
        raise OperantError(f"{what}: {how}")
    opened = set[int]()

    def prompt_of(index: int, turn: Turn) -> list[int]:
        opened.add(index)
        hint = hints[index] or ""
        if not hint:
            return turn.prompt
        if tokenizer is None:
            before, _, behind = (hint if "{hint}" in part else "" for part in template.partition("{prompt}"))
        else:
            text = hint if isinstance(hint, str) else tokenizer.decode(hint)
            before, _, behind = (part.replace("{hint}", text) for part in template.partition("{prompt}"))
        return add(tokenizer, rollout.task, turn.prompt, before, behind)

    made = with_prompts(rollout, prompt_of)
    if each and (late := [i for i, turn in enumerate(rollout.turns) if turn.trained and i not in opened and hints[i]]):
        where = f"turn {late[0] + 1} of task {rollout.task.id!r}, whose prompt goes on from the turn before it"
        how = "use a world with fresh prompts (Step.fresh), or one hint for the whole episode"
        raise OperantError(f"teacher.hint gave a hint for {where}: that one would have to know it too; {how}")
    return made


@dataclass(frozen=True)
class ConditionOptions:
    """What prompts say about the return: the wanted one in play, and in training the one that was reached."""

    wanted: float | None = None
    """The return that play asks for; none: the best ones of the step before, in turn, and nothing in the first step.
    From turn to turn it is what is left of it."""
    top: float = bounded(0.25, above=0, at_most=1)
    """The share of the returns of the step before that counts as the best."""
    evaluated: float | None = None
    """The return that evaluation and probes ask for; none: `wanted`, or the best one of the step before."""
    template: Any = "This play through has a return of {return}.\n{prompt}"
    """Where the return stands; from Python also a function from a return to the text or the token ids before the
    prompt."""
    digits: int = bounded(2, at_least=0)
    """Digits behind the point to which the return is rounded."""
    turn_gamma: float = bounded(1.0, above=0, at_most=1)
    """The discount between turns."""

    def __post_init__(self) -> None:
        if not callable(self.template) and any(str(self.template).count(p) != 1 for p in ("{return}", "{prompt}")):
            rule = "it must contain {return} and {prompt}, once each"
            raise OperantError(f"condition.template={shown(self.template)}: {rule}")
        check_bounds(self, "condition")

    def put(self, tokenizer: Tokenizer | None, task: Task, prompt: list[int], value: float) -> list[int]:
        value = round(value, self.digits) + 0.0  # -0.0 is 0
        if callable(self.template):
            return add(tokenizer, task, prompt, self.template(value), "")
        written = f"{value:.{self.digits}f}".rstrip("0").rstrip(".") if self.digits else f"{value:.0f}"
        before, _, behind = (part.replace("{return}", written) for part in self.template.partition("{prompt}"))
        return add(tokenizer, task, prompt, before, behind)

    def left(self, wanted: float, turns: Sequence[Turn]) -> float:
        """What is left of a wanted return after some turns: w becomes (w - r) / turn_gamma with each."""
        for turn in turns:
            wanted = (wanted - turn.reward) / self.turn_gamma
        return wanted


class Wanted:
    """The returns that play asks for: those of the options, or the best ones of the step before."""

    def __init__(self, options: ConditionOptions):
        self.options, self.best = options, list[float]()

    def see(self, returns: Sequence[float]) -> None:
        """Keep the best of the returns of a step."""
        count = max(1, round(self.options.top * len(returns)))
        self.best = sorted(returns, reverse=True)[:count]

    def opening(self, tokenizer: Tokenizer | None, *, training: bool) -> Opening | None:
        """What puts the wanted return into prompts; None as long as there is none."""
        given = self.options.wanted
        if not training and self.options.evaluated is not None:
            given = self.options.evaluated
        asked = self.best[: None if training else 1] if given is None else [given]
        if not asked:
            return None

        def put(task: Task, place: int, prompt: list[int], turns: Sequence[Turn]) -> list[int]:
            left = self.options.left(asked[place % len(asked)], turns)
            return self.options.put(tokenizer, task, prompt, left)

        return put

    def state_dict(self) -> dict[str, object]:
        return {"best": self.best}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        self.best = list(state["best"])


def with_returns(
    rollouts: Sequence[Rollout],
    returns: Sequence[Sequence[float]],
    tokenizer: Tokenizer | None,
    options: ConditionOptions,
) -> list[Rollout]:
    """The rollouts with the return that was reached, from the turn that opens a row on, in place of the wanted one.

    `returns`: for each rollout, those from each turn on.
    """
    made = []
    for rollout, reached in zip(rollouts, returns, strict=True):

        def prompt_of(index: int, turn: Turn, task: Task = rollout.task, left: Sequence[float] = reached) -> list[int]:
            own = turn.prompt if turn.unconditioned is None else turn.unconditioned
            return options.put(tokenizer, task, own, left[index])

        made.append(with_prompts(rollout, prompt_of))
    return made


def returns_to_go(rollout: Rollout, score: float | Sequence[float], turn_gamma: float = 1.0) -> list[float]:
    """The return from each turn on: G_k = r_k + turn_gamma * G_{k+1}.

    `score`: paid on the last action of the episode, or one number for each action.
    """
    rewards, spent = [turn.reward for turn in rollout.turns], 0
    last = max(i for i, turn in enumerate(rollout.turns) if turn.trained)
    for i, turn in enumerate(rollout.turns):
        if isinstance(score, (int, float)):
            rewards[i] += float(score) if i == last else 0.0
        else:
            rewards[i] += sum(score[spent : spent + turn.count])
            spent += turn.count
    ahead = 0.0
    for i in reversed(range(len(rewards))):
        rewards[i] = ahead = rewards[i] + turn_gamma * ahead
    return rewards
