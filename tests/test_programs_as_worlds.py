"""A world that is a program: equal to the same world as an `Env`, over HTTP too, and each failure costs its episode."""

import contextlib
import json
import math
import os
import re
import socket
import struct
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from cases import cases
from page_commands import snippets
from processes import until
from toys import letters, lm
from worlds import Turns

import operant
from operant import OperantError, Policy, Sampling, Step, Task, Turn
from operant.apps.agents import program as program_file
from operant.apps.agents.program import AgentWorld, EpisodeOverError
from operant.engines.native.engine import NativeEngine
from operant.metrics.collect import of_rollouts
from operant.rewards import judge
from operant.rollouts.branches import branches
from operant.rollouts.play import play as play_tasks
from operant.runs.scored_rollouts import as_rows
from operant.tools.report import games

TASKS = [Task(f"letter/{letter}", "a b", target=letter) for letter in "cdef"]


def policy():
    return Policy(lm("llama", 40, spread=0.1), letters(), value=operant.ValueOptions(init="normal"))


def pay(target, reply):
    return float(reply.count(target)) - 0.1 * len(reply)


class Twice(Turns):
    """Asks once more with other letters behind the reply, and then with a whole new prompt."""

    first = Step()

    def reset(self, tasks):
        self.targets = {slot: task.target for slot, task in tasks.items()}
        return super().reset(tasks)

    def answer(self, slot, reply):
        reward = pay(self.targets[slot], reply)
        steps = {1: Step(" b a", reward=reward), 2: Step("c d", fresh=True, reward=reward)}
        return steps.get(self.turn[slot]) or Step(reward=reward, terminated=True)


def direct(task, client):
    reply = client.complete(task.prompt)
    client.reward(pay(task.target, reply))
    client.reward(pay(task.target, client.complete(task.prompt + reply + " b a")))
    return pay(task.target, client.complete("c d"))


async def by_openai(task, client):
    import openai

    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as api:

        async def complete(prompt):
            return (await api.completions.create(model="any", prompt=prompt)).choices[0].text

        reply = await complete(task.prompt)
        client.reward(pay(task.target, reply))
        client.reward(pay(task.target, await complete(task.prompt + reply + " b a")))
        with pytest.raises(openai.BadRequestError, match="the run's own sampling"):
            await api.completions.create(model="any", prompt="a", temperature=0)
        return pay(task.target, await complete("c d"))


def test_a_program_trains_as_the_same_world_written_as_an_env_does(tmp_path):
    runs = [
        operant.train(policy(), TASKS, env=env, steps=1, batch=8, max_tokens=4, out=tmp_path / str(i), probes=0)
        for i, env in enumerate((Twice(), direct, by_openai))
    ]
    weights = [[w.clone() for w in run.policy.trainable()] for run in runs]
    for other in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], other, strict=True))
    assert not torch.equal(weights[0][0], next(iter(policy().trainable())))
    logged = [[(m["reward/mean"], m["loss/total"], m["rollout/turns"]) for m in run.metrics] for run in runs]
    assert logged[1:] == logged[:1] * 2
    [group] = games.embedded(tmp_path / "1")["groups"]
    first, *others = group["games"]
    assert len(others) == 7 and {game["good"] for game in group["games"]} == {True, False}
    assert [turn["state"].split() for turn in first["turns"]] == [["a", "b"], ["b", "a"], ["c", "d"]]
    assert sum(turn["reward"] for turn in first["turns"]) == pytest.approx(first["reward"], abs=1e-3)


def played(program, tasks=TASKS, tokenizer=None):
    return played_in(AgentWorld(program, deadline=20.0), tasks, tokenizer)


def played_in(env, tasks, tokenizer=None):
    made = policy()
    sampling = Sampling(max_tokens=4, stop_tokens=made.stop_tokens)
    env.tokenizer = tokenizer or made.tokenizer
    return play_tasks(tasks, env=env, engine=NativeEngine(made), tokenizer=env.tokenizer, sampling=sampling)


def tree(task, client):
    """Two replies to what follows the first one; the first of them goes on."""
    reply = client.complete(task.prompt)
    client.reward(0.5)
    one, two = client.complete(task.prompt + reply + " b a", n=2)
    client.reward(1.0, choice=0)
    client.reward(-1.0, choice=1)
    assert isinstance(one, str) and client.complete(task.prompt + reply + " b a" + one + " c") is not two
    return 4.0


def tree_by_openai(task, client):
    import openai

    with openai.OpenAI(base_url=client.base_url, api_key=client.api_key) as api:
        [model] = api.models.list().data
        reply = api.completions.create(model=model.id, prompt=task.prompt).choices[0].text
        client.reward(0.5)
        made = api.completions.create(model="any", prompt=task.prompt + reply + " b a", n=2).choices
        api.post("/rewards", body={"reward": 1.0, "choice": 0}, cast_to=object)
        api.post("/rewards", body={"reward": -1.0, "choice": 1}, cast_to=object)
        for wrong in ({"reward": 1.0, "choice": 2}, {"reward": 1.0}, {"reward": "1", "choice": 0}, {"pay": 1}, [1]):
            with pytest.raises(openai.BadRequestError, match=r"which reply|finite number|give `reward`"):
                api.post("/rewards", body=wrong, cast_to=object)
        api.completions.create(model="any", prompt=task.prompt + reply + " b a" + made[0].text + " c")
    return 4.0


def test_several_replies_to_a_request_are_branches_with_a_credit_of_their_own():
    for rollout, over_http in zip(played(tree), played(tree_by_openai), strict=True):
        first, one, two, after = rollout.turns
        assert [turn.parent for turn in rollout.turns] == [None, None, 0, 1]
        read = first.prompt + first.action
        assert one.prompt == two.prompt and one.prompt[: len(read)] == read
        assert after.prompt[: len(one.prompt + one.action)] == one.prompt + one.action
        assert [turn.reward for turn in rollout.turns] == [0.5, 1.0, -1.0, 4.0] and rollout.paid == 4.5
        assert said(over_http) == said(rollout)
    rows = as_rows([rollout], [2.0], pieces=lambda ids: [str(token) for token in ids])
    assert [row["parent"] for row in rows] == [-1, 0, 0, 1]
    shown = json.loads(rows[-1]["game"])["turns"]
    assert [turn["parent"] for turn in shown] == [-1, 0, 0, 1] and shown[1]["state"] == shown[2]["state"]
    assert len(shown[2]["state"]) < len(shown[0]["state"] + shown[1]["state"])  # what was read behind the turn before
    plain = {"score.centre": False, "kl.coef": 0.0}
    for step, why in (
        (Step(at=7), "a step names turn 7 of 2"),
        (Step("d", at=0), "a step goes on from turn 0, which is an example"),
        (Step(fresh=True), "a step with fresh=True has no text to reply to"),
    ):
        own = {"branches": True, "first": Step(examples=[("c", 0.0)]), "answer": lambda *_, step=step: step}
        with pytest.raises(OperantError, match=f"task 'letter/c': {why}"):
            played_in(type("Jumps", (Turns,), own)(), TASKS[:1])
    learner = operant.Learner(policy(), algorithm="reinforce", env=AgentWorld(tree), max_tokens=4, **plain)
    batch, places = learner.preview([rollout], [2.0])
    numbers = [part.place for one in played(tree) for part, _ in branches(one, 0.0)]
    assert len(numbers) == len(set(numbers)) == 3 * len(TASKS)
    # What follows a reply: 0.5 and the mean of 7 and -1; 1, 4 and the score 2; -1; 4 and 2.
    expected = [x for turn, x in zip((first, one, after, two), (3.5, 7.0, 6.0, -1.0)) for x in [x] * turn.count]
    assert batch.advantages[batch.actions].tolist() == pytest.approx(expected) and places == [0, -1, -1]
    centred = operant.Learner(policy(), algorithm="reinforce", env=AgentWorld(tree), max_tokens=4, **{"kl.coef": 0.0})
    assert centred.preview([rollout], [2.0])[0].rewards.sum() == pytest.approx(0.0, abs=1e-5)  # not over episodes
    outgrown = {"end": "outgrown", "following": one.prompt + one.action}
    cut = replace(rollout, turns=rollout.turns[:3], texts=rollout.texts[:3], **outgrown)
    # Of the branch that was to go on, not of the last one drawn.
    ends = [("world", True), ("outgrown", False), ("world", True)]
    assert [(part.end, part.following is None) for part, _ in branches(cut, None)] == ends
    assert int(batch.actions.sum()) == rollout.count


@cases(("bc", "b", 0), ("b", "b", None))
def test_a_request_goes_on_from_the_branch_that_it_has_whole(one, two, at):
    """Of equal ones from the last, also where the engine keeps states of them."""

    def program(task, client):
        client.complete("a", n=2)
        client.complete("a" + one + " c")

    env = AgentWorld(program)
    env.reset({0: TASKS[0]})
    for reply in (one, two):
        env.on_turns({0: Turn([3], [4], end="length", states=torch.ones(2, 1))})
        step = env.step({0: reply})[0]
    assert (step.text, step.at, step.fresh) == (" c", at, False)
    env.on_leave([0])


TEMPLATES = {
    "plain": "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }}</s>{% endfor %}a ",
    "with a beginning": "<s>{% for m in messages %}{{ m['role'][0] }} {{ m['content'] | trim }}</s>{% endfor %}a ",
    "rewriting": "{{ 'b ' * messages | length }}{% for m in messages %}{{ m['content'] }}</s>{% endfor %}a ",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_that_goes_on_joins_its_row_by_ids(name):
    tokenizer = letters(TEMPLATES[name])
    opening = [{"role": "user", "content": "a b"}]
    ids = tokenizer.apply_chat_template(opening, add_generation_prompt=True, return_dict=True)["input_ids"]

    def program(task, client):
        messages = [*opening]
        for more in ("c", "d e", ""):
            messages.append({"role": "assistant", "content": client.chat(messages)})
            messages.append({"role": "user", "content": more})

    rollouts = played(program, tokenizer=tokenizer, tasks=[Task(f"t/{i}", "a b") for i in range(16)])
    ended = {turn.end for rollout in rollouts for turn in rollout.turns[:2]}
    assert ended == {"stop", "length"}  # with the stop token in the row, and without
    for rollout in rollouts:
        one, two, three = rollout.turns
        assert one.prompt == ids
        for last, turn, more in ((one, two, "c"), (two, three, "d e")):
            end = "" if last.end == "stop" else "</s>"
            said = tokenizer(f"{end}u {more}</s>a ", add_special_tokens=False)["input_ids"]
            assert (turn.prompt == [*last.prompt, *last.action, *said]) == (name != "rewriting")
        assert rollout.info["fresh_rows"] == (3 if name == "rewriting" else 1)
    share = of_rollouts(rollouts).result()["rollout/fresh_prompts"]
    assert share == (name == "rewriting")
    rollouts[0].turns[0] = replace(rollouts[0].turns[0], action=[3] * len(rollouts[0].turns[0].action))
    assert of_rollouts(rollouts).result()["rollout/fresh_prompts"] == max(share, 1 / 32)


def test_a_conversation_that_was_changed_opens_a_row():
    tokenizer = letters(TEMPLATES["plain"])

    def program(task, client):
        messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "not sampled"}]
        reply = client.chat([*messages, {"role": "user", "content": "c"}])
        client.chat([*messages, {"role": "user", "content": "d"}, {"role": "assistant", "content": reply}])
        reply = client.chat([{"role": "user", "content": "e"}])
        edited = {"role": "assistant", "content": f"{reply} b"}
        client.chat([{"role": "user", "content": "e"}, edited, {"role": "user", "content": "f"}])

    assert [rollout.info["fresh_rows"] for rollout in played(program, tokenizer=tokenizer)] == [4] * 4


def test_a_forked_process_cannot_use_the_client():
    def program(task, client):
        if (child := os.fork()) == 0:
            with contextlib.suppress(OperantError):
                client.complete("a")
                os._exit(1)
            os._exit(7)
        client.complete("a")
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    [rollout] = played(program, tasks=TASKS[:1])
    assert rollout.turns[0].reward == 7


AGENT = """
import json, os, openai
api, task = openai.OpenAI(), json.load(open(os.environ["OPERANT_TASK"]))
stream = api.completions.create(model="any", prompt=task["prompt"], stream=True, stream_options={"include_usage": True})
pieces = list(stream)
text, end = pieces[0].choices[0].text, pieces[1].choices[0].finish_reason
again = api.completions.create(model="any", prompt=task["prompt"] + text + " b a", temperature=0.5)
assert pieces[-1].usage.completion_tokens == (4 if end == "length" else pieces[-1].usage.completion_tokens)
print(json.dumps([text, end, again.usage.prompt_tokens]))
print(text.count(task["target"]))
"""


@pytest.mark.slow
def test_a_command_is_a_world_and_ends_with_all_that_it_started(tmp_path):
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT, encoding="utf-8")
    world = AgentWorld(command=f"{sys.executable} {agent}", ignore=["temperature"])
    world.reset({0: TASKS[0]})  # the program waits for a reply; every user may read arguments
    key, seen = world.clients[0].api_key, [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])]
    assert str(agent) in str(seen) and key not in str(seen)
    for rollout in played_in(world, TASKS[:2]):
        first, second = rollout.turns
        assert second.prompt[: len(first.prompt + first.action)] == first.prompt + first.action
        assert second.reward == rollout.texts[0].count(rollout.task.target), rollout.info
    hangs = f"{sys.executable} -c 'import time; time.sleep(999.25)' & sleep 999.25"
    for command, end, why in ((hangs, "timeout", "within 3 seconds"), ("echo no; exit 3", "raised", "status 3: no")):
        [rollout] = played_in(AgentWorld(command=command, deadline=3.0), TASKS[:1])
        assert rollout.end == end and why in rollout.info["failure"]
    until(lambda: not any("999.25" in str(p.info["cmdline"]) for p in psutil.process_iter(["cmdline"])), 5)


def swallows(task, client):
    try:
        raise RuntimeError("mine")
    except RuntimeError:
        client.complete("a")
        return "good"


def from_two_threads(task, client):
    def ask():
        with contextlib.suppress(OperantError, EpisodeOverError):
            client.complete("a")

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    threads[0].join()


def endless(task, client):
    while True:
        client.complete("a")


@pytest.fixture(scope="module")
def right():
    return played(direct)


@cases(
    (lambda task, client: 1.0, "raised", "ended without a request"),
    (swallows, "raised", "returned 'good'; it must return a reward"),
    (lambda task, client: client.complete("a") and time.sleep(1), "timeout", "asked nor ended within 0.5 seconds"),
    (lambda task, client: (client.complete("a"), sys.exit(3)), "raised", "SystemExit: 3"),
    (endless, "raised", "asked for 9 replies or more: let it end"),
    (from_two_threads, "raised", "asked twice at a time"),
    (lambda task, client: client.complete("a", max_tokens=100), "raised", "max_tokens=100: the run's own sampling"),
    (lambda task, client: client.reward(1.0), "raised", "no reply yet"),
    (lambda task, client: client.complete("a") and 10**400, "raised", "it must return a reward"),
    (lambda task, client: client.report(x="high"), "raised", "report(x='high'): it must be a finite number"),
    (lambda task, client: client.complete("a", n=2) and client.reward(1.0, 2), "raised", "say which reply is paid"),
)
def test_a_program_that_fails_costs_its_episode_alone(bad, end, why, right, monkeypatch):
    def program(task, client):
        return (bad if task.target == "d" else direct)(task, client)

    monkeypatch.setattr("operant.apps.agents.program.MAX_TURNS", 9)
    found = played_in(AgentWorld(program, deadline=0.5 if end == "timeout" else 20.0), TASKS)
    assert found[1].end == end and re.search(re.escape(why), found[1].info["failure"]), found[1].info
    assert [said(rollout) for rollout in found if rollout.place != 1] == [said(r) for r in right if r.place != 1]
    (note,) = judge(None, found, pays=True).notes
    assert "1 of 4 episodes left out: the program " in note


def test_a_first_prompt_that_does_not_fit_is_refused():
    def program(task, client):
        with pytest.raises(OperantError, match="the prompt has 4 tokens, and a reply needs 1 to 2"):
            client.complete("a b c")
        return len(client.complete("a b"))

    env = AgentWorld(program)
    env.measure(len, 2)
    [rollout] = played_in(env, TASKS[:1])
    assert not rollout.failed and len(rollout.turns) == 1


def said(rollout):
    """What the turns of an episode are; the log-probs round by what is decoded beside them."""
    return [(turn.prompt, turn.action, turn.end, turn.reward) for turn in rollout.turns]


def test_a_program_ends_where_its_slot_is_begun_again():
    seen = []
    env = AgentWorld(lambda task, client: seen.append(client) or client.complete("a"), deadline=math.inf)
    assert [env.reset({0: TASKS[0]})[0].text for _ in range(2)] == ["a", "a"]
    assert [client.over for client in seen] == [True, False]
    env.on_leave([0])


def test_a_call_after_the_end_is_refused():
    kept = []
    played(lambda task, client: kept.append(client) or len(client.complete("a")), tasks=TASKS[:1])
    for late in (lambda: kept[0].complete("a"), lambda: kept[0].reward(1.0)):  # no payment is lost without a word
        with pytest.raises(EpisodeOverError, match="the episode has ended"):
            late()
    assert not issubclass(EpisodeOverError, Exception), "no program catches it by chance"


def test_bad_requests_over_http_get_a_sentence_and_print_nothing(capsys, monkeypatch):
    monkeypatch.setattr(program_file._AgentRequests, "timeout", 0.3)
    found = []

    def program(task, client):
        head = f"POST /v1/completions HTTP/1.1\r\nAuthorization: Bearer {client.api_key}\r\nContent-Length: "
        large, whole = b"a" * 10_000_000, b'{"prompt":"a"}'
        address = ("127.0.0.1", int(client.base_url.split(":")[2].removesuffix("/v1")))
        for length, sent in ((len(large), large), (90, whole), (8, whole[:8]), (14, whole)):
            with socket.create_connection(address, timeout=10) as connection:
                connection.sendall(f"{head}{length}\r\n\r\n".encode() + sent)
                if length == 14:  # it goes away with a reset, and reads no reply
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                else:
                    found.append(connection.recv(100).split(b"\r\n")[0].split()[1])
        time.sleep(0.3)
        return 1.0

    [rollout] = played(program, tasks=TASKS[:1])
    assert found == [b"413", b"408", b"400"] and [turn.reward for turn in rollout.turns] == [1.0]
    assert capsys.readouterr().err == ""


def test_a_wrong_program_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text("number = 3\n", encoding="utf-8")
    for options in ({"play": "agent.py:number"}, {"play": len, "deadline": 0}):
        with pytest.raises(OperantError, match=r"env\.(play|deadline)="):
            AgentWorld(**options)


@pytest.mark.slow
def test_the_snippets_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    defined, used = snippets("docs/agents.md")
    Path("agent.py").write_text(defined, encoding="utf-8")
    space = {"policy": policy()}
    exec((defined + used).replace('"builtin:reviews-lm"', "policy"), space)
    named = [
        operant.train(policy(), space["tasks"], steps=2, batch=8, max_tokens=4, out=f"runs/{i}", **options)
        for i, options in enumerate(({"env": "agent.py:play"}, {"env": "program", "env.play": "agent.py:play"}))
    ]
    assert all(run.metrics[1]["reward/mean"] == space["run"].metrics[1]["reward/mean"] for run in named)
