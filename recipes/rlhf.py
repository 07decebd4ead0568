"""From labels to a trained model: `python recipes/rlhf.py --work runs/rlhf`, twenty minutes on two cores.

Each step is a command that is printed before it runs, and that is left out if its result exists:

1. `sft`: supervised training on texts of your own (`--reviews FILE`); without them, `builtin:reviews-lm` is the start;
2. replies: four to each of 1,000 prompts, which are 403 openings of film reviews, two or three times each;
3. labels: somebody picks the best of each four, at the page (`--labeller page`), or a stand-in whose taste is declared
   (`operant.tools.labels.stand_in`), by default; a fifth of the prompts is held out,
   with other replies to openings that are trained on;
4. `rm-1`: a reward model is trained on the picks;
5. `ppo-1`: PPO against it, with a KL penalty;
6. again from step 2 with replies of `ppo-1` (`--rounds 2`), where the reward model learns from all labels;
7. `operant eval` of all policies by the stand-in's true taste and by the last reward model.

`--shuffled`: the stand-in's picks have nothing to do with the replies: nothing may be learnt from them.
`--beside`: each round goes on with the policy of the round before, where it else begins at the start again. With
`--rounds 4 --labels 250 --steps 15`, the reward model keeps learning beside the policy.
"""

import argparse
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from operant.data import load_tasks
from operant.tools.cli import main as operant
from operant.tools.labels.items import read_items
from operant.tools.labels.stand_in import Labeller
from operant.tools.labels.store import Store

TASTE = "operant.tools.labels.stand_in:taste"
REPLY = ["--max-tokens", "20", "--min-tokens", "10"]


def run(*words: Any) -> None:
    """Print a command of operant and run it. Ends the program if it fails."""
    command = [str(word) for word in words]
    print("\n$ operant", " ".join(command), flush=True)
    if code := operant(command):
        sys.exit(code)


def exported(folder: Path, *words: Any) -> str:
    """The run in `folder`, trained by `operant train` or `reward-model` with these words, unless it exists."""
    if (folder / "config.yaml").is_file() and not (folder / "export").is_dir():
        run("train", "--resume", folder)
    elif not (folder / "export").is_dir():
        run(*words, "--out", folder)
    return str(folder)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as lines:  # str.splitlines would also break at marks inside of a reply
        return [json.loads(line) for line in lines]


def openings(path: Path, count: int, first: int) -> Path:
    """A file of `count` openings, which are used again if there are fewer, under ids of their own."""
    known = [task.prompt for task in load_tasks("builtin:openings/train")]
    rows = [{"id": str(first + i), "text": known[(first + i) % len(known)]} for i in range(count)]
    return path if path.is_file() else write(path, rows)


def labelled(given: argparse.Namespace, work: Path, number: int, policy: str) -> tuple[Path, Path]:
    """Replies of the policy, and their labels: a file to train on, and one that is held out."""
    prompts = openings(work / f"prompts-{number}.jsonl", given.labels, number * given.labels)
    replies, database = work / f"replies-{number}.jsonl", work / f"labels-{number}.sqlite"
    if not replies.is_file():
        run("generate", policy, "--tasks", prompts, "--id-field", "id", "--samples", 4, *REPLY, "--out", replies)
    if given.labeller == "page":
        print(f"\nLabel at the page, and leave it with Ctrl-C when you have done enough: {database}")
        command = [sys.executable, "-m", "operant", "label", str(replies), "--database", str(database)]
        with suppress(KeyboardInterrupt):  # Ctrl-C reaches this process, too
            subprocess.run([*command, "--overlap", "1"], check=False)
    else:
        with Store(database, kind="pick", overlap=1) as store:
            store.add_items(read_items(replies))
            count = Labeller(given.noise, seed=given.seed, shuffled=given.shuffled).label(store)
            print(f"the stand-in has picked the best of {count} more items")
    ranked = work / f"labels-{number}.jsonl"
    ranked.unlink(missing_ok=True)  # there may be more labels now
    run("label", database, "--export", ranked, "--form", "ranked")
    rows = read(ranked)
    train = write(work / f"train-{number}.jsonl", [row for row in rows if int(row["id"]) % 5])
    return train, write(work / f"held-out-{number}.jsonl", [row for row in rows if not int(row["id"]) % 5])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("runs/rlhf"), help="the folder of all steps")
    parser.add_argument(
        "--reviews", type=Path, help="texts for the supervised step, one JSON object with `text` a line"
    )
    parser.add_argument("--labels", type=int, default=1000, help="labelled openings of each round")
    parser.add_argument("--labeller", choices=("stand-in", "page"), default="stand-in")
    parser.add_argument("--noise", type=float, default=0.5, help="of the stand-in's picks")
    parser.add_argument("--shuffled", action="store_true", help="a control: picks that mean nothing")
    parser.add_argument("--beside", action="store_true", help="each round goes on with the policy of the one before")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60, help="of PPO in each round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, nargs=1, default=[], help="so many openings of each kind, to try it")
    given = parser.parse_args()
    work: Path = given.work
    work.mkdir(parents=True, exist_ok=True)
    start, common = "builtin:reviews-lm", ["--seed", given.seed, "--quiet"]
    if given.reviews is not None:
        start = exported(work / "sft", "train", "sft", "--policy", start, "--tasks", given.reviews, *common)
    policy, trunk, policies, train, held = start, start, [start], list[Path](), list[Path]()
    for number in range(1, given.rounds + 1):
        more = labelled(given, work, number, policy)
        train, held = [*train, more[0]], [*held, more[1]]
        tasks = write(work / f"all-train-{number}.jsonl", [row for path in train for row in read(path)])
        tested = write(work / f"all-held-out-{number}.jsonl", [row for path in held for row in read(path)])
        steps = max(len(read(tasks)) // 16, 1)  # one pass
        learnt = ["--tasks", tasks, "--evaluate", tested, "--trunk", trunk, "--kind", "best", "--steps", steps]
        model = exported(work / f"rm-{number}", "reward-model", *learnt, "--lr", 1e-3, *common)
        begin = policy if given.beside else start
        against = ["--policy", begin, "--reference", start, "--reward", model, "--steps", given.steps, *REPLY]
        truth = ["--evaluation.metrics", TASTE, "--evaluate-every", max(given.steps // 6, 1)]
        truth += [f"--data.limit={count}" for count in given.limit]
        policy = exported(work / f"ppo-{number}", "train", "sentiment", *against, *truth, *common)
        policies.append(policy)
    judges = ["--reward", TASTE, "--reward", str(work / f"rm-{given.rounds}")]
    table, page = work / "eval.json", work / "eval.html"
    if not (table.is_file() and page.is_file()):
        for file in (table, page):  # one of them is left of an interrupted command, which replaces no file
            file.unlink(missing_ok=True)
        files = ["--out", table, "--report", page, *(f"--limit={count}" for count in given.limit)]
        run("eval", *policies, "--tasks", "builtin:openings/held-out", *judges, "--samples", 2, *REPLY, *files)


if __name__ == "__main__":
    main()
