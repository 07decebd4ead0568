"""Metrics of text games, and their transcripts, from `Rollout.info["game"]`, which a world of games fills in.

    {"name": "rooms/8/17", "objective": str, "won": bool, "lost": bool, "score": float, "most": float,
     "optimum": turns of the shortest solution or None,
     "turns": [{"place": str, "state": what the game showed before the command, "thought": str, "command": str,
                "by": "policy" | "random" | "expert", "valid": bool, "copied": bool, "reward": float, "key": str}],
     "map": {"rooms": {name: [x, y]}, "ways": [[a, b, "open" | "closed" | "locked"]]} or None}

`Rollout.turns` has one `Turn` for each of its turns. A turn may also have `fit`, the number of earlier turns that the
prompt still shows, and `forgotten`, the number of tokens of those that it does not.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from operant.metrics.collect import is_blank
from operant.tally import Tally
from operant.types import Rollout

OF_REPLIES = ("won", "score", "turns", "turns_to_win", "optimum_ratio")
"""The numbers of a single game, each the metric `game/...`."""

SHOWN = frozenset(
    f"env.{name}"
    for name in "memory template tokens remember_thoughts thought_tokens choose show_commands examples example_player "
    "train_games prompt answer fresh workers waves".split()
)
"""Options of worlds about what the policy is shown and trains on. They change neither what is paid nor the held-out
games, so that scores under different ones are comparable."""


def game_of(rollout: Rollout) -> Mapping[str, Any] | None:
    """Return the record of the game that was played; None if it was none, or if the world failed."""
    game = recorded(rollout)
    return game if game is not None and "won" in game else None


def recorded(rollout: Rollout) -> Mapping[str, Any] | None:
    """Return the record of a game or of another episode of several turns; None without one, or if the world failed."""
    game = rollout.info.get("game")
    return None if rollout.failed or not isinstance(game, Mapping) or "turns" not in game else game


def numbers(game: Mapping[str, object]) -> dict[str, float | None]:
    """Return the numbers `OF_REPLIES` of one game, None where there is none, as the turns to win of a lost one."""
    turns, won, most, optimum = len(game["turns"]), bool(game["won"]), game.get("most"), game.get("optimum")
    return {
        "won": float(won),
        "score": game["score"] / most if most else None,
        "turns": float(turns),
        "turns_to_win": float(turns) if won else None,
        "optimum_ratio": turns / optimum if won and optimum else None,
    }


def of_games(rollouts: Sequence[Rollout]) -> Tally:
    """Return the metrics `game/...`, `actions/...` and `memory/...` of the games among the rollouts."""
    tally = Tally()
    games = [game for rollout in rollouts if (game := game_of(rollout)) is not None]
    each = [numbers(game) for game in games]
    for name in OF_REPLIES:
        tally.mean(f"game/{name}", [x for found in each if (x := found[name]) is not None])
    tally.mean("game/lost", [bool(game["lost"]) for game in games])
    turns = [turn for game in games for turn in game["turns"]]
    own = [turn for turn in turns if turn["by"] == "policy"]
    tally.mean("game/examples", [turn["by"] != "policy" for turn in turns])
    tally.things("game/states_per_1000", ((game["name"], turn["key"]) for game in games for turn in game["turns"]))
    tally.mean("actions/valid", [turn["valid"] for turn in own])
    tally.mean("actions/copied_from_prompt", [turn["copied"] for turn in own])
    tally.mean("actions/empty", [is_blank(turn["command"]) for turn in own])
    for name, key in (("turns_fit", "fit"), ("forgotten_tokens", "forgotten")):
        tally.mean(f"memory/{name}", [turn[key] for turn in own if turn.get(key) is not None])
    return tally


def of_replies(rollouts: Sequence[Rollout]) -> dict[str, list[float | None]]:
    """Return the numbers of each game by metric, as an evaluation keeps them; empty if none of them is a game."""
    games = [game_of(rollout) for rollout in rollouts]
    if not any(games):
        return {}
    each = [{} if game is None else numbers(game) for game in games]
    return {f"game/{name}": [found.get(name) for found in each] for name in OF_REPLIES}


def transcript(rollout: Rollout, decode: Callable[[list[int]], str] | None = None) -> dict[str, object] | None:
    """Return the record of a game with the reply of each turn, the value before it if generation computed one, and
    [text, probability] of each option where it was a choice. Any other episode of several turns has what was read and
    replied. None for an episode of one turn."""
    game = game_of(rollout)
    if game is None:
        return None if decode is None or rollout.failed or len(rollout.turns) < 2 else _conversation(rollout, decode)
    turns = []
    for recorded, turn, text in zip(game["turns"], rollout.turns, rollout.texts):
        known: dict[str, Any] = {"reply": text, "value": turn.values[0] if turn.values else None}
        if turn.probabilities and turn.options and decode is not None:
            options = [[decode(ids).strip(), share] for ids, share in zip(turn.options, turn.probabilities)]
            known |= {"options": options, "chosen": turn.chosen}
        turns.append({**recorded, **known})
    return {**game, "turns": turns}


def _conversation(rollout: Rollout, decode: Callable[[list[int]], str]) -> dict[str, object]:
    turns, before = list[dict[str, object]](), rollout.parents
    for number, (turn, text) in enumerate(zip(rollout.turns, rollout.texts)):
        parent = number - 1 if before is None else before[number]
        row = [] if parent < 0 else rollout.turns[parent].prompt + rollout.turns[parent].action
        read = turn.prompt[len(row) :] if turn.prompt[: len(row)] == row else turn.prompt
        by = "policy" if turn.trained else "world"
        turns.append({"state": decode(read), "command": text, "by": by, "valid": True, "reward": turn.reward})
        turns[-1] |= {} if before is None else {"parent": parent}
    return {"name": str(rollout.task.id), "turns": turns}
