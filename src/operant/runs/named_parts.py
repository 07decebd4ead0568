"""The parts of a run that a user names: policy, environment, engine, reward, tasks, form and trackers.

A part is a name with its options beside it (`env: my_worlds:Maze`, `env.size: 4`), or both in one mapping
(`env: {name: my_worlds:Maze, size: 4}`). Its options are the arguments of the class or function that has the name. Of
rewards and trackers there may be several: `{my_rewards:brevity: {weight: 0.5, target: 20}, letters:e: 1}`. From Python
a policy, environment, engine, reward or task source may also be the class, function or object itself.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any, NamedTuple

from operant import rewards
from operant.data.forms import ROW_FORMS, Form
from operant.data.sources import SOURCES, refuse_splits, share
from operant.engines import ENGINES
from operant.envs import ENVS, own_games
from operant.envs.functions import maker
from operant.envs.isolated import FORMS, isolated_maker, without_form
from operant.import_by_name import Table, names_object
from operant.models.base import POLICIES
from operant.options import Factory, arguments, defaults
from operant.runs.trackers.trackers import TRACKERS
from operant.types import Engine, EngineParts, EnvBase, OperantError, of_user, require, shown, with_defaults


class Kind(NamedTuple):
    """A kind of part."""

    what: str
    """The word for one of them in errors."""
    factory: Callable[[Any], Factory | None]
    """From a name, class or function to what makes the part; None: the object is the part, and has no options."""
    members: tuple[str, ...] = ()
    """Methods that the part must have."""
    several: bool = False
    """Whether a mapping without `name` is several parts."""


def _factory(kind: str, value: object, skip: int = 0) -> Factory | None:
    """The factory of a name, class or function; it gets `skip` arguments from the run."""
    thing = found(kind, value) if kind in ("env", "engine", "form") or is_object(kind, value) else value
    return Factory(thing, skip) if inspect.isclass(thing) or inspect.isroutine(thing) else None


def _tracker(value: object) -> Factory | None:
    given = [name for name in value.split(",") if name] if isinstance(value, str) else value
    names = list(given) if isinstance(given, Iterable) and not isinstance(given, Mapping) else []
    return Factory(TRACKERS.find(names[0]), 2) if len(names) == 1 else None


KINDS = {
    "env": Kind("environment", lambda value: _factory("env", value), ("reset", "step")),
    "engine": Kind("engine", lambda value: _factory("engine", value, 1), ("generate", "sync")),
    "reward": Kind("reward", rewards.factory, several=True),
    "tasks": Kind("task source", lambda value: _factory("tasks", value)),
    "form": Kind("row form", lambda value: _factory("form", value, 1)),
    "policy": Kind("policy", lambda value: _factory("policy", value)),
    "trackers": Kind("tracker", _tracker, several=True),
}
"""By option."""

TABLES: dict[str, Table] = {"env": ENVS, "engine": ENGINES, "tasks": SOURCES, "form": ROW_FORMS, "policy": POLICIES}


def is_object(kind: str, value: object) -> bool:
    """Whether the tasks or the policy are a class or function, or the name of one, and no file, folder or Hub name."""
    return names_object(value, TABLES[kind]) or inspect.isclass(value) or inspect.isroutine(value)


def found(kind: str, value: object) -> Any:
    """The class, function or object of a name; anything else is itself."""
    prefix, _, spec = value.partition(":") if isinstance(value, str) else ("", "", "")
    if kind == "env" and prefix in FORMS:
        require(spec.partition(":")[0] not in FORMS, f"env={value}: a world has one form; leave {prefix}: out")
        return isolated_maker(prefix, spec, ENVS.find(spec))
    thing = TABLES[kind].find(value) if isinstance(value, str) else value
    return maker(thing) if kind == "env" else thing


def flattened(options: Mapping[str, object]) -> dict[str, object]:
    """The options with the mapping of each part written as its name and `kind.option`.

    A world of a suite, such as `textarena:GuessTheNumber-v0`, is written as `textarena` and its option.
    """
    flat: dict[str, Any] = {}
    for key, value in options.items():
        kind = KINDS.get(key)
        if kind is None or not isinstance(value, Mapping) or (kind.several and "name" not in value):
            flat[key] = value
            continue
        if inside := [name for name in value if not isinstance(name, str)]:
            raise OperantError(f"{key}: option {shown(inside[0])} has no name: a name is text")
        flat |= {key if name == "name" else f"{key}.{name}": part for name, part in value.items()}
        if twice := [full for name in value if (full := f"{key}.{name}") in options]:
            raise OperantError(f"option {twice[0]} is given twice, in the mapping {key} and beside it: remove one")
    named = str(flat.get("env"))
    suite, _, game = str(without_form(named)).partition(":")
    option = with_defaults(ENVS.find(suite), EnvBase).suite if game and suite in ENVS else None
    if option is None:
        return flat
    if twice := {option, f"env.{option}"} & flat.keys():
        raise OperantError(f"option {min(twice)} is given twice, in env={named} and beside it: remove one")
    return {**flat, "env": named.removesuffix(f":{game}"), f"env.{option}": game}


def options_of(options: Mapping[str, object], kind: str) -> list[str]:
    """The names of the options of the part `kind` among flat options."""
    return [name for name in options if str(name).replace("-", "_").startswith(f"{kind}.")]


def only(options: Mapping[str, object], kind: str) -> dict[str, object]:
    """The part `kind` and its options among flat options."""
    return {name: options[name] for name in (kind, *options_of(options, kind)) if name in options}


def stored_options(kind: str, config: Mapping[str, object]) -> dict[str, object]:
    """The options of a part among the flat options of a run's config.yaml, checked."""
    factory = KINDS[kind].factory(config[kind])
    own = {name.removeprefix(f"{kind}."): config[name] for name in options_of(config, kind)}
    return {} if factory is None else arguments(factory, own, f"{KINDS[kind].what} {shown(config[kind])}")


def replaced(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, list[str]]:
    """The options in `below` of the parts that `above` replaces by others, by kind. A part in another process, such as
    `workers:rooms` for `rooms`, is no other part: it has the same options."""
    given = [kind for kind in KINDS if above.get(kind) is not None]
    others = [kind for kind in given if without_form(above[kind]) != without_form(below.get(kind))]
    return {kind: options for kind in others if (options := options_of(below, kind))}


def groups(named: Mapping[str, object]) -> dict[str, Factory]:
    """The option groups of named parts. Raises: OperantError for an unknown name, or one that cannot be imported."""
    found = {kind: KINDS[kind].factory(value) for kind, value in named.items() if value not in (None, (), [])}
    return {kind: made for kind, made in found.items() if made is not None}


def check_owned(named: Mapping[str, object], options: Mapping[str, object]) -> None:
    """Refuse flat options of a part that is not named, or that has no options, as a file of tasks has none."""
    having = groups(named)
    for kind in [kind for kind in KINDS if kind not in having]:
        what = KINDS[kind].what
        for name in options_of(options, kind):
            if named.get(kind) is None:
                if kind == "tasks":
                    refuse_splits({name[6:]: options[name] for name in options_of(options, kind)})
                more = ", or give one data set of several" if kind == "tasks" else ""
                raise OperantError(f"option {name}: the run names no {what} that has it; set {kind} too{more}")
            several = f", or give one of several its own as {kind}: {{NAME: {{option: value}}}}"
            remedy = f"leave it out{several if KINDS[kind].several else ''}"
            raise OperantError(f"option {name}: {what} {shown(named[kind])} has no options; {remedy}")


def make(kind: str, value: object, options: Mapping[str, object], *given: object) -> Any:
    """The part that a name and its checked options make. given: the arguments that the run itself passes.

    Raises: OperantError if it cannot be made, or lacks a method that the run calls.
    """
    what, factory = KINDS[kind].what, KINDS[kind].factory(value)
    if factory is None:
        part = found(kind, value)
    else:
        with of_user(f"{what} {shown(value)} cannot be made: "):
            part = factory.make(*given, **options)
    if missing := [name for name in KINDS[kind].members if not callable(getattr(part, name, None))]:
        needs = f"it needs the methods {', '.join(KINDS[kind].members)} (docs/extending.md)"
        raise OperantError(f"{what} {shown(value)} is a {type(part).__name__} without {' and '.join(missing)}: {needs}")
    return part


def policy(value: object, options: Mapping[str, object]) -> object:
    """A policy as `load_policy` takes it: what a class or function makes, or the value itself."""
    return make("policy", value, options) if is_object("policy", value) else value


def engine(value: object, options: Mapping[str, object]) -> Callable[[object], Engine]:
    """What makes the engine from the policy. An engine may have a function `check_options`, which is called here.

    Raises: OperantError of that function.
    """
    if (check := EngineParts.of(found("engine", value)).check_options) is not None:
        check(options)
    return lambda policy: make("engine", value, options, policy)


def has_own_weights(engine: object) -> bool:
    """Whether an engine generates with weights of its own, beside a policy that trains; None: the policy itself."""
    return EngineParts.of(found("engine", engine)).own_weights


def source(value: object, options: Mapping[str, object]) -> object:
    """Tasks as `load_tasks` takes them: a named function with its options, or the value itself."""
    if not is_object("tasks", value):
        return value
    rows = found("tasks", value)
    return rows(**options) if inspect.isclass(rows) else _bound(rows, options)


def form(value: object, options: Mapping[str, object]) -> Form | None:
    """The row form of a run with its options, as `load_tasks` takes it.

    Raises: OperantError for an object that is no row form.
    """
    made = None if value is None else found("form", value)
    if made is not None and (inspect.isclass(made) or not callable(made)):
        raise OperantError(f"form={shown(value)} is no function: a form is called with a row (docs/extending.md)")
    return None if made is None else _bound(made, options)


def stored_form(config: Mapping[str, object]) -> Form | None:
    """The row form that flat options name, as those of a run's config.yaml; None if they name none.

    Raises: OperantError for an unknown form or option.
    """
    check_owned({"form": named} if (named := config.get("form")) is not None else {}, only(config, "form"))
    return None if named is None else form(named, stored_options("form", config))


def sources(train: Any, options: Mapping[str, object], env: object) -> tuple[object, object]:
    """What the tasks and the held-out tasks of a run are read from; without `train.tasks`, the environment's own.

    A share of the tasks is read from what the tasks are. options: of the task source.
    Raises: OperantError for an environment without tasks of its own.
    """
    if train.replies is not None:
        return None, source(train.evaluate or None, {})
    if train.tasks is None:
        held_out = own_games(env, "test") if train.evaluate is None else source(train.evaluate or None, {})
        return own_games(env, "train"), held_out
    text = str(train.evaluate or "")
    if re.fullmatch(r"\d+(\.\d+)?", text) and not Path(text).exists():
        raise OperantError(f"evaluate={text}: a number holds out nothing; give a share such as 10%, or a file")
    if share(train.evaluate) is not None:
        return (one := source(train.tasks, options)), one
    return source(train.tasks, options), held_out_source(train.tasks, train.evaluate, options)


def held_out_source(tasks: object, evaluate: object, options: Mapping[str, object]) -> object:
    """What `evaluate` is read from: with the options of the tasks where it is the same source, or its held-out half."""
    name, same = str(evaluate or ""), options if evaluate == tasks else {}
    if name in SOURCES and name == f"{tasks}/held-out":  # the same kind of tasks, with other seeds
        usual, takes = (defaults(Factory(found("tasks", one))) for one in (tasks, name))
        same = {n: x for n, x in options.items() if n in takes and n not in ("count", "seed") and x != usual[n]}
    return source(evaluate or None, same)


def _bound(function: Callable[..., Any], options: Mapping[str, object]) -> Callable[..., Any]:
    return update_wrapper(partial(function, **options), function) if options else function
