"""`operant.compat.trl` has the numbers of TRL 0.11.4, which `tests/parity/trl_ppo_loop.py` wrote by TRL's own code, and
its behaviour. TRL's own tests run against it in `tests/test_trls_own_tests.py`."""

import importlib
import json
import math
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers

pytest.importorskip("accelerate")
sys.path.append(str(Path(__file__).parent / "parity"))

import trl_ppo_loop as loop
from cases import cases
from texts import parts
from toys import letters, lm
from trl_compat.models import tiny, tokenizer

import operant.compat.trl as trl
from operant import OperantError
from operant.compat.trl import core
from operant.compat.trl.environment import TextEnvironment, TextHistory

pytestmark = pytest.mark.filterwarnings("ignore")
KEPT = json.loads(loop.FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", loop.CASES)
def test_the_steps_are_those_of_trl(case):
    assert loop.gap(loop.run(trl, loop.CASES[case]), KEPT[case]) < 1e-5


def test_another_loop_has_other_numbers():
    assert loop.gap(loop.run(trl, {"lam": 0.9}), KEPT["defaults"]) > 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    where = tmp_path_factory.mktemp("model")
    tiny("GPT2LMHeadModel").save_pretrained(where)
    tokenizer(padding=False).save_pretrained(where)
    return str(where)


def causal(source, **more):
    return trl.AutoModelForCausalLMWithValueHead.from_pretrained(source, **more)


# --- scripts of that time ---------------------------------------------------------------------------------------------
HELLO = parts("programs.txt")["hello world of TRL"]
SENTIMENT = parts("programs.txt")["sentiment loop of TRL"]


def test_hello_world_runs_with_its_import_changed(folder):
    space = {"NAME": folder}
    exec(HELLO, space)
    assert space["stats"]["ppo/mean_scores"] == 1 and space["text"]
    assert math.isnan(space["stats"]["ppo/std_scores"])  # of one number, as in TRL


@pytest.mark.slow
def test_the_sentiment_loop_learns_and_saves(folder, tmp_path):
    named = {"--model_name": folder, "--batch_size": 32, "--mini_batch_size": 16, "--learning_rate": 0.006}
    named |= {"--init_kl_coef": 0.02, "--score_clip": 2}
    arguments = [str(x) for pair in named.items() for x in pair]
    space = {"ARGUMENTS": arguments, "EPOCHS": 4, "OUT": tmp_path / "out", "__name__": "script"}
    exec(SENTIMENT, space)
    means = space["means"]
    assert sum(means[-4:]) / 4 > sum(means[:4]) / 4 + 0.07, means
    again, made = causal(str(tmp_path / "out")).state_dict(), space["model"].state_dict()
    assert all(torch.equal(again[name], made[name]) for name in made) and "v_head.summary.weight" in again
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert "v_head.summary.weight" not in plain.state_dict()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<|endoftext|>"


def test_the_name_trl_can_mean_ours(folder):
    deeper = "from trl.models.modeling_base import PreTrainedModelWrapper\nfrom trl.trainer.utils import RunningMoments"
    deeper += "\nfrom trl.models.modeling_value_head import ValueHead\nfrom trl.core import PPODecorators"
    space = {"NAME": folder}
    with patch.dict(sys.modules):
        trl.as_trl()
        exec(HELLO.replace("operant.compat.trl", "trl") + deeper, space)
    head = space["ValueHead"](space["model"].config, summary_dropout_prob=0.0)
    assert head(torch.ones(2, 3, space["model"].config.hidden_size)).shape == (2, 3, 1)
    assert space["PPODecorators"].empty_device_cache()(lambda x: x + 1)(1) == 2
    assert space["PPOTrainer"] is trl.PPOTrainer and space["PreTrainedModelWrapper"] is trl.PreTrainedModelWrapper


@cases(("", "SFTTrainer"), (".core", "randn_tensor"), (".trainer", "DPOConfig"))
def test_what_is_not_here_is_said_when_it_is_imported(module, name):
    assert importlib.import_module("operant.compat.trl.import_utils").is_diffusers_available() in (True, False)
    with pytest.raises(ImportError, match=f"has what TRL 0.11.4 had around PPO, and no {name}: "):
        exec(f"from operant.compat.trl{module} import {name}", {})


# --- models -----------------------------------------------------------------------------------------------------------
def test_an_adapter_is_saved_with_its_head_and_trained_on(folder, tmp_path):
    peft = pytest.importorskip("peft")
    model = causal(folder, peft_config=peft.LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora" in name or "v_head" in name for name in trained)
    model.save_pretrained(tmp_path / "adapter")
    again = causal(str(tmp_path / "adapter"), is_trainable=True)
    ids = torch.tensor([[1, 2, 3]])
    for made, kept in zip(model.eval()(ids)[::2], again.eval()(ids)[::2]):
        torch.testing.assert_close(made, kept)
    assert {name for name, p in again.named_parameters() if p.requires_grad} == trained
    trainer = trl.PPOTrainer(trl.PPOConfig(batch_size=2, mini_batch_size=2), again, None, ready(folder))
    replies = [torch.tensor([4, 5, 6]), torch.tensor([7, 8])]
    stats = trainer.step([ids[0], ids[0]], replies, [torch.tensor(1.0), torch.tensor(0.0)])
    assert trainer.ref_model is None and stats["objective/kl"] != 0  # to the model without the adapter
    own, reference = trainer.generate(list(ids), generate_ref_response=True, do_sample=False, max_new_tokens=8)
    with torch.no_grad(), again.pretrained_model.disable_adapter():
        bare = again.pretrained_model.generate(ids, do_sample=False, max_new_tokens=8, pad_token_id=0)
    assert reference[0].tolist() == bare[0].tolist() != own[0].tolist()


def test_weights_come_in_float32_as_they_did_then(folder, tmp_path):
    """Today's transformers takes the type of the file, here bfloat16."""
    tiny("GPT2LMHeadModel").bfloat16().save_pretrained(tmp_path)
    kinds = [next(causal(str(tmp_path), **more).parameters()).dtype for more in ({}, {"torch_dtype": torch.float16})]
    assert kinds == [torch.float32, torch.float16]


def ready(folder):
    made = transformers.AutoTokenizer.from_pretrained(folder)
    made.pad_token = made.eos_token
    return made


@cases(
    (lambda f: trl.PPOConfig(batch_size=3, mini_batch_size=2), "batch_size=3 is no multiple"),
    (lambda f: trl.PPOConfig(kl_penalty="k3"), "kl_penalty='k3': it must be one of kl, abs, mse, full"),
    (lambda f: causal(tiny("GPT2Model")), "a GPT2Model has no language model head: load it with AutoModelForCausalLM"),
    (lambda f: causal(3), "a name, a folder or a transformers model"),
    (lambda f: causal(f, load_in_8bit=True), r"load_in_8bit=True needs a GPU and bitsandbytes: pip install"),
    (lambda f: causal(f, v_head_init_strategy="xavier"), "v_head_init_strategy='xavier'"),
    (lambda f: causal(f, peft_config={"r": 4}), "peft_config is a dict: give a peft.PeftConfig"),
    (lambda f: causal(f, reward_adapter="x"), "reward_adapter needs a model with an adapter"),
    (lambda f: causal(f).compute_reward_score(torch.ones(1, 2)), "load it with reward_adapter=FOLDER"),
    (lambda f: trl.create_reference_model(causal(f), 9), "num_shared_layers=9: no parameter"),
    (lambda f: trl.PPOTrainer(trl.PPOConfig(), tiny("GPT2LMHeadModel"), None, ready(f)), "model is a GPT2LMHeadModel"),
    (lambda f: core.LengthSampler(3, 3), "the second is exclusive"),
    (lambda f: core.masked_var(torch.ones(2), torch.zeros(2)), "the mask has no 1"),
    (lambda f: core.flatten_dict({"a/b": 1}), "contains the separator"),
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the refusal of 8 bits is that of a machine without a GPU")
def test_a_mistake_is_answered_with_its_remedy(make, what, folder):
    if "peft" in what:
        pytest.importorskip("peft")
    with pytest.raises(OperantError, match=what):
        make(folder)


@cases(
    ({"queries": 1}, "1 queries for batch_size=2"),
    ({"scores": (1.0, 2.0)}, "scores must be a list of tensors"),
    ({"responses": [torch.tensor([], dtype=torch.long)] * 2}, "reply 0 has an empty"),
    ({"scores": [torch.ones(3)] * 2}, r"one number, not of shape \(3,\)"),
    ({"response_masks": [torch.ones(2)] * 2}, "response_masks: give one for each response"),
)
def test_a_step_checks_what_it_is_given(change, what, folder):
    trainer = trl.PPOTrainer(trl.PPOConfig(batch_size=2, mini_batch_size=1), causal(folder), None, ready(folder))
    before = [p.clone() for p in trainer.model.parameters()]
    two = {"queries": torch.tensor([1, 2]), "responses": torch.tensor([3]), "scores": torch.ones(())}
    given = {name: [one] * 2 for name, one in two.items()}
    change = {name: given[name][:value] if isinstance(value, int) else value for name, value in change.items()}
    with pytest.raises(OperantError, match=what):
        trainer.step(**given | change)
    assert all(torch.equal(p, old) for p, old in zip(trainer.model.parameters(), before))


@cases("</s>", None)
def test_the_first_token_of_a_decoder_is_not_drawn(end):
    """That of BART is its end token; a tokenizer may have none."""
    model, made = trl.AutoModelForSeq2SeqLMWithValueHead.from_pretrained(lm("bart", 40)), letters()
    made.eos_token = end
    trainer = trl.PPOTrainer(trl.PPOConfig(batch_size=1, mini_batch_size=1), model, None, made)
    query, drawn = torch.tensor([5, 6]), {"max_new_tokens": 6, "do_sample": False}
    [alone] = trainer.generate(query, **drawn).tolist()
    assert trainer.generate([query], **drawn)[0].tolist() == alone
    env = TextEnvironment(model, made, generation_kwargs=drawn)
    env.call_token = made.decode(alone[1])
    assert env._generate_batched([query])[0].tolist() == alone[:2]
    queries, replies = [query, query[:1]], [torch.tensor([2, 7, 8, 9]), torch.tensor([2, 7, 8])]
    for made.padding_side in ("left", "right"):
        given = trainer.prepare_model_inputs(queries, replies)
        *_, mask = trainer.batched_forward_pass(trainer.model, queries, replies, given)
        assert given["decoder_input_ids"][:, 1:][mask.bool()].tolist() == [8, 9, 8]  # wherever rows are padded


def test_shared_layers_are_the_same_tensors(folder):
    model = causal(folder)
    own, kept = dict(model.named_parameters()), dict(trl.create_reference_model(model, 2).named_parameters())
    shared = {name for name in own if own[name] is kept[name]}
    assert {name.split(".h.")[1][0] for name in shared if ".h." in name} == {"0", "1"}
    assert not any(own[name].requires_grad for name in shared) and not any(p.requires_grad for p in kept.values())


def test_scores_are_scaled_by_their_running_moments(folder):
    options = {"use_score_scaling": True, "use_score_norm": True, "score_clip": 1.0}
    config = trl.PPOConfig(batch_size=4, mini_batch_size=4, **options)
    trainer = trl.PPOTrainer(config, causal(folder), None, ready(folder))
    scores = torch.tensor([1.0, 2.0, 3.0, 8.0])
    torch.testing.assert_close(trainer._shaped_scores(scores), ((scores - scores.mean()) / scores.std()).clip(-1, 1))
    more = torch.tensor([0.0, 0.0, 4.0, -2.0])
    both = torch.cat([scores, more])
    torch.testing.assert_close(trainer._shaped_scores(more), ((more - both.mean()) / both.std()).clip(-1, 1))


# --- core, best of n, tools -------------------------------------------------------------------------------------------
def test_statistics_are_those_of_the_places_under_the_mask():
    values, mask = torch.tensor([[1.0, 5.0, 9.0], [2.0, 7.0, 4.0]]), torch.tensor([[1, 0, 1], [0, 1, 1]])
    under = values[mask.bool()]
    assert core.masked_mean(values, mask) == under.mean() and core.masked_var(values, mask) == under.var()
    torch.testing.assert_close(core.masked_mean(values, mask, axis=1), torch.tensor([5.0, 5.5]))
    torch.testing.assert_close(core.masked_whiten(values, mask)[mask.bool()], (under - under.mean()) / under.std())
    torch.testing.assert_close(core.whiten(values, shift_mean=False).mean(), values.mean())
    logits = torch.tensor([[[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]]])
    chosen = core.logprobs_from_logits(logits, torch.tensor([[2, 0]]))
    assert torch.equal(chosen, logits.log_softmax(-1)[0, [0, 1], [2, 0]][None])
    table = logits.double().softmax(-1)
    torch.testing.assert_close(core.entropy_from_logits(logits).double(), -(table * table.log()).sum(-1))
    kept = core.top_k_top_p_filtering(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), top_k=3, top_p=0.7)
    assert kept.tolist() == [[-math.inf, -math.inf, 2.0, 3.0]]  # 3 and 2 hold 0.91 of the three
    assert core.stack_dicts([{"a": torch.ones(2)}, {"a": torch.zeros(1, 3)}])["a"].tolist() == [[1, 1, -1], [0, 0, 0]]
    assert core.convert_to_scalar({"x": torch.ones(1), "y": "z"}) == {"x": 1.0, "y": "z"}
    assert core.flatten_dict({"a": {"b": {"c": 1}}, "d": 2}) == {"a/b/c": 1, "d": 2}
    assert {core.LengthSampler(2, 5)() for _ in range(99)} == {2, 3, 4}


def test_the_best_of_n_are_the_highest_scores(folder):
    made = ready(folder)
    drawn: list[str] = []

    def longest(texts: list[str]) -> list[float]:
        drawn.extend(texts)
        return [float(len(text)) for text in texts]

    sampler = trl.BestOfNSampler(causal(folder), made, longest, lambda: 6, sample_size=5, seed=0, n_candidates=2)
    queries = [made.encode("hello world"), torch.tensor(made.encode("this is"))]
    found = sampler.generate(queries, do_sample=True, pad_token_id=made.eos_token_id)
    assert [len(best) for best in found] == [2, 2]
    for best, texts in zip(found, (drawn[:5], drawn[5:])):
        assert [len(text) for text in best] == sorted(map(len, texts), reverse=True)[:2]
    assert len(sampler.generate(queries[0], pad_token_id=0)) == len(sampler.generate(queries[1], pad_token_id=0)) == 1


def test_a_text_environment_calls_tools_and_masks_answers(folder, monkeypatch):
    made = ready(folder)
    tools = {"add": lambda text: str(sum(map(int, text.split("+")))), "bad": lambda text: 1 / 0}
    rewards = lambda texts, bonus: [float("4" in text) + bonus for text in texts]  # noqa: E731
    env = TextEnvironment(causal(folder), made, tools, rewards, "Do: ", max_turns=2)
    made.eos_token = None
    script = {"2+2": ["<request><add>2+2<call>", "4<submit>"], "none": ["<request><bad>x<call>", "no call"]}

    def answer(histories: list[TextHistory]) -> list[TextHistory]:
        for history in histories:
            if not history.completed:
                text = script[history.text[4 : history.text_spans[0][1]]].pop(0)
                history.append_segment(text, torch.tensor(made.encode(text)), system=False)
        return histories

    monkeypatch.setattr(env, "generate", answer)
    queries, responses, masks, paid, histories = env.run(["2+2", "none"], bonus=0.5)
    assert histories[0].text == "Do: 2+2<request><add>2+2<call>4<response>4<submit>"
    assert "Tool error: division by zero<response>no call" in histories[1].text and paid == [1.5, 0.5]
    for query, response, mask, history in zip(queries, responses, masks, histories):
        assert made.decode(torch.cat([query, response])) == history.text
        own = made.decode(response[mask.bool()])
        texts = [history.text[start:end] for start, end in history.text_spans]
        assert own == "".join(t for s, t in zip(history.system_spans, texts) if not s)
    assert env.parse_tool_call("<request>|x|y<call>") == (None, None)


def test_a_text_environment_ends_a_segment_at_its_call(folder):
    made = ready(folder)
    drawn = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    env = TextEnvironment(causal(folder), made, generation_kwargs=drawn)
    (whole,) = env._generate_batched([torch.tensor([5, 6])])
    made.eos_token_id = int(whole[2])
    (cut,) = env._generate_batched([torch.tensor([5, 6])])
    assert cut.tolist() == whole[: whole.tolist().index(whole[2]) + 1].tolist()  # and not what pads it behind its end
    made.eos_token = None
    env.call_token = made.decode(whole[:3])[-1:] or "x"
    (cut,) = env._generate_batched([torch.tensor([5, 6])])
    assert env.call_token in made.decode(cut) and env.call_token not in made.decode(cut[:-1])
    both = env._generate_batched([torch.tensor([5, 6]), torch.tensor([9, 4, 3])], batch_size=2)
    each = [env._generate_batched([torch.tensor(x)])[0].tolist() for x in ([5, 6], [9, 4, 3])]
    assert [x.tolist() for x in both] == each
