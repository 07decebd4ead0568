"""Isolated rewards: whatever a reward does, the batch is judged in time, no other score is lost and no process is left.

Processes that are left are found among all of the machine by a mark in their environment, which no child can remove.
"""

import os
import re
import runpy
import signal
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from pathlib import Path

import hostile
import pytest
from cases import cases, slow, slow_but
from isolation import STRONG, WEAK, marked_processes
from page_commands import snippets
from processes import Child, until
from rigs import on_ranks
from toys import letters, lm

from operant import Learner, OperantError, Rollout, Task, Turn, distributed, isolated, train
from operant.import_by_name import find_function
from operant.metrics.collect import of_judged
from operant.rewards import judge, parts_of, resolve
from operant.rewards.combine import MinusQuery, weighted
from operant.rewards.failure_policy import IsolationOptions
from operant.rewards.isolated import IsolatedReward, under
from operant.runs.scored_rollouts import join_judgements, play_and_score
from operant.sandbox.levels import SUPERVISED
from operant.sandbox.pool import Job, Pool
from operant.sandbox.process import FORCED, Limits, SupervisedProcess
from operant.sandbox.worker import spec_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leftover processes are searched for in /proc")
TESTS = Path(__file__).parent
DAILY = "exits kills_its_group segfaults wrong_length itself raises_what_cannot_be_shown closes_everything "
DAILY += "writes_to_every_pipe abstains chatters daemonises"
CASES = [(one, end, level) for end, some in hostile.CASES.items() for one, level in product(some, (STRONG, WEAK))]
QUICK = [case for case in CASES if case[0].__name__ in DAILY.split() and case[2] == STRONG]
OTHERS = [float(i) for i in range(64) if f"t/{i}" != hostile.BAD]


def rollouts(count: int = 64) -> list[Rollout]:
    turn = Turn([1, 2], [5, 6, 7], end="stop")
    return [Rollout(Task(f"t/{i}", "The film", target=i), i, [turn], [f" was {i}"]) for i in range(count)]


def processes_end(mark, *rewards, patience=1.0):
    for reward in rewards:
        reward.close()
    assert marked_processes(mark, patience=patience) == []


def check_one_bad_sample(reward, outcome, mark, level, *, timeout=8.0, **options):
    """The 63 other scores, the outcome of the bad sample, the deadline, and no process left."""
    isolated_reward = isolated(reward, timeout=timeout, memory=1, processes=32, level=level, **options)
    isolated_reward.check()
    assert isolated_reward.level.startswith(level)
    begun, judged = time.monotonic(), judge(isolated_reward, rollouts())
    seconds = time.monotonic() - begun
    assert judged.outcomes[17] == outcome, judged.notes
    assert [s for i, s in enumerate(judged.scores) if i != 17] == OTHERS
    assert judged.scores[17] == (17.0 if outcome == "ok" else None) and seconds < timeout + 2
    assert bool(judged.notes) == (outcome not in ("ok", "abstain") or reward is hostile.daemonises)
    assert len(marked_processes(mark)) <= 3, "a worker is a supervisor, the first of its namespace, and the reward"
    processes_end(mark, isolated_reward)
    return judged


# --- hostile rewards --------------------------------------------------------------------------------------------------
@cases(*slow_but(QUICK, CASES), ids=lambda x: getattr(x, "__name__", x))
def test_a_reward_that_fails_costs_one_sample(reward, outcome, level, mark):
    """What ends by itself may take its time, unless it is tried every day."""
    quick = outcome == "timeout" or (reward, outcome, level) in QUICK
    check_one_bad_sample(reward, outcome, mark, level, timeout=8.0 if quick else 150.0)


@cases(
    (hostile.endless_regex, STRONG),
    (hostile.daemonises_and_hangs, WEAK),
    slow(hostile.endless_regex, WEAK),
    slow(hostile.daemonises_and_hangs, STRONG),
)
def test_a_reward_that_hangs_costs_one_sample_and_its_time(reward, level, mark):
    begun = time.monotonic()
    check_one_bad_sample(reward, "timeout", mark, level, timeout=30.0, each=True, sample_timeout=0.4)
    assert time.monotonic() - begun < 20, "the sample has its own deadline"


@pytest.mark.slow
@pytest.mark.parametrize("level", [STRONG, WEAK])
def test_where_every_sample_hangs_the_deadline_holds(level, mark):
    everywhere = isolated(f"{TESTS}/hostile.py:endless_stubborn", timeout=4, memory=1, workers=2, level=level)
    bad = [Rollout(Task(hostile.BAD, "x"), i, [Turn([1], [2])], ["y"]) for i in range(64)]
    everywhere.check()
    begun, judged = time.monotonic(), judge(everywhere, bad)
    assert time.monotonic() - begun < 4 + 2
    assert judged.outcomes == ["timeout"] * 64 and judged.scores == [None] * 64
    processes_end(mark, everywhere)


def test_memory_and_processes_have_a_limit(mark):
    assert "MemoryError" in check_one_bad_sample(hostile.ten_gigabytes, "error", mark, STRONG).notes[-1]
    forks = isolated(hostile.forks_until_refused, processes=20, timeout=20, sample_timeout=10)
    scores = judge(forks, rollouts(1)).scores
    if "at most 20 processes" in forks.level:
        assert scores[0] is not None and 0 < scores[0] <= 20
    else:
        assert "no limit on its processes" in forks.level
    processes_end(mark, forks)


def test_output_of_a_reward_is_a_message_and_no_answer():
    talks = resolve(f"isolated:{TESTS}/hostile.py:chatters_and_dies")
    assert "it printed ...'the last words'" in judge(talks, rollouts(18)).notes[-1]


# --- sending rollouts and scores --------------------------------------------------------------------------------------
def test_a_worker_has_no_torch_and_lives_from_batch_to_batch(mark):
    reward = isolated(hostile.knows_torch)
    assert judge(reward, rollouts(2)).scores == [0.0, 0.0]
    stays = isolated(hostile.process)
    first, second = judge(stays, rollouts(2)).scores, judge(stays, rollouts(2)).scores
    assert first == second
    stays.close()
    assert judge(stays, rollouts(2)).scores != first
    processes_end(mark, reward, stays)


def test_a_rollout_arrives_as_it_was_sent():
    turns = [
        Turn([1], [2, 3], [-0.5, -1e-9], [0.1, 0.2], "world", 3, None, None, 0.25, -1.0, [[2, 3], [4]], 0),
        Turn([1, 2, 3, 9], [4], None, None, "cut", 3),
    ]
    prompt = [{"role": "user", "content": "naïve \ud83d 🎬"}]
    task = Task("a/1", prompt, target={"answer": [1, 2.5, None, True, "x"], "deep": {"er": {}}})
    sent = [Rollout(task, 4, turns, ["é\n", ""], "cut", {"score": float("inf")}, "q", [1, 2], 7)]
    assert judge(isolated(hostile.fingerprint), sent).scores == hostile.fingerprint(sent)


@cases(
    (object(), r"of task 't/0', rollout.task.target is of type object"),
    ({"a": [1, {1, 2}]}, r"of task 't/0', rollout.task.target.a\[1\] is of type set"),
    ({1: 2}, "is a mapping whose keys are not text"),
    (b"raw", "is of type bytes"),
)
def test_data_that_is_not_plain_is_refused(target, what):
    odd = [Rollout(Task("t/0", "x", target=target), 0, [Turn([1], [2])], ["y"])]
    with pytest.raises(OperantError, match=rf"isolated reward 'good': .*{what}.* it may hold text, numbers"):
        isolated(hostile.good).judged(odd)


def test_samples_of_a_prompt_stay_together_in_a_worker():
    four = [Rollout(Task(f"t/{i}", "x"), i // 4, [Turn([1], [2])], ["y"]) for i in range(20)]
    two = isolated(hostile.how_many, workers=2)
    assert judge(two, four).scores == [12.0] * 12 + [8.0] * 8 and judge(two, four[:4]).scores == [4.0] * 4
    assert judge(isolated(hostile.how_many), four).scores == [20.0] * 20
    assert judge(isolated(hostile.how_many, each=True), four).scores == [1.0] * 20


def test_a_function_is_found_by_its_name_or_refused(tmp_path):
    def inner(rollouts):
        return []

    nameless = r"no other process can find <lambda> by a name; .* isolated\('file.py:function'\)"
    for reward, said in (
        (lambda rs: [], nameless),
        (inner, "isolated"),
        (hostile.Unshowable().__str__, "isolated"),
        (3, "isolated"),
        (":good", r"module:function or file.py:function|there is no file"),
        ("no_such_file.py:good", "there is no file"),
    ):
        with pytest.raises(OperantError, match=said):
            isolated(reward)
    with pytest.raises(OperantError, match=r"isolated reward 'hostile:god': .*has no 'god'; did you mean 'good'"):
        train(lm(), ["a"], "isolated:hostile:god", out=tmp_path / "runs" / "run")
    assert not (tmp_path / "runs").exists()
    (tmp_path / "full.py").write_text("raise MemoryError", encoding="utf-8")
    with pytest.raises(OperantError, match=r"full\.py.* raised MemoryError"):
        isolated(f"{tmp_path}/full.py:good", memory=None).check()
    # A class without code of its own is found by its file.
    (tmp_path / "own.py").write_text("from collections import OrderedDict\nclass Mine(OrderedDict):\n    pass\n")
    mine = find_function("reward", str(tmp_path / "own.py"), "Mine")
    assert spec_of(mine) == f"{tmp_path / 'own.py'}:Mine" and spec_of(mine.__base__) == "collections:OrderedDict"


@cases(("if __name__ == '__main__':", "scored [2.0]"), ("if True:", "put the code that starts the run under"))
def test_a_function_of_the_script_itself(guard, printed, tmp_path, capsys):
    """It is found by its file; if the worker would run the whole script again, the error says how to prevent that."""
    script = f"""
        import operant

        def twice(rollouts):
            return [2.0 for _ in rollouts]

        {guard}
            reward = operant.isolated(twice)
            try:
                reward.check()
                sample = operant.Rollout(operant.Task("t", "x"), 0, [operant.Turn([1], [2])], ["y"])
                print("scored", reward([sample]))
            except operant.OperantError as error:
                print(error)
    """
    (tmp_path / "mine.py").write_text(textwrap.dedent(script), encoding="utf-8")
    runpy.run_path(str(tmp_path / "mine.py"), run_name="__main__")
    assert printed in capsys.readouterr().out


# --- handling of failures ---------------------------------------------------------------------------------------------
def test_each_outcome_is_handled_as_configured():
    both = rollouts(19)
    assert judge(isolated(hostile.raises, on_error=-1.0), both).scores == [*map(float, range(17)), -1.0, 18.0]
    assert judge(isolated(hostile.abstains, on_abstain=0.25), both).scores[17] == 0.25
    stopped = r"'raises' raised ValueError: no such word .*while judging task 't/17'.*on_error"
    with pytest.raises(OperantError, match=stopped):
        judge(isolated(hostile.raises, on_error="stop"), both)
    with pytest.raises(OperantError, match=r"'abstains' returned None while judging task 't/17'.* on_abstain"):
        judge(isolated(hostile.abstains, on_abstain="stop"), both)
    judged = judge(isolated(hostile.endless_sum, on_timeout=0.5, each=True, sample_timeout=0.2), both[17:])
    assert judged.scores == [0.5, 18.0] and judged.outcomes[0] == "timeout"


@cases(
    ({"retries": 3, "each": True}, "ok", 3),
    ({"retries": 3, "again": False}, "ok", 3),
    ({"retries": 1, "each": True}, "error", 2),
    ({"retries": 9, "each": True, "retry_seconds": 9.0}, "error", 1),  # no time is left for the pause
)
def test_a_busy_server_is_asked_again_after_a_pause_that_doubles(options, outcome, calls, tmp_path, monkeypatch):
    busy = """import time
def asks(rollouts):
    with open("calls.txt", "a") as file:
        file.write(f"{time.monotonic()} ")
    if len(open("calls.txt").read().split()) < 3:
        raise ConnectionError("429: too many requests")
    return [1.0 for r in rollouts]
"""
    monkeypatch.chdir(tmp_path)
    Path("busy.py").write_text(busy, encoding="utf-8")
    reward = isolated("busy.py:asks", **{"timeout": 8.0, "retry_seconds": 0.05, **options})
    assert judge(reward, rollouts(1)).outcomes == [outcome]
    times = [float(word) for word in Path("calls.txt").read_text(encoding="utf-8").split()]
    pauses = [later - before for before, later in pairwise(times)]
    assert len(times) == calls and all(pause >= 0.05 * 2**i for i, pause in enumerate(pauses))


@cases(hostile.raises, hostile.not_a_number, hostile.text, hostile.wrong_length)
def test_a_reward_without_isolation_stops_the_run_or_tolerates(reward):
    with pytest.raises(OperantError, match=reward.__name__):
        judge(under(reward, IsolationOptions()), rollouts())
    judged = judge(under(reward, IsolationOptions(on_error="drop")), rollouts())
    assert [s for i, s in enumerate(judged.scores) if i != 17] == OTHERS
    assert judged.outcomes.count("error") == 1 and judged.outcomes.count("ok") == 63
    assert "1 of 64 samples left out" in judged.notes[0]
    assert judge(under(reward, IsolationOptions(on_error=2.5)), rollouts()).scores[17] == 2.5


def test_a_failed_part_differs_from_one_that_abstained():
    """A sum without the failed part would be another reward: the sample is dropped, or the part gets its score."""
    sample = rollouts(19)
    for broken, outcome in ((hostile.raises, "error"), (hostile.abstains, "ok")):
        judged = judge(weighted({"a": (isolated(broken), 2.0), "b": (resolve("length:3"), 1.0)}), sample)
        assert judged.scores[:17] == [2.0 * i for i in range(17)]
        assert judged.outcomes[17] == outcome and judged.scores[17] == (None if outcome == "error" else 0.0)
    priced = isolated(hostile.raises, on_error=-3.0)
    assert judge(weighted({"a": (priced, 2.0), "b": (hostile.good, 1.0)}), sample).scores[17] == 2.0 * -3.0 + 17
    assert judge(MinusQuery(priced), sample).scores[16:18] == [0.0, -3.0]


def test_options_of_the_run_reach_rewards_without_their_own():
    options = IsolationOptions(timeout=7, on_error=0.0, workers=2)
    named = under(resolve({"isolated:hostile:good": 1.0, "minus_query:isolated:hostile:raises": 2.0}), options)
    assert under(isolated(hostile.good, timeout=9), options).options.timeout == 9
    assert [reward.options for reward in parts_of(named, IsolatedReward)] == [options, options]
    assert under(hostile.good, IsolationOptions()) is hostile.good


# --- in a run ---------------------------------------------------------------------------------------------------------
def test_a_run_continues_and_logs_the_failures(tmp_path, mark):
    tasks = [Task(f"t/{i}", text) for i, text in enumerate(["ab", "cde", "fg", "h", "ijk", "lm"])]
    reward = {"isolated:hostile:vowels": 1.0, "length:3": 0.1}
    known = {"steps": 2, "batch": 12, "samples": 2, "max_tokens": 12, "probes": 2, "reward_chunks": 3, "epochs": 1}
    known |= {"isolation": {"timeout": 60, "workers": 2}, "evaluate": [Task(f"e/{i}", "ab") for i in range(12)]}
    model = lm("gpt2", vocab=len(letters()), spread=0.3)
    run = train(model, tasks, reward, out=tmp_path / "run", tokenizer=letters(), **known)
    counted = [sum(m[f"reward/outcome/{o}"] for o in ("ok", "error", "timeout", "abstain")) for m in run.metrics]
    assert counted == [12.0] * 2
    failed = sum(m["reward/outcome/error"] for m in run.metrics)
    assert failed == sum(m["reward/abstained"] * 12 for m in run.metrics) > 0
    log = (tmp_path / "run/log.txt").read_text(encoding="utf-8")
    assert "isolation of reward 'vowels': " in log and "no security boundary" in log
    assert "samples left out: reward 'vowels' raised ValueError: too many" in log
    assert "isolation" in (tmp_path / "run/environment.json").read_text(encoding="utf-8")
    assert "no security boundary" in (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert marked_processes(mark, patience=1.0) == [], "the workers end with the run"


def _failing_on_one(rank: int, world: int, on_error: str) -> str:
    """The error of a step in which rank 1 has the bad sample."""
    tasks = [Task("t/16", "ab"), Task(hostile.BAD, "ab")]
    learner = Learner(lm("gpt2", vocab=len(letters())), tokenizer=letters(), **{"max_tokens": 4, "watch_every": 0})
    reward = isolated(hostile.raises, on_error=on_error)
    try:
        rollouts, judged = distributed.together(lambda: play_and_score(learner, tasks, reward))
        assert judged.outcomes == ["error" if rank else "ok"]
        learner.learn(rollouts, judged.scores)
    except OperantError as error:
        return str(error)
    finally:
        reward.close()
    return "nothing"


@pytest.mark.slow
@pytest.mark.parametrize(("on_error", "message"), [("stop", "'raises' raised ValueError"), ("drop", "nothing")])
def test_a_failure_on_one_rank_keeps_no_other_waiting(on_error, message):
    assert all(message in error for error in on_ranks(_failing_on_one, 2, on_error))


def test_the_snippet_of_the_page_prints_what_it_claims(tmp_path, monkeypatch, capsys):
    [snippet] = snippets("docs/rewards.md#isolated-rewards-they-may-hang-crash-or-fill-memory")
    code = "def politeness(rollouts):\n    return [float(r.reply[0] in 'pt') for r in rollouts]\n"
    (tmp_path / "my_rewards.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    exec(snippet, {})
    printed = capsys.readouterr().out.splitlines()
    promised = re.findall(r"print\(.*?\) +# (.*)", snippet)
    assert [line.split(": it raises")[0].split(";")[0].split(": ended")[0] for line in promised][:2] == printed[:2]
    assert printed[2].split(":")[0] in SUPERVISED and "no security boundary" in printed[2]


# --- the life of workers ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("level", [STRONG, slow(WEAK)])
def test_a_run_that_is_killed_leaves_no_process(level, mark):
    def work():
        reward = isolated(hostile.daemonises_and_hangs, level=level, timeout=500, sample_timeout=400)
        judge(reward, [Rollout(Task(hostile.BAD, "x"), 0, [Turn([1], [2])], ["y"])])

    parent = Child(work)
    # The supervisor, the reward and its daemon; the first process of the namespace.
    until(lambda: len(marked_processes(mark)) == 3 + (level == "pid namespace"), within=30)
    parent.kill()
    assert parent.ends() == -signal.SIGKILL
    processes_end(mark, patience=10.0)


def test_a_weaker_level_can_be_forced(monkeypatch):
    monkeypatch.setenv(FORCED, WEAK)
    reward = isolated(hostile.good)
    reward.check()
    assert reward.level.startswith(WEAK)
    reward.close()


def test_threads_and_forked_copies_share_no_worker(mark):
    reward = isolated(hostile.process)
    mine = judge(reward, rollouts(2)).scores
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: judge(reward, rollouts(2)).scores, range(4))) == [mine] * 4
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:  # a copy of the run: it starts its own workers, and does not end ours
        theirs = judge(reward, rollouts(2)).scores
        os.write(send, b"other" if theirs != mine and None not in theirs else b"same")
        reward.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(receive, 10) == b"other" and judge(reward, rollouts(2)).scores == mine
    processes_end(mark, reward)


TREE = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            os.fork()
        time.sleep(1000)
time.sleep(1000)
"""


def grown(limits, mark):
    """The program, once all its descendants live."""
    process = SupervisedProcess([sys.executable, "-S", "-c", TREE], limits)
    until(lambda: process.receive() or len(marked_processes(mark)) >= 11, within=20)
    return process


@pytest.mark.parametrize("level", {**dict.fromkeys([STRONG]), **dict.fromkeys(SUPERVISED[1:])})
def test_a_program_ends_with_all_its_descendants(level, mark):
    """Even if children leave its process group; the weakest level promises only the group."""
    process = grown(Limits(level=level, processes=None), mark)  # and no cgroup that lists them
    assert process.level == level
    process.end()
    processes_end(mark, patience=2.0)
    assert process.ended == "was ended"


@pytest.mark.parametrize("level", [STRONG, WEAK])
def test_the_death_of_a_supervisor_ends_its_program(level, mark):
    """At the weak level the cgroup lists the survivors; without a cgroup nothing is promised there."""
    process = grown(Limits(level=level), mark)
    os.kill(process.supervisor.pid, signal.SIGKILL)
    while process.ended is None:
        process.receive()
    if level == WEAK and process.limited_by != "cgroup":
        pytest.skip("no cgroup may be made here")
    if level == WEAK:
        process.end()
    assert marked_processes(mark, patience=2.0) == [] and "supervisor" in process.ended
    process.end()


def test_answers_that_were_not_requested_are_ignored():
    """The worker that sent them is replaced before the next request."""
    pool = Pool(Job("hostile:answers_twice", None), Limits())
    for request in (1, 2):
        [response] = pool.run([request], until=time.monotonic() + 20)
        assert (response.outcome, response.content) == ("ok", request)
        time.sleep(0.1)
    pool.close()


def test_a_worker_that_starts_slowly_is_let_to_start(tmp_path):
    """It outlives requests that are shorter; one that hangs there is replaced, and one that ends says why."""
    pool = Pool(Job("hostile:waits_to_start", str(tmp_path)), Limits())

    def answered(seconds):
        [response] = pool.run([7], until=time.monotonic() + seconds)
        return response.outcome, response.content or response.reason

    pool._fill()
    [first] = pool.workers
    assert answered(0.05)[0] == "timeout" and pool.workers == [first]
    pool.patience = 0.0
    assert answered(0.05)[0] == "timeout" and pool.workers != [first]
    (tmp_path / "go").touch()
    assert answered(20.0) == ("ok", 7), "a request that is longer waits for the start"
    pool.close()
    (tmp_path / "go").rename(tmp_path / "end")
    assert answered(20.0) == ("error", "ended with exit status 3; it printed ...'no licence'")
    pool.close()


def test_outcomes_are_counted_in_chunks_too():
    reward = isolated(hostile.raises)
    whole = judge(reward, rollouts())
    parts = join_judgements([judge(reward, rollouts()[:20]), judge(reward, rollouts()[20:])])
    assert (parts.scores, parts.outcomes) == (whole.scores, whole.outcomes)
    mixed = join_judgements([judge(reward, rollouts()[:20]), judge(hostile.good, rollouts()[20:])])
    found = of_judged(mixed).result()
    counts = {k.removeprefix("reward/outcome/"): v for k, v in found.items() if k.startswith("reward/outcome")}
    assert counts == {"ok": 63, "error": 1, "timeout": 0, "abstain": 0}
