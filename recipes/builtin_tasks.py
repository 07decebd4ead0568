"""Write the built-in tasks of the recipes `keyword`, `chat` and `prompt`: `python recipes/builtin_tasks.py [FOLDER]`.

    keywords.jsonl   {"text": "The sequel has music, music and", "target": "music"}
    chat.jsonl       {"messages": [a system prompt, a question], "mood": "positive" or "negative"}
    opinions.jsonl   {"text": "the acting is a joy and the plot is clever", "label": 1}, half of them of each label

The last 256 rows of each are held out: `builtin:keywords/held-out`. Nothing there stands in a training prompt: the
subjects are others and a quarter of the words are others; the questions of the chat are about other things; the
opinions have other judgements.
"""

import json
import random
import sys
from itertools import product
from pathlib import Path
from typing import Any

import operant

HELD_OUT = 256

WORDS = """music story ending acting camera script plot hero director family horror comedy love war murder children
school humor city romance dialogue photography villain suspense""".split()
NEW_WORDS = "soundtrack costumes dog money friends songs monsters jokes".split()
SUBJECTS = """This film|The film|The movie|This movie|The sequel|The original film|My favourite film|The old western
This thriller|The remake|This drama|The documentary|The short film|A new film|The cartoon|This comedy"""
NEW_SUBJECTS = """The last film|This western|The first part|This picture|A good film|The second half|This series
The opening scene"""

MOODS = {"positive": "You love this film.", "negative": "You hate this film."}
QUESTIONS = """How was {}?|What about {}?|Tell me about {}.|What did you think of {}?|How did you find {}?
Say something about {}.|And {}?|Your opinion of {}?"""
THINGS = """the music|the story|the ending|the acting|the camera work|the dialogue|the plot|the villain|the hero
the costumes|the effects|the jokes|the songs|the first scene|the cast|the direction"""
NEW_THINGS = """the humour|the chase|the last scene|the pictures|the sets|the lead actor|the sound|the script
the romance|the suspense|the title|the poster|the photography|the children|the editing|the fights"""


PARTS = """the acting|the story|the script|the music|the ending|the camera work|the dialogue|the first hour|the plot
the cast|the humour|the direction"""
PRAISE = """wonderful|a joy|moving|very clever|full of life|beautiful to look at|fresh and funny|superb|a real pleasure
touching|worth seeing twice|as good as it gets|charming|first rate|thrilling|honest and warm"""
BLAME = """awful|a bore|painful to watch|very silly|full of holes|ugly to look at|stale and flat|dreadful|a real mess
tedious|not worth the ticket|as bad as it gets|clumsy|third rate|lifeless|false and cold"""
NEW_PRAISE = "excellent|a delight|lovely|brilliant|a small triumph|gripping|perfect|memorable"
NEW_BLAME = "horrible|a disaster|stupid|annoying|a waste of time|dull|poor|forgettable"


def listed(text: str) -> list[str]:
    """The entries of a list that bars and line ends separate."""
    return text.replace("\n", "|").split("|")


def keywords() -> list[dict[str, Any]]:
    """Training rows, each subject with each word, and then the held-out ones."""
    train = product(listed(SUBJECTS), WORDS)
    held_out = product(listed(NEW_SUBJECTS), WORDS + NEW_WORDS)
    return [{"text": f"{subject} has {word}, {word} and", "target": word} for subject, word in [*train, *held_out]]


def opinions() -> list[dict[str, Any]]:
    """256 training rows and 256 held-out ones: two parts of a film, and two judgements of one kind."""
    rows, chance = [], random.Random(1)
    for judgements in ((BLAME, PRAISE), (NEW_BLAME, NEW_PRAISE)):
        for i in range(HELD_OUT):
            parts = chance.sample(listed(PARTS), 2)
            two = chance.sample(listed(judgements[i % 2]), 2)
            text = " and ".join(f"{part} is {judged}" for part, judged in zip(parts, two, strict=True))
            rows.append({"text": f"{text}.", "label": i % 2})
    return rows


def chat() -> list[dict[str, Any]]:
    """Training rows, each question about each thing in both moods, and then the held-out ones."""
    asked = [
        question.format(thing)
        for things in (THINGS, NEW_THINGS)
        for thing in listed(things)
        for question in listed(QUESTIONS)
    ]
    return [
        {"messages": [{"role": "system", "content": instruction}, {"role": "user", "content": question}], "mood": mood}
        for question in asked
        for mood, instruction in MOODS.items()
    ]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("keywords", keywords()), ("chat", chat()), ("opinions", opinions())):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(operant.__file__).parent / "builtin")
