"""Histograms on a common grid: merging equals the histogram of all values, in any order."""

import random
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from cases import cases

from operant.metrics.collect import of_texts
from operant.tally import BINS, Histogram, Tally


def counted(values, histogram):
    """Return the counts on the grid of the histogram, computed by hand."""
    values = list(values)
    edges = [(histogram.start + i) * histogram.width for i in range(len(histogram.counts) + 1)]
    return [sum(low <= v < high for v in values) for low, high in pairwise(edges)]


@cases((0.0, 1.0), (-8.0, 3.0), (1e6, 1e6 + 1), (0.25, 0.25), (-1e-9, 1e-9), (0.0, 0.0))
def test_bins_count_their_values(low, high):
    values = np.random.default_rng(0).uniform(low, high, 500).tolist() if low < high else [low] * 5
    histogram = Histogram.of(values)
    assert list(histogram.counts) == counted(values, histogram)
    assert sum(histogram.counts) == len(values) and len(histogram.counts) <= BINS
    assert histogram.counts[0] and histogram.counts[-1]
    assert np.log2(histogram.width) == round(np.log2(histogram.width))
    if high - low > 1e-6:
        assert len(histogram.counts) > BINS / 4  # the grid is not too coarse


def test_merging_is_counting_together_in_any_order():
    draw = random.Random(1)
    parts = [[draw.gauss(mean, spread) for _ in range(40)] for mean, spread in ((0, 1), (3, 0.01), (-40, 9), (0.1, 0))]
    for _ in range(6):
        draw.shuffle(parts)
        merged = Histogram.of(parts[0])
        for part in parts[1:]:
            merged = merged.merge(Histogram.of(part))
        assert list(merged.counts) == counted(chain.from_iterable(parts), merged) and len(merged.counts) <= BINS


def test_nan_and_infinity_are_left_out_of_histograms():
    assert sum(Histogram.of([1.0, float("nan"), float("inf"), 2.0]).counts) == 2
    assert Histogram.of([]) is None and Histogram.of([float("nan")]) is None
    tally = Tally()
    tally.histogram("x", [])
    assert tally.histograms == {} and tally.result() == {}


def test_a_tally_pools_histograms_over_parts():
    one, two, both = Tally(), Tally(), Tally()
    x = torch.arange(12.0).view(3, 4)
    where = x % 2 == 0
    one.histogram("x", x, where)
    two.histogram("x", [100.0])
    both.histogram("x", [*x[where].tolist(), 100.0])
    assert one.merge(two).histograms == both.histograms


def test_things_that_several_ranks_have_are_one():
    """A share of different words of each rank has no mean that is that of all: here 2 / 2 and 2 / 4, of all 3 / 6."""
    texts = ["the cat", "the dog the dog"]
    parts = [of_texts([text]) for text in texts]
    assert parts[0].merge(parts[1]).result() == pytest.approx(of_texts(texts).result())
    assert parts[0].result()["text/distinct_1"] == 3 / 6 and parts[0].result()["text/top_word"] == 3 / 6
    tally = Tally()
    tally.things("game/states_per_1000", [("a", 1), ("a", 1), ("b", 1), ("a", 2)])
    tally.things("text/top_word", [])
    assert tally.result() == {"game/states_per_1000": 750.0}
