"""Soft prompts: what they compute, what they train, how they are stored, and what is refused.

The truth is the bare model of transformers, called with `inputs_embeds` that are put together by hand, and peft.
"""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from cases import cases
from page_commands import snippets
from safetensors.torch import load_file, save_file
from small_runs import count_a, killed, same
from toys import letters, lm, on_disk
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, Gemma2Config, Gemma2ForCausalLM

import operant
from operant import Batch, Learner, OperantError, Policy, Sampling, ValueOptions, export, load_policy, train
from operant.engines.native import engine as native
from operant.engines.native.capabilities import chooses_on, continues, try_decoding
from operant.engines.native.cuda_graphs import static
from operant.engines.native.engine import NativeEngine
from operant.models import soft_prompt as soft_prompts
from operant.models.adapters import SoftPromptOptions, find
from operant.models.hidden_states import Modes
from operant.models.options import ModelOptions
from operant.runs import named_models

KINDS = ("gpt2", "gpt_neox", "llama", "qwen2", "t5", "bart")
"""gpt2, llama's toy and bart are tied; positions are absolute, rotary or relative."""
ROWS = ([[3, 4, 5, 6], [7, 8], [9]], [[9, 10], [11, 12, 13], [14]])
SOFT, V = {"soft_prompt.tokens": 3}, 20


def vectors_of(policy):
    return find(policy.model, soft_prompts.SoftPrompt).vectors


def soft_policy(kind, packing="auto", **more):
    """A policy in float64 with a soft prompt of 3 random vectors that are far from every word."""
    options = ModelOptions(packing=packing)
    return load_policy(lm(kind, V), soft=SoftPromptOptions(tokens=3), options=options, seed=5, **more).double()


def by_hand(model, vectors, prompt, action):
    """[A] log-probs of an action by the bare model: the vectors, the words' embeddings, and nothing of operant's."""
    seq2seq = model.config.is_encoder_decoder
    read = prompt if seq2seq else prompt + action
    words = (model.get_encoder() if seq2seq else model).get_input_embeddings()(torch.tensor([read]))
    feed = {"inputs_embeds": torch.cat([vectors[None], words], 1)}
    if seq2seq:
        feed["decoder_input_ids"] = torch.tensor([[model.config.decoder_start_token_id, *action[:-1]]])
        logits = model(**feed).logits[0]
    else:
        logits = model(**feed).logits[0, len(vectors) + len(prompt) - 1 : -1]
    assert logits.shape == (len(action), V), "the head scores no virtual token"
    return logits.log_softmax(-1)[torch.arange(len(action)), action]


# --- what it computes and trains --------------------------------------------------------------------------------------
@cases(*((kind, "on") for kind in KINDS), ("gpt2", "off"))
def test_logprobs_and_gradient_are_those_by_hand(kind, packing):
    policy, bare = soft_policy(kind, packing, value=ValueOptions(init="normal")), lm(kind, V).double()
    assert policy.modes.packed == (packing == "on" and kind not in ("t5", "bart"))
    out, vectors = policy.forward(Batch.given(*ROWS)), vectors_of(policy)
    truth = [by_hand(bare, vectors, p, a) for p, a in zip(*ROWS, strict=True)]
    mine = out.logprobs[Batch.given(*ROWS).actions]
    assert torch.allclose(mine, torch.cat(truth), atol=1e-10)
    wanted = torch.autograd.grad(torch.cat(truth).sum(), vectors)[0]
    assert torch.allclose(torch.autograd.grad(mine.sum(), vectors, retain_graph=True)[0], wanted, atol=1e-5)
    assert float(wanted.abs().max()) > 1e-3
    (mine.sum() + out.values.sum()).backward()
    given = {name for name, p in policy.named_parameters() if p.grad is not None}
    assert {name.split(".")[0] for name in given if not name.endswith("soft_prompt.vectors")} == {"value_head"}
    assert given == {name for name, p in policy.named_parameters() if p.requires_grad}


@cases(*(("gpt2", way) for way in ("pooled", "fixed", "cached", "whole")), ("llama", "fixed"), ("t5", "cached"))
def test_every_way_of_decoding_generates_behind_it(kind, way, monkeypatch):
    """Two rows for five prompts: prompts are admitted beside live rows, and equal ones are read once. The longest one
    fills the 64 positions, with 3 virtual tokens and 5 of a reply. `fixed` is the way of a GPU, without graphs."""
    policy, bare = soft_policy(kind), lm(kind, V).double()
    try_decoding(policy)
    assert policy.modes.pooled == (kind in ("gpt2", "llama")) and policy.modes.cached
    off = {"cached": {"pooled": False}, "whole": {"pooled": False, "cached": False}}
    policy.modes = replace(policy.modes, **off.get(way, {}))
    if way == "fixed":
        fixed = lambda p, rows, columns, moves: static(p, rows, columns, moves=moves, capture=False)  # noqa: E731
        monkeypatch.setattr(native, "decode", fixed)
    prompts = [[3, 4, 5], [6], list(range(3, 20)) * 3 + [7, 8, 9, 10, 11], [6], [12, 13]]
    made = NativeEngine(policy, batch=2).generate(prompts, Sampling(max_tokens=5), range(5))
    for prompt, c in zip(prompts, made, strict=True):
        truth = by_hand(bare, vectors_of(policy), prompt, c.action)
        assert c.logprobs == pytest.approx(truth.tolist(), abs=1e-9) and max(c.action) < V


@cases(("gpt2", True), ("llama", False), ("t5", True))
def test_turns_and_choices_go_on_behind_it(kind, remembers):
    """Both ways of reading: what an earlier turn has computed, with the soft prompt in it, or the whole prompt."""
    policy, bare = soft_policy(kind), lm(kind, V).double()
    engine, options = NativeEngine(policy), [[[6, 7], [8], [9, 10, 11]]] * 2
    if kind != "t5":
        assert continues(policy) and chooses_on(policy, 40)
    prompts = [[3, 4, 5, 6], [7, 8]]
    with engine.remembering() if remembers else nullcontext():
        for turn in range(2):
            made = engine.generate(prompts, Sampling(max_tokens=3), [turn, 9])
            for prompt, c in zip(prompts, made, strict=True):
                truth = by_hand(bare, vectors_of(policy), prompt, c.action)
                assert c.logprobs == pytest.approx(truth.tolist(), abs=1e-9)
            prompts = [[*p, *c.action, 3] for p, c in zip(prompts, made, strict=True)]
            chosen = engine.choose(prompts, options, Sampling(), [turn, 9])
            for prompt, (pick, c) in zip(prompts, chosen, strict=True):
                scores = torch.stack([by_hand(bare, vectors_of(policy), prompt, o).mean() for o in options[0]])
                assert c.probabilities == pytest.approx(scores.softmax(0).tolist(), abs=1e-9)
                assert c.action == options[0][pick]
            prompts = [[*p, *c.action] for p, (_, c) in zip(prompts, chosen, strict=True)]
            assert (engine.kept is not None and len(engine.kept) > 0) == (remembers and kind != "t5")


# --- how it begins, and how much room it takes ------------------------------------------------------------------------
def test_what_it_begins_as():
    model, tokenizer = lm("gpt2", len(letters())), letters()
    table = model.get_input_embeddings().weight.detach().clone()
    words = load_policy(model, tokenizer=tokenizer, soft=SoftPromptOptions(5, "words", "ab"))
    a, b = tokenizer("a").input_ids[0], tokenizer("b").input_ids[0]
    assert torch.equal(vectors_of(words), table[[a, b, a, b, a]])
    drawn = [soft_prompts.first_vectors(lm("bart", 40), SoftPromptOptions(400), None, seed) for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    deviation = lm("bart", 40).get_input_embeddings().weight.detach().std()
    assert float(drawn[0].std() / deviation) == pytest.approx(1, abs=0.03) and abs(float(drawn[0].mean())) < 0.01


def test_rows_behind_a_long_one_are_packed_only_where_that_is_exact():
    """The rows of the trial are nearly full behind 20 virtual tokens, so that packing them saves nothing."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = Gemma2ForCausalLM(Gemma2Config(**shape, num_key_value_heads=2, head_dim=16, vocab_size=V, pad_token_id=0))
    policy = load_policy(model.eval(), soft=SoftPromptOptions(tokens=20), options=ModelOptions(packing="on")).double()
    ragged = ([[3], [4, 5]], [[6], [7 + i % 12 for i in range(90)]])
    with torch.no_grad():
        mine = policy.forward(Batch.given(*ragged)).logprobs[Batch.given(*ragged).actions]
        whole = [policy.forward(Batch.given([p], [a])).logprobs[0, -len(a) :] for p, a in zip(*ragged)]
    assert torch.allclose(mine, torch.cat(whole), atol=1e-8)


def test_it_takes_room_in_the_context():
    """64 positions: 60 virtual tokens, and 4 for a prompt and its reply, whose last token is not read."""
    learner = Learner(lm("gpt2", V), **{"soft_prompt.tokens": 60, "max_tokens": 2})
    assert learner.step(learner.generate([[3, 4]] * 2), [1.0, 0.0])["rollout/logprob_gap"] < 1e-5
    why = "prompt 0 has 3 tokens, and with 2 .* context of 4 behind a soft prompt of 60"
    with pytest.raises(OperantError, match=why):
        learner.generate([[3, 4, 5]])
    with pytest.raises(OperantError, match=r"even the shortest prompt .* behind a soft prompt of 63"):
        Learner(lm("gpt2", V), **{"soft_prompt.tokens": 63, "max_tokens": 2})
    source = Learner(lm("bart", V), **{"soft_prompt.tokens": 60, "max_tokens": 20})
    source.generate([[3, 4, 5, 6]])
    with pytest.raises(OperantError, match="encoder reads at most 4 behind a soft prompt of 60"):
        source.generate([[3, 4, 5, 6, 7]])


# --- out and in again -------------------------------------------------------------------------------------------------
def peft_logprobs(wrapped, prompt, action):
    if wrapped.config.is_encoder_decoder:
        start = torch.tensor([[wrapped.config.decoder_start_token_id, *action[:-1]]])
        logits = wrapped(input_ids=torch.tensor([prompt]), decoder_input_ids=start).logits[0]
    else:
        before = wrapped.active_peft_config.num_virtual_tokens + len(prompt) - 1
        logits = wrapped(input_ids=torch.tensor([prompt + action])).logits[0, before:-1]
    return logits.log_softmax(-1)[torch.arange(len(action)), action]


def scores(policy):
    with torch.no_grad():
        return policy.forward(Batch.given(*ROWS)).logprobs


def agree(policy, wrapped):
    with torch.no_grad():
        theirs = torch.cat([peft_logprobs(wrapped.eval(), p, a) for p, a in zip(*ROWS, strict=True)])
    return torch.allclose(scores(policy)[Batch.given(*ROWS).actions], theirs, atol=1e-5)


AUTO = {"gpt2": AutoModelForCausalLM, "t5": AutoModelForSeq2SeqLM}


@pytest.mark.parametrize("kind", AUTO)
def test_peft_reads_what_is_exported_and_the_policy_goes_on(kind, tmp_path):
    from peft import PeftModel

    lm(kind, V).save_pretrained(tmp_path / "base")
    learner = Learner(str(tmp_path / "base"), **SOFT, **{"value.critic": "copy", "optimizer.lr": 3e-2})
    policy, first = learner.policy, vectors_of(learner.policy).detach().clone()
    frozen = {name: p.clone() for name, p in policy.named_parameters() if not p.requires_grad}
    kl = [learner.step(*ROWS, [1.0, -1.0, 0.0])["kl/per_reply"] for _ in range(2)]
    assert abs(kl[0]) < 1e-6 < abs(kl[1]) and all(torch.equal(p, policy.get_parameter(n)) for n, p in frozen.items())
    assert torch.equal(vectors_of(learner.reference.policy), first) and not torch.equal(vectors_of(policy), first)
    export(learner.policy, tmp_path / "out")
    assert agree(learner.policy, PeftModel.from_pretrained(lm(kind, V), str(tmp_path / "out")))
    config = json.loads((tmp_path / "out/adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    (tmp_path / "base").rename(tmp_path / "elsewhere")  # the export has a copy
    bare = dict(AUTO[kind].from_pretrained(tmp_path / "out/base").named_parameters())
    assert all(torch.equal(p, bare[name]) for name, p in lm(kind, V).named_parameters())
    again = Learner(str(tmp_path / "out"), **{"value.critic": "copy"})
    assert torch.equal(scores(again.policy), scores(learner.policy))
    assert torch.equal(again.policy.values(Batch.given(*ROWS)), learner.policy.values(Batch.given(*ROWS)))
    assert not torch.equal(vectors_of(again.policy.critic), vectors_of(again.policy)), "the critic has trained its own"
    assert abs(again.step(*ROWS, [1.0, -1.0, 0.0])["kl/per_reply"]) < 1e-6
    trained = {n for n, p in again.policy.named_parameters() if p.requires_grad and "head" not in n}
    assert {n.split(".")[-1] for n in trained} == {"vectors"}


@pytest.mark.parametrize("kind", AUTO)
def test_a_soft_prompt_of_pefts_own_goes_on_as_a_policy(kind, tmp_path):
    """For an encoder-decoder, peft stores 4 vectors for 2 virtual tokens, and reads the first 2."""
    from peft import PromptTuningConfig, get_peft_model

    lm(kind, V).save_pretrained(tmp_path / "base")
    torch.manual_seed(3)
    task = "CAUSAL_LM" if AUTO[kind] is AutoModelForCausalLM else "SEQ_2_SEQ_LM"
    base = AUTO[kind].from_pretrained(tmp_path / "base")
    theirs = get_peft_model(base, PromptTuningConfig(num_virtual_tokens=2, task_type=task))
    theirs.save_pretrained(tmp_path / "soft")
    held = load_file(tmp_path / "soft/adapter_model.safetensors")["prompt_embeddings"]
    assert len(held) == (2 if task == "CAUSAL_LM" else 4)
    policy = load_policy(tmp_path / "soft")
    assert len(policy.virtual) == 2 and agree(policy, theirs)


TASKS = ["ab", "cde", "fg", "h", "ijk"]
RUN = {"steps": 4, "probes": 0, "batch": 4, "max_tokens": 5, "minibatch": 2, "optimizer.lr": 1e-2}
RUN |= {"checkpoint_minutes": 0.0, "soft_prompt.tokens": 3}
METHODS = {
    "ppo": {"value.critic": "copy", "value.init": "normal"},
    "grpo": {"samples": 2, "soft_prompt.init": "words", "soft_prompt.text": "be"},
    "nlpo": {},  # its mask is made behind the soft prompt of an earlier policy
    "sft": {},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_a_run_resumes_to_the_bit_and_its_export_is_its_policy(method, tmp_path):
    on_disk(tmp_path / "base", lm("t5" if method == "grpo" else "gpt2", len(letters()), spread=0.1))
    rows = [{"prompt": t, "completion": " a"} for t in TASKS] if method == "sft" else TASKS
    given = (str(tmp_path / "base"), rows, None if method == "sft" else count_a)
    options, cut = RUN | METHODS[method] | {"algorithm": method}, tmp_path / "cut"
    whole = train(*given, out=tmp_path / "whole", **options)
    killed(*given, after=2, out=cut, **options)
    assert same(train(*given, out=cut, resume=True), whole)
    assert not torch.equal(vectors_of(whole.policy), vectors_of(load_policy(given[0], soft=SoftPromptOptions(3))))
    for name in (str(cut), f"{cut}@4"):  # what is exported, and what is stored
        policy, _ = named_models.load(name)
        assert torch.equal(scores(policy), scores(whole.policy)) and policy.tokenizer is not None
    first = named_models.load_initial(named_models.run_options(str(cut)), cut, "policy")
    learner = Learner(given[0], algorithm=method, **{k: v for k, v in options.items() if k.startswith("soft_prompt")})
    assert torch.equal(vectors_of(first), vectors_of(learner.policy))
    weights = (cut / "checkpoints/step-00004/tensors.safetensors").stat().st_size
    trained = sum(p.numel() * 4 for p in whole.policy.trainable())
    assert weights < 3 * trained + 20_000, "the weights and Adam's two moments"


# --- what is refused --------------------------------------------------------------------------------------------------
class Typed(torch.nn.Module):
    """A model that looks its ids up twice, as those with an embedding of their own in every block do."""

    def __init__(self):
        super().__init__()
        self.base, self.more = lm("gpt2", V), torch.nn.Embedding(V, V)
        self.config, self.save_pretrained = self.base.config, self.base.save_pretrained
        self.get_input_embeddings = self.base.get_input_embeddings
        self.get_output_embeddings = self.base.get_output_embeddings

    def forward(self, input_ids=None, **kwargs):
        out = self.base(input_ids=input_ids, **kwargs)
        if input_ids is not None:
            out.logits = out.logits + self.more(input_ids)
        return out


def test_models_that_cannot_have_one_are_refused(folder):
    soft, words = SoftPromptOptions(3), SoftPromptOptions(3, "words", "a b c")
    once, wide = soft_policy("gpt2"), lm("gpt2", len(letters()))
    for make, why in (
        (lambda: load_policy(Typed(), soft=soft), "uses token ids for more than one embedding"),
        (lambda: load_policy(Policy(lm("gpt2"), modes=Modes()), soft=soft), "an existing Policy"),
        (lambda: load_policy(once.model, soft=soft), "already has an adapter, soft prompt or MLP"),
        (lambda: load_policy(lm("gpt2"), soft=words), "has no tokenizer; use"),
        (lambda: load_policy(wide, tokenizer=letters(), soft=words), "has 4 tokens: it needs .* at most the 3"),
        (lambda: Learner(wide, **{"soft_prompt.tokens": 64}), "leaves no room in the model's context; use fewer"),
        (lambda: Learner(str(folder), **SOFT), "is itself an adapter"),
        (lambda: Learner(str(folder), **{"lora.rank": 2}), "is itself an adapter"),
    ):
        with pytest.raises(OperantError, match=why):
            make()


@pytest.fixture
def folder(tmp_path):
    lm("gpt2", V).save_pretrained(tmp_path / "base")
    export(load_policy(tmp_path / "base", soft=SoftPromptOptions(3)), tmp_path / "soft")
    return tmp_path / "soft"


@cases(
    ({"peft_type": "PREFIX_TUNING"}, None, "holds a PREFIX_TUNING adapter: LORA can be trained, and PROMPT_TUNING"),
    ({"num_virtual_tokens": 4}, None, "it has 3 vectors for num_virtual_tokens=4"),
    ({"num_virtual_tokens": "x"}, None, "num_virtual_tokens=x"),
    ({}, {"prompt_embeddings": torch.zeros(3, 8)}, "width 8 does not fit this GPT2LMHeadModel of width 32"),
    ({}, {"prompt_embeddings": torch.zeros(3, 32), "head": torch.zeros(1)}, "holds head, prompt_embeddings, and"),
    ({}, {"prompt_embeddings": torch.full((3, 32), torch.nan)}, "prompt_embeddings"),
    ({}, {}, "has no adapter_model.safetensors"),
    ({"base_model_name_or_path": None}, "no base", "does not name the model that it belongs to"),
    ({"base_model_name_or_path": "/no/such"}, "no base", "write the model's name into its adapter_config.json"),
    ids=str,
)
def test_damaged_and_foreign_folders_are_refused(fields, vectors, message, folder):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")
    if vectors == "no base":
        (folder / "base").rename(folder.parent / "elsewhere")
    elif vectors is not None:
        (folder / "adapter_model.safetensors").unlink()
        if vectors:
            save_file(vectors, folder / "adapter_model.safetensors")
    with pytest.raises(OperantError, match=message):
        load_policy(folder)


# --- the page ---------------------------------------------------------------------------------------------------------
def test_the_snippets_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    on_disk("model", lm("gpt2", len(letters())))
    space = {"operant": operant, "model_name": "model", "judge": lambda text: float(text.count("e"))}
    for snippet in snippets("docs/adapters.md#soft-prompts"):
        exec(snippet, space)
    assert torch.equal(scores(space["same"].policy), scores(space["learner"].policy))
    assert agree(space["learner"].policy, space["theirs"])
