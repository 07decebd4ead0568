"""The command line: `operant train sentiment`, `operant generate runs/sentiment`, `operant doctor`.

Nothing heavy is imported before it is known that a command needs it, so `operant --help` answers at once. A mistake of
the user's is one sentence on standard error and exit code 2, never a traceback.
"""

import difflib
import os
import sys
from collections.abc import Sequence

USAGE = """operant trains transformer language models with reinforcement learning.

  operant train RECIPE [--option value ...]   run a recipe: {recipes}; or a YAML file of your own
  operant train --resume runs/x               go on with an interrupted run
  operant sweep RECIPE --option 1,2,3         a run for each value, resumable; several options make a grid
  operant generate runs/x                     talk to the result
  operant report runs/x                       write the report of a run anew
  operant report runs/x --serve               the same page live, with every reply
  operant report runs/a runs/b ...            compare runs: curves, reward against KL, replies side by side
  operant replay runs/x/refused/step-00012    make a refused step again: which number was NaN, in which reply
  operant doctor                              versions, devices, extras, and a self-test
  operant doctor --plan RECIPE                the memory that a run would take, before anything is loaded

`operant train --help` lists every option. Options are written --kl.coef 0.1, or --coef 0.1 where that is unambiguous.
"""
COMMANDS = ("train", "sweep", "generate", "report", "replay", "doctor")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(USAGE.format(recipes=", ".join(_recipes())), end="")
        return 0
    if given[0] in ("-V", "--version"):
        from operant import __version__

        print(f"operant {__version__}")
        return 0
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from operant.types import OperantError

    try:
        return _command(given[0])(given[1:])
    except OperantError as error:
        from operant.trackers.console import plain

        print(f"operant: {plain(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("operant: stopped at once; the last checkpoint is whole", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # of a path that was typed: too long, a loop of links, not to be read
        print(f"operant: {(error.strerror or str(error)).lower()}: {str(error.filename)[:100]!r}", file=sys.stderr)
        return 2


def _recipes() -> list[str]:
    from pathlib import Path

    return sorted(p.stem for p in (Path(__file__).parents[1] / "builtin").glob("*.yaml"))


def _command(name: str):
    from operant.types import OperantError

    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]!r}?" if near else "`operant --help` lists them"
        raise OperantError(f"command {name!r} is unknown; {hint}")
    from operant.cli import commands

    return getattr(commands, name)


if __name__ == "__main__":
    sys.exit(main())
