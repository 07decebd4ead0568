"""`python -m benchmarks`: sides that take turns, the check that they did the same work, and the result files."""

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks/peers"))

import products  # noqa: E402
from benchmarks import driver, report  # noqa: E402
from benchmarks.work import Peer, Work, WorkDiffers, compare  # noqa: E402

PEER = """
import sys
sys.path.insert(0, {peers!r})
from protocol import Pipe, queries
pipe = Pipe()
held = b"x" * (4 << 20)  # a peak above that of the imports, to which a ratio can be measured
spec = pipe.spec
print("a library that talks")
pipe.next(batch=spec["queries"], minibatch=spec["minibatch"], epochs=1, precision="float32", trained=spec["trained"])
step = 0
while True:
    assert len(queries(spec, step)) == spec["queries"]
    step += 1
    pipe.next(tokens=sum(spec["lengths"]) - spec["short"], optimizer_steps=2)
"""
LAYER = 12 * 16 * 16 + 13 * 16
TRAINED = 32 * 16 + 24 * 16 + 2 * LAYER + 2 * 16 + 17
"""Weights of the shape below: embeddings, positions, blocks, the last norm, the value head."""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A tiny ragged work against a peer that only reports what it did."""
    script = tmp_path / "peer.py"
    script.write_text(PEER.format(peers=str(ROOT / "benchmarks/peers")), encoding="utf-8")
    plain = driver.command_of
    monkeypatch.setattr(driver, "command_of", lambda n: [sys.executable, str(script)] if n == "fake" else plain(n))
    monkeypatch.setattr(driver, "PAUSE", 0.0)
    shape = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24}
    monkeypatch.setattr("benchmarks.work.SHAPES", {"mini": shape})
    peer = Peer("fake", settings={"short": 0, "trained": TRAINED})
    return Work("W0", "a miniature", "mini", 6, 1, 3, (peer,), query=3, new=9, lengths=(1, 9))


@pytest.mark.slow
def test_sides_take_turns_and_the_limit_replays_our_products(work, tmp_path):
    ours, limit = driver.run(work, 1)
    assert ours["did"]["tokens"] == sum(work.spec()["lengths"]), "replies have the lengths that were drawn"
    assert ours["did"]["optimizer_steps"] == 2 and ours["did"]["trained"] == TRAINED
    assert ours["differences"] == [] and ours["speed_ratio"] < 1 < ours["memory_ratio"]
    assert limit["speed_ratio"] > 0 and limit["of_square_rate"] > 0
    # Forward, input gradient, weight gradient: 6 operations a weight of a matrix and a token.
    tokens, matrices = sum(work.spec()["lengths"]), 2 * 12 * 16 * 16
    read = tokens + 2 * work.queries  # a reply's last token is not read; its query's three are
    low, high = 6 * matrices * read, 6 * (matrices * 6 * 12 + 32 * 16 * 6 * 12)
    assert 0.5 * low < limit["update_gflop"] * 1e9 < 1.5 * high
    report.merge([ours, limit], tmp_path)
    report.merge([ours | {"work": "W1"}], tmp_path)
    report.merge([ours | {"about": "again"}], tmp_path)
    rows = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert [(row["work"], row["about"]) for row in rows] == [("W0", "again"), ("W1", "a miniature")]
    assert {"work", "peer", "speed_ratio", "memory_ratio", "spread", "machine"} <= set(rows[0])
    assert "| W1 | fake |" in (tmp_path / "bench.md").read_text(encoding="utf-8")


def test_a_peer_that_did_less_is_not_measured(work):
    with side(work) as ours, side(work) as same, side(work, short=1) as less:
        driver.take_turns([ours, same, less], 2)
        assert driver.row(work, ours, same, Peer("fake"))["rounds"] == 2
        with pytest.raises(WorkDiffers, match="tokens"):
            driver.row(work, ours, less, Peer("fake"))


def test_a_failing_side_reports_the_reason(work):
    with side(work, lengths=None) as broken:
        broken.build()
        with pytest.raises(driver.SideFailed, match="TypeError: 'NoneType' object is not iterable"):
            broken.step()


def side(work: Work, **changes) -> driver.Side:
    spec = work.spec() | work.peers[0].settings | changes
    return driver.Side("fake", driver.command_of("fake"), spec)


def test_a_difference_is_named_or_refused():
    ours = {"tokens": 9, "optimizer_steps": 2, "batch": 6, "minibatch": 3, "epochs": 1, "precision": "float32"}
    ours["trained"] = 1000
    assert compare(ours, ours, {}) == []
    (said,) = compare(ours, ours | {"trained": 2000}, {"trained": "two networks"})
    assert said == "trained 1,000 here, 2,000 there: two networks"
    for what in ours:
        with pytest.raises(WorkDiffers, match=what):
            compare(ours, ours | {what: 7}, {})
    with pytest.raises(WorkDiffers, match="one side"):
        compare(ours, {k: v for k, v in ours.items() if k != "epochs"}, {})


def test_all_products_of_an_update_are_recorded(tmp_path):
    layer = torch.nn.Linear(8, 4)
    inner = torch.randn(6, 8, requires_grad=True)
    heads = torch.randn(3, 1, 2, 3, 4, requires_grad=True)
    with torch.no_grad():
        layer(inner)
    with products.Recorder(layer.parameters()) as recorder, torch.no_grad():
        layer(inner)  # before the update: not part of it
    assert recorder.products == []
    with recorder:
        with recorder.pool(1) as beside:
            beside.submit(layer, torch.ones(3, 8)).result()
        layer(inner).sum().backward()
        torch.nn.functional.scaled_dot_product_attention(*heads).sum().backward()
        torch.nn.functional.gelu(torch.nn.functional.layer_norm(inner, (8,)), approximate="tanh").sum().backward()
    products.write(str(tmp_path / "products.json"), recorder, torch.optim.AdamW(layer.parameters()), 3)
    replay = products.Replay(str(tmp_path / "products.json"))
    assert replay.flops == 3 * 2 * 6 * 8 * 4 + 2 * 3 * 8 * 4, "forward, input gradient, weight gradient; and beside"
    shapes = sorted(tuple(named["out"].shape) for _, _, named in replay.products[0])
    assert shapes in ([(4, 8), (6, 4), (6, 8)], [(6, 4), (6, 8), (8, 4)])
    assert len(replay.weights) == 2, "a weight is one tensor in both directions; the other one is the bias"
    assert set(replay()) == {"products", "kernels", "optimizer"}
    assert [len(calls) for calls in replay.all] == [3 + 6, 1], "attention, GELU and norm, each with its gradient"
    assert products.kinds(str(tmp_path / "products.json")) == "float32"
