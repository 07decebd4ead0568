"""TextWorld games, made from seeds or given as files, and classic Z-machine games through Jericho.

Both need the extra `textworld` (`pip install "operant[textworld]"`). It brings jericho, which is GPL-2+ and is built
with a C toolchain. No other file imports either package, and this one only inside its functions. Nothing is downloaded.

TextWorld's own environment asks the interpreter for the description of the place after every command, which takes
longer than the command. Here the interpreter is driven directly: descriptions and admissible commands are asked for
only if they are used, and once for each state of a game.
"""

import gzip
import hashlib
import json
import os
import re
import tempfile
import time
import unicodedata
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from operant.bounds import bounded
from operant.envs.games import Game, GameState, Split, TextGames
from operant.storage import atomic_io
from operant.types import OperantError, Task, require, shown

FIRST_TEST_SEED = 500_000_000
"""Seeds of unseen games begin here; those of training games begin at 1."""
META = frozenset(
    "again brief full g long normal notify nouns oops pronouns q quit restart restore save script short superbrief "
    "transcript undo unscript verbose verify version".split()
)
"""First words of commands that are about the program and not about the game: they are refused."""
SCORED = r"scored?(?: is)? (-?\d+)[^.]*?(?:total of|possible) (\d+)"
"""What classic games answer to `score`: "Your score is 0 (total of 350 points)", "You have scored 0 out of a possible
350"."""
KEPT = 2000
"""Most states of games that a process remembers; about 60 kB each."""


def packages() -> tuple[ModuleType, ModuleType]:
    """The modules textworld and jericho."""
    try:
        import jericho
        import textworld
        import textworld.challenges
    except ImportError as error:
        raise OperantError(
            f'TextWorld and Jericho games need `pip install "operant[textworld]"` ({error}); jericho has no wheel, so '
            "pip builds it: install a C compiler and make first (Debian and Ubuntu: `apt-get install build-essential`)"
        ) from error
    warnings.simplefilter("ignore", jericho.UnsupportedGameWarning)
    return textworld, jericho


# --- one game ---------------------------------------------------------------------------------------------------------


@dataclass
class _Known:
    """What was asked about one state of a game, for all its episodes."""

    actions: list[Any]
    """TextWorld's actions that are applicable."""
    commands: tuple[str, ...]
    key: str
    texts: dict[bytes, tuple[str, str]]
    """Description and inventory by the order of the objects, in which the interpreter lists them."""
    events: dict[str, Any]
    """The action that changes the state, or None, by the interpreter's report of it."""


_SEEN: OrderedDict[tuple[str, frozenset], _Known] = OrderedDict()
"""The states of all games that were seen last."""


class _Story:
    """A game file, and what the episodes of one process share of it."""

    def __init__(self, path: Path):
        textworld, _ = packages()
        from textworld.generator.game import GameProgression
        from textworld.generator.inform7 import Inform7Game

        self.path = str(path)
        try:
            self.game = textworld.Game.load(str(path.with_suffix(".json")))
            self.inform = Inform7Game(self.game)
            machine = start(self.path)
            self.opening = machine.reset()[0]
            machine.step("tw-trace-actions")
            if "<score>" not in machine.step("tw-extra-infos score")[0]:
                raise ValueError("it does not answer as a game of TextWorld does")
            self.start = machine.get_state()
            stop(machine)
        except OperantError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OSError, UnicodeDecodeError) as error:
            raise OperantError(
                f"{self.path} is not a game of TextWorld: {shown(str(error))}; give .z8 files that TextWorld has made, "
                "each with its .json of the same name, or play classic games with env=jericho"
            ) from error
        self.walkthrough: list[str] = self.game.metadata.get("walkthrough") or []
        solution = GameProgression(self.game).winning_policy
        known = [len(way) for way in (self.walkthrough, solution) if way]
        self.optimum = min(known, default=None)
        self.objective = clean(self.game.objective)

    def known(self, facts: Any) -> _Known:
        """What is known about a state, a `textworld.logic.State`."""
        place = self.path, frozenset(facts.facts)
        if (found := _SEEN.pop(place, None)) is None:
            rules, constants = self.game.kb.rules.values(), self.game.kb.types.constants_mapping
            actions = list(facts.all_applicable_actions(rules, constants))
            commands = tuple(sorted(set(self.inform.gen_commands_from_actions(actions))))
            key = hashlib.blake2b("\n".join(sorted(map(str, place[1]))).encode(), digest_size=8).hexdigest()
            found = _Known(actions, commands, key, {}, {})
        _SEEN[place] = found
        if len(_SEEN) > KEPT:
            _SEEN.popitem(last=False)
        return found

    def room(self, facts: Any) -> str:
        rooms = (f.arguments[1] for f in facts.facts if f.name == "at" and f.arguments[0].type == "P")
        return next(map(self.named, rooms), "")

    def named(self, entity: Any) -> str:
        return str(self.game.infos[entity.name].name or entity.name)


@lru_cache(maxsize=512)
def _story(path: str, changed: int) -> _Story:
    return _Story(Path(path))


_IDLE: OrderedDict[int, Any] = OrderedDict()
"""Interpreters that no episode uses, oldest first: starting one takes 9 ms and 2 MB."""


def start(path: str) -> Any:
    """A running interpreter of a game file: an idle one of the same file, or a new one.

    Raises: OperantError for a file that is no Z-machine game.
    """
    _, jericho = packages()
    for name, machine in _IDLE.items():
        if machine.story_file.decode() == path:
            return _IDLE.pop(name)
    whole_game(Path(path))
    machine = jericho.FrotzEnv(path)
    machine.seed(machine.bindings.get("seed") or 1)  # that of Jericho's walkthrough
    return machine


def whole_game(path: Path) -> None:
    """Raises: OperantError for a file that is no Z-machine game, or a part of one."""
    head = path.read_bytes()
    size = len(head)
    good = size >= 64 and 1 <= head[0] <= 8 and 64 <= int.from_bytes(head[14:16], "big") <= size
    require(good, f"{path} is no Z-machine game: such a file (.z3, .z5, .z8) begins with its version, a byte of 1 to 8")
    whole = int.from_bytes(head[26:28], "big") * (2 if head[0] <= 3 else 4 if head[0] <= 5 else 8)
    require(whole <= size, f"{path} is damaged: it has {size:,} bytes, and says that it has {whole:,}; copy it again")


def stop(machine: object) -> None:
    _IDLE[id(machine)] = machine
    if len(_IDLE) > 64:
        _IDLE.popitem(last=False)


def harmless(command: str) -> bool:
    """Whether it is one command of printable ASCII. After a backslash, the interpreter reads commands of its own, and
    waits for more after some; a NUL crashes it; Jericho cuts other characters into halves."""
    plain = command.isascii() and command.isprintable() and command.strip()
    return bool(plain) and not re.search(r"[.;\\]|\bthen\b", command)


ALL = frozenset({"description", "inventory", "commands"})


class _MachineGame(Game):
    """What both kinds of games share: an interpreter, and a walkthrough that is followed as far as it was played."""

    def __init__(self, path: str, wanted: frozenset[str]):
        self._machine, self._wanted = start(path), wanted
        self._walkthrough: Sequence[str] = ()
        self._following: int | None = 0
        """Commands of the walkthrough that were given; None: it was left."""
        self._state = GameState("")

    def _refused(self) -> GameState:
        return replace(self._state, text="That is no single command of the game.", valid=False)

    def expert(self) -> str | None:
        """The next command of the walkthrough, if nothing else was done."""
        left = self._walkthrough[self._following :] if self._following is not None else ()
        return left[0] if left else None

    def close(self) -> None:
        if self._machine is not None:
            stop(self._machine)
        self._machine = None


class TextWorldGame(_MachineGame):
    """One game of TextWorld, played in Frotz.

    path: the .z8 file; its .json lies beside it. wanted: what is asked of the game after each command, of
    "description", "inventory" and "commands".
    A command is valid if the game reports that one of its actions has succeeded. A command that is about the program
    (restart, undo, ...) or that contains several commands is refused.
    """

    def __init__(self, path: str | Path, wanted: frozenset[str] = ALL):
        self._story = _story(str(path), os.stat(path).st_mtime_ns)
        super().__init__(str(path), wanted)
        self._walkthrough, self.optimum = self._story.walkthrough, self._story.optimum

    def reset(self) -> GameState:
        self._machine.set_state(self._story.start)
        self._facts, self._score = self._story.game.world.state.copy(), 0.0
        self._known, self._played = self._story.known(self._facts), []
        self._progress: Any = None
        self._following = 0
        return self._read(self._story.opening[self._story.opening.find("-= ") :], valid=True)

    def step(self, command: str) -> GameState:
        words = command.lower().split()
        if not harmless(command) or words[0] in META or words[0].startswith("tw-") or "," in command or ":" in command:
            return self._refused()
        answer = self._machine.step(command[:150])[0]
        # Inform names an action that is a part of another with a number, as in "(1) taking the key".
        events, before = re.findall(r"^\[([^\[\]()]+) - succeeded\]$", answer, re.MULTILINE), len(self._played)
        for event in events:
            if event not in self._known.events:
                action = self._story.inform.detect_action(event, self._known.actions)
                changes = action is not None and (action.added or action.removed)
                self._known.events[event] = action if changes else None
            if (action := self._known.events[event]) is not None:
                self._facts.apply(action)
                self._played.append(action)
                self._known = self._story.known(self._facts)
        if command == super().expert():
            self._following += 1
        elif len(self._played) > before:
            self._following = None
        return self._read(answer, valid=bool(events))

    def expert(self) -> str | None:
        from textworld.generator.game import GameProgression

        if self._progress is None:
            self._progress, self._followed = GameProgression(self._story.game), 0
        for action in self._played[self._followed :]:
            self._progress.update(action)
        self._followed = len(self._played)
        policy = self._progress.winning_policy
        return self._story.inform.gen_commands_from_actions(policy[:1])[0] if policy else super().expert()

    def map(self) -> dict[str, object] | None:
        """The rooms, each one step from its neighbour, and the ways between them with their doors at the beginning."""
        facts = self._story.game.world.facts
        steps = {"north_of": (0, -1), "south_of": (0, 1), "east_of": (1, 0), "west_of": (-1, 0)}
        ways = [(*f.arguments, steps[f.name]) for f in facts if f.name in steps]  # a lies in this direction of b
        first = next(f.arguments[1] for f in facts if f.name == "at" and f.arguments[0].type == "P")
        rooms, queue = {first: (0, 0)}, [first]
        for here in queue:
            for there, source, (x, y) in ways:
                if source == here and there not in rooms:
                    rooms[there] = (rooms[here][0] + x, rooms[here][1] + y)
                    queue.append(there)
        state = {f.arguments[0]: f.name for f in facts if f.name in ("open", "closed", "locked")}
        doors = {frozenset(f.arguments[::2]): state.get(f.arguments[1], "open") for f in facts if f.name == "link"}
        pairs = {frozenset((a, b)) for a, b, _ in ways if a in rooms and b in rooms}
        name = self._story.named
        return {
            "rooms": {name(room): list(at) for room, at in rooms.items()},
            "ways": sorted([*sorted(map(name, pair)), doors.get(pair, "open")] for pair in pairs),
        }

    def _read(self, answer: str, *, valid: bool) -> GameState:
        if score := re.search(r"<score>\s*(-?\d+)", answer):
            self._score = float(score[1])
        description, inventory = self._texts()
        self._state = GameState(
            text=clean(answer),
            description=description,
            inventory=inventory,
            objective=self._story.objective,
            commands=self._known.commands if "commands" in self._wanted else (),
            score=self._score,
            most=float(self._story.game.max_score),
            won="*** The End ***" in answer,
            lost="*** You lost! ***" in answer,
            valid=valid,
            place=self._story.room(self._facts),
            key=f"{self._known.key}/{self._score:g}",
        )
        return self._state

    def _texts(self) -> tuple[str, str]:
        """Description and inventory, asked with commands that are taken back."""
        if not self._wanted & {"description", "inventory"}:
            return "", ""
        before = self._machine.get_state()
        order = objects(before[0].tobytes())
        if order not in self._known.texts:
            description = clean(self._machine.step("look")[0]) if "description" in self._wanted else ""
            inventory = clean(self._machine.step("inventory")[0]) if "inventory" in self._wanted else ""
            self._machine.set_state(before)
            self._known.texts[order] = description, inventory
        return self._known.texts[order]


def clean(text: str) -> str:
    """A text of a game in plain characters, without drawings, decoration, prompt, status line and trace of actions."""
    text = unicodedata.normalize("NFKD", text.translate(_QUOTES)).encode("ascii", "ignore").decode()
    text = re.sub(r"<(score|moves)>.*?</\1>", "", text, flags=re.DOTALL)
    text = re.split(r"\n>|Would you like to RESTART", text)[0]
    text = re.sub(r"^\[[^\]]*\]$", "", text, flags=re.MULTILINE)
    text = re.sub(r"-= [^\n]*? =-", "", text)
    text = re.sub(r"^[^\n]* {2,}(Score|Moves|Turns)\b[^\n]*$", "", text, flags=re.MULTILINE)
    lines = [line.strip() for line in text.splitlines()]
    return "\n".join(line for line in lines if re.search(r"[A-Za-z0-9]", line) and not re.search(r"[$\\|_]{2}", line))


_QUOTES = str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014", "''\"\"--")


# --- classic games ----------------------------------------------------------------------------------------------------


class JerichoGame(_MachineGame):
    """A classic Z-machine game of the user's own file, through Jericho.

    Jericho knows the score, the end, the place, the admissible commands and a walkthrough of the games that it
    supports. Of others it knows the texts: such a game is won or lost where it says so between three asterisks, and its
    score is what it answers to `score`.
    Admissible commands are found by trying: that takes seconds. A command is valid unless the answer is one of the
    refusals that Jericho knows. Its walkthrough collects everything, so no shortest solution is known.
    """

    def __init__(self, path: str | Path, wanted: frozenset[str] = ALL):
        super().__init__(str(path), wanted)
        self._supported = bool(self._machine.is_fully_supported and self._machine.bindings)
        if not self._supported and "commands" in wanted:
            warnings.warn(
                f"Jericho does not know the game {path}, so no commands can be listed or chosen among: give another "
                "release of the game that it supports, or leave out env.choose, env.show_commands and env.examples",
                stacklevel=2,
            )
        if self._supported:
            self._walkthrough = self._machine.get_walkthrough()

    def reset(self) -> GameState:
        self._following = 0
        self._told = 0.0, 1.0  # the score and the largest one, as a game says them that Jericho does not know
        text, known = self._machine.reset()
        return self._read(text, known["score"], valid=True)

    def step(self, command: str) -> GameState:
        from jericho.util import recognized

        words = command.lower().split()
        if not harmless(command) or (words[0] in META and words != ["g"]):
            return self._refused()
        self._following = self._following + 1 if command == self.expert() else None  # pyright: ignore
        text, _, _, known = self._machine.step(command[:150])
        return self._read(text, known["score"], valid=bool(recognized(text)))

    def _read(self, answer: str, score: float, *, valid: bool) -> GameState:
        machine, before = self._machine, self._machine.get_state()
        texts = {}
        for name, command in {"description": "look", "inventory": "inventory"}.items():
            if name in self._wanted:
                texts[name] = clean(machine.step(command)[0])
                machine.set_state(before)
        if not self._supported:
            told = re.search(SCORED, f"{answer} {machine.step('score')[0]}", re.IGNORECASE)  # or as the game has ended
            self._told = (float(told[1]), float(told[2]) or 1.0) if told else self._told
            machine.set_state(before)
        score, most = (score, float(machine.get_max_score() or 1)) if self._supported else self._told
        end = re.search(r"\*\*\*\s+(.*?)\s+\*\*\*", answer)
        won = bool(machine.victory()) or (not self._supported and bool(end and re.search("won|The End", end[1])))
        lost = not won and (bool(machine.game_over()) or (not self._supported and end is not None))
        place = machine.get_player_location() if self._supported else None
        memory, commands = before[0].tobytes(), ()
        if "commands" in self._wanted and self._supported:
            import spacy
            from jericho import util

            # Jericho would download a model of English to find nouns in texts; without one it looks at objects alone.
            util.spacy_nlp = getattr(util, "spacy_nlp", None) or spacy.blank("en")
            commands = tuple(sorted(set(machine.get_valid_actions(use_parallel=False))))
        self._state = GameState(
            text=clean(answer),
            commands=commands,
            score=float(score),
            most=most,
            won=won,
            lost=lost,
            valid=valid,
            place=place.name if place else "",
            key=hashlib.blake2b(objects(memory), digest_size=8).hexdigest() + f"/{score}",
            **texts,
        )
        return self._state


def objects(memory: bytes) -> bytes:
    """The table of objects in a Z-machine's memory: what each one is in, in which order, and its attributes."""
    defaults, entry, properties = (62, 9, 7) if memory[0] <= 3 else (126, 14, 12)
    table = int.from_bytes(memory[10:12], "big") + defaults
    first = int.from_bytes(memory[table + properties : table + properties + 2], "big")  # properties follow the table
    return memory[table : max(first, table + entry)]


# --- making games -----------------------------------------------------------------------------------------------------


def cache() -> Path:
    """The folder of made and unpacked games: `operant/textworld` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "operant" / "textworld"


def maker(argument: None) -> Callable[[dict[str, Any]], None]:
    """The handler of a worker that makes games.

    A request is {"path", "kind", "seed"}: write the description of a game to the .json file `path`. Without "kind":
    compile it, to the .z8 file beside it. Each file appears whole, so several processes may make the same one.
    """
    textworld, _ = packages()

    def answer(request: dict[str, Any]) -> None:
        path = Path(request["path"])
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".making-") as folder:
            draft = Path(folder) / "game.json"
            options = textworld.GameOptions()
            if "kind" in request:
                options.seeds = request["seed"]
                describe(request["kind"], options).save(str(draft))
                os.replace(draft, path)
            else:
                options.path = str(draft.with_suffix(".z8"))
                made = textworld.generator.compile_game(textworld.Game.load(str(path)), options)
                os.replace(made, path.with_suffix(".z8"))

    return answer


def describe(kind: dict[str, Any], options: Any) -> Any:
    """A `textworld.Game` that is not compiled yet. kind: what `TextWorld.kind` returns; options: with seeds."""
    textworld, _ = packages()
    if kind["game"] != "custom":
        return textworld.challenges.CHALLENGES[kind["game"]][1](kind, options)
    options.nb_rooms, options.nb_objects, options.quest_length = kind["rooms"], kind["objects"], kind["quest"]
    options.chaining.min_depth, options.chaining.min_breadth, options.chaining.max_breadth = 1, 1, kind["breadth"]
    options.nb_parallel_quests = kind["quests"]
    return textworld.generator.make_game(options)


def make_files(requests: list[dict[str, object]], what: str) -> dict[str, str]:
    """Have worker processes answer requests of `maker`. Returns why a file could not be made, by its path."""
    from rich.console import Console
    from rich.progress import track

    from operant.sandbox.pool import Job, Pool
    from operant.sandbox.process import Limits

    if not requests:
        return {}
    packages()  # a missing extra is an error once, and not in each worker
    size = min(os.cpu_count() or 1, len(requests))
    pool = Pool(Job("operant.apps.games.textworld:maker", None), Limits(), size)
    pool.start(120.0)
    failed: dict[str, str] = {}
    try:
        parts = [requests[i : i + 2 * size] for i in range(0, len(requests), 2 * size)]
        console = Console(stderr=True)
        if not console.is_terminal:
            console.print(what, highlight=False, soft_wrap=True)
        for part in track(parts, what, console=console, disable=not console.is_terminal):
            for request, response in zip(part, pool.run(part, until=time.monotonic() + 300)):
                if response.outcome != "ok":
                    failed[str(request["path"])] = response.reason
    finally:
        pool.close()
    return failed


def summary(path: Path) -> tuple[str, str]:
    """The walkthrough of a described game, and a text that two games share if all but their wording is equal."""
    game = json.loads(path.read_text(encoding="utf-8"))
    names = {ident: info["name"] or ident for ident, info in game["infos"]}
    facts = sorted(
        " ".join([f["name"], *(names.get(a["name"], a["name"]) for a in f["arguments"])]) for f in game["world"]
    )
    walkthrough = "\n".join(game["metadata"].get("walkthrough") or [])
    return walkthrough, "\n".join([walkthrough, *facts])


@dataclass(kw_only=True)
class TextWorld(TextGames):
    """Games of TextWorld. Its options are those of `TextGames`, and:"""

    game: Literal["tw-simple", "tw-coin_collector", "tw-treasure_hunter", "tw-cooking", "custom"] = "tw-simple"
    """The challenge that games are made of; custom: as `rooms`, `objects` and `quest` say."""
    rewards: Literal["dense", "balanced", "sparse"] = "dense"
    """Of tw-simple: how often the score rises."""
    goal: Literal["detailed", "brief", "none"] = "detailed"
    """Of tw-simple: how much the objective gives away."""
    level: int | None = None
    """Of tw-coin_collector (1 to 300; None: 5) and tw-treasure_hunter (1 to 30; None: 5)."""
    ingredients: int = bounded(1, at_least=1)
    """Of tw-cooking: ingredients of the recipe, all of which have to be found."""
    skills: tuple[str, ...] = ("open", "cook", "cut")
    """Of tw-cooking: what has to be done, of open, cook, cut, drop."""
    rooms: int | None = bounded(None, at_least=1)
    """Of tw-cooking (1, 6, 9 or 12; None: 1) and custom (None: 5)."""
    objects: int = bounded(10, at_least=1)
    """Of custom: least number of objects."""
    quest: int = bounded(5, at_least=1)
    """Of custom: commands of the quest."""
    quests: int = bounded(1, at_least=1)
    """Of custom: quests side by side."""
    breadth: int = bounded(1, at_least=1)
    """Of custom: parts of a quest that can be done in any order."""
    train_games: int = bounded(100, at_least=1)
    test_games: int = bounded(20, at_least=0)
    files: tuple[str, ...] = ()
    """Games to play in place of made ones: .z8 files with their .json beside them, also as .gz, or folders of such."""
    test_files: tuple[str, ...] = ()
    """The same for evaluation. Empty: there is no evaluation in the games of `files`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.dropped = 0
        own = {"tw-simple": "rewards goal", "tw-coin_collector": "level", "tw-treasure_hunter": "level"}
        own |= {"tw-cooking": "ingredients skills rooms", "custom": "rooms objects quest quests breadth"}
        foreign = {*" ".join(own.values()).split()} - {*own.get(self.game, "").split()}
        for f in fields(self):
            value, usual = getattr(self, f.name), f.name not in foreign or getattr(self, f.name) == f.default
            require(usual, f"env.{f.name}={shown(value)} of {self.game}: it has no {f.name}; leave it out")
        level, most = 1 if self.level is None else self.level, 300 if self.game == "tw-coin_collector" else 30
        require(1 <= level <= most, f"env.level={self.level} of {self.game}: its levels are 1 to {most}")
        large = self.game == "tw-coin_collector" and (level - 1) // 100 * (level % 100 or 100) >= 100
        require(not large, f"env.level={self.level}: TextWorld makes no games of more than 100 rooms; take a lower one")
        if self.game == "tw-cooking" and self.rooms not in (None, 1, 6, 9, 12):
            raise OperantError(f"env.rooms={self.rooms}: tw-cooking has 1, 6, 9 or 12 rooms")
        if unknown := set(self.skills) - {"open", "cook", "cut", "drop"}:
            raise OperantError(f"env.skills={','.join(sorted(unknown))}: skills are open, cook, cut, drop")

    def kind(self, test: bool) -> dict[str, object]:
        """What games are made of, beside the seed, as TextWorld's challenges name it."""
        own: dict[str, dict[str, Any]] = {
            "tw-simple": {"rewards": self.rewards, "goal": self.goal, "test": test},
            "tw-coin_collector": {"level": self.level or 5},
            "tw-treasure_hunter": {"level": self.level or 5},
            "tw-cooking": {
                **{"recipe": self.ingredients, "take": self.ingredients, "go": self.rooms or 1, "recipe_seed": 0},
                **{skill: skill in self.skills for skill in ("open", "cook", "cut", "drop")},
                "split": "test" if test else "train",
            },
            "custom": {
                **{"rooms": self.rooms or 5, "objects": self.objects, "quest": self.quest},
                **{"quests": self.quests, "breadth": self.breadth},
            },
        }
        return {"game": self.game, **own[self.game]}

    def games(self, split: Split) -> list[Task]:
        """Games by seed; what is missing is made now and kept.

        Training games are the first that differ in more than wording. Unseen ones have other seeds and, with tw-simple
        and tw-cooking, other food; none has the walkthrough of a training game. `dropped` counts what was left out.
        """
        if self.files or (self.test_files and split == "test"):
            given = files_of(self, split)
            if bare := next((path for path in given if not path.with_suffix(".json").is_file()), None):
                raise OperantError(
                    f"{bare} has no {bare.with_suffix('.json').name} beside it, which TextWorld made with the game: "
                    "copy it there too, or play classic games with env=jericho"
                )
            named = zip(short_names(given), given)
            return [Task(f"textworld/{n}", f"{n} of TextWorld", target={"file": str(path)}) for n, path in named]
        self.dropped = 0
        train = self._select(False, self.train_games, set())
        chosen = train if split == "train" else self._select(True, self.test_games, set(train.values()))
        missing = [path for path in chosen if not path.with_suffix(".z8").exists()]
        failed = make_files([{"path": str(path)} for path in missing], f"Compiling {len(missing)} games")
        if failed:
            raise OperantError(f"TextWorld cannot compile {next(iter(failed))}: {next(iter(failed.values()))}")
        return [
            Task(f"{self.game}/{split}/{file.stem}", f"{self.game}, game {file.stem}", target={"file": str(file)})
            for file in (path.with_suffix(".z8") for path in chosen)
        ]

    def _select(self, test: bool, count: int, known: set[str]) -> dict[Path, str]:
        """The first `count` games, by their seeds, that are no duplicates and have none of the `known` walkthroughs."""
        textworld, _ = packages()
        kind = self.kind(test)
        name = hashlib.blake2b(json.dumps(kind, sort_keys=True).encode(), digest_size=6).hexdigest()
        folder = cache() / textworld.__version__ / f"{self.game}-{name}"
        chosen: dict[Path, str] = {}
        seen, seed, tried, reasons = set(), FIRST_TEST_SEED if test else 1, 0, {}
        while len(chosen) < count and tried < 5 * count + 8:
            batch = [folder / f"{seed + i}.json" for i in range(max(count - len(chosen), 8))]
            seed, tried = seed + len(batch), tried + len(batch)
            missing = [path for path in batch if not path.exists()]
            requests = [{"path": str(path), "kind": kind, "seed": int(path.stem)} for path in missing]
            reasons |= make_files(requests, f"Making {len(missing)} games of {self.game}, kept in {folder}")
            for path in batch:
                if str(path) in reasons or len(chosen) == count:
                    continue
                walkthrough, facts = summary(path)
                if facts in seen or walkthrough in known:
                    self.dropped += 1
                else:
                    seen.add(facts)
                    chosen[path] = walkthrough
        if not chosen and count:
            repeated = "all repeat the walkthrough of a training game: train on fewer, or raise the level"
            why = next(iter(reasons.values()), repeated)
            raise OperantError(f"none of {tried} seeds made a game of {shown(kind, 300)}: {why}")
        return chosen

    def make(self, task: Task) -> Game:
        return TextWorldGame(file_of(task, "game.z8"))


@dataclass(kw_only=True)
class Jericho(TextGames):
    """Classic Z-machine games of the user's own. Its options are those of `TextGames`, and:"""

    files: tuple[str, ...] = ()
    """Games: .z3, .z5 or .z8 files, also as .gz, or folders of such."""
    test_files: tuple[str, ...] = ()
    """The same for evaluation. Empty: there is no evaluation in games."""

    def games(self, split: Split) -> list[Task]:
        require(self.files, "env.files is missing: Jericho brings no games; name your own, as env.files=zork1.z5")
        paths = files_of(self, split, r"\.z[1-8]$")
        named = zip(short_names(paths), paths)
        return [Task(f"jericho/{n}", f"{n}, a classic", target={"file": str(path)}) for n, path in named]

    def make(self, task: Task) -> Game:
        wanted = ALL if self.choose or self.show_commands or self.examples else ALL - {"commands"}
        return JerichoGame(file_of(task, "zork1.z5"), wanted)


# --- files ------------------------------------------------------------------------------------------------------------


def found(names: Iterable[str], pattern: str = r"\.z8$") -> list[Path]:
    """The game files that are named, or lie in the named folders, each once. Those in .gz are unpacked into the cache.

    Raises: OperantError for a name that does not exist or is no whole game, and a folder without games.
    """
    paths: list[Path] = []
    for name in [names] if isinstance(names, str) else names:
        path = Path(name).expanduser()
        inside = [path]
        if path.is_dir():
            inside = [p for p in sorted(path.iterdir()) if re.search(pattern, p.name.removesuffix(".gz"))]
        require(inside, f"folder {path} contains no game: TextWorld's are .z8 files, each with its .json")
        paths += [checked(str(p)) for p in inside]
    paths = [*dict.fromkeys(paths)]
    for path in paths:
        whole_game(path)
    return paths


def files_of(world: TextWorld | Jericho, split: Split, pattern: str = r"\.z8$") -> list[Path]:
    """The game files of a split, as `found` returns them. Warns of files for evaluation that are also trained on."""
    if split == "train" or not world.test_files:
        return found(world.files if split == "train" else (), pattern)
    paths = found(world.test_files, pattern)
    if both := len({*paths} & {*found(world.files, pattern)}):
        warnings.warn(
            f"{both} of the {len(paths)} games in env.test_files are also in env.files: what is won there is no result "
            "on unseen games; name other files",
            stacklevel=3,
        )
    return paths


def file_of(task: Task, example: str) -> Path:
    """The game file of a task: `target={"file": "a.z8"}`."""
    if not (isinstance(task.target, dict) and isinstance(task.target.get("file"), str)):
        raise OperantError(f'task {task.id!r} names no game: give it target={{"file": "{example}"}}')
    return checked(task.target["file"])


def short_names(paths: list[Path]) -> list[str]:
    """The name of each file without its ending, with as many of its folders as make the names differ."""
    for parts in range(1, 4):
        names = ["/".join(path.with_suffix("").parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def checked(name: str) -> Path:
    """The path of a game file; of a .gz, it is unpacked into a folder of the cache, with its .json.gz or .json."""
    path = Path(name).expanduser().resolve()
    require(path.is_file(), f"game file {name} does not exist")
    kind = Path(path.name.removesuffix(".gz")).suffix
    require(kind != ".ulx", f"{name} is a Glulx game, which TextWorld 1.7 no longer plays: make it again as .z8")
    require(re.fullmatch("\\.z[1-8]", kind), f"{name} is no game file: games are .z8, or .z3 to .z8 with env=jericho")
    if path.suffix != ".gz":
        return path
    try:
        content = gzip.decompress(path.read_bytes())
        folder = cache() / "unpacked" / hashlib.blake2b(content, digest_size=8).hexdigest()
        for source in (path, *path.parent.glob(f"{path.name.split('.z')[0]}.json*")):
            target = folder / source.name.removesuffix(".gz")
            if not target.exists():
                folder.mkdir(parents=True, exist_ok=True)
                data = source.read_bytes()
                atomic_io.write(target, gzip.decompress(data) if source.suffix == ".gz" else data)
    except (OSError, EOFError, zlib.error) as error:
        raise OperantError(f"{path} cannot be unpacked: {error}") from error
    return folder / path.name.removesuffix(".gz")
