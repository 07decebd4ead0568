"""The package as a stranger gets it: `make wheel` builds wheel and sdist, checks them, installs and starts them.

    python -m benchmarks.wheel dist                     # builds and checks; needs build and twine
    python -m benchmarks.wheel dist --install           # then installs; writes results/wheel.json
    python -m benchmarks.wheel dist --install --extras lora,vader

The wheel goes into an empty environment first. Each extra then gets an environment of its own, and so does an
installation from git (the last commit): these see the packages of the first one (a .pth file), but for operant, so that
torch is installed once. Whatever an extra's list lacks is still missing there. Every environment must pass `pip check`,
print its version, train a step, and use what the extra is for.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = 20e6
"""Bytes of the larger of the two files."""
TORCH = "torch==2.13.0"
STEP = "train letters --steps 1 --batch 8 --probes 0"
PAGE = ("page.html", "*.js", "*.css", "vendor/LICENSE")
NEEDED = {
    "keywords.pyi",
    "builtin/*.yaml",
    "builtin/openings.txt",
    "builtin/*/model.safetensors",
    "builtin/*/tokenizer.json",
}
NEEDED |= {"tools/report/diagnosis/*.toml", "tools/labels/*.sql", "runs/trackers/chart.html", "runs/trackers/curve.svg"}
NEEDED |= {f"tools/{page}/page/{name}" for page in ("report", "labels") for name in PAGE}
"""Files under src/operant/ that are no Python, some of each. The wheel must have every file of that folder."""
USES = {
    "": STEP,
    "hub": "-c import datasets, huggingface_hub",
    "lora": f"{STEP} --lora.rank 4",
    "quantise": "-c import bitsandbytes, peft",
    "vader": f"{STEP} --reward vader",
    "metrics": f"{STEP} --tasks data.jsonl --evaluate data.jsonl --evaluation.metrics chrf,rouge "
    "--data.reference-field good",
    "textworld": "-c import jericho, textworld",
    "gem": "-c from operant.apps.games.gem import package; package()",
    "gymnasium": "-c import gymnasium; from operant.apps.games.gymnasium import Gymnasium",
    "openenv": "-c from operant.apps.games.openenv import package; package()",
    "scienceworld": "-c from operant.apps.games.scienceworld import package; package()",
    "textarena": "-c from operant.apps.games.textarena import package; package()",
    "maths": "-c import math_verify",
    "migrate": "migrate old.py",
    "ray": "-c import ray",
    "reasoning": "-c import reasoning_gym",
    "verifiers": "-c import verifiers.v1",
    "trl": "-c from operant.compat.trl import PPOConfig, PPOTrainer",
    "label": "-c import starlette, uvicorn; from operant.tools.labels.server import LabelServer",
    "tensorboard": f"{STEP} --trackers tensorboard",
    "wandb": f"{STEP} --trackers wandb",
    "trackio": f"{STEP} --trackers trackio",
    "trackers": f"{STEP} --trackers tensorboard,wandb,trackio",
    "dev": "-c import hypothesis, pdoc, playwright, pytest, xdist",
}
"""Extra -> the arguments of `operant`, or of Python, that need it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dist", type=Path, help="the folder for wheel and sdist")
    parser.add_argument("--install", action="store_true", help="install into empty environments (network, minutes)")
    parser.add_argument("--extras", help="only these, separated by commas; no results written")
    args = parser.parse_args()
    wheel, sdist = build(ROOT, args.dist.resolve(), "--sdist", "--wheel")
    rows = [{"what": file.name, "mb": round(file.stat().st_size / 1e6, 1)} for file in (wheel, sdist)]
    check(wheel, sdist)
    if args.install:
        extras = args.extras.split(",") if args.extras else [extra for extra in USES if extra]
        rows += installed(wheel, extras)
    if args.install and not args.extras:
        result = {"command": "make wheel ARGS=--install", "python": sys.version.split()[0], "rows": rows}
        (ROOT / "benchmarks/results/wheel.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("wheel and sdist are in order")


def build(source: Path, out: Path, *kinds: str) -> list[Path]:
    """Build a tree; returns the files, the wheel first. The wheel is that of the tree itself, not of its sdist."""
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, "-m", "build", *kinds, "--outdir", out, source)
    return sorted(out.iterdir(), key=lambda path: path.suffix != ".whl")


def check(wheel: Path, sdist: Path) -> None:
    """Raises: SystemExit for files that are too large or incomplete, metadata that PyPI refuses, wheels that differ."""
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    files = contents(wheel)
    names = set(files)
    for file in (wheel, sdist):
        expect(file.stat().st_size <= MOST, f"{file.name} has {file.stat().st_size / 1e6:.1f} MB")
    package = ROOT / "src/operant"
    expect(all(any(package.glob(pattern)) for pattern in NEEDED), f"the tree lacks one of {sorted(NEEDED)}")
    paths = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    lacking = {f"operant/{path.relative_to(package).as_posix()}" for path in paths} - names
    expect(not lacking, f"the wheel lacks {sorted(lacking)}")
    strangers = [n for n in names if not n.startswith("operant/") and ".dist-info/" not in n]
    expect(not strangers, f"the wheel has files beside the package: {strangers}")
    metadata = next(text for name, text in files.items() if name.endswith("/METADATA")).decode()
    page = HeaderParser().parsestr(metadata).get_payload()
    relative = [link for link in re.findall(r"\]\(([^)\s]+)\)", page) if not link.startswith(("http", "#"))]
    expect(not relative, f"links that PyPI cannot follow: {relative}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        [again] = build(next(Path(folder).iterdir()), Path(folder) / "dist", "--wheel")
        others = contents(again)
    differ = {name for name in names | set(others) if files.get(name) != others.get(name)}
    expect(not differ, f"the sdist builds another wheel than the tree: {sorted(differ)}")


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def installed(wheel: Path, extras: list[str]) -> list[dict]:
    """Install the wheel alone, with each extra, and from git; returns the seconds of each."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    expect(set(known) == set(USES) - {""}, f"USES does not name the extras of pyproject.toml: {set(known) ^ set(USES)}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        rows.append(start(base, "", str(wheel), first=TORCH))
        run(base / "bin/python", "-m", "pip", "uninstall", "-q", "-y", "operant")
        for extra in extras:
            rows.append(start(Path(folder) / extra, extra, f"operant[{extra}] @ {wheel.as_uri()}", below=base))
            shutil.rmtree(Path(folder) / extra)
        rows.append(start(Path(folder) / "git", "", f"git+{ROOT.as_uri()}", below=base))
    return rows


def start(where: Path, extra: str, what: str, *, first: str | None = None, below: Path | None = None) -> dict:
    """Make an environment, install `what` in it, and use it.

    first: what is installed before. below: an environment whose packages are seen.
    """
    began = time.perf_counter()
    run(sys.executable, "-m", "venv", where)
    python, operant = where / "bin/python", where / "bin/operant"
    if below is not None:
        site = next(where.glob("lib/python*/site-packages"))
        (site / "below.pth").write_text(f"{next(below.glob('lib/python*/site-packages'))}\n", encoding="utf-8")
    if first is not None:
        run(python, "-m", "pip", "install", "-q", first)
    run(python, "-m", "pip", "install", "-q", what)
    run(python, "-m", "pip", "check")
    seconds = time.perf_counter() - began
    rows = [{"prompt": f"film {i} was", "good": "very good"} for i in range(8)]
    (where / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (where / "old.py").write_text("from trl import PPOConfig\n\nconfig = PPOConfig(batch_size=8)\n", encoding="utf-8")
    expect(run(operant, "--version", cwd=where).startswith("operant "), "operant --version")
    expect(
        "/src/operant" not in run(python, "-c", "import operant; print(operant.__file__)", cwd=where), "not the wheel"
    )
    words = USES[extra].split(" ", 1)
    if words[0] == "-c":
        run(python, *words, cwd=where)
        run(operant, *STEP.split(), cwd=where)
    else:
        run(operant, *" ".join(words).split(), cwd=where)
    row = {"what": "git" if what.startswith("git+") else Path(what.split(" @ ")[0]).name, "install_s": round(seconds)}
    row["all_s"] = round(time.perf_counter() - began)
    print(row, flush=True)
    return row


def run(*command: object, cwd: Path | None = None) -> str:
    """Run a command; returns what it printed. Raises: SystemExit with its output if it fails."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    expect(done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return done.stdout


def expect(true: bool, otherwise: str) -> None:
    if not true:
        raise SystemExit(f"make wheel: {otherwise}")


if __name__ == "__main__":
    main()
