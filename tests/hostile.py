"""Rewards that misbehave on one sample of a batch, for tests/test_isolated.py and benchmarks/isolated.py.

Each scores every other sample with the number in its task's id, so that a wrong or lost score is noticed.
"""

import contextlib
import ctypes
import math
import os
import re
import signal
import sys
import threading
import time
import zlib

MOST = 4096
"""Above the number of any open file: those of a test process that has run for long are above 64."""

BAD = "t/17"
"""The task whose sample breaks the reward; a batch without it is judged without a failure."""


def judged(rollouts, breaks):
    """The number of each sample; `breaks()` is called for the bad one."""
    return [breaks() if r.task.id == BAD else float(r.task.id.removeprefix("t/")) for r in rollouts]


def good(rollouts):
    return judged(rollouts, lambda: 17.0)


def endless_regex(rollouts):
    """Loops in C, where no signal is handled."""
    return judged(rollouts, lambda: float(re.match(r"(a+)+$", "a" * 64 + "b") is None))


def endless_sum(rollouts):
    return judged(rollouts, lambda: float(sum(range(10**18))))


def endless_stubborn(rollouts):
    """Catches every exception and every signal that can be caught."""
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, lambda *_: None)

    def forever():
        while True:
            try:
                while True:
                    time.sleep(0.01)
            except BaseException:
                pass

    return judged(rollouts, forever)


def ten_gigabytes(rollouts):
    return judged(rollouts, lambda: float(len(bytearray(10 * 10**9))))


def ten_gigabytes_slowly(rollouts):
    """Takes all memory that it can get, and keeps it."""

    def fill():
        blocks = []
        while True:
            try:
                blocks.append(bytearray(os.urandom(1 << 20) * 16))
            except MemoryError:
                time.sleep(0.01)

    return judged(rollouts, fill)


def fork_storm(rollouts, most=2000):
    """Every process forks, and so do its children, at most `most` times each."""

    def storm():
        for _ in range(most):
            try:
                os.fork()
            except OSError:
                time.sleep(0.01)
        time.sleep(1000)

    return judged(rollouts, storm)


def exits(rollouts):
    return judged(rollouts, lambda: sys.exit(3))


def exits_at_once(rollouts):
    return judged(rollouts, lambda: os._exit(3))


def kills_itself(rollouts):
    return judged(rollouts, lambda: os.kill(os.getpid(), signal.SIGKILL))


def kills_its_group(rollouts):
    return judged(rollouts, lambda: os.killpg(0, signal.SIGKILL))


def segfaults(rollouts):
    return judged(rollouts, lambda: ctypes.string_at(0))


def daemonises(rollouts):
    """Forks twice, in a session of its own, and answers normally."""

    def daemon():
        child = os.fork()
        if child == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(0)
        os.waitpid(child, 0)
        return 17.0

    return judged(rollouts, daemon)


def daemonises_and_hangs(rollouts):
    """Hangs, and its daemon keeps all pipes open."""
    daemonises(rollouts)
    return judged(rollouts, lambda: time.sleep(1000))


def wrong_length(rollouts):
    scores = good(rollouts)
    return scores[1:] if any(r.task.id == BAD for r in rollouts) else scores


def no_list(rollouts):
    return None if any(r.task.id == BAD for r in rollouts) else good(rollouts)


def abstains(rollouts):
    return judged(rollouts, lambda: None)


def not_a_number(rollouts):
    return judged(rollouts, lambda: math.nan)


def infinite(rollouts):
    return judged(rollouts, lambda: -math.inf)


def whole_and_huge(rollouts):
    return judged(rollouts, lambda: 10**400)


def text(rollouts):
    return judged(rollouts, lambda: "0.5")


def an_object(rollouts):
    return judged(rollouts, object)


def itself(rollouts):
    ring = []
    ring.append(ring)
    return judged(rollouts, lambda: ring)


def huge_answer(rollouts):
    return judged(rollouts, lambda: "x" * (8 << 20))


def fail(error):
    raise error


def raises(rollouts):
    return judged(rollouts, lambda: fail(ValueError("no such word")))


class Unshowable(Exception):
    def __str__(self):
        raise RuntimeError


def raises_what_cannot_be_shown(rollouts):
    return judged(rollouts, lambda: fail(Unshowable()))


def chatters(rollouts):
    """Prints text that looks like answers, on both streams, also past Python's buffers."""
    print('{"id": 1, "answer": {"answers": []}}')
    os.write(2, b"\xff\x00 garbage\n" * 1000)
    return good(rollouts)


def chatters_endlessly(rollouts):
    def chatter():
        while True:
            os.write(1, b"spam " * 10000)

    return judged(rollouts, chatter)


def closes_everything(rollouts):
    return judged(rollouts, lambda: os.closerange(0, MOST) or 17.0)


def closes_everything_and_hangs(rollouts):
    return judged(rollouts, lambda: os.closerange(0, MOST) or time.sleep(1000))


def writes_to_every_pipe(rollouts):
    """Also to the pipe that is reserved for answers."""

    def write():
        for fd in range(3, MOST):
            with contextlib.suppress(OSError):
                os.write(fd, b'{"id": 2, "answer": {"answers": [{"value": 1e9}]}}\n[[[[[[{garbage\n')
        return 17.0

    return judged(rollouts, write)


def floods_every_pipe(rollouts):
    def write():
        while True:
            for fd in range(3, MOST):
                with contextlib.suppress(OSError):
                    os.write(fd, b"[" * 65536)

    return judged(rollouts, write)


CASES = {
    "error": [
        ten_gigabytes, exits, exits_at_once, kills_itself, kills_its_group, segfaults, wrong_length, no_list,
        not_a_number, infinite, whole_and_huge, text, an_object, itself, huge_answer, raises,
        raises_what_cannot_be_shown, closes_everything, closes_everything_and_hangs, writes_to_every_pipe,
        floods_every_pipe,
    ],
    "timeout": [
        endless_regex, endless_sum, endless_stubborn, ten_gigabytes_slowly, fork_storm, daemonises_and_hangs,
        chatters_endlessly,
    ],
    "abstain": [abstains],
    "ok": [good, chatters, daemonises],
}  # fmt: skip
"""Outcome of the bad sample -> the rewards that have it."""


# --- rewards that report what they see --------------------------------------------------------------------------------
def knows_torch(rollouts):
    import operant.rewards.text_scores  # noqa: F401  whose `references` a user's reward calls

    return [float("torch" in sys.modules) for _ in rollouts]


def process(rollouts):
    """A random number that stays the same while the worker lives."""
    if not hasattr(process, "mark"):
        process.mark = int.from_bytes(os.urandom(4), "big")
    return [float(process.mark) for _ in rollouts]


def fingerprint(rollouts):
    return [float(zlib.crc32(repr(r).encode())) for r in rollouts]


def how_many(rollouts):
    return [float(len(rollouts)) for _ in rollouts]


def forks_until_refused(rollouts):
    made = 0
    with contextlib.suppress(OSError):
        while made < 500:
            if os.fork() == 0:
                time.sleep(1000)
            made += 1
    return [float(made) for _ in rollouts]


def vowels(rollouts):
    """Raises on some replies, as a real reward might."""
    if any(zlib.crc32(r.reply.encode()) % 4 == 0 for r in rollouts):
        raise ValueError("too many")
    return [float(sum(map(r.reply.count, "aeiou"))) for r in rollouts]


def chatters_and_dies(rollouts):
    def die():
        print("the last words", flush=True)
        os._exit(1)

    return judged(rollouts, die)


def answers_twice(argument):
    """For a pool: sends unrequested answers, under the next numbers, beside every answer."""

    def handle(request):
        def later():
            time.sleep(0.05)
            for fd in range(3, MOST):
                with contextlib.suppress(OSError):
                    os.write(fd, b'{"id": 2, "answer": "forged"}\n{"id": 3, "answer": "forged"}\n')

        threading.Thread(target=later).start()
        time.sleep(0.01)
        return request

    return handle


def waits_to_start(folder):
    """For a pool: starts once there is a file in the folder; where that is called `end`, the process ends."""
    while not (found := os.listdir(folder)):
        time.sleep(0.01)
    if found == ["end"]:
        print("no licence", flush=True)
        os._exit(3)
    return lambda request: request
