"""Tasks: a function that returns texts, rows or tasks. Its arguments are its options."""

from operant.types import Task


def counting(*, upto: int = 40, start: int = 1) -> list[Task]:
    """Prompts that count. Options: --tasks counting --tasks.upto 100"""
    return [Task(f"count/{n}", f"{n}, {n + 1},") for n in range(start, start + upto)]
