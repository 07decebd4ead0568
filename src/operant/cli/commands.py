"""The commands: each function takes its arguments and options and returns the exit code."""

import difflib
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from operant.cli.arguments import parse, parse_text
from operant.options import compose, convert, defaults
from operant.trackers.console import Console, before_after, plain
from operant.types import OperantError

FLAGS = {"train": ("fresh_optimizer",), "report": ("serve",)}
"""Options of a command that take no value."""
HELP = {
    "sweep": """operant sweep RECIPE --option 1,2,3 [--option value ...]

  --kl.coef 0,0.1,0.5           one run per value; several such options give one run per combination
  --betas [0.9,0.95],[0.9,0.99] values that contain commas are put in brackets
  --out runs/RECIPE-sweep       folder of the sweep: a run folder per combination, and report.html, which compares them
  --at-once 1                   number of runs in parallel
  --random N                    draw N random combinations; an option may then be a range, 1e-5..1e-3
  --sweep-seed 0                random seed of these draws

All other options are those of `operant train`. The same command resumes a sweep; more values add runs to it.
`operant report runs/RECIPE-sweep` rebuilds the comparison.""",
    "generate": "operant generate runs/x [--prompt TEXT] [--max-tokens 60] [--temperature 1.0] [--seed 0]",
    "report": """operant report runs/x [--serve [--host 127.0.0.1] [--port 8265]]
operant report runs/a runs/b ... [--out comparison.html]""",
    "replay": "operant replay runs/x/refused/step-00012",
    "doctor": """operant doctor                                       versions, devices, packages and a self-test
operant doctor --plan RECIPE [--option value ...]    the memory of a run, estimated without loading its model""",
}


def run(name: str, arguments: Sequence[str]) -> int:
    """Run the command `name` on the words after it, or print its help; returns the exit code.

    Raises: OperantError for an unknown command, unusable arguments, or an error of the command itself.
    """
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]!r}?" if near else "`operant --help` lists the commands"
        raise OperantError(f"unknown command {name!r}; {hint}")
    split = parse_text if name == "sweep" else parse
    words, options = split(arguments, FLAGS.get(name, ()))
    if "help" in options:
        print(HELP[name] if name in HELP else _train_help())
        return 0
    return COMMANDS[name](words, options)


# --- train ------------------------------------------------------------------------------------------------------------


def train(words: Sequence[str], options: dict[str, Any]) -> int:
    """`operant train RECIPE [--option value ...]`, or `operant train --resume runs/x`."""
    resume, out = options.pop("resume", None), options.pop("out", None)
    fresh = bool(options.pop("fresh_optimizer", False))
    if resume is True:
        raise OperantError("--resume needs a run folder: operant train --resume runs/x")
    if len(words) > 1 or (words and resume):
        raise OperantError(f"unexpected argument {words[-1]!r}: operant train RECIPE --option value ...")
    if not words and not resume and not options:
        raise OperantError(
            "nothing to train: name a recipe, as in operant train sentiment, or give options: "
            "operant train --tasks ... --reward ..."
        )
    if resume and out:
        raise OperantError(
            f"--out {out} beside --resume: a run is resumed in its own folder; to leave that as it is, "
            "copy the folder and resume the copy"
        )
    from operant.api import runs
    from operant.runs.resume import finished_message

    if resume and (message := finished_message(Path(resume), options, fresh_optimizer=fresh)) is not None:
        print(message)
        return 0
    run, announced = None, False
    recipe = words[0] if words else None
    folder = resume or out or f"runs/{Path(recipe).stem if recipe else 'run'}"
    for run in runs(folder, recipe=recipe, resume=bool(resume), fresh_optimizer=fresh, show=[Console()], **options):
        if run.first and not announced:
            announced = True
            print(f"{run.path}: {_summary(run)}", flush=True)
    if run.first:
        _print_result(run)
    return 0


def _summary(run: Any) -> str:
    """One sentence on what the run does: algorithm, model, tasks, steps."""
    train, policy = run.config.train, run.policy
    size = sum(p.numel() for p in policy.model.parameters()) / 1e6
    return (
        f"{train.algorithm} trains {train.policy} ({size:.1f}M parameters) on {len(run.parts.tasks)} tasks, "
        f"{train.steps} steps of {train.batch} replies; Ctrl-C stops after the current step and saves"
    )


def _print_result(run: Any) -> None:
    """Print held-out results before and after training, the diagnosis, and the paths to go to next."""
    if run.interrupted:
        step = run.learner.progress.step
        print(f"stopped after step {step} and saved; resume with: operant train --resume {run.path}")
        return
    before, after = run.before, run.after
    if before is not None and after is not None and after.loss is not None:
        bits = f"; {before.bits_per_byte:.3f} -> {after.bits_per_byte:.3f} bits per byte" if after.bits_per_byte else ""
        count = len(after.losses)
        print(f"loss on {count} held-out replies: {before.loss:.3f} -> {after.loss:.3f} nats per token{bits}")
    if before is not None and after is not None and after.rollouts:
        pairs = list(zip(before.rollouts, before.scores, after.rollouts, after.scores, strict=True))
        before_after([(b.query, b.reply, x or 0.0, a.reply, y or 0.0) for b, x, a, y in pairs[:8]])
        kl = f", KL {after.kl:.1f} nats per reply" if after.kl is not None else ""
        if not math.isnan(after.mean):
            print(f"mean reward on {len(pairs)} held-out tasks: {before.mean:.3f} -> {after.mean:.3f}{kl}")
        first, last = before.chosen(), after.chosen()
        for name in (name for name in last if name in first):
            print(f"{name} on {len(pairs)} held-out replies: {first[name]:.3f} -> {last[name]:.3f}")
    _print_diagnosis(run.path)
    print(f"report: {run.folder.report}   try the model: operant generate {run.path}")


def _print_diagnosis(path: Any) -> None:
    """Print the summary of a run in a sentence, then each finding with its cause and remedy."""
    from operant.diagnosis import diagnose, read_history, verdict

    history = read_history(path)
    findings = diagnose(history)
    print(plain(verdict(history, findings)))
    for finding in findings:
        print(plain(f"  {finding.level}: {finding.message}"))
        print(plain(f"    cause:  {finding.cause}"))
        print(plain(f"    remedy: {finding.remedy}"))


def _train_help() -> str:
    """List every option of a run with its default."""
    from operant.runs.config import config_schema, recipes

    lines = ["operant train RECIPE [--option value ...]", f"recipes: {', '.join(recipes())}", ""]
    for group, options in config_schema("ppo").items():
        for name, value in defaults(options).items():
            full = f"{group}.{name}" if group else name
            lines.append(f"  --{full.replace('_', '-'):34} {value!r}")
    return "\n".join([*lines, "", _AFTER_THE_OPTIONS])


_AFTER_THE_OPTIONS = """docs/options.md explains each option.
--resume runs/x resumes a run; options beside it replace the recorded ones from the next step on.
--fresh-optimizer resumes with a new optimizer state, which a light checkpoint requires.
Exit codes: 0 finished, or stopped by a signal and saved; 2 an error, explained in a message; 1 ended by the watchdog
after silence_minutes without progress. A run can be resumed after each of them."""


# --- sweep ------------------------------------------------------------------------------------------------------------


def sweep(words: Sequence[str], options: dict[str, Any]) -> int:
    """`operant sweep RECIPE --option 1,2,3 ...` makes one run per combination of values."""
    if len(words) > 1:
        raise OperantError(f"unexpected argument {words[-1]!r}: operant sweep RECIPE --option 1,2,3")
    if not words and not options:
        raise OperantError(
            "nothing to sweep: name a recipe and give an option several values: "
            "operant sweep letters --kl.coef 0,0.1,0.5 --seed 1,2,3"
        )
    from operant import sweep as sweeps

    own = {name: options.pop(name) for name in defaults(sweeps.SweepOptions) if name in options}
    return sweeps.sweep(options, words[0] if words else None, compose({"": sweeps.SweepOptions}, own)[""])


# --- generate ---------------------------------------------------------------------------------------------------------


def generate(words: Sequence[str], options: dict[str, Any]) -> int:
    """`operant generate runs/x` prints replies to --prompt, or to each line of standard input."""
    if len(words) != 1:
        raise OperantError("expected one run folder or model: operant generate runs/sentiment")
    from operant.models.loading import load_policy
    from operant.runs.build import trained_policy
    from operant.sampling import Sampling
    from operant.training.learner import default_engine

    prompt, seed = options.pop("prompt", None), convert(options.pop("seed", 0), int, "seed")
    folder = Path(words[0])
    if (folder / "config.yaml").exists() and not (folder / "export").exists():
        raise OperantError(
            f"{folder} has no exported model yet: wait for the run to end, or resume it: "
            f"operant train --resume {folder}"
        )
    policy = trained_policy(folder) if (folder / "export").exists() else load_policy(words[0])
    base = {"max_tokens": 60, "stop_tokens": policy.stop_tokens}
    sampling = compose({"": Sampling}, base | options)[""]
    engine = default_engine(policy)
    for number, text in enumerate([prompt] if isinstance(prompt, str) else _lines_of_input()):
        print(_generate_reply(engine, policy, sampling, text, seed, number), flush=True)
    return 0


def _lines_of_input() -> Iterator[str]:
    """Yield the non-empty lines of standard input; a terminal shows a prompt sign before each."""
    sign = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(sign)
        except EOFError:
            return
        if line.strip():
            yield line


def _generate_reply(engine: Any, policy: Any, sampling: Any, text: str, seed: int, number: int) -> str:
    """Return `text` with the reply to it; `number` counts the prompts and gives each its own random numbers."""
    from operant.rollouts.chat import encode_prompt
    from operant.sampling import reply_text, task_key

    ids = encode_prompt(policy.tokenizer, text)
    key = task_key(seed, "probe", 0, text, number)
    (completion,) = engine.generate([ids], sampling, [key])
    return plain(text + reply_text(policy.tokenizer, ids, completion.action, sampling))


# --- report, replay, doctor -------------------------------------------------------------------------------------------


def report(words: Sequence[str], options: dict[str, Any]) -> int:
    """`operant report runs/x` writes report.html again, or with --serve serves it as a live page.

    Several runs, or the folder of a sweep, are compared.
    """
    if not words:
        raise OperantError("expected a run folder: operant report runs/sentiment")
    from operant.report.runs import is_sweep

    if len(words) > 1 or is_sweep(words[0]):
        return _compare(words, options)
    from operant.report.run_report import write_report
    from operant.report.server import Serving, serve
    from operant.runs.folder import read_config

    serving = compose({"": Serving}, options)[""]
    if not serving.serve and options:
        raise OperantError(f"--{next(iter(options))} applies only with --serve: operant report {words[0]} --serve ...")
    read_config(words[0])
    if serving.serve:
        return serve(words[0], serving)
    path = write_report(words[0])
    _print_diagnosis(words[0])
    print(f"report: {path}")
    return 0


def _compare(folders: Sequence[str], options: dict[str, Any]) -> int:
    """Write the page that compares several runs, and print its path."""
    from operant.report.compare import write_comparison

    out = options.pop("out", None)
    if options:
        raise OperantError(f"--{next(iter(options))} is for one run: a comparison of several takes only --out FILE")
    print(write_comparison(folders, out))
    return 0


def replay(words: Sequence[str], options: dict[str, Any]) -> int:
    """`operant replay runs/x/refused/step-00012` repeats a refused step and locates its first NaN or infinity."""
    if len(words) != 1 or options:
        raise OperantError("expected the folder of one refused step: operant replay runs/sentiment/refused/step-00012")
    from operant.runs.replay import print_replay

    return 0 if print_replay(words[0]) else 1


def doctor(words: Sequence[str], options: dict[str, Any]) -> int:
    """`operant doctor` examines this machine; with --plan it prints the memory that a run would take."""
    recipe = options.pop("plan", None)
    if recipe is None and (words or options):
        raise OperantError("`operant doctor` takes no argument except --plan: operant doctor --plan sentiment")
    from operant.cli.doctor import examine, print_plan

    return examine() if recipe is None else print_plan(None if recipe is True else recipe, options)


COMMANDS = {
    "train": train,
    "sweep": sweep,
    "generate": generate,
    "report": report,
    "replay": replay,
    "doctor": doctor,
}
