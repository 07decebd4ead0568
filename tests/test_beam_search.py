"""Beam search in evaluations, the diagnosis of evaluations that differ, and the token that a decoder starts with."""

import itertools
import json
import shutil

import pytest
import torch
from cases import cases
from published import ROWS, models
from toys import bare_logprobs, lm

from operant import OperantError, Policy, PolicyBase, Sampling, diagnose, load_policy, train
from operant.engines.beam_search import BeamSearch
from operant.models.soft_prompt import attach
from operant.tools.report.diagnosis import History, read_history

PROMPTS = [[3, 4, 5], [6, 3], [7, 7, 4], [5]]


def strange(kind, **more):
    """A model whose own generation_config would change every search."""
    model = lm(kind, **more)
    for name, value in (("no_repeat_ngram_size", 1), ("min_length", 9), ("num_beams", 2), ("forced_eos_token_id", 1)):
        setattr(model.generation_config, name, value)
    return model


def every_reply(vocabulary, most, stop):
    """All replies of at most `most` tokens that a stop token, or the limit, ends."""
    for length in range(1, most + 1):
        for ids in itertools.product(range(vocabulary), repeat=length):
            if stop not in ids[:-1] and (ids[-1] == stop or length == most):
                yield list(ids)


@cases(("gpt2", 0.7), ("bart", 0.7), ("gpt2", 0.0), ("t5", 2.0))
def test_with_a_beam_for_each_reply_the_best_one_is_found(kind, penalty):
    """Enumerated: all replies of up to two tokens, each with the score of its bare log-probs."""
    policy, sampling = Policy(strange(kind, vocab=8)), Sampling(max_tokens=2, stop_tokens=(2,))
    found = BeamSearch(policy, beams=16, length_penalty=penalty).generate(PROMPTS[:2], sampling, [0] * 2)
    for prompt, reply in zip(PROMPTS[:2], found, strict=True):
        score = lambda ids, p=prompt: float(bare_logprobs(policy.model, p, ids).sum()) / len(ids) ** penalty  # noqa: E731
        best = max(every_reply(8, 2, 2), key=score)
        assert reply.action == best and reply.end == ("stop" if best[-1] == 2 else "length")


@cases("gpt2", "llama", "t5", "bart")
def test_few_beams_are_those_of_transformers_row_by_row(kind):
    """The same tokens as `generate` of each prompt alone, with the same limits, and without the model's own config."""
    model = lm(kind)
    settings = {"num_beams": 3, "max_new_tokens": 7, "min_new_tokens": 3, "length_penalty": 0.6, "do_sample": False}
    known = settings | {"eos_token_id": [2, 4], "pad_token_id": 0, "suppress_tokens": [6]}
    alone = []
    with torch.no_grad():
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **known)[0].tolist()
            alone.append(out[1 if model.config.is_encoder_decoder else len(prompt) :])
    odd = strange(kind)
    usual = odd.generation_config.to_dict()
    sampling = Sampling(max_tokens=7, min_tokens=3, stop_tokens=(2, 4), banned=(6,), temperature=0.5)
    found = BeamSearch(Policy(odd), beams=3, length_penalty=0.6).generate(PROMPTS, sampling, [0] * 4)
    assert [reply.action for reply in found] == alone
    assert odd.generation_config.to_dict() == usual and not odd.training


def test_a_soft_prompt_stands_before_every_prompt():
    """As transformers searches behind the vectors themselves."""
    vectors, model = torch.randn(3, 32, generator=torch.Generator().manual_seed(2)), lm("llama")
    how = {"num_beams": 3, "max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    sampling = Sampling(max_tokens=5, stop_tokens=-1)
    found = BeamSearch(Policy(attach(lm("llama"), vectors)), beams=3).generate(PROMPTS, sampling, [0] * 4)
    for prompt, reply in zip(PROMPTS, found, strict=True):
        words = torch.cat([vectors, model.get_input_embeddings()(torch.tensor(prompt)).detach()])[None]
        assert model.generate(inputs_embeds=words, **how)[0].tolist() == reply.action


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    models(folder)
    return folder


def run(place, tmp_path, **given):
    known = {"form": "summarize", "reward": "letters:e", "steps": 2, "batch": 2, "probes": 0}
    known |= {"sampling": {"max_tokens": 4}, "evaluate": ROWS["summarize"], "out": tmp_path / "run"}
    return train(str(place / "t5"), ROWS["summarize"], **known | given)


def test_evaluating_with_beams_says_so_and_changes_no_training(place, tmp_path):
    searched, drawn = run(place, tmp_path / "a", **{"evaluation.beams": 3}), run(place, tmp_path / "b")
    prompts = [task.prompt for task in drawn.parts.held_out]
    again = BeamSearch(drawn.policy, beams=3).generate(prompts, drawn.learner.sampling, [0, 0])
    assert [r.ids for r in searched.after.rollouts] == [reply.action for reply in again]
    assert searched.after.kl is None and drawn.after.kl is not None
    assert [m["reward/mean"] for m in searched.metrics] == [m["reward/mean"] for m in drawn.metrics]
    for source in (searched, read_history(searched.path)):
        (found,) = [finding for finding in diagnose(source) if finding.name == "evaluated_otherwise"]
        assert found.level == "note" and found.message == "Held-out replies are made with 3 beams (training draws)."
        assert found.remedy.endswith("`--evaluation.beams 1`")
    assert "evaluated_otherwise" not in [finding.name for finding in diagnose(drawn)]


@cases(
    ({"top_k": 1}, "top_k 1 (training 0)"),
    ({"temperature": 0.7, "max_new_tokens": 8}, "temperature 0.7 (training 1.0), max_new_tokens 8 (training 4)"),
    ({"do_sample": False}, "do_sample False (training True)"),
    ({"temperature": 1.0, "max_tokens": 4, "do_sample": True, "pad_token_id": 0, "use_cache": True}, None),
)
def test_the_diagnosis_names_each_setting_that_differs(given, parts):
    options = {"sampling.temperature": 1.0, "sampling.top_k": 0, "sampling.max_tokens": 4, "evaluation.sampling": given}
    history = History([{"step": 1, "reward/mean": 0.1}], config=options, evaluation={"after": {}})
    found = {finding.name: finding for finding in diagnose(history)}.get("evaluated_otherwise")
    assert (found and found.message) == (parts and f"Held-out replies are made with {parts}.")


def test_what_beams_cannot_search_is_refused(place, tmp_path):
    with pytest.raises(OperantError, match=r"evaluation\.beams=4: the policy PolicyBase is no transformers model"):
        BeamSearch(PolicyBase())
    given = {"env": "extract", "form": "extract", "evaluation.beams": 2, "evaluate": ROWS["extract"]}
    with pytest.raises(OperantError, match=r"evaluation\.beams=2: the world offers options, of which one is drawn"):
        train(str(place / "t5"), ROWS["extract"], "letters:e", steps=1, batch=2, out=tmp_path / "run", **given)


def test_an_encoder_decoder_needs_a_start_token(place, tmp_path):
    """In either of its two configs; without one, the folder is refused as it loads."""
    folder = shutil.copytree(place / "t5", tmp_path / "t5")
    for name in ("generation_config.json", "config.json"):
        assert load_policy(str(folder)).start_token == 0
        path = folder / name
        kept = {k: v for k, v in json.loads(path.read_text(encoding="utf-8")).items() if k != "decoder_start_token_id"}
        path.write_text(json.dumps(kept), encoding="utf-8")
    with pytest.raises(OperantError, match=r"T5ForConditionalGeneration has no decoder_start_token_id, .*config\.json"):
        load_policy(str(folder))
