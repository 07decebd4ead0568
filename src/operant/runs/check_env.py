"""Check a world before training: play it without a model, and look at everything that it answers."""

import inspect
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import Literal

from operant.data.tasks import check_texts
from operant.envs import asked, check_parts, for_evaluation, own_games
from operant.envs.functions import maker
from operant.rollouts import answers
from operant.types import MAX_TURNS, Env, EnvBase, OperantError, Step, Task, name_of, require, shown, with_defaults


def check_env(
    env: Env | Callable[..., object],
    tasks: Sequence[Task] | None = None,
    *,
    replies: Sequence[str] = ("", "yes", "a longer reply, with a number: 12", "two\nlines\n", "x" * 10_000),
    seed: int = 0,
    max_turns: int = MAX_TURNS,
) -> None:
    """Play one episode for each task, twice, with replies drawn from `replies` or from the options that are offered.

    In every turn, a random part of the live episodes is stepped, as a run may do; before, some episodes are left in
    their middle and begun again. The second time the same replies are given to every episode, so the answers must be
    the same. A world with a state is then reset to its state from before, and the same parts are stepped; in any other,
    other parts are stepped, because an episode must not depend on those beside it.
    A line at the end says what was played.
    env: a world, or what `train` makes one of: a class, or a function.
    tasks: None: the first of the world's own (`games`), which are checked too, and asked for twice.
    Raises: OperantError with a sentence about the world, the slot and the remedy, for an exception, an answer for a
    wrong slot or of a wrong type, a reward that is not finite, an episode that does not end within `max_turns` turns,
    an answer that differs the second time, and all else that a run refuses: a task without a prompt, two with one id,
    an empty prompt in an episode, a state that no checkpoint can store, and a world that fails in every episode.
    """
    env = maker(env)() if isinstance(env, type) or inspect.isfunction(env) else env
    check_parts(env)
    for_evaluation(env)
    if (measure := with_defaults(env, EnvBase).measure) is not None:
        asked(env, "measure", measure, len, None)
    if tasks is None:  # the first 8 of a world's own
        train, test = _same_games(env, "train"), _same_games(env, "test")
        if both := {task.id for task in train} & {task.id for task in test}:
            why = "so an evaluation would measure what was trained on; give them different ids and seeds"
            twice = f"games('train') and games('test') both have the task {min(both)!r}"
            raise OperantError(f"world {name_of(env)!r}: {twice}, {why}")
        _check_tasks(env, [*train, *test])
        tasks = train[:8]
    require(tasks, "check_env needs at least one task to play")
    _check_tasks(env, tasks)
    save, load = (with_defaults(env, EnvBase).state_dict, with_defaults(env, EnvBase).load_state_dict)
    before = save() if save is not None and load is not None else None
    if before is not None:
        from operant.storage import state_codec  # it imports torch

        state_codec.encode(before, f"the state of world {name_of(env)!r}", state_codec.NamedTensors())
    first = _play(env, tasks, replies, seed, max_turns, random.Random(seed))
    failures = [str(step.info.get("failure", step.failed)) for step in first.values() if step.failed is not None]
    if len(failures) == len(tasks):
        raise OperantError(f"world {name_of(env)!r} has failed in every episode; of the first: {failures[0]}")
    if load is not None and before is not None:
        load(before)
    parts = random.Random(-1 if before is None else seed)
    for (turn, slot), again in _play(env, tasks, replies, seed, max_turns, parts).items():
        once = first[turn, slot]
        for name in (f.name for f in fields(Step)):
            a, b = getattr(once, name), getattr(again, name)
            if shown(a, 10000) != shown(b, 10000):
                call = f"step, turn {turn}," if turn else "reset"
                then = f"{name}={shown(a)}, and the second time with {name}={shown(b)}, after the same replies"
                how = "draw its random numbers from the task's id, or keep their state with state_dict and "
                how += "load_state_dict; and let no episode depend on those beside it"
                what = f"{call} answered slot {slot} (task {tasks[slot].id!r}) with {then}"
                raise OperantError(f"world {name_of(env)!r}: {what}: {how}")
    paid = [step.reward for (turn, _), step in first.items() if turn]
    rewards = f", rewards of {min(paid):g} to {max(paid):g}" if paid else ""
    print(f"world {name_of(env)!r} is fine: {len(tasks)} episodes, {len(paid)} turns{rewards}")


def _same_games(env: Env, split: Literal["train", "test"]) -> list[Task]:
    games, again = own_games(env, split), own_games(env, split)
    if games != again:
        pairs = zip_longest(games, again)
        one, other = next((a, b) for a, b in pairs if a != b)
        how = "make the tasks of fixed seeds, because a resumed run and an evaluation ask again"
        what = f"games({split!r}) returned {shown(one)}, and {shown(other)} in its place the second time"
        raise OperantError(f"world {name_of(env)!r}: {what}; {how}")
    return games


def _check_tasks(env: Env, tasks: Sequence[Task]) -> None:
    """Raises: OperantError for what a run refuses or leaves out of its tasks."""
    world, remedy = f"world {name_of(env)!r}", "give a list of operant.Task, or None for the world's"
    if odd := [task for task in tasks if not isinstance(task, Task)]:
        raise OperantError(f"check_env: {shown(odd[0])} is no task; {remedy}")
    ids = Counter(task.id for task in tasks)
    for task in tasks:
        check_texts(task, world)
        if not (task.prompt.strip() if isinstance(task.prompt, str) else task.prompt):
            how = "and a run leaves such tasks out: give it a text, also if reset replaces it"
            raise OperantError(f"{world}: task {task.id!r} has the prompt {shown(task.prompt)}, {how}")
        require(ids[task.id] == 1, f"{world}: the id {task.id!r} occurs twice; give every task one of its own")


def _play(
    env: Env, tasks: Sequence[Task], replies: Sequence[str], seed: int, max_turns: int, parts: random.Random
) -> dict[tuple[int, int], Step]:
    """The steps of all tasks, to their ends, by (turn, slot); turn 0: the reset. parts: decides which are stepped."""
    most = with_defaults(env, EnvBase).most or len(tasks)
    played = dict[tuple[int, int], Step]()
    for begin in range(0, len(tasks), most):
        tasks_of = {slot: tasks[slot] for slot in range(begin, min(begin + most, len(tasks)))}
        left = {slot: step for slot, step in answers.reset(env, tasks_of).items() if not _ends(step)}
        if left:  # one turn, and then all begin again, as the slots of episodes that have outgrown the context do
            answers.step(env, {slot: (left[slot].options or replies)[0] for slot in left}, tasks_of)
        live = answers.reset(env, tasks_of)
        played |= {(0, slot): step for slot, step in live.items()}
        turns = dict.fromkeys(live, 0)
        while live := {slot: last for slot, last in live.items() if not _ends(last)}:
            part = sorted(parts.sample(list(live), parts.randint(1, len(live))))
            replied = {s: random.Random(f"{seed}/{s}/{turns[s]}").choice(live[s].options or replies) for s in part}
            for slot, step in answers.step(env, replied, tasks_of).items():
                turns[slot] += 1
                live[slot] = played[turns[slot], slot] = step
                world, its = f"world {name_of(env)!r}", f"slot {slot} (task {tasks[slot].id!r})"
                empty = f"{world}: step answered {its} with an empty prompt; fresh=True needs a text to reply to"
                require(not step.fresh or step.text or step.at is not None or _ends(step), empty)
                how = "or truncated=True at a limit of its own, or give check_env a larger max_turns"
                late = f"has not ended {its} after {max_turns} turns: let its step return terminated=True, {how}"
                require(turns[slot] < max_turns or _ends(step), f"{world} {late}")
    return played


def _ends(step: Step) -> bool:
    return step.terminated or step.truncated or step.failed is not None
