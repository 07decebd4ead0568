"""Task models against plain calls of transformers: one text at a time, without padding, hooks or shared sentences."""

import copy
import math

import pytest
import torch
import transformers as t
from cases import cases
from tokenizers import Tokenizer, models
from tokenizers_of_words import byte_tokenizer, word_tokenizer
from toys import lm, on_disk

from operant.apps.prompts.examples import Examples
from operant.apps.prompts.task_models import FLOOR, BlackBox, by_tokens, task_model
from operant.apps.prompts.templates import SETS, PromptTemplate, set_named
from operant.types import OperantError

WORDS = ("bad", "good")
TEXTS = ["a film", "the plot is dull and long", "so good", "a film"]
PROMPTS = ["it is", "Grade so", ""]


def masked(kind: str, vocab: int):
    shape = {"vocab_size": vocab, "initializer_range": 0.3, "pad_token_id": 0, "max_position_embeddings": 40}
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    torch.manual_seed(0)
    if kind == "bert":
        return t.BertForMaskedLM(t.BertConfig(**shape, **size)).eval()
    return t.RobertaForMaskedLM(t.RobertaConfig(**shape, **size)).eval()


def filled(pieces: list[str]) -> str:
    """The template of these tests, without `PromptTemplate`: pieces with one space between them."""
    return " ".join(piece for piece in pieces if piece)


def answers(model, tokenizer, ids: list[int], place: int, words: list[str], **more) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([ids]), **more).logits[0, place].double()
    return [float(logits[tokenizer.convert_tokens_to_ids(word)] - logits.logsumexp(-1)) for word in words]


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("batch_tokens", [8, 4096])
def test_masked_models_answer_at_their_mask(kind, batch_tokens):
    tokenizer = word_tokenizer()
    model = masked(kind, len(tokenizer))
    task = task_model((model, tokenizer), batch_tokens=batch_tokens)
    # A text with the mask's own text in it moves the mask that is asked for.
    texts, prompts = [*TEXTS, "a [MASK] film"], [*PROMPTS, "so [MASK]"]
    found = task.word_logprobs(PromptTemplate("{sentence} {prompt} {mask} ."), prompts, texts, WORDS)
    for i, prompt in enumerate(prompts):
        for j, text in enumerate(texts):
            ids = tokenizer(filled([text, prompt, "[MASK] ."])).input_ids
            place = len(tokenizer(filled([text, prompt])).input_ids) - 1
            assert found[i, j].tolist() == pytest.approx(answers(model, tokenizer, ids, place, WORDS), abs=1e-5)
    assert task.kind == "masked" and task.calls == len(prompts) * len(set(texts))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@cases("{sentence}{prompt}", "{sentence} {prompt} all", "{prompt} {sentence}", "so: {sentence} {prompt}")
def test_shared_sentences_change_no_number(template, kind):
    tokenizer = byte_tokenizer()
    model = lm(kind, len(tokenizer))
    # "grad" + "ing" are one word, whose tokens differ from those of its parts; of the last prompt nothing is left.
    texts, prompts = [*TEXTS, "it is grad", ""], ["ing", " so good", " Grade it. all in all", "é", ""]
    texts = texts if template != "{sentence}{prompt}" else texts[:-1]
    made = PromptTemplate(template)
    expected = torch.zeros(len(prompts), len(texts), 2, dtype=torch.float64)
    for i, prompt in enumerate(prompts):
        for j, text in enumerate(texts):
            space = " {prompt}" if " {prompt}" in template else "{prompt} "
            given = template if prompt else template.replace(space, "{prompt}")
            ids = tokenizer(given.replace("{sentence}", text).replace("{prompt}", prompt)).input_ids or [1]
            expected[i, j] = torch.tensor(answers(model, tokenizer, ids, -1, ["Ġbad", "Ġgood"]))
    shared = task_model((model, tokenizer), batch_tokens=60)
    for _ in range(2):  # the second time the sentences are known
        torch.testing.assert_close(shared.word_logprobs(made, prompts, texts, WORDS), expected, atol=1e-5, rtol=0)
    assert shared.notes == [] and shared.share
    plain = task_model((model, tokenizer), share=False).word_logprobs(made, prompts, texts, WORDS)
    torch.testing.assert_close(plain, expected, atol=1e-5, rtol=0)


def test_sentences_are_read_once_in_bounded_memory():
    tokenizer = byte_tokenizer()
    model, read = lm("gpt2", len(tokenizer)), []
    task = task_model((model, tokenizer))
    template = PromptTemplate("{sentence} {prompt}")
    task.word_logprobs(template, ["it"], ["a film"], WORDS)  # with the trial
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: read.append(args[0].numel()))
    task.word_logprobs(template, ["it", "is"], TEXTS, WORDS)
    first = sum(read)
    read.clear()
    task.word_logprobs(template, ["so", "in"], TEXTS, WORDS)
    assert 0 < sum(read) < first
    assert sum(state.nbytes for state in task._states.values()) < task.cache_gb * 1e9
    task.cache_gb = 0
    task.word_logprobs(template, ["so", "in"], TEXTS, WORDS)
    assert not task._states


def test_a_model_that_cannot_branch_reads_whole_texts(monkeypatch):
    """A model that ignores the mask of branches is found out in the trial, said, and read plainly."""
    tokenizer = byte_tokenizer()
    model = lm("gpt2", len(tokenizer))
    trunk = model.transformer.forward

    def deaf(*args, **kwargs):
        if kwargs.get("attention_mask") is not None and kwargs["attention_mask"].ndim == 4:
            kwargs.pop("attention_mask")
        return trunk(*args, **kwargs)

    monkeypatch.setattr(model.transformer, "forward", deaf)
    task = task_model((model, tokenizer))
    with pytest.warns(UserWarning, match="its log-probs would differ"):
        found = task.word_logprobs(PromptTemplate("{sentence} {prompt}"), ["it is"], TEXTS, WORDS)
    ids = tokenizer("so good it is").input_ids
    assert found[0, 2].tolist() == pytest.approx(answers(model, tokenizer, ids, -1, ["Ġbad", "Ġgood"]), abs=1e-5)


@cases(
    ("t5", None, "{sentence} {prompt} {mask} ."),
    ("bart", "[MASK]", "{sentence} {prompt} {mask} ."),
    ("t5", None, "{sentence} {prompt}"),
)
def test_encoder_decoders_answer_in_their_decoder(kind, mask, template):
    tokenizer = word_tokenizer(mask)
    model = lm(kind, len(tokenizer))
    task = task_model((model, tokenizer), batch_tokens=20)
    found = task.word_logprobs(PromptTemplate(template), PROMPTS, TEXTS, WORDS)
    slot = {"t5": "<extra_id_0>", "bart": "[MASK]"}[kind] if "mask" in template else ""
    for i, prompt in enumerate(PROMPTS):
        for j, text in enumerate(TEXTS):
            ids = tokenizer(filled([text, prompt, f"{slot} ." if slot else ""])).input_ids
            start = model.config.decoder_start_token_id
            decoder = [start, *([tokenizer.convert_tokens_to_ids(slot)] if slot else [])]
            if kind == "bart":
                decoder = [start, *tokenizer(filled([text, prompt])).input_ids[:-1]]
            expected = answers(model, tokenizer, ids, -1, WORDS, decoder_input_ids=torch.tensor([decoder]))
            assert found[i, j].tolist() == pytest.approx(expected, abs=1e-5)


# --- functions --------------------------------------------------------------------------------------------------------
def test_a_function_answers_with_texts_or_logprobs():
    answers = {"a film it": "It is Good, not bad", "so it": {"good": -0.5, "bad": -math.inf}, "x it": "no idea"}
    task = task_model(lambda texts: [answers[text] for text in texts])
    found = task.word_logprobs(PromptTemplate("{sentence} {prompt}"), ["it"], ["a film", "so", "x"], WORDS)
    assert found.tolist() == [[[FLOOR, 0.0], [FLOOR, -0.5], [FLOOR, FLOOR]]]
    box = BlackBox(lambda texts: ["a greater one"], "f")
    found = box.of_pairs(PromptTemplate("{sentence}{prompt}"), [("", "")], ("great", "greater"))
    assert found.tolist() == [[FLOOR, 0.0]]


def test_a_function_has_a_name(tmp_path, monkeypatch):
    (tmp_path / "asked.py").write_text("def ask(texts):\n    return ['good'] * len(texts)\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    task = task_model("asked:ask")
    assert task.word_logprobs(PromptTemplate("{sentence} {prompt}"), ["it"], ["a"], WORDS).tolist() == [[[FLOOR, 0.0]]]


@cases(
    (lambda texts: ["good"], "one answer for each"),
    (lambda texts: "good", "one answer for each"),
    (lambda texts: [1.0 for _ in texts], "a text, or a mapping"),
    (lambda texts: [{"good": "x"} for _ in texts], "a text, or a mapping"),
    (lambda texts: [{"good": math.nan} for _ in texts], "NaN or infinity for the prompt 'it'"),
)
def test_wrong_answers_of_functions(answer, sentence):
    with pytest.raises(OperantError, match=sentence):
        task_model(answer).word_logprobs(PromptTemplate("{sentence} {prompt}"), ["it"], ["a", "b"], WORDS)


# --- what wrong input gets --------------------------------------------------------------------------------------------
def toy(kind: str):
    tokenizer = byte_tokenizer() if kind == "gpt2" else word_tokenizer()
    model = lm(kind, len(tokenizer)) if kind in ("gpt2", "t5") else masked(kind, len(tokenizer))
    return task_model((model, tokenizer))


@cases(
    ("gpt2", "{sentence} {prompt}", ("bad", "splendid"), "'splendid' is not one token .*: with a space before it"),
    ("bert", "{sentence} {prompt} {mask}", ("bad", "so good"), "'so good' is not one token"),
    ("bert", "{sentence} {prompt} {mask}", ("bad", "bad"), "at least two different"),
    ("bert", "{sentence} {prompt} {mask}", ("bad", " bad"), "are one token"),
    ("bert", "{sentence} {prompt}", WORDS, "put {mask} into it"),
    ("gpt2", "{sentence} {prompt} {mask}", WORDS, "leave {mask} out"),
)
def test_what_a_model_cannot_answer_is_refused(kind, template, words, sentence):
    with pytest.raises(OperantError, match=sentence):
        toy(kind).check(PromptTemplate(template), words)


def test_braces_of_texts_and_examples_mean_nothing():
    template = PromptTemplate("{sentence} {prompt} {mask} .").behind("{prompt} x\n")
    assert template.render("p", "{mask}", "_") == "{prompt} x\n{mask} p _ ."
    assert template.render("", "s", "_") == "{prompt} x\ns _ ."


def test_other_models_are_refused(tmp_path):
    maskless = word_tokenizer(None)
    on_disk(tmp_path, masked("bert", len(word_tokenizer())).bert, word_tokenizer())
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    t5 = lm("t5"), t.PreTrainedTokenizerFast(tokenizer_object=words)
    for model, kind, why in (
        ((masked("bert", len(maskless)), maskless), "masked", "has no mask token"),
        (lambda texts: texts, "masked", r"kind='masked': task model '<lambda>' is callable"),
        (t5, "callable", "kind='callable': a T5ForConditionalGeneration is no function"),
        ("builtin:reviews-lm", "mask", "kind='mask'"),
        ("./nowhere", None, "there is no such folder"),
        (str(tmp_path), "masked", "lacks weights of a masked model"),
    ):
        with pytest.raises(OperantError, match=why):
            task_model(model, kind)
    with pytest.raises(OperantError, match="neither a mask token nor"):
        task_model(t5).check(PromptTemplate("{sentence} {prompt} {mask}"), WORDS)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_saved_folder_is_the_same_model(kind, tmp_path):
    before = toy(kind)
    on_disk(tmp_path, before.model, before.tokenizer)
    after = task_model(tmp_path)
    assert (after.kind, after.longest) == ("masked", {"bert": 40, "roberta": 39}[kind])
    pair = [task.word_logprobs(PromptTemplate(after.template), PROMPTS, TEXTS, WORDS) for task in (after, before)]
    torch.testing.assert_close(*pair)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_long_texts_are_refused_and_never_cut(kind):
    task = toy(kind)
    template = PromptTemplate(task.template)
    assert task.tokens(template, [("so", "a a")])[0] in (7, 3)
    with pytest.raises(OperantError, match=f"reads at most {task.longest}: texts are not cut"):
        task.word_logprobs(template, ["so"], ["a", "a " * task.longest + "a"], WORDS)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_nan_names_prompt_and_text(kind):
    task = toy(kind)
    plot = task.tokenizer.convert_tokens_to_ids("Ġplot" if kind == "gpt2" else "plot")
    task.model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: out.masked_fill((args[0] == plot)[..., None], math.nan)
    )
    with pytest.raises(OperantError, match="NaN or infinity for the prompt 'so' and the text 'a plot'"):
        task.word_logprobs(PromptTemplate(task.template), ["so"], ["a film", "a plot"], WORDS)


# --- features and gradients -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["bert", "gpt2", "t5"])
def test_features_are_what_the_head_reads(kind):
    task = toy(kind)
    template = PromptTemplate(task.template)
    states = task.features(template, "so", TEXTS)
    with torch.no_grad():
        table = task.model.get_output_embeddings()(states.float()).log_softmax(-1)
    found = task.word_logprobs(template, ["so"], TEXTS, WORDS)[0]
    torch.testing.assert_close(found, table[:, task.word_ids(WORDS)].double(), atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_replacements_follow_the_gradient(kind):
    """The loss changes along the embedding of each token as its first-order estimate says (finite differences)."""
    task = toy(kind)
    template, prompt, texts, labels = PromptTemplate(task.template), "so good", ["a film", "a plot is"], [0, 1]
    ranked = task.replacements(template, prompt, texts, labels, WORDS, top=10**6)
    table = task.model.get_input_embeddings().weight
    columns = torch.tensor(task.word_ids(WORDS))[labels]
    place = {"bert": [(3, 4), (4, 5)], "gpt2": [(2, 3), (3, 4)]}[kind]

    def loss(position: int, token: int, size: float) -> float:
        total = 0.0
        for i, text in enumerate(texts):
            row = task._rows(template, [(prompt, text)])[0]
            inputs = table[torch.tensor([row.ids])].clone().double()
            inputs[0, place[i][position]] += size * table[token].double()
            total -= float(twin(inputs_embeds=inputs).logits[0, row.place].log_softmax(-1)[columns[i]])
        return total

    twin = copy.deepcopy(task.model).double()
    with torch.no_grad():
        for position in range(2):
            slope = [(loss(position, token, 1e-4) - loss(position, token, -1e-4)) for token in range(len(table))]
            assert ranked[position][:20] == sorted(range(len(table)), key=lambda token: slope[token])[:20]


# --- data -------------------------------------------------------------------------------------------------------------
def test_published_sets():
    assert set_named("SST2") == set_named("sst_2") == SETS["sst-2"]
    assert set_named("ag_news") == set_named("data/ag_news.csv") == SETS["agnews"] and set_named("imdb") is None
    for found in SETS.values():
        assert PromptTemplate(found.masked).has_mask and not PromptTemplate(found.causal).has_mask


def test_shuffled_examples_keep_the_classes_in_proportion():
    examples = Examples("x", tuple(map(str, range(90))), tuple([0] * 60 + [1] * 30))
    for key in range(5):
        order = examples.shuffled(key)
        assert sorted(order) == sorted(examples)
        for count in (3, 9, 30, 60):
            assert abs(sum(order.labels[:count]) - count / 3) <= 1
    assert examples.shuffled(1) == examples.shuffled(1) != examples.shuffled(2)


def test_batches_keep_to_their_budget():
    lengths = [5, 1, 9, 3, 3, 20]
    batches = list(by_tokens(lengths, 10))
    assert sorted(i for batch in batches for i in batch) == list(range(6))
    assert all(len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 10 for batch in batches)
