"""Row forms: published rows become tasks, with prompts, references and targets that were written out by hand."""

import gzip

import pytest
from cases import cases
from published import ROWS
from toys import letters

from operant.data import DataOptions, load_tasks
from operant.data.forms import ROW_FORMS, sentences
from operant.data.tasks import shortened
from operant.options import Factory, arguments
from operant.runs import named_parts
from operant.types import OperantError, Task

TABLE = ROWS["totto"][0]["table"]
LINEARISED = (
    "<table> <cell> 15.3 <col_header> Points </col_header> <row_header> 2010 </row_header> </cell> "
    "<cell> 8 <col_header> Points </col_header> <row_header> 2011 </row_header> </cell> </table>"
)
TITLED = "<page_title> Ann Lee </page_title> <section_title> College </section_title> "
PLAIN = DataOptions()


def made(name, rows=None, data=PLAIN, tokenizer=None, **options):
    cue = options.pop("cue_of_policy", True)
    form = named_parts.form(name, arguments(Factory(ROW_FORMS.find(name), 1), options, name))
    return load_tasks(ROWS[name] if rows is None else rows, tokenizer, data, form=form, cue=cue)


DOGS = "A dog ran. It fell into a sea. Then it swam home."
EXPECTED = {
    "imdb": ("The film was good and", (" my brother liked it a lot",), 1),
    "summarize": (f"summarize: {DOGS}\nTL;DR:\n", ("A dog swam home .",), None),
    "translate": ("translate German to English: Ein Hund rennt.\nEnglish:\n", ("A dog runs.",), None),
    "commongen": ("generate a sentence with: dog run.\n", ("A dog runs home.", "The dog can run."), ["dog", "run"]),
    "narrativeqa": ("question: Who left? context: Ann left home.\nanswer:\n", ("Ann", "Ann did"), None),
    "dialog": ("Hi . <EOU>", ("Hello !",), "question"),
    "extract": ("A dog ran. It fell. It swam.\nTL;DR:\n", ("A dog swam.",), ["A dog ran.", "It fell.", "It swam."]),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_published_row_becomes_a_task(name):
    task = made(name)[0]
    assert (task.prompt, task.references, task.target) == EXPECTED[name]


@cases(
    ("imdb", {"words": "3"}, None, "The film was"),
    ("imdb", {"share": 0.28}, None, "The film was"),
    ("summarize", {"prefix": "", "cue": " TL;DR:"}, {"document": "A b.", "summary": "A"}, "A b. TL;DR:"),
    ("summarize", {"source": "title"}, {"title": ["One.", "Two."]}, "summarize: One. Two.\nTL;DR:\n"),
    ("translate", {"source": "en", "target": "xx"}, {"en": "A"}, "translate English to xx: A\nxx:\n"),
    ("translate", {"cue_of_policy": False}, None, "translate German to English: Ein Hund rennt."),
    ("commongen", {"end": ""}, {"concept_set": "cat_N#eat_V"}, "generate a sentence with: cat eat\n"),
    ("narrativeqa", {"context": "none"}, None, "question: Who left?\nanswer:\n"),
    ("narrativeqa", {"context": "text"}, None, "question: Who left? context: Long.\nanswer:\n"),
    ("narrativeqa", {}, {"question": "Q?", "summary": "S."}, "question: Q? context: S.\nanswer:\n"),
    ("extract", {"prompt": "title"}, None, "Dogs\nTL;DR:\n"),
    ("totto", {}, None, TITLED + LINEARISED + "\n"),
    ("totto", {"repeat": True}, None, f"{LINEARISED} {TITLED}{LINEARISED}\n"),
    ("totto", {"titles": "false", "cue": ""}, None, LINEARISED),
)
def test_the_options_of_a_form(name, options, row, prompt):
    """An encoder-decoder reads no cue."""
    assert made(name, row and [row], **options)[0].prompt == prompt


def test_a_whole_table_marks_its_highlighted_cells():
    (task,) = made("totto", whole=True, titles=False, cue="")
    first = "<row> <cell> Year </cell> <cell> Points <row_header> Year </row_header> </cell> </row>"
    assert task.prompt.startswith(f"<table> {first} <row> <cell> 2010 <col_header> Year </col_header> </cell> ")
    assert task.prompt.count("<highlighted_cell> ") == 2 and task.prompt.count("<row>") == 3


def test_a_table_is_the_target_with_its_overlap():
    (task,) = made("totto")
    assert task.target["table"] == TABLE and task.target["overlap"] is True
    assert task.references == ("Ann Lee scored 15.3.",)
    of_hub = ROWS["totto"][0] | {"overlap_subset": "False", "sentence_annotations": {"final_sentence": ["A.", "B."]}}
    (task,) = made("totto", [of_hub])
    assert task.target["overlap"] is False and task.references == ("A.", "B.")
    assert made("totto", [{k: v for k, v in of_hub.items() if k != "overlap_subset"}])[0].target["overlap"] is None


def test_a_dialogue_makes_a_task_of_each_utterance():
    tasks = made("dialog", turns=2)
    assert [(t.id, t.prompt, t.target) for t in tasks] == [
        ("tasks/0.0", "Hi . <EOU>", "question"),
        ("tasks/0.1", "Hi . <EOU> Hello ! <EOU>", "directive"),
        ("tasks/0.2", "Hello ! <EOU> Tea ? <EOU>", "commissive"),
        ("tasks/1.0", "Bye . <EOU>", "inform"),
    ]
    assert [t.prompt for t in made("dialog", turns=2, least=2)] == [t.prompt for t in tasks[1:3]]
    assert [t.target for t in made("dialog", target="emotion")] == [0, 0, 4, 0]
    (topics,) = made("dialog", [{"topic": 7, "turns": ["A", "B"]}])
    assert topics.target == 7


def test_adjacent_rows_with_one_prompt_are_one_task():
    rows = [{"concepts": [str(i)], "target": f"{i}{j}"} for i in range(9) for j in "ab"]
    tasks = made("commongen", rows, DataOptions(shuffle=True))
    assert sorted(task.references for task in tasks) == [(f"{i}a", f"{i}b") for i in range(9)]
    assert [task.target[0] for task in tasks] != [str(i) for i in range(9)]


def test_references_are_what_supervised_training_learns():
    form = ROW_FORMS.find("commongen")
    tasks = load_tasks(ROWS["commongen"], form=form, with_replies=True)
    assert [task.replies for task in tasks] == [("A dog runs home.", "The dog can run."), ("A cat sleeps.",)]
    assert tasks[0].references == tasks[0].replies
    with pytest.raises(OperantError, match=r"row 1: the form found no reference .* \(fields: concepts\)"):
        load_tasks([{"concepts": ["a"]}], form=form, with_replies=True)


def test_a_form_of_ones_own_and_fields_beside_it():
    def headline(row, *, prefix="headline: "):
        return {"before": prefix, "prompt": row["body"], "cue": "\n", "references": row["head"]}

    rows = [{"body": "Long.", "head": "Short", "n": 7, "tone": "dry"}, Task("mine", "as it is")]
    tasks = load_tasks(rows, options=DataOptions(id_field="n", target_field="tone"), form=headline)
    assert tasks == [Task("7", "headline: Long.\n", "dry", references=("Short",)), rows[1]]
    assert load_tasks(["text"], form=lambda row: {"prompt": row["text"] + "!"})[0].prompt == "text!"


# --- prompts that are too long ----------------------------------------------------------------------------------------
def test_a_prompt_is_cut_between_what_stands_around_it():
    assert shortened([1, 7, 8, 9, 5, 2], 5, "start", [[], [5]], {1, 2}) == [1, 7, 8, 5, 2]
    assert shortened([1, 4, 7, 8, 9, 2], 5, "end", [[4], []], {1, 2}) == [1, 4, 8, 9, 2]
    tokenizer, rows = letters(), [{"article": "abcdefgh"}]

    def text(**data):
        return tokenizer.decode(made("summarize", rows, DataOptions(**data), tokenizer, prefix="x", cue="yz")[0].prompt)

    assert text(prompt_tokens=7) == "xabcdyz" and text(prompt_tokens=7, prompt_keeps="end") == "xefghyz"
    with pytest.raises(OperantError, match=r"data\.prompt_tokens=3: 3 tokens stand around .* raise it"):
        text(prompt_tokens=3)


def test_only_demonstrations_that_are_cut_become_ids():
    rows, tokenizer = [{"article": "abcdefgh", "summary": "a"}, {"article": "ab", "summary": "b"}], letters()
    known = {"form": ROW_FORMS.find("summarize"), "with_replies": True, "cue": False}
    tasks = load_tasks(rows, tokenizer, DataOptions(prompt_tokens=15), **known)
    assert tokenizer.decode(tasks[0].prompt) == "summarize<pad> abcd" and tasks[1].prompt == "summarize: ab"
    known = {"options": DataOptions(prompt_tokens=2), "with_replies": True}  # a text without a prompt stays whole
    assert load_tasks([{"text": "abcdefgh"}], tokenizer, **known) == [Task("tasks/0", "", replies=("abcdefgh",))]


# --- files and names --------------------------------------------------------------------------------------------------
def test_two_parallel_files_are_rows_of_translations(tmp_path):
    (tmp_path / "test.de").write_text("Ein Hund.\nZwei.\n", encoding="utf-8")
    (tmp_path / "test.en.gz").write_bytes(gzip.compress(b"A dog.\r\nTwo.\r\n"))
    both = f"{tmp_path}/test.de,{tmp_path}/test.en.gz"
    assert [(t.id, t.references) for t in made("translate", both)] == [("test/0", ("A dog.",)), ("test/1", ("Two.",))]
    assert made("translate", both, source="en", target="de")[1].references == ("Zwei.",)
    (tmp_path / "a.txt").write_text("x\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("y\nz\n", encoding="utf-8")
    with pytest.raises(OperantError, match=r"a\.txt has 1 lines, and .*b\.txt has more"):
        made("translate", f"{tmp_path}/a.txt,{tmp_path}/b.txt", source="a", target="b")
    with pytest.raises(OperantError, match=r"have one name"):
        made("translate", f"{tmp_path}/a.txt,{tmp_path}/a.txt")
    with pytest.raises(OperantError, match=r"there is no file .*test\.de,.*test\.fr"):
        made("translate", f"{tmp_path}/test.de,{tmp_path}/test.fr")


# --- sentences --------------------------------------------------------------------------------------------------------
@cases(
    ["We train it, e.g. GPT-2.", "It works!"],
    ["See Fig. 3 of Smith et al. They did it.", '"Why?"', "(No.)", "3 are left."],
    ["J. Smith is 3.5 m tall...", "Is he?"],
    ["the local authority said . ", "it wants ."],
    ["No end"],
)
def test_sentences(parts):
    assert sentences(" ".join(parts)) == [part.strip() for part in parts]


# --- wrong input ------------------------------------------------------------------------------------------------------
@cases(
        ("summarize", {"artikle": "A"}, {}, r"row 2.* article or document .*'artikle'\? \(fields: artikle\);.*source"),
        ("summarize", {"article": 5}, {}, r"row 2.* the source is 5; it must be a text, or a list of sentences"),
        ("summarize", {"article": "A", "highlights": 5}, {}, r"highlights is 5; it must be a text, or a list of texts"),
        ("summarize", {"article": " "}, {}, r"row 2: the text that form .* is empty; .*--data.min-chars 1"),
        ("translate", {"translation": {"fr": "A"}}, {}, r"it reads de, .*\(fields: fr\).*--form\.source"),
        ("translate", {"translation": "A"}, {}, r"translation is 'A'; it must map languages to texts"),
        ("commongen", {"concepts": [3]}, {}, r"concepts is \[3\]; it must be a list of words"),
        ("narrativeqa", {"question": "Q", "story": "S"}, {}, r"it reads summary, .*--form\.context, or none"),
        ("dialog", {"dialog": "Hi"}, {}, r"the dialogue is 'Hi'; it must be a list of utterances"),
        ("dialog", {"dialog": ["A", "B"], "act": [1]}, {}, r"act has 1 values, and the dialogue 2 utterances"),
        ("dialog", {"dialog": ["A"]}, {"least": 6}, r"form\.least=6, form\.turns=5: least lies between 1 and turns"),
        ("imdb", {"text": "A b"}, {"share": 1}, r"form\.share=1\.0, .*a share between 0 and 1"),
        ("totto", {"table": TABLE, "highlighted_cells": []}, {}, r"no cell is highlighted.*--form\.whole true"),
        ("totto", {"table": "x", "highlighted_cells": [[0, 0]]}, {}, r"cannot be linearised: it is 'x' and not a list"),
        ("totto", {"table": [["x"]], "highlighted_cells": [[0, 0]]}, {}, r"linearised: in its row 1 stands 'x'"),
        ("totto", {"table": TABLE, "highlighted_cells": [[2, 3]]}, {}, r"cell \[2, 3\] is not in the table of 3"),
)  # fmt: skip
def test_a_row_that_a_form_cannot_read_is_named(name, row, options, why):
    with pytest.raises(OperantError, match=why):
        made(name, [ROWS[name][0], row], **options)


def test_empty_texts_are_left_out_on_request():
    rows = [{"article": " "}, ROWS["summarize"][0], {"article": ""}]
    assert len(made("summarize", rows, DataOptions(min_chars=1))) == 1


@cases(
    (lambda row: row["x"], r"row 1, form '<lambda>': it raised KeyError: 'x' \(fields: text\)"),
    (lambda row: 5, r"it returned 5; it must return a mapping, or a list"),
    (lambda row: [{"text": "a"}], r"it returned \{'text': 'a'\}; it must be a mapping with a prompt"),
    (lambda row: {"prompt": "a", "reference": "b"}, r"it returned 'reference'; a form returns prompt, before, behind"),
    (lambda row: {"prompt": 3}, r"it returned 3 where a text must be"),
    (lambda row: {"prompt": "a", "references": 5.0}, r"it returned 5.0 where a text must be"),
    (lambda row: {"prompt": [{"role": "user", "content": "a"}], "cue": "b"}, r"messages with before, behind or cue"),
)
def test_a_form_that_is_wrong_is_named(form, why):
    with pytest.raises(OperantError, match=why):
        load_tasks(["text"], form=form)


def test_data_options_whose_work_a_form_does_are_refused():
    with pytest.raises(OperantError, match=r"data\.query_tokens beside form=summarize: .*leave it out"):
        made("summarize", data=DataOptions(query_tokens=4), tokenizer=letters())
    with pytest.raises(OperantError, match=r"form='builtins:dict' is no function"):
        named_parts.form("builtins:dict", {})
