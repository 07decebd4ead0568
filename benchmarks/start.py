"""Seconds that a person waits at the start of a command, each in a process of its own: `python -m benchmarks.start`.

- the floor of a run: torch, and GPT-2 from transformers, imported by a bare Python;
- `import operant`, `operant --help`, and `operant runs` in a folder of 100 finished runs;
- `operant train sentiment`: until its first line, and until its first step, before which 256 held-out tasks are
  answered;
- the page of a run of 2,000 steps in Chromium: opened, searched, and scrolled to its end, with the longest frame.

Rounds in turn on a machine that does nothing else; medians. Writes `benchmarks/results/start.json`; `make docs` writes
the table of docs/fast.md.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import operant
from benchmarks.report import machine

RESULTS = Path(__file__).parent / "results/start.json"
OPERANT = [sys.executable, "-m", "operant"]
FLOOR = "import torch, transformers.models.gpt2.modeling_gpt2"
WAITS: dict[str, tuple[list[str], str]] = {
    "torch and GPT-2 alone": ([sys.executable, "-c", FLOOR], ""),
    "`import operant`": ([sys.executable, "-c", "import operant"], ""),
    "`operant --help`": ([*OPERANT, "--help"], ""),
    "`operant runs`, 100 runs": ([*OPERANT, "runs", "runs"], ""),
    "`operant train sentiment`, first line": ([*OPERANT, "train", "sentiment"], "ppo trains"),
    "`operant train sentiment`, first step": ([*OPERANT, "train", "sentiment"], "step 1/"),
}
"""By name: a command, and the beginning of the line that is waited for; empty: its end."""


def seconds(command: list[str], until: str, place: Path, env: dict[str, str]) -> float:
    """Until a line of the output has the text, or the command has ended."""
    begin, said = time.perf_counter(), ""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=place, env=env, **pipes) as process:
        while (line := process.stdout.readline()) and not (until and until in line):
            said += line
        taken = time.perf_counter() - begin
        if line:
            process.kill()
    if not line and (until or process.returncode):
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: {said}")
    shutil.rmtree(place / "runs/sentiment", ignore_errors=True)
    return taken


FRAMES = """async () => {
    let longest = 0, last = await new Promise(requestAnimationFrame)
    while (scrollY + innerHeight < document.documentElement.scrollHeight - 1) {
        scrollBy(0, 200)
        const now = await new Promise(requestAnimationFrame)
        longest = Math.max(longest, now - last)
        last = now
    }
    return longest / 1000
}"""


def waits_of_a_page(place: Path, steps: int, rounds: int, env: dict[str, str]) -> dict[str, list[float]]:
    """Seconds of what a reader does with the page of a run."""
    from playwright.sync_api import sync_playwright

    from benchmarks.screenshot import chromium

    words = f"train arithmetic --steps {steps} --batch 8 --update.minibatch 8 --samples 8 --data.limit 64"
    for command in ([*words.split(), "--evaluate", "none", "--out", "runs/long"], ["report", "runs/long"]):
        subprocess.run([*OPERANT, *command], cwd=place, check=True, env=env)
    report = next((place / "runs/long").glob("*.html"))
    names = ("opened", "searched", "scrolled, longest frame")
    opened, searched, frame = found = ([], [], [])
    with sync_playwright() as playwright:
        browser = chromium(playwright)
        for _ in range(rounds):
            page = browser.new_page(viewport={"width": 1200, "height": 900})
            begin = time.perf_counter()
            page.goto(report.as_uri())
            page.wait_for_selector(".verdict")
            opened.append(time.perf_counter() - begin)
            frame.append(page.evaluate(FRAMES))
            page.get_by_role("tab", name="All replies").click()
            page.wait_for_selector(".replies .line")
            count, begin = page.locator(".replies .summary").inner_text(), time.perf_counter()
            page.get_by_role("searchbox").first.fill("7")
            page.wait_for_function("old => document.querySelector('.replies .summary').innerText !== old", arg=count)
            searched.append(time.perf_counter() - begin)
            page.close()
    return {f"page of {steps:,} steps, {name}": x for name, x in zip(names, found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=2000, help="of the run whose page is read")
    parser.add_argument("--beside", type=Path, help="a checkout of an earlier commit: all but its page, in turn")
    given = parser.parse_args()
    versions = {"seconds": Path(operant.__file__).parents[1]}
    if given.beside:
        versions["before"] = given.beside.resolve() / "src"
    found = {version: {name: list[float]() for name in WAITS} for version in versions}
    with ExitStack() as stack:
        sides = []
        for version, source in versions.items():
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            sides.append((found[version], place, env := os.environ | {"PYTHONPATH": str(source)}))
            once = [*OPERANT, "train", "letters", "--steps", "2", "--out", "runs/0"]
            subprocess.run(once, cwd=place, check=True, capture_output=True, env=env)
            no_models = shutil.ignore_patterns("checkpoints", "export")
            for i in range(1, given.runs):
                shutil.copytree(place / "runs/0", place / f"runs/{i}", ignore=no_models)
        for _, (name, (command, until)), (waits, place, env) in product(range(given.rounds), WAITS.items(), sides):
            waits[name].append(seconds(command, until, place, env))
            print(f"{waits[name][-1]:6.2f} s  {name}", flush=True)
        waits, place, env = sides[0]
        waits |= waits_of_a_page(place, given.steps, given.rounds, env)

    def spread(seconds: list[float]) -> list[float]:
        return [statistics.median(seconds), min(seconds), max(seconds)]

    rows = [{"wait": name} | {v: spread(x[name]) for v, x in found.items() if name in x} for name in found["seconds"]]
    results = {"command": "python -m benchmarks.start", "machine": machine(), "rounds": given.rounds, "rows": rows}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
