"""The commands, each with its options and its help.

The options of a run depend on its recipe, its method and what these name, so `train`, `sweep` and `doctor --plan` take
options that their parsers do not know, and `operant.runs.config` checks them.
"""

import difflib
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from operant.cli import help
from operant.cli.parser import Parser
from operant.options import compose, convert, defaults, read
from operant.trackers.console import plain
from operant.types import OperantError

REPLY_TOKENS = 60
"""The most tokens of a reply of `operant generate`, unless `--max-tokens` says otherwise."""


@dataclass(frozen=True)
class Command:
    """A command of the command line."""

    run: Callable[[Sequence[str], dict[str, Any]], int]
    """Takes the arguments and the options, and returns the exit code."""
    about: str
    examples: str
    operand: str = ""
    """Its arguments, for the line of usage."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Its own options, for `add_argument`."""
    declared: str = ""
    """The dataclass `module:Name` of its options that are declared elsewhere."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values of those options that are not their defaults."""
    more: bool = False
    """Whether it takes the options of a run, too."""


def run(name: str, words: Sequence[str]) -> int:
    """Run the command `name` on the words after it, or print its help; returns the exit code.

    Raises: OperantError for an unknown command, unusable arguments, or an error of the command itself.
    """
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]!r}?" if near else "`operant --help` lists the commands"
        raise OperantError(f"unknown command {name!r}; {hint}")
    command = COMMANDS[name]
    parser = parsers(Parser("operant", name, ""))[name]
    if command.declared:
        parser.add(help.declared(command.declared, command.values))
    operands, options, rest = parser.read(words, command.more)
    if valueless := next((option for option, value in rest.items() if value is True and not help.alone(option)), None):
        raise OperantError(f"option --{valueless} lacks its value: --{valueless} VALUE")
    asked, all_asked = options.pop("help", False), options.pop("help_all", False)
    if not asked and not all_asked:
        rest = rest if name == "sweep" else {option: read(text) for option, text in rest.items()}
        return command.run(operands, options | rest)
    recipe = operands[0] if operands else None
    if all_asked:
        parser.add(help.every(recipe, rest))
    elif "help-all" in command.options:
        method, common = help.common(recipe, rest)
        of = f", with the values of {recipe}" if recipe else ""
        parser.add_briefly(f"common options of {method}{of}", common)
    parser.print_help()
    return 0


def print_help() -> None:
    """Print the commands, and how to find the options of each."""
    recipes = ", ".join(sorted(path.stem for path in (Path(__file__).parents[1] / "builtin").glob("*.yaml")))
    examples = f"""\
  operant train RECIPE --kl.coef 0.1                 a recipe ({recipes}) or your own YAML file
  operant generate runs/RECIPE                       generate replies with the trained model
  operant train --resume runs/RECIPE                 resume an interrupted run"""
    about = "train transformer language models with reinforcement learning"
    end = "`operant COMMAND --help` explains a command, and `operant train --help-all` lists every option of a run."
    top = Parser("operant", about, examples, usage="operant COMMAND [--option value ...]", epilog=end)
    top.add_argument("-V", "--version", action="store_true", help="show the version")
    parsers(top)
    top.print_help()


def parsers(top: Parser) -> dict[str, Parser]:
    """Give `operant` the parsers of its commands; they are returned by name."""
    below = top.add_subparsers(title="commands", metavar="COMMAND", prog="operant")
    for name, command in COMMANDS.items():
        takes = [command.operand, "[--option value ...]" if command.options or command.more else ""]
        settings = {
            "usage": " ".join(filter(None, ["operant", name, *takes])),
            "epilog": EXIT_CODES if name == "train" else None,
        }
        parser = below.add_parser(name, help=command.about, about=command.about, examples=command.examples, **settings)
        parser.add_argument("operands", nargs="*", help=SUPPRESS)
        for option, of_option in command.options.items():
            parser.add_argument(f"--{option}", **of_option)
    return below.choices


# --- train ------------------------------------------------------------------------------------------------------------


def train(words: Sequence[str], options: dict[str, Any]) -> int:
    """`operant train RECIPE [--option value ...]`, or `operant train --resume runs/x`."""
    resume, out = options.pop("resume", None), options.pop("out", None)
    fresh = bool(options.pop("fresh_optimizer", False))
    if len(words) > 1 or (words and resume):
        dashes = f"options begin with two dashes: --{words[-1]}" if "=" in words[-1] else ""
        usage = "operant train RECIPE --option value ..."
        raise OperantError(f"unexpected argument {words[-1]!r}: {dashes or usage}")
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
    recipe = words[0] if words else None
    folder = resume or out or f"runs/{Path(recipe).stem if recipe else 'run'}"
    for _ in runs(folder, recipe=recipe, resume=bool(resume), fresh_optimizer=fresh, **options):
        pass
    return 0


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
    from operant.runs.build import trained
    from operant.runs.folder import runs_near
    from operant.sampling import Sampling
    from operant.training.learner import default_engine

    prompt, seed = options.pop("prompt", None), convert(options.pop("seed", 0), int, "seed")
    folder = Path(words[0])
    if (folder / "config.yaml").exists() and not (folder / "export").exists():
        raise OperantError(
            f"{folder} has no exported model yet: wait for the run to end, or resume it: "
            f"operant train --resume {folder}"
        )
    if (folder / "export").exists():
        policy, engine = trained(folder)
    else:
        try:
            policy = load_policy(words[0])
        except OperantError as error:
            raise OperantError(f"{error}; {runs_near(folder)}") from error
        engine = default_engine(policy)
    base = {"max_tokens": REPLY_TOKENS, "stop_tokens": policy.stop_tokens}
    sampling = compose({"": Sampling}, base | options)[""]
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
    from operant.report.display import print_diagnosis
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
    print_diagnosis(Path(words[0]))
    print(f"report: {path}")
    return 0


def _compare(folders: Sequence[str], options: dict[str, Any]) -> int:
    """Write the page that compares several runs; print their results and its path."""
    from operant.report.compare import write_comparison

    out = options.pop("out", None)
    if options:
        raise OperantError(f"--{next(iter(options))} is for one run: a comparison of several takes only --out FILE")
    path = write_comparison(folders, out, say=lambda text: print(f"{text}\n"))
    print(f"comparison: {path}")
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
    if words or (recipe is None and options):
        raise OperantError("`operant doctor` takes no argument except --plan: operant doctor --plan sentiment")
    from operant.cli.doctor import examine, print_plan

    return examine() if recipe is None else print_plan(None if recipe is True else recipe, options)


HELP_ALL = {"action": "store_true", "help": "show every option, with its bounds and the value of the recipe"}
EXIT_CODES = """\
Exit codes: 0 finished, or stopped by a signal and saved; 2 an error, explained in a message; 1 ended by the watchdog
after silence_minutes without progress. A run can be resumed after each of them. docs/options.md explains all."""
COMMANDS = {
    "train": Command(
        train,
        "train a model: a recipe, your own YAML file, or options alone",
        """\
  operant train sentiment                            a recipe of the package
  operant train my.yaml --kl.coef 0.1                your own file, with another value
  operant train --tasks t.jsonl --reward my:score    options alone
  operant train --resume runs/x                      resume an interrupted run
  operant train letters --algorithm grpo --help      the options of a method, with the values of a recipe

Options are written --kl.coef 0.1; --coef 0.1 works if only one group has it.""",
        "[RECIPE]",
        {
            "out": {"metavar": "FOLDER", "help": "the run folder [runs/RECIPE]"},
            "resume": {"metavar": "FOLDER", "help": "resume a run; options beside it replace the recorded ones"},
            "fresh-optimizer": {
                "action": "store_true",
                "help": "resume with a new optimizer state, which a light checkpoint requires",
            },
            "help-all": HELP_ALL,
        },
        more=True,
    ),
    "sweep": Command(
        sweep,
        "make one run per value, or per combination of several options; resumable",
        """\
  operant sweep letters --kl.coef 0,0.1,0.5             one run per value; of several such options, per combination
  operant sweep letters --betas [0.9,0.95],[0.9,0.99]   values that contain commas are put in brackets
  operant sweep letters --random 8 --lr 1e-5..1e-3      random combinations

All other options are those of `operant train`. The same command resumes a sweep; more values add runs to it.
`operant report runs/letters-sweep` rebuilds the comparison.""",
        "[RECIPE]",
        {"help-all": HELP_ALL},
        declared="operant.sweep:SweepOptions",
        more=True,
    ),
    "generate": Command(
        generate,
        "generate replies with a trained model",
        """\
  operant generate runs/x --prompt "Once upon"       one reply
  operant generate runs/x < prompts.txt              a reply to each line""",
        "runs/x",
        {
            "prompt": {"metavar": "TEXT", "help": "the prompt; without it, each line of standard input is one"},
            "seed": {"metavar": "VALUE", "help": "random seed of the replies [0]"},
        },
        "operant.sampling:Sampling",
        {"max_tokens": REPLY_TOKENS},
    ),
    "report": Command(
        report,
        "rebuild or serve the report of a run, or compare runs",
        """\
  operant report runs/x                              rebuild the report of a run
  operant report runs/x --serve                      serve the report as a live page, with every reply
  operant report runs/a runs/b --out c.html          compare runs: curves, reward against KL, replies side by side""",
        "runs/x ...",
        {
            "out": {"metavar": "FILE", "help": "the page of a comparison"},
            "serve": {"action": "store_true", "help": "serve the report as a live page, with every reply"},
        },
        "operant.report.server:Serving",
    ),
    "replay": Command(
        replay,
        "repeat a refused step and find its first NaN or infinity",
        "  operant replay runs/x/refused/step-00012",
        "runs/x/refused/step-00012",
    ),
    "doctor": Command(
        doctor,
        "examine this machine, or estimate the memory of a run",
        """\
  operant doctor                                     versions, devices, optional packages and a self-test
  operant doctor --plan RECIPE --batch 64            the memory of a run, estimated without loading its model""",
        options={
            "plan": {"nargs": "?", "const": True, "metavar": "RECIPE", "help": "the recipe, YAML file or run folder"}
        },
        more=True,
    ),
}
