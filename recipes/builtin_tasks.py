"""Write the built-in tasks of the recipes `keyword` and `chat`: `python recipes/builtin_tasks.py [FOLDER]`.

    keywords.jsonl   {"text": "The sequel has music, music and", "target": "music"}
    chat.jsonl       {"messages": [a system prompt, a question], "mood": "positive" or "negative"}

The last 256 rows of each are held out: `builtin:keywords/held-out`. Nothing there stands in a training prompt: the
subjects are others and a quarter of the words are others; the questions of the chat are about other things.
"""

import json
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


def listed(text: str) -> list[str]:
    """The entries of a list that bars and line ends separate."""
    return text.replace("\n", "|").split("|")


def keywords() -> list[dict[str, Any]]:
    """Training rows, each subject with each word, and then the held-out ones."""
    train = product(listed(SUBJECTS), WORDS)
    held_out = product(listed(NEW_SUBJECTS), WORDS + NEW_WORDS)
    return [{"text": f"{subject} has {word}, {word} and", "target": word} for subject, word in [*train, *held_out]]


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
    for name, rows in (("keywords", keywords()), ("chat", chat())):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(operant.__file__).parent / "builtin")
