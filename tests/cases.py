"""Tables of what a test is called with."""

import inspect

import pytest


def cases(*rows, **more):
    """Parametrise a test: each row gives its first parameters, in their order; a tuple is a row of several."""

    def parametrised(test):
        first = rows[0].values if isinstance(rows[0], type(pytest.param())) else rows[0]
        names = list(inspect.signature(test).parameters)
        named = names[: len(first)] if isinstance(first, tuple) else names[0]
        return pytest.mark.parametrize(named, rows, **more)(test)

    return parametrised


def slow(*values, **more):
    """A row of a table that is tried with the slow tests alone."""
    return pytest.param(*values, marks=pytest.mark.slow, **more)


def slow_but(daily, rows):
    """The rows, of which all but the `daily` ones are slow."""
    return [row if row in daily else slow(*(row if isinstance(row, tuple) else (row,))) for row in rows]
