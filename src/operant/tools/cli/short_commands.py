"""The commands that need few lines here: sweep, report, replay, doctor, serve, migrate, new.

Each imports what it needs when it is called.
"""

import builtins
import difflib
import keyword
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from operant import types
from operant.options import compose, convert, defaults
from operant.runs.trackers.console import emit
from operant.storage import atomic_io
from operant.tools.cli.arguments import Options, refuse
from operant.types import OperantError, require

TRAINS_WITH = {
    "reward": "operant train letters --reward {name}.py:{name}",
    "world": "operant train --env {name}.py:{world} --tasks builtin:openings/train --steps 3 --max-tokens 6",
    "method": "operant train letters --algorithm {name}.py:{name}",
}
"""Kind: the command that trains with such a part. The files of a kind are `starters/KIND.txt` and `test_KIND.txt`."""


def sweep(words: Sequence[str], options: Options) -> int:
    """`operant sweep RECIPE --option 1,2,3 ...` makes one run per combination of values."""
    if len(words) > 1:
        raise OperantError(f"unexpected argument {words[-1]!r}: operant sweep RECIPE --option 1,2,3")
    how = "name a recipe and give an option several values: operant sweep letters --kl.coef 0,0.1,0.5 --seed 1,2,3"
    require(words or options, f"nothing to sweep: {how}")
    from operant.tools import sweep as sweeps

    own = {name: options.pop(name) for name in defaults(sweeps.SweepOptions) if name in options}
    return sweeps.sweep(options, words[0] if words else None, compose({"": sweeps.SweepOptions}, own)[""])


def report(words: Sequence[str], options: Options) -> int:
    """`operant report runs/x` writes report.html again, or with --serve serves it as a live page.

    Several runs, or the folder of a sweep, are compared.
    """
    require(words, "expected a run folder: operant report runs/sentiment")
    from operant.tools.report.runs import is_sweep

    if len(words) > 1 or is_sweep(words[0]):
        from operant.tools.report.compare import write_comparison

        out = options.pop("out", None)
        refuse(options, options, " is for one run: a comparison of several takes only --out FILE")
        path = write_comparison(words, out, say=lambda text: print(f"{text}\n"))
        print(f"comparison: {path}")
        return 0
    from operant.runs.folder import read_config
    from operant.tools.report.display import print_diagnosis
    from operant.tools.report.run_report import write_report
    from operant.tools.report.server import Serving, serve

    refuse(options, ["out"], f" is for a comparison; the report of one run is {words[0]}/report.html")
    serving = compose({"": Serving}, options)[""]
    if not serving.serve:
        refuse(options, options, f" applies only with --serve: operant report {words[0]} --serve ...")
    read_config(words[0])
    if serving.serve:
        return serve(words[0], serving)
    path = write_report(words[0])
    print_diagnosis(Path(words[0]))
    print(f"report: {path}")
    return 0


def replay(words: Sequence[str], options: Options) -> int:
    """`operant replay runs/x/refused/step-00012` repeats a refused step and locates its first NaN or infinity."""
    if len(words) != 1 or options:
        raise OperantError("expected the folder of one refused step: operant replay runs/sentiment/refused/step-00012")
    from operant.runs.replay import print_replay

    return 0 if print_replay(words[0]) else 1


def doctor(words: Sequence[str], options: Options) -> int:
    """`operant doctor` examines this machine; with --plan it prints the memory that a run would take."""
    recipe = options.pop("plan", None)
    if words or (recipe is None and options):
        raise OperantError("`operant doctor` takes no argument except --plan: operant doctor --plan sentiment")
    from operant.tools.cli.doctor import examine, print_plan

    kinds = {"gpus": int, "gpu": str, "prompt_tokens": int}
    many = {name: convert(options.pop(name), kind, name) for name, kind in kinds.items() if name in options}
    return examine() if recipe is None else print_plan(None if recipe is True else recipe, options, many)


def serve(words: Sequence[str], options: Options) -> int:
    """Serve a run or a model until Ctrl-C."""
    require(len(words) == 1, "expected a run folder or model: operant serve runs/sentiment")
    from operant.apps.agents.server import ModelServer, ServerOptions
    from operant.net.listening import is_local
    from operant.runs.named_models import load
    from operant.training.options import find_device

    device, name = find_device(options.pop("device", "auto")), options.pop("name", words[0])
    serving = compose({"": ServerOptions}, options)[""]
    policy, engine = load(words[0])
    with ModelServer(policy.to(device), engine, name, serving) as server:
        key = f"with the key of {serving.key_variable}" if os.environ.get(serving.key_variable) else "without a key"
        print(f"{server.url} serves {name} by the OpenAI protocol, {key}; press Ctrl-C to end", flush=True)
        if not is_local(serving.host):
            print("it is not encrypted: use a network you trust, or a proxy with TLS before it", flush=True)
        try:
            server.run()
        except KeyboardInterrupt:
            print()
    return 0


def migrate(words: Sequence[str], options: Options) -> int:
    """`operant migrate FILE [--write]` prints a unified diff, or the recipe of a YAML file."""
    require(len(words) == 1, "give one file, as in operant migrate train.py: a Python script, or an RL4LMs .yml")
    path = Path(words[0])
    try:
        old = path.read_bytes().decode("utf-8-sig")  # Python reads a script with a byte-order mark, too
    except (OSError, UnicodeDecodeError) as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else f"it cannot be read: {error}"
        raise OperantError(f"{path}: {why}; give a Python script, or an RL4LMs .yml") from error
    from operant.tools.migrate import migrated

    new, recipe = migrated(old, path), path.suffix != ".py"
    if options.pop("write", False):
        target = path.with_name(f"{path.stem}.operant.yaml") if recipe else path
        require(not (recipe and target.exists()), f"{target} exists: move it away, or print the recipe without --write")
        atomic_io.write(target, new)
        print(f"wrote {target}")
        return 0
    lines = new.splitlines()
    changes = difflib.unified_diff(old.splitlines(), lines, str(path), str(path), lineterm="")
    for line in lines if recipe else changes:
        emit(line)
    return 0


def new(words: Sequence[str], options: Options) -> int:
    """`operant new reward short_reply` writes `short_reply.py` and `test_short_reply.py` into the working directory."""
    if len(words) != 2 or words[0] not in TRAINS_WITH:
        kinds = ", ".join(TRAINS_WITH)
        raise OperantError(f"give a kind ({kinds}) and a name, as in operant new reward short_reply; got {words}")
    kind, name = words
    if not name.isidentifier() or keyword.iskeyword(name) or not name.islower():
        raise OperantError(f"{name!r} cannot be a module: use small letters, digits and _, as in short_reply")
    world = "".join(word.capitalize() for word in name.split("_"))
    files = {Path(f"{name}.py"): f"{kind}.txt", Path(f"test_{name}.py"): f"test_{kind}.txt"}
    for path in files:
        require(not path.exists(), f"{path} exists: choose another name, or move it away")
    known = name in sys.modules or find_spec(name) is not None
    if known or hasattr(builtins, name) or (kind == "world" and hasattr(types, world)):
        raise OperantError(f"{name!r} is taken: Python, operant or an installed package has that name; choose another")
    for path, starter in files.items():
        text = (Path(__file__).parent / "starters" / starter).read_text(encoding="utf-8")
        atomic_io.write(path, text.replace("NAME", name).replace("CLASS", world))
    emit(f"wrote {name}.py and test_{name}.py\n  test   python -m pytest test_{name}.py")
    emit(f"  train  {TRAINS_WITH[kind].format(name=name, world=world)}")
    return 0
