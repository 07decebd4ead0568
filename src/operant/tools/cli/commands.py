"""The commands, each with its options and its help.

The options of a run depend on its recipe, its method and what these name, so `train`, `sweep` and `doctor --plan` take
options that their parsers do not know, and `operant.runs.config` checks them.
"""

import difflib
import os
from argparse import SUPPRESS
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from operant.options import compose, convert, defaults, read
from operant.tools.cli import help
from operant.tools.cli.parser import Parser
from operant.types import OperantError

REPLY_TOKENS = 60
"""The most tokens of a reply of `operant generate`, unless `--max-tokens` says otherwise."""
OF_DEMONSTRATIONS = ("reference_field", "reply_field", "loss_on", "max_length")
"""Options of data that only runs have."""


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
    declared: Sequence[str] = ()
    """The dataclasses `module:Name` of its options that are declared elsewhere."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values of those options that are not their defaults."""
    without: Sequence[str] = ()
    """Those options that it does not take."""
    more: bool = False
    """Whether it takes the options of a run, too."""


OF_PROGRAMS = "options of programs, with --tests"
"""The title of the group of options that only apply to programs."""
SEARCH_OPTIONS: dict[str, dict[str, Any]] = {
    "refine": {
        "action": "store_true",
        "help": "cut programs that pass, and write their rest anew",
    },
    "cut": {
        "metavar": "WHERE",
        "help": "where: critic, line or random [critic if there is one, else line]",
    },
    "repair": {
        "metavar": "MODEL",
        "help": "if none passes, rewrite the best failures by this model, or by `policy`",
    },
    "repairs": {"metavar": "M", "help": "failures of a round that are repaired [1]"},
    "repair-template": {
        "metavar": "TEXT",
        "help": "what the repair model reads, with {prompt}, {program}, {outcome} and {message}",
    },
    "rounds": {"metavar": "N", "help": "rounds of refining and repairing, of --samples programs each [1]"},
    "budget": {"metavar": "N", "help": "most programs of a task in all rounds [no limit]"},
    "critic": {
        "metavar": "MODEL",
        "help": "an outcome critic, which ranks programs and says where they are cut",
    },
    "jail": {"metavar": "OPTIONS", "help": "limits of the programs, as in {seconds: 2}"},
}
"""Options of a search for programs, of `generate` and `eval`."""
PROGRAMS = ("tests", "submit", "all", *SEARCH_OPTIONS)
"""Those that stand in a group of their own."""
MEANT = {
    "compare": "report runs/a runs/b",
    "resume": "train --resume runs/x",
    "serve": "report runs/x --serve",
    "evaluate": "eval",
    "chat": "generate",
    "sample": "generate",
    "plan": "doctor --plan sentiment",
    "transfer": "prompt transfer",
    "search": "prompt search",
    "--help-all": "train --help-all",
}
"""What is meant by words that are no commands."""


def run(name: str, words: Sequence[str]) -> int:
    """Run the command `name` on the words after it, or print its help; returns the exit code.

    Raises: OperantError for an unknown command, unusable arguments, or an error of the command itself.
    """
    if name not in COMMANDS:
        near = [MEANT[name]] if name in MEANT else difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]!r}?" if near else "`operant --help` lists the commands"
        raise OperantError(f"unknown command {name!r}; {hint}")
    command = COMMANDS[name]
    parser = parsers(Parser("operant", name, ""))[name]
    for spec in command.declared:
        parser.add(about for about in help.declared(spec, command.values) if about.name not in command.without)
    operands, options, rest = parser.read(words, command.more)
    if name == "reward-model":  # a recipe that people look for as a command
        operands = [name, *operands]
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
    recipes = ", ".join(sorted(path.stem for path in (Path(__file__).parents[2] / "builtin").glob("*.yaml")))
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
        programs = parser.add_argument_group(OF_PROGRAMS) if "tests" in command.options else parser
        for option, of_option in command.options.items():
            (programs if option in PROGRAMS else parser).add_argument(f"--{option}", **of_option)
    return below.choices


# --- train ------------------------------------------------------------------------------------------------------------


def train(words: Sequence[str], options: dict[str, Any]) -> int:
    """`operant train RECIPE [--option value ...]`, or `operant train --resume runs/x`."""
    resume, out = options.pop("resume", None), options.pop("out", None)
    fresh = bool(options.pop("fresh_optimizer", False))
    if options.pop("resume_if_there", False) and not resume:
        there = Path(out or f"runs/{Path(words[0]).stem if words else 'run'}")
        if (there / "config.yaml").is_file():  # every rank looks before the first one makes the folder
            words, resume, out = [], str(there), None
    if len(words) > 1 or (words and resume):
        odd = next((word for word in words if word.startswith("-") or "=" in word), "").lstrip("-")
        dashes = f"options begin with two dashes: --{odd}" if odd else ""
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
        if os.environ.get("RANK", "0") == "0":
            print(message)
        return 0
    recipe = words[0] if words else None
    folder = resume or out or f"runs/{Path(recipe).stem if recipe else 'run'}"
    try:
        for _ in runs(folder, recipe=recipe, resume=bool(resume), fresh_optimizer=fresh, **options):
            pass
    except OperantError as error:
        several = [f"--{n} {x}" for n, x in options.items() if "," in str(x) and f"{x!r}" in str(error)]
        if resume or not several or not ("it must be" in str(error) or "algorithm" in options):
            raise
        raise OperantError(f"{error}; operant sweep makes a run of each value: {several[0]}") from error
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
    from operant.tools import sweep as sweeps

    own = {name: options.pop(name) for name in defaults(sweeps.SweepOptions) if name in options}
    return sweeps.sweep(options, words[0] if words else None, compose({"": sweeps.SweepOptions}, own)[""])


# --- generate ---------------------------------------------------------------------------------------------------------


def generate(words: Sequence[str], options: dict[str, Any]) -> int:
    """`operant generate runs/x` prints replies to --prompt, or to each line of standard input."""
    from operant.tools.cli.generate import generate

    return generate(words, {"max_tokens": REPLY_TOKENS} | options)


# --- eval -------------------------------------------------------------------------------------------------------------


def evaluate(words: Sequence[str], options: dict[str, Any]) -> int:
    """`operant eval MODEL [MODEL ...]` compares models by the rewards of their replies to held-out tasks."""
    from operant.tools.cli.evaluate import evaluate

    return evaluate(words, options)


# --- prompt -----------------------------------------------------------------------------------------------------------


def prompt(words: Sequence[str], options: dict[str, Any]) -> int:
    """`operant prompt show RUN`, `operant prompt search`, `operant prompt transfer RUN`."""
    from operant.tools.cli.prompts import prompt

    return prompt(words, options)


# --- play -------------------------------------------------------------------------------------------------------------


def play(words: Sequence[str], options: dict[str, Any]) -> int:
    """`operant play WORLD` lets a person, simple players and models play the games of a world."""
    from operant.tools.cli.play import play

    return play(words, options)


# --- label ------------------------------------------------------------------------------------------------------------


def label(words: Sequence[str], options: dict[str, Any]) -> int:
    """`operant label replies.jsonl` serves a page on which people compare replies, and exports their labels."""
    from operant.tools.cli.label import label

    return label(words, options)


# --- runs, report, replay, doctor -------------------------------------------------------------------------------------


def runs(words: Sequence[str], options: dict[str, Any]) -> int:
    """`operant runs [FOLDER ...]` lists the runs below `runs`, or below the folders, with their verdicts."""
    from operant.tools.cli.runs import runs

    return runs(words, options)


def report(words: Sequence[str], options: dict[str, Any]) -> int:
    """`operant report runs/x` writes report.html again, or with --serve serves it as a live page.

    Several runs, or the folder of a sweep, are compared.
    """
    if not words:
        raise OperantError("expected a run folder: operant report runs/sentiment")
    from operant.tools.report.runs import is_sweep

    if len(words) > 1 or is_sweep(words[0]):
        return _compare(words, options)
    from operant.runs.folder import read_config
    from operant.tools.report.display import print_diagnosis
    from operant.tools.report.run_report import write_report
    from operant.tools.report.server import Serving, serve

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
    from operant.tools.report.compare import write_comparison

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
    from operant.tools.cli.doctor import examine, print_plan

    kinds = {"gpus": int, "gpu": str, "prompt_tokens": int}
    many = {name: convert(options.pop(name), kind, name) for name, kind in kinds.items() if name in options}
    return examine() if recipe is None else print_plan(None if recipe is True else recipe, options, many)


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
            "resume-if-there": {
                "action": "store_true",
                "help": "resume the run in the run folder if there is one, else start it: for jobs that are restarted",
            },
            "fresh-optimizer": {
                "action": "store_true",
                "help": "resume with a new optimizer state, which a light checkpoint requires",
            },
            "help-all": HELP_ALL,
        },
        more=True,
    ),
    "reward-model": Command(
        train,
        "train a reward model from labelled replies: `operant train reward-model`",
        """\
  operant reward-model --trunk runs/sft --tasks labels.jsonl --evaluate held-out.jsonl
  operant reward-model --tasks pairs.jsonl --kind pairwise   prompt, chosen and rejected
  operant train sentiment --reward runs/reward-model         train against it""",
        "",
        {"out": {"metavar": "FOLDER", "help": "the run folder [runs/reward-model]"}, "help-all": HELP_ALL},
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
        declared=["operant.tools.sweep:SweepOptions"],
        more=True,
    ),
    "generate": Command(
        generate,
        "generate replies with trained models, in a terminal or to a file of prompts, and the reward of each",
        """\
  operant generate runs/x                            type prompts, and see replies as they are generated
  operant generate runs/x --versus reference         each reply beside that of the model before training
  operant generate runs/x --prompt "Once upon"       one reply
  operant generate runs/x < prompts.txt              a reply to each line, on one line
  operant generate runs/x --prompt "Once upon" --best-of 8 --reward letters:e
                                                     the reply of eight that the reward likes best
  operant generate runs/x runs/x@120 ./my-model --tasks prompts.jsonl --samples 4 --out replies.jsonl
                                                     replies to compare, also of a checkpoint; the same command goes on
                                                     after an interruption
  operant generate runs/code --tasks problems.jsonl --tests --samples 32 --refine --repair policy --out programs.jsonl
                                                     programs that pass the example tests of their problem""",
        "runs/x ...",
        {
            "tasks": {
                "metavar": "FILE",
                "help": "answer all prompts of this file, or builtin:NAME",
            },
            "form": {
                "metavar": "NAME",
                "help": "the published form of their rows: summarize, translate, ...",
            },
            "out": {"metavar": "FILE", "help": "the .jsonl or .parquet of the replies to the tasks [print them]"},
            "samples": {"metavar": "N", "help": "replies of each model to each task [1]"},
            "temperatures": {"metavar": "VALUES", "help": "several temperatures, as in 0.7,1.0, in place of one"},
            "distinct": {"action": "store_true", "help": "leave out replies that equal another one to the same task"},
            "tests": {
                "action": "store_true",
                "help": "the replies are programs: choose those that pass the tasks' example tests (docs/code.md)",
            },
            "submit": {"metavar": "N", "help": "programs that are chosen for each task [1]"},
            **SEARCH_OPTIONS,
            "all": {"action": "store_true", "help": "write every program with its outcome, one a line"},
            "best-of": {
                "metavar": "N",
                "help": "draw N replies and keep the one with the highest reward [1]",
            },
            "device": {"metavar": "NAME", "help": "where the models answer tasks [auto: a GPU if there is one]"},
            "prompt": {"metavar": "TEXT", "help": "the prompt; without it, each line of standard input is one"},
            "versus": {
                "metavar": "MODEL",
                "help": "answer with this model, too, by the same random numbers: `reference` (what the run measures "
                "its KL to), another run, or a model",
            },
            "reward": {
                "metavar": "VALUE",
                "help": "score each reply: true for the run's reward, or a reward as of `operant train` [true in a "
                "terminal and with --best-of, else false]; in a pipe, the score stands behind a tab",
            },
            "target": {"metavar": "TEXT", "help": "the task's target, for a reward that needs one"},
            "chat": {
                "metavar": "VALUE",
                "help": "give the prompt to the chat template, as a conversation of its own "
                "[as the run's tasks are; without a run, if there is a template; of --tasks: false]",
            },
            "seed": {"metavar": "VALUE", "help": "random seed of the replies [0]"},
        },
        ["operant.sampling:Sampling", "operant.data.tasks:DataOptions"],
        {"max_tokens": REPLY_TOKENS},
        OF_DEMONSTRATIONS,
    ),
    "eval": Command(
        evaluate,
        "compare models on held-out tasks by any rewards: means, differences and win rates with intervals",
        """\
  operant eval runs/x builtin:reviews-lm             by the reward, held-out tasks and sampling of the run
  operant eval runs/a runs/a@120 ./my-model --tasks held-out.jsonl --reward letters:e --reward length:20
  operant eval runs/code runs/code@60 --samples 20 --metrics pass@1,pass@8
  operant eval samples.jsonl --tasks HumanEval.jsonl.gz --metrics pass@1,pass@10
                                                     programs that are there already: {task_id, completion} a line
  operant eval runs/code runs/code@60 --samples 8 --tests --refine --repair policy
                                                     the programs that they hand in after a search
  operant eval runs/a runs/b --tasks held-out.jsonl --report page.html --label judge.jsonl
                                                     replies side by side, and rows for people to judge

All models answer by the same random numbers, and with the sampling of the first run unless options say otherwise. The
first model is the one that the others are compared with.""",
        "MODEL ...",
        {
            "tasks": {"metavar": "FILE", "help": "a file or builtin:NAME [the held-out tasks of the first run]"},
            "form": {"metavar": "NAME", "help": "the published form of their rows: summarize, translate, ..."},
            "reward": {
                "action": "append",
                "metavar": "REWARD",
                "help": "a reward as of `operant train`, or true for that of the first run; may be given several times "
                "[true]",
            },
            "samples": {"metavar": "N", "help": "replies of each model to each task [1]"},
            "tests": {
                "action": "store_true",
                "help": "the replies are programs: each model hands in one of N, chosen by the tasks' example tests",
            },
            **SEARCH_OPTIONS,
            "metrics": {
                "metavar": "NAMES",
                "help": "of programs with tests: pass@k and n@k, as in pass@1,pass@8,1@8; then rewards only if named",
            },
            "beams": {
                "metavar": "N",
                "help": "search for the replies with N beams [as the first run did, else 1]",
            },
            "length-penalty": {"metavar": "X", "help": "of beam search: above 1 prefers long replies [1]"},
            "out": {"metavar": "FILE", "help": "write scores and replies as .json"},
            "report": {"metavar": "FILE", "help": "write a page with the replies side by side, an .html file"},
            "label": {"metavar": "FILE", "help": "write the replies as rows for people to judge, a .jsonl file"},
            "chat": {"metavar": "VALUE", "help": "give prompts that are text to the chat template [false]"},
            "seed": {"metavar": "VALUE", "help": "random seed [that of the first run, else 0]"},
            "device": {"metavar": "NAME", "help": "where the models answer [auto: a GPU if there is one]"},
        },
        ["operant.sampling:Sampling", "operant.data.tasks:DataOptions"],
        without=OF_DEMONSTRATIONS,
    ),
    "prompt": Command(
        prompt,
        "show the prompt that a run has written, search for one without training, or try it with other models",
        """\
  operant prompt show runs/prompt                    the best prompt, ready to paste, and what it is compared with
  operant prompt search --tasks sst-2/16-100/ --task-model ./gpt2 --baselines none,manual,halving --calls 50000
  operant prompt transfer runs/prompt --task-model ./gpt2,./roberta

Texts are a folder with train.tsv and test.tsv, or a file; docs/prompts.md explains all.""",
        "show|search|transfer [RUN]",
        {
            "json": {"action": "store_true", "help": "of show: everything that is known, for a program"},
            "tasks": {"metavar": "FOLDER", "help": "labelled texts [of transfer: the held-out texts of the run]"},
            "evaluate": {"metavar": "FILE", "help": "of search: held-out texts [test.tsv of the folder]"},
            "task-model": {
                "metavar": "MODEL",
                "help": "the frozen model that answers; of transfer, several with commas",
            },
            "baselines": {
                "metavar": "NAMES",
                "help": "of search: none, manual, random, halving, greedy, in-context, head; all but head also with "
                "+mean or +contextual [all]",
            },
            "calls": {"metavar": "N", "help": "prompts times texts that each search may cost [10000]"},
            "length": {"metavar": "N", "help": "tokens of a searched prompt [5]"},
            "seeds": {"metavar": "N", "help": "random numbers: each search runs with so many seeds [1]"},
            "manual": {
                "action": "append",
                "metavar": "TEXT",
                "help": "a prompt of your own; may be given several times",
            },
            "vocabulary": {"metavar": "MODEL", "help": "search over the tokens of this model [the task model]"},
            "measure": {
                "metavar": "NAME",
                "help": "what a prompt is chosen by: gap, accuracy, likelihood, margin [gap]",
            },
            "calibrate": {"metavar": "NAME", "help": "none, mean or contextual [none]"},
            "words": {"metavar": "LIST", "help": "the words of the classes, with commas [of a published set: its own]"},
            "template": {
                "metavar": "TEXT",
                "help": "with {sentence}, {prompt} and, for a masked model, {mask} [of transfer: the run's for "
                "its own task model, the published one for others]",
            },
            "best": {"metavar": "N", "help": "of transfer: so many prompts of the run [3]"},
            "out": {"metavar": "FILE", "help": "of search: write the rows as .json"},
            "device": {"metavar": "NAME", "help": "where the model answers [cpu]"},
        },
    ),
    "play": Command(
        play,
        "play the games of a world, or let simple players and models play them side by side",
        """\
  operant play rooms                                 play a game yourself: ? lists the commands, quit leaves
  operant play rooms --player random --player runs/x a table: wins, scores and turns over 20 unseen games
  operant play rooms --player runs/x --transcript 1  the first game, turn by turn
  operant play rooms --player walkthrough --split train --games 200 --record demos.jsonl
                                                     demonstrations for `operant train sft --tasks demos.jsonl`

Options of the world are written as for `operant train`: --env.memory 3. A run plays with its own, where it was trained
in this world. Those of sampling apply to models: --sampling.top-k 1 is greedy.""",
        "WORLD",
        {
            "player": {
                "action": "append",
                "metavar": "PLAYER",
                "help": "human, random, walkthrough, overlap, or a run folder or model; may be given several times "
                "[human]",
            },
            "games": {"metavar": "N", "help": "games of each player [20; 1 if a person plays]"},
            "split": {"metavar": "SPLIT", "help": "test: games that are never trained on; or train [test]"},
            "transcript": {"metavar": "N", "help": "print the first N games of each player [0]"},
            "record": {"metavar": "FILE", "help": "write each turn as a row with prompt and completion, for sft"},
            "only-won": {"action": "store_true", "help": "record only the games that were won"},
            "seed": {"metavar": "VALUE", "help": "random seed of players and models [0]"},
        },
        more=True,
    ),
    "label": Command(
        label,
        "let people compare or rate replies on a local page; export their labels",
        """\
  operant label replies.jsonl                        which reply is best? the page opens in the browser
  operant label replies.jsonl --kind rank            put them in order; rate: 1 to 5; good: good or bad
  operant label replies.labels.sqlite --agreement    how far labellers agree
  operant label replies.labels.sqlite --export pairs.jsonl
                                                     prompt, chosen and rejected, for training

A row of the file has `prompt` and `replies`, or `prompt` and `reply`, or `prompt`, `chosen` and `rejected`. Labels are
stored in a database beside the file, so the same command continues. docs/rlhf.md explains all.""",
        "replies.jsonl",
        {
            "kind": {"metavar": "KIND", "help": "pick (the best one), rank, rate or good [pick]"},
            "database": {"metavar": "FILE", "help": "where labels are stored [replies.labels.sqlite]"},
            "overlap": {"metavar": "N", "help": "how many people label each prompt [2]"},
            "gold": {"metavar": "FILE", "help": "prompts with known answers, mixed in to see who is careful"},
            "host": {"metavar": "VALUE", "help": "the address to listen on [127.0.0.1: this machine alone]"},
            "port": {"metavar": "VALUE", "help": "the port; 0: that of last time, or any free one [0]"},
            "open": {"action": "store_true", "help": "open the browser [in a terminal]"},
            "no-open": {"action": "store_true", "help": "do not open the browser"},
            "agreement": {"action": "store_true", "help": "print how far labellers agree"},
            "wins": {"action": "store_true", "help": "print how often each model is preferred to the first one"},
            "export": {"metavar": "FILE", "help": "write the labels as JSON lines"},
            "form": {"metavar": "FORM", "help": "of --export: pairs, ranked, ratings or good [as the kind suggests]"},
            "skips": {"action": "store_true", "help": "export skips, too"},
        },
    ),
    "runs": Command(
        runs,
        "list the runs, newest first, each with its state, its reward before and after, and its verdict",
        """\
  operant runs                                       the runs below ./runs
  operant runs runs/letters-sweep ../other/runs      those below other folders
  operant runs --json                                the same for a program""",
        "[FOLDER ...]",
        {"json": {"action": "store_true", "help": "print a list of objects"}},
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
        ["operant.tools.report.server:Serving"],
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
  operant doctor --plan RECIPE --batch 64            the memory of a run, estimated without loading its model
  operant doctor --plan --gpus 8 --gpu h200 --policy config.json --model.precision bfloat16
                                                     that of each of 8 GPUs, from the model's config alone""",
        options={
            "plan": {"nargs": "?", "const": True, "metavar": "RECIPE", "help": "the recipe, YAML file or run folder"},
            "gpus": {"metavar": "N", "help": "plan for so many ranks, each with a GPU, that need not be here"},
            "gpu": {"metavar": "NAME", "help": "the kind of GPU: a100-40, a100-80, h100, h200, l40s, mi300x, ..."},
            "prompt-tokens": {"metavar": "N", "help": "the longest prompt, in the place of tasks and reward [256]"},
        },
        more=True,
    ),
}
