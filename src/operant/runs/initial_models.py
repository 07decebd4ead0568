"""The models that a run starts from: a resume needs them beside the checkpoint (`models.start_folder`).

config = pin_names(config)                  # Hub names become `name@commit`, before config.yaml is written
copy_initial_models(config, run)            # copies models in plain folders into the run folder
config = with_copies(config, run, warn)     # on resume: the same models, even if those folders have changed
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from operant.import_by_name import nearest
from operant.models.base import POLICIES
from operant.models.start_folder import MODELS, START, copies, copy_models
from operant.runs.config import Config
from operant.runs.named_parts import is_object
from operant.storage import hub
from operant.types import OperantError

__all__ = ["MODELS", "START", "copy_initial_models", "pin_names", "with_copies"]

_NO_NAMES = ("copy", "none")


def pin_names(config: Config) -> Config:
    """The options with the current commit of each Hub name. Raises: OperantError for a name that cannot be resolved."""
    try:
        return _with(config, {option: hub.pinned(name) for option, name in _named(config).items()})
    except OperantError as error:
        if hint := nearest(str(config.train.policy)[:100], POLICIES.names()):
            raise OperantError(f"{error}{hint}") from error
        raise


def copy_initial_models(config: Config, run: Path) -> None:
    """Copy models in plain folders into `run/start/`, as `copy_models` does."""
    copy_models(_named(config), run)


def with_copies(config: Config, run: Path, warn: Callable[[str], None]) -> Config:
    """The options with the run's copies in place of the original folders, as `copies` finds them."""
    return _with(config, copies(_named(config), run, warn))


def _named(config: Config) -> dict[str, str | Path]:
    """The models that options name, by option."""
    groups = {"": config.train, **config.learner}
    models = {option: getattr(groups.get(_group(option)), option.rpartition(".")[2], None) for option in MODELS}
    names = {
        option: name
        for option, name in models.items()
        if isinstance(name, (str, Path)) and not (option == "policy" and is_object(option, name))
    }
    return {option: name for option, name in names.items() if option == "policy" or name not in _NO_NAMES}


def _group(option: str) -> str:
    return option.rpartition(".")[0]


def _with(config: Config, names: Mapping[str, object]) -> Config:
    """The configuration with other names of models, by option."""
    train = replace(config.train, **{option: name for option, name in names.items() if not _group(option)})
    learner = dict(config.learner)
    for option, name in names.items():
        if group := _group(option):
            learner[group] = replace(learner[group], **{option.rpartition(".")[2]: name})
    return replace(config, train=train, learner=learner)
