"""Generated configurations over every option that there is: each runs a step, or is refused in one sentence.

Options come from `config_schema`, so a new one joins by itself, and what an option of words may be is read off its own
refusal. `python -m benchmarks.configs` tries 2,000 of them and counts.
"""

import datetime
import json
import math
import re
import tempfile
import typing
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from cases import cases
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from toys import letters, lm, on_disk

from operant import Learner, OperantError, diagnose, train
from operant import options as named
from operant.algorithms import ALGORITHMS
from operant.runs.config import config_schema, configure
from operant.runs.folder import read_config
from operant.runs.notes import idle
from operant.tools.cli import main
from operant.tools.report.diagnosis import EXPLAINS, read_history

TASKS = ["ab", "cde", "the end", "h"]
BASE = {"steps": 1, "batch": 4, "probes": 2, "sampling.max_tokens": 4, "update.epochs": 1, "update.minibatch": 2}
MOST = {"steps": 2, "batch": 8, "samples": 4, "update.epochs": 2, "evaluation.samples": 2}
MOST |= {"sampling.max_tokens": 6, "lora.rank": 8, "isolation.workers": 2}
"""Options whose size costs time and nothing else, and the largest that is tried; what does not fit at all is tried."""
TOO_LARGE = {"sampling.max_tokens": 64, "lora.rank": 100_000}
"""From here on the model cannot have it, so it has to be refused."""
NONSENSE = ["", " ", "nonsense", "-", "--", "{", "}", "[", "0x", "1e"]
NONSENSE += ["1,2,3", "ab:", ":", "../..", "/", "\x1b[31m", "ä"]
NONSENSE += ["~nobody-called-so/x", "a" * 5000, "9" * 5000, "{a: 2001-99-99}", "{" * 2000, "none", "null", "True", "5"]
WHOLE = [0, -1, 1, 2, 3, 2**31, 2**53 + 1, 2**63, 10**30, 10**400, -(10**30), "1e2", "2.5", "0x10", 3.0, 2.5]
NUMBERS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-320, 1e-300, 1e-45, 1e-8, 1e38, 1e39, 1e300, 1.7e308, 10**400, "1e-3", "1e400"]
NUMBERS += [math.nan, math.inf, -math.inf, "nan", "inf", 1 - 1e-16, 2]
WRONG = [None, True, False, [], {}, [1, "a"], {"a": 1}, b"12", 1j, datetime.date(2001, 1, 1), Path("x"), {1}, object]
WRONG += [[[]], {"a": {"b": []}}, torch.zeros(2), ()]
RAW = ["2001-99-99", "!!int x", "[", "{", "*a", "&a [*a]", "0b_", "~"]
RAW += ["1:30", "!!binary x", "? ", "'", "!!python/name:os.system ''"]
"""Written into YAML as they stand."""
SAMPLINGS = [{"temperature": 0.7}, {"top_k": 1}, {"top_p": "0.9"}, {"top_p": "hot"}, {"temprature": 1}, {"top_k": -1}]
SAMPLINGS += [{"max_new_tokens": [3]}, {"stop_strings": 5}, {"num_beams": 4}, {"temperature": math.nan}, {5: 5}]
REWARDS = ["letters:a", {"letters:a": 1.0, "length:3": -0.5}, {"letters:a": "x"}, {5: 1}, {}, "letters", "letters:", 5]
REWARDS += ["pattern:(", "no_such_module:f", "..:f", "minus_query:letters:a", {"length:<=3": math.inf}, "json:dumps"]
SAYS_WHY = {"no_advantage", "constant"} | {name for name, others in EXPLAINS.items() if "constant" in others}
"""Findings that say of a step why it moved no weight; empty replies stand for the equal scores that they get."""


@cache
def folder() -> Path:
    place = Path(tempfile.mkdtemp(prefix="operant-configs-"))
    on_disk(place / "model", lm("gpt2", vocab=len(letters()), spread=0.1))
    (place / "tasks.txt").write_text("\n".join(TASKS), encoding="utf-8")
    return place


def usual() -> dict[str, Any]:
    return {"policy": str(folder() / "model"), "tasks": str(folder() / "tasks.txt"), "reward": "letters:a", **BASE}


def leaves(kind: Any) -> list[Any]:
    inner = [a for a in typing.get_args(kind) if a is not Ellipsis]
    return [leaf for a in inner for leaf in leaves(a)] if inner else [kind]


@cache
def words(algorithm: str, name: str) -> list[str]:
    """What an option of words may be: of the words of its refusal, those that are not refused."""
    said = _refusal(algorithm, name, "nonsense") or ""
    return [word for word in dict.fromkeys(re.findall(r"[\w-]+", said)) if _refusal(algorithm, name, word) is None]


def _refusal(algorithm: str, name: str, given: Any) -> str | None:
    try:
        configure(usual() | {"algorithm": algorithm, name: given})
    except OperantError as error:
        return str(error)
    return None


@cache
def known(algorithm: str) -> dict[str, tuple[Any, Any]]:
    schema = config_schema(algorithm)
    kinds, places = named.kinds(schema), named.names(schema)
    return {full: (kinds[full], named.defaults(schema[group])[name]) for full, (group, name) in places.items()}


def special(name: str) -> list[Any]:
    held = {
        "policy": [str(folder() / "model"), lm("gpt2", vocab=45), torch.nn.Linear(2, 2)],
        "tasks": [str(folder() / "tasks.txt"), TASKS, str(folder()), ["z" * 300], [5], [[3], [10**30]], [[-1]], "a/b"],
        "reward": REWARDS,
        "reference": ["copy", None, str(folder() / "model"), str(folder())],
        "evaluate": [None, str(folder() / "tasks.txt"), TASKS[:2]],
        "evaluation.sampling": SAMPLINGS,
        "evaluation.metrics": [None, "distinct", "bleu,exact_match", {"distinct": {"n": 1}}, "b", {"distinct": 3}, [5]],
        "best": ["reward/mean", "-kl/per_reply", "evaluate/reward", "reward"],
        "preset": ["trl", "openai", "rl4lms", "textworld", "trunk", "trl,trunk", "tlr"],
        "data.template": "{text}! {text.upper} {text[0]} {0} { {nothing} {text!x} {text:>8} {text:d}".split(),
        "data.query_tokens": [1, "1-2", "2-1", "9" * 5000, f"1-{'9' * 30}"],
        "score.truncate_token": [3, "a", "abc", -1, 10**30],
        "sampling.stop_tokens": [(2,), "2,3", -1, 45, 10**30, "a"],
        "sampling.banned": [(3,), tuple(range(45)), tuple(range(3, 45)), -1, 45, 10**30],
        "lora.targets": ["c_attn", "all-linear", "lm_head", "wte", "c_attn,nothing"],
        "value.critic": ["copy", str(folder() / "model"), "no/such"],
        "device": ["cpu", "cuda:99", "meta", "cpu:7", "mps"],
        "trackers": ["tensorboard", "tensorbored", "tensorboard,tensorboard"],
    }
    return held.get(name, [])


def near(default: Any) -> st.SearchStrategy:
    if isinstance(default, bool) or default is None:
        return st.sampled_from([True, False, default])
    if isinstance(default, (int, float)):
        half = default // 2 if isinstance(default, int) else default / 2
        return st.sampled_from([default, 2 * default, half, default + 1])
    return st.just(default)


@st.composite
def value(draw: Any, algorithm: str, name: str, tame: bool) -> Any:
    kind, default = known(algorithm)[name]
    kinds = leaves(kind)
    pool = [*special(name), *(words(algorithm, name) if str in kinds else [])]
    usual = [near(default)] + [st.sampled_from(pool)] * bool(pool) + [st.sampled_from([1, 2])] * (int in kinds)
    if tame:
        return draw(st.one_of(usual))
    choices = [*usual, st.sampled_from(WRONG), st.sampled_from(NONSENSE), st.text(max_size=12)]
    if bool in kinds:
        choices += [st.sampled_from(["yes", "no", "true", "0", "maybe"])]
    if int in kinds:
        choices += [st.integers(-1, 9)] + [st.sampled_from(WHOLE)] * 2
    if float in kinds:
        choices += [st.floats(0, 1), st.floats()] + [st.sampled_from(NUMBERS)] * 2
    if typing.get_origin(kind) is tuple:
        choices += [st.lists(st.sampled_from([0.5, 0.9, 1, 2, 3, "a", "", -1, 0.0]), max_size=3)]
    return draw(st.one_of(choices))


def bounded(name: str, given: Any) -> Any:
    """Not larger than what only costs time, and small or impossible where sizes are."""
    try:
        number = float(given)
    except (TypeError, ValueError, OverflowError):
        return given
    return MOST[name] if name in MOST and MOST[name] < number < TOO_LARGE.get(name, math.inf) else given


@st.composite
def configurations(draw: Any) -> tuple[str, dict[Any, Any]]:
    """How it is said, and what: a few options on top of `usual`, and now and then a name that there is not."""
    algorithm = draw(st.sampled_from(["ppo", "ppo", *sorted(ALGORITHMS)]))
    tame = draw(st.booleans())
    every = st.sampled_from(sorted(known(algorithm)))
    names = draw(st.lists(every, unique=True, min_size=1, max_size=8 if tame else 3))
    chosen: dict[Any, Any] = {name: bounded(name, draw(value(algorithm, name, tame))) for name in names}
    if algorithm != "ppo" or draw(st.booleans()):
        chosen.setdefault("algorithm", algorithm)
    if not tame and not draw(st.integers(0, 7)):
        name = draw(every)
        cut = draw(st.integers(0, len(name)))
        odd = [name[:cut] + name[cut + 1 :], name[:cut] + "x" + name[cut:], name.upper(), ".", "kl"]
        chosen[draw(st.sampled_from(odd))] = draw(st.sampled_from([1, "x", None, {}, {"a": {"b": 1}}]))
    return draw(st.sampled_from(["keywords", "nested", "short", "yaml", "raw", "words"])), chosen


@contextmanager
def watched() -> Iterator[list[tuple[Learner, list[torch.Tensor]]]]:
    """The learners that are made while this lasts, each with the policy's trained weights as they begin."""
    made, usual = [], Learner.__init__

    def init(self: Learner, *given: Any, **named: Any) -> None:
        usual(self, *given, **named)
        made.append((self, [p.detach().clone() for p in trained(self)]))

    with patch.object(Learner, "__init__", init):
        yield made


def trained(learner: Learner) -> list[torch.Tensor]:
    """The policy's weights; their float32 masters, where they compute in fewer bits."""
    masters = {id(p): master for p, master in getattr(learner.optimizer, "pairs", ())}
    return [masters.get(id(p), p) for p in learner.policy.model.parameters() if p.requires_grad]


def attempt(form: str, chosen: Mapping[Any, Any], place: Path) -> str | None:
    """Train with these options; the refusal, or None where it ran. Whatever else is raised goes through."""
    given = usual() | dict(chosen)
    if form == "words":
        return _words(given, place)
    if form in ("yaml", "raw"):
        recipe = place / "recipe.yaml"
        recipe.write_text(_yaml(given, chosen if form == "raw" else {}), encoding="utf-8", errors="replace")
        told: dict[str, Any] = {"recipe": str(recipe)}
    else:
        told = _nested(given) if form == "nested" else _short(given) if form == "short" else given
    try:
        run = train(out=place / "run", **told)
    except OperantError as error:
        return str(error)
    assert all(bool(p.isfinite().all()) for p in run.policy.parameters()), "weights that are not finite"
    return None


def _words(given: Mapping[Any, Any], place: Path) -> str | None:
    said = StringIO()
    argv = [part for name, v in given.items() for part in (f"--{str(name).replace('_', '-')}", _typed(v))]
    with redirect_stdout(StringIO()), redirect_stderr(said):
        code = main(["train", *argv, "--out", str(place / "run")])
    assert code in (0, 2), said.getvalue()
    return said.getvalue().removeprefix("operant: ").removesuffix("\n") if code else None


def _typed(v: Any) -> str:
    if isinstance(v, (list, tuple)) and not any(isinstance(x, (list, tuple, dict)) for x in v):
        return ",".join(map(str, v))
    if isinstance(v, dict):
        return "{" + ", ".join(f"{k}: {x}" for k, x in v.items()) + "}"
    return str(v)


def _yaml(given: Mapping[Any, Any], raw: Mapping[Any, Any]) -> str:
    lines = []
    for number, (name, v) in enumerate(given.items()):
        text = RAW[(number + len(str(v))) % len(RAW)] if name in raw else None
        lines.append(f"{name}: {text}" if text else yaml.dump({name: _plain(v)}, allow_unicode=True).rstrip("\n"))
    return "\n".join(lines) + "\n"


def _plain(v: Any) -> Any:
    if isinstance(v, (list, tuple)):
        return [_plain(x) for x in v]
    if isinstance(v, dict):
        return {k: _plain(x) for k, x in v.items()}
    return v if v is None or isinstance(v, (bool, int, float, str, bytes, datetime.date, set)) else str(v)


def _nested(given: Mapping[Any, Any]) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    for name, v in given.items():
        group, dot, inner = name.partition(".")
        if dot and isinstance(out.get(group, {}), dict):
            out.setdefault(group, {})[inner] = v
        else:
            out[name] = v
    return out


def _short(given: Mapping[Any, Any]) -> dict[Any, Any]:
    lasts = [name.rpartition(".")[2] for name in given]
    return {last if lasts.count(last) == 1 else name: v for last, (name, v) in zip(lasts, given.items())}


def names_it(message: str, given: Mapping[Any, Any], form: str) -> bool:
    told = [part.lower() for name in given for part in (*str(name).split("."), repr(name)) if part]
    told += ["recipe.yaml"] * (form in ("yaml", "raw")) + ["option ''"] * ("." in given)
    values = [text for v in given.values() for text in (str(v)[:40], repr(v)[:40], repr(str(v))) if len(text) > 1]
    values += [type(v).__name__ for v in given.values() if isinstance(v, torch.nn.Module)]
    return any(word in message.lower().replace("-", "_") for word in told) or any(v in message for v in values)


def trial(case: tuple[str, dict[Any, Any]]) -> bool:
    """Whether it ran; asserts that it ran in silence, or was refused in a sentence."""
    form, chosen = case
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said, watched() as made:
            message = attempt(form, chosen, Path(place))
        runs = list(Path(place).glob("run*/metrics.jsonl"))
        assert bool(runs) or message is not None
        for line in runs[0].read_text(encoding="utf-8").splitlines() if runs else ():
            json.loads(line, parse_constant=lambda constant: pytest.fail(constant))
        if message is None:
            assert configure(read_config(runs[0].parent) | {"policy": "x", "tasks": "x", "reward": "length"})
            told = [finding.name for finding in diagnose(read_history(runs[0].parent))]
            now, begun = trained(made[-1][0]), made[-1][1]
            moved = not all(torch.equal(p, q) for p, q in zip(now, begun, strict=True))
            assert moved or SAYS_WHY & {*told}, f"no weight moved, and no word of it: {told}"
    assert len(warned) <= 5, [str(w.message) for w in warned]
    assert said.getvalue().count("\n") <= 5, said.getvalue()
    if message is None:
        return True
    assert "\n" not in message and "Traceback" not in message and 20 < len(message) < 1200, message
    assert names_it(message, usual() | chosen, form), message
    return False


def test_a_reward_longer_than_a_file_name_is_refused():
    assert not trial(("keywords", {"reward": "a" * 300}))


PHASES = [Phase.explicit, Phase.generate, Phase.shrink]
PLAIN = settings(deadline=None, database=None, derandomize=True, print_blob=False, phases=PHASES)
PLAIN = settings(PLAIN, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@given(configurations())
@settings(PLAIN, max_examples=120)
def test_configurations_run_or_are_refused(case):
    trial(case)


@cases(
    ({}, "the probe prompts"),
    ({"evaluate": "held.jsonl"}, "held-out tasks and the probe prompts"),
    ({"evaluate": "10%", "probes": 0}, "held-out tasks"),
    ({"probes": 0}, ""),
    ({"reward": None}, None),
)
@pytest.mark.parametrize("algorithm", ["dpo", "sft", "kto"])
def test_a_reward_beside_given_replies_judges_no_training(given, judged, algorithm):
    options = {"policy": "m", "tasks": "pairs.jsonl", "reward": "letters:e", "algorithm": algorithm, "batch": 4}
    said = [note for note in idle(configure(options | given)) if "reward" in note]
    what = f"the policy's replies to {judged} alone" if judged else "nothing"
    assert said == ([] if judged is None else [f"the reward judges {what}: {algorithm} learns from given replies"])
