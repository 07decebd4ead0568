"""Options by name: full, nested or short; what is converted, and what is refused."""

from dataclasses import dataclass

import pytest

from operant import Learner, OperantError
from operant.options import compose, convert, names
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


@pytest.mark.parametrize(
    "given", [{"kl.coef": 0.3}, {"kl": {"coef": 0.3}}, {"coef": "0.3"}, {"kl-coef".replace("-", "."): "3e-1"}]
)
def test_three_ways_to_say_one_thing(given):
    assert compose(SCHEMA, given)["kl"] == Kl(coef=0.3)


def test_a_functions_options_are_its_arguments():
    assert compose(SCHEMA, {"loss.clip": "0.1", "entropy-coef": 1})["loss"] == {"clip": 0.1, "entropy_coef": 1.0}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"clip": 0.1}, "use update.clip or loss.clip"),
        ({"kl.ceof": 0.1}, "did you mean 'kl.coef'"),
        ({"epoch": 1}, "did you mean 'epochs'"),
        ({"epochs": "2.5"}, "a whole number"),
        ({"epochs": True}, "a whole number"),
        ({"coef": "nan"}, "a finite number"),
        ({"update.clip": "much"}, "or none"),
        ({"betas": "0.9"}, "give 2 values"),
    ],
)
def test_mistakes_are_sentences(given, sentence):
    with pytest.raises(OperantError, match=sentence):
        compose(SCHEMA, given)


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("none", float | None, None),
        ("None", str | None, None),
        ("1e-4", float, 1e-4),
        ("1e2", int, 100),
        ("yes", bool, True),
        ("0.9,0.95", tuple[float, float], (0.9, 0.95)),
        ("a,b", tuple[str, ...], ("a", "b")),
    ],
)
def test_values(value, kind, expected):
    assert convert(value, kind, "x") == expected


@pytest.mark.parametrize(
    ("given", "named"), [({"kl.coef": 0.2, "gae": {}}, "gae, kl.coef"), ({"preset": "trl"}, "preset")]
)
def test_options_beside_composed_ones_are_refused(given, named):
    composed = configure({"tasks": "builtin:openings/train", "reward": "letters:e"}).learner
    with pytest.raises(OperantError, match=f"^{named} beside composed="):
        Learner("no-such-model", composed=composed, **given)


# --- names of earlier versions ----------------------------------------------------------------------------------------


def test_names_of_earlier_versions_are_read_with_todays(monkeypatch):
    monkeypatch.setattr(old_names, "SCHEMA", 3)
    monkeypatch.setattr(old_names, "RENAMED", {1: {"guests": "isolation"}, 2: {"kl.coef": "kl.price"}})
    old = {"guests": {"timeout": 3}, "guests.workers": 2, "kl": {"coef": 0.1, "kind": "k1"}, "steps": 4}
    new = {"isolation": {"timeout": 3}, "isolation.workers": 2, "kl": {"price": 0.1, "kind": "k1"}, "steps": 4}
    assert old_names.current(old, "x") == new
    assert old_names.current({"schema": 2, "kl.coef": 0.1}, "x") == {"kl.price": 0.1}
    assert old_names.current({"schema": 3, "kl.coef": 0.1}, "x") == {"kl.coef": 0.1}, "a name of today's own"


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"guests": {"timeout": 3}, "isolation": {"workers": 2}}, "'guests' and 'isolation'"),
        ({"guests.timeout": 3, "isolation": {"timeout": 4}}, "'guests.timeout' and 'isolation.timeout'"),
        ({"schema": 2, "kl": {"coef": 0.1, "price": 0.2}}, "'kl.coef' and 'kl.price'"),
        ({"schema": 2, "kl": {"coef": 0.1}, "kl.price": 0.2}, "'kl.coef' and 'kl.price'"),
    ],
)
def test_an_option_with_both_its_old_and_its_new_name_is_refused(options, names, monkeypatch):
    monkeypatch.setattr(old_names, "SCHEMA", 3)
    monkeypatch.setattr(old_names, "RENAMED", {1: {"guests": "isolation"}, 2: {"kl.coef": "kl.price"}})
    with pytest.raises(OperantError, match=rf"run/config\.yaml has both {names}.*: remove one of them"):
        old_names.current(options, "run/config.yaml")


@pytest.mark.parametrize("schema", [0, 99, "2", True, None])
def test_a_configuration_of_an_unknown_schema_is_refused(schema):
    with pytest.raises(OperantError, match="has schema"):
        old_names.current({"schema": schema}, "run/config.yaml")


@pytest.mark.parametrize("control", ["fixed", "adaptive"])
def test_a_horizon_that_every_run_stored_and_nothing_read_is_left_out(control):
    """10,000 was the default; it is kept where the controller of the run has used it."""
    kept = {"horizon": 10_000.0} if control == "adaptive" else {}
    nested = {"kl": {"control": control, "horizon": 10_000.0}, "steps": 4}
    assert old_names.current(nested, "c") == {"kl": {"control": control} | kept, "steps": 4}
    flat = {"kl.horizon": 10_000.0, "kl.control": control}
    assert old_names.current(flat, "c") == {"kl.control": control} | {f"kl.{name}": x for name, x in kept.items()}


@pytest.mark.parametrize("given", [{"guests.timeout": 3}, {"guests": {"timeout": 3}}])
def test_an_old_name_that_somebody_gives_is_refused_with_todays(given):
    with pytest.raises(OperantError, match="is called 'isolation"):
        configure({"tasks": "builtin:openings/train", "reward": "letters:e", **given})


@pytest.mark.parametrize(
    ("alias", "name", "value"),
    [("model", "policy", "./gpt2"), ("ahead", "rollouts_ahead", 2), ("carry", "partial_rollout_tokens", 3)],
)
def test_an_alias_is_accepted_for_its_option(alias, name, value, tmp_path):
    """From Python and the command line, in a recipe, and in a sweep; beside the option itself it is refused."""
    usual = {"tasks": "builtin:openings/train", "reward": "letters:e"}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("".join(f"{name}: {value}\n" for name, value in (usual | {alias: value}).items()))
    for config in (configure(usual | {alias: value}), configure({}, str(recipe))):
        assert getattr(config.train, name) == value
    axes, fixed = divide({alias: str(value), "kl.coef": "0,1"}, "sentiment")
    assert fixed == {name: str(value)} and [axis.name for axis in axes] == ["kl.coef"]
    with pytest.raises(OperantError, match=f"option {name} is given twice, as {alias} too"):
        configure(usual | {alias: value, name: value})


def test_the_group_model_is_no_alias():
    config = configure({"tasks": "builtin:openings/train", "reward": "letters:e", "model": {"precision": "bfloat16"}})
    assert config.learner["model"].precision == "bfloat16" and config.train.policy == "builtin:reviews-lm"


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"kl": "0.1"}, r"kl='0\.1': kl is a group of options \(coef, kind, .*\): write kl\.coef=0\.1$"),
        ({"optimizer": 1e-4}, r"write optimizer\.lr=0\.0001$"),
        ({"update": 4}, r"write update\.micro_tokens=4$"),
        ({"sampling": "greedy"}, r"write sampling\.temperature=VALUE$"),
    ],
)
def test_a_value_for_a_whole_group_names_an_option_of_it(given, remedy):
    with pytest.raises(OperantError, match=remedy):
        configure({"tasks": "builtin:openings/train", "reward": "letters:e", **given})


def test_every_renamed_option_exists_today():
    known = config_schema("ppo")
    for old, new in [pair for table in old_names.RENAMED.values() for pair in table.items()]:
        assert new in known or new in names(known)
        assert old not in known and old not in names(known)
