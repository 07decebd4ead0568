"""Rules about worlds of many turns: episodes that outgrow the context, commands that are not understood, empty or
copied from the prompt, and games never won."""

from operant.tools.diagnosis.history import Finding, History, counted, finding, number, percent, too_large
from operant.tools.diagnosis.rewards import PATIENCE

INVALID = 0.5
"""Share of commands that the game does not understand, from which on the policy hardly plays."""
COPIED = 0.5
"""Share of commands that stand in the prompt as they are."""
EMPTY = 0.1
"""Share of empty commands; the end of the registry's healthy range."""
OUTGROWN = 0.5
"""Share of a step's episodes that end for lack of room, from which on the policy learns to fill its context."""
WARM_START = (
    "a warm start on walkthroughs (`operant play WORLD --player walkthrough --split train --games 200 --record "
    "demos.jsonl` with the `--env.*` options of this run, then `operant train sft --policy MODEL --tasks demos.jsonl`)"
)


def outgrown(history: History) -> Finding | None:
    last = history.metrics[-1] if history.metrics else {}
    ended, played = last.get("rollout/outgrown", 0), last.get("rollout/count", 0)
    if not ended or ended < OUTGROWN * played:
        return None
    since = history.since("rollout/outgrown", lambda x: x > 0)
    return finding("outgrown", since, ended=number(ended), played=counted(played, "episode"))


def invalid(history: History) -> Finding | None:
    share = history.recent("actions/valid")
    if share is None or share > 1 - INVALID:
        return None
    since = history.since("actions/valid", lambda x: x <= 1 - INVALID)
    return finding("invalid_commands", since, share=percent(1 - share), warm_start=WARM_START)


def copied(history: History) -> Finding | None:
    valid = history.recent("actions/valid")
    if valid is not None and valid > 1 - INVALID:
        return None  # a command that the game understands may well stand in the prompt: listed, or given before
    return too_large(history, "copied_commands", "actions/copied_from_prompt", COPIED, warm_start=WARM_START)


def empty(history: History) -> Finding | None:
    return too_large(history, "empty_commands", "actions/empty", EMPTY)


def never_won(history: History) -> Finding | None:
    rates = [*history.values("game/won"), *history.values("evaluate/game/won")]
    steps = len(history.values("game/won"))
    if steps < PATIENCE or any(rates):
        return None
    games, score = sum(history.values("rollout/count")), history.recent("game/score")
    reached = f", and the mean score is {percent(score)} of the largest" if score is not None else ""
    counts = {"games": number(games), "steps": steps, "reached": reached}
    return finding("never_won", history.step, warm_start=WARM_START, **counts)
