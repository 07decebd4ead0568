"""What a run shows while it is in progress and at its end: lines in a terminal, a live chart in a notebook."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from shlex import quote

from operant.metrics.games import game_of
from operant.runs.config import describe
from operant.runs.games import playable
from operant.runs.run import Observer, Run
from operant.runs.trackers.console import Console, before_after, plain
from operant.runs.trackers.notebook import Chart, in_notebook, link
from operant.tools.report import parquet, prompts
from operant.tools.report.diagnosis import diagnose, read_history, verdict
from operant.tools.report.diagnosis.history import Finding, counted, percent
from operant.types import OperantError, Rollout

LARGE, MOST = 100e6, 5e-5
"""Trained weights from which on a rate above the second number is usually too high. Most recipes have the rates of
built-in models, of a few million weights; those for larger ones say 1e-5, and 5e-5 for reward models."""


def display() -> "ConsoleDisplay | ChartDisplay":
    return ChartDisplay() if in_notebook() else ConsoleDisplay()


class ConsoleDisplay(Console, Observer):
    """Prints what a run does, its steps, and its result."""

    def at_start(self, run: Run) -> None:
        print(f"{run.path}: {summary(run)}", flush=True)

    def end(self, run: Run) -> None:
        """Print held-out results before and after training, the diagnosis, and the paths to go to next."""
        if run.stopped:
            print(_stopped(run))
            return
        before, after = run.before, run.after
        if before is not None and after is not None and before.rollouts and after.rollouts:
            pairs = list(zip(before.rollouts, before.scores, after.rollouts, after.scores, strict=True))
            seen = Counter[str]()  # one reply of each task comes before the second of any
            turns = [(seen.update([pair[0].task.id]), seen[pair[0].task.id])[1] for pair in pairs]
            pairs = [pair for _, pair in sorted(zip(turns, pairs), key=lambda ranked: ranked[0])]
            before_after([(*shown_as(b), x, shown_as(a)[1], y) for b, x, a, y in pairs[:8]])
        elif run.parts.demonstrations is not None:
            before_after(samples(run.path))
        for line in held_out(run):
            print(line)
        for line in best_prompts(run):
            print(plain(line))
        print_diagnosis(run.path)
        before, world = run.policy.as_reward, playable(run.config.train.env)
        use = f"play {world} --player" if world else "generate"
        use = f"try the model: operant {use} {quote(str(run.path))}"
        use = use if before is None else f"train against it: --reward {quote(f'{before}{run.path}')}"
        print(f"report: {run.folder.report}   {use}")


class ChartDisplay(Chart, Observer):
    """Draws what a run does, its steps, and its result in a notebook's cell."""

    def at_start(self, run: Run) -> None:
        self.title = f"{run.path}: {summary(run)}"
        self.draw()

    def end(self, run: Run) -> None:
        """Draw held-out results, the verdict, the findings with causes and remedies, and the path of the report."""
        sentence, findings = diagnosis(run.path)
        lines = [_stopped(run)] if run.stopped else held_out(run)
        found = "\n".join(best_prompts(run))
        items = "".join(
            f"<li>{escape(finding.level)}: {escape(finding.message)}<br>cause: {escape(finding.cause)}"
            f"<br>remedy: {escape(finding.remedy)}</li>"
            for finding in findings
        )
        self.after = (
            f"<div><b>{escape(sentence)}</b></div>{''.join(f'<div>{escape(line)}</div>' for line in lines)}"
            f"{found and f'<pre>{escape(found)}</pre>'}"
            f"{items and f'<ul>{items}</ul>'}<div>report: {link(run.folder.report)}</div>"
        )
        self.draw()


def samples(path: Path) -> list[tuple[str, str, None, str, None]]:
    """Rows of (query, reply before training, None, reply after it, None): the first answers to the probe prompts."""
    found = list(parquet.steps(path / "probes").values())
    with suppress(OperantError, FileNotFoundError):
        sides = [parquet.lines(file).to_pylist()[:3] for file in (*found[:1], *found[-1:])]
        return [(b["query"], b["reply"], None, a["reply"], None) for b, a in zip(*sides)] if sides else []
    return []


def shown_as(rollout: Rollout) -> tuple[str, str]:
    """Query and reply of a rollout; of a game, its objective and the commands."""
    game = game_of(rollout)
    if game is None:
        return rollout.query, rollout.reply
    return game["objective"] or rollout.query, " " + "; ".join(turn["command"] for turn in game["turns"])


def summary(run: Run) -> str:
    """One sentence on what the run does: algorithm, model, tasks, steps."""
    train, policy = run.config.train, run.policy
    size = sum(p.numel() for p in policy.model.parameters()) / 1e6
    rate, trained = float(run.learner.option_values().get("optimizer.lr") or 0), run.policy.trainable()
    fast = rate > MOST and sum(p.numel() for p in trained) >= LARGE
    advice = f"a rate of {rate:g} suits models of a few million parameters, so try --optimizer.lr 1e-5; " * fast
    rows = "prompts with their replies" if run.learner.algorithm.needs.labels else "replies"
    done = run.learner.progress.step
    return (
        f"{train.algorithm} trains {describe(train.policy)} ({size:.1f}M parameters) on "
        f"{counted(len(run.parts.tasks), 'task')}, {counted(train.steps, 'step')} of {train.batch} {rows}; "
        f"{f'it goes on after step {done}; ' if done else ''}{advice}Ctrl-C stops after the current step and saves"
    )


def held_out(run: Run) -> list[str]:
    """Sentences on the held-out tasks before and after training; none without such tasks."""
    before, after, lines = run.before, run.after, list[str]()
    if before is None or after is None:
        return lines
    if after.loss is not None:
        bits = f"; {before.bits_per_byte:.3f} -> {after.bits_per_byte:.3f} bits per byte" if after.bits_per_byte else ""
        count = counted(len(after.losses), "held-out reply")
        lines += [f"loss on {count}: {before.loss:.3f} -> {after.loss:.3f} nats per token{bits}"]
    first, last = before.chosen(), after.chosen()
    count, replies = len(after.rollouts), "reply"
    if after.rollouts:
        kl = f"; KL on them after training: {after.kl:z.1f} nats per reply" if after.kl is not None else ""
        if "game/won" in first and "game/won" in last:
            rates = [percent(chosen.pop("game/won")) for chosen in (first, last)]
            lines += [f"success rate on {counted(count, 'held-out game')}: {' -> '.join(rates)}"]
        if not math.isnan(after.mean):
            tasks = len({rollout.task.id for rollout in after.rollouts})
            each = f" ({counted(count, 'reply')})" if count > tasks else ""
            means = f"{after.mean:.3f}" if math.isnan(before.mean) else f"{before.mean:.3f} -> {after.mean:.3f}"
            lines += [f"mean reward on {counted(tasks, 'held-out task')}{each}: {means}{kl}"]
    else:  # labelled replies
        count, replies = len(run.parts.held_out), "task"
    held = counted(count, f"held-out {replies}")
    lines += [f"{n} on {held}: {first[n]:.3f} -> {last[n]:.3f}" for n in last if n in first]
    return lines


def best_prompts(run: Run) -> list[str]:
    """The table of the prompts that a run found, beside baselines; empty for a run that has not ended with one."""
    found = None if run.interrupted else prompts.read(run.path)
    return [] if found is None else prompts.lines(found)


def diagnosis(path: Path) -> tuple[str, list[Finding]]:
    with parquet.reading_run(path):
        history = read_history(path)
        findings = diagnose(history)
        return verdict(history, findings), findings


def print_diagnosis(path: Path) -> None:
    """Print the summary of a run in a sentence, then each finding with its cause and remedy."""
    print_findings(*diagnosis(path))


def print_findings(
    sentence: str, findings: Sequence[Finding], remedy: Callable[[Finding], str] = lambda finding: finding.remedy
) -> None:
    """Print a verdict, then each finding with its cause and remedy."""
    print(plain(sentence))
    for finding in findings:
        print(plain(f"  {finding.level}: {finding.message}"))
        print(plain(f"    cause:  {finding.cause}"))
        print(plain(f"    remedy: {remedy(finding)}"))


def _stopped(run: Run) -> str:
    step = run.learner.progress.step
    return f"stopped after step {step} and saved; resume with: operant train --resume {quote(str(run.path))}"
