"""What a policy sees of a game: a template for its prompts, and a memory of earlier turns within a budget of tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from operant.import_by_name import nearest
from operant.options import read_mapping
from operant.types import OperantError, require, shown


@dataclass(frozen=True)
class Template:
    """How a game is written as a prompt: objective, remembered turns, the current state, and the question.

    `{objective}`, `{state}`, `{inventory}`, `{commands}`, `{thought}` and `{command}` are filled in. A part is left out
    if what it shows is empty, and the objective also if the state contains it.
    """

    objective: str = "{objective}\n"
    state: str = "{state}"
    """The state, now and in remembered turns."""
    inventory: str = "\n{inventory}"
    """Follows the current state."""
    commands: str = "\nYou can {commands}."
    """Follows the inventory, if the commands are shown."""
    ask: str = "\n> "
    """Ends the prompt; the reply is written after it. Nothing is filled in."""
    turn: str = "{command}\n\n"
    """Ends a remembered turn; it stands after `ask`."""
    thought: str = ""
    """Ends the thought in a reply: the command stands after it. Empty: the reply is the command."""


TEMPLATES = {
    "plain": Template(),
    # What the game shows, what is known beside it, and the beginning of a sentence.
    "state_info_you": Template(inventory="\n[{inventory}]", commands="\n[You can {commands}.]", ask="\nYou "),
    "what_do_you_do": Template(commands="\nYou could {commands}.", ask="\nWhat do you do?\n", turn="{command}.\n\n"),
    # The fork of TRL that played TextWorld.
    "fork": Template(
        objective="{objective} ",
        state="{state} ",
        inventory="{inventory} ",
        commands="Your possible actions are to {commands}. ",
        ask="You choose the action to ",
        turn="{command}. ",
    ),
    "thought": Template(ask="\nThought: ", turn="{thought} Action: {command}\n\n", thought="Action:"),
}
"""Templates by name."""


def template(given: str | Mapping[str, object]) -> Template:
    """The template of a name, of a YAML file, or of a mapping of its parts."""
    if isinstance(given, str) and given.endswith((".yaml", ".yml")):
        given = read_mapping(Path(given))
    if isinstance(given, str):
        if given not in TEMPLATES:
            hint = f"{nearest(given, [*TEMPLATES]) or '.'} Templates: {', '.join(TEMPLATES)}, or a .yaml file"
            raise OperantError(f"env.template={shown(given)} is unknown{hint}")
        return TEMPLATES[given]
    if not isinstance(given, Mapping):
        raise OperantError(f"env.template={shown(given)}: it must be a name, a .yaml file, or a mapping of parts")
    parts = {f.name for f in fields(Template)}
    for name, text in given.items():
        require(name in parts, f"env.template: part {shown(name)} is unknown; the parts are {', '.join(sorted(parts))}")
        if not isinstance(text, str):
            raise OperantError(f"env.template.{name}={shown(text)}: it must be a text (write it in quotes)")
        try:
            text.format(objective="", state="", inventory="", commands="", thought="", command="")
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            named = "{objective}, {state}, {inventory}, {commands}, {thought} and {command}"
            how = f"it may hold {named}; write {{{{ and }}}} for braces"
            raise OperantError(f"env.template.{name}={shown(text)} cannot be filled in ({error!r}): {how}") from error
    return Template(**given)


class Prompt(NamedTuple):
    """A prompt, and what of the history is in it."""

    text: str
    turns: int
    """Number of earlier turns in it."""
    forgotten: int
    """Tokens of the earlier turns that are not in it."""


class GameMemory:
    """The history of one episode as the policy sees it.

    template: how it is written. turns: earlier turns in a prompt; None: all. room: the most tokens of a prompt, as
    `count` counts them; the oldest turns are forgotten until it fits. None: no limit. thoughts: whether thoughts are
    remembered.
    """

    def __init__(
        self,
        template: Template,
        turns: int | None = None,
        *,
        count: Callable[[str], int] | None = None,
        room: int | None = None,
        thoughts: bool = True,
    ):
        self.template, self.turns, self.count, self.room, self.thoughts = template, turns, count, room, thoughts
        self.objective = ""
        self.past: list[str] = []
        """The turns so far as text, oldest first."""
        self._sizes: list[int] = []

    def add(self, state: str, command: str, thought: str = "") -> None:
        t = self.template
        ended = t.turn.format(command=command, thought=thought if self.thoughts else "")
        self.past.append(t.state.format(state=state) + t.ask + ended)
        self._sizes.append(0 if self.count is None else self.count(self.past[-1]))

    def now(self, state: str, inventory: str = "", commands: str = "") -> str:
        """The current state with the question, without history."""
        t = self.template
        parts = [t.state.format(state=state)]
        parts += [t.inventory.format(inventory=inventory)] * bool(inventory)
        parts += [t.commands.format(commands=commands)] * bool(commands)
        return "".join([*parts, t.ask])

    def prompt(self, state: str, inventory: str = "", commands: str = "") -> Prompt:
        """The prompt of a state: objective, as many of the last turns as may be remembered and fit, and the question.

        One that does not fit without any history either is returned as it is: the run refuses such a first prompt, and
        ends such an episode as outgrown.
        """
        now, head = self.now(state, inventory, commands), self.template.objective.format(objective=self.objective)
        most = len(self.past) if self.turns is None else min(self.turns, len(self.past))
        kept = most
        if self.count is not None and self.room is not None:
            left, kept = self.room - self.count(head + now), 0
            while kept < most and (left := left - self._sizes[-1 - kept]) >= 0:
                kept += 1
        text = "".join(self.past[len(self.past) - kept :]) + now
        known = not self.objective or self.objective in text
        text = (text if known else head + text).rstrip(" ")  # a space belongs to the word that follows
        return Prompt(text, kept, sum(self._sizes[: len(self.past) - kept]))
