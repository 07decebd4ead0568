"""Tasks from every kind of source, queries as token ids, errors, and an order that can be resumed."""

import gzip
import json
import sys
from collections import Counter
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from cases import cases
from tokenizers_of_words import byte_tokenizer, word_tokenizer
from toys import letters, lm, on_disk

from operant import OperantError, Task, train
from operant.data import DataOptions, Order, load_tasks
from operant.data.sources import share, split_off
from operant.data.tasks import left_out
from operant.runs.config import configure

TEXT = "the film is good and the plot is long so a bad film is dull and the plot is terrible in all and it is great"


@pytest.fixture(scope="module")
def tokenizer():
    """A token is a word; adds id 1 before and id 2 after a text."""
    return word_tokenizer()


@pytest.fixture(scope="module")
def bpe():
    """A byte-level BPE as GPT-2's: without special tokens, and cut texts may be encoded differently."""
    return byte_tokenizer()


def prompts(tasks):
    return [task.prompt for task in tasks]


# --- sources ----------------------------------------------------------------------------------------------------------
ROWS = [{"text": "a b", "label": "1"}, {"text": "c, d", "label": "0"}]


def write(path, rows):
    kind = path.name.removesuffix(".gz").rsplit(".", 1)[1]
    if kind == "parquet":
        import pyarrow as arrow
        from pyarrow import parquet

        parquet.write_table(arrow.Table.from_pylist(rows), path)
        return path
    text = {
        "jsonl": lambda: "\n".join(map(json.dumps, rows)) + "\n\n",
        "json": lambda: json.dumps(rows),
        "csv": lambda: "\ufefftext,label\r\n" + "".join(f'"{r["text"]}",{r["label"]}\r\n' for r in rows),
        "txt": lambda: "\n".join(r["text"] for r in rows),
    }[kind]()
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@cases(("a.csv", ","), ("a.csv", ";"), ("a.csv", "\t"), ("a.tsv", "\t"), ("a.tsv", "|"))
def test_a_table_may_have_another_separator(name, separator, tmp_path):
    rows = [("text", "label"), ('"one; two, three\t|"', "1"), ("four", "2")]
    (tmp_path / "one.tsv").write_text("a, text\tlabel\nhello, you\t3\n", encoding="utf-8")
    assert load_tasks(str(tmp_path / "one.tsv"), None, DataOptions(text_field="a, text"))[0].prompt == "hello, you"
    (tmp_path / name).write_text("\n".join(map(separator.join, rows)), encoding="utf-8")
    tasks = load_tasks(str(tmp_path / name), None, DataOptions(target_field="label"))
    assert [(task.prompt, task.target) for task in tasks] == [("one; two, three\t|", "1"), ("four", "2")]
    both = load_tasks(str(tmp_path / name), None, DataOptions(target_field="label,text"))
    assert both[1].target == {"label": "2", "text": "four"}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.csv", "a.csv.gz", "a.parquet", "a.txt"])
def test_files(tmp_path, name):
    target = None if name == "a.txt" else "label"
    tasks = load_tasks(write(tmp_path / name, ROWS), options=DataOptions(target_field=target))
    assert [(t.id, t.prompt) for t in tasks] == [("a/0", "a b"), ("a/1", "c, d")]
    assert [t.target for t in tasks] == ([None, None] if target is None else ["1", "0"])


def test_lists_and_functions_and_tasks():
    assert prompts(load_tasks([{"q": "one"}], options=DataOptions(text_field="q"))) == ["one"]
    assert prompts(load_tasks([{"prompt": "one"}, {"prompt": "no", "text": "two"}])) == ["one", "two"]
    given = [Task("x", "one", 3), Task("y", [{"role": "user", "content": "hi"}])]
    assert load_tasks(given) == given
    options = DataOptions(template="{a} and {b}:", id_field="n", target_field="gold")
    assert load_tasks([{"n": 7, "a": "x", "b": "y", "gold": [1]}], options=options) == [Task("7", "x and y:", [1])]

    def forever():
        return (f"number {n}" for n in count())

    array, own = np.array(["ab", "cd"]), {"__iter__": lambda self: iter(["prompt"]), "itertuples": print}
    own |= {"__array__": print, "__eq__": lambda self, other: array == other}
    for made in (load_tasks, lambda frame: configure({"tasks": frame, "reward": "letters:e"})):
        with pytest.raises(OperantError, match=r"a DataFrame is not a source.*to_dict\('records'\)"):
            made(type("DataFrame", (), own)())
    held = configure({"tasks": array, "evaluate": array[0], "reward": "letters:e"}).train
    assert (held.tasks, held.evaluate) == (["ab", "cd"], "ab") and {type(held.tasks[0]), type(held.evaluate)} == {str}
    tasks = load_tasks(forever, options=DataOptions(limit=3))
    assert [(t.id, t.prompt) for t in tasks] == [(f"forever/{i}", f"number {i}") for i in range(3)]


def test_text_becomes_ids_once_and_tasks_stay(tokenizer):
    tasks = load_tasks(["the film", Task("mine", "the film")], tokenizer)
    assert prompts(tasks) == [tokenizer("the film").input_ids, "the film"]
    given, options = [[{"role": "user", "content": "hi"}], [7, 8]], DataOptions(text_field="messages")
    assert prompts(load_tasks([{"messages": value} for value in given], tokenizer, options)) == given


def test_filters_count_characters_and_keep_the_numbers():
    tasks = load_tasks(["12345", "1", "", "123", "  ", "1234567"], options=DataOptions(min_chars=3, max_chars=5))
    assert [(t.id, t.prompt) for t in tasks] == [("tasks/0", "12345"), ("tasks/3", "123")]


def test_rows_without_a_text_are_left_out_and_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": null}\n{"text": " "}\n', encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"prompt": null, "completion": "y"}\n{"text": null}\n', encoding="utf-8")
    for name, given, left in (("a.jsonl", {}, 2), ("b.jsonl", {"with_replies": True}, 1)):
        passed = Counter()
        (task,) = load_tasks(path := str(tmp_path / name), passed=passed, **given)
        assert (task.prompt, task.replies) == (("", ("y",)) if given else ("x", ()))
        ends = "have no text and are" if left > 1 else "has no text and is"
        assert left_out(passed, path) == [f"{left} of {left + 1} rows of {path} {ends} left out"]


def test_a_share_depends_on_the_seed_and_the_ids_alone():
    tasks = [Task(f"own/{i}", "x") for i in range(520)]
    training, held_out = split_off(tasks, share("10%"), seed=0)
    assert len(held_out) == 52 and sorted([*training, *held_out], key=tasks.index) == tasks
    assert [*map(tasks.index, held_out)] == sorted(map(tasks.index, held_out))
    assert split_off(tasks[::-1], share(" 10.0 % "), seed=0)[1][::-1] == held_out != split_off(tasks, 0.1, seed=1)[1]
    assert len(split_off(tasks[:3], 0.01, seed=0)[1]) == 1
    assert share("10") is share("a%.jsonl") is share(0.1) is share(None) is None
    for given in ("0%", "100%", "-5%", "250 %"):
        with pytest.raises(OperantError, match=rf"evaluate='{given}': a share of the tasks is above 0% and below 100%"):
            share(given)
    with pytest.raises(OperantError, match="evaluate=90%: of 3 tasks none would be left to train on"):
        split_off(tasks[:3], 0.9, seed=0)
    labelled = [Task(f"own/{i}", f"prompt {i // 3}", replies=("a", "b"), scores=(1.0, 0.0)) for i in range(60)]
    training, held_out = split_off(labelled, 0.2, seed=0)
    assert len(held_out) == 12 and not {task.prompt for task in training} & {task.prompt for task in held_out}
    assert len(split_off([replace(task, prompt="") for task in labelled], 0.2, seed=0)[1]) == 12
    training, held_out = split_off(labelled[:6], 0.9, seed=0)
    assert (len(training), len(held_out)) == (3, 3), "of two prompts one is left to train on"
    often = [replace(task, prompt="often") if i < 57 else task for i, task in enumerate(labelled)]
    assert {len(split_off(often, 0.05, seed)[1]) for seed in range(12)} == {3}, "most rows have one prompt"


def test_shuffle_is_a_permutation_by_the_seed_before_the_limit():
    rows = [str(i) for i in range(50)]
    all_of = prompts(load_tasks(rows, options=DataOptions(shuffle=True), seed=1))
    some = load_tasks(rows, options=DataOptions(shuffle=True, limit=5), seed=1)
    assert sorted(all_of) == sorted(rows) and all_of != rows and prompts(some) == all_of[:5]
    assert [t.id for t in some] == [f"tasks/{p}" for p in all_of[:5]]
    assert all_of != prompts(load_tasks(rows, options=DataOptions(shuffle=True), seed=2))


# --- queries ----------------------------------------------------------------------------------------------------------
@cases(
    [TEXT, TEXT.replace("good", "unbelievable"), "unbelievable " + TEXT * 20],
    # Texts whose first hundreds of characters are few tokens, or have no space, are encoded as a whole.
    ["the " * 3 + " " * 400 + "film was " * 20, "thefilm" * 200 + " the", "\n" * 500 + TEXT * 10],
)
def test_queries_are_the_first_ids_of_the_text(rows, bpe):
    for n in range(1, 9):
        assert prompts(load_tasks(rows, bpe, DataOptions(query_tokens=n))) == [bpe(row).input_ids[:n] for row in rows]


def test_a_tokenizer_with_very_long_tokens_sees_the_whole_text():
    class Hundreds:
        """A token is a hundred characters."""

        all_special_ids = ()

        def __call__(self, given):
            texts = [given] if isinstance(given, str) else given
            ids = [[ord(text[i]) + len(text[i : i + 100]) for i in range(0, len(text), 100)] for text in texts]
            return SimpleNamespace(input_ids=ids[0] if isinstance(given, str) else ids)

    (task,) = load_tasks(["the film was " * 100], Hundreds(), DataOptions(query_tokens=5))
    assert task.prompt == Hundreds()("the film was " * 100).input_ids[:5]


def test_query_lengths_are_drawn_by_seed_and_task_alone(bpe):
    rows, options = [TEXT] * 400, DataOptions(query_tokens="2-8")
    drawn = [len(p) for p in prompts(load_tasks(rows, bpe, options, seed=3))]
    counts = Counter(drawn)
    assert sorted(counts) == [2, 3, 4, 5, 6, 7, 8] and min(counts.values()) > 400 / 7 / 2
    assert drawn[:10] == [2, 7, 3, 3, 3, 6, 6, 5, 5, 7], "also in another process: Python salts its own hash of a text"
    assert drawn[:10] == [len(p) for p in prompts(load_tasks(rows[:10], bpe, options, seed=3))]
    assert drawn != [len(p) for p in prompts(load_tasks(rows, bpe, options, seed=4))]
    named = load_tasks([{"text": TEXT, "id": "tasks/5"}], bpe, DataOptions(query_tokens="2-8", id_field="id"), seed=3)
    assert len(named[0].prompt) == drawn[5]


def test_special_tokens_around_a_text_are_no_part_of_the_length(tokenizer):
    words = tokenizer(TEXT).input_ids[1:-1]
    (task,) = load_tasks([TEXT], tokenizer, DataOptions(query_tokens=3))
    assert task.prompt == [1, *words[:3]]
    whole = load_tasks(["the film"] * 20 + ["the"], tokenizer, DataOptions(query_tokens="2-9"))
    ids = tokenizer("the film").input_ids[:-1]
    assert prompts(whole) == [ids] * 20, "the end-of-text token would end the review, and makes no query of one word"


def test_texts_too_short_for_a_query_are_left_out(bpe):
    assert [t.id for t in load_tasks(["a", TEXT], bpe, DataOptions(query_tokens="3-4"))] == ["tasks/1"]
    cut = load_tasks([Task("t", TEXT, 5), Task("ids", [9, 8, 7, 6])], bpe, DataOptions(query_tokens=3))
    assert cut == [Task("t", bpe(TEXT).input_ids[:3], 5), Task("ids", [9, 8, 7])]
    with pytest.raises(OperantError, match=r"0 after 'length in tokens'\); loosen query_tokens=90: every text is sh"):
        load_tasks(["the film"], bpe, DataOptions(query_tokens=90))


# --- what wrong input gets; damaged files are in test_untrusted_input.py ----------------------------------------------
def test_files_that_are_not_there_or_of_no_known_kind(tmp_path):
    write(tmp_path / "reviews.jsonl", ROWS)
    (tmp_path / "a.xlsx").write_bytes(b"")
    for source, why in (
        (tmp_path / "review.jsonl", r"no file .*review.jsonl'; did you mean 'reviews.jsonl'"),
        (tmp_path / "a.xlsx", r"ends in '\.xlsx'; supported: \.jsonl \.json \.csv .*, or two parallel"),
        ("reviews.xlsx", r"no file 'reviews\.xlsx'"),
        (lambda: None, "returned None; return a list"),
    ):
        with pytest.raises(OperantError, match=why):
            load_tasks(source)


def test_a_prompt_longer_than_the_context(bpe):
    length = len(bpe(TEXT).input_ids)
    assert load_tasks([TEXT], bpe, context=length + 5, max_new=5)
    too_long = rf"'tasks/1'.* {length} tokens and 6 new .*context of {length + 5}; shorten"
    with pytest.raises(OperantError, match=too_long):
        load_tasks(["the film", TEXT], bpe, context=length + 5, max_new=6)
    with pytest.raises(OperantError, match="task 'mine'"):
        load_tasks([Task("mine", TEXT)], bpe, context=length - 1)


def test_hub_data_sets_need_the_extra_and_then_a_hub(monkeypatch):
    held = {("owner/name", "test"): [{"text": "cached"}], ("owner/name", "1.0", "test"): [{"text": "a part"}]}

    class Datasets:
        class config:
            HF_HUB_OFFLINE = False

        @classmethod
        def load_dataset(cls, *names, split):
            assert cls.config.HF_HUB_OFFLINE, "offline, it must look into the cache alone"
            return held[*names, split]

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for package, why in (
        (None, r"'imdb'.*pip install 'operant\[hub\]'"),
        (Datasets, r"dataset 'stanfordnlp/imdb' .* cannot be downloaded .*HF_HUB_OFFLINE"),
    ):
        monkeypatch.setitem(sys.modules, "datasets", package)
        with pytest.raises(OperantError, match=why):
            load_tasks("imdb")
    for name, text in (("owner/name:test", "cached"), ("owner/name/1.0:test", "a part")):
        assert load_tasks(name) == [Task("name/0", text)]


# --- the openings -----------------------------------------------------------------------------------------------------
def test_the_openings_are_short_distinct_and_split():
    everything = load_tasks("builtin:openings")
    train, held_out = load_tasks("builtin:openings/train"), load_tasks("builtin:openings/held-out")
    assert train + held_out == everything, "the parts keep the numbers of the whole"
    assert len(held_out) == 256 and len(train) >= 300
    assert len({line.lower() for line in prompts(everything)}) == len(everything)


# --- the order --------------------------------------------------------------------------------------------------------
def test_every_task_comes_exactly_once_a_pass():
    order = Order(7, seed=5)
    taken = [i for _ in range(7) for i in order.take(3)]
    passes = [taken[0:7], taken[7:14], taken[14:21]]
    assert all(sorted(p) == list(range(7)) for p in passes)
    assert len({tuple(p) for p in passes}) == 3, "every pass has an order of its own"
    assert order.passes == 3.0


def test_the_order_is_resumed_where_it_stood():
    whole = Order(37, seed=1).take(100)
    for cut in (0, 5, 37):
        first = Order(37, seed=1)
        before = first.take(cut)
        second = Order(37, seed=1)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert before + second.take(100 - cut) == whole
    assert Order(37, seed=2).take(100) != whole


@cases(
    (lambda: Order(6).load_state_dict(Order(5).state_dict()), "number of tasks 5, this one 6$"),
    (lambda: Order(5, seed=1).load_state_dict(Order(5).state_dict()), "seed of the order 0, this one 1"),
    (lambda: Order(0), "no tasks"),
)
def test_an_order_refuses_other_tasks_and_an_empty_list(make, why):
    with pytest.raises(OperantError, match=why):
        make()


# --- chats ------------------------------------------------------------------------------------------------------------
SAID = [{"role": "system", "content": "xy"}, {"role": "user", "content": "abcdefgh"}]
TALKING = letters("u{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}a{% endif %}")
"""The template puts u and a around the messages: SAID has 12 tokens."""


@cases(
    ([{"prompt": SAID}], {"prompt_tokens": 12}, "abcdefgh"),
    ([{"prompt": SAID}], {"prompt_tokens": 7}, "abc"),
    ([{"prompt": SAID}], {"prompt_tokens": 7, "prompt_keeps": "end"}, "fgh"),
    (["abcdefgh"], {"chat": True}, "abcdefgh"),
    (["abcdefgh"], {"chat": True, "prompt_tokens": 5}, "abc"),
)
def test_a_chat_is_cut_in_its_last_message_and_a_text_can_be_one(rows, options, expected):
    (task,) = load_tasks(rows, TALKING, DataOptions(**options))
    assert task.prompt[:-1] == (SAID[:1] if isinstance(rows[0], dict) else [])
    assert task.prompt[-1] == {"role": "user", "content": expected}


@cases(
    ({"query_tokens": 3}, {}, r"data\.query_tokens=3: the prompt of task '[^']+' is a chat, .*prompt_tokens"),
    ({"prompt_tokens": 4}, {}, r"data\.prompt_tokens=4: the messages of task '[^']+' have more tokens without"),
    ({}, {"context": 14, "max_new": 3}, r"task '[^']+': its prompt of 12 tokens and 3 new ones are more"),
    ({}, {"vocabulary": 5}, r"task '[^']+': its prompt"),
)
def test_a_chat_that_cannot_be_cut_is_named_before_training(options, bounds, why):
    with pytest.raises(OperantError, match=why):
        load_tasks([{"prompt": SAID}], TALKING, DataOptions(**options), **bounds)
    load_tasks([{"prompt": SAID}], TALKING, context=15, max_new=3)


@cases(
    (["abcdefgh"], {}, 1, 8),
    (lambda: ["abcdefgh"], {}, 1, 8),
    ([Task("a", "abcdefgh")], {}, 1, 8),
    (["abcdefgh"], {"data.chat": True}, 0, 10),
    ([[7, 8, 9]], {}, 0, 3),
)
def test_a_chat_policy_that_reads_plain_texts_says_so(tasks, options, notes, tokens, tmp_path):
    known = {"algorithm": "rloo", "samples": 2, "batch": 2, "max_tokens": 2, "probes": 0, "steps": 1, "quiet": True}
    known |= {"tokenizer": TALKING, "out": tmp_path / "run"}
    run = train(lm(vocab=50), tasks, lambda rs: [1.0] * len(rs), **known, **options)
    assert [("--data.chat true" in note) for note in run.parts.notes] == [True] * notes
    assert run.metrics[0]["rollout/query_tokens"] == tokens


@pytest.mark.parametrize("saved", [True, False])
@cases(
    ([{"text": SAID}], {}, "a list of messages, and the tokenizer has no chat template"),
    (["ab"], {"data.chat": True}, "a list of messages, and the tokenizer has no chat template"),
    ([[7, 8]], {"data.chat": True}, "data.chat=true, and its prompt is token ids, .*leave it out"),
    (["ab", "cd"], {"evaluate": "99%"}, "evaluate=99%: of 2 tasks none would be left to train on"),
    (["ab", "cd"], {"evaluate": "20"}, "evaluate=20: a number holds out nothing; give a share .*such as 10%"),
    (["ab", "cd"], {"evaluate": 20}, "evaluate=20: a number holds out nothing; give a share .*such as 10%"),
)
def test_tasks_that_do_not_fit_are_refused_early(tasks, options, why, saved, tmp_path, monkeypatch):
    policy, given = lm(vocab=50), {"tokenizer": letters()}
    if saved:
        policy, given = on_disk(tmp_path / "model", policy), {}
    monkeypatch.setattr("operant.runs.build.Learner", lambda *a, **k: pytest.fail("it loads"))
    with pytest.raises(OperantError, match=why):
        train(policy, tasks, lambda rs: [1.0] * len(rs), out=tmp_path / "run", quiet=True, **given, **options)


def test_messages_behind_texts_are_refused_before_the_first_step(tmp_path):
    with pytest.raises(OperantError, match="no chat template"):
        train(lm(vocab=50), ["ab", SAID], lambda rs: [1.0], tokenizer=letters(), out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
