"""A long run is steady: the criteria find leaks, and a run meets them."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.soak import LEAKS, Sample, sample, summary, verdict
from rigs import on_ranks

ROOT = Path(__file__).parents[2]

STEADY = [
    Sample(500_000 + (40_000 if i > 20 else 1000 * i) + 100 * (i % 7), 20, 4, 0.1 + 0.01 * (i % 3)) for i in range(400)
]


def test_warm_up_and_noise_count_as_steady():
    assert verdict(STEADY) == []
    assert verdict([replace(s, threads=s.threads + (i > 250)) for i, s in enumerate(STEADY)]) == []  # a pool fills up


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda i, s: replace(s, memory=s.memory + 24 * i), "memory grows by 2"),
        (lambda i, s: replace(s, handles=s.handles + (i > 350)), "handles: 20 in the second quarter, 21 after it"),
        (lambda i, s: replace(s, threads=s.threads + i // 60), "threads: 7 in the second quarter, 10 after it"),
        (lambda i, s: replace(s, seconds=s.seconds * (1 + i / 400)), "a step of the last quarter takes 1.3"),
    ],
)
def test_growth_is_reported(change, message):
    (text,) = verdict([change(i, s) for i, s in enumerate(STEADY)])
    assert message in text


def test_a_sample_measures_this_process():
    before = sample(0.1)
    with open(__file__, encoding="utf-8"):
        after = sample(0.2)
    assert after.handles == before.handles + 1 and 10_000 < after.memory < 50_000_000 and after.threads >= 1
    assert summary(STEADY, 400)["growth_kb"] == pytest.approx(0.0, abs=1)


def leaking(rank, world):
    """What is said of a process in which every leak but that of time is planted."""
    samples = []
    for step in range(400):
        for name in LEAKS.keys() - {"time"}:
            LEAKS[name](step)
        samples.append(sample(0.1))
    return verdict(samples)


def test_leaks_are_found():
    (found,) = on_ranks(leaking, 1)
    assert [text.split(":")[0].split(" by")[0] for text in found] == ["memory grows", "handles", "threads"]


@pytest.mark.slow
def test_a_run_is_steady(tmp_path):
    """Handles and threads as in the long form. Memory grows in pieces of some 10 MB, too large for so few steps, and
    steps may be slow on a loaded machine: only the 2,000 steps of the command check those two."""
    command = [sys.executable, "-m", "benchmarks.soak", "--steps", "160", "--results", str(tmp_path / "soak.json")]
    grown = list[float]()
    while not grown or (grown[-1] >= 100 and len(grown) < 2):  # a loaded machine may take one piece more
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
        assert "growth_kb: " in done.stdout, output
        assert not re.search("^(handles|threads): .* after it", done.stdout, re.M), output
        grown.append(float(done.stdout.split("growth_kb: ")[1].split()[0]))
    assert grown[-1] < 100, output
