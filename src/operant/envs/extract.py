"""Choosing a sentence: the options are the sentences in the target of the task, and one of them is the reply."""

from collections.abc import Mapping

from operant.types import OperantError, Step, Task, shown


class Extract:
    """An `Env` of one turn whose reply is one of the sentences in `Task.target`, such as the row form `extract` makes.

    It pays nothing: a reward such as `rouge` judges the sentence. Options: --env extract
    """

    pays = False
    turns = 1

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step]:
        """Raises: OperantError for a task whose target is no list of sentences."""
        return {slot: Step(fresh=True, options=sentences_of(task)) for slot, task in tasks.items()}

    def step(self, replies: Mapping[int, str]) -> dict[int, Step]:
        return {slot: Step(terminated=True) for slot in replies}


def sentences_of(task: Task) -> list[str]:
    """The sentences to choose among. Raises: OperantError for a target that is no list of texts."""
    given = task.target
    if isinstance(given, (list, tuple)) and given and all(isinstance(one, str) and one.strip() for one in given):
        return list(given)
    raise OperantError(
        f"world 'extract': the target of task {task.id!r} is {shown(given)}; it must be a list of sentences, as "
        "form=extract makes of a row, or data.target_field=sentences of a row that has them"
    )
