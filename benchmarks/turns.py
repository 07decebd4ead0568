"""Turns per second of many-turn episodes, against loops around transformers' `generate`; in turn, same model and world.

    python -m benchmarks.turns

Four sides play 32 episodes of 20 turns, with 8 new tokens a turn and a history that grows: a loop of single
environments and a batched loop, each around `model.generate` (which has a key-value cache within a call), and our
`play`, without what it keeps from turn to turn and with it. All work on token ids and sample 8 tokens in every turn.
`--at-once` measures instead what turns cost beside as many tokens by one call: 64 rows each read whatever an episode
showed, then sample 160 tokens; in this world and in rooms, with the whole history and with three earlier turns in a
prompt (the call then reads only what the prompt before did not begin with). Both in two halves where a run has them.
Writes `benchmarks/results/turns.json`; docs/fast.md shows it. Half an hour on two cores.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import operant
from benchmarks import report
from benchmarks.driver import ROOT
from operant import machine
from operant.apps.games.rooms import Rooms
from operant.engines.native.engine import NativeEngine
from operant.models.policy import Policy
from operant.models.safe_loading import load_tokenizer
from operant.models.twins import side_by_side
from operant.rollouts.play import play
from operant.sampling import Sampling
from operant.types import Rollout, Step, Task

RESULT = ROOT / "benchmarks/results/turns.json"
MODELS = {
    "built-in shape": {"n_embd": 256, "n_layer": 4, "n_head": 4},
    "8 layers x 512": {"n_embd": 512, "n_layer": 8, "n_head": 8},
}
ROOMS = ("hall", "long kitchen", "cellar", "old library", "garden", "attic full of dusty boxes", "yard")
THINGS = ("a lamp", "a rusty key", "an apple and a book", "a wooden chest with a lock", "nothing at all")
WORLDS = {
    "a world that adds text": None,
    "rooms, whole history": lambda turns: Rooms(memory=None, max_turns=turns),
    "rooms, three turns in a prompt": lambda turns: Rooms(memory=3, max_turns=turns),
}
"""For --at-once. Random weights win no game of rooms, so its episodes have all their turns, too."""
SINGLE = 4
"""Episodes that the loop of single environments plays: each takes the same time."""
NEW, KEPT = 8, 4.0
"""Tokens of a reply; gigabytes of keys and values that are kept for the next turn with --at-once."""


class Walk:
    """A world that shows a room in each turn, whatever the reply is. Its texts are of unequal length."""

    def __init__(self, turns: int):
        self.turns = turns

    def text(self, episode: int, turn: int) -> str:
        """What the player reads before a turn."""
        room, thing = ROOMS[(3 * episode + turn) % len(ROOMS)], THINGS[(episode + 2 * turn) % len(THINGS)]
        return f". This is the {room}, and there is {thing}. There is a door to the north. What do you do? "

    def reset(self, tasks: dict[int, Task]) -> dict[int, Step]:
        self.turn = dict.fromkeys(tasks, 0)
        self.episode = {slot: int(task.id) for slot, task in tasks.items()}
        return {slot: Step() for slot in tasks}

    def step(self, replies: dict[int, str]) -> dict[int, Step]:
        for slot in replies:
            self.turn[slot] += 1
        return {
            slot: Step(self.text(self.episode[slot], self.turn[slot]), terminated=self.turn[slot] == self.turns)
            for slot in replies
        }


class Sides:
    """A model, and the four ways of playing with it."""

    def __init__(self, shape: dict[str, int], episodes: int, turns: int, world: Any = None):
        torch.manual_seed(0)
        self.tokenizer = load_tokenizer(Path(operant.__file__).parent / "builtin/reviews-lm")
        room = 4096 if world else 1024
        config = {"vocab_size": 8192, "n_positions": room, "eos_token_id": 0, "pad_token_id": 0} | shape
        self.model = GPT2LMHeadModel(GPT2Config(**config)).eval()
        self.policy, self.world = Policy(self.model), world or Walk(turns)
        self.episodes, self.turns, self.read = episodes, turns, 0
        own = [Task(str(i), self.first(i)) for i in range(0 if world else episodes)]
        self.tasks = own or world.games("train")[:episodes]
        self.counting = self.model.register_forward_pre_hook(self._count, with_kwargs=True)
        self.ways: dict[str, Callable[[], int]] = {
            "single": self.single,
            "batched": self.batched,
            "ours, nothing kept": lambda: self.ours(0.0),
            "ours": lambda: self.ours(2.0),
        }

    def _count(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.read += kwargs["input_ids"].numel()

    def first(self, episode: int) -> str:
        return f"Episode {episode}: find the way out of the house" + self.world.text(episode, 0)

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]

    @torch.no_grad()
    def _generate(self, rows: list[list[int]]) -> list[list[int]]:
        """transformers' own sampling of 8 tokens, after rows that are padded on the left."""
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        kwargs = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0}
        return self.model.generate(input_ids=ids, attention_mask=mask, **kwargs)[:, width:].tolist()

    def single(self) -> int:
        """One environment after the other, one row a call."""
        for episode in range(min(SINGLE, self.episodes)):
            row = self._encoded(self.first(episode))
            for turn in range(1, self.turns + 1):
                row = row + self._generate([row])[0] + self._encoded(self.world.text(episode, turn))
        return min(SINGLE, self.episodes) * self.turns

    def batched(self) -> int:
        """All environments side by side, one call a turn."""
        rows = [self._encoded(self.first(i)) for i in range(self.episodes)]
        for turn in range(1, self.turns + 1):
            replies = self._generate(rows)
            rows = [
                row + reply + self._encoded(self.world.text(i, turn))
                for i, (row, reply) in enumerate(zip(rows, replies, strict=True))
            ]
        return self.episodes * self.turns

    def ours(self, gigabytes: float) -> int:
        return sum(len(rollout.turns) for rollout in self.played(gigabytes))

    def played(self, gigabytes: float) -> list[Rollout]:
        sampling = Sampling(max_tokens=NEW, min_tokens=NEW, stop_tokens=(0,))
        with side_by_side(self.policy, self.episodes):
            engine = NativeEngine(self.policy, kept_gb=gigabytes)
            played = play(self.tasks, env=self.world, engine=engine, tokenizer=self.tokenizer, sampling=sampling)
        assert all(len(turn.action) == NEW for rollout in played for turn in rollout.turns)
        return played

    def at_once(self, prompts: list[list[int]]) -> None:
        """The tokens of all turns by one call: it reads what the world has shown, and samples the rest."""
        most = NEW * self.turns
        sampling = Sampling(max_tokens=most, min_tokens=most, stop_tokens=(0,))
        with side_by_side(self.policy, self.episodes):
            NativeEngine(self.policy).generate(prompts, sampling, range(self.episodes))


def shown(rollout: Rollout) -> list[int]:
    """The tokens of all prompts, each without what it has in common with the prompt and reply before."""
    found, before = list[int](), list[int]()
    for turn in rollout.turns:
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, turn.prompt, strict=False)))
        found, before = found + turn.prompt[common:], turn.prompt + turn.action
    return found


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measured(name: str, count: int, rounds: int, episodes: int, turns: int) -> dict[str, Any]:
    """Turns per second of each side in every round, and the tokens that the model reads for each turn."""
    sides = Sides(MODELS[name], episodes, turns)
    short = Sides(MODELS[name], 2, 2)
    rates: dict[str, list[float]] = {way: [] for way in sides.ways}
    work: dict[str, list[float]] = {way: [] for way in sides.ways}
    read: dict[str, float] = {}
    with threads(count):
        for way in short.ways.values():  # warms up, and finds out what is exact
            way()
        sides.policy.modes = short.policy.modes
        for _ in range(rounds):
            for way, run in sides.ways.items():
                sides.read, start, began = 0, time.perf_counter(), time.process_time()
                played = run()
                rates[way].append(played / (time.perf_counter() - start))
                work[way].append(played / (time.process_time() - began))
                read[way] = sides.read / played
    ours = rates["ours"]
    ratios = {way: [a / b for a, b in zip(ours, rates[way], strict=True)] for way in rates if way != "ours"}
    return {
        "model": name,
        "parameters": sum(p.numel() for p in sides.model.parameters()),
        "threads": count,
        "turns_per_second": {way: median(values) for way, values in rates.items()},
        "turns_per_processor_second": {way: median(values) for way, values in work.items()},
        "tokens_read_per_turn": read,
        "faster_than": {way: median(values) for way, values in ratios.items()},
        "spread": {way: [min(values), max(values)] for way, values in ratios.items()},
        "rounds": rounds,
    }


def beside_one_call(name: str, place: str, rounds: int, episodes: int, turns: int) -> dict[str, Any]:
    """Seconds of episodes, and of as many tokens by one call, in turn."""
    sides = Sides(MODELS[name], episodes, turns, WORLDS[place] and WORLDS[place](turns))
    seconds = {"turns": list[float](), "at once": list[float]()}
    sides.counting.remove()
    prompts = [shown(rollout) for rollout in sides.played(KEPT)]
    for warm in (True, *[False] * rounds):
        for way, run in (("turns", lambda: sides.played(KEPT)), ("at once", lambda: sides.at_once(prompts))):
            start = time.perf_counter()
            run()
            seconds[way] += [] if warm else [time.perf_counter() - start]
    ratios = [a / b for a, b in zip(seconds["turns"], seconds["at once"], strict=True)]
    known: dict[str, Any] = {"model": name, "world": place, "read": sum(map(len, prompts)) / episodes / turns}
    known |= {"episodes": episodes, "turns": turns, "machine": report.machine()}
    return known | {"seconds": seconds, "ratio": median(ratios), "spread": [min(ratios), max(ratios)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--only", default="", help="part of the name of a model; results of the others stay")
    parser.add_argument("--threads", type=int, help="measure with this number of threads only")
    parser.add_argument("--at-once", action="store_true", help="beside as many tokens by one call, on all threads")
    parser.add_argument("--world", default="", help="with --at-once: part of the name of a world")
    parser.add_argument("--quick", action="store_true", help="two episodes of three turns; nothing is written")
    args = parser.parse_args()
    machine.keep_memory()
    for name in [name for name in MODELS if args.only in name]:
        for place in [place for place in WORLDS if args.at_once and args.world in place]:
            row = beside_one_call(name, place, *((1, 2, 3) if args.quick else (args.rounds, 64, args.turns)))
            print(json.dumps(row, indent=1), flush=True)
            if not args.quick:
                write(row, "at_once")
        if args.at_once:
            continue
        for count in [args.threads] if args.threads else range(1, min(2, os.cpu_count() or 1) + 1):
            size = (1, 2, 3) if args.quick else (args.rounds, args.episodes, args.turns)
            row = measured(name, count, *size)
            print(json.dumps(row, indent=1), flush=True)
            if not args.quick:
                write(row | {"episodes": args.episodes, "turns": args.turns})


def write(row: dict[str, Any], kind: str = "rows") -> None:
    """Add a row to the results, in place of the last one of its model, world and threads."""
    result = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"rows": [], "at_once": []}

    def key(r: dict[str, Any]) -> tuple[str, str, int]:
        return r["model"], r.get("world", ""), r.get("threads", 0)

    rows = [r for r in result.get(kind, []) if key(r) != key(row)]
    result |= {"command": "python -m benchmarks.turns"} | ({"machine": report.machine()} if kind == "rows" else {})
    result[kind] = sorted([*rows, row], key=key)
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
