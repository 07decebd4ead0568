"""Every engine of the table is held to the same tests; those whose replies differ from the native one, by statistics.

`openai` and `vllm` ask a stand-in of vLLM's server, which computes a GPT-2 with numpy alone (`stand_in_vllm.py`).
"""

import contextlib
import json
import socket
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import stand_in_vllm
import torch
from cases import cases, slow
from processes import served
from toys import bare_logprobs, letters, lm, says
from transformers import AutoModelForCausalLM

from operant import Learner, OperantError, Policy, ValueOptions
from operant.engines.native.engine import NativeEngine
from operant.engines.openai import OpenAIEngine
from operant.engines.transformers import TransformersEngine
from operant.engines.vllm import VLLMEngine
from operant.models.loading import export, replace_export
from operant.runs import named_parts
from operant.sampling import Sampling, task_key
from operant.tools.cli import main

PROMPTS = [[5, 6, 7, 8, 9], [4], [12, 13, 14], [3, 3], [10, 11, 4, 5, 6, 7, 8], [4]]
KEYS = [task_key(0, "train", 3, f"task/{i}") for i in range(len(PROMPTS))]
RAGGED = Sampling(max_tokens=9, stop_tokens=(2, 7, 11))


def policy_of(seed=0, vocab=20, **more):
    return Policy(lm("gpt2", vocab, seed=seed), letters(), **more)


def checked(policy, prompts, completions):
    """Log-probs are the policy's own, by the plain forward pass."""
    for prompt, c in zip(prompts, completions, strict=True):
        assert says(policy.model, prompt, c)


def serving(policy, folder, **wrong):
    replace_export(policy, folder)
    return served(stand_in_vllm.Server(folder, **wrong))


@pytest.fixture(scope="session")
def venv(tmp_path_factory):
    path = tmp_path_factory.mktemp("venv") / "bin"
    path.mkdir()
    (path / "python").symlink_to(sys.executable)
    script = f"#!{sys.executable}\n{Path(stand_in_vllm.__file__).read_text(encoding='utf-8')}"
    (path / "vllm").write_text(script, encoding="utf-8")
    (path / "vllm").chmod(0o755)
    return path / "python"


@contextlib.contextmanager
def engine_of(name, policy, tmp_path, venv):
    match name:
        case "native":
            yield NativeEngine(policy)
        case "generate" | "continuous":
            yield TransformersEngine(policy, mode=name)
        case "openai":
            with serving(policy, tmp_path / "served") as server:
                yield OpenAIEngine(policy, url=server.url, model="policy", folder=tmp_path / "new")
        case "vllm":
            with contextlib.closing(VLLMEngine(policy, python=venv)) as engine:
                yield engine


NAMES = ("native", "generate", slow("continuous"), "openai", "vllm")


@pytest.fixture(scope="module", params=NAMES)
def known(request, tmp_path_factory, venv):
    """(name, policy, engine), for all tests that change no weights."""
    policy = policy_of(value=ValueOptions(init="normal"))
    with engine_of(request.param, policy, tmp_path_factory.mktemp(request.param), venv) as engine:
        yield request.param, policy, engine


# --- the contract -----------------------------------------------------------------------------------------------------
def test_replies_end_at_stops_and_limits_in_order_of_prompts(known):
    name, policy, engine = known
    completions = engine.generate(PROMPTS * 3, RAGGED, [key + i for i in range(3) for key in KEYS])
    checked(policy, PROMPTS * 3, completions)  # which fails for another prompt's reply
    for c in completions:
        stopped = c.action[-1] in RAGGED.stops
        assert c.end == ("stop" if stopped else "length") and (stopped or len(c.action) == 9)
        assert not RAGGED.stops & set(c.action[:-1]) and c.version == policy.version
        assert (c.values is None) == (name != "native")
    assert len({len(c.action) for c in completions}) > 3 and {c.end for c in completions} == {"stop", "length"}
    assert [len(c.action) for c in engine.generate(PROMPTS[:2], replace(RAGGED, fixed_length=True), KEYS[:2])] == [9, 9]


def test_the_same_keys_give_the_same_replies(known):
    name, policy, engine = known
    first = engine.generate(PROMPTS, RAGGED, KEYS)
    assert [c.action for c in engine.generate(PROMPTS, RAGGED, KEYS)] == [c.action for c in first]
    assert [c.action for c in engine.generate(PROMPTS, RAGGED, [key + 1 for key in KEYS])] != [c.action for c in first]
    if name in ("native", "generate"):  # their tokens come from our counters
        assert [c.action for c in NativeEngine(policy).generate(PROMPTS, RAGGED, KEYS)] == [c.action for c in first]
    if name != "continuous":  # a reply does not depend on the rest of the call
        assert engine.generate(PROMPTS[2:3], RAGGED, KEYS[2:3])[0].action == first[2].action


@cases({"temperature": 0.5}, {"top_k": 3, "top_p": 0.8}, {"min_p": 0.2}, {"min_tokens": 5}, ids=str)
def test_log_probs_are_those_of_what_can_be_drawn(more, known):
    name, policy, engine = known
    sampling = replace(RAGGED, **more)
    if name == "continuous" and not {"temperature", "top_k"} & {*more}:
        with pytest.raises(OperantError, match=r"sampling.min_.*engine.mode=continuous cannot sample so"):
            engine.generate(PROMPTS, sampling, KEYS)
        return
    for prompt, c in zip(PROMPTS, engine.generate(PROMPTS, sampling, KEYS), strict=True):
        with torch.no_grad():
            logits = policy.model(torch.tensor([prompt + c.action])).logits[0, len(prompt) - 1 : -1]
        scores = sampling.adjust(logits, torch.arange(len(c.action)))
        kept = sampling.kept(scores)
        right = (scores if kept is None else scores.masked_fill(~kept, -torch.inf)).log_softmax(-1)
        assert c.logprobs == pytest.approx(right[range(len(c.action)), c.action].tolist(), abs=1e-4)


def test_stop_strings_end_with_the_token_that_completes_them(known):
    _, policy, engine = known
    sampling = Sampling(max_tokens=12, stop_tokens=(-1,), stop_strings=("o", "ab"))
    completions = engine.generate(PROMPTS * 4, sampling, [key + i for i in range(4) for key in KEYS])
    checked(policy, PROMPTS * 4, completions)
    ended = [c for c in completions if c.end == "stop"]
    assert len(ended) > 5 and len(ended) < len(completions)
    for c in completions:
        texts = [policy.tokenizer.decode(c.action[:n]) for n in range(1, len(c.action) + 1)]
        assert [any(s in text for s in ("o", "ab")) for text in texts[:-1]] == [False] * (len(texts) - 1)
        assert (c.end == "stop") == ("o" in texts[-1] or "ab" in texts[-1])


@cases(
    ([], "prompt 1 has no tokens"), ([3] * 60, "does not fit into the model's context of 64"), ([20], "holds the id 20")
)
def test_prompts_that_cannot_be_used_are_refused(prompt, why, known):
    with pytest.raises(OperantError, match=why):
        known[2].generate([[3], prompt], RAGGED, KEYS[:2])
    assert known[2].generate([], RAGGED, []) == []


def test_what_an_engine_cannot_express_is_refused_by_its_name(known):
    name, _, engine = known
    served = {"banned": (3,), "only_text": True, "keep_stops": True, "temperature": 0.001, "top_p_least": 2}
    refused = {
        "native": {},
        "generate": {"guidance": 1.0},
        "continuous": {"banned": (3,), "top_k": 3, "keep_stops": True, "top_p_least": 2, "guidance": 1.0},
    }
    beside = {"top_k": {"truncation": "stored"}, "min_p": {"top_p": 0.5}, "only_text": {"banned": (3,)}}
    for option, value in refused.get(name, served | {"min_p": 0.1}).items():
        also = beside.get(option, {})
        with pytest.raises(OperantError, match=rf"sampling\.({option}|truncation)="):
            engine.generate([[3]], replace(RAGGED, **{option: value}, **also), [1])


def test_options_are_chosen_or_refused(known):
    name, policy, engine = known
    options = [[[5, 6], [7], [8, 9, 10]]] * 2
    if name in ("openai", "vllm"):
        with pytest.raises(OperantError, match="only generates: use engine=native"):
            engine.choose([[3], [4]], options, RAGGED, [1, 2])
        return
    mine = NativeEngine(policy).choose([[3], [4]], options, RAGGED, [1, 2])
    assert [index for index, _ in engine.choose([[3], [4]], options, RAGGED, [1, 2])] == [index for index, _ in mine]


@pytest.mark.parametrize("name", NAMES)
def test_sync_changes_the_distribution_and_the_version(name, tmp_path, venv):
    policy, other = policy_of(), policy_of(seed=7)
    with engine_of(name, policy, tmp_path, venv) as engine:
        engine.generate(PROMPTS, RAGGED, KEYS)
        policy.model.load_state_dict(other.model.state_dict())
        policy.version = 5
        engine.sync(policy, 5)
        completions = engine.generate(PROMPTS, RAGGED, KEYS)
        checked(other, PROMPTS, completions)
        assert {c.version for c in completions} == {5}
        if getattr(engine, "own_weights", False):  # which change when they are synchronised, and not before
            with torch.no_grad():
                policy.head.weight.mul_(0.5)
            checked(other, PROMPTS, engine.generate(PROMPTS, RAGGED, KEYS))


def test_all_sampling_of_the_library_works_with_generate():
    """Also banned ids, stored truncation and encoder-decoders; the model's own generation config changes nothing."""
    cut = replace(RAGGED, top_p=0.8, truncation="stored", keep_stops=True)
    sampling = replace(cut, temperature=0.7, banned=(5,), min_tokens=3)
    for kind in ("gpt2", "t5"):
        policy = Policy(lm(kind), letters())
        policy.model.generation_config.repetition_penalty = 9.0
        both = NativeEngine(policy), TransformersEngine(policy, batch=4)
        mine, theirs = (engine.generate(PROMPTS, sampling, KEYS) for engine in both)
        assert [(c.action, c.end, c.allowed) for c in mine] == [(c.action, c.end, c.allowed) for c in theirs]
        assert policy.model.generation_config.repetition_penalty == 9.0
    with pytest.raises(OperantError, match=r"engine.mode=continuous: transformers cannot batch an encoder-decoder"):
        TransformersEngine(Policy(lm("t5")), mode="continuous")


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_a_served_export_has_its_own_head_and_the_same_logits(kind, tmp_path):
    policy, ids = Policy(lm(kind, tie_word_embeddings=True)), torch.tensor([[3, 4, 5]])
    replace_export(policy, tmp_path / "a")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert loaded.lm_head.weight is not loaded.get_input_embeddings().weight
    assert torch.allclose(loaded(ids).logits, policy.model(ids).logits, atol=1e-5)
    assert policy.head.weight is policy.model.get_input_embeddings().weight  # the policy is as it was


# --- what goes wrong --------------------------------------------------------------------------------------------------
@cases(
    ("text only", "returns text and no token ids"),
    ("no log-probs", "no log-prob for each"),
    ("other ids", r"read the prompt \[0, 1, 2, 3, 4\], and was sent \[1, 2, 3, 4\]"),
    ("large id", "a reply of .* holds the id 999, but the model has 0 to"),
    ("short", "returned 2 tokens.* does the server keep to max_tokens"),
    ("silent", r"/v1/completions has not answered in 0.2 s \(1 tries\); does the server run"),
)
def test_a_server_without_what_is_needed_is_refused_at_the_start(fault, why, tmp_path):
    policy = policy_of()
    given = {"model": "policy", "sync": "none", "tries": 1, "timeout": 0.2 if fault == "silent" else 60}
    with serving(policy, tmp_path / "m", fault=fault) as server, pytest.raises(OperantError, match=why):
        OpenAIEngine(policy, url=server.url, **given)


def test_a_server_with_another_model_or_raw_logprobs_is_refused(tmp_path):
    policy = policy_of()
    with serving(policy_of(seed=7), tmp_path / "m") as server:
        with pytest.raises(OperantError, match=r"'policy' has not the weights.*or set engine.sync=folder"):
            OpenAIEngine(policy, url=server.url, model="policy", sync="none")
        OpenAIEngine(policy, url=server.url, model="policy", folder=tmp_path / "new")
        assert server.posted == ["/collective_rpc", "/reset_prefix_cache"]
        with pytest.raises(OperantError, match=r"status 404.*does the server have a model 'mine'"):
            OpenAIEngine(policy, url=server.url, model="mine", sync="none")
        with pytest.raises(OperantError, match=r"/v1/nothing.* 404.*engine.reload"):
            given = {"folder": tmp_path / "new", "reload": {"/v1/nothing": {}}}
            OpenAIEngine(policy, url=server.url, model="policy", **given)
    with serving(policy, tmp_path / "m", raw=True) as server:
        for scale, why in ((1.0, "processed_logprobs"), (float("nan"), "differ from the policy's by nan nats a token")):
            policy.head.weight.data *= scale
            with pytest.raises(OperantError, match=why):
                OpenAIEngine(policy, url=server.url, model="policy", sync="none")


def test_a_server_that_loads_only_some_weights_is_refused(tmp_path):
    """As vLLM 0.32 on a processor, which answers 200 and keeps an output layer that is tied to the embeddings."""
    policy = policy_of()
    with serving(policy, tmp_path / "m", fault="keeps its head") as server:
        engine = OpenAIEngine(policy, url=server.url, model="policy", folder=tmp_path / "new")
        engine.sync(policy, 1)
        with torch.no_grad():
            policy.head.weight.mul_(0.97)
        with pytest.raises(OperantError, match=r"'policy' has not the weights.*let engine.reload load all of them"):
            engine.sync(policy, 2)


def test_a_busy_server_is_asked_again_and_a_missing_one_named(tmp_path, monkeypatch):
    monkeypatch.setattr("operant.net.client.FIRST_WAIT", 0.001)
    policy = policy_of()
    with serving(policy, tmp_path / "m", fault="busy") as server:
        engine = OpenAIEngine(policy, url=server.url, model="policy", sync="none", at_once=4)
        checked(policy, PROMPTS, engine.generate(PROMPTS, RAGGED, KEYS))
    named = rf" cannot be reached: .*; does the server run, and is engine.url={server.url} its address\?"
    with pytest.raises(OperantError, match=rf"{server.url}/completions{named}"):
        engine.generate(PROMPTS, RAGGED, KEYS)
    with pytest.raises(OperantError, match=f"/collective_rpc{named}"):
        OpenAIEngine(policy, url=server.url, model="policy", folder=tmp_path / "new")


@cases(
    ({"url": "localhost:8000"}, "engine.url='localhost:8000': it must be an address"),
    ({"folder": None}, "engine.folder=None: it is what engine.sync=folder needs"),
    ({"sync": "none"}, "it is what engine.sync=folder needs, and none else"),
    ({"sync": "nccl"}, "sync='nccl': it must be folder or none"),
    ({"at_once": 0}, "engine.at_once=0"),
    ({"reload": {"reset": {}}}, "maps paths, which begin with /, to bodies"),
)
def test_wrong_options_are_named(options, why, tmp_path):
    given = {"url": "http://127.0.0.1:1/v1", "model": "policy", "folder": str(tmp_path)} | options
    with pytest.raises(OperantError, match=why):
        config = {"engine": "openai"} | {f"engine.{name}": value for name, value in given.items()}
        named_parts.make("engine", "openai", named_parts.stored_options("engine", config), policy_of())


def test_a_vllm_that_dies_is_started_again_and_loses_nothing(tmp_path, venv, monkeypatch):
    monkeypatch.setattr("operant.net.client.FIRST_WAIT", 0.001)
    policy = policy_of()
    engine = VLLMEngine(policy, python=venv, args="--fault dies", folder=tmp_path / "policy", at_once=2)
    with contextlib.closing(engine):
        with torch.no_grad():
            policy.head.weight.mul_(0.9)
        engine.sync(policy, 1)
        first = engine.process.supervisor.pid
        completions = engine.generate(PROMPTS * 2, RAGGED, [*KEYS, *(key + 1 for key in KEYS)])
        assert engine.process.supervisor.pid != first and engine.restarts == 2
        checked(policy, PROMPTS * 2, completions)  # with the newest weights
        engine.process.end()  # and between two calls
        assert engine.generate(PROMPTS, RAGGED, KEYS) == completions[: len(PROMPTS)]
        engine.process.end()
        engine.sync(policy, 2)
        assert engine.restarts == 0 and {c.version for c in engine.generate(PROMPTS, RAGGED, KEYS)} == {2}
        engine.process.end()
        with pytest.raises(OperantError, match=r"vLLM has died, and engine.restarts are spent"):
            engine.generate(PROMPTS, RAGGED, KEYS)
        home = engine.home
    assert not home.exists() and (tmp_path / "policy").is_dir()


def test_a_vllm_that_cannot_be_started_is_refused(tmp_path, venv):
    policy = policy_of()
    with pytest.raises(OperantError, match=r"there is no /nowhere/vllm.*pip install vllm"):
        VLLMEngine(policy, python=Path("/nowhere/python"))
    with pytest.raises(OperantError, match=r"ended at its start. Its last lines: no accelerator was found"):
        VLLMEngine(policy, python=venv, args="--fault 'at the start'")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, given, why in (("port", port, "Address already in use"), ("restarts", -1, "it must be at least 0")):
            with pytest.raises(OperantError, match=f"engine.{name}={given}: {why}"):
                VLLMEngine(policy, python=venv, **{"port": port, name: given})


# --- training ---------------------------------------------------------------------------------------------------------
def test_the_learner_rescores_and_measures_the_gap(tmp_path):
    """A server with other numbers, as in 16 bits: the gap is measured, and the ratio begins at 1."""
    policy = policy_of(value=ValueOptions())
    with serving(policy, tmp_path / "served") as server:
        options = {"url": server.url, "model": "policy", "folder": tmp_path / "new"}
        learner = Learner(policy, engine=lambda made: OpenAIEngine(made, **options), **{"sampling.max_tokens": 6})
        assert learner.rescores
        server.model.weights["ln_f.weight"] *= 1.02
        server.model.known.clear()
        replies = learner.generate([[5, 6, 7], [4]] * 4)
        turns = [r.turns[0] for r in replies]
        mine = [bare_logprobs(policy.model, turn.prompt, turn.action) for turn in turns]
        gaps = torch.cat([(own - torch.tensor(t.logprobs)).abs() for own, t in zip(mine, turns, strict=True)])
        metrics = learner.step(replies, [float(i) for i in range(8)])
        assert metrics["rollout/engine_gap"] == pytest.approx(float(gaps.mean()), rel=1e-3)
        assert metrics["rollout/engine_gap_max"] == pytest.approx(float(gaps.max()), rel=1e-3)
        assert 1e-3 < metrics["rollout/engine_gap"] < 0.2 and metrics["rollout/logprob_gap"] < 1e-4
        after = learner.generate([[5, 6, 7]])  # of the new weights, which the update made
        checked(policy, [[5, 6, 7]], [after[0].turns[0]])
        assert after[0].turns[0].version == 1
        with learner.engine_of(policy_of(seed=7)) as engine:  # the server keeps the policy's weights
            assert engine is not learner.engine


def test_a_server_that_keeps_its_weights_needs_a_correction(tmp_path):
    with serving(policy_of(), tmp_path / "served") as server:
        make = lambda policy: OpenAIEngine(policy, url=server.url, model="policy", sync="none")  # noqa: E731
        policy = policy_of(value=ValueOptions())
        with pytest.raises(OperantError, match="every reply after the first step is stale: let it follow"):
            Learner(policy, engine=make)
        learner = Learner(policy, engine=make, importance="token", max_tokens=4)
        for step in range(2):
            assert learner.step(learner.generate([[5, 6, 7], [4]]), [1.0, 0.0])["rollout/staleness"] == step


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    export(policy_of(vocab=len(letters())), tmp_path / "tiny")
    (tmp_path / "tasks.txt").write_text("\n".join(["the", "end", "a bee", "seen"] * 4), encoding="utf-8")
    recipe = "algorithm: ppo\npolicy: tiny\ntasks: tasks.txt\nreward: letters:e\nsteps: 2\nbatch: 8\nprobes: 2\n"
    recipe += "evaluate: tasks.txt\nsampling: {max_tokens: 6}\nupdate: {minibatch: 8}\n"
    (tmp_path / "letters-like-tiny.yaml").write_text(recipe, encoding="utf-8")
    return tmp_path


def run(out, *words):
    code = main(["train", *(words if "--resume" in words else ["letters-like-tiny.yaml", "--out", out, *words])])
    lines = (Path(out) / "metrics.jsonl").read_text(encoding="utf-8").splitlines() if code == 0 else []
    return code, [json.loads(line) for line in lines]


def test_a_run_with_generate_is_the_native_run(tiny):
    """Tokens are equal, and so are the metrics, to rounding; also where it is resumed."""
    _, native = run("a")
    run("b", "--engine", "transformers", "--steps", "1")
    code, other = run("b", "--resume", "b", "--steps", "2")
    assert code == 0 and [m["step"] for m in other] == [1, 2]
    for mine, theirs in zip(native, other, strict=True):
        for name in ("reward/mean", "kl/per_reply", "rollout/reply_tokens", "loss/total"):
            assert theirs[name] == pytest.approx(mine[name], abs=1e-4)


@pytest.mark.slow
def test_a_run_and_its_resumption_with_a_server(tiny, venv, capsys):
    with serving(policy_of(vocab=len(letters())), tiny / "served") as server:
        asked = ["--engine", "openai", "--engine.url", server.url, "--engine.model", "policy", "--engine.folder", "new"]
        code, metrics = run("a", *asked, "--steps", "1")
        assert code == 0 and metrics[0]["rollout/engine_gap"] < 1e-4 and metrics[0]["rollout/staleness"] == 0
        code, metrics = run("a", "--resume", "a", "--steps", "2")
        assert code == 0 and max(m["rollout/engine_gap"] for m in metrics) < 1e-4
        asked = len(server.seen)
        assert main(["eval", "a", "--tasks", "tasks.txt", "--reward", "letters:e"]) == 0
        assert len(server.seen) == asked + 1 + 16  # the first request, and the tasks
    running = lambda: [p.pid for p in psutil.process_iter(["cmdline"]) if str(venv.parent) in str(p.info["cmdline"])]  # noqa: E731
    before = running()
    code, metrics = run("b", "--engine", "vllm", "--engine.python", str(venv))
    assert code == 0 and max(m["rollout/engine_gap"] for m in metrics) < 1e-4
    assert running() == before  # the server has ended with the run
