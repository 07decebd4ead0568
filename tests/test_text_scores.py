"""Scores of texts by name: against the libraries that they come from, published cases and numbers by hand."""

import inspect
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from cases import cases
from processes import HIDE, run_python
from texts import write_rows
from toys import bare_logprobs, letters, lm, on_disk

from operant import Judgement, OperantError, Policy, Rollout, Task, Turn, rewards, train
from operant.apps.text.concepts import inflected
from operant.apps.text.parent import parent, table_values
from operant.metrics.evaluation import measure, resolve
from operant.models.safe_loading import load_model, load_tokenizer
from operant.rewards import check, judge
from operant.rewards.bertscore import BertScore
from operant.rewards.classifier import Classifier
from operant.rewards.combine import PrefixGain
from operant.rewards.failure_policy import IsolationOptions
from operant.rewards.isolated import under
from operant.rewards.perplexity import Perplexity
from operant.rewards.text_scores import OF_ALL, SCORES, prepare
from operant.rewards.words import ngrams, sentences, spaces, tokenizer
from operant.runs.config import configure
from operant.storage.hub import find_model

ROOT = Path(__file__).parents[1]


def rollout(reply: str, *references: str, target=None, query: str = "", name: str = "t/0") -> Rollout:
    return Rollout(Task(name, query, target, references=references), 0, [], [reply], query=query)


def score(name: str, given: Rollout, **options) -> float:
    (found,) = SCORES[name](**options)([given])
    return found


def number(metric: dict, rollouts: list[Rollout]) -> dict[str, float | list]:
    found = measure(resolve(metric), rollouts)
    return {**found.of_all, **found.of_replies}


REPLIES = ["the cat sat on the mat", "it rains a lot today today", "good morning to all of you"]
REFERENCES = [
    ["the cat sat on a mat", "a cat is sitting on the mat"],
    ["it rains a lot today"],
    ["good morning to all of you", "hello everybody", "good morning everybody"],
]
TASKS = [Task(f"t/{i}", "x", references=tuple(texts)) for i, texts in enumerate(REFERENCES)]
CORPUS = [Rollout(task, i, [], [reply]) for i, (task, reply) in enumerate(zip(TASKS, REPLIES, strict=True))]

# --- words ------------------------------------------------------------------------------------------------------------
EXTRA = {"rouge": "rouge_score", "13a": "sacrebleu", "treebank": "nltk"}


@cases(
    ("words", ["größe", "don", "t", "x2", "naïve"]),
    ("spaces", ["größe", "don't", "x2,", "(naïve)"]),
    ("rouge", ["gr", "e", "don", "t", "x2", "na", "ve"]),
    ("13a", ["größe", "don't", "x2", ",", "(", "naïve", ")"]),
    ("treebank", ["größe", "do", "n't", "x2", ",", "(", "naïve", ")"]),
    ("operant.rewards.words:spaces", ["größe", "don't", "x2,", "(naïve)"]),
)
def test_tokenizers(name, words):
    pytest.importorskip(EXTRA.get(name, "operant"))
    assert tokenizer(name)("Größe don't X2, (naïve)") == words


def test_sentences_and_ngrams():
    said = sentences('He left. "Why?" she said!\nNo 3.5 end… Yes')
    assert said == ["He left.", '"Why?', "she said!", "No 3.5 end…", "Yes"]
    assert ngrams(["a", "b", "a", "b"], 2) == {("a", "b"): 2, ("b", "a"): 1} and not ngrams(["a"], 2)


@cases(
    ("bleu", {}, "a b", ["a b"], 1.0),  # effective order: of two words there are no longer n-grams
    ("bleu", {"max_n": 1}, "a b x", ["a b c d"], 2 / 3 * math.exp(1 - 4 / 3)),
    ("bleu", {"max_n": 2}, "a b x", ["a b c d"], math.exp(1 - 4 / 3) * math.sqrt(2 / 3 * 1 / 2)),
    ("bleu", {"max_n": 1}, "a a", ["a b", "b a a"], 1.0),  # counts are clipped by the largest of any reference
    ("bleu", {}, "", ["a b"], 0.0),
    ("chrf", {"char_order": 1}, "ab", ["ac"], 0.5),
    ("chrf", {"char_order": 1, "word_order": 1}, "ab c", ["ad c"], (2 / 3 + 1 / 2) / 2),
    ("chrf", {}, "", ["a b"], 0.0),
    ("ter", {}, "a b c", ["a b c d"], 1 - 1 / 4),
    ("ter", {}, "b c d a", ["a b c d"], 1 - 1 / 4),  # one shift
    ("ter", {}, "a x y", ["a"], 1 - 2 / 1),  # below 0
    ("ter", {}, "a", ["a b", "a"], 1 - 0 / 1.5),
    ("ter", {}, "", ["a b"], 0.0),
    ("rouge", {"which": "rouge1"}, "a b", ["a c d", "b"], 2 / 3),  # F of 2/5 and 2/3
    ("rouge", {"which": "rouge1", "several": "mean"}, "a b", ["a c d", "b"], (2 / 5 + 2 / 3) / 2),
    ("rouge", {"which": "rouge1", "measure": "precision"}, "a b", ["a c d", "b"], 1 / 2),
    ("rouge", {"which": "rouge1", "measure": "recall", "several": "mean"}, "a b", ["a c d", "b"], (1 / 3 + 1) / 2),
    ("rouge", {"which": "rougeL"}, "a b c", ["c a b"], 2 / 3),
    ("rouge", {}, "a b c", ["c a b"], (1 + 1 / 2 + 2 / 3) / 3),  # a reward's default is combined
    ("rouge", {"which": "combined"}, "a b c", ["c a b"], (1 + 1 / 2 + 2 / 3) / 3),
    # rouge-score's own tokenizer reads "ber" in both: it drops what is not ASCII.
    ("rouge", {"which": "rouge1", "tokenizer": "rouge"}, "über", ["öber"], 1.0),
    ("rouge", {"which": "rouge1"}, "über", ["öber"], 0.0),
    ("rouge", {"which": "rouge1"}, "ÜBER", ["über"], 1.0),
    ("rouge", {}, "", ["a"], 0.0),
    ("rouge", {"which": "rouge1"}, "a", ["", "a"], 1.0),
    ("meteor", {}, "the car", ["the car"], 1 - 0.5 * (1 / 2) ** 3),  # two matches in one chunk
    ("meteor", {"gamma": 0.0}, "The car", ["the car"], 1.0),
    ("meteor", {}, "car the", ["the car"], 1 - 0.5 * (2 / 2) ** 3),
    ("meteor", {}, "cars", ["car"], 0.5),  # one stem, one chunk
    ("meteor", {"gamma": 0.0}, "a b", ["a b c d"], 1 * 0.5 / (0.9 * 1 + 0.1 * 0.5)),
    ("meteor", {"gamma": 0.0, "several": "mean"}, "a", ["a", "b"], 0.5),
    ("meteor", {}, "", ["the car"], 0.0),
)
def test_scores_by_references_by_hand(name, options, reply, references, expected):
    pytest.importorskip({"rouge": "rouge_score", "meteor": "nltk"}.get(name, "sacrebleu"))
    options = {"synonyms": False, **options} if name == "meteor" else options
    assert score(name, rollout(reply, *references), **options) == pytest.approx(expected)


@cases(
    ("BLEU", {}, {}),
    ("BLEU", {"max_n": 2, "lowercase": True}, {"max_ngram_order": 2, "lowercase": True}),
    ("BLEU", {"tokenize": "char"}, {"tokenize": "char"}),
    ("CHRF", {}, {}),
    ("CHRF", {"word_order": 2, "beta": 1}, {"word_order": 2, "beta": 1}),
    ("TER", {"case_sensitive": True}, {"case_sensitive": True}),
)
def test_scores_of_sacrebleu_are_its_own(name, own, options):
    """Tasks have 2, 1 and 3 references: sacrebleu's way, by hand, is None where there is none."""
    sacrebleu = pytest.importorskip("sacrebleu")
    theirs, ours = getattr(sacrebleu, name)(**options), name.lower()
    each = getattr(sacrebleu, name)(**options, **({"effective_order": True} if name == "BLEU" else {}))
    streams = [[texts[k] if k < len(texts) else None for texts in REFERENCES] for k in range(3)]
    replies = [*REPLIES[:2], REPLIES[2].capitalize()]
    corpus = [replace(one, texts=[text]) for one, text in zip(CORPUS, replies, strict=True)]
    found = number({ours: own}, corpus)
    assert found[ours] == theirs.corpus_score(replies, streams).score
    sentences = [each.sentence_score(r, t).score for r, t in zip(replies, REFERENCES, strict=True)]
    assert found[f"{ours}/sentence"] == sentences and 0 < sum(sentences) / 3 < 100
    assert SCORES[ours](**own)(corpus) == [1 - x / 100 if name == "TER" else x / 100 for x in sentences]


@pytest.mark.parametrize("stemmer", [False, True])
@pytest.mark.parametrize("words", ["words", "rouge"])
def test_rouge_is_that_of_its_library(words, stemmer):
    """Of ASCII text, our words are its own."""
    kinds = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(kinds, use_stemmer=stemmer)
    replies = ["The cats were sitting, on a mat.\nIt's 3 o'clock.", "Running dogs; the dog", ""]
    texts = [["A cat sits on the mats.\nIt is 3 o'clock.", "cats, sitting"], ["the dogs ran"], ["empty"]]
    given = [rollout(reply, *each) for reply, each in zip(replies, texts, strict=True)]
    found = number({"rouge": {"tokenizer": words, "stemmer": stemmer}}, given)
    truth = [scorer.score_multi(each, reply) for reply, each in zip(replies, texts, strict=True)]
    for name in scorer.rouge_types:
        assert found[f"rouge/{name}"] == pytest.approx([one[name].fmeasure for one in truth])
    recall = number({"rouge": {"tokenizer": words, "stemmer": stemmer, "measure": "recall", "which": "rouge1"}}, given)
    assert recall["rouge"][1] == truth[1]["rouge1"].recall != truth[1]["rouge1"].fmeasure


def test_meteor_with_synonyms_is_nltks():
    """The example of nltk's documentation, and two synonyms that WordNet has."""
    nltk = pytest.importorskip("nltk")
    try:
        nltk.corpus.wordnet.ensure_loaded()
    except LookupError:
        pytest.skip("WordNet's data is not on this machine")
    reply = "It is a guide to action which ensures that the military always obeys the commands of the party"
    text = "It is a guide to action that ensures that the military will forever heed Party commands"
    assert score("meteor", rollout(reply, text)) == pytest.approx(0.6944, abs=5e-5)
    assert score("meteor", rollout("the car", "the auto")) == pytest.approx(1 - 0.5 * (1 / 2) ** 3)


def test_meteor_without_wordnet_says_what_fetches_it(monkeypatch):
    nltk = pytest.importorskip("nltk")
    from nltk.corpus.reader.wordnet import WordNetCorpusReader
    from nltk.corpus.util import LazyCorpusLoader

    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setattr(nltk.corpus, "wordnet", LazyCorpusLoader("wordnet", WordNetCorpusReader, None))
    with pytest.raises(OperantError, match=r"python -m nltk\.downloader wordnet; or set synonyms=false"):
        check(rewards.resolve("meteor"))


def test_cider_is_that_of_the_authors():
    """The numbers are those of the authors' scorer (pycocoevalcap 1.2) for these texts as one corpus."""
    (found,) = number_of_prepared("cider", CORPUS).values()
    assert found == pytest.approx([4.196269570523575, 8.230563357084405, 3.9125692112363053])


def number_of_prepared(name: str, rollouts: list[Rollout], **options) -> dict[str, list]:
    (metric,) = resolve({name: options})
    prepare(metric.made, name, [one.task for one in rollouts])
    return dict(measure([metric], rollouts).of_replies)


def test_cider_by_hand():
    """Two documents, "a b" and "c": idf is log 2 for all. Of one word, cosine 1/sqrt(2) times the length's penalty."""
    metric = SCORES["cider"](n=1, sigma=2.0)
    metric.freeze([["a b"], ["c"]])
    assert metric.of("a", ["a b"]) == pytest.approx(10 / math.sqrt(2) * math.exp(-1 / 8))
    assert metric.of("a a", ["a b"]) == pytest.approx(10 * 1 / (2 * math.sqrt(2)))  # clipped to one a
    assert metric.of("c", ["c", "a b"]) == pytest.approx(10 / 2)
    assert metric.of("", ["a b"]) == 0.0 and metric.of("z", ["z"]) == pytest.approx(10)


def test_tasks_with_one_prompt_stay_apart_in_cider():
    """A table with prompts as keys would keep one of them, and count two documents."""
    prompts = [Task(name, "one prompt", references=(text,)) for name, text in [("a", "x y"), ("b", "x z"), ("c", "w")]]
    given = [Rollout(task, 0, [], [text]) for task, text in zip(prompts, ["x y", "x y", "w"], strict=True)]
    first, second, third = number_of_prepared("cider", given, n=1)["cider"]
    x, y = math.log(3 / 2), math.log(3)  # x is in two documents of three
    assert (first, third) == (pytest.approx(10), pytest.approx(10))
    assert second == pytest.approx(10 * x * x / (x * x + y * y))


def test_document_frequencies_of_a_file_or_tasks_are_frozen(tmp_path):
    path = write_rows(tmp_path / "train.jsonl", [{"captions": ["a b", "a"]}, {"captions": "c"}])
    metric = SCORES["cider"](**{"documents": path, "field": "captions", "n": 1})
    check(metric)
    prepare(metric, "cider", TASKS)  # the file stays
    assert metric([rollout("a", "a b")]) == [pytest.approx(10 / math.sqrt(2) * math.exp(-1 / 72))]
    with pytest.raises(OperantError, match=r"a row of .* has None as 'references'.*cider\.field=NAME"):
        check(SCORES["cider"](path))
    with pytest.raises(OperantError, match=r"has 1 document: every n-gram would weigh log\(1\) = 0"):
        prepare(SCORES["cider"](), "cider", TASKS[:1])
    with pytest.raises(OperantError, match="no document frequencies yet"):
        SCORES["cider"]()(CORPUS)


DRUMMER = {"birth name": "michael dahlquist", "born": "december 22 , 1965"}
DRUMMER |= {"birth place": "seattle , washington", "died": "july 14 , 2005", "death place": "skokie , illinois"}
DRUMMER |= {"genres": "male", "occupation(s)": "drummer", "instruments": "drums"}
BEGINS = "michael dahlquist ( december 22 , 1965 -- july 14 , 2005 ) was a drummer"


@cases((" in the california band grateful dead .", 0.688), (" .", 0.746), (" from seattle , washington .", 0.786))
def test_parent_is_that_of_the_paper(rest, expected):
    """The paper's example, with the F of the authors' program at lambda = 0.9."""
    given = rollout(BEGINS + rest, f"{BEGINS} in the seattle band silkworm .", target=DRUMMER)
    assert score("parent", given, table_weight=0.9, tokenizer="spaces") == pytest.approx(expected, abs=5e-4)


def test_parent_by_hand():
    """Words alone (n = 1). x is in neither text nor table; c is in the table only, d in the reference only."""
    found = parent(spaces("a c x"), spaces("a d d"), {"a", "c"}, [["a"], ["c", "e"]], None, longest=1)
    assert found.precision == pytest.approx(2 / 3)
    of_table, weight = (1 + 1 / 2) / 2, 1 - (1 + 0) / 2  # the reference mentions a, and nothing of "c e"
    assert found.recall == pytest.approx(1**0.5 * of_table**weight)  # of the reference the table entails only a
    assert parent([], ["a"], {"a"}, [["a"]]).f == 0.0


CELLS = [("Year", "2001"), ("Show", "Rent")]
LINEAR = (
    "<page_title> Bob </page_title> <section_title> Stage </section_title> <table> <cell> 2001 <col_header> Year "
    "</col_header> </cell> <cell> Rent <col_header> Show </col_header> </cell> </table>"
)
TOTTO = {"table": [[{"value": "Year"}, {"value": "Show"}], [{"value": "2001"}, {"value": "Rent"}]]}
TOTTO |= {"table_page_title": "Bob", "highlighted_cells": [[1, 0]]}


@cases(
    (dict(CELLS), ["2001", "Rent"], None),
    (CELLS, ["2001", "Rent"], None),
    ([["Bob", "plays in", "Rent"]], ["Bob Rent"], None),
    (LINEAR, ["Bob", "Stage", "2001", "Rent"], None),
    (TOTTO, ["Year", "Show", "2001", "Rent", "Bob"], ["2001", "Bob"]),
    ({"age": 7, "name": " "}, ["7"], None),
)
def test_forms_of_tables(table, entailing, wanted):
    found = [[text.strip() for text in texts] for texts in table_values(table, "task 't'")]
    assert found == [entailing, wanted or entailing]


@pytest.mark.parametrize("table", [None, "no cells", [], ["a"], 7, {"a": ["b"]}, {"table": [["x"]]}, [("a", "")]])
def test_what_is_no_table_is_a_sentence(table):
    with pytest.raises(OperantError, match=r"score 'parent': task 't/0' has (the target|a table that cannot be read)"):
        prepare(SCORES["parent"](), "parent", [Task("t/0", "x", table, references=("a",))])


SAID = ["the film was a joy to watch", "bad acting and a worse plot plot", "one of the best films I have seen in years"]
MEANT = ["it was a joy to watch this film", "the acting was bad, the plot even worse"]
MEANT += ["this is among the best films of recent years"]
REVIEWS = [rollout(reply, text) for reply, text in zip(SAID, MEANT, strict=True)]


@cases(
    (None, False, [0.988471, 0.993172, 0.988477], [0.982611, 0.992486, 0.987715], [0.985532, 0.992829, 0.988096]),
    (2, True, [0.989092, 0.992706, 0.988167], [0.981304, 0.992235, 0.987271], [0.985183, 0.99247, 0.987719]),
    (1, False, [0.925404, 0.954023, 0.929066], [0.918769, 0.949875, 0.93214], [0.922075, 0.951944, 0.9306]),
    (1, True, [0.931184, 0.947768, 0.929058], [0.915208, 0.950197, 0.928777], [0.923127, 0.948981, 0.928917]),
)
def test_bertscore_is_that_of_the_authors(layer, idf, precision, recall, f):
    """The numbers are those of the authors' functions (bert-score 0.3.13) for the built-in classifier's layers."""
    given = {"model": "builtin:sentiment", "layer": layer, "idf": idf, "batch": 2}
    found = number_of_prepared("bertscore", REVIEWS, **given)
    names = {"bertscore/precision": precision, "bertscore/recall": recall, "bertscore/f": f}
    assert found == {name: pytest.approx(values, abs=2e-5) for name, values in names.items()}


def test_bertscore_of_equal_empty_and_several():
    metric = SCORES["bertscore"]("builtin:sentiment")
    same, empty, blank = metric([rollout(" a film", "a film"), rollout("", "a film"), rollout("a film", "", "x")])
    assert same == pytest.approx(1.0, abs=1e-5) and empty == 0.0 and blank > 0.0
    one, other = metric([rollout("a film", "bad"), rollout("a film", "the film")])
    given = [rollout("a film", "bad", "the film")]
    assert metric(given) == [pytest.approx(max(one, other))]
    assert SCORES["bertscore"]("builtin:sentiment", several="mean")(given) == [pytest.approx((one + other) / 2)]


def nats_by_hand(query: str, reply: str) -> tuple[float, int]:
    folder = Path(find_model("builtin:reviews-lm"))
    model, tok = load_model(folder).eval(), load_tokenizer(folder)
    prompt, whole = tok(query).input_ids, tok(query + reply).input_ids
    assert whole[: len(prompt)] == prompt
    return -float(bare_logprobs(model, prompt, whole[len(prompt) :]).sum()), len(whole) - len(prompt)


def test_perplexity_is_of_the_replies_after_their_prompts():
    """Of the replies' tokens alone, under the model that is named; an empty reply has none. References are not read."""
    texts = [("The film was", " really good."), ("My brother", " zzz"), ("The film was", "")]
    (one, n), (other, m) = (nats_by_hand(*text) for text in texts[:2])
    given = [rollout(reply, "a reference", query=query) for query, reply in texts]
    found = number({"perplexity": {"model": "builtin:reviews-lm", "batch": 1}}, given)
    assert found["perplexity"] == pytest.approx(math.exp((one + other) / (n + m)), rel=1e-4)
    each = [pytest.approx(math.exp(one / n), rel=1e-4), pytest.approx(math.exp(other / m), rel=1e-4), None]
    assert found["perplexity/of_replies"] == each
    padded = number({"perplexity": {"model": "builtin:reviews-lm", "batch": 3}}, given)
    assert padded["perplexity"] == pytest.approx(found["perplexity"], rel=1e-4)


def test_perplexity_of_long_texts_and_without_a_prompt(tmp_path):
    """The toy reads 64 tokens, one for each letter: what does not fit is cut off at the prompt's beginning."""
    model, tok = lm(vocab=len(letters())), letters()
    on_disk(tmp_path, Policy(model, tok).model, tok)
    metric = resolve({"perplexity": {"model": str(tmp_path)}})
    found = [measure(metric, [rollout("abc", query="x" * n)]).of_all["perplexity"] for n in (61, 100)]
    assert found[0] == found[1] == pytest.approx(math.exp(-bare_logprobs(model, [27] * 61, [4, 5, 6]).mean()), rel=1e-4)
    nothing = measure(metric, [rollout("abc")]).of_all["perplexity"]  # behind the token that begins a text
    assert nothing == pytest.approx(math.exp(-bare_logprobs(model, [1], [4, 5, 6]).mean()), rel=1e-4)
    assert measure(metric, [rollout("a" * 200)]).of_all["perplexity"] > 1
    with pytest.raises(OperantError, match=r"perplexity\.model is missing: name the fixed model that reads"):
        resolve("perplexity")


def test_diversity_by_hand():
    assert number({"diversity": {"n": 2, "segment": 3}}, [rollout("a a b b"), rollout("c"), rollout("")]) == {
        "diversity/mean_length": 5 / 3,
        "diversity/msttr": 2 / 3,  # a a b; "b c" is no whole segment
        "diversity/distinct_1": 3 / 5,
        "diversity/entropy_1": pytest.approx(2 * 0.4 * math.log2(2.5) + 0.2 * math.log2(5)),
        "diversity/unique_1": 1.0,
        "diversity/distinct_2": 1.0,
        "diversity/entropy_2": pytest.approx(math.log2(3)),  # aa, ab, bb
        "diversity/unique_2": 3.0,
    }
    nothing = {"mean_length": 0.0, "entropy_1": 0.0, "unique_1": 0.0}
    assert number({"diversity": {"n": 1}}, [rollout("")]) == {f"diversity/{name}": x for name, x in nothing.items()}


# --- classifiers ------------------------------------------------------------------------------------------------------
def test_consistency_takes_the_best_sentence_of_the_source(monkeypatch):
    """For each sentence of the reply the largest entailment by one of the source, then their mean."""
    metric = SCORES["consistency"]("builtin:sentiment", label="positive")
    table = {("A.", "X."): 0.2, ("B.", "X."): 0.9, ("A.", "Y."): 0.5, ("B.", "Y."): 0.1}
    monkeypatch.setattr(metric.classifier, "score", lambda pairs: [table[pair] for pair in pairs])
    given = [rollout("X. Y.", query="A. B."), rollout("", query="A. B."), rollout("X.", query="")]
    assert metric(given) == [pytest.approx((0.9 + 0.5) / 2), 0.0, 0.0]
    metric.source, metric.field = "target", "article"
    assert metric([rollout("Y.", target={"article": "A."})]) == [0.5]


def test_pairs_are_read_as_the_model_reads_pairs(tmp_path):
    """The tokens of the second text have another type: against the model's own pass of one pair."""
    from tokenizers.processors import TemplateProcessing
    from tokenizers_of_words import WORDS, tokenizer_of
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(WORDS), initializer_range=1.0, id2label={0: "neutral", 1: "Entailment"}, **shape)
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    names = ["input_ids", "token_type_ids", "attention_mask"]  # as the tokenizers of BERT have it
    tok = tokenizer_of(WORDS, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", model_input_names=names)
    tok.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tok.save_pretrained(tmp_path)

    def alone(ids: list[int], types: list[int]) -> float:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits
        return logits.softmax(-1)[0, 1].item()

    long, short = alone([2, 6, 7, 3, 8, 5, 5, 3], [0, 0, 0, 0, 1, 1, 1, 1]), alone([2, 5, 3, 4, 3], [0, 0, 0, 1, 1])
    pairs = [("the film", "was bad bad"), ("bad", "good")]
    own = SCORES["consistency"](str(tmp_path))  # its label is found in any case
    check(own)
    assert own.classifier.score(pairs) == pytest.approx([long, short], abs=1e-5)
    assert abs(alone([2, 6, 7, 3, 8, 5, 5, 3], [0] * 8) - long) > 1e-3


def test_intent_is_right_only_above_every_other_label(monkeypatch):
    metric = SCORES["intent"]("builtin:sentiment")
    given = [rollout(" a wonderful film, great", target=label) for label in ("positive", "NEGATIVE", 1)]
    assert metric(given) == [1.0, 0.0, 1.0]
    monkeypatch.setattr(metric.classifier, "of_labels", lambda texts: [[0.5, 0.5], [0.5, 0.5], [0.4, 0.6]])
    assert metric(given) == [0.0, 0.0, 1.0]
    with pytest.raises(OperantError, match=r"task 't/0': .* has no label 'joy'; its labels are 0: negative"):
        prepare(metric, "intent", [Task("t/0", "x", "joy")])


def test_the_reward_intent_adds_another_score():
    """The score of a sample does not depend on the ones before it, as it did where a list grew."""
    pytest.importorskip("nltk")
    own = {"intent_coef": 0.75, "auto_coef": 0.25, "auto": "coverage", "field": None}
    reward = rewards.resolve("intent:builtin:sentiment", own)
    given = [rollout(" a wonderful film", target="positive"), rollout(" positive, but awful", target="positive")]
    judged = judge(reward, given)
    assert judged.scores == [0.75, 0.25] and judged.parts == {"intent": [1.0, 0.0], "coverage": [0.0, 1.0]}
    inside = judge(rewards.resolve({"intent:builtin:sentiment": {**own, "weight": 2.0}, "dates": 1.0}), given)
    assert inside.scores == [1.5, 0.5] and set(inside.parts) == {"intent", "intent/coverage", "dates"}
    assert rewards.parts_of(reward, Classifier)[0].name == "builtin:sentiment"  # as a memory plan counts it


# --- words that are asked for, numbers, dates -------------------------------------------------------------------------
@cases(
    ("coverage", {}, ["dog", "catch", "frisbee"], "Dogs catching the ball", 2 / 3),
    ("coverage", {"exact": True}, ["dog", "catch"], "Dogs catching", 0.0),
    ("coverage", {"exact": True}, ["Dog"], "a dog.", 1.0),
    ("coverage", {}, ["ride", "try", "stop", "walk"], "riding, tried, stopped and walks", 1.0),
    ("coverage", {}, ["dogs"], "one dog", 1.0),  # the word that is asked for may be the inflected one
    ("coverage", {}, ["cat"], "category", 0.0),
    ("coverage", {}, "run", "he ran", 0.0),  # irregular
    ("coverage", {}, ["ice cream", "two men"], "ice cream for two tall men", 1 / 2),
    ("coverage", {"field": "concepts"}, {"concepts": ["a"], "more": 1}, "a", 1.0),
    ("coverage", {}, ["a"], "", 0.0),
    ("repeat_penalty", {}, ["dog", "ball", "catch"], "A dog, ball catch!", -1.0),
    ("repeat_penalty", {}, ["dog", "ball", "catch"], "dog ball to catch", 0.0),
    ("repeat_penalty", {}, ["dog"], "a dog", 0.0),
    ("repeat_penalty", {"banned": ("Generate", "a sentence with")}, ["x", "y"], "I GENERATE it", -1.0),
    ("repeat_penalty", {"banned": ("generate", "a sentence with")}, ["x", "y"], "generated, a sentence", 0.0),
    ("repeat_penalty", {"banned": ("generate", "a sentence with")}, ["x", "y"], "write a sentence with it", -1.0),
    ("repeat_penalty", {}, ["x", "y"], "", 0.0),
    ("increasing_numbers", {"min_tokens": 4}, None, "1 2 3 4", 4 / 4),
    ("increasing_numbers", {"min_tokens": 20}, None, "1 2 3 4", 4 / 10),
    ("increasing_numbers", {"min_tokens": 4}, None, "1 x 2.5 2.5 3", 2 / 5),  # an equal number ends the run
    ("increasing_numbers", {"min_tokens": 2}, None, "5 4 6 7", 1 / 4),
    ("increasing_numbers", {"min_tokens": 4}, None, "a b", 0.0),
    ("increasing_numbers", {"min_tokens": 2}, None, "nan inf 1", 1 / 3),
    ("increasing_numbers", {"min_tokens": 2}, None, "-3 -2", 2 / 2),
    ("increasing_numbers", {"min_tokens": 20}, None, "", 0.0),
    ("dates", {}, None, "on 2023-04-17.", 1.0),
    ("dates", {}, None, "2023-4-17", 0.0),
    ("dates", {}, None, "17-04-2023", 0.0),
)
def test_words_that_are_asked_for_numbers_and_dates(name, options, target, reply, expected):
    assert score(name, rollout(reply, target=target), **options) == expected


def test_inflections():
    assert inflected("hop") == {"hops", "hopes", "hoped", "hoping", "hopped", "hopping"}
    assert {"tries", "tried", "trying"} <= inflected("try") and {"rides", "rided", "riding"} <= inflected("ride")


# --- what they all have in common -------------------------------------------------------------------------------------
OPTIONS = {"meteor": {"synonyms": False}, "bertscore": {"model": "builtin:sentiment"}}
OPTIONS |= {"consistency": {"model": "builtin:sentiment", "label": "positive"}}
OPTIONS |= {"intent": {"model": "builtin:sentiment"}, "parent": {"field": "table"}}
OPTIONS |= {"coverage": {"field": "words"}, "repeat_penalty": {"field": "words"}}
LABEL = {"table": {"a": "cat"}, "words": ["cat", "mat"]}


@pytest.mark.parametrize("name", [*SCORES, "length:5", "letters:e", "pattern:t$", "repetition"])
def test_a_score_does_not_depend_on_its_neighbours(name):
    """No list grows from reply to reply, and nothing is looked up by the prompt."""
    pytest.importorskip({"bleu": "sacrebleu", "chrf": "sacrebleu", "ter": "sacrebleu"}.get(name, "nltk"))
    target = "positive" if name == "intent" else LABEL
    given = [replace(r, task=replace(r.task, prompt="one", target=target), query="A cat. A mat.") for r in CORPUS]
    given.append(replace(given[0], texts=[""]))
    metric = rewards.resolve(name, OPTIONS.get(name))
    rewards.prepare(metric, [one.task for one in given[:3]])
    check(metric)
    together, alone = judge(metric, given), [judge(metric, [one]).scores[0] for one in given]
    assert together.scores == pytest.approx(alone, abs=1e-5)
    assert judge(metric, given[::-1]).scores == pytest.approx(alone[::-1], abs=1e-5)


def test_without_the_packages_there_is_a_sentence():
    code = """
from operant import rewards
for name in ("ter", "rouge", "meteor"):
    try:
        rewards.check(rewards.resolve(name))
    except ValueError as error:
        print(error)
"""
    told = run_python(HIDE.format(names="sacrebleu rouge_score nltk") + code).splitlines()
    assert len(told) == 3 and all(line.endswith("needs a package: pip install 'operant[metrics]'") for line in told)


def test_the_pages_list_each_name_with_its_options():
    """The table of metrics has every option; that of rewards every name, and its mappings are rewards."""
    pages = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("evaluation.md", "rewards.md")]
    rows = [{row.split("`")[1]: row for row in re.findall(r"^\| `.*", page, re.M)} for page in pages]
    for name, made in {**SCORES, **OF_ALL}.items():
        options = set(inspect.signature(made).parameters)
        assert {option for option in options if f"`{option}`" not in rows[0][name]} == set()
    assert SCORES.keys() <= rows[1].keys()
    for block in re.findall(r"```yaml\n(.*?)```", pages[1], re.S):
        rewards.resolve(yaml.safe_load(block)["reward"])


# --- in a run ---------------------------------------------------------------------------------------------------------
BLANK = [Task("t/0", "ab", references=("a",)), Task("t/1", "b", references=(" ",))]
NO_MODEL = {"perplexity": {"model": "builtin:none"}}
ROWS = [{"text": text, "good": ["a b", "b"], "words": ["a", "b"]} for text in ("ab", "ba", "abc")]
SMALL = {"steps": 2, "batch": 4, "probes": 0, "samples_every": 0, "sampling.max_tokens": 4, "evaluate_every": 1}


@cases(
    ([{"text": "ab"}], {"reward": "rouge"}, "reward 'rouge' compares replies with references.* has none"),
    (BLANK, {"reward": {"rouge": 1.0, "letters:a": 0.1}}, "task 't/1' has blank ones"),
    ([{"text": "ab"}], {"reward": "coverage"}, "'coverage': the target of the task .* is None; it must be a word"),
    ([Task("t/0", "ab", target=["!"])], {"reward": "coverage"}, "'coverage': '!' of task .* has no word"),
    (ROWS, {"reward": "parent", "data.reference_field": "good"}, "'parent': task .* has the target None"),
    (ROWS, {"reward": "letters:a", "evaluate": ROWS, "evaluation.metrics": "consistency"}, "model is missing"),
    (ROWS, {"reward": "letters:a", "evaluate": ROWS, "evaluation.metrics": NO_MODEL}, "'builtin:none' does not exist"),
)
def test_a_run_refuses_before_a_model_is_loaded(rows, options, reason, tmp_path, monkeypatch):
    late = "blank" in reason  # the second row is seen when all tasks are read
    monkeypatch.setattr("operant.runs.parts.play_and_score" if late else "operant.runs.build.Learner", None)
    with pytest.raises(OperantError, match=reason):
        train("builtin:reviews-lm", rows, out=tmp_path / "run", **options, **SMALL)


def test_names_that_a_command_line_gives():
    """`--reward rouge --reward.which rougeL --metrics bleu,rouge`: the short name of the option is unique."""
    given = {"tasks": ROWS, "reward": "rouge", "reward.which": "rougeL", "evaluate": ROWS, "metrics": "bleu,rouge"}
    config = configure(given)
    assert config.evaluation.metrics == "bleu,rouge" and config.parts["reward"]["which"] == "rougeL"
    assert config.parts["reward"]["tokenizer"] == "words"  # all of its options are in config.yaml
    assert rewards.resolve("rouge", config.parts["reward"]).which == "rougeL"
    short = configure({**given, "reward": "rouge:rouge2", "reward.which": None})
    assert rewards.resolve("rouge:rouge2", short.parts["reward"]).which == "rouge2"


def test_a_run_is_paid_and_measured_by_them(tmp_path, capsys):
    for package in ("rouge_score", "sacrebleu"):
        pytest.importorskip(package)
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    metrics = {"bleu": {"max_n": 1}, "rouge": {}, "bertscore": {"model": "builtin:sentiment"}, "cider": {"n": 1}}
    metrics |= {"diversity": {"segment": 2}, "perplexity": {"model": "builtin:reviews-lm"}}
    paid = {"per_token:rouge": {"which": "rouge1", "tokenizer": f"{__name__}:each_letter"}, "coverage": 0.5}
    given = {"data.reference_field": "good", "data.target_field": "words", "evaluation.metrics": metrics}
    given |= {"evaluate": rows, "out": tmp_path / "run", "algorithm": "grpo", "samples": 2, **SMALL}
    run = train(Policy(lm(vocab=len(letters())), letters()), rows, paid, **given)
    found, after = run.after.chosen(), run.after
    each = SCORES["rouge"]("rouge1", tokenizer=f"{__name__}:each_letter")(after.rollouts)
    covered = SCORES["coverage"]()(after.rollouts)
    assert after.scores == pytest.approx([a + 0.5 * b for a, b in zip(each, covered, strict=True)])
    bleu = SCORES["bleu"](1).measured(after.rollouts)
    assert found["bleu"] == bleu[""] and after.measured.of_replies["bleu/sentence"] == bleu["sentence"]
    more = {"rouge/rougeLsum", "bertscore/f", "diversity/msttr", "cider", "perplexity", "perplexity/of_replies"}
    assert more <= found.keys()
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert {f"evaluate/{name}_before" for name in more} <= last.keys()


@pytest.mark.parametrize("name", ["bertscore", "perplexity"])
def test_a_metric_of_a_run_reads_with_its_first_model(name, tmp_path):
    """Not with the policy, which is another one after training: its numbers are those of the folder."""
    on_disk(tmp_path / "start", lm(vocab=len(letters())))
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    given = {"data.reference_field": "good", "evaluate": rows, "metrics": name, "lr": 0.1, **SMALL}
    run = train(str(tmp_path / "start"), rows, "length:3", out=tmp_path / "run", **given)
    of_start = {"bertscore": BertScore, "perplexity": Perplexity}[name](str(tmp_path / "start"))
    measured = getattr(of_start, "measured", of_start)(run.after.rollouts)
    key, own = ("bertscore/f", "f") if name == "bertscore" else ("perplexity/of_replies", "of_replies")
    assert run.after.measured.of_replies[key] == pytest.approx(measured[own], rel=1e-5)


def each_letter(text: str) -> list[str]:
    return [c for c in text.lower() if c.isalpha()]


# --- what each token adds ---------------------------------------------------------------------------------------------
def spoken(text: str, *references: str, before: tuple[str, ...] = (), **turn) -> Rollout:
    turns = [Turn([3, 4], letters()(t).input_ids, **(turn if t is text else {})) for t in (*before, text)]
    return Rollout(Task("t/0", "x", references=references), 0, turns, [*before, text])


def with_letters(spec, options=None):
    rewards.read_with(reward := rewards.resolve(spec, options), letters())
    return reward


def test_each_token_is_paid_what_it_adds():
    """ROUGE-1's recall of letters against "abc": a and c add a third, the second a and x nothing."""
    pytest.importorskip("rouge_score")
    own = {"which": "rouge1", "measure": "recall", "tokenizer": f"{__name__}:each_letter"}
    given = spoken("aaxc", "abc")
    assert len(given.turns[0].action) == 4
    judged = judge(with_letters("per_token:rouge", own), [given])
    assert judged.scores == [pytest.approx([1 / 3, 0, 0, 1 / 3])] and judged.parts == {"rouge": [pytest.approx(2 / 3)]}


@cases(("rouge", {}), ("bleu", {"max_n": 2}), ("chrf", {}), ("ter", {}), ("meteor", {"synonyms": False}), ("dates", {}))
def test_the_payments_sum_to_the_score(name, options):
    for package in ("rouge_score", "sacrebleu", "nltk"):
        pytest.importorskip(package)
    given = [spoken("the end.a b the", "the end", "b the"), spoken("", "a"), spoken("b", "a b", before=("abc", "x"))]
    paid, whole = judge(with_letters(f"per_token:{name}", options), given), judge(rewards.resolve(name, options), given)
    assert [sum(x) if isinstance(x, list) else x for x in paid.scores] == pytest.approx(whole.scores)
    assert isinstance(paid.scores[0], list) and len(paid.scores[0]) == given[0].count > 5
    assert paid.scores[2][:4] == [0.0] * 4 and len(paid.scores[2]) == given[2].count  # the turns before
    assert paid.parts == {name: pytest.approx(whole.parts[name])}


def test_a_token_after_the_end_of_the_text_adds_nothing():
    """A reply that was cut, at a stop string or by `score.truncate_token`, has tokens behind its text."""
    (turn,) = spoken("abcd").turns
    given = replace(spoken("ab"), turns=[replace(turn, action=[*turn.action, 2])])  # the last token stops it
    assert judge(with_letters("per_token:letters:abcd"), [given]).scores == [[1.0, 1.0, 0.0, 0.0, 0.0]]


def test_a_choice_an_untrained_turn_and_an_abstention():
    calls = []

    def strict(rollouts):
        calls.append(len(rollouts))
        scores = [Judgement(float(len(r.reply)), {"x": 1.0}, "fine", r.reply) for r in rollouts]
        return [None if len(r.reply) == 1 else s for r, s in zip(rollouts, scores, strict=True)]

    reward = PrefixGain(strict, letters())
    choice = spoken("abc", options=[[4, 5, 6], [5]], chosen=0)
    judged = judge(reward, [spoken("abc"), choice, spoken("abc", before=("xy",), trained=False), spoken("a")])
    assert judged.scores == [[0.0, 2.0, 1.0], [3.0], [0.0, 3.0], None] and calls == [3 + 1 + 1 + 1]
    assert judged.remark(0).message == "abc" and judged.parts["x"] == [1.0, 1.0, 1.0, None]


def test_per_token_goes_with_sums_failures_and_lists():
    judged = judge(with_letters({"per_token:letters:a": 2.0, "letters:b": 1.0}), [spoken("aba")])
    assert judged.scores == [[2.0, 0.0, 2.0 + 1.0]]
    tolerant = under(with_letters("per_token:letters:a"), IsolationOptions(on_error="drop"))
    rewards.read_with(tolerant, letters())
    assert judge(tolerant, [spoken("ab")]).scores == [[1.0, 0.0]]
    with pytest.raises(OperantError, match="scores each token already"):
        judge(PrefixGain(lambda rs: [[0.0] * r.count for r in rs], letters()), [spoken("ab")])
    with pytest.raises(OperantError, match=r"needs the policy's tokenizer.*read_with\(reward, policy\.tokenizer\)"):
        judge(rewards.resolve("per_token:letters:a"), [spoken("ab")])
