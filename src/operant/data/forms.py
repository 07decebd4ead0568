"""Row forms: functions from a row as a data set publishes it to what a task needs. The option `form` names one.

    def headline(row, *, prefix="headline: "):       # a form of your own: form=my_forms:headline, form.prefix="title: "
        return {"before": prefix, "prompt": row["body"], "cue": "\\n", "references": [row["headline"]]}

A form returns a mapping with these keys, of which only `prompt` must be there, or a list of such mappings for a row
that makes several tasks or none. Its keyword arguments are the options `form.*`.

prompt      what the policy reads: text, or chat messages
before      text in front of the prompt, such as "summarize: ", and `behind` text at its end, such as a request:
            `data.prompt_tokens` never cuts them
cue         text behind the prompt that says where the reply begins. Only a policy that continues its prompt reads it;
            an encoder-decoder does not need it. It is never cut either
references  good replies: a text or a list of texts, of which empty ones are left out. Metrics and rewards compare with
            them, and supervised training learns them
target      anything that a reward needs, such as the words to use

A form with an attribute `whole` that is true gets all rows at once, {"rows": [...], "source": the source's name}.

Adjacent rows with the same prompt and target are one task with the references of all, because some sets publish one row
for each reference.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from operant.import_by_name import Table, nearest
from operant.types import OperantError, Task, name_of, require, shown

ROW_FORMS = Table(
    "row form",
    "operant.forms",
    {
        "apps": "operant.apps.code.forms:apps",
        "code": "operant.apps.code.forms:code",
        "commongen": "operant.data.forms:commongen",
        "dialog": "operant.data.forms:dialog",
        "extract": "operant.data.forms:extract",
        "humaneval": "operant.apps.code.forms:humaneval",
        "imdb": "operant.data.forms:imdb",
        "maths": "operant.apps.maths.forms:maths",
        "mbpp": "operant.apps.code.forms:mbpp",
        "narrativeqa": "operant.data.forms:narrativeqa",
        "prompt": "operant.apps.prompts.examples:prompt",
        "repair": "operant.apps.code.forms:repair",
        "style_transfer": "operant.data.forms:style_transfer",
        "summarize": "operant.data.forms:summarize",
        "totto": "operant.apps.text.totto:totto",
        "translate": "operant.data.forms:translate",
    },
)
"""The forms by name; other packages add theirs as entry points."""
Row = Mapping[str, Any]
Form = Callable[[Row], Row | Sequence[Row]]


@dataclass(frozen=True)
class FormedRow:
    """What a form returned: `FormedRow("A long text.", before="summarize: ", references=("A text.",))`."""

    prompt: str | list[dict[str, str]]
    before: str = ""
    behind: str = ""
    cue: str = ""
    references: tuple[str, ...] = ()
    target: Any = None
    id: str = ""
    """What the data set calls the row; empty: its number is its name."""
    published: Row = field(default_factory=dict)
    """The row as the data set publishes it."""


KEYS = [f.name for f in fields(FormedRow) if f.name != "published"]


def formed(
    rows: Iterable[tuple[int, object]], form: Form, source: str, *, skip_empty: bool
) -> Iterator[tuple[int | str, object]]:
    """What `form` makes of each row, with the row's number; of several from one row, 3.0, 3.1 and so on.

    A row that is a `Task` stays one. `source` names the rows in errors. `skip_empty`: leave out empty prompts.
    Raises: OperantError for a row that the form cannot read, with its number and fields, or for an empty prompt.
    """
    last: tuple[int | str, object] | None = None
    for number, made in each_formed(rows, form, source):
        if isinstance(made, FormedRow) and isinstance(made.prompt, str) and not made.prompt.strip():
            if skip_empty:
                continue
            raise OperantError(
                f"{source}, {place_of(number)}: the text that form {name_of(form)!r} reads is empty; repair the row, "
                "or leave such rows out: --data.min-chars 1"
            )
        if last is not None and isinstance(made, FormedRow) and isinstance(last[1], FormedRow):
            several = replace(last[1], references=tuple(dict.fromkeys((*last[1].references, *made.references))))
            if made.references and replace(made, references=several.references, published=several.published) == several:
                last = last[0], several
                continue
        if last is not None:
            yield last
        last = number, made
    if last is not None:
        yield last


def each_formed(rows: Iterable[tuple[int, object]], form: Form, source: str) -> Iterator[tuple[int | str, object]]:
    for number, row in rows:
        if isinstance(row, Task):
            yield number, row
            continue
        where = f"{source}, {place_of(number)}, form {name_of(form)!r}"
        published = row if isinstance(row, Mapping) else {"text": row}
        try:
            made = form(published)
        except OperantError as error:
            raise OperantError(f"{where}: {error}") from error
        except (Exception, SystemExit) as error:  # a form may be the user's own
            why = f"it raised {type(error).__name__}: {error}"
            raise OperantError(f"{where}: {why} (fields: {names_in(published)})") from error
        several = not isinstance(made, Mapping)
        if several and not isinstance(made, (list, tuple)):
            raise OperantError(f"{where}: it returned {shown(made)}; it must return a mapping, or a list")
        for place, one in enumerate(made if several else [made]):
            yield f"{number}.{place}" if several else number, checked_row(one, published, where)


def checked_row(made: object, published: Row, where: str) -> FormedRow:
    """One task's row of what a form returned. Raises: OperantError for keys or values that no form may return."""
    if not isinstance(made, Mapping) or "prompt" not in made:
        raise OperantError(f"{where}: it returned {shown(made)}; it must be a mapping with a prompt")
    if odd := [key for key in made if key not in KEYS]:
        raise OperantError(f"{where}: it returned {shown(odd[0])}; a form returns {', '.join(KEYS)}")
    given = made.get("references") or ()
    single = isinstance(given, str) or not isinstance(given, Iterable)
    references: tuple[Any, ...] = (given,) if single else tuple(given)
    messages = isinstance(made["prompt"], list) and all(isinstance(part, Mapping) for part in made["prompt"])
    around = [made.get(name) or "" for name in ("before", "behind", "cue", "id")]
    texts = [*references, *around, "" if messages else made["prompt"]]
    if odd := [text for text in texts if not isinstance(text, str)]:
        raise OperantError(f"{where}: it returned {shown(odd[0])} where a text must be")
    if messages and any(around[:3]):
        raise OperantError(f"{where}: it returned messages with before, behind or cue, which go with a text only")
    kept = {key: value for key, value in made.items() if value is not None}
    return FormedRow(**kept | {"references": tuple(text for text in references if text.strip())}, published=published)


def place_of(number: int | str) -> str:
    """The place of a row in errors, counted from 1; of several tasks of one row, `row 4, task 2`.

    place_of(3) == "row 4", place_of("3.1") == "row 4, task 2"
    """
    row, _, part = str(number).partition(".")
    return f"row {int(row) + 1}" + (f", task {int(part) + 1}" if part else "")


# --- reading published rows -------------------------------------------------------------------------------------------


def names_in(row: Row) -> str:
    return shown(", ".join(map(str, row)) or "none", 300)[1:-1]


def found_in(row: Row, names: Sequence[str], remedy: str = "") -> object:
    """The value of the first of these fields that the row has. Raises: OperantError if it has none of them."""
    for name in names:
        if name in row:
            return row[name]
    raise OperantError(
        f"it reads {' or '.join(names)}, and the row has no such field{nearest(names[0], list(map(str, row)))} "
        f"(fields: {names_in(row)}){remedy}"
    )


def text_of(value: object, what: str) -> str:
    """A text; of a list of sentences, all of them. Raises: OperantError for anything else."""
    if isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value):
        return " ".join(part.strip() for part in value)
    if not isinstance(value, str):
        raise OperantError(f"{what} is {shown(value)}; it must be a text, or a list of sentences")
    return value


def texts_in(row: Row, names: Sequence[str]) -> list[str]:
    """The references in the first of these fields that is there and not empty; none if there is no such field.

    Raises: OperantError for a value that is neither a text nor a list of texts.
    """
    name = next((name for name in names if row.get(name)), None)
    texts = [] if name is None else [row[name]] if isinstance(row[name], str) else row[name]
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise OperantError(f"{name} is {shown(texts)}; it must be a text, or a list of texts")
    return list(texts)


# --- the forms --------------------------------------------------------------------------------------------------------


def imdb(row: Row, *, share: float = 0.5, words: int | None = None, field: str = "text") -> Row | list[Row]:
    """IMDB continuation: the prompt is the beginning of a review, the reference its rest, the target its label.

    share: of the words, that the prompt has. words: this many instead, and shorter reviews are left out.
    """
    if not 0 < share < 1 or (words is not None and words < 1):
        raise OperantError(f"form.share={share}, form.words={words}: give a share between 0 and 1, at least 1 word")
    text = text_of(found_in(row, (field,), "; name yours with --form.field FIELD"), field)
    ends = [word.end() for word in re.finditer(r"\S+", text)]
    count = int(len(ends) * share) if words is None else words
    if words is not None and count >= len(ends):
        return []
    cut = ends[count - 1] if count else 0
    return {"prompt": text[:cut], "references": text[cut:], "target": row.get("label")}


ARTICLES = ("article", "document", "source")
SUMMARIES = ("highlights", "summary", "target")


def summarize(
    row: Row,
    *,
    source: str | None = None,
    target: str | None = None,
    prefix: str = "summarize: ",
    cue: str = "\nTL;DR:\n",
) -> dict[str, object]:
    """Summarisation: CNN/DailyMail (article, highlights), XSum (document, summary), SciTLDR (source, target).

    source, target: other fields of the text and of its summaries; each may be a list, of sentences or of summaries.
    """
    text = found_in(row, ARTICLES if source is None else (source,), "; name yours with --form.source FIELD")
    summaries = texts_in(row, SUMMARIES if target is None else (target,))
    return {"before": prefix, "prompt": text_of(text, "the source"), "cue": cue, "references": summaries}


def extract(
    row: Row, *, source: str | None = None, target: str | None = None, prompt: str = "text", cue: str = "\nTL;DR:\n"
) -> Row:
    """Summarisation by choosing a sentence, for the world `extract`: as `summarize`; the target is the sentences.

    prompt: what the policy reads, the whole `text`, or another field, such as `title`.
    """
    value = found_in(row, ARTICLES if source is None else (source,), "; name yours with --form.source FIELD")
    text = text_of(value, "the source")
    asked = text if prompt == "text" else text_of(found_in(row, (prompt,), "; or --form.prompt text"), prompt)
    listed = value if isinstance(value, (list, tuple)) else sentences(text)
    made = summarize(row, source=source, target=target, prefix="", cue=cue)
    return made | {"prompt": asked, "target": [one.strip() for one in listed if one.strip()]}


LANGUAGES = {
    "ar": "Arabic", "cs": "Czech", "de": "German", "en": "English", "es": "Spanish", "et": "Estonian", "fi": "Finnish",
    "fr": "French", "hi": "Hindi", "it": "Italian", "ja": "Japanese", "ko": "Korean", "lt": "Lithuanian",
    "lv": "Latvian", "nl": "Dutch", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian",
    "tr": "Turkish", "uk": "Ukrainian", "zh": "Chinese",
}  # fmt: skip


def translate(
    row: Row, *, source: str = "de", target: str = "en", prefix: str | None = None, cue: str | None = None
) -> Row:
    """Translation: {"translation": {"de": ..., "en": ...}} as of WMT and IWSLT, or the languages as fields.

    source, target: the languages. prefix, cue: by default "translate German to English: ", and the target's name.
    """
    pair = row.get("translation", row)
    if not isinstance(pair, Mapping):
        raise OperantError(f"translation is {shown(pair)}; it must map languages to texts")
    text = found_in(pair, (source,), "; name the languages with --form.source and --form.target")
    of, to = (LANGUAGES.get(language, language) for language in (source, target))
    return {
        "before": f"translate {of} to {to}: " if prefix is None else prefix,
        "prompt": text_of(text, source),
        "cue": f"\n{to}:\n" if cue is None else cue,
        "references": texts_in(pair, (target,)),
    }


def commongen(
    row: Row, *, prefix: str = "generate a sentence with: ", separator: str = " ", end: str = ".", cue: str = "\n"
) -> Row:
    """CommonGen: a sentence with the given words, which are the target too. A part of speech (`dog_N`) is left out.

    Rows have concepts, as a list or as "dog#run", and target, references or scene.
    """
    given = found_in(row, ("concepts", "concept_set"))
    words = given.split("#") if isinstance(given, str) else given
    if not isinstance(words, (list, tuple)) or not words or not all(isinstance(word, str) for word in words):
        raise OperantError(f"concepts is {shown(given)}; it must be a list of words")
    words = [re.sub(r"_[A-Z]+$", "", word) for word in words]
    asked = {"before": prefix, "prompt": separator.join(words) + end, "cue": cue, "target": words}
    return asked | {"references": texts_in(row, ("references", "target", "targets", "scene"))}


def narrativeqa(
    row: Row,
    *,
    context: str = "summary",
    prefix: str = "question: ",
    between: str = " context: ",
    cue: str = "\nanswer:\n",
) -> Row:
    """NarrativeQA: a question on a story, answers as references.

    context: what is read beside the question, the story's `summary`, its whole `text`, another field, or `none`.
    """
    story = row.get("document")
    story = story if isinstance(story, Mapping) else row
    question, answers = plain(found_in(row, ("question",))), row.get("answers", row.get("answer"))
    if answers is None:
        answers = [row[name] for name in ("answer1", "answer2") if row.get(name)]
    answers = [plain(answer) for answer in ([answers] if isinstance(answers, (str, Mapping)) else answers)]
    if context == "none":
        return {"before": prefix, "prompt": text_of(question, "question"), "cue": cue, "references": answers}
    read = plain(found_in(story, (context,), "; choose another with --form.context, or none"))
    before = f"{prefix}{text_of(question, 'question')}{between}"
    return {"before": before, "prompt": text_of(read, context), "cue": cue, "references": answers}


def plain(value: object) -> object:
    """The text of NarrativeQA's {"text": ..., "tokens": ...}; any other value is itself."""
    return value["text"] if isinstance(value, Mapping) and "text" in value else value


ACTS: Mapping[Any, str] = {1: "inform", 2: "question", 3: "directive", 4: "commissive"}
"""The dialogue acts of DailyDialog."""


def dialog(
    row: Row, *, turns: int = 5, least: int = 1, marker: str = " <EOU> ", target: str | None = None
) -> list[Row]:
    """DailyDialog: for each utterance, the `turns` before it are the prompt, each followed by `marker`.

    The utterance is the reference; its dialogue act (inform, question, directive, commissive) is the target, or the
    topic of a set without acts. target: another field, such as emotion, with one value for the dialogue or one for each
    utterance. least: fewest utterances before the reply (RL4LMs asks for as many as `turns`).
    """
    utterances = found_in(row, ("dialog", "turns", "dialogue", "utterances"))
    if not isinstance(utterances, (list, tuple)) or not all(isinstance(one, str) for one in utterances):
        raise OperantError(f"the dialogue is {shown(utterances)}; it must be a list of utterances")
    require(1 <= least <= turns, f"form.least={least}, form.turns={turns}: least lies between 1 and turns")
    named = next((name for name in ("act", "topic") if name in row), "topic") if target is None else target
    known = row.get(named) if target is None else found_in(row, (target,), "; name yours with --form.target FIELD")
    each = known if isinstance(known, (list, tuple)) else [known] * len(utterances)
    if len(each) != len(utterances):
        raise OperantError(f"{named} has {len(each)} values, and the dialogue {len(utterances)} utterances")
    asked = [utterances[max(0, i - turns) : i] for i in range(len(utterances))]
    return [
        {
            "prompt": "".join(one.strip() + marker for one in before).rstrip(" "),
            "references": utterances[i].strip(),
            "target": ACTS.get(each[i], each[i]) if named == "act" else each[i],
        }
        for i, before in enumerate(asked)
        if i >= least
    ]


def style_transfer(
    row: Row,
    *,
    styles: str = "negative,positive",
    text: str = "text",
    label: str = "label",
    prompt: str | None = None,
    only: str | None = None,
) -> Row | list[Row]:
    """Text style transfer, for the reward `style_transfer`: a sentence and its style, which shall become the other.

    styles: the two styles, as the classifier of the reward names them; the label is one of them, or its number, 0 or 1.
    text, label: other fields. prompt: what the policy reads in place of the sentence, for a prompt that is the same for
    all sentences. only: the style of the sentences to read; None: both. A field `reference` is the reference.
    """
    names = [name.strip() for name in styles.split(",")]
    if len(names) != 2 or not all(names) or names[0] == names[1]:
        raise OperantError(f"form.styles={shown(styles)}: name two styles, such as negative,positive")
    if only is not None and only not in names:
        raise OperantError(f"form.only={shown(only)}: it must be one of the styles, {names[0]} or {names[1]}")
    sentence = text_of(found_in(row, (text,), "; name yours with --form.text FIELD"), text).strip()
    given = str(found_in(row, (label,), "; name yours with --form.label FIELD"))
    if given not in (*names, "0", "1"):
        raise OperantError(f"{label} is {shown(given)}; it must be 0, 1 or one of the styles {names[0]}, {names[1]}")
    own = names.index(given) if given in names else int(given)
    if only is not None and names[own] != only:
        return []
    return {
        "prompt": sentence if prompt is None else prompt,
        "references": texts_in(row, ("reference", "references")),
        "target": {"sentence": sentence, "style": names[1 - own]},
    }


# --- sentences --------------------------------------------------------------------------------------------------------

ABBREVIATIONS = frozenset("al approx cf dr e.g eq eqs etc fig figs i.e mr mrs ms prof resp sec st u.s vs w.r.t".split())
END = re.compile(r"""[.!?]+["')\]]*\s+(?=["'(\[]*[A-Z0-9])|(?<=\s)[.!?]+["')\]]*\s+""")


def sentences(text: str) -> list[str]:
    """The sentences of a text. One ends at . ! or ? before a space and a capital or a digit, but not behind an
    abbreviation (`e.g.`, `et al.`, `Fig.`) or a single capital (`J. Smith`). A sign between spaces always ends one, as
    in tokenised text."""
    found, begin = list[str](), 0
    for end in END.finditer(text):
        word = (text[begin : end.start()].split() or [""])[-1].lstrip("([\"'")
        spaced = text[end.start() - 1].isspace()
        if not spaced and end[0].startswith(".") and (word.lower() in ABBREVIATIONS or re.fullmatch("[A-Z]", word)):
            continue
        found.append(text[begin : end.end()].strip())
        begin = end.end()
    return [one for one in (*found, text[begin:].strip()) if one]
