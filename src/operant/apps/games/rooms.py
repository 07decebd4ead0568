"""Rooms: small text adventures, made from a seed, whose shortest solution is known by search. They need no extra.

A treasure lies behind a locked door, in a container or on the floor; the key is in another container or on a floor.
The player takes the key, opens the door, takes the treasure, and brings it to a given room. Exits to rooms that were
not visited are called unexplored, and the way back is named. Each of the four parts of the quest scores one point.
"""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from operant.bounds import bounded
from operant.envs.games import Game, GameState, Split, TextGames
from operant.types import Task

NAMES = (
    "attic balcony bathroom bedroom cellar chapel closet corridor courtyard dungeon gallery garage garden greenhouse "
    "hall kitchen laboratory library loft nursery office pantry parlour porch stable storeroom studio study terrace "
    "theatre tower workshop"
).split()
TREASURES = "bracelet crown diamond goblet medal necklace painting pearl ring sceptre statue vase".split()
KEYS = "brass copper golden iron rusty silver".split()
CONTAINERS = "basket box cabinet case chest crate cupboard drawer trunk wardrobe".split()
JUNK = "apple book bottle broom candle coat cup hammer lamp mirror pillow rope spoon umbrella".split()
DIRECTIONS = {"north": (0, -1), "east": (1, 0), "south": (0, 1), "west": (-1, 0)}
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
CARRIED = -1
LOCKED, CLOSED, OPEN = 0, 1, 2


@dataclass(frozen=True)
class Layout:
    """What does not change in a game. Rooms, items and containers are numbers."""

    rooms: list[str]
    places: list[tuple[int, int]]
    """Of each room: x and y, north is up."""
    exits: list[dict[str, int]]
    """Of each room: the room in each direction."""
    door: tuple[int, int]
    """The two rooms that the door is between."""
    containers: list[tuple[str, int]]
    """Name and room."""
    items: list[str]
    """The key, the treasure, and what is of no use."""
    start: int
    goal: int
    """The room that the treasure has to be brought to."""

    @property
    def door_name(self) -> str:
        return f"{self.items[0].split()[0]} door"


class Situation(NamedTuple):
    """What changes in a game. A place is a room, `CARRIED`, or 100 + the number of a container."""

    room: int
    items: tuple[int, ...]
    door: int
    opened: tuple[bool, ...]
    """Of each container."""


def layout(rooms: int, seed: str) -> tuple[Layout, Situation]:
    """The game of a seed, and its beginning."""
    chance = random.Random(f"rooms/{rooms}/{seed}")
    places, exits = [(0, 0)], [dict[str, int]()]
    while len(places) < rooms:  # a tree on a grid, and some more ways
        room = chance.randrange(len(places))
        way = chance.choice(list(DIRECTIONS))
        place = _beside(places[room], way)
        if place not in places:
            places.append(place)
            exits.append({OPPOSITE[way]: room})
            exits[room][way] = len(places) - 1
    # The door is the way to the last room, which is a leaf until ways are added, and stays one.
    behind = rooms - 1
    [before] = exits[behind].values()
    for room, place in enumerate(places[:behind]):
        for way in DIRECTIONS:
            other = next((o for o, there in enumerate(places[:behind]) if there == _beside(place, way)), None)
            if other is not None and way not in exits[room] and chance.random() < 0.3:
                exits[room][way], exits[other][OPPOSITE[way]] = other, room
    free = [room for room in range(behind) if room != before] or [before]
    key_room, start = chance.choice(free), chance.choice(range(behind))
    goal = chance.choice([room for room in range(behind) if room != start] or [start])
    names = chance.sample(NAMES, rooms)
    boxes = chance.sample(CONTAINERS, 3)
    containers = [(boxes[0], key_room), (boxes[1], behind), (boxes[2], chance.randrange(behind))]
    items = [f"{chance.choice(KEYS)} key", chance.choice(TREASURES), *chance.sample(JUNK, 2)]
    where = [100 if chance.random() < 0.5 else key_room, 101 if chance.random() < 0.5 else behind]
    where += [chance.choice([*range(behind), 102]) for _ in range(2)]
    fixed = Layout(names, places, exits, (before, behind), containers, items, start, goal)
    return fixed, Situation(start, tuple(where), LOCKED, (False,) * 3)


def _beside(place: tuple[int, int], way: str) -> tuple[int, int]:
    return place[0] + DIRECTIONS[way][0], place[1] + DIRECTIONS[way][1]


def actions(fixed: Layout, now: Situation, *, useful: bool = False) -> Iterator[tuple[str, Situation]]:
    """The admissible commands, each with what comes of it. useful: only those that a shortest solution may have."""
    key = 0
    for way, room in fixed.exits[now.room].items():
        if {room, now.room} != {*fixed.door} or now.door == OPEN:
            yield f"go {way}", now._replace(room=room)
    if now.room in fixed.door:
        if now.door == LOCKED and now.items[key] == CARRIED:
            yield f"unlock {fixed.door_name} with {fixed.items[key]}", now._replace(door=CLOSED)
        if now.door == CLOSED:
            yield f"open {fixed.door_name}", now._replace(door=OPEN)
    for number, (name, room) in enumerate(fixed.containers):
        if room == now.room and not now.opened[number]:
            opened = tuple(done or n == number for n, done in enumerate(now.opened))
            yield f"open {name}", now._replace(opened=opened)
    for item in range(2 if useful else len(fixed.items)):
        if visible(fixed, now, item):
            moved = (*now.items[:item], CARRIED, *now.items[item + 1 :])
            yield f"take {fixed.items[item]}", now._replace(items=moved)
        elif now.items[item] == CARRIED and not useful:
            moved = (*now.items[:item], now.room, *now.items[item + 1 :])
            yield f"drop {fixed.items[item]}", now._replace(items=moved)


def visible(fixed: Layout, now: Situation, item: int) -> bool:
    """Whether an item lies in the room, or in an open container there."""
    place = now.items[item]
    if place >= 100:
        return fixed.containers[place - 100][1] == now.room and now.opened[place - 100]
    return place == now.room


def won(fixed: Layout, now: Situation) -> bool:
    return now.room == fixed.goal and now.items[1] == CARRIED


def solution(fixed: Layout, start: Situation) -> list[str]:
    """A shortest solution by breadth-first search; of equal ones, the first in the order of `actions`."""
    ways: dict[Situation, tuple[Situation, str] | None] = {start: None}
    queue = deque([start])
    while queue:
        now = queue.popleft()
        if won(fixed, now):
            commands: list[str] = []
            while (step := ways[now]) is not None:
                now, command = step
                commands.append(command)
            return commands[::-1]
        for command, after in actions(fixed, now, useful=True):
            if after not in ways:
                ways[after] = (now, command)
                queue.append(after)
    return []


class RoomsGame(Game):
    """A `Game` of rooms."""

    def __init__(self, rooms: int, seed: str):
        self.fixed, self.beginning = layout(rooms, seed)
        self.optimum = len(solution(self.fixed, self.beginning))
        self.reset()

    def reset(self) -> GameState:
        self.now, self.seen, self.reached = self.beginning, {self.beginning.room}, 0
        self.before: int | None = None
        """The room that the player came from."""
        self._solution: list[str] | None = None
        return self._state(self._description())

    def step(self, command: str) -> GameState:
        command = " ".join(command.lower().split())
        known = dict(actions(self.fixed, self.now))
        if command not in known:
            self._solution = None
            return self._state("You can't do that.", valid=False)
        follows = self._solution is not None and self._solution[:1] == [command]
        self._solution = (self._solution or [])[1:] if follows else None
        if known[command].room != self.now.room:
            self.before = self.now.room
        self.now = known[command]
        self.seen.add(self.now.room)
        # The parts of the quest that are done: the key, the door, the treasure, and the treasure at its room.
        has = self.now.items[1] == CARRIED
        done = [won(self.fixed, self.now), has, self.now.door == OPEN, self.now.items[0] == CARRIED]
        self.reached = max(self.reached, next((4 - n for n, part in enumerate(done) if part), 0))
        verb, _, rest = command.partition(" ")
        if verb == "go":
            text = self._description()
        elif verb == "open":
            inside = [self.fixed.items[i] for i in self._in_container(rest)]
            empty = "" if rest == self.fixed.door_name else " It is empty."
            holds = f" It holds {_listed(inside)}." if inside else empty
            text = f"You open the {rest}.{holds}"
        else:
            text = {"take": "You take", "drop": "You drop", "unlock": "You unlock"}[verb] + f" the {rest}."
        return self._state(text)

    def expert(self) -> str | None:
        if self._solution is None:
            self._solution = solution(self.fixed, self.now)
        return self._solution[0] if self._solution else None

    def map(self) -> dict[str, object]:
        fixed = self.fixed
        ways = [
            [fixed.rooms[room], fixed.rooms[other], "locked" if {room, other} == {*fixed.door} else "open"]
            for room, exits in enumerate(fixed.exits)
            for other in exits.values()
            if room < other
        ]
        return {"rooms": {name: list(fixed.places[room]) for room, name in enumerate(fixed.rooms)}, "ways": ways}

    def _in_container(self, name: str) -> list[int]:
        number = next((n for n, (box, _) in enumerate(self.fixed.containers) if box == name), None)
        return [] if number is None else [i for i, place in enumerate(self.now.items) if place == 100 + number]

    def _description(self) -> str:
        fixed, here = self.fixed, self.now.room
        parts = [f"You are in the {fixed.rooms[here]}."]
        for number, (name, room) in enumerate(fixed.containers):
            if room == here:
                inside = [fixed.items[i] for i in self._in_container(name)]
                state = f"open, with {_listed(inside)}" if inside else "open and empty"
                parts.append(f"There is a {name}, {state if self.now.opened[number] else 'closed'}.")
        if on_floor := [fixed.items[i] for i, place in enumerate(self.now.items) if place == here]:
            parts.append(f"On the floor: {_listed(on_floor)}.")
        exits = fixed.exits[here]
        parts.append(f"Exits: {', '.join(self._exit(way, exits[way]) for way in DIRECTIONS if way in exits)}.")
        return " ".join(parts)

    def _exit(self, way: str, room: int) -> str:
        """`north to the cellar`, `west back to the hall`, `east unexplored`, or `south the locked iron door`."""
        if {room, self.now.room} == {*self.fixed.door} and self.now.door != OPEN:
            return f"{way} the {'locked' if self.now.door == LOCKED else 'closed'} {self.fixed.door_name}"
        back = "back " * (room == self.before)
        return f"{way} {back}to the {self.fixed.rooms[room]}" if room in self.seen else f"{way} unexplored"

    def _state(self, text: str, *, valid: bool = True) -> GameState:
        fixed, now = self.fixed, self.now
        carried = [fixed.items[i] for i, place in enumerate(now.items) if place == CARRIED]
        treasure, goal = fixed.items[1], fixed.rooms[fixed.goal]
        return GameState(
            text=text,
            description=self._description(),
            inventory=f"You carry {_listed(carried)}." if carried else "You carry nothing.",
            objective=f"Find the {treasure} and bring it to the {goal}.",
            commands=tuple(command for command, _ in actions(fixed, now)),
            score=float(self.reached),
            most=4.0,
            won=won(fixed, now),
            valid=valid,
            place=fixed.rooms[now.room],
            key=f"{now.room} {self.before} {now.items} {now.door} {now.opened} {sorted(self.seen)} {self.reached}",
        )


def _listed(names: list[str]) -> str:
    return ", ".join(f"{'an' if name[0] in 'aeiou' else 'a'} {name}" for name in names)


@dataclass(kw_only=True)
class Rooms(TextGames):
    """The world of rooms. Its options are those of `TextGames`, and:"""

    rooms: int = bounded(8, at_least=3, at_most=len(NAMES))
    """Rooms of a game."""

    def games(self, split: Split) -> list[Task]:
        return [
            Task(f"rooms/{split}/{self.rooms}/{n}", f"Rooms, game {n} of the {split} games", target=f"{split}/{n}")
            for n in range(getattr(self, f"{split}_games"))
        ]

    def make(self, task: Task) -> RoomsGame:
        return RoomsGame(self.rooms, str(task.target or task.id))
