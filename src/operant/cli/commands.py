"""What each command does, once its arguments are known."""

import sys
from collections.abc import Sequence
from typing import Any

from operant.cli.arguments import parse, typed
from operant.options import convert
from operant.types import OperantError


def train(arguments: Sequence[str]) -> int:
    """`operant train RECIPE [--option value ...]`, or `--resume runs/x`."""
    words, options = parse(arguments, flags=("fresh_optimizer",))
    if "help" in options:
        print(_train_help())
        return 0
    resume, out = options.pop("resume", None), options.pop("out", None)
    fresh = bool(options.pop("fresh_optimizer", False))
    if resume is True:
        raise OperantError("--resume needs a run folder: operant train --resume runs/x")
    if len(words) > 1 or (words and resume):
        raise OperantError(f"{words[-1]!r} is one word too many: operant train RECIPE --option value ...")
    if not words and not resume and not options:
        raise OperantError("say what to train: operant train sentiment, or operant train --tasks ... --reward ...")
    if resume and out:
        raise OperantError(f"--out {out} beside --resume: a run goes on where it lies; copy its folder to go on there")
    from operant.api import runs
    from operant.trackers.console import Console

    if resume and _finished(resume, options, fresh):
        return 0
    run, told = None, False
    recipe = words[0] if words else None
    place = resume or out or _name(recipe)
    how = {"recipe": recipe, "resume": bool(resume), "fresh_optimizer": fresh, "show": [Console()]}
    for run in runs(place, **how, **options):
        if not told and run.first:
            told = True
            print(f"{run.path}: {_sentence(run)}", flush=True)
    if run.first:
        _tell_end(run)
    return 0


def _finished(place: str, options: dict[str, Any], fresh: bool) -> bool:
    """Where nothing is left to do, say so."""
    from pathlib import Path

    from operant.runs.resume import finished

    said = finished(Path(place), options, fresh_optimizer=fresh)
    if said is not None:
        print(said)
    return said is not None


def _name(recipe: str | None) -> str:
    from pathlib import Path

    return f"runs/{Path(recipe).stem if recipe else 'run'}"


def _sentence(run: Any) -> str:
    train, policy = run.config.train, run.policy
    size = sum(p.numel() for p in policy.model.parameters()) / 1e6
    return (
        f"{train.algorithm} trains {train.policy} ({size:.1f}M parameters) on {len(run.built.tasks)} tasks, "
        f"{train.steps} steps of {train.batch} replies; Ctrl-C ends after the step and saves"
    )


def _tell_end(run: Any) -> None:
    from operant.trackers.console import before_after

    if run.interrupted:
        step = run.learner.progress.step
        print(f"stopped after step {step}, saved; go on with: operant train --resume {run.path}")
        return
    if run.before is not None and run.after is not None and run.after.loss is not None:
        count, (old, new) = len(run.after.given), (run.before, run.after)
        bits = f"; {old.bits_per_byte:.3f} -> {new.bits_per_byte:.3f} bits a byte" if new.bits_per_byte else ""
        print(f"loss on {count} held-out replies: {old.loss:.3f} -> {new.loss:.3f} nats a token{bits}")
    if run.before is not None and run.after is not None and run.after.rollouts:
        pairs = list(zip(run.before.rollouts, run.before.scores, run.after.rollouts, run.after.scores, strict=True))
        before_after([(b.query, b.reply, x or 0.0, a.reply, y or 0.0) for b, x, a, y in pairs[:8]])
        kl = f", KL {run.after.kl:.1f} nats a reply" if run.after.kl is not None else ""
        print(f"mean reward on {len(pairs)} held-out tasks: {run.before.mean:.3f} -> {run.after.mean:.3f}{kl}")
    _tell_diagnosis(run.path)
    print(f"report: {run.folder.report}   talk to it: operant generate {run.path}")


def _tell_diagnosis(path: Any) -> None:
    """The verdict in a sentence, then each finding with its cause and remedy."""
    from operant.diagnosis import diagnose, read_history, verdict
    from operant.trackers.console import plain

    history = read_history(path)
    findings = diagnose(history)
    print(plain(verdict(history, findings)))
    for finding in findings:
        print(plain(f"  {finding.level}: {finding.message}"))
        print(plain(f"    cause:  {finding.cause}"))
        print(plain(f"    remedy: {finding.remedy}"))


def sweep(arguments: Sequence[str]) -> int:
    """`operant sweep RECIPE --option 1,2,3 ...`: one run a combination."""
    words, options = typed(arguments)
    if "help" in options:
        print(_sweep_help())
        return 0
    if len(words) > 1:
        raise OperantError(f"{words[-1]!r} is one word too many: operant sweep RECIPE --option 1,2,3")
    if not words and not options:
        raise OperantError("say what to sweep: operant sweep letters --kl.coef 0,0.1,0.5 --seed 1,2,3")
    from operant import sweep as sweeping
    from operant.options import compose, defaults

    own = {name: options.pop(name) for name in defaults(sweeping.SweepOptions) if name in options}
    return sweeping.sweep(options, words[0] if words else None, compose({"": sweeping.SweepOptions}, own)[""])


def _sweep_help() -> str:
    return """operant sweep RECIPE --option 1,2,3 [--option value ...]

  --kl.coef 0,0.1,0.5           an axis: one run a value, and every combination of several axes
  --betas [0.9,0.95],[0.9,0.99] values that themselves hold commas stand in brackets
  --out runs/RECIPE-sweep       its folder: a run folder for each combination, and the comparison, report.html
  --at-once 1                   runs at a time
  --random N                    draw N combinations; then an axis may be a range, 1e-5..1e-3
  --sweep-seed 0                of the draws

All other options are those of `operant train`. The same command again goes on where it was stopped; more values add
runs. `operant report runs/RECIPE-sweep` writes the comparison anew."""


def generate(arguments: Sequence[str]) -> int:
    """`operant generate runs/x`: replies to what is typed, or to --prompt."""
    words, options = parse(arguments)
    if len(words) != 1 or "help" in options:
        if "help" in options:
            print("operant generate runs/x [--prompt TEXT] [--max-tokens 60] [--temperature 1.0] [--seed 0]")
            return 0
        raise OperantError("say which run or model: operant generate runs/sentiment")
    from pathlib import Path

    from operant.engines.native.engine import NativeEngine
    from operant.models.loading import load_policy
    from operant.options import compose
    from operant.sampling import Sampling

    prompt, seed = options.pop("prompt", None), convert(options.pop("seed", 0), int, "seed")
    folder = Path(words[0])
    if (folder / "config.yaml").exists() and not (folder / "export").exists():
        raise OperantError(f"{folder} has no exported model yet: let the run end, or: operant train --resume {folder}")
    policy = load_policy(str(folder / "export") if (folder / "export").exists() else words[0])
    base = {"max_tokens": 60, "stop_tokens": policy.stop_tokens}
    sampling = compose({"": Sampling}, base | options)[""]
    engine = NativeEngine(policy)
    for number, text in enumerate([prompt] if isinstance(prompt, str) else _typed()):
        print(_reply(engine, policy, sampling, text, seed, number), flush=True)
    return 0


def _typed():
    """Lines from standard input, with a sign where a person sits before it."""
    person = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if person else "")
        except EOFError:
            return
        if line.strip():
            yield line


def _reply(engine: Any, policy: Any, sampling: Any, text: str, seed: int, number: int) -> str:
    from operant.rollouts.chat import encode_prompt
    from operant.sampling import reply_text, task_key
    from operant.trackers.console import plain

    ids = encode_prompt(policy.tokenizer, text)
    key = task_key(seed, "probe", 0, text, number)
    (completion,) = engine.generate([ids], sampling, [key])
    return plain(text + reply_text(policy.tokenizer, ids, completion.action, sampling))


def report(arguments: Sequence[str]) -> int:
    """`operant report runs/x`: write report.html anew, or with --serve show the run while it goes on.

    Several runs, or the folder of a sweep, are compared.
    """
    words, options = parse(arguments, flags=("serve",))
    if "help" in options:
        print("operant report runs/x [--serve [--host 127.0.0.1] [--port 8265]]")
        print("operant report runs/a runs/b ... [--out comparison.html]")
        return 0
    if not words:
        raise OperantError("say which run: operant report runs/sentiment")
    from operant.report.runs import is_sweep

    if len(words) > 1 or is_sweep(words[0]):
        return _compare(words, options)
    from operant.options import compose
    from operant.report.run_report import write_report
    from operant.report.server import Serving, serve
    from operant.runs.folder import read_config

    serving = compose({"": Serving}, options)[""]
    if not serving.serve and options:
        raise OperantError(f"--{next(iter(options))} says how to serve: operant report {words[0]} --serve ...")
    read_config(words[0])
    if serving.serve:
        return serve(words[0], serving)
    path = write_report(words[0])
    _tell_diagnosis(words[0])
    print(f"report: {path}")
    return 0


def _compare(places: Sequence[str], options: dict[str, Any]) -> int:
    from operant.report.compare import write_comparison

    out = options.pop("out", None)
    if options:
        raise OperantError(f"--{next(iter(options))} is for one run; several are compared: --out says where to")
    print(write_comparison(places, out))
    return 0


def replay(arguments: Sequence[str]) -> int:
    """`operant replay runs/x/refused/step-00012`: make a refused step again, and say which number was none."""
    words, options = parse(arguments)
    if "help" in options:
        print("operant replay runs/x/refused/step-00012")
        return 0
    if len(words) != 1 or options:
        raise OperantError("say which refused step: operant replay runs/sentiment/refused/step-00012")
    from operant.runs.replay import tell

    return 0 if tell(words[0]) else 1


def doctor(arguments: Sequence[str]) -> int:
    """`operant doctor`; with --plan, the memory that a run would take."""
    words, options = parse(arguments)
    recipe = options.pop("plan", None)
    if "help" in options:
        print("operant doctor                                       versions, devices, extras, and a self-test")
        print("operant doctor --plan RECIPE [--option value ...]    the memory of a run, before it is started")
        return 0
    if recipe is None and (words or options):
        raise OperantError("`operant doctor` takes no arguments but --plan: operant doctor --plan sentiment")
    from operant.cli.doctor import examine, tell_plan

    return examine() if recipe is None else tell_plan(None if recipe is True else recipe, options)


_RESUME = """options beside --resume change it from there on; --fresh-optimizer begins the optimizer anew (as a light
checkpoint needs). Exit codes: 0 done, or stopped by a signal and saved; 2 an error in a sentence; 1 a silence that the
watchdog ended (see silence_minutes); all of them can be resumed."""


def _train_help() -> str:
    from operant.options import defaults
    from operant.runs.config import config_schema, recipes

    lines = ["operant train RECIPE [--option value ...]", f"recipes: {', '.join(recipes())}", ""]
    for group, made in config_schema("ppo").items():
        for name, value in defaults(made).items():
            full = f"{group}.{name}" if group else name
            lines.append(f"  --{full.replace('_', '-'):34} {value!r}")
    return "\n".join([*lines, "", "docs/options.md explains each; --resume runs/x goes on with a run,", _RESUME])
