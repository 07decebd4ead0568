"""A disk that is watched, and that refuses: it stands at `operant.storage.atomic_io.seam` in tests."""

import errno
from contextlib import contextmanager

from operant.storage import atomic_io

FULL = OSError(errno.ENOSPC, "No space left on device")
REMOVES = ("remove", "remove_tree")
"""What a full disk still does."""


class Box:
    """A part whose state is whatever it is given."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def quiet(_):
    pass


@contextmanager
def largest_file(size):
    """A disk that takes no file larger than `size` bytes."""
    import resource

    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@contextmanager
def on(disk):
    """What is changed on disk passes `disk(when, operation, path)`."""
    atomic_io.seam, old = disk, atomic_io.seam
    try:
        yield
    finally:
        atomic_io.seam = old


class Watched:
    """Keeps what passes, and raises `trouble` at the one of number `at`; `stays`: at all that write after it, too."""

    def __init__(self, at=None, trouble=None, *, stays=False):
        self.at, self.trouble, self.stays = at, trouble, stays
        self.seen = []
        """(before | after, operation, path)"""

    def __call__(self, when, operation, path):
        self.seen.append((when, operation, path))
        number = len(self.seen) - 1
        if self.trouble and (number == self.at or (self.stays and number > self.at and operation not in REMOVES)):
            raise self.trouble

    def done(self):
        return [(operation, path.name) for when, operation, path in self.seen if when == "after"]


def named(folder):
    return sorted(p.name for p in folder.iterdir())
