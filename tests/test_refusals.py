"""What is refused, and the sentence that says so: options that are wrong, unused or contradict others, and rows.

`refusals.txt` has the usual options of each subject, and below them what is given besides and what is said of it.
"""

import json

import hostile
import pytest
from texts import parts

from operant import Learner, OperantError, Sampling, Task, isolated
from operant.apps.agents.tools import ToolWorld
from operant.apps.maths.forms import maths
from operant.apps.maths.rewards import Maths
from operant.apps.prompts.examples import examples_of, prompt
from operant.apps.prompts.templates import PromptTemplate
from operant.data import DataOptions, load_tasks
from operant.engines.completions import Completions
from operant.envs.memory import template
from operant.rewards import check, resolve
from operant.rewards.shaping import ScoreOptions
from operant.rollouts.generation_kwargs import from_generation_kwargs
from operant.runs.config import configure
from operant.sandbox.jail import Jail, JailOptions

WAYS = {
    "configure": configure,
    "Learner": lambda given: Learner("no such model", **given),
    "reward": lambda given: check(resolve(given.pop("reward"), given)),
    "labels": lambda row: load_tasks([row], with_replies=True, labelled=True),
    "generate": lambda given: from_generation_kwargs(Sampling(), given),
    "tasks": lambda given: load_tasks(given.pop("tasks"), options=DataOptions(**given)),
    "maths": lambda row: load_tasks([row], form=maths),
    "isolated": lambda given: isolated(hostile.good, **given),
    "DataOptions": lambda given: DataOptions(**given),
    "ScoreOptions": lambda given: ScoreOptions(**given),
    "JailOptions": lambda given: Jail(JailOptions(**given)),
    "Maths": lambda given: Maths(**given),
    "Completions": lambda given: Completions(given.pop("url"), "m", **given),
    "ToolWorld": lambda given: ToolWorld(**given).check(),
    "PromptTemplate": lambda given: PromptTemplate(**given),
    "prompts": prompt,
    "examples": lambda given: examples_of(Task("t", "", **given)),
    "template": lambda given: template(given["template"]),
}
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
