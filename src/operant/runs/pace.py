"""How often an observer may do work that takes time, so that it does not slow the run down."""

import time

SHARE = 0.02
"""The largest part of a run's time that an observer may take; a slow observer is called less often."""


class Pace:
    """Limits how often something happens: at most every `least` seconds, and for at most a `SHARE` of the time."""

    def __init__(self, least: float):
        self.least, self._next = least, 0.0

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._next

    def __enter__(self) -> None:
        self._begun = time.monotonic()

    def __exit__(self, *exception: object) -> None:
        now = time.monotonic()
        self._next = now + max(self.least, (now - self._begun) / SHARE)
