"""Rules about worlds of many turns: episodes that outgrow the context, commands that are not understood, empty or
copied from the prompt, and games never won."""

from operant.tools.diagnosis.history import Finding, History, counted, number, percent
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
    """Most episodes end because what the world shows no longer fits into the model's context."""
    last = history.metrics[-1] if history.metrics else {}
    ended, played = last.get("rollout/outgrown", 0), last.get("rollout/count", 0)
    if not ended or ended < OUTGROWN * played:
        return None
    return Finding(
        "outgrown",
        "problem",
        f"{number(ended)} of {counted(played, 'episode')} ended because their next prompt left no room for a reply in "
        "the model's context.",
        "what the world shows, with the turns so far, grows beyond the context, so episodes end before they are won",
        "shorter observations, fewer earlier turns (`--env.memory 0`, or `Step(fresh=True)` in a world of your own), "
        "a smaller `--sampling.max_tokens`, or a model with a longer context",
        ("rollout/outgrown", "rollout/turns"),
        history.since("rollout/outgrown", lambda x: x > 0),
    )


def invalid(history: History) -> Finding | None:
    """The game does not understand most commands."""
    share = history.recent("actions/valid")
    if share is None or share > 1 - INVALID:
        return None
    return Finding(
        "invalid_commands",
        "warning",
        f"The game does not understand {percent(1 - share)} of the policy's commands.",
        "the policy has not seen how one speaks to this game, or it writes text around the command",
        f"{WARM_START}, `--env.examples 0.33 --env.example_player expert` for turns of an expert, `--env.choose true` "
        "for a choice among the admissible commands, or a price: `--env.invalid -0.1`",
        ("actions/valid", "game/won"),
        history.since("actions/valid", lambda x: x <= 1 - INVALID),
    )


def copied(history: History) -> Finding | None:
    """The policy repeats what stands in the prompt, and it is no command."""
    share, valid = history.recent("actions/copied_from_prompt"), history.recent("actions/valid")
    if share is None or share < COPIED or (valid is not None and valid > 1 - INVALID):
        return None  # a command that the game understands may well stand in the prompt: listed, or given before
    return Finding(
        "copied_commands",
        "warning",
        f"{percent(share)} of the policy's commands are copied from the prompt, and the game does not understand most.",
        "the prompt lists text that a language model continues, such as commands, inventory or earlier answers",
        f"`--env.show_commands false`, another `--env.template`, a smaller `--env.memory`, or {WARM_START}",
        ("actions/copied_from_prompt", "actions/valid"),
        history.since("actions/copied_from_prompt", lambda x: x >= COPIED),
    )


def empty(history: History) -> Finding | None:
    """Many commands are empty."""
    share = history.recent("actions/empty")
    if share is None or share < EMPTY:
        return None
    return Finding(
        "empty_commands",
        "problem",
        f"{percent(share)} of the policy's commands are empty.",
        "the model ends its reply at once: the template ends in a way that invites no command, or an empty one is the "
        "cheapest",
        "`--sampling.min_tokens 1`, another `--env.template`, or a price: `--env.invalid -0.1`",
        ("actions/empty", "actions/valid"),
        history.since("actions/empty", lambda x: x >= EMPTY),
    )


def never_won(history: History) -> Finding | None:
    """No game has ever been won."""
    rates = [*history.values("game/won"), *history.values("evaluate/game/won")]
    steps = len(history.values("game/won"))
    if steps < PATIENCE or any(rates):
        return None
    games, score = sum(history.values("rollout/count")), history.recent("game/score")
    reached = f", and the mean score is {percent(score)} of the largest" if score is not None else ""
    return Finding(
        "never_won",
        "warning",
        f"None of the {number(games)} games of {steps} steps was won{reached}.",
        "no random play reaches the end within the turns of a game, so nothing is learnt from the reward for winning",
        f"easier games, more `--env.max_turns` (near twice the optimum), `--env.examples 0.33`, or {WARM_START}",
        ("game/won", "game/score", "game/turns"),
        history.step,
    )
