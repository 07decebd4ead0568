"""Worlds of text games: what a game says, and the world that plays many of them with memory, rewards and examples."""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self

from operant.bounds import bounded, check_bounds
from operant.envs.memory import GameMemory, Prompt, template
from operant.types import OperantError, Step, Task, require

Split = Literal["train", "test"]
"""Games to train on, and games that are only played to measure."""
LONGEST = 200
"""Most characters of a command. Longer ones are cut: no game understands them."""


@dataclass(frozen=True)
class GameState:
    """What a game says after its beginning, or after a command."""

    text: str
    """Its answer."""
    description: str = ""
    """The place, as the game describes it."""
    inventory: str = ""
    """What the player carries; empty: nothing, or unknown."""
    objective: str = ""
    """What the player is asked to do."""
    commands: tuple[str, ...] = ()
    """The commands that are admissible now; empty: unknown."""
    score: float = 0.0
    """The score so far."""
    most: float = 1.0
    """The largest score."""
    won: bool = False
    """Whether the game has ended in a win."""
    lost: bool = False
    """Whether it has ended otherwise."""
    valid: bool = True
    """Whether the game has understood and carried out the last command, by its own answer."""
    place: str = ""
    """The name of the room that the player is in."""
    key: str = ""
    """Equal keys stand for the same state of the same game; empty: unknown."""


class Game(Protocol):
    """One game, played by one player. A subclass inherits a game without a solution, a map, or anything to free."""

    optimum: int | None = None
    """Number of commands of a shortest solution from the beginning; None: unknown."""

    def reset(self) -> GameState:
        """Begin, or begin again."""
        ...

    def step(self, command: str) -> GameState:
        """Carry out a command."""
        ...

    def expert(self) -> str | None:
        """The next command of a solution from here; None: no solution is known."""

    def close(self) -> None:
        """Free what the game holds."""

    def map(self) -> dict[str, object] | None:
        """`{"rooms": {name: [x, y]}, "ways": [[name, name, "open" | "closed" | "locked"], ...]}`; None: no map."""


@dataclass
class Playing:
    """One game in progress."""

    task: Task
    """What names the game."""
    game: Game
    """The game itself."""
    memory: GameMemory
    """What the player has seen of it."""
    state: GameState
    """What it said last."""
    record: dict[str, Any]
    """What the rollout tells of it."""
    prompt: Prompt = field(default=Prompt("", 0, 0))
    """What the policy reads now, with the replies and all that was appended to it."""
    tokens: int = 0
    """Tokens of that prompt, if the whole history is shown."""


@dataclass(kw_only=True)
class TextGames:
    """An `Env` of text games. A subclass says which games there are (`games`) and how one is made (`make`).

    Rewards are added: `score` times the gain in score divided by the largest score, `win` or `lose` at the end,
    `living` for every turn, `invalid` for every command that the game refuses by its own answer.
    Raises: OperantError for an impossible value of an option.
    """

    memory: int | None = bounded(3, at_least=0)
    """Earlier turns in a prompt. None: the whole history, to which each turn is appended; if it no longer fits, a new
    prompt begins, with the last half of what fits."""
    template: Any = "plain"
    """How a state is written: plain, state_info_you, what_do_you_do, fork, thought, a .yaml file, or a mapping."""
    tokens: int | None = bounded(None, at_least=1)
    """Most tokens of a prompt; the oldest turns are forgotten. None: as many as the model's context holds."""
    remember_thoughts: bool = True
    """Whether a thought stays in the memory, with a template that has thoughts."""
    thought_tokens: int | None = bounded(None, at_least=1)
    """Most tokens of a thought; a longer one is followed by no command. None: only the reply's length is limited."""
    choose: bool = False
    """Whether the policy chooses among the admissible commands. False: it writes the command."""
    show_commands: bool = False
    """Whether the prompt lists the admissible commands."""
    examples: float = bounded(0.0, at_least=0, below=1, rule="a probability in [0, 1)")
    """The probability that the world plays a turn after a reply; such a turn is seen and not trained on."""
    example_player: str = bounded("random", choices=("random", "expert"))
    """random: any admissible command. expert: the next command of a solution."""
    max_turns: int = bounded(50, at_least=1)
    """Turns after which an episode is cut off."""
    score: float = 1.0
    """Reward of the whole score, in the parts in which it is gained."""
    win: float = 0.0
    """Reward of a win."""
    lose: float = 0.0
    """Reward of a loss, usually negative."""
    living: float = 0.0
    """Reward of every turn, usually negative."""
    invalid: float = 0.0
    """Reward of every command that the game refuses, usually negative."""
    train_games: int = bounded(200, at_least=1)
    """Games of the training split."""
    test_games: int = bounded(64, at_least=0)
    """Games of the test split."""

    def __post_init__(self) -> None:
        self._template = template(self.template)
        check_bounds(self, "env")
        if self.thought_tokens is not None and not self._template.thought:
            raise OperantError(f"env.thought_tokens={self.thought_tokens}: the template has no thoughts; leave it out")
        if not self.remember_thoughts and self.memory is None:
            raise OperantError("env.remember_thoughts=false with the whole history, which keeps them: set env.memory")
        if self.choose and self._template.thought:
            raise OperantError("env.choose with a template that has a thought: a choice has none; leave one out")
        self._live: dict[int, Playing] = {}
        self._count: Callable[[str], int] | None = None
        self._room = self.tokens
        self._evaluating: Self | None = None

    # --- what a subclass adds -----------------------------------------------------------------------------------------

    def make(self, task: Task) -> Game:
        """The game of a task."""
        raise NotImplementedError

    def games(self, split: Split) -> list[Task]:
        """The world's own tasks, for a run that names none; those of the test split are never trained on."""
        raise NotImplementedError

    def read(self, reply: str) -> tuple[str, str]:
        """Thought and command of a reply: the text before and after the template's mark, each one line.

        Without a mark, there is no thought. A command ends at a line break or before one of . , ; : ? ! and a quotation
        mark.
        """
        thought, _, said = reply.partition(mark) if (mark := self._template.thought) else ("", "", reply)
        command = next((line.strip() for line in said.splitlines() if line.strip()), "")
        command = re.split(r"[.,;:?!\"]", command, maxsplit=1)[0]
        return " ".join(thought.split())[:2000], " ".join(command.split())[:LONGEST].rstrip()

    # --- the world ----------------------------------------------------------------------------------------------------

    def measure(self, count: Callable[[str], int], room: int | None) -> None:
        """Called by the learner. count: tokens of a text. room: most tokens of a prompt, before a reply; None: any."""
        self._count = count
        self._room = min((n for n in (self.tokens, room) if n is not None), default=None)

    def for_evaluation(self) -> Self:
        """The world in which a policy is measured: it plays every turn itself."""
        if not self.examples:
            return self
        self._evaluating = self._evaluating or replace(self, examples=0.0)
        self._evaluating._count, self._evaluating._room = self._count, self._room
        return self._evaluating

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step]:
        """Begin a game in each slot. Raises: OperantError if a limit is in tokens and nothing counts them."""
        limit = "tokens" if self.tokens is not None else "thought_tokens" if self.thought_tokens is not None else None
        if limit and self._count is None:
            how = "leave it out, use env.memory, or call measure(count, room) of the world"
            raise OperantError(f"env.{limit}={getattr(self, limit)}: nothing counts tokens here; {how}")
        return {slot: self._begin(slot, task) for slot, task in tasks.items()}

    def step(self, replies: Mapping[int, str]) -> dict[int, Step]:
        """Carry out the command in each reply, and the examples after it. Raises: OperantError if a game names none."""
        return {slot: self._answer(self._live[slot], reply) for slot, reply in replies.items()}

    def on_leave(self, slots: Sequence[int]) -> None:
        """Free the games in these slots."""
        for episode in [self._live.pop(slot) for slot in slots if slot in self._live]:
            episode.game.close()

    def close(self) -> None:
        """Free the games that are still open."""
        self.on_leave(list(self._live))
        if self._evaluating is not None:
            self._evaluating.close()

    def playing(self, slot: int) -> tuple[Game, GameState]:
        """The game in a slot and its state, for a player that is no language model."""
        return self._live[slot].game, self._live[slot].state

    def written(self, command: str) -> str:
        """The reply that gives a command: what a policy writes after the prompt, as a demonstration has it."""
        mark = self._template.thought
        spaced = self.choose or self._template.ask.endswith(" ")
        return " " * spaced + (f"{mark} {command}" if mark else command)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _begin(self, slot: int, task: Task) -> Step:
        self.on_leave([slot])
        game = self.make(task)
        state = game.reset()
        # A whole history is written anew only when it no longer fits, and then leaves half of the room to new turns.
        room = self._room // 2 if self._room is not None and self.memory is None else self._room
        memory = GameMemory(self._template, self.memory, count=self._count, room=room, thoughts=self.remember_thoughts)
        memory.objective = state.objective
        record: dict[str, Any] = {"name": task.id, "objective": state.objective, "optimum": game.optimum, "won": False}
        record |= {"lost": False, "score": state.score, "most": state.most, "turns": [], "map": game.map()}
        self._live[slot] = episode = Playing(task, game, memory, state, record)
        first = self._ask(episode, {})
        if self.tokens is not None and self._count is not None and (size := self._count(first.text)) > self.tokens:
            first_has = f"the first prompt of game {task.id!r} alone has {size}"
            raise OperantError(f"env.tokens={self.tokens}: {first_has}; allow more")
        return first

    def _answer(self, episode: Playing, reply: str) -> Step:
        thought, command = ("", reply.strip()) if self.choose else self.read(reply)
        if self.thought_tokens is not None and self._count is not None and self._count(thought) > self.thought_tokens:
            command = ""
        reward = self._play(episode, command, thought, "policy")
        examples: list[tuple[str, float]] = []
        while not self._over(episode) and self.examples and (shown_command := self._example(episode)):
            examples.append((shown_command, self._play(episode, shown_command, "", self.example_player)))
        return self._ask(episode, {"reward": reward, "examples": examples}, reply)

    def _play(self, episode: Playing, command: str, thought: str, player: str) -> float:
        """Carry out a command, remember and record it; returns its reward."""
        before = episode.state
        nothing = replace(before, text="You do nothing.", valid=False)  # no game is asked to carry out an empty command
        episode.state = after = episode.game.step(command) if command else nothing
        reward = self.score * (after.score - before.score) / (before.most or 1.0) + self.living
        reward += self.win * after.won + self.lose * after.lost + self.invalid * (not after.valid)
        episode.memory.add(observed(before), command, thought)
        turn = {"place": before.place, "state": observed(before), "thought": thought, "command": command}
        turn |= {"by": player, "valid": after.valid, "copied": bool(command) and command in episode.prompt.text}
        turn |= {"reward": reward, "key": before.key}
        if player == "policy":
            turn |= {"fit": episode.prompt.turns, "forgotten": episode.prompt.forgotten}
        episode.record["turns"].append(turn)
        episode.record |= {"won": after.won, "lost": after.lost, "score": after.score}
        episode.record["final"] = {"place": after.place, "state": observed(after)}
        return reward

    def _example(self, episode: Playing) -> str | None:
        """The command that the world plays now; None: the policy is asked. It depends on the commands so far alone."""
        turns = episode.record["turns"]
        chance = random.Random("\n".join([episode.task.id, *(turn["command"] for turn in turns)]))
        if chance.random() >= self.examples:
            return None
        known = episode.game.expert() if self.example_player == "expert" else None
        return known or (chance.choice(episode.state.commands) if episode.state.commands else None)

    def _over(self, episode: Playing) -> bool:
        state = episode.state
        return state.won or state.lost or len(episode.record["turns"]) >= self.max_turns

    def _ask(self, episode: Playing, known: dict[str, object], reply: str | None = None) -> Step:
        """The step that shows the current state, or ends the episode. reply: the policy's last one, if there is one."""
        state, memory = episode.state, episode.memory
        known |= {"info": {"game": episode.record}, "key": state.key}
        if state.won or state.lost:
            return Step(terminated=True, **known)
        known["truncated"] = cut = self._over(episode)
        if self.choose and not cut:
            require(state.commands, f"game {episode.task.id!r} names no admissible commands: leave env.choose out")
            known["options"] = [f" {command}" for command in state.commands]
        shown = observed(state)
        inventory = "" if state.inventory in shown else state.inventory  # it may be what was asked for
        offered = state.commands if self.show_commands else ()
        some = " or ".join(offered) if len(offered) < 3 else f"{', '.join(offered[:-1])}, or {offered[-1]}"
        now = (shown, inventory, some)
        count = self._count or len
        if self.memory is None and reply is not None:
            examples = memory.past[len(memory.past) - len(known["examples"]) :]
            more = "".join(["\n\n", *examples, memory.now(*now).rstrip(" ")])
            tokens = episode.tokens + count(reply + more) + 8  # the end of a reply is not in its text
            if self._room is None or tokens <= self._room:
                before = episode.prompt
                whole = Prompt(before.text + reply + more, before.turns + 1 + len(examples), before.forgotten)
                episode.prompt, episode.tokens = whole, tokens
                return Step(more, **known)
        episode.prompt = memory.prompt(*now)
        episode.tokens = count(episode.prompt.text) if self.memory is None else 0
        return Step(episode.prompt.text, fresh=True, **known)


def observed(state: GameState) -> str:
    """What a state shows: the answer, and the description of the place if it is not part of the answer."""
    return state.text if state.description in state.text else f"{state.text}\n{state.description}".strip()
