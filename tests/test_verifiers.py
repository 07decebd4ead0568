"""Tasksets of verifiers as tasks: prompts and scores are verifiers' own, and what cannot be played is a sentence."""

import asyncio
import inspect
import json
import sys

import pytest
from cases import cases
from page_commands import snippets
from texts import parts

from operant import OperantError, Rollout, Task, Turn, rewards
from operant.apps.maths.forms import maths
from operant.apps.maths.rewards import Maths
from operant.data.sources import SOURCES
from operant.data.tasks import load_tasks
from operant.rewards import judge

ODD = parts("programs.txt")["tasksets of verifiers"]
MODULES = {"odd_words": '"Words"', "endless_words": '"Endless"', "sized_words": '"Sized"'}
MODULES |= {"several_words": '"Words", "Several"', "needy_words": '__import__("not_there")'}


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """A folder with the taskset of the page, and with odd ones, of which Python knows none afterwards."""
    pytest.importorskip("verifiers")
    [sums] = [snippet for snippet in snippets("docs/maths.md") if "class Sums" in snippet]
    (tmp_path / "my_sums.py").write_text(sums, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "my_sums", raising=False)
    for name, exported in MODULES.items():
        (tmp_path / f"{name}.py").write_text(ODD % exported, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


def tasks_of(name="odd_words", **options):
    return load_tasks(lambda: SOURCES.find(f"verifiers:{name}")(**options), form=maths)


def said(task: Task, reply: str) -> Rollout:
    return Rollout(task, 0, [Turn([1], [2])], [reply])


REPLIES = [(0, "abcde"), (2, "banana"), (1, "raise"), (1, ""), (0, "nan")]


@pytest.mark.slow
@cases(
    ("text", "Say it 1"),
    ("chat", [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say it 1"}]),
)
def test_scores_are_those_of_verifiers_itself(kind, prompt):
    """Weighted, summed over functions and over the names that a function returns; what raises is a crash."""
    tasks, reward, heard = tasks_of(kind=kind), Maths(), float(kind == "chat")
    assert tasks[1].prompt == prompt
    rewards.prepare(reward, tasks)
    note = "verifiers:odd_words, 3 problems tested: it has no answers of its own; nonsense such as 'I do"
    assert reward.notes[0].startswith(note)
    judged = judge(reward, [said(tasks[i], text) for i, text in REPLIES])
    assert judged.scores == pytest.approx([1.0 + heard, 1.2 - 0.75, 0, heard, 0])
    outcomes = [remark.classes[0] for remark in judged.remarks]
    assert outcomes[:3] + outcomes[4:] == ["right", "partly", "crash", "crash"]
    assert "no such reply" in judged.remarks[2].message and "pays nan" in judged.remarks[4].message
    reward.close()


def test_a_score_is_that_of_a_trace_that_verifiers_makes():
    """The same task, scored on a trace whose messages verifiers' own graph has committed."""
    from verifiers.v1 import AgentConfig, AssistantMessage, Trace, UserMessage, graph
    from verifiers.v1.state import state_cls
    from verifiers.v1.trace import AgentInfo, TraceTask

    from operant.apps.maths import verifiers

    [first, *_] = tasks_of(count=1)
    task = verifiers.tasks("odd_words", first.target["options"])[0]
    nodes = [
        graph.MessageNode(message=UserMessage(content=task.data.prompt)),
        graph.MessageNode(parent=0, message=AssistantMessage(content="abc"), sampled=True),
    ]
    how = {"agent": AgentInfo(config=AgentConfig()), "state": state_cls(type(task))()}
    trace = Trace(task=TraceTask(type="Odd", data=task.data), nodes=nodes, **how)
    asyncio.run(task.score(trace))
    assert verifiers.paid("odd_words", first.target["options"], 0, "abc") == pytest.approx(trace.reward)
    assert trace.reward == pytest.approx(0.6)


def test_options_are_the_fields_of_its_config():
    assert len(tasks_of(count=7)) == 7 and len(tasks_of(count=7, size=2)) == len(tasks_of("endless_words", size=2)) == 2
    assert tasks_of(words="{ask: Cry}")[0].prompt == "Cry 0"
    usual = inspect.signature(SOURCES.find("verifiers:odd_words")).parameters
    target = tasks_of(**{name: each.default for name, each in usual.items()})[2].target  # as a command gives them
    assert json.loads(target["options"])["config"] == {}
    target = tasks_of(loud="on", title="no")[0].target
    assert json.loads(target["options"])["config"] == {"loud": "on", "title": "no"}
    assert len(tasks_of("sized_words", game="chess", size=5)) == 5
    assert tasks_of(kind="parts")[0].prompt == [{"role": "user", "content": "Say it 0\nnow"}]


@cases(
    ("odd_words", {"kind": "container"}, "task 0 has a container; only texts with one answer are played"),
    ("odd_words", {"kind": "setup"}, "task 0 has a setup of its own"),
    ("odd_words", {"kind": "runtime"}, "task 0 has rewards that look into a runtime"),
    ("odd_words", {"kind": "user"}, "task 0 has a user who begins"),
    ("odd_words", {"kind": "image"}, "task 0 has an image"),
    ("odd_words", {"size": 0}, r"tasks\.size=0: it must be at least 1, or none"),
    ("odd_words", {"count": "many"}, "tasks=verifiers:odd_words: tasks.count: Input should be a valid integer"),
    ("sized_words", {}, "tasks=verifiers:sized_words: tasks.game: Field required"),
    ("several_words", {}, "has an environment of its own: only tasks are read here"),
    ("endless_words", {}, "never ends: say how many tasks, as in --tasks.size 1000"),
    ("needy_words", {}, "cannot be loaded: ModuleNotFoundError: No module named 'not_there'"),
    ("odd-word", {}, "no package has that name, and no file in this folder; did you mean 'odd_words'"),
)
def test_what_cannot_be_played_is_a_sentence(name, options, why):
    with pytest.raises(OperantError, match=f"(?s){why}"):
        tasks_of(name, **options)
