"""Ranks that do not find each other, disagree, die or hang: a sentence, an end in time, and a job that goes on."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from cases import cases
from processes import Child, free_port
from rigs import on_ranks
from small_runs import told
from toys import letters, lm, on_disk

from operant import distributed
from operant.types import HeardError, OperantError

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def test_a_restart_finds_no_keys_of_the_last_start():
    """Rank 1 of the last start has asked, was answered and has ended; the three of this start meet by themselves."""
    store = dist.HashStore()
    store.set("operant/asks/1", "asked before")
    with ThreadPoolExecutor(3) as threads:
        met = list(threads.map(lambda number: distributed.fresh_store(store, number, 3), range(3)))
    met[0].set("key", "of this start")
    assert [part.get("key") for part in met] == [b"of this start"] * 3
    assert not distributed.fresh_store(store, 0, 1).check(["key"])


FACTS = [
    ([{"operant": "1", "learner.seed": 0}] * 3, None),
    (
        [{"operant": v, "learner.seed": s} for v, s in (("1", 0), ("2", 1), ("1", 0))],
        "operant is '1' on ranks 0, 2; '2' on rank 1",
    ),
    ([{"learner.seed": s} for s in (0, 0, 5)], "learner.seed is 0 on ranks 0, 1; 5 on rank 2"),
    ([{"a": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2}], "b is None on rank 0; 2 on ranks 1, 2"),
]


def compared(number: int, count: int) -> list:
    said = []
    for facts, _ in FACTS:
        try:
            said.append(distributed.check_equal("facts", facts[number]))
        except OperantError as error:
            said.append((str(error), isinstance(error, HeardError)))
    return said


def test_ranks_that_disagree_hear_where_and_one_of_them_says_it():
    for (_, expected), *ranks in zip(FACTS, *on_ranks(compared, 3), strict=True):
        if expected is None:
            assert ranks == [None] * 3
        else:
            assert all(f"the ranks have different facts: {expected}." in sentence for sentence, _ in ranks)
            assert [heard for _, heard in ranks] == [False, True, True]


def meets(port: int, number: int, minutes: float, output: Path) -> Child:
    """A rank of two, of which rank 1 hangs."""

    def work():
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(number)}
        os.environ |= place | {"GLOO_SOCKET_IFNAME": "lo"}
        try:
            with distributed.launched(minutes):
                distributed.total_float(1.0)
                time.sleep(600 if number else 0)
                distributed.total_float(1.0)
        except OperantError as error:
            print(error)
            return 1

    return Child(work, output=str(output))


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_others_in_time(tmp_path):
    port = free_port()
    first, second = (meets(port, number, 3 / 60, tmp_path / str(number)) for number in (0, 1))
    assert first.ends() == 1
    assert second.running()  # it still hangs; torchrun would end it now
    second.kill()
    said = (tmp_path / "0").read_text(encoding="utf-8")
    assert "rank 0 of 2 lost another rank, which has ended or has not answered for 0.05 minutes" in said


def test_a_port_in_use_is_a_sentence(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert meets(port, 0, 1, tmp_path / "said").ends() == 1
    said = (tmp_path / "said").read_text(encoding="utf-8")
    assert f"rank 0 did not find the other 1 at 127.0.0.1:{port}" in said and "address already in use" in said.lower()
    assert "--master-port" in said and "Traceback" not in said


# --- whole runs -------------------------------------------------------------------------------------------------------
JUDGE = """
import os, signal
from pathlib import Path

def judge(rollouts):
    here = Path(__file__).parent / "killed"
    steps = Path(os.environ["RUN"]) / "metrics.jsonl"
    done = steps.read_text().count("\\n") if steps.exists() else 0
    if done >= 2 and os.environ.get("RANK") == "1" and not here.exists() and "KILL" in os.environ:
        here.touch()
        os.kill(os.getpid() if os.environ["KILL"] == "rank" else os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(set(r.ids))) for r in rollouts]
"""
OPTIONS = {"steps": 5, "batch": 4, "max-tokens": 5, "probes": 0, "checkpoint-minutes": 0.0, "reward": "judge.py:judge"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model, five tasks, a reward that kills rank 1 once, and the run of one process that nothing kills."""
    path = tmp_path_factory.mktemp("restarts")
    on_disk(path / "model", lm("gpt2", vocab=len(letters()), spread=0.3))
    (path / "tasks.txt").write_text("ab\ncde\nfg\nh\nijk", encoding="utf-8")
    (path / "judge.py").write_text(JUDGE, encoding="utf-8")
    done = started(path, "whole", [sys.executable], KILL=None)
    assert done.wait(120) == 0, done.communicate()
    return path


def started(folder: Path, out: str, launcher: list[str], *more: str, KILL: str | None) -> subprocess.Popen:
    """A run of `operant train` by a launcher, that is resumed if it is there."""
    words = [f"--{name}={value}" for name, value in {"policy": "model", "tasks": "tasks.txt", **OPTIONS}.items()]
    command = [*launcher, "-m", "operant", "train", *words, "--out", out, "--resume-if-there", *more]
    given = ENVIRONMENT | {"RUN": str(folder / out)} | ({"KILL": KILL} if KILL else {})
    return subprocess.Popen(command, cwd=folder, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def same_as_whole(folder: Path, out: str) -> None:
    """The metrics of every step, once each, are those of the run that nothing has killed, to rounding."""
    assert [row["step"] for row in told(folder / out)] == [1, 2, 3, 4, 5]
    for one, other in zip(told(folder / "whole"), told(folder / out), strict=True):
        for name in ("reward/mean", "kl/per_reply", "policy/entropy"):
            assert other[name] == pytest.approx(one[name], rel=2e-3, abs=1e-4), name


@pytest.mark.slow
def test_torchrun_goes_on_after_a_killed_rank(folder):
    (folder / "killed").unlink(missing_ok=True)
    run = started(folder, "ranks", [*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1"], KILL="rank")
    said = run.communicate(timeout=200)[0]
    assert run.returncode == 0, said[-3000:]
    assert (folder / "killed").exists() and "going on after step 2" in (folder / "ranks/log.txt").read_text("utf-8")
    same_as_whole(folder, "ranks")


@pytest.mark.slow
def test_the_ranks_that_are_left_go_on(folder):
    """Two launchers, as of two machines; one of them and its rank are killed, and the other goes on alone."""
    (folder / "killed").unlink(missing_ok=True)
    meet = [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=c10d", "--rdzv-id=test", "--nnodes=1:2"]
    meet += ["--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3", "--local-addr=127.0.0.1"]
    launcher = [*TORCHRUN, *meet, "--nproc-per-node=1", "--max-restarts=3"]
    first = started(folder, "left", launcher, KILL="launcher")
    time.sleep(1)  # the first one keeps the meeting place
    second = started(folder, "left", launcher, KILL="launcher")
    ended = [run.communicate(timeout=200)[0] for run in (first, second)]
    assert sorted([first.returncode, second.returncode]) == [-signal.SIGKILL, 0], ended
    assert "going on after step" in (folder / "left/log.txt").read_text("utf-8")
    same_as_whole(folder, "left")


@pytest.mark.slow
@cases(
    ({"seed": "{RANK}"}, "learner.seed is 0 on rank 0; 1 on rank 1"),
    ({"tasks": "few.txt"}, "1 tasks for 2 ranks: each needs one"),
)
def test_one_rank_says_what_is_wrong_and_all_end(more, expected, folder):
    (folder / "few.txt").write_text("ab", encoding="utf-8")
    start = "import os, runpy, sys; sys.argv = ['operant', *(w.format(**os.environ) for w in sys.argv[1:])]; "
    (folder / "each.py").write_text(f"{start}runpy.run_module('operant', run_name='__main__')", encoding="utf-8")
    given = {"policy": "model", "tasks": "tasks.txt", **OPTIONS, "out": "none"} | more
    words = [f"--{name}={value}" for name, value in given.items()]
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "each.py", "train", *words]
    how = {"cwd": folder, "env": ENVIRONMENT, "capture_output": True, "text": True, "timeout": 100}
    done = subprocess.run(command, **how, check=False)
    assert done.returncode != 0 and done.stderr.count(expected) == 1, done.stderr
    assert not (folder / "none").exists()


@pytest.mark.slow
def test_a_job_has_one_command_for_its_start_and_its_restart(folder):
    """Of a run that is complete, the command says so; options beside it change it, as with --resume."""
    again = started(folder, "whole", [sys.executable], KILL=None)
    assert "whole is finished: 5 of 5 steps" in again.communicate(timeout=100)[0] and again.returncode == 0
    assert sorted(p.name for p in folder.glob("whole*")) == ["whole"]
    assert [json.loads(x)["step"] for x in (folder / "whole/metrics.jsonl").read_text("utf-8").splitlines()][-1] == 5
