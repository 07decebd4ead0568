"""Check a world before training: play it without a model, and look at everything that it answers."""

import random
from collections.abc import Sequence
from dataclasses import fields

from operant.rollouts import answers
from operant.types import Env, OperantError, Step, Task, shown

Played = dict[tuple[int, int], Step]
"""The world's steps by (turn, slot); turn 0 is the reset."""


def check_env(
    env: Env,
    tasks: Sequence[Task],
    *,
    replies: Sequence[str] = ("", "yes", "a longer reply, with a number: 12"),
    seed: int = 0,
    max_turns: int = 1000,
) -> None:
    """Play one episode for each task, twice, with replies drawn from `replies` or from the options that are offered.

    In every turn, a random part of the live episodes is stepped, as a run may do. The second time all tasks, replies
    and parts are the same, so the answers must be the same; a world with a state is reset to its state from before.
    Raises: OperantError with a sentence about the world, the slot and the remedy, for an exception, an answer for a
    wrong slot or of a wrong type, a reward that is not finite, an episode that does not end within `max_turns` turns,
    and an answer that differs the second time.
    """
    if not tasks:
        raise OperantError("check_env needs at least one task to play")
    has_state = all(callable(getattr(env, name, None)) for name in ("state_dict", "load_state_dict"))
    before = env.state_dict() if has_state else None  # pyright: ignore[reportAttributeAccessIssue]
    first = _play(env, tasks, replies, random.Random(seed), max_turns)
    if has_state:
        env.load_state_dict(before)  # pyright: ignore[reportAttributeAccessIssue]
    for (turn, slot), again in _play(env, tasks, replies, random.Random(seed), max_turns).items():
        once = first.get((turn, slot), again)
        for name in (f.name for f in fields(Step)):
            a, b = getattr(once, name), getattr(again, name)
            if shown(a, 10000) != shown(b, 10000):
                call = f"step, turn {turn}," if turn else "reset"
                raise OperantError(
                    f"world {answers.name_of(env)!r}: {call} answered slot {slot} (task {tasks[slot].id!r}) with "
                    f"{name}={shown(a)}, and the second time with {name}={shown(b)}, after the same replies: draw its "
                    "random numbers from the task's id, or keep their state with state_dict and load_state_dict"
                )


def _play(env: Env, tasks: Sequence[Task], replies: Sequence[str], chance: random.Random, max_turns: int) -> Played:
    """Play every task to its end, and return all steps of the world."""
    most = getattr(env, "most", None) or len(tasks)
    played: Played = {}
    for begin in range(0, len(tasks), most):
        tasks_of = {slot: tasks[slot] for slot in range(begin, min(begin + most, len(tasks)))}
        live = answers.reset(env, tasks_of)
        played |= {(0, slot): step for slot, step in live.items()}
        turns = dict.fromkeys(live, 0)
        while live := {slot: last for slot, last in live.items() if not _ends(last)}:
            part = sorted(chance.sample(list(live), chance.randint(1, len(live))))
            said = {slot: chance.choice(live[slot].options or replies) for slot in part}
            for slot, step in answers.step(env, said, tasks_of).items():
                turns[slot] += 1
                live[slot] = played[turns[slot], slot] = step
                if turns[slot] == max_turns and not _ends(step):
                    raise OperantError(
                        f"world {answers.name_of(env)!r} has not ended slot {slot} (task {tasks[slot].id!r}) after "
                        f"{max_turns} turns: let its step return terminated=True, or truncated=True at a limit of its "
                        "own, or give check_env a larger max_turns"
                    )
    return played


def _ends(step: Step) -> bool:
    return step.terminated or step.truncated or step.failed is not None
