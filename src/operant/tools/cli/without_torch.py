"""Answers that need the declarations of options alone, in a tenth of the time that importing torch takes."""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import CO_OPTIMIZED
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

SLOW = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "huggingface_hub", "pyarrow", "filelock")
"""Packages that take long to import, and that the modules of options and methods use in their functions only."""
OF_TABLES = ("numpy", "pyarrow")
"""Those of them that read the tables of runs."""

P = ParamSpec("P")
T = TypeVar("T")


def without_torch(compute: Callable[P, T], real: Sequence[str] = ()) -> Callable[P, T]:
    """A function that imports what it needs, with empty modules in the place of the slow packages but `real`.

    Where that does not do, as for a user's module that uses torch when it is imported, or for a function that uses it,
    or where torch is there already, it has the packages themselves. Nothing that was imported beside the empty modules
    stays.
    """
    slow = tuple(name for name in SLOW if name not in real)

    @wraps(compute)
    def computed(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch" in sys.modules:
            return compute(*args, **kwargs)
        before, finder = {*sys.modules}, _Finder(slow)
        sys.meta_path.insert(0, finder)
        try:
            return compute(*args, **kwargs)
        except Exception:  # a mistake of the user's is raised once more below, in its own words
            pass
        finally:
            sys.meta_path.remove(finder)
            for name in {*sys.modules} - before:
                if name.partition(".")[0] in ("operant", *slow):
                    del sys.modules[name]
                    package, _, module = name.rpartition(".")
                    vars(sys.modules[package]).pop(module, None) if package in sys.modules else None
        return compute(*args, **kwargs)

    return computed


class _AnyClass(type):
    """The metaclass of what an empty module has: a class to inherit from, to annotate with, and to decorate with."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyClass(name, (_Any,), {})

    def __call__(cls, *arguments: object, **options: object) -> Any:
        if cls.__module__ != __name__:  # a class of the package, which inherits from one
            return super().__call__(*arguments, **options)
        if arguments and not callable(arguments[0]) and sys._getframe(1).f_code.co_flags & CO_OPTIMIZED:
            raise TypeError(f"a function uses {cls.__name__}, which stands in for the real one")
        return arguments[0] if arguments and callable(arguments[0]) else cls


class _Any(metaclass=_AnyClass):
    def __class_getitem__(cls, _: object) -> object:
        return cls

    def __init_subclass__(cls, **_: object) -> None:
        pass


class _Empty(ModuleType):
    """A module that has whatever name a module of the package asks for."""

    __path__: list[str] = []  # noqa: RUF012 - as of every package
    __file__ = __file__

    def __getattr__(self, name: str) -> object:
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals["__name__"].startswith("importlib"):
            frame = frame.f_back
        if name.startswith("__") or frame.f_globals["__name__"].partition(".")[0] != "operant":
            raise AttributeError(f"module {self.__name__!r} stands in for the real one, which has {name!r}")
        made = _AnyClass(name, (_Any,), {})
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    def __init__(self, slow: Sequence[str]):
        self.slow = slow

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.slow else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass
