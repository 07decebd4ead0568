"""What a user types for the tasks: the commands of docs/tasks.md in their order, warm starts, and what is refused."""

import re
from pathlib import Path

import pytest
from cases import cases
from page_commands import commands, snippets
from processes import Forked
from published import ROWS, models, write
from texts import write_rows
from toys import letters, lm, on_disk
from transformers import GPT2Config, GPT2ForSequenceClassification

from operant import OperantError, Task, train
from operant.envs import Extract
from operant.import_by_name import Table
from operant.rewards import INSTALLED, NAMES
from operant.runs.config import configure
from operant.tools.cli import main

PAGE = "docs/tasks.md#recipes-for-public-data-sets"
FILES = {
    "summarize": ("cnn_train", "cnn_test", "scitldr_train", "scitldr_test"),
    "commongen": ("commongen", "commongen_dev"),
    "dialog": ("dialogues",),
}
SHORT = {"steps": "1", "batch": "4", "probes": "0", "sampling.max_tokens": "6", "sampling.min_tokens": "0"}
SHORT |= {"update.minibatch": "4", "data.prompt_tokens": "80", "reward": "letters:e"}
HERE = {"rouge": "letters:e", "1,2,3": "1", "ppo,nlpo,a2c": "ppo,a2c"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    models(folder)
    (folder / "causal").rename(folder / "gpt2")
    for form, names in FILES.items():
        for name in names:
            (folder / f"{name}.jsonl").write_bytes(Path(write(folder, form)).read_bytes())
    (folder / "empty").mkdir()
    for name, rows in (("scitldr_train", ROWS["extract"]), ("news", [{"body": "a b c d", "headline": "a d"}] * 2)):
        write_rows(folder / f"{name}.jsonl", rows)
    (folder / "scitldr_test.jsonl").write_bytes((folder / "scitldr_train.jsonl").read_bytes())
    for split in ("train", "test"):
        for language in ("de", "en"):
            text = "".join(row["translation"][language] + "\n" for row in ROWS["translate"])
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8")
    (snippet,) = snippets(PAGE)
    (folder / "my_forms.py").write_text(snippet, encoding="utf-8")
    acts = {i: name for i, name in enumerate(("inform", "question", "directive", "commissive"))}
    shape = {"vocab_size": 37, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "pad_token_id": 0}
    on_disk(folder / "intents", GPT2ForSequenceClassification(GPT2Config(**shape, id2label=acts, num_labels=4)))
    return folder


@pytest.fixture(autouse=True)
def there(place, monkeypatch):
    monkeypatch.chdir(place)


def short(command, words):
    """A command with few steps, and a reward that is there in place of one that is not."""
    words = [HERE.get(word, word) if word not in (*NAMES, *INSTALLED.names()) else word for word in words]
    named = {word.lstrip("-").replace("-", "_") for word in words if word.startswith("--")}
    more = {name: value for name, value in SHORT.items() if name not in named and command != "eval"}
    if "sft" in words:
        more = {name: value for name, value in more.items() if name != "reward" or "summarize" in words}
    if "evaluate" in named:
        more |= {"evaluation.metrics": "exact_match"}
    return [command, *words, *(part for name, value in more.items() for part in (f"--{name}", value))]


@pytest.mark.slow  # that they are valid is tested every day, in test_commands_of_the_pages.py
def test_the_page_can_be_followed(monkeypatch, capsys):
    """One test: a command reads the runs of those before it."""
    Forked.instead(monkeypatch)
    for _, command, *words in commands(PAGE):
        if not any(re.fullmatch(r"imdb|[\w-]+/\w+/[\w.]+:\w+", word) for word in words[2:]):  # a data set of the Hub
            assert main(short(command, words)) == 0, (words, capsys.readouterr().err)


def test_rl_begins_where_supervision_ended_with_the_same_prompts(tmp_path):
    """The prompts of both runs are equal, and the exported weights are those that RL starts from."""
    known = {"policy": "./t5", "tasks": "cnn_train.jsonl", "evaluate": "cnn_test.jsonl", "probes": 0, "steps": 1}
    known |= {"batch": 2, "sampling": {"max_tokens": 4}, "evaluation.metrics": "exact_match", "data.prompt_tokens": 20}
    warm = train(recipe="summarize", algorithm="sft", reward="letters:e", out=tmp_path / "sft", lr=0.5, **known)
    known |= {"policy": str(warm.path), "score.normalise": False}
    after = train(recipe="summarize", reward="letters:e", out=tmp_path / "rl", **known)
    assert [t.prompt for t in after.parts.held_out] == [t.prompt for t in warm.parts.held_out]
    assert all(isinstance(t.prompt, list) and len(t.prompt) == 20 for t in after.parts.held_out)
    assert [r.texts for r in after.before.rollouts] == [r.texts for r in warm.after.rollouts]
    assert [r.texts for r in after.before.rollouts] != [r.texts for r in warm.before.rollouts]
    assert warm.before.measured.of_replies.keys() == {"exact_match"}


def test_only_a_causal_policy_reads_the_cue(tmp_path):
    known = {"form": "translate", "form.prefix": "", "form.cue": "xy", "reward": "letters:e", "probes": 0, "steps": 1}
    known |= {"batch": 2, "sampling": {"max_tokens": 2}}
    queries = {}
    for kind in ("gpt2", "t5"):
        run = train(f"./{kind}", ROWS["translate"], out=tmp_path / kind, **known)
        queries[kind] = [run.policy.tokenizer.decode(task.prompt) for task in run.parts.tasks]
    assert queries["gpt2"] == [query + "xy" for query in queries["t5"]]


def test_the_metrics_of_a_recipe_wait_for_held_out_tasks():
    given = {"tasks": "x.jsonl", "reward": "letters:e"}
    assert configure(given, "imdb").evaluation.metrics is None
    assert configure({**given, "evaluate": "y.jsonl"}, "imdb").evaluation.metrics == "distinct"
    with pytest.raises(OperantError, match=r"evaluation\.metrics='bleu' without held-out tasks: set evaluate"):
        configure({**given, "evaluation.metrics": "bleu"}, "imdb")


def test_an_installed_package_adds_a_form(monkeypatch):
    class Entry:
        name, value, module, dist = "news", "my_forms:headline", "my_forms", None

        @staticmethod
        def load():
            return lambda row, *, size=3: {"prompt": row["text"][:size]}

    usual = Table._installed
    monkeypatch.setattr(Table, "_installed", lambda t: (Entry,) if t.group == "operant.forms" else usual(t))
    config = configure({"tasks": "x", "reward": "letters:e", "form": "news", "form.size": "5"})
    assert config.parts["form"] == {"size": "5"}


# --- the world --------------------------------------------------------------------------------------------------------
def test_the_policy_chooses_a_sentence_and_the_reward_judges_it(tmp_path):
    """After a few steps with a reward for one sentence of three, that is the one it chooses most."""
    rows = [{"source": ["abc.", "xyz.", "def."], "summary": "xyz."}]
    judge = lambda rollouts: [float(r.reply == r.task.references[0]) for r in rollouts]  # noqa: E731
    given = {"env": "extract", "form": "extract", "form.cue": "", "algorithm": "grpo", "samples": 16, "batch": 16}
    given |= {"steps": 6, "lr": 1e-1, "probes": 0, "kl.loss_coef": 0.0, "out": tmp_path / "run"}
    run = train("./gpt2", rows, judge, **given)
    rewards = [metrics["reward/mean"] for metrics in run.metrics]
    assert rewards[0] < 0.7 and rewards[-1] > 0.9, rewards
    last = run.learner.last_step.rollouts[0]
    assert [turn.count for turn in last.turns] == [1] and last.reply in rows[0]["source"]


@pytest.mark.parametrize("target", [None, "One. Two.", [], ["One.", " "], [1]])
def test_a_task_without_sentences_is_refused(target):
    with pytest.raises(OperantError, match=r"world 'extract': the target of task 'a' is .* list of sentences"):
        Extract().reset({0: Task("a", "One. Two.", target)})


# --- wrong input ------------------------------------------------------------------------------------------------------
@cases(
        ({"form": "sumarize"}, r"row form 'sumarize' is unknown; did you mean 'summarize'\?"),
        ({"form": "summarize", "form.prefx": ""}, r"option 'form\.prefx' is unknown; did you mean 'form\.prefix'\?"),
        ({"form": "imdb", "form.words": "few"}, r"form\.words='few': it must be a whole number"),
        ({"form.prefix": ""}, r"option form\.prefix: the run names no row form that has it; set form too"),
        ({"form": "summarize", "data.text_field": "article"}, r"data\.text_field beside form=summarize"),
        ({"form": "summarize", "algorithm": "dpo", "reward": None}, r"form='summarize' .* labelled replies; leave"),
        ({"form": "summarize", "tasks": None, "env": "rooms"}, r"form='summarize' .* has tasks of its own"),
        ({"data.prompt_tokens": 1}, r"data\.prompt_tokens=1: it must be at least 2"),
        ({"data.prompt_keeps": "middle"}, r"data\.prompt_keeps='middle': it must be start or end"),
        ({"form": "summarize", "tasks": "gone.jsonl"}, r"there is no file 'gone\.jsonl'"),
        ({"form": "translate"}, r"cnn_train\.jsonl, row 1, form 'translate': it reads de, .*\(fields: id, article"),
        (
            {"evaluate": [{"article": "a"}], "form": "summarize", "evaluation.metrics": "exact_match"},
            r"metric 'exact_match' compares replies with references, and task 'tasks/0' has none",
        ),
)  # fmt: skip
def test_a_mistake_is_named_before_a_model_loads(given, why, tmp_path):
    usual = {"policy": "./empty", "tasks": "cnn_train.jsonl", "reward": "letters:e", "out": tmp_path / "run"}
    with pytest.raises(OperantError, match=why):
        train(**{name: value for name, value in (usual | given).items() if value is not None})


def test_a_source_that_is_too_long_names_the_option(tmp_path):
    """A reply takes no space in an encoder's context, so there is nothing to lower."""
    given = {"form": "summarize", "reward": "letters:e", "sampling": {"max_tokens": 8}, "out": tmp_path / "run"}
    rows, remedy = [{"article": "a" * 300}], r"shorten it \(prompt_tokens, "
    with pytest.raises(OperantError, match=rf"'tasks/0': its prompt of 312 tokens .*context of 256; {remedy}"):
        train("./gpt2", rows, **given)
    alone = r"its prompt of 311 tokens is more than the model's context of 64; shorten it \([^)]*\)$"
    with pytest.raises(OperantError, match=alone):
        train(lm("bart", vocab=37), rows, tokenizer=letters(), **given)
