"""The simulation of a cluster, held to sums."""

from dataclasses import replace

import pytest
from benchmarks import cluster

COSTS = cluster.Costs(
    decode_step=0.1, decode_token=0.01, train_step=2.0, train_token=0.01, reward=0.05, serial=0.5, sums=100.0,
    weights=50.0, link=100.0, latency=0.0, messages=0.0, prompt=10, reply=10, spread=0.0,
)  # fmt: skip


def test_a_step_in_turn_is_the_sum_of_its_parts():
    """16 replies on 4 ranks, 4 each: 10 x 0.1 + 40 x 0.01; 2 + 80 x 0.01; 4 x 0.05; 100 x 3/4 / 100; 0.5."""
    found = cluster.colocated(COSTS, 4, 16)
    assert found["step_seconds"] == pytest.approx(1.4 + 2.8 + 0.2 + 0.75 + 0.5)
    assert found["idle"] == pytest.approx(1 - 4.2 / 5.65) and found["binds"] == "training" and found["staleness"] == 0
    ahead = cluster.colocated(COSTS, 4, 16, ahead=True)
    assert ahead["step_seconds"] == pytest.approx(4.2) and ahead["idle"] == pytest.approx(0) and ahead["staleness"] == 1


def test_separate_workers_are_as_fast_as_the_slower_side():
    """2 train (8 replies each: 2 + 160 x 0.01 + 0.5 of sums + 0.5), 2 generate (8 each: 1 + 0.8 + 0.4)."""
    found = cluster.separate(COSTS, 4, 2, 16)
    assert found["step_seconds"] == pytest.approx(4.6) and found["binds"] == "training" and 1 <= found["staleness"] <= 2
    found = cluster.separate(replace(COSTS, decode_step=1.0), 4, 2, 16)
    assert found["step_seconds"] == pytest.approx(11.2, rel=0.1) and found["binds"] == "generation"


def test_lengths_that_spread_make_ranks_wait_for_the_slowest():
    """The mean of the largest of 100 normal numbers is 2.51 deviations above their mean."""
    spread = replace(COSTS, spread=0.3, decode_token=0.0)
    draws = cluster.random.Random(1)
    longest = [cluster.longest(spread, 100, draws) for _ in range(2000)]
    assert sum(longest) / len(longest) == pytest.approx(10 + 2.51 * 3, rel=0.01)
    assert cluster.colocated(spread, 8, 64)["idle"] > cluster.colocated(replace(spread, spread=0.0), 8, 64)["idle"]
