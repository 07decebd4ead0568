"""Mistakes of a first hour: what is typed, in a folder with a few files, and what operant says.

`python docs/generate.py` writes the answers to docs/mistakes.md, and `test_mistakes.py` compares them.
"""

import contextlib
import io
import os
import re
import shlex
import warnings
from pathlib import Path

from texts import parts
from toys import letters, lm
from transformers import GPT2Config, GPT2LMHeadModel

import operant
from operant.tools.cli import main

FILES = {
    "tasks.txt": "ab\ncde\nfg\nh\n",
    "tasks.jsonl": '{"question": "ab", "answer": "c"}\n{"question": "de", "answer": "f"}\n',
    "broken.jsonl": '{"text": "ab"}\n{"text": "cd"\n',
    "pairs.jsonl": 2 * '{"prompt": "ab", "chosen": "c", "rejected": "d"}\n',
    "chat.jsonl": '{"messages": [{"role": "user", "content": "ab"}]}\n',
    "empty.txt": "",
    "semicolons.csv": "question;answer\nab;c\nde;f\n",
    "tasks.xlsx": "",
    "typo.yaml": "policy: model\ntasks: tasks.txt\nreward: letters:e\nkl:\n  ceof: 0.1\n",
    "value.yaml": "policy: model\ntasks: tasks.txt\nreward: letters:e\nsteps: many\n",
    "trl.yaml": "policy: model\ntasks: tasks.txt\nreward: letters:e\nlearning_rate: 1.0e-5\n",
    "bracket.yaml": "policy: model\ntasks: [tasks.txt\nreward: letters:e\n",
    "my.py": """def one(rollouts): return 0.5
def short(rollouts): return [1.0]
def fails(rollouts): return [1 / len(r.reply.split("?")[1:]) for r in rollouts]
def huge(rollouts): return [3e38 for r in rollouts]
def words(rollouts): return ["good" for r in rollouts]
def silent(rollouts): pass
def by_trl(prompts, completions, answer, **kwargs): return [float(a in c) for c, a in zip(completions, answer)]
class Judge: pass
limit = 3
def single(rollout): return len(rollout.reply)
def two(prompt, reply): return 1.0
def near(rollouts, target=20): return [-abs(len(r.reply) - target) for r in rollouts]
def leaves(rollouts): raise SystemExit(3)
""",
}
TABLE = {title: typed.splitlines() for title, typed in parts("mistakes.txt").items()}
INTRO = """# Mistakes, and what operant says

Each of these was typed in a folder with a small `model`, one without a tokenizer (`bare`), one of another vocabulary
(`other`), the unfinished run `runs/begun`, and a few files; the files are in
[tests/mistakes.py](../tests/mistakes.py). A command ends with exit code 2 and prints this sentence, without a
traceback; from Python it is an `operant.OperantError`. This page is generated: `make docs`.
"""


def prepare(folder: Path) -> dict[str, object]:
    """Write the files; returns what Python code finds beside `operant`."""
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    tokenizer = letters()
    for name, size in {"model": len(tokenizer), "bare": len(tokenizer), "other": 17}.items():
        lm("gpt2", vocab=size, spread=0.02).save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "other")
    (folder / "runs/begun").mkdir(parents=True)
    (folder / "runs/begun/config.yaml").write_text("schema: 2\npolicy: model\n", encoding="utf-8")
    shape = {"n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    space = {"tokenizer": tokenizer, "wide": GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **shape))}
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        options = {"tokenizer": tokenizer, "out": "runs/python", "steps": 1, "batch": 2, "probes": 0}
        reward = lambda replies: [1.0] * len(replies)  # noqa: E731
        operant.train(lm("gpt2", vocab=len(tokenizer)), ["ab"], reward, **options, **{"sampling.max_tokens": 4})
        return space | {"learner": operant.Learner("model", **{"sampling.max_tokens": 4})}


def answer_to(typed: str, folder: Path, space: dict[str, object]) -> str:
    """What operant says to it. Raises: AssertionError if it says nothing, or anything but an OperantError."""
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(printed):
        warnings.simplefilter("ignore")
        if typed.startswith("operant "):
            assert main(shlex.split(typed)[1:]) == 2, f"{typed}: {printed.getvalue()}"
            text = printed.getvalue().strip().splitlines()[-1].removeprefix("operant: ")
        else:
            try:
                exec(typed, {"operant": operant, **space})
                raise AssertionError(f"{typed}: no error")
            except operant.OperantError as error:
                text = str(error)
    text = re.sub(r"this machine has [\d,]+", "this machine has 16", text.replace(str(folder), "/home/me"))
    return " ".join(text.split())


def page(folder: Path) -> str:
    os.environ["HF_HUB_OFFLINE"] = "1"
    space, text = prepare(folder), INTRO
    for title, typed in TABLE.items():
        text += f"\n## {title}\n\n| typed | operant says |\n|---|---|\n"
        text += "".join(row(line, answer_to(line, folder, space)) for line in typed)
    return text


def row(typed: str, answer: str) -> str:
    typed, answer = (text.replace("|", "\\|") for text in (typed, answer))
    return f"| `{typed}` | {answer.replace('<', '&lt;').replace('*', chr(92) + '*')} |\n"
