"""A small house to walk through, as text games: a world that fills in `Rollout.info["game"]`, and records of games."""

from operant.types import Step

ROOMS = {"hall": [0, 0], "kitchen": [1, 0], "cellar": [1, 1], "garden": [2, 0], "vault": [2, 1]}
WAYS = [["hall", "kitchen", "open"], ["kitchen", "cellar", "closed"], ["kitchen", "garden", "open"]]
WAYS += [["garden", "vault", "locked"]]
SHORTEST = 3


def ways(place):
    return [b if a == place else a for a, b, _ in WAYS if place in (a, b)]


class House:
    """Go from the hall to the vault by naming rooms. With `choose` the rooms next door are options."""

    pays = True

    def __init__(self, *, choose: bool = True, max_turns: int = 6):
        self.choose, self.max_turns, self.games = choose, max_turns, {}

    def reset(self, tasks):
        for slot, task in tasks.items():
            known = {"name": task.id, "objective": "go to the vault", "won": False, "lost": False, "score": 0.0}
            known |= {"most": 1.0, "optimum": SHORTEST, "map": {"rooms": ROOMS, "ways": WAYS}, "turns": []}
            self.games[slot] = known | {"final": {"place": "hall", "state": "You are in the hall."}}
        return {slot: self.shown(slot) for slot in tasks}

    def shown(self, slot, **more):
        game = self.games[slot]
        place = game["final"]["place"]
        return Step(f"{place}. ", fresh=True, options=ways(place) if self.choose else None, info={"game": game}, **more)

    def step(self, replies):
        return {slot: self.answer(slot, reply) for slot, reply in replies.items()}

    def answer(self, slot, reply):
        game = self.games[slot]
        before, command = game["final"], reply.strip()
        valid = command in ways(before["place"])
        place = command if valid else before["place"]
        won = place == "vault"
        turn = {"place": before["place"], "state": before["state"], "thought": "", "command": command, "by": "policy"}
        turn |= {"valid": valid, "copied": False, "reward": float(won)}
        turn |= {"key": before["place"], "fit": 1, "forgotten": 2}
        state = f"You are in the {place}." if valid else "You cannot."
        final = {"place": place, "state": state + (" You have won!" if won else "")}
        turns = [*game["turns"], turn]
        self.games[slot] = game | {"turns": turns, "final": final, "won": won, "score": float(won)}
        over = {"terminated": won, "truncated": not won and len(turns) >= self.max_turns}
        return self.shown(slot, reward=float(won), **over)


def record(commands, *, name="house/1", by=None, **more):
    """The record of a game in which these commands were given."""
    world = House(choose=False, max_turns=len(commands))
    world.reset({0: type("Named", (), {"id": name})})
    for command in commands:
        world.answer(0, command)
    game = world.games[0]
    for turn, who in zip(game["turns"], by or []):
        turn["by"] = who
    return game | more
