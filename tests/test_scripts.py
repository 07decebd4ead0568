"""Every script of recipes/ and benchmarks/ runs in a copy of the two folders, with the smallest settings.

Scripts that other tests run are listed with the test, so that a new script has to be added to one of the two tables.
"""

import gzip
import json
import os
import random
import runpy
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from processes import Child
from rigs import fork_server

ROOT = Path(__file__).parents[1]
PEERS = "run by the tests of benchmarks/driver.py, and in environments of their own by `make bench`"
ELSEWHERE = {
    "recipes/minimal_ppo.py": "tests/test_twins.py",
    "recipes/minimal_grpo.py": "tests/test_twins.py",
    "recipes/minimal_rloo.py": "tests/test_twins.py",
    "recipes/minimal_sft.py": "tests/test_twins.py",
    "benchmarks/__main__.py": "benchmarks/tests/test_bench.py",
    "benchmarks/driver.py": "benchmarks/tests/test_bench.py",
    "benchmarks/work.py": "benchmarks/tests/test_bench.py",
    "benchmarks/report.py": "benchmarks/tests/test_bench.py",
    "benchmarks/learning.py": "benchmarks/tests/test_bench.py",
    "benchmarks/scale.py": "benchmarks/tests/test_bench.py",
    "benchmarks/memory_plan.py": "tests/test_plan.py",
    "benchmarks/first_example.py": "tests/test_readme.py",  # runs the README's snippet, as that test does
    "benchmarks/textworld.py": "tests/test_textworld.py",  # it needs the extra, and makes hundreds of games
    "recipes/rlhf.py": "tests/test_humans.py",
    "benchmarks/reward_models.py": "docs/rlhf.md",  # its data are no part of the project
    "benchmarks/kept.py": "benchmarks/road.py",
    "benchmarks/timed.py": "benchmarks/translation.py",
    "benchmarks/hostile.py": "tests/test_hostile_programs.py",  # the same programs, one at a time
    "benchmarks/sandbox.py": "docs/sandbox.md",  # a thousand programs
    "benchmarks/trl_script.py": "docs/from-trl.md",  # it needs an environment with TRL 0.11.4
    "benchmarks/wheel.py": "Makefile",  # it needs the network
    "benchmarks/screenshot.py": "tests/test_replies_page.py",
    "benchmarks/chaos.py": "benchmarks/tests/test_chaos.py",
    "benchmarks/soak.py": "benchmarks/tests/test_soak.py",
    "benchmarks/shuffled.py": "benchmarks/sentiment_seeds.py",
    "benchmarks/code_test_time.py": "docs/code.md",  # it needs a critic that was trained for minutes
    "benchmarks/rank_memory.py": "tests/test_plan_ranks.py",
    "benchmarks/suites.py": "tests/test_suites.py",  # it needs three extras and Java
}
"""Script: the test, or the script below, that runs it."""
RUN = {
    "recipes/builtin_tokenizers.py": ["--data", "{data}", "--work", "build", "--vocab", "600", "--max-length", "64"],
    "recipes/builtin_tasks.py": ["build"],
    "recipes/train_reviews_lm.py": ["--work", "build", "--minutes", "0.02", "--rows", "2", "--reviews", "3"],
    "recipes/train_classifier.py": ["--work", "build", "--minutes", "0.02", "--held-out", "20"],
    "recipes/train_masked_lm.py": ["--data", "{data}", *"--minutes 0.02 --vocab 600 --batches 2".split()],
    "recipes/train_rooms_lm.py": ["--work", "build", *"--games 20 --steps 2 --walkthroughs 2 --epochs 0.2".split()],
    "recipes/train_maths_lm.py": ["--work", "runs/maths", *"--sums 40 --countdowns 10 --steps 2 --batch 8".split()],
    "recipes/train_code_lm.py": ["--work", "runs/code-1000", *"--rows 40 --held-out 4 --steps 2 --batch 8".split()],
    "recipes/train_translation_t5.py": ["--data", "{data}", "--work", "runs/translation", "--steps", "2"],
    "recipes/negative_kl.py": ["cold"],
    "benchmarks/sentiment_seeds.py": ["--seeds", "1", "--controls", "1", "--at-once", "1", "--quick"],
    "benchmarks/sentiment_methods.py": ["--at-once", "1", "--quick"],
    "benchmarks/loss_and_reward.py": ["--quick"],
    "benchmarks/adaptive_kl.py": ["--quick"],
    "benchmarks/tool_use.py": ["--quick"],
    "benchmarks/gallery.py": ["--quick"],
    "benchmarks/recipes.py": ["--seeds", "1", "--at-once", "1", "--quick"],
    "benchmarks/methods.py": "--quick --tasks arithmetic --seeds 1 --only grpo".split(),
    "benchmarks/training_cycle.py": ["runs/bench-sentiment/seed-1"],
    "benchmarks/overlap.py": ["--rounds", "1", "--episodes", "4", "--workers", "1", "--tokens", "2"],
    "benchmarks/road.py": ["--seeds", "1", "--quick", "--kinds", "labels"],
    "benchmarks/preference_frontier.py": ["--quick", "--seeds", "1", "--labels", "40"],
    "benchmarks/process_rewards.py": ["--quick", "--seeds", "1", "--solutions", "40"],
    "benchmarks/rooms.py": ["--seeds", "1", "--minutes", "0.01", "--games", "2", "--only", "random,ppo"],
    "benchmarks/translation.py": [*"--only ppo --seeds 1 --minutes 0.01 --sentences 2 --gate 0".split()],
    "benchmarks/policy_gradients.py": ["--quick", "--one", "trpo", "kl", "1", "1"],
    "benchmarks/programs.py": [*"--only grpo --seeds 1 --minutes 0.01 --quick".split()],
    "benchmarks/commongen.py": [*"--kinds ppo --seeds 1 --minutes 0.01 --sentences 2 --quick".split()],
    "benchmarks/dialog_intents.py": ["--data", "{data}/dialogues.jsonl.gz", "--seeds", "1", "--quick"],
    "benchmarks/prompts.py": ["--data", "{data}", *"--steps 2 --held-out 8 --seeds 1 --only soft_q;none+mean".split()],
    "benchmarks/few_shot.py": [
        *("--data", "{data}", "--only", "soft_q+mean,none,halving"),
        *"--steps 2 --held-out 8 --sets sst-2 --seeds 13".split(),
    ],
    "benchmarks/style_transfer.py": [
        *("--data", "{data}", "--only", "copy,soft_q", "--seeds", "1"),
        *"--steps 1 --train 8 --test 4 --rows 64".split(),
    ],
    "benchmarks/seed_demo.py": ["--data", "{data}", "--quick"],
    "benchmarks/extract.py": ["--data", "{data}", *"--quick --seeds 1 --kinds ppo --at-once 1".split()],
    "benchmarks/kl_samples.py": ["--quick"],
    "benchmarks/letters_frontier.py": ["--quick"],
    "benchmarks/architecture.py": [],
    "benchmarks/architectures.py": ["gpt2"],
    "benchmarks/operations.py": [],
    "benchmarks/against.py": [".", "--steps", "1"],
    "benchmarks/kl_table.py": [],
    "benchmarks/eight_bit.py": ["ours"],
    "benchmarks/checkpoint_size.py": ["--shape", "tiny", "--rounds", "1"],
    "benchmarks/configs.py": ["--examples", "6", "--jobs", "1"],
    "benchmarks/isolated.py": ["raises"],
    "benchmarks/pieces.py": ["sweep", "--quick", "--rounds", "1"],
    "benchmarks/serve.py": "--rounds 1 --tokens 2 --clients 1".split(),
    "benchmarks/replies.py": ["--steps", "3"],
    "benchmarks/contexts.py": ["--upto", "0"],
    "benchmarks/turns.py": ["--quick", "--only", "built", "--threads", "1"],
    "benchmarks/prompt_calls.py": ["--texts", "4", "--prompts", "2", "--rounds", "1"],
    "benchmarks/carried.py": "--batch 2 --tokens 12 --steps 1 --warm 1".split(),
    "benchmarks/ahead.py": "--steps 3 --batch 2 --tokens 2 --rounds 1".split(),
    "benchmarks/cluster.py": [],
    "benchmarks/engines.py": ["--rounds", "1", "--replies", "2"],
    "benchmarks/sharding.py": ["--shape", "tiny", "--replies", "2"],
    "benchmarks/threads.py": ["--only", "32 wide", "--rounds", "1", "--busy-rounds", "1"],
}
"""Script: its arguments."""
AFTER = {
    "recipes/train_reviews_lm.py": ["recipes/builtin_tokenizers.py"],
    "recipes/train_classifier.py": ["recipes/builtin_tokenizers.py"],
    "benchmarks/few_shot.py": ["recipes/train_masked_lm.py"],
    "benchmarks/style_transfer.py": ["recipes/train_masked_lm.py"],
    "benchmarks/translation.py": ["recipes/train_translation_t5.py"],
    "benchmarks/commongen.py": ["recipes/train_translation_t5.py"],
    "benchmarks/programs.py": ["recipes/train_code_lm.py"],
    "benchmarks/loss_and_reward.py": ["benchmarks/sentiment_seeds.py"],
    "benchmarks/training_cycle.py": ["benchmarks/sentiment_seeds.py"],
}
"""Script: those whose files it reads."""


def scripts() -> set[str]:
    found = [*ROOT.glob("recipes/*.py"), *ROOT.glob("benchmarks/*.py")]
    return {str(path.relative_to(ROOT)) for path in found if path.name != "__init__.py"}


def test_every_script_is_run_by_some_test():
    assert scripts() == set(RUN) | set(ELSEWHERE) and not set(RUN) & set(ELSEWHERE)
    assert all((ROOT / place).exists() for place in ELSEWHERE.values())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A copy of the folders, and a few invented reviews and pairs of sentences."""
    place = tmp_path_factory.mktemp("scripts")
    for name in ("benchmarks", "recipes", "tests", "docs"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__", "checkpoints"))
    words = "a film that was great or terrible and the story is a boring but moving account of love".split()
    chance = random.Random(0)
    (place / "reviews").mkdir()
    for split in ("train", "test"):
        lines = [{"text": " ".join(chance.choices(words, k=40 + i % 30)), "label": i % 2} for i in range(80)]
        with gzip.open(place / "reviews" / f"imdb_{split}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(json.dumps(line) for line in lines))
        with gzip.open(place / "reviews" / f"sst2_{split}.jsonl.gz", "wt", encoding="utf-8") as file:
            lines = [{"text": " ".join(chance.choices(words, k=8)), "label": i % 2} for i in range(300)]
            file.write("\n".join(json.dumps(line) for line in lines))
        with gzip.open(place / "reviews" / f"scitldr_a_{split}.jsonl.gz", "wt", encoding="utf-8") as file:
            told = [" ".join(chance.choices(words, k=8)) for _ in range(80)]
            lines = [{"title": "A film", "source": told[i : i + 3], "target": told[i : i + 1]} for i in range(8)]
            file.write("\n".join(json.dumps(line) for line in lines))
    with gzip.open(place / "reviews" / "dialogues.jsonl.gz", "wt", encoding="utf-8") as file:
        dialogues = [{"topic": 1 + i % 10, "turns": [" ".join(words[:4])] * 3} for i in range(60)]
        file.write("\n".join(json.dumps(line) for line in dialogues))
    rows = "sentence\tlabel\n" + "".join(f"{' '.join(chance.choices(words, k=8))}\t{i % 2}\n" for i in range(32))
    (place / "reviews/sst-2/16-13").mkdir(parents=True)
    (place / "reviews/sst-2/16-13/train.tsv").write_text(rows, encoding="utf-8")
    with gzip.open(place / "reviews/sst-2/test.tsv.gz", "wt", encoding="utf-8") as file:
        file.write(rows)
    clean = place / "reviews/yelp_rlprompt/clean"
    clean.mkdir(parents=True)
    for split in ("dev", "test"):
        for label in (0, 1):
            with gzip.open(clean / f"sentiment.{split}.{label}.clean.gz", "wt", encoding="utf-8") as file:
                file.writelines(" ".join(chance.choices(words, k=8)) + "\n" for _ in range(40))
    for split in ("train", "val", "test_2016_flickr"):
        for language in ("de", "en"):
            with gzip.open(place / "reviews" / f"{split}.{language}.gz", "wt", encoding="utf-8") as file:
                file.writelines(" ".join(chance.choices(words, k=8)) + "\n" for _ in range(80))
    return place


def python(words: list[str]) -> None:
    """What `python WORDS` does, in this process."""
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
    code = Child(lambda: os.environ.update(env or {}) or python(words[1:])).ends(300)
    if check and code:
        raise subprocess.CalledProcessError(code, words)
    return subprocess.CompletedProcess(words, code)


def script(words: list[str], place: Path, log: Path) -> None:
    """Run a script in the folder; what it prints goes into the file."""
    with log.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    os.chdir(place)
    sys.path[:] = [str(place), *(path for path in sys.path if path not in (str(ROOT), str(ROOT / "tests")))]
    subprocess.run = partial(started, subprocess.run)
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
        process.join(300)
        process.kill()
        process.join()
        assert process.exitcode == 0, log.read_text(encoding="utf-8")[-2000:]
        ran.add(name)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_a_script_runs(name, done):
    done(name)
