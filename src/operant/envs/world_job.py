"""The handler of a worker that plays a world, for `isolated.py`."""

from collections.abc import Callable
from typing import Any

from operant.envs import for_evaluation
from operant.envs.functions import maker
from operant.import_by_name import find_function
from operant.rollouts.answers import checked
from operant.sandbox.serialise import state_from_plain, state_to_plain, step_to_plain, task_from_plain, task_to_plain
from operant.types import EnvBase, OperantError, Task, describe_error, with_defaults


def count_with(plain: str) -> Callable[[str], int]:
    """What counts tokens as the `TokenCount` whose `plain` this is, without transformers."""
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_str(plain)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


class WorldHandler:
    """Answers requests about the world that `argument["spec"]` names, which is made with `argument["options"]`.

    With `argument["anew"]` each `reset` makes the world anew, and an exception is the answer to the whole request.
    Otherwise it is made once. Each slot is then stepped by a call of its own, so that an exception costs that episode
    alone: its answer is {"raised": reason}, and {"lost": True} for an unknown slot. `argument["counting"]` is what the
    world's `measure` needs, or None. With `argument["evaluating"]`, its `for_evaluation` returns the world to play in.
    """

    def __init__(self, argument: dict[str, Any]):
        place, _, self.name = argument["spec"].rpartition(":")
        self.make, self.options = maker(find_function("world", place, self.name)), argument["options"]
        self.anew, self.version = argument["anew"], 0
        counting, self.evaluating = argument["counting"], argument["evaluating"]
        self.measured = counting and (count_with(counting["tokenizer"]), counting["room"])
        self.env: Any = None
        self.tasks: dict[int, Task] = {}

    def __call__(self, request: dict[str, Any]) -> object:
        return getattr(self, request.pop("call"))(**request)

    def about(self) -> dict[str, object]:
        """What the run has to know about the world."""
        env = with_defaults(self.made(), EnvBase)
        known: dict[str, object] = {n: callable(getattr(env, n)) for n in "games state_dict measure on_leave".split()}
        known |= {"for_evaluation": for_evaluation(self.env) is not self.env, "reads": env.branches}
        return known | {"pays": bool(env.pays), "most": env.most}

    def games(self, split: str) -> list[dict[str, object]]:
        return [task_to_plain(task) for task in self.made().games(split)]

    def state(self, version: int, state: object) -> object:
        """The world's state, after that of the request is loaded as `reset` does."""
        self.restore(version, state)
        return state_to_plain(self.env.state_dict())

    def reset(self, given: list[tuple[int, dict[str, object]]], version: int, state: object) -> list[dict[str, object]]:
        """Begin an episode in each slot of `given`, [slot, task] each.

        version: number of the state that the run has loaded; a world that does not have it, such as one of a restarted
        worker, loads `state` first.
        """
        if self.anew:
            self.env = None  # the last episode's world goes before the next one is made
        self.restore(version, state)
        tasks = {slot: task_from_plain(task) for slot, task in given}
        self.tasks = tasks if self.anew else self.tasks | tasks
        return self.told("reset", self.env.reset(tasks), [*tasks])

    def step(self, given: list[tuple[int, str]]) -> list[dict[str, object]]:
        """Answer the reply in each slot of `given`, [slot, reply] each."""
        return [self.answer(*pair) if pair[0] in self.tasks else {"lost": True} for pair in given]

    def leave(self, given: list[tuple[int, None]]) -> list[dict[str, object]]:
        """Tell the world that the episodes in these slots go no further. The answers say what it raised."""
        known, info = [slot for slot, _ in given if slot in self.tasks], {}
        try:
            _ = known and self.env.on_leave(known)
        except (Exception, SystemExit) as error:
            info = {"raised": describe_error(error)}
        return [{"info": info} for _ in given]

    def told(self, call: str, steps: object, slots: list[int]) -> list[dict[str, object]]:
        """The world's answer as plain data; of one that is not allowed, what is wrong with it."""
        try:
            return [step_to_plain(step) for step in checked(f"{self.name}.{call}", steps, {}, slots).values()]
        except OperantError as error:
            return [{"raised": f"failed: {error}"} for _ in slots]

    def made(self) -> Any:
        """The world; one that is there already is used unless each episode has its own."""
        if self.env is None:
            self.env = self.make(**self.options)
            if self.measured:
                self.env.measure(*self.measured)
            if self.evaluating:
                self.env = for_evaluation(self.env)
        return self.env

    def restore(self, version: int, state: object) -> None:
        """Make the world, and load its state unless it has it."""
        fresh, env = self.env is None, self.made()
        if state is not None and (fresh or version != self.version):
            env.load_state_dict(state_from_plain(state))
        self.version = version

    def answer(self, slot: int, reply: str) -> dict[str, object]:
        """The world's step for one slot as plain data."""
        try:
            return self.told("step", self.env.step({slot: reply}), [slot])[0]
        except (Exception, SystemExit) as error:
            del self.tasks[slot]
            if self.anew or isinstance(error, MemoryError):  # a new process has its memory again
                raise
            return {"raised": f"raised {describe_error(error)}"}
