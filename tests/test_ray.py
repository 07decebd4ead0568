"""The engine `ray`, held to the native engine: ids, log-probs, values, choices, other policies, and actors that die."""

import importlib.util
import os
import re
import shlex
import signal

import pytest
import torch
from cases import cases
from page_commands import read
from processes import free_port
from small_runs import SMALL, TASKS, count_a, cut, model, options, told, weights
from toys import letters, lm

from operant import Learner, OperantError, Policy, Sampling, ValueOptions, train
from operant.engines.native.engine import NativeEngine
from operant.engines.ray import RayEngine, as_arrays, moving
from operant.models.twins import deal
from operant.runs.config import configure
from operant.sandbox.ray import ENGINE, RaySession, answers
from operant.tools.cli import main

if importlib.util.find_spec("ray") is None:
    pytest.skip("the package ray is not installed: pip install 'operant[ray]'", allow_module_level=True)

PROMPTS = [[3, 4, 5], [6], [7, 8], [4] * 9, [3, 4], [5, 6, 7, 8], [9]]
KEYS = [1 << 60, 12, 13, 14, 15, 16, (1 << 64) - 1]
SAMPLING = Sampling(max_tokens=8, stop_tokens=(2,))


def policy(seed=0, value=True):
    return Policy(lm("gpt2", len(letters()), seed=seed), letters(), value=ValueOptions() if value else None)


@pytest.fixture(scope="module")
def ray():
    session = RaySession(ENGINE)
    session.begin()
    import ray

    yield ray
    session.end()


@pytest.fixture(scope="module")
def three(ray):
    engine = RayEngine(policy(), actors=3, cpus=0.25)
    yield engine
    engine.close()


@pytest.fixture
def engine(three):
    """Three actors with the weights of a fresh policy, all of them in use."""
    actors = three.actors
    three.sync(policy(), 0)
    yield three
    three.actors, three.parts, three.restarts = [*three.actors, *actors[len(three.actors) :]], 3, 3


def same(engine, own, version=0, exact=False, **more):
    """Whether the engine says what a native engine with the policy does."""
    native = NativeEngine(own)
    native.sync(own, version)
    sampling = Sampling(**{"max_tokens": 8, "stop_tokens": (2,)} | more)
    expected, found = (e.generate(PROMPTS, sampling, KEYS) for e in (native, engine))
    near = 0.0 if exact else 2e-5
    for a, b in zip(expected, found, strict=True):
        assert (a.action, a.end, a.version, a.allowed) == (b.action, b.end, b.version, b.allowed)
        assert b.logprobs == pytest.approx(a.logprobs, abs=near) and (b.values is None) == (own.value_head is None)
        assert b.values is None or b.values == pytest.approx(a.values, abs=near)
    return found


@torch.no_grad()
def trained(own):
    for i, weight in enumerate(own.trainable()):
        weight += 0.1 * torch.sin(torch.arange(weight.numel()) + i).view(weight.shape)


def pid(ray, actor):
    return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))


# --- the same replies -------------------------------------------------------------------------------------------------
@cases(1, 3)
@pytest.mark.slow
def test_any_number_of_actors_says_what_the_native_engine_says(count, engine):
    engine.actors, engine.parts = engine.actors[:count], count
    same(engine, policy(), exact=count == 1)
    engine.parts = 3 * count  # as they come
    same(engine, policy(), top_k=4, truncation="stored")


@pytest.mark.slow
def test_replies_that_have_begun_are_continued(engine):
    begun, more = [[3], [], [4, 5], [], [6] * 4, [7], []], [1, 2, 3, 4, 3, 2, 1]
    expected, found = (e.generate_more(PROMPTS, begun, more, SAMPLING, KEYS) for e in (NativeEngine(policy()), engine))
    for a, b, most in zip(expected, found, more, strict=True):
        assert (a.action, a.end) == (b.action, b.end) and len(b.action) <= most
        assert b.logprobs == pytest.approx(a.logprobs, abs=2e-5)


@cases(
    ("t5", {"algorithm": "grpo"}),
    ("gpt2", {"lora.rank": 2}),
    ("gpt2", {"soft_prompt.tokens": 3}),
    ("gpt2", {"model.train_layers": 1}),
    ("gpt2", {"output_mlp.width": 8}),
    ("llama", {"value.critic": "copy"}),
)
@pytest.mark.slow
def test_every_kind_of_policy_generates_in_actors(kind, options, engine):
    """Whole, after an update, and its reference: of weights that do not change, nothing is sent twice."""
    made = Learner(lm(kind, len(letters()), spread=0.02), tokenizer=letters(), **options)
    own = made.policy
    engine.sync(own, 0)
    same(engine, own)
    skeleton = engine.skeleton
    trained(own)
    engine.sync(own, 1)
    same(engine, own, 1)
    assert engine.skeleton is skeleton, "the whole policy is sent once"
    of_critic = sum(p.nbytes for n, p in own.named_parameters() if n.startswith("critic."))
    sent = sum(array.nbytes for array in as_arrays(moving(own, engine.kept)).values())
    assert sent == sum(p.nbytes for p in own.trainable()) - of_critic
    engine.sync(made.reference.policy, 7)
    same(engine, made.reference.policy, 7)


@pytest.mark.slow
def test_choices_are_those_of_the_native_engine(engine):
    own, options = policy(), [[[3], [4, 5], [6]], [[7], [7], [8, 9]], [[4], [5]]]
    given = (PROMPTS[:3], options, SAMPLING, KEYS[:3])
    for (i, a), (j, b) in zip(NativeEngine(own).choose(*given), engine.choose(*given), strict=True):
        assert i == j and a.action == b.action and b.logprobs == pytest.approx(a.logprobs, abs=2e-5)
        assert b.probabilities == pytest.approx(a.probabilities, abs=2e-5)


# --- actors that die --------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_killed_actor_is_started_again_with_current_weights(ray, engine):
    own = policy()
    trained(own)
    engine.sync(own, 3)
    before = engine.generate(PROMPTS, SAMPLING, KEYS)
    os.kill(pid(ray, engine.actors[1]), signal.SIGKILL)
    with pytest.warns(UserWarning, match="actor 1 of engine ray died and is started again"):
        after = same(engine, own, 3)
    assert [c.logprobs for c in before] == [c.logprobs for c in after], "the same batch is asked again"
    same(engine, own, 3)


@pytest.mark.slow
def test_too_many_deaths_and_an_error_of_the_inner_engine_are_said(ray, engine):
    with pytest.raises(OperantError, match=r"^prompt 0 has 60 tokens, and with 8 of the reply does not fit"):
        engine.generate([[3] * 60], SAMPLING, [1])
    engine.restarts = 0
    os.kill(pid(ray, engine.actors[2]), signal.SIGKILL)
    with pytest.raises(OperantError, match=r"1 actors of engine ray died in one call, .*raise engine\.restarts"):
        engine.generate(PROMPTS, SAMPLING, KEYS)
    engine.restarts = 3
    with pytest.warns(UserWarning, match="died"):
        same(engine, policy())


# --- runs -------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_is_that_of_the_native_engine_also_resumed(ray, tmp_path, ahead):
    """With one actor each batch is the same, so every number is, with the reference's probes and evaluations."""
    more = {"rollouts_ahead": ahead, "probes": 2, "probe_every": 2, "evaluate": ["ba", "ed"], "evaluate_every": 2}
    whole = train(model(), TASKS, count_a, out=tmp_path / "native", **options(**more))
    cut(tmp_path / "ray", 2, **more, **{"engine": "ray", "engine.actors": 1, "engine.cpus": 0.25})
    resumed = train(model(), TASKS, count_a, out=tmp_path / "ray", resume=True, tokenizer=letters())
    assert told(whole) == told(resumed)
    assert all(torch.equal(x, weights(resumed)[k]) for k, x in weights(whole).items())
    assert ray.is_initialized(), "a run leaves a Ray alone that it has not started"


# --- parts and refusals -----------------------------------------------------------------------------------------------
@cases(
    ([5, 5, 5, 5], 2, [[0, 2], [1, 3]]),
    ([1, 9, 1, 1, 6], 2, [[1], [0, 2, 3, 4]]),
    ([3, 2], 3, [[0], [1], []]),
    ([], 2, [[], []]),
    ([4, 4, 9], 1, [[0, 1, 2]]),
)
def test_prompts_are_dealt_by_their_tokens(sizes, parts, expected):
    assert deal(sizes, parts) == expected


@cases(
    ({"actors": 0}, r"engine\.actors=0: it must be at least 1"),
    ({"cpus": float("nan")}, r"engine\.cpus=nan: it must be at least 0"),
    ({"inner": "ray"}, "an actor needs an engine of another kind"),
    ({"inner": "nativ"}, "did you mean 'native'"),
    ({"actors": 9}, r"engine\.actors=9: this machine has 2 cores, .* at most 4 for each core, or a cluster"),
    ({"inner_options": {"bach": 3}}, r"engine\.inner_options=.*do not fit the engine 'native': .*'bach'"),
)
def test_wrong_options_are_refused_before_ray_starts(given, message, monkeypatch):
    monkeypatch.setattr("operant.sandbox.ray.cores", lambda: 2)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(RaySession, "begin", lambda self: pytest.fail("Ray was started"))
    with pytest.raises(OperantError, match=message):
        RayEngine(policy(), **given)


def test_an_address_without_ray_is_a_sentence(monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(OperantError, match=r"engine\.address='127\.0\.0\.1:\d+': no Ray answers there"):
        RayEngine(policy(), address=f"127.0.0.1:{free_port()}", actors=400)


@pytest.mark.slow
def test_more_actors_than_processors_are_refused(ray):
    with pytest.raises(OperantError, match=r"engine\.actors=3 with 3000 CPU each: Ray has 4096; use fewer"):
        RayEngine(policy(), actors=3, cpus=3000)
    assert ray.is_initialized()


def test_without_ray_the_extra_is_named_before_a_model_loads(monkeypatch, tmp_path):
    monkeypatch.setattr("operant.sandbox.ray.find_spec", lambda name: None)
    monkeypatch.setattr("operant.training.parts.load_trained_policy", lambda *given: pytest.fail("a model loads"))
    with pytest.raises(OperantError, match=r"pip install 'operant\[ray\]'"):
        train(model(), TASKS, count_a, out=tmp_path / "run", engine="ray", **SMALL)
    assert configure({"tasks": TASKS, "reward": count_a, "engine": "ray"}).parts["engine"]["actors"] == 2


@pytest.mark.slow
def test_what_the_page_shows_runs(ray, tmp_path, monkeypatch):
    """Its commands, with few steps, one actor where it has several, and a share of a processor; and its snippet."""
    page = re.sub(r"(actors|workers|ray) [24] ", r"\1 1 ", read("docs/engines.md#generating-ahead-and-on-ray"))
    monkeypatch.chdir(tmp_path)
    short = {"steps": 2, "batch": 8, "probes": 2, "sampling.max-tokens": 24, "evaluate": "none"}
    commands = [shlex.split(line, comments=True) for line in re.findall(r"^    operant (train .*)$", page, re.M)]
    assert len(commands) == 6
    for number, words in enumerate(commands):
        more = short | {"out": number} | ({"engine.cpus": 0.25} if "--engine" in words else {})
        assert main([*words, *(word for name, value in more.items() for word in (f"--{name}", str(value)))]) == 0
    (snippet,) = re.findall(r"```python\n(.*?)```", page, re.S)
    made = {"__name__": "__main__"}
    exec(snippet.replace("actors=1", "actors=1, cpus=0.25"), made)
    assert made["learner"].progress.step == 1


@pytest.mark.slow
def test_an_actor_that_dies_before_it_is_ready_ends_the_run(ray):
    class Doomed:
        def __init__(self):
            os.kill(os.getpid(), signal.SIGKILL)

        def ready(self):
            pass

    with pytest.raises(OperantError, match=r"died before it was ready.*fewer engine.actors"):
        answers([ray.remote(num_cpus=0.1)(Doomed).remote().ready.remote()], ENGINE)
