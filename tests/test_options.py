"""Options by name: full, nested or short; what is converted, and what is refused."""

from ast import literal_eval
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from cases import cases

from operant import Learner, OperantError
from operant.bounds import bounded, check_bounds, rules
from operant.options import compose, convert, names, parse
from operant.runs.config import config_schema, configure
from operant.storage import old_names
from operant.tools.sweep.grid import divide


@dataclass(frozen=True)
class Kl:
    coef: float = 0.1
    kind: str = "k1"


@dataclass(frozen=True)
class Update:
    epochs: int = 4
    clip: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)


def loss(out, batch, *, clip: float = 0.2, entropy_coef: float = 0.0):
    """A function whose keyword-only arguments are options."""


SCHEMA = {"kl": Kl, "update": Update, "loss": loss}


def test_an_option_may_be_said_in_several_ways():
    for given in ({"kl.coef": 0.3}, {"kl": {"coef": 0.3}}, {"coef": "0.3"}, {"kl.coef": "3e-1"}):
        assert compose(SCHEMA, given)["kl"] == Kl(coef=0.3)
    assert compose(SCHEMA, {"loss.clip": "0.1", "entropy-coef": 1})["loss"] == {"clip": 0.1, "entropy_coef": 1.0}


@cases(
    ({"clip": 0.1}, "use update.clip or loss.clip"),
    ({"kl.ceof": 0.1}, "did you mean 'kl.coef'"),
    ({"epoch": 1}, "did you mean 'epochs'"),
    ({"loss.epochs": 2}, "did you mean 'update.epochs'"),
    ({"epochs": "2.5"}, "a whole number"),
    ({"epochs": True}, "a whole number"),
    ({"coef": "nan"}, "a finite number"),
    ({"update.clip": "much"}, "or none"),
    ({"betas": "0.9"}, "give 2 values"),
)
def test_mistakes_are_sentences(given, sentence):
    with pytest.raises(OperantError, match=sentence):
        compose(SCHEMA, given)


def test_values():
    for value, kind, expected in (
        ("none", float | None, None),
        ("None", str | None, None),
        ("1e-4", float, 1e-4),
        ("1e2", int, 100),
        ("yes", bool, True),
        ("0.9,0.95", tuple[float, float], (0.9, 0.95)),
        ("a,b", tuple[str, ...], ("a", "b")),
        ("a,b", list, ["a", "b"]),
        ("a,b", set[str], {"a", "b"}),
        ("3,4", Iterable[int], [3, 4]),
        ("8", Literal[4, 8], 8),
    ):
        assert convert(value, kind, "x") == expected
    assert parse("a: &x {b: 1}\nc: {<<: *x, b: 2}", "x")["c"] == {"b": 2}, "no name that is written twice"


@cases(({"kl.coef": 0.2, "gae": {}}, "gae, kl.coef"), ({"preset": "trl"}, "preset"))
def test_options_beside_composed_ones_are_refused(given, named):
    composed = configure({"tasks": "builtin:openings/train", "reward": "letters:e"}).learner
    with pytest.raises(OperantError, match=f"^{named} beside composed="):
        Learner("no-such-model", composed=composed, **given)


BOUNDS = Path(__file__).with_name("bounds.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("sentence", BOUNDS)
def test_a_value_outside_its_bounds_is_refused(sentence):
    name, _, value = sentence.partition(": ")[0].partition("=")
    given = {"tasks": "builtin:openings/train", "reward": "letters:e", name: literal_eval(value)}
    with pytest.raises(OperantError) as raised:
        configure(given)
    assert str(raised.value).startswith(sentence)


@dataclass(frozen=True)
class Bounded:
    share: float = bounded(0.5, above=0, at_most=1)
    most: float = bounded(0.5, at_most=1)
    count: int | None = bounded(None, at_least=2)
    odd: int = bounded(1, fits=lambda n: n % 2, rule="odd")
    size: float = bounded(1.0, above=0, below=float("inf"))

    def __post_init__(self) -> None:
        check_bounds(self, "x")


def test_the_ends_of_bounds_are_allowed_or_not():
    assert Bounded(share=1, count=2, odd=3, size=1e300).count == 2
    written = {"share": "in (0, 1]", "most": "at most 1", "count": "at least 2", "odd": "odd", "size": "above 0"}
    assert rules(Bounded) == written
    for name, value, why in (
        ("most", 1.5, "x.most=1.5: it must be at most 1"),
        ("share", 0.0, r"x.share=0.0: it must be in \(0, 1\]"),
        ("share", float("nan"), "x.share=nan"),
        ("count", 1, "x.count=1: it must be at least 2, or none"),
        ("odd", 2, "x.odd=2: it must be odd"),
        ("size", float("inf"), "x.size=inf"),
    ):
        with pytest.raises(OperantError, match=why):
            Bounded(**{name: value})


# --- names of earlier versions ----------------------------------------------------------------------------------------
@pytest.fixture
def renamed(monkeypatch):
    monkeypatch.setattr(old_names, "SCHEMA", 3)
    monkeypatch.setattr(old_names, "RENAMED", {1: {"guests": "isolation"}, 2: {"kl.coef": "kl.price"}})


def test_names_of_earlier_versions_are_read_with_todays(renamed):
    old = {"guests": {"timeout": 3}, "guests.workers": 2, "kl": {"coef": 0.1, "kind": "k1"}, "steps": 4}
    new = {"isolation": {"timeout": 3}, "isolation.workers": 2, "kl": {"price": 0.1, "kind": "k1"}, "steps": 4}
    assert old_names.current(old, "x") == new
    assert old_names.current({"schema": 2, "kl.coef": 0.1}, "x") == {"kl.price": 0.1}
    assert old_names.current({"schema": 3, "kl.coef": 0.1}, "x") == {"kl.coef": 0.1}, "a name of today's own"


@cases(
    ({"guests": {"timeout": 3}, "isolation": {"workers": 2}}, "'guests' and 'isolation'"),
    ({"guests.timeout": 3, "isolation": {"timeout": 4}}, "'guests.timeout' and 'isolation.timeout'"),
    ({"schema": 2, "kl": {"coef": 0.1, "price": 0.2}}, "'kl.coef' and 'kl.price'"),
    ({"schema": 2, "kl": {"coef": 0.1}, "kl.price": 0.2}, "'kl.coef' and 'kl.price'"),
)
def test_an_option_with_both_its_old_and_its_new_name_is_refused(options, names, renamed):
    with pytest.raises(OperantError, match=rf"run/config\.yaml has both {names}.*: remove one of them"):
        old_names.current(options, "run/config.yaml")


@pytest.mark.parametrize("schema", [0, 99, "2", True, None])
def test_a_configuration_of_an_unknown_schema_is_refused(schema):
    with pytest.raises(OperantError, match="has schema"):
        old_names.current({"schema": schema}, "run/config.yaml")


@pytest.mark.parametrize("control", [{"control": "fixed"}, {"control": "adaptive"}, {}])
def test_a_horizon_that_every_run_stored_and_nothing_read_is_left_out(control):
    """10,000 was the default; it is kept where the controller has used it, and in a recipe that names none."""
    given = {"horizon": 10_000.0} | control
    kept = control if control == {"control": "fixed"} else given
    assert old_names.current({"kl": given, "steps": 4}, "c") == {"kl": kept, "steps": 4}
    assert old_names.current({f"kl.{n}": x for n, x in given.items()}, "c") == {f"kl.{n}": x for n, x in kept.items()}


@cases(("model", "policy", "./gpt2"), ("ahead", "rollouts_ahead", 2), ("carry", "partial_rollout_tokens", 3))
def test_an_alias_is_accepted_for_its_option(alias, name, value, tmp_path):
    """From Python and the command line, in a recipe, and in a sweep; beside the option itself it is refused."""
    usual = {"tasks": "builtin:openings/train", "reward": "letters:e"}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("".join(f"{name}: {value}\n" for name, value in (usual | {alias: value}).items()))
    for config in (configure(usual | {alias: value}), configure({}, str(recipe))):
        assert getattr(config.train, name) == value
    assert configure(usual | {"model": {"precision": "bfloat16"}}).train.policy == "builtin:reviews-lm"  # a group
    axes, fixed = divide({alias: str(value), "kl.coef": "0,1"}, "sentiment")
    assert fixed == {name: str(value)} and [axis.name for axis in axes] == ["kl.coef"]
    with pytest.raises(OperantError, match=f"option {name} is given twice, as {alias} too"):
        configure(usual | {alias: value, name: value})


def test_every_renamed_option_exists_today():
    known = config_schema("ppo")
    for old, new in [pair for table in old_names.RENAMED.values() for pair in table.items()]:
        assert new in known or new in names(known)
        assert old not in known and old not in names(known)
