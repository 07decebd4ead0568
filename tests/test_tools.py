"""Tools that a policy calls: what it reads of a call, how its row goes on, and what wrong calls and tools get."""

import math
import re
import threading
import time
from types import SimpleNamespace

import pytest
from cases import cases, slow
from toys import letters, lm

import operant
from operant import Completion, OperantError, Sampling, Task
from operant.apps.agents.program import AgentWorld
from operant.apps.agents.tools import ToolWorld
from operant.rollouts.play import play
from operant.runs import named_parts

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t['function']['name'] }}]{% endfor %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}(call){% endfor %}<|endoftext|>{% endfor %}<|assistant|>"
)


class Scripted:
    """An engine that gives written replies, one for each turn of the only episode."""

    def __init__(self, tokenizer, replies, stop=True, token=True):
        self.tokenizer, self.replies, self.prompts = tokenizer, iter(replies), []
        self.end, self.last = "stop" if stop else "length", [tokenizer.eos_token_id] * (stop and token)

    def generate(self, prompts, sampling, keys):
        self.prompts += prompts
        ids = self.tokenizer(next(self.replies), add_special_tokens=False)["input_ids"] + self.last
        return [Completion(ids, [0.0] * len(ids), None, self.end, 0)]


@pytest.fixture(scope="module")
def tokenizer():
    return operant.load_policy("builtin:reviews-lm").tokenizer


def tool(name, work):
    def called(text: str) -> str:
        return work(text)

    called.__name__, called.__doc__ = name, "Work.\n\nArgs:\n    text: Anything.\n"
    return called


SLOW, RAISES = tool("slow", lambda text: time.sleep(30)), tool("raises", lambda text: {}[text])


def boils(text: str, degrees: int) -> dict:
    """Say what was given.

    Args:
        text: A text.
        degrees: A number.
    """
    return {"text": text, "degrees": degrees}


def noon() -> int:
    """When."""
    return 12


def episode(tokenizer, replies, tools="python", *, template=None, fits=lambda *_: True, **options):
    tokenizer.chat_template = template
    env = ToolWorld(tools, **options)
    env.tokenizer = tokenizer
    engine = Scripted(tokenizer, replies, stop=template is not None)
    sampling = Sampling(max_tokens=64, stop_tokens=(tokenizer.eos_token_id,))
    [rollout] = play([Task("t", "2^10?")], env=env, engine=engine, tokenizer=tokenizer, sampling=sampling, fits=fits)
    return rollout, [tokenizer.decode(prompt) for prompt in engine.prompts]


def test_a_program_is_run_and_its_result_goes_on_the_row(tokenizer):
    rollout, prompts = episode(tokenizer, ["<python>x = 2 ** 10\nx</python>", "1024"])
    assert prompts == ["2^10?", "2^10?<python>x = 2 ** 10\nx</python><result>1024</result>"]
    first, second = rollout.turns
    assert second.prompt[: len(first.prompt + first.action)] == first.prompt + first.action
    assert (rollout.reply, rollout.info["numbers"]) == ("1024", {"calls": 1, "failed_calls": 0})


def test_a_chat_template_writes_the_tools_and_the_results(tokenizer):
    call = '<tool_call>{"name": "boils", "arguments": {"text": "tea", "degrees": 9}}</tool_call>'
    rollout, prompts = episode(tokenizer, [call, "hot"], [boils], template=TEMPLATE, seconds=math.inf)
    row = f"[boils]<|user|>2^10?<|endoftext|><|assistant|>{call}<|endoftext|>"
    assert prompts[1] == row + '<|tool|>{"text": "tea", "degrees": 9}<|endoftext|><|assistant|>'
    first, second = rollout.turns
    assert second.prompt[: len(first.prompt + first.action)] == first.prompt + first.action
    assert rollout.info["fresh_rows"] == 1 and rollout.reply == "hot"


@cases(
    ("<python># a quotient\n\nx = 1; x / 0</python>", "python", ">ZeroDivisionError: division by zero (line 3)<"),
    ("<python>é = (2 +\n  3)  # five\n(é *\n  é)  # 25</python>", "python", "<result>25</result>"),
    ("<python>print('a' * 5000)</python>", "python", "a" * 40 + " ..."),
    ("<python>(</python>", "python", "SyntaxError"),
    ("<python>while True: pass</python>", "python", "time"),
    ("<python>open('/etc/shadow').read()</python>", "python", "Error"),
    ("<python>None</python>", "python", "<result></result>"),
    ("<raises>k</raises>", [RAISES], "KeyError: 'k'"),
    slow("<slow>k</slow>", [SLOW], "the call took longer than 2 seconds"),
    ('<boils>{"heat": 3}</boils>', [boils], "boils has no argument 'heat'; it has text, degrees"),
    ("<boils>3</boils>", [boils], "TypeError"),
    ("if vector<int> is meant, <boils>{}</boils>", [boils], "TypeError"),
    ("<noon>now</noon>", [noon], "<result>12</result>"),
)
def test_a_call_that_fails_is_answered_by_a_sentence(call, tools, result, tokenizer):
    before = set(threading.enumerate())
    _, prompts = episode(tokenizer, [call, "so"], tools, seconds=0.5, characters=40 if "5000" in call else 1000)
    assert result in prompts[1].removeprefix(f"2^10?{call}")
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)  # none holds the process at its end


def test_a_stop_string_that_a_program_writes_again_is_not_doubled(tokenizer):
    tokenizer.chat_template = None

    def program(task, client):
        reply = client.complete(task.prompt)
        assert reply == "<python>1"
        client.complete(task.prompt + reply + "</python> so")

    env, engine = AgentWorld(program), Scripted(tokenizer, ["<python>1</python>", "x"], stop=True, token=False)
    env.tokenizer = tokenizer
    sampling = Sampling(max_tokens=64, stop_strings=("</python>",))
    [rollout] = play([Task("t", "2^10?")], env=env, engine=engine, tokenizer=tokenizer, sampling=sampling)
    assert tokenizer.decode(rollout.turns[1].prompt) == "2^10?<python>1</python> so"


def test_calls_are_bounded(tokenizer):
    assert ToolWorld(calls=4, seconds=40.0).deadline > 4 * (2 * 40 + 1), "each may take that long"
    world, client = ToolWorld(), SimpleNamespace(next=lambda due, deadline: deadline)
    world.at_once, world.clients = 2, dict.fromkeys(range(6), client)
    assert {*world._steps(range(6)).values()} == {3 * world.deadline}, "six programs wait for two processors"
    rollout, prompts = episode(tokenizer, ["<python>1</python>"] * 3, calls=2)
    assert len(prompts) == 3 and rollout.end == "world" and rollout.info["numbers"]["calls"] == 3
    assert rollout.reply == "" and rollout.texts[-1] == "<python>1</python>"  # a call is no answer to judge
    ran = []

    def note(text: str) -> None:
        """Note.

        Args:
            text: Anything.
        """
        ran.append(text)

    rollout, prompts = episode(tokenizer, ["<note>a</note><note>b</note>"], [note], calls=1)
    assert ran == ["a"] and len(prompts) == 1 and rollout.info["numbers"] == {"calls": 2, "failed_calls": 0}
    # A call whose result does not fit is counted, and leaves no answer.
    rollout, _ = episode(tokenizer, ["<python>1</python>"], fits=lambda prompt, reply: prompt < 9)
    assert (rollout.end, rollout.reply) == ("outgrown", "")
    assert rollout.info["numbers"] == {"calls": 1, "failed_calls": 0}


def test_search_finds_the_paragraph_that_fits_best(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("Cats sleep.\n\nDogs chase cats and cars.", encoding="utf-8")
    (tmp_path / "b.md").write_text("A car has wheels.", encoding="utf-8")
    (tmp_path / "folder.md").mkdir()
    _, prompts = episode(tokenizer, ["<search>chasing cars</search>", "so"], "search", folder=str(tmp_path))
    found = re.findall(r"\[(.*?)\] (.*)", prompts[1])
    assert [name for name, _ in found] == ["a.txt", "b.md"] and found[0][1].startswith("Dogs chase")


def test_a_function_without_a_name_and_types_is_no_tool():
    with pytest.raises(OperantError, match="a tool cannot be described"):
        ToolWorld(tools=[lambda x: x]).check()


def test_a_command_line_may_name_several(tmp_path):
    (tmp_path / "a.txt").write_text("Cats sleep.", encoding="utf-8")
    (tmp_path / "agent.py").write_text("def play(task, client):\n    return 1.0\n", encoding="utf-8")

    def made(env, **options):
        named = {"env": env, **{f"env.{name}": value for name, value in options.items()}}
        return named_parts.make("env", env, named_parts.stored_options("env", named))

    assert list(made("tools", tools="python,search", folder=str(tmp_path)).tools) == ["python", "search"]
    for env, more in (("program", {"command": "true"}), (f"{tmp_path}/agent.py:play", {})):
        world = made(env, ignore="temperature,max_tokens", **more)
        assert isinstance(world, AgentWorld) and world.ignore == {"temperature", "max_tokens"}
    with pytest.raises(OperantError, match=r"env\.ignore='heat': it may name temperature"):
        made(f"{tmp_path}/agent.py:play", ignore="heat")


def test_a_run_logs_the_calls(tmp_path):
    options = {"env": "tools", "env.tools": "python", "reward": lambda rollouts: [len(r.reply) for r in rollouts]}
    options |= {"steps": 1, "batch": 4, "max_tokens": 4, "probes": 0, "quiet": True, "out": tmp_path / "r"}
    assert operant.train(lm("llama", 40), ["a b"], tokenizer=letters(), **options).metrics[0]["world/calls"] == 0
