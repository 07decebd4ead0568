"""Every script of recipes/ and benchmarks/ runs in a copy of the two folders, with the smallest settings.

Scripts that other tests run are listed with the test, so that a new script has to be added to one of the two tables.
"""

import gzip
import json
import os
import random
import runpy
import shlex
import shutil
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from processes import Child, Forked
from rigs import fork_server
from texts import parts

ROOT = Path(__file__).parents[1]
RUN, ELSEWHERE, AFTER = (
    {words[0]: words[1:] for line in text.splitlines() if (words := shlex.split(line, comments=True))}
    for text in parts("scripts.txt").values()
)
"""Script: its arguments; the test, page or script that runs it; those whose files it reads."""


def scripts() -> set[str]:
    found = [*ROOT.glob("recipes/*.py"), *ROOT.glob("benchmarks/*.py")]
    return {str(path.relative_to(ROOT)) for path in found if path.name != "__init__.py"}


def test_every_script_is_run_by_some_test():
    assert scripts() == set(RUN) | set(ELSEWHERE) and not set(RUN) & set(ELSEWHERE)
    assert all((ROOT / place).exists() for (place,) in ELSEWHERE.values())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A copy of the folders, and a few invented reviews and pairs of sentences."""
    place = tmp_path_factory.mktemp("scripts")
    for name in ("benchmarks", "recipes", "tests", "docs"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__", "checkpoints"))
    words = "a film that was great or terrible and the story is a boring but moving account of love".split()
    chance = random.Random(0)
    (place / "reviews/sst-2/16-13").mkdir(parents=True)
    (place / "reviews/yelp_rlprompt/clean").mkdir(parents=True)

    def said(count=8):
        return " ".join(chance.choices(words, k=count))

    def put(name, lines):
        with gzip.open(place / "reviews" / name, "wt", encoding="utf-8") as file:
            file.writelines((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)

    for split in ("train", "test"):
        put(f"imdb_{split}.jsonl.gz", [{"text": said(40 + i % 30), "label": i % 2} for i in range(80)])
        put(f"sst2_{split}.jsonl.gz", [{"text": said(), "label": i % 2} for i in range(300)])
        papers = [{"title": "A film", "source": [said() for _ in "abc"], "target": [said()]} for _ in range(8)]
        put(f"scitldr_a_{split}.jsonl.gz", papers)
    put("dialogues.jsonl.gz", [{"topic": 1 + i % 10, "turns": [" ".join(words[:4])] * 3} for i in range(60)])
    rows = ["sentence\tlabel", *(f"{said()}\t{i % 2}" for i in range(32))]
    (place / "reviews/sst-2/16-13/train.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    put("sst-2/test.tsv.gz", rows)
    for split, label in product(("dev", "test"), (0, 1)):
        put(f"yelp_rlprompt/clean/sentiment.{split}.{label}.clean.gz", [said() for _ in range(40)])
    for split, language in product(("train", "val", "test_2016_flickr"), ("de", "en")):
        put(f"{split}.{language}.gz", [said() for _ in range(80)])
    return place


def python(words: list[str]) -> None:
    sys.argv = words[words[0] == "-m" :]
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(words[0]).parent.resolve())
        runpy.run_path(words[0], run_name="__main__")


def started(run, command, *, cwd=None, env=None, stdout=None, check=False, **more):
    """In place of `subprocess.run`: what Python would have to import first is forked, and has imported it."""
    words = [str(word) for word in command]
    if words[0] != sys.executable or more or stdout == subprocess.PIPE:
        return run(command, cwd=cwd, env=env, stdout=stdout, check=check, **more)

    def work() -> None:
        os.environ |= env or {}
        os.chdir(cwd or ".")
        python(words[1:])

    code = Child(work).ends(300)
    if check and code:
        raise subprocess.CalledProcessError(code, words)
    return subprocess.CompletedProcess(words, code)


def script(words: list[str], place: Path, log: Path) -> None:
    with log.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    os.chdir(place)
    sys.path[:] = [str(place), *(path for path in sys.path if path not in (str(ROOT), str(ROOT / "tests")))]
    subprocess.run = partial(started, subprocess.run)
    Forked.instead(pytest.MonkeyPatch())  # for good: the process ends with the script
    python(words)


@pytest.fixture(scope="module")
def done(place):
    """Runs a script behind those whose files it reads, once in the folder."""
    ran = set()

    def run(name: str) -> None:
        for other in AFTER.get(name, ()):
            run(other)
        if name in ran:
            return
        module = ["-m", name.removesuffix(".py").replace("/", ".")] if name.startswith("bench") else [name]
        words, log = [*module, *(word.format(data=place / "reviews") for word in RUN[name])], place / "printed.txt"
        process = fork_server().Process(target=script, args=(words, place, log))
        process.start()
        process.join(600)
        process.kill()
        process.join()
        assert process.exitcode == 0, log.read_text(encoding="utf-8")[-2000:]
        ran.add(name)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_a_script_runs(name, done):
    done(name)
