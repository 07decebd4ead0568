"""Every wrong sampler on a real run: how far below 0 KL falls, and which causes the diagnosis names."""

import importlib
import sys
from functools import cache
from pathlib import Path

import pytest
from cases import cases, slow

from operant import Learner, diagnose
from operant.tools.report.diagnosis.sampling import SETTINGS
from operant.training.setup import MaskOptions

pytestmark = pytest.mark.filterwarnings("ignore")


sys.path.append(str(Path(__file__).parents[1] / "recipes"))
NEGATIVE = importlib.import_module("negative_kl")
STEPS = {"top_k": 16, "top_p": 16, "cold": 16, "min_length": 9, "padding": 6, "dropout": 5}
"""Steps after which KL is many standard errors below 0."""


@cache
def wrong(cause: str, declared: bool) -> Learner:
    made = NEGATIVE.CAUSES[cause]
    return NEGATIVE.provoke(made.push, made.settings, made.declared if declared else {}, STEPS.get(cause, 4))


def names(learner) -> set[str]:
    return {f.name for f in diagnose(learner)} & {"negative_kl", "other_sampler", "padding", "declared_otherwise"}


def below_zero(learner) -> bool:
    mean, error = NEGATIVE.kl(learner)
    return mean < -1 and mean < -5 * error


@pytest.mark.parametrize("cause", ["min_length", slow("dropout"), slow("top_k"), slow("top_p")])
def test_kl_falls_below_zero_and_the_declared_setting_is_named(cause):
    learner = wrong(cause, True)
    (finding,) = NEGATIVE.findings(learner)
    assert below_zero(learner) and (finding.name, finding.level) == ("negative_kl", "problem")
    assert f"KL is {NEGATIVE.kl(learner)[0]:.2f} nats a reply" in finding.message
    assert finding.cause.startswith(f"{cause}={NEGATIVE.CAUSES[cause].declared[cause]!r}, as declared: ")
    assert not any(f"{other}=" in finding.cause for other in SETTINGS if other != cause)
    assert SETTINGS[cause].remedy in finding.remedy


@cases(
    ("min_length", "min_length", "top_k"),
    slow("top_k", "top_k", "dropout"),
    slow("dropout", "dropout", "top_k"),
    slow("top_p", "top_p", "dropout"),
    slow("cold", "a temperature below 1", "dropout"),
)
def test_undeclared_it_is_one_candidate_of_several(cause, word, opposite):
    learner = wrong(cause, False)
    (finding,) = NEGATIVE.findings(learner)
    assert below_zero(learner) and finding.name == "negative_kl"
    claim, candidates = finding.cause.split("Candidates: ")
    assert claim.startswith("the replies do not come from this policy's own distribution")
    assert "do not show which setting it was" in claim and not any(name in claim for name in SETTINGS)
    assert word in candidates and opposite not in candidates and "," in candidates


def test_declaring_an_unscored_setting_changes_no_number():
    runs = [[m["kl/per_reply"] for m in wrong("min_length", declared).history] for declared in (True, False)]
    assert runs[0] == runs[1]


def test_padding_is_recognised_and_makes_kl_negative():
    learner = wrong("padding", False)
    (finding,) = NEGATIVE.findings(learner)
    assert below_zero(learner) and finding.name == "negative_kl"
    assert finding.cause.startswith("padding is counted as text") and "Candidates" not in finding.cause


@pytest.mark.parametrize("cause", ["hot", slow("cold")])
def test_an_undeclared_temperature_shows_at_the_first_step(cause):
    assert names(declared := wrong(cause, True)) == {"declared_otherwise"} and NEGATIVE.kl(declared, 2)[0] > 0
    made = NEGATIVE.CAUSES[cause]
    (finding,) = NEGATIVE.findings(NEGATIVE.provoke(made.push, made.settings, {}, 1))
    assert finding.name == "other_sampler" and finding.step == 1
    side = "below" if cause == "cold" else "above"
    assert f"a temperature {side} 1" in finding.cause.split("Candidates: ")[1]


@pytest.mark.slow
def test_stored_truncation_makes_kl_negative_too():
    learner = NEGATIVE.own("variety", 10, **{"sampling.top_k": 10, "sampling.truncation": "stored"})
    (finding,) = NEGATIVE.findings(learner)
    assert below_zero(learner) and finding.name == "negative_kl"
    assert finding.cause.startswith("sampling.top_k=10") and "--sampling.top_k 0" in finding.remedy
    learner.options["mask"] = MaskOptions()  # NLPO without its mask is refused, so that is no remedy
    (finding,) = NEGATIVE.findings(learner)
    assert "the method's mask" in finding.cause and "--sampling" not in finding.remedy


@cases(("blame", "generate"), slow("variety", "own"))
def test_correctly_sampled_replies_have_no_finding(push, sampler):
    learner = NEGATIVE.own(push, 9) if sampler == "own" else NEGATIVE.provoke(push, {}, {}, 9)
    assert names(learner) == set()
    mean, error = NEGATIVE.kl(learner)
    assert mean > 5 * error > 0  # it has moved as far as the others
