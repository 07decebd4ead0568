"""What is refused, and the sentence that says so: options that are wrong, unused or contradict others, and rows.

`refusals.txt` has the usual options of each subject, and below them what is given besides and what is said of it.
"""

import json

import hostile
import pytest
from texts import parts

from operant import Learner, OperantError, Sampling, Task, isolated
from operant.apps.agents.tools import ToolWorld
from operant.apps.code.problems import problem_of
from operant.apps.games.textworld import TextWorld
from operant.apps.maths.forms import maths
from operant.apps.maths.generated import arithmetic, countdown
from operant.apps.maths.rewards import Maths
from operant.apps.prompts.examples import examples_of, prompt
from operant.apps.prompts.templates import PromptTemplate
from operant.data import DataOptions, load_tasks
from operant.engines.completions import Completions
from operant.envs.http import Http
from operant.envs.memory import template
from operant.rewards import check, resolve
from operant.rewards.shaping import ScoreOptions
from operant.rollouts.generation_kwargs import from_generation_kwargs
from operant.runs.config import configure
from operant.sandbox.jail import Jail, JailOptions
from operant.tools.labels.items import items_of

PACKAGES = ("rouge_score", "sacrebleu", "nltk")
WAYS = {
    "configure": configure,
    "Learner": lambda given: Learner("no such model", **given),
    "reward": lambda given: check(resolve(given.pop("reward"), given)),
    "scores": lambda given: [*map(pytest.importorskip, PACKAGES)] and WAYS["reward"](given),
    "labels": lambda row: load_tasks([row], with_replies=True, labelled=True),
    "items": lambda given: items_of((row, f"row {i}") for i, row in enumerate(given["rows"], 1)),
    "generate": lambda given: from_generation_kwargs(Sampling(), given),
    "tasks": lambda given: load_tasks(given.pop("tasks"), options=DataOptions(**given)),
    "maths": lambda row: load_tasks([row], form=maths),
    "problem": lambda given: problem_of(Task("a", "Write f.", given)),
    "isolated": lambda given: isolated(hostile.good, **given),
    "JailOptions": lambda given: Jail(JailOptions(**given)),
    "Completions": lambda given: Completions(given.pop("url"), "m", **given),
    "TextWorld": lambda given: TextWorld(**given).games("train"),
    "ToolWorld": lambda given: ToolWorld(**given).check(),
    "prompts": prompt,
    "examples": lambda given: examples_of(Task("t", "", **given)),
    "template": lambda given: template(given["template"]),
}
MADE = (arithmetic, countdown, DataOptions, ScoreOptions, Maths, Http, PromptTemplate)
WAYS |= {made.__name__: lambda given, made=made: made(**given) for made in MADE}
REFUSED = [
    (title, json.loads(usual) | given, message)
    for title, text in parts("refusals.txt").items()
    for usual, *rows in [text.splitlines()]
    for given, message in map(json.loads, rows)
]


@pytest.mark.parametrize(("title", "given", "message"), REFUSED)
def test_it_is_refused_with_a_sentence(title, given, message):
    way, _, _ = title.partition(": ")
    with pytest.raises(OperantError, match=message):
        WAYS[way](given)
