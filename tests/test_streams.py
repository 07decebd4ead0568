"""What random numbers hang on is a format: renamed, renumbered or reordered, runs would go on with others. Append only.

The counter is written out here with Python's whole numbers, from Steele et al. (2014) and its use in the library.
"""

from dataclasses import fields
from hashlib import blake2b

import torch
from cases import cases
from toys import letters, lm

from operant import Learner
from operant.data.order import Order
from operant.data.tasks import DataOptions, load_tasks
from operant.models.hidden_states import Modes
from operant.sampling import STREAMS, counter, task_key, uniforms
from operant.storage.checkpoint import LIGHT

WORD = (1 << 64) - 1


def mixed(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & WORD
    return x ^ x >> 31


def counted(*parts: int | str) -> int:
    state = 0
    for part in parts:
        digest = blake2b(str(part).encode(), digest_size=8).digest()
        state = mixed(state ^ (int.from_bytes(digest, "little") if isinstance(part, str) else part))
    return state


@cases([0], [3, "query", "a/0"], [0, 7, 1, 12], [2**53, "order", 5])
def test_a_counter_is_what_it_was(parts):
    assert counter(*parts) == counted(*parts)


def test_a_reply_has_the_numbers_of_its_seed_stream_step_task_sample_and_turn():
    assert task_key(3, "train", 5, "imdb/17", 2, 1) == counted(3, 1, 5, "imdb/17", 2, 1) == 2539610932629010281
    assert task_key(3, "evaluate", 5, "imdb/17") == counted(3, 2, 0, "imdb/17", 0, 0)
    assert task_key(3, "probe", 5, "imdb/17") == counted(3, 3, 0, "imdb/17", 0, 0)
    assert len(set(STREAMS.values())) == len(STREAMS)
    assert uniforms([7], 9).item() == (mixed(7 ^ mixed(9)) >> 11) * 2.0**-53


def test_uniforms_are_even_and_independent_of_place_and_key():
    keys = [task_key(0, "train", 0, f"t{i}") for i in range(2000)]
    x = torch.stack([uniforms(keys, place) for place in range(8)], 1)
    assert float(x.min()) >= 0 and float(x.max()) < 1 and abs(float(x.mean()) - 0.5) < 4 / (12 * x.numel()) ** 0.5
    assert float(((torch.histc(x.float(), 20, 0, 1) - 800) ** 2 / 800).sum()) < 19 + 4 * 38**0.5
    assert float((torch.corrcoef(x.T) - torch.eye(8)).abs().max()) < 4 / 2000**0.5
    assert abs(float(torch.corrcoef(torch.stack([x[1:, 0], x[:-1, 0]]))[0, 1])) < 4 / 2000**0.5


def test_tasks_come_in_the_order_that_they_came_in():
    order = Order(5, 3)
    assert [order.take(3) for _ in range(3)] == [[0, 2, 3], [1, 4, 4], [0, 2, 1]]


def test_tasks_keep_their_names(tmp_path):
    path = tmp_path / "plays.jsonl"
    path.write_text('{"text": "ab", "key": "x1"}\n{"text": "cd", "key": "x2"}\n', encoding="utf-8")
    assert [t.id for t in load_tasks(str(path))] == ["plays/0", "plays/1"]
    assert [t.id for t in load_tasks(str(path), options=DataOptions(id_field="key"))] == ["x1", "x2"]
    assert [t.id for t in load_tasks(["ab", "cd"])] == ["tasks/0", "tasks/1"]


def test_queries_keep_their_names():
    learner = Learner(lm(vocab=len(letters())), tokenizer=letters(), max_tokens=2)
    assert [r.task.id for r in learner.generate(["ab", [5, 6]])] == ["query/'ab'", "query/[5, 6]"]


# --- names on disk ----------------------------------------------------------------------------------------------------
def test_names_in_a_checkpoint_are_a_format():
    """Parts are matched by name: a renamed one would refuse every checkpoint that was written before."""
    parts = ["policy", "optimizer", "controller", "moments", "progress", "budget", "reference"]
    assert list(Learner(lm("gpt2", 40)).parts()) == parts
    assert {"policy"} == LIGHT, "what a light checkpoint holds"
    assert {f.name for f in fields(Modes)} >= {"padded", "left", "cached", "pooled", "packed", "branched"}
