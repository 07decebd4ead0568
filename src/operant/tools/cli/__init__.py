"""The command line: `operant train sentiment`, `operant generate runs/sentiment`, `operant doctor`.

Heavy packages are imported only when a command needs them, so `operant --help` prints immediately. A user's mistake
gives one sentence on standard error and exit code 2, never a traceback.
"""

import os
import sys
import time
import warnings
from collections.abc import Sequence
from io import TextIOWrapper

ALONE = 5.0
"""Seconds after which another rank than the first says what it has met before the ranks know each other."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        from operant.tools.cli.commands import print_help

        print_help()
        return 0
    if words[0] in ("-V", "--version"):
        from operant import __version__

        print(f"operant {__version__}")
        return 0
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from operant.runs.trackers.console import plain
    from operant.types import HeardError, OperantError

    if isinstance(sys.stdout, TextIOWrapper):  # a path may have letters that the terminal lacks
        sys.stdout.reconfigure(errors="replace")
    show = warnings.showwarning

    def as_sentence(message: Warning | str, category: type[Warning], *place: object) -> None:
        """A warning of operant without the line of code that gave it; other packages' are shown as they are."""
        if category is UserWarning:
            print(f"operant: warning: {plain(str(message))}", file=sys.stderr)
        else:
            show(message, category, *place)  # pyright: ignore[reportArgumentType]

    warnings.showwarning = as_sentence
    try:
        from operant.tools.cli import commands

        return commands.run(words[0], words[1:])
    except HeardError:  # another rank prints it, and torchrun ends that one as soon as this one has ended
        time.sleep(1)
        return 2
    except OperantError as error:
        number, which, ranks = os.environ.get("RANK", "0"), "", sys.modules.get("operant.distributed")
        # Before the ranks have met, rank 0 most likely says the same, and torchrun then ends this process.
        if number != "0" and not (ranks and ranks.met):
            time.sleep(ALONE)
            which = f"rank {number}: "
        print(f"operant: {which}{plain(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if words[0] == "train":
            print("operant: interrupted; checkpoints that were already written are complete", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a path from the command line that is too long, unreadable or a loop of links
        where = "" if error.filename is None else f": {str(error.filename)[:100]!r}"
        print(f"operant: {(error.strerror or str(error)).lower()}{where}", file=sys.stderr)
        return 2
    finally:
        warnings.showwarning = show
