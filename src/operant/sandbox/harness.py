"""What runs inside the sandbox: three processes, one of which runs the program.

checker      holds the tests, judges, and writes a frame for each test to the run: no other process has that descriptor;
             it is behind a filter of system calls, too
  nursery    was forked before the tests were read; forks a program whenever the checker asks for one
    program  runs the source, limited and behind a filter of system calls, with one socket to the checker

So the tests and what they expect are never in the memory of a program, and its answers are plain data. A test is Python
code in which the program's names are stand-ins: a call sends plain data to the program and returns plain data of exact
types, and no comparison of the program is asked about a value that the test holds.

`jail.py` passes this file to a bare interpreter, once for each program. It imports little of the standard library, and
nothing else.
"""

import _ctypes  # ctypes itself takes a quarter of the time of a program
import _operator
import _signal
import atexit
import builtins
import os
import resource
import select
import sys
import time
from _collections import OrderedDict, defaultdict, deque
from _json import encode_basestring_ascii, make_encoder, make_scanner  # json itself imports re, which takes longer
from _socket import AF_UNIX, SCM_RIGHTS, SHUT_WR, SOCK_STREAM, SOL_SOCKET, socket, socketpair
from _thread import RLock

TYPE_CHECKING = False
if TYPE_CHECKING:  # it takes longer to import than all else
    from typing import Any

take = globals().get("take", bytes)
"""The next bytes that the run has given: `jail.py` defines it, where it starts this file."""
PASSED, FAILED, CRASHED, UNCOMPILED = "passed", "failed test", "runtime error", "compile error"
FILE, TEST = "<program>", "<test>"
MESSAGE = "message of the program"
"""The attribute that an exception has in the checker if the program has raised it."""
MOST = 8 << 20
"""Bytes of one answer, and of what a program prints."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
KILL = b"k"
"""What the checker writes to have its program ended."""
ONLY_AST = 0x400
MODULES = frozenset(
    "bisect cmath collections copy datetime decimal fractions functools heapq itertools json math operator random re "
    "statistics string sys typing".split()
)
"""What a test may name without importing it: many published ones rely on the program's imports. It looks into any."""
STANDARD = {"fractions": {"Fraction"}, "decimal": {"Decimal"}, "uuid": {"UUID"}, "re": {"Pattern"}}
STANDARD["datetime"] = {"date", "datetime", "time", "timedelta", "timezone"}
"""Classes whose values travel as such, beside the plain ones."""
LENT = {"_io": ("StringIO", "BytesIO"), "types": ("SimpleNamespace",), "unittest.mock": ("Mock", "MagicMock")}
"""Classes of the standard library that a program may look into as it may into the test's own."""
MOCKED = ("attach_mock", "configure_mock", "reset_mock")
"""Methods of a mock that would change what a test asserts of it."""
RECORDED = ("called", "call_count", "call_args", "call_args_list", "mock_calls", "method_calls")
"""What a program may read of a mock, and not set."""
MADE_OF = {"UUID": lambda value: (str(value),), "Pattern": lambda value: (value.pattern, value.flags)}
"""What makes a value of these again; the others say it themselves."""


class Scanner:
    strict = True
    object_hook = object_pairs_hook = None
    parse_float, parse_int = float, int
    parse_constant = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}.__getitem__


scan = make_scanner(Scanner)
encoder = make_encoder(None, None, encode_basestring_ascii, None, ":", ",", False, False, True)


def frame(data: object) -> bytes:
    text = "".join(encoder(data, 0)).encode()
    return len(text).to_bytes(4, "big") + text


# --- values ---------------------------------------------------------------------------------------------------------

SEQUENCES = {"t": tuple, "f": frozenset}
SIMPLE = {"i": lambda text: int(text, 16), "b": lambda text: bytes(text, "latin-1"), "c": complex}
SHARED = {"l": list, "s": set, "q": deque, "B": bytearray, "o": OrderedDict, "D": defaultdict, "C": dict, "d": dict}
"""What can be changed, by the letter that it travels behind, a class before its own bases; C is a Counter."""
CONTAINERS = (list, set, deque, bytearray, dict)
FACTORY: "Any" = defaultdict.default_factory
TAGS = {kind: tag for tag, kind in (SEQUENCES | SHARED).items()}
VIEWS = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}
AS_PLAIN = {str: str.__str__, int: int.__pos__, float: float.__pos__, tuple: lambda value: tuple(tuple.__iter__(value))}
"""How a value of a subclass becomes plain where the class asks a method of the subclass."""
FIXED = (str, int, float, tuple, bytes, frozenset)
"""A value of a class that is built on one of these is its plain value, and asks for other attributes by its number."""
PLAIN = (str, int, float, list, tuple, set, frozenset, dict, bytes, bytearray, deque, complex)

ERRORS = [kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, BaseException)]
TYPES = {kind.__name__: kind for kind in (*PLAIN, *ERRORS, *SHARED.values(), bool, range, type(None), object)}
"""What a value may be besides: a builtin class, by name. No function: a test might call what a program returns."""
FUNCTION, BOUND, GENERATOR = type(frame), type(classmethod(frame).__get__(object)), type(_ for _ in ())
try:
    raise ValueError
except ValueError as error:
    TRACEBACK = type(error.__traceback__)

ALONE = (
    "bool len str repr int float complex index next getitem setitem delitem enter exit iter reversed hash format neg "
    "pos abs invert round trunc floor ceil contains aenter aexit aiter anext await call copy deepcopy delattr dir "
    "instancecheck get set delete set_name missing"
).split()
TEXT = "str repr format iter getitem len".split()
"""What a sum or a product with a value of the test's still gives."""
ORDER = "eq ne lt le gt ge".split()
PAIRS = "add sub mul truediv floordiv mod pow and or xor matmul lshift rshift".split()
SPECIAL = {f"__{start}{name}__" for start in ("", "i", "r") for name in PAIRS} | {f"__{n}__" for n in [*ALONE, *ORDER]}
READ = (
    "abstractmethods annotations code dataclass_fields defaults dict doc kwdefaults match_args members qualname "
    "signature wrapped"
).split()
"""What a test may read between two underscores on both sides. Other such names are of protocols of an interpreter."""
FIELDS = "__dataclass_fields__"
UNSHOWN = "what a test holds is not shown to operators of the program: compare plain data, or call a method by its name"


class ProgramError(Exception):
    """An exception of the program that has no builtin class."""


class Wide(type):
    """Of classes that a test gets for what would catch its own assertions: they equal it, but catch nothing."""

    def __eq__(cls, other) -> bool:  # not where a test may ask for the class of what it has raised itself
        return other is cls or (other is TYPES[cls.__name__] and other is not AssertionError and not sys.exc_info()[0])

    __hash__ = type.__hash__


SHOWN = TYPES | {
    name: Wide(name, (ProgramError,), {"__module__": "builtins"})
    for name in ("AssertionError", "Exception", "BaseException")
}
"""The classes of `TYPES` as a test gets them of a program."""


class Ended(BaseException):
    """The program is no more. Not an Exception: a test must not catch it."""

    def __init__(self, outcome: str, message: str):
        self.outcome, self.message = outcome, message


class Peer:
    """One end of the socket between checker and program. Both may ask and answer, even in the midst of an answer.

    Values travel as JSON: plain scalars as such, anything else as a list behind a tag. What is not plain is kept by its
    owner under a number, and is a stand-in at the other end, whose class stands in for its class.

    What can be changed, such as a list, is at both ends under one number for as long as both hold it: before an end
    speaks, it tells what has changed there.
    """

    def __init__(self, read, write, trusted: bool):
        self.read, self.write = read, write
        self.trusted = trusted
        """Whether the other end may do with kept objects what it likes: the checker may, the program may not."""
        self.kept: dict = {}
        self.numbers: dict[int, int] = {}
        self.stand_ins: dict = {}
        """By number, so that an object is itself however often it comes."""
        self.shared: dict[int, list] = {}
        """What can be changed and what was in it when both ends last spoke of it, by number."""
        self.share: dict[int, int] = {}
        """The number of what is shared, by its id."""
        self.gone: list = []
        """Numbers that the other end no longer holds."""
        self.count = int(trusted)
        self.turn = RLock()
        """A thread at a time may ask."""
        self.told: dict[int, list] = {}
        """Numbers of objects that the program has made of an operand of the test's, and what plain data they give."""
        self.last: Any = ""
        self.trusting = False
        """Whether the program has been asked how two of its own objects compare, what they are together, or for the
        answer of a method that a text has."""
        self.failed: Any = None
        """What a function of the test's has asserted in vain, when the program called it."""
        self.expects = False
        """Whether this test expects an assertion to fail."""
        self.unshown = self.shown = False
        """Whether an object of the program's was compared with a value of the test's, and whether it was told one."""
        self.asserts: Any = lambda frame: False
        """Whether the `with` that this frame of a test is about to leave asserts something."""
        self.stops = True
        """Whether the other end's functions may raise StopIteration, which ends the loops of whoever calls them."""
        self.passed: set = set()
        """Numbers of classes that the other end may call. The class of a value goes with it, only to be looked at."""
        self.loop = None
        self.printed: list = []
        """The name of a stream and a text, of all that a program has printed since its last message."""

    def pack(self, value):
        kind = type(value)
        if value is None or kind is bool or kind is str or kind is float:
            return value
        if kind is TRACEBACK:  # which only an interpreter's own can stand in for
            return None
        if kind is int:
            return value if -(1 << 62) < value < 1 << 62 else ["i", hex(value)]
        if kind in TAGS:
            return self.container(TAGS[kind], value)
        if kind.__name__ == "coroutine" and value.cr_code is waiting.__code__ and value.cr_frame:
            value = value.cr_frame.f_locals["one"]
        if (number := number_of(value)) is not None:
            return ["yours", number]
        if kind is bytes:
            return ["b", value.decode("latin-1")]
        if kind is complex:
            return ["c", value.real, value.imag]
        if kind is range or kind is slice:
            return ["r" if kind is range else "slice", *map(self.pack, (value.start, value.stop, value.step))]
        if kind in VIEWS:
            return ["view", VIEWS[kind], self.pack(dict(value.mapping))]
        if isinstance(value, type):
            if TYPES.get(value.__name__) is value or type(value) is Wide:
                return ["type", value.__name__]
            found = self.described(value)
            self.passed.add(found[1])
            return found
        if kind.__name__ in STANDARD.get(kind.__module__, ()):
            parts = MADE_OF[kind.__name__](value) if kind.__name__ in MADE_OF else value.__reduce__()[1]
            return ["standard", kind.__module__, kind.__name__, *map(self.pack, parts)]
        if isinstance(value, BaseException):
            if TYPES.get(kind.__name__) is kind:
                about = [["type", kind.__name__], -1]
            else:
                about = [self.described(kind), self.keep(value)]
            return ["error", *about, str(value)[:1000], *map(self.pack, value.args)]
        for tag, base in SHARED.items():
            if isinstance(value, base) and (tag != "C" or is_counter(kind)):
                plain = self.container(tag, value)
                exact = not self.trusted or kind.__module__ == "collections"
                return plain if exact else ["own", self.keep(value), self.described(kind), plain]
        for base in FIXED:
            if isinstance(value, base):
                return ["fixed", self.keep(value), self.described(kind), self.pack(AS_PLAIN.get(base, base)(value))]
        if isinstance(value, complex):
            return self.pack(complex(value))
        name = getattr(value, "__name__", None)
        about = [self.keep(value), None if kind is FUNCTION else self.described(kind), name and str(name)]
        return ["function" if kind is FUNCTION else "coroutine" if kind.__name__ == "coroutine" else "kept", *about]

    def container(self, tag: str, value) -> list:
        """A container behind its letter. If both ends hold it, the number is enough."""
        if tag in SEQUENCES:
            return [tag, *map(self.pack, value)]
        self.forget()
        if (number := self.share.get(id(value))) is not None:
            return [tag, number]
        self.count += 2
        self.note(self.count, value)
        return [tag, self.count, [*map(self.pack, inside(value))]]

    def note(self, number: int, value) -> None:
        self.shared[number], self.share[id(value)] = [value, inside(value)], number

    def forget(self) -> None:
        """Share no longer what the other end does not hold."""
        for number in self.gone:
            if number in self.shared:
                del self.share[id(self.shared.pop(number)[0])]
        self.gone = []

    def news(self) -> list:
        """A message with what has changed here, and what is held no more; none if there is nothing."""
        self.forget()
        changed, dropped = [], []
        for number, entry in list(self.shared.items()):
            before = entry[1]
            if differs(*entry):
                entry[1] = inside(entry[0])
                changed.append([letter(entry[0]), number, [*map(self.pack, entry[1])]])
            if sys.getrefcount(entry[0]) == 2:  # that of the entry, and of the question
                dropped.append(number)
                del self.share[id(self.shared.pop(number)[0])], entry[:], before
        return [["news", changed, dropped]] if changed or dropped else []

    def hear(self, changed: list, dropped: list) -> None:
        for packed in changed:
            self.unpack(packed)
        self.gone += dropped

    def received(self, tag: str, number: int, *content, kind: "Any" = None):
        """What has this number at both ends, with that content if it has one.

        kind: the class that stands in for its own, which is built on that of the letter.
        """
        if number not in self.shared:
            plain = __import__("collections").Counter if tag == "C" else SHARED[tag]
            own = isinstance(kind, RemoteClass) and issubclass(kind, SHARED[tag])
            self.note(number, SHARED[tag].__new__(kind) if own else plain())
        value = self.shared[number][0]
        if not isinstance(value, SHARED[tag]):
            raise TypeError("a container is of another class")
        if content:
            fill(value, list(map(self.unpack, content[0])))
            self.shared[number][1] = inside(value)
        return value

    def keep(self, value) -> int:
        number = self.numbers.setdefault(id(value), len(self.kept))
        self.kept[number] = value
        return number

    def described(self, kind: type) -> list:
        """A class: its number, names, bases, and the special methods that it has itself."""
        if (number := number_of(kind)) is not None:
            return ["yours", number]
        bases = [
            ["type", base.__name__] if TYPES.get(base.__name__) is base else self.described(base)
            for base in kind.__bases__
        ]
        special = [name for name in vars(kind) if name in SPECIAL and vars(kind)[name] is not None]
        if issubclass(kind, CONTAINERS):
            special += [name for name in vars(kind) if name[0] != "_" and hasattr(kind.__base__, name)]
        return ["class", self.keep(kind), kind.__name__, kind.__qualname__, kind.__module__, bases, special]

    def unpack(self, data) -> "Any":
        if not isinstance(data, list):
            return data
        tag, *rest = data
        if tag in SHARED:
            return self.received(tag, *rest)
        if tag in SEQUENCES:
            return SEQUENCES[tag](map(self.unpack, rest))
        if tag in SIMPLE:
            return SIMPLE[tag](*rest)
        if tag == "r" or tag == "slice":
            return (range if tag == "r" else slice)(*map(self.unpack, rest))
        if tag == "view":
            return getattr(self.unpack(rest[1]), rest[0] if rest[0] in VIEWS.values() else "")()
        if tag == "standard" and rest[1] in STANDARD[rest[0]]:
            make = "compile" if rest[1] == "Pattern" else rest[1]
            return getattr(__import__(rest[0]), make)(*map(self.unpack, rest[2:]))
        if tag == "type":
            return (TYPES if self.trusted else SHOWN)[rest[0]]
        if tag == "yours":
            return self.kept[rest[0]]
        if tag == "class":
            return self.class_of(*rest)
        if tag == "error":
            return self.exception(*rest)
        if tag == "own":
            number, kind, (letter, *about) = rest
            made = self.received(letter, *about, kind=self.unpack(kind))
            return self.numbered(made, number) if isinstance(type(made), RemoteClass) else made
        number, kind, about = rest
        if number not in self.stand_ins:
            self.stand_ins[number] = self.stand_in(tag, number, self.unpack(kind), about)
        found = self.stand_ins[number]
        return waiting(found) if tag == "coroutine" else found

    def stand_in(self, tag: str, number: int, kind: type, about):
        """An object that stands in for one of the other end's."""
        if tag == "fixed":
            plain = self.unpack(about)
            if type(plain) not in FIXED or not isinstance(kind, RemoteClass) or not issubclass(kind, type(plain)):
                return plain
            return self.numbered(type(plain).__new__(kind, plain), number)
        kind = Callee if tag == "function" else kind
        if not isinstance(kind, RemoteClass) or not issubclass(kind, Remote):
            raise TypeError("no class of stand-ins")
        made = self.numbered(object.__new__(kind), number)
        object.__setattr__(made, "__called__", about)
        return made

    def numbered(self, made, number: int):
        object.__setattr__(made, "__peer__", self)
        object.__setattr__(made, "__number__", number)
        return made

    def class_of(self, number: int, name: str, full: str, module: str, bases: list, special: list) -> type:
        """The stand-in of a class. Its bases stand in for those of the class, or are the builtin ones."""
        if number not in self.stand_ins:
            found = [Remote if base is object else base for base in map(self.base, bases)]
            if any(base not in TYPES.values() and not isinstance(base, RemoteClass) for base in found):
                raise TypeError(f"{name} has a base that is no class")
            if any(issubclass(base, BaseException) for base in found):
                found = [base for base in found if issubclass(base, Exception)] or [ProgramError]
                if not self.trusted and module.split(".")[0] in sys.stdlib_module_names:
                    known = getattr(sys.modules.get(module), name, None)
                    # It may not be imported here, or not yet. Those of unittest skip the rest of a test: no failure.
                    if not isinstance(known, type) or not issubclass(known, Exception) or module.startswith("unittest"):
                        return built(name, found, FIXED_METHODS | {"__peer_of__": (self, number)})
                    found = [known]  # such as JSONDecodeError: a test catches it by the name that it imports
            methods = {key: operator(key) for key in special if key in SPECIAL and key not in ROOTED}
            if any(issubclass(base, CONTAINERS) for base in found):
                methods = {key: method for key, method in methods.items() if key.strip("_") not in (*ORDER, "hash")}
                own = {key: property(lambda self, key=key: look(self, key)) for key in special if key[0] != "_"}
                methods |= own | CONTAINER_METHODS
            elif any(issubclass(base, (BaseException, *FIXED)) for base in found):
                methods = {key: method for key, method in methods.items() if key in TEXTS} | FIXED_METHODS
            else:
                methods["__slots__"] = ()  # its `__dict__` is at the other end
                if "__len__" in methods:  # else Python asks that, which may be told what `bool` is not
                    methods.setdefault("__bool__", operator("__bool__"))
            if (module, name) == ("builtins", "generator"):
                methods["__class__"] = property(lambda self: GENERATOR)
            methods |= {"__qualname__": full, "__module__": module, "__peer_of__": (self, number)}
            self.stand_ins[number] = built(name, found, methods)
        return self.stand_ins[number]

    def base(self, packed: list) -> type:
        """A class that one of the other end's is built on, or that an exception has, whatever a test catches."""
        return TYPES[packed[1]] if packed[0] == "type" else self.unpack(packed)

    def exception(self, kind, number: int, text: str, *packed):
        """An exception of the other end's: of a builtin class, or of a stand-in's."""
        if number in self.stand_ins:
            return self.stand_ins[number]
        kind, args = self.base(kind), [self.unpack(part) for part in packed]
        if (not isinstance(kind, RemoteClass) and kind not in ERRORS) or not issubclass(kind, BaseException):
            raise TypeError("no class of exceptions")
        if not isinstance(kind, RemoteClass):
            try:
                return kind(*args)
            except Exception:
                return ProgramError(text)
        error = self.stand_ins[number] = kind.__new__(kind, *args)  # pyright: ignore[reportCallIssue]
        error.args = tuple(args)
        return self.numbered(error, number)

    def ask(self, *request):
        """The other end's answer. Raises: its exception, as one of the same name."""
        with self.turn:
            self.tell(request)
            while True:
                kind, *rest = self.read()
                if kind == "value":
                    return rest
                if kind == "error":
                    error = self.raised(*rest)
                    if isinstance(error, StopIteration) and not self.stops and request[2:3] != ("__next__",):
                        raise marked(RuntimeError("raised StopIteration"), "RuntimeError", "raised StopIteration", None)
                    raise error
                if kind == "printed":
                    stream, text = rest
                    print(text, end="", file=sys.stderr if stream == "stderr" else sys.stdout)
                elif kind == "news":
                    self.hear(*rest)
                else:
                    self.tell(self.answer(kind, rest))

    def tell(self, message) -> None:
        self.write(*self.news(), message)

    def raised(self, packed: list, name: str, text: str, line: int | None, *behind) -> BaseException:
        try:
            error = self.unpack(packed)
            if behind and isinstance(error, Exception):
                error.__context__ = self.unpack(behind[1])
                if behind[0]:
                    error.__cause__ = self.unpack(behind[0])
        except Exception:
            error = None
        return marked(error if isinstance(error, Exception) else ProgramError(text), str(name), str(text), line)

    def answer(self, kind: str, rest: list) -> list:
        try:
            return ["value", *getattr(self, "answer_" + kind)(*rest)]
        except Ended:
            raise
        except BaseException as error:
            name, line = type(error).__name__, line_of(error, FILE)
            if not (self.trusted or self.expects) and isinstance(error, AssertionError) and MESSAGE not in vars(error):
                self.failed = error  # of a test's own function, whatever the program does with it
            try:
                behind = [error.__cause__, error.__context__] if self.trusted else []
                return ["error", self.pack(error), name, str(error)[:1000], line, *map(self.pack, behind)]
            except BaseException:
                return ["error", None, name, "", line]

    def mine(self, number: int, name: str = ""):
        """A kept object, if the other end may look into it: a program only into objects of a test's own classes.

        name: of an attribute, which for a program may not begin with an underscore.
        """
        value = self.kept[number]
        if not self.trusted and (type(name) is not str or name.startswith("_") or name in MOCKED):
            raise AttributeError(name)
        kind = type(value)
        if not (self.trusted or kind.__module__ == TEST or kind.__name__ in LENT.get(kind.__module__, ())):
            raise TypeError(f"a test keeps its {type(value).__name__} to itself")
        return value

    def answer_call(self, number: int, packed: list, named: dict):
        one, args = self.kept[number], [self.unpack(data) for data in packed]
        if isinstance(one, type) and not (self.trusted or number in self.passed or one.__module__ == TEST):
            raise TypeError(f"a test keeps its {one.__name__} to itself")
        more = {name: self.unpack(data) for name, data in named.items()}
        return [self.pack(one(*args, **more))]

    def answer_look(self, number: int, name: str):
        if name == "__doc__" and type(self.kept[number]) is FUNCTION:  # `functools.wraps` copies it
            return [self.kept[number].__doc__]
        value = self.mine(number, name)
        if name == "__signature__":
            return [self.signature(value)]
        found = getattr(value, name)
        kept = name == FIELDS or (not self.trusted and name in RECORDED and isinstance(found, list) and is_mock(value))
        return [self.pack(dict(found) if name == "__dict__" else list(found) if kept else found)]

    def signature(self, value):
        """Name, kind, default and annotation of each parameter, and the annotation of the result."""
        found = __import__("inspect").signature(value)
        parts = [(p.name, int(p.kind), *map(given, (p.default, p.annotation))) for p in found.parameters.values()]
        return self.pack([parts, given(found.return_annotation)])

    def answer_set(self, number: int, name: str, data):
        value = self.mine(number, name)
        now = getattr(value, name, None) if is_mock(value) and not self.trusted else None
        kept = is_mock(value) and (name in RECORDED or (is_mock(now) and now.mock_calls))
        if not self.trusted and (kept or callable(getattr(type(value), name, None))):
            raise AttributeError(f"a test keeps its {name}, a method or what a mock has recorded")
        setattr(value, name, self.unpack(data))
        return []

    def answer_await(self, number: int):
        """The result of a coroutine, or of what else can be awaited. It is done when this returns."""
        value = self.mine(number)
        self.loop = self.loop or __import__("asyncio").new_event_loop()
        return [self.pack(self.loop.run_until_complete(result_of(value)))]

    def answer_operate(self, number: int, name: str, packed: list):
        if name not in SPECIAL:
            raise TypeError(f"{name} is no operator")
        steps = name in ("__iter__", "__next__") and hasattr(self.kept[number], "__next__")
        value = self.kept[number] if steps else self.mine(number)
        args, word = list(map(self.unpack, packed)), name.strip("_")
        if not self.trusted and word in ("delattr", "dir", "copy", "deepcopy", "await"):
            raise TypeError(f"{name} is not for objects of a test")
        if word in BY_NAME:
            return [self.pack(BY_NAME[word](value, *args))]
        if word[0] == "r" and word[1:] in PAIRS:
            word, value, args = word[1:], args[0], [value]
        return [self.pack(getattr(_operator, f"{word}_" if word in ("and", "or") else word)(value, *args))]

    def answer_names(self, *names: str):
        """The values of the program's global names, where there are any."""
        found = self.mine(0, "__dict__").__dict__
        return [[name, self.pack(found[name])] for name in names if name in found]

    def answer_prints(self):
        """From now on, what is printed is sent."""
        self.mine(0, "__dict__")  # not what a test prints
        sys.stdout, sys.stderr = Printed(self.printed, "stdout"), Printed(self.printed, "stderr")
        return []


BY_NAME = {
    **{name: lambda value, *args, special=f"__{name}__": getattr(type(value), special)(value, *args) for name in
       "get set delete set_name missing enter exit aenter aexit aiter anext trunc floor ceil".split()},
    "bool": bool, "len": len, "str": str, "repr": repr, "int": int, "float": float, "complex": complex, "next": next,
    "iter": iter, "reversed": reversed, "hash": hash, "format": format, "round": round, "delattr": delattr, "dir": dir,
    "instancecheck": lambda kind, value: isinstance(value, kind),
    "copy": lambda value: __import__("copy").copy(value),
    "deepcopy": lambda value: __import__("copy").deepcopy(value),
}  # fmt: skip
"""Special methods that are not functions of the module `operator`."""


class Printed:
    """A stream of the program's whose text goes to the tests' stream of that name, which they may have redirected."""

    encoding, errors = "utf-8", "strict"

    def __init__(self, texts: list, name: str):
        self.texts, self.name = texts, name

    def write(self, text: str) -> int:
        if sum(len(text) for _, text in self.texts[-1000:]) > MOST or len(self.texts) > MOST >> 4:
            raise OSError(f"a call prints more than {MOST >> 20} MB")
        self.texts.append((self.name, str(text)))
        return len(text)

    def writelines(self, lines) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        """Nothing waits."""

    def isatty(self) -> bool:
        return False


def is_mock(value) -> bool:
    return any(kind.__module__ == "unittest.mock" for kind in type(value).__mro__)


def given(value):
    """A part of a signature in a list; an empty list where there is none."""
    return [] if isinstance(value, type) and value.__name__ == "_empty" else [value]


def marked(error: BaseException, name: str, text: str, line: int | None) -> BaseException:
    setattr(error, MESSAGE, message_of(name, text, line))
    return error


def built(name: str, bases: list, methods: dict) -> type:
    """A class of these bases, or of the first of them that one can be built on."""
    for some in (bases, *([base] for base in bases), [Remote]):
        try:
            return RemoteClass(name, tuple(some), methods)
        except TypeError:  # their layouts differ, or their order is none
            continue
    raise TypeError(f"no class stands in for {name}")


def sent(special: str):
    """A special method of stand-ins that the other end's own answers."""
    return lambda self, *args: operate(self, special, *args)


class RemoteClass(type):
    """The class of classes that stand in for classes of the other end."""

    def __new__(cls, name, bases, methods, **named):
        if "__peer_of__" not in methods and not issubclass(bases[0] if bases else Exception, Exception):
            raise TypeError(f"{name} is derived from a class of the program, whose methods would not see it")
        return type.__new__(cls, name, bases, methods, **named)

    def __call__(cls, /, *args, **named):
        return type.__call__(cls, *args, **named) if number_of(cls) is None else called(cls, cls.__name__, args, named)

    def __getattr__(cls, name: str):
        return look(cls, name)

    def __setattr__(cls, name: str, value) -> None:
        if number_of(cls) is None:
            return type.__setattr__(cls, name, value)
        peer_of(cls).ask("set", number_of(cls), name, peer_of(cls).pack(value))

    def __instancecheck__(cls, value) -> bool:
        if type.__instancecheck__(cls, value) or None in (number_of(value), number_of(cls)) or peer_of(cls).trusted:
            return type.__instancecheck__(cls, value)
        return operate(cls, "__instancecheck__", value) is True

    __doc__ = property(lambda cls: look(cls, "__doc__"))  # pyright: ignore[reportAssignmentType]

    __iter__, __getitem__, __len__ = map(sent, ("__iter__", "__getitem__", "__len__"))

    def __bool__(cls):
        return True


def number_of(value) -> int | None:
    """The number of a stand-in, or None for anything else."""
    kind = type(value)
    if issubclass(kind, RemoteClass):
        return vars(value).get("__peer_of__", (None, None))[1]
    if not isinstance(kind, RemoteClass):
        return None
    return value.__number__ if issubclass(kind, Remote) else vars(value).get("__number__")


def peer_of(value) -> "Any":
    return value.__peer_of__[0] if isinstance(value, RemoteClass) else value.__peer__


def called(one, name: str, args: tuple, named: dict):
    """The result of a call at the other end, which may change arguments."""
    peer = peer_of(one)
    peer.last = (name, args, "was called")
    packed = [peer.pack(value) for value in args]
    try:
        more = {key: peer.pack(value) for key, value in named.items()}
        [result] = peer.ask("call", number_of(one), packed, more)
    except Exception as error:
        peer.last = (name, args, "raised " + vars(error).get(MESSAGE, ""))
        raise
    result = peer.unpack(result)
    peer.last = (name, args, result)
    return result


def look(one, name: str) -> "Any":
    number = number_of(one)
    if number is None or (name[:2] == name[-2:] == "__" and name[2:-2] not in READ):
        raise AttributeError(name)
    peer, mock = peer_of(one), sys.modules.get("unittest.mock")
    if mock and name.startswith("assert") and hasattr(mock.AsyncMock, name):
        raise TypeError(f"{name} is asked of an object of the program, and not of a mock")
    if number in peer.told:
        standard = [getattr(__import__(module), kind) for module, kinds in STANDARD.items() for kind in kinds]
        if any(hasattr(kind, name) for kind in (*PLAIN, *standard)):
            raise TypeError(UNSHOWN)
    found: Any = peer.unpack(*peer.ask("look", number, name))
    if name == FIELDS:  # the fields themselves are compared with marks of this interpreter's own
        names = [str.__str__(name) for name in found]  # code is made of these: no text of a class of the program
        return getattr(__import__("dataclasses").make_dataclass("_", names, init=False, repr=False, eq=False), FIELDS)
    if name == "__signature__":
        return signed(*found)
    peer.trusting |= hasattr(str, name) and not hasattr(list, name) and callable(found)
    return found


def signed(parts: list, result: list):
    inspect = __import__("inspect")
    kinds, empty = list(inspect._ParameterKind), inspect.Signature.empty
    one = [
        inspect.Parameter(name, kinds[kind], default=(default or [empty])[0], annotation=(about or [empty])[0])
        for name, kind, default, about in parts
    ]
    return inspect.Signature(one, return_annotation=(result or [empty])[0])


class Remote(metaclass=RemoteClass):
    """An object of the other end: it is called, and its attributes are read and set, from here."""

    __peer_of__ = (None, None)
    __slots__ = ("__called__", "__number__", "__peer__")

    def __getattr__(self, name: str):
        return self.__called__ if name == "__name__" and self.__called__ is not None else look(self, name)

    def __setattr__(self, name: str, value) -> None:
        self.__peer__.ask("set", self.__number__, name, self.__peer__.pack(value))

    def __eq__(self, other) -> bool:
        if self is other or number_of(other) is None:
            return self is other
        return related(self, "__eq__", other) is True

    def __hash__(self) -> int:
        return self.__number__

    def __contains__(self, value) -> bool:
        if number_of(value) is not None:
            return related(self, "__contains__", value) is True
        try:  # here: the value is not sent to the program
            parts: Any = iter(self)  # pyright: ignore[reportCallIssue, reportArgumentType]
        except TypeError:
            raise TypeError(UNSHOWN) from None
        return any(value is one or value == one for one in parts)

    __delattr__, __copy__, __dir__ = map(sent, ("__delattr__", "__copy__", "__dir__"))

    def __deepcopy__(self, memo):
        return operate(self, "__deepcopy__")


ROOTED = vars(Remote).keys() - {"__eq__", "__hash__", "__contains__"}
TEXTS = ("__str__", "__repr__", "__format__")
FIXED_METHODS = {"__copy__": lambda self: self, "__deepcopy__": lambda self, memo: self}
FIXED_METHODS["__getattr__"] = Remote.__getattr__
"""Of values and exceptions that stand-ins are: they have their plain value here, and ask for the rest."""

CONTAINER_METHODS = {f"__{n}__": vars(Remote)[f"__{n}__"] for n in "getattr setattr delattr copy deepcopy".split()}
"""Of an object that is built on a list, or the like: it has its content here, and asks for the rest."""


class Callee(Remote):
    """A function of the other end, which `inspect` takes for one."""

    __peer_of__ = (None, None)
    __slots__ = ()
    __class__ = property(lambda self: FUNCTION)
    __doc__ = property(lambda self: look(self, "__doc__"))  # pyright: ignore[reportAssignmentType]

    def __call__(self, /, *args, **named):
        return called(self, self.__called__, args, named)

    def __get__(self, one, kind=None):
        """In a class of a test's, what a decorator of the program has made is a method."""
        return self if one is None else BOUND(self, one)  # pyright: ignore[reportCallIssue]


def related(one, name: str, other):
    """What the program says of two of its own objects."""
    one.__peer__.trusting = True
    return operate(one, name, other)


def operate(one, name: str, *args):
    peer = peer_of(one)
    if (word := name.strip("_")) in ALONE and word not in peer.told.get(number_of(one), ALONE):
        raise TypeError(UNSHOWN)
    return peer.unpack(*peer.ask("operate", number_of(one), name, [peer.pack(value) for value in args]))


async def waiting(one):
    """A coroutine that stands in for one of the other end's."""
    return one.__peer__.unpack(*one.__peer__.ask("await", one.__number__))


async def result_of(value):
    return await value


async def loud(value):
    """The end of an `async with` that lets an exception pass, whatever the program says."""
    await value


def operator(special: str):
    """A special method of stand-ins. That of two may make an object of a value of the test's, and nothing plain."""

    def ordered(self, other):
        return NotImplemented if number_of(other) is None else related(self, special, other)

    def paired(self, other):
        told = self.__peer__.told
        if number_of(other) is not None and not told.keys() & {number_of(self), number_of(other)}:
            return related(self, special, other)
        self.__peer__.shown = True
        result = operate(self, special, other)
        if not issubclass(type(result), Remote):
            raise TypeError(UNSHOWN)
        told[number_of(result)] = TEXT if word.lstrip("ri") in ("add", "mul") else []  # the others may undo a value
        return result

    def call(self, *args, **named):
        return called(self, self.__called__ or type(self).__name__, args, named)

    def contains(self, value):
        if number_of(value) is None and not any("__iter__" in vars(kind) for kind in type(self).__mro__):
            raise TypeError(UNSHOWN)
        return Remote.__contains__(self, value)

    def equal(self, other):
        self.__peer__.unshown |= number_of(other) is None
        return Remote.__eq__(self, other)

    def leave(self, *why):
        silent = operate(self, special, *why)
        own = why[0] is None or not issubclass(why[0], AssertionError) or MESSAGE in vars(why[1])
        if why[0] is None or (own and not self.__peer__.asserts(sys._getframe(1))):
            return silent
        return False if special == "__exit__" else loud(silent)

    word = special.strip("_")
    own = {"call": call, "contains": contains, "eq": equal, "exit": leave, "aexit": leave}
    own["await"] = lambda self: waiting(self).__await__()
    return own.get(word) or (sent(special) if word in ALONE else ordered if word in ORDER else paired)


def is_counter(kind: type) -> bool:
    return any((base.__module__, base.__name__) == ("collections", "Counter") for base in kind.__mro__)


def letter(value) -> str:
    return TAGS.get(type(value)) or next(
        tag for tag, kind in SHARED.items() if isinstance(value, kind) and (tag != "C" or is_counter(type(value)))
    )


def inside(value: "Any") -> list:
    """What can change in a container: two such lists are compared by identity. No method of a subclass is asked."""
    kind: Any = SHARED[letter(value)]
    if not issubclass(kind, dict):
        return list(kind.__iter__(value))
    start = [FACTORY.__get__(value)] if isinstance(value, defaultdict) else []
    keys = list(kind.keys(value))
    return [*start, *keys, *[dict.__getitem__(value, key) for key in keys]]


def differs(value, before: list) -> bool:
    """Whether there is something else in a container than there was."""
    now = value if type(value) is list else inside(value)  # a copy takes a third of the time
    return len(before) != len(now) or not all(map(_operator.is_, before, now))


def fill(value: "Any", content: list) -> None:
    """Make this the content of a container, which keeps its identity."""
    kind: Any = SHARED[letter(value)]
    if isinstance(value, defaultdict):
        FACTORY.__set__(value, content.pop(0))
    if issubclass(kind, dict):
        kind.clear(value)
        for key, one in zip(content[: len(content) // 2], content[len(content) // 2 :]):
            kind.__setitem__(value, key, one)
    elif issubclass(kind, (list, bytearray)):
        kind.__setitem__(value, slice(None), content)
    else:
        kind.clear(value)
        (kind.extend if kind is deque else kind.update)(value, content)


def line_of(error: BaseException, file: str) -> int | None:
    """The line where it happened: the deepest one in that file."""
    line, at = None, error.__traceback__
    while at:
        line = at.tb_lineno if at.tb_frame.f_code.co_filename == file else line
        at = at.tb_next
    return error.lineno if line is None and isinstance(error, SyntaxError) else line


def message_of(name: str, text: str, line: int | None) -> str:
    return name + (f": {text}" if text else "") + (f" (line {line})" if line else "")


def short(value, most: int = 80) -> str:
    """The value for a message, however long it is."""
    try:
        text = repr(value[: most * 2] if isinstance(value, (str, bytes, list, tuple)) else value)
    except Exception:
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= most else text[: most - 3] + "..."


# --- the program ----------------------------------------------------------------------------------------------------


Word, Byte, Long = (type("C", (_ctypes._SimpleCData,), {"_type_": letter}) for letter in "Lcl")
FLAGS = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
Function: "Any" = type("Function", (_ctypes.CFuncPtr,), {"_flags_": FLAGS, "_restype_": Long})


def call(name: str, *values: "int | bytes") -> int:
    """A function of the C library, on Linux. Raises: OSError with the name."""
    function = Function(_ctypes.dlsym(_ctypes.dlopen(None, 0), name))
    result = function(*[Word(value) if isinstance(value, int) else value for value in values])
    if result < 0:
        raise OSError(_ctypes.get_errno(), f"{name}: {os.strerror(_ctypes.get_errno())}")
    return result


def prctl(option: int, *values: int) -> None:
    call("prctl", option, *values, *[0] * (4 - len(values)))


def landlock(abi: int, paths: list, files: int, net: int, scoped: int) -> None:
    """No access to files but to the paths, each with its rights. The numbers are sets of rights, as in the ABI."""
    fields = b"".join(rights.to_bytes(8, sys.byteorder) for rights in (files, net, scoped))
    ruleset = call("syscall", LANDLOCK_CREATE, fields, 8 if abi < 4 else 16 if abi < 6 else 24, 0)
    for path, rights in paths:
        try:
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # it has gone, or is not for this user
            continue
        rule = rights.to_bytes(8, sys.byteorder) + folder.to_bytes(4, sys.byteorder)
        call("syscall", LANDLOCK_ADD, ruleset, 1, rule, 0)
        os.close(folder)
    call("syscall", LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def filter_calls(given: dict) -> None:
    """From now on this process makes only the system calls that `seccomp.py` lists, where there is such a filter."""
    if not given["filter"]:
        return
    code = bytes.fromhex(given["filter"]).replace(bytes.fromhex(given["self"]), os.getpid().to_bytes(4, sys.byteorder))
    array = type("Filter", (_ctypes.Array,), {"_type_": Byte, "_length_": len(code)})
    buffer = array.from_buffer_copy(code)  # pyright: ignore[reportAttributeAccessIssue]
    address = _ctypes.addressof(buffer).to_bytes(8, sys.byteorder)
    call("prctl", PR_SET_SECCOMP, 2, (len(code) // 8).to_bytes(8, sys.byteorder) + address, 0, 0)


def die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def nursery(control: socket, given: dict) -> None:
    """Fork a program for each order of the checker, and report how it has ended."""
    null, checker = os.open("/dev/null", os.O_RDWR), os.getpid()
    while order := control.recv(1):
        if order == KILL:  # of a program that has just ended
            continue
        theirs, ours = socketpair(AF_UNIX, SOCK_STREAM)
        fault_read, fault_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent(checker)
                run_program(order, ours.fileno(), fault_write, null, given)
            finally:
                os._exit(1)
        ours.close()
        fds = theirs.fileno().to_bytes(4, sys.byteorder) + fault_read.to_bytes(4, sys.byteorder)
        control.sendmsg([b"%20d" % pid], [(SOL_SOCKET, SCM_RIGHTS, fds)])
        theirs.close()
        os.close(fault_read)
        if given["filter"]:
            watch(pid, fault_write, control, given)
        os.close(fault_write)
        _, status, usage = os.wait4(pid, 0)
        control.send(b"%20d" % status + b"%20.6f" % (usage.ru_utime + usage.ru_stime))
    os._exit(0)


def watch(pid: int, fault: int, control: socket, given: dict) -> None:
    """Wait for the end of a program, and end it if the checker asks for that, or if it makes too many names.

    The checker may not end it by itself, and may be busy; no limit of the kernel counts the memory of a name.
    """
    process, end = os.pidfd_open(pid), select.poll()
    end.register(process, select.POLLIN)
    end.register(control, select.POLLIN)
    while process not in (ready := [number for number, _ in end.poll(20 if given["folder"] else None)]):
        if control.fileno() in ready:
            os.kill(pid, _signal.SIGKILL)
            break
        elif given["folder"] and (found := os.statvfs(given["folder"])).f_files - found.f_ffree > given["names"]:
            os.kill(pid, _signal.SIGKILL)
            os.write(fault, f"\nmade more than {given['names']:,} files, folders and links".encode())
            break
    os.close(process)


def run_program(order: bytes, link: int, fault: int, null: int, given: dict) -> None:
    """In the program's own process: limit it, run the source, and serve calls or end."""
    ends = (null, null, null, link, fault) if order == b"c" else (link, link, null, link, fault)
    while os.dup(null) < len(ends):
        pass
    ends = [os.dup(end) for end in ends]  # out of the way: their numbers may be targets, too
    for number, end in enumerate(ends):
        os.dup2(end, number)
    os.closerange(len(ends), 4096)
    for name, value in given["limits"]:
        limit = getattr(resource, name)
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(limit, (value, value))
        except (OSError, ValueError):  # macOS has names without the limits
            if sys.platform == "linux":
                raise
    filter_calls(given)
    source, module = given["source"], type(sys)("program" if order == b"c" else "__main__")
    make = compiled if given["judge"] == "apps" and order == b"m" else compile
    sys.modules[module.__name__] = module
    sys.argv = [""]
    builtins.exit = builtins.quit = sys.exit  # the interpreter has started without `site`
    plain = builtins.open
    builtins.open = vars(sys.modules["io"])["open"] = lambda file, *how, **more: plain(
        os.dup(STREAMS[file]) if type(file) is str and file in STREAMS else file, *how, **more
    )
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    given.clear()
    try:
        code = make(source, FILE, "exec", dont_inherit=True)
    except BaseException as error:
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        os.write(4, message_of(type(error).__name__, why, line_of(error, FILE)).encode())
        os._exit(1)
    os.write(4, b"\n")
    try:
        exec(code, module.__dict__)
        if order == b"c":
            serve(module)
        status = 0
    except BaseException as error:
        status = error.code if isinstance(error, SystemExit) else 1
        if order == b"c" or not isinstance(error, SystemExit) or isinstance(status, str):
            why = str(error)[:1000]
            os.write(4, message_of(type(error).__name__, why, line_of(error, FILE)).encode(errors="replace"))
    if order != b"c":
        try:  # what an interpreter does at its end
            if "threading" in sys.modules:
                sys.modules["threading"]._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
        except BaseException:
            status = 1
    os._exit(status if isinstance(status, int) else 0 if status is None else 1)


STREAMS = {
    f"{folder}/{name}": fd
    for fd, one in enumerate(("stdin", "stdout"))
    for folder, name in (("/dev", one), ("/dev/fd", fd), ("/proc/self/fd", fd))
}
"""Files that are streams of a program: its own are sockets, which no path opens, and there may be no `/dev`."""


def compiled(*source, **how):
    """A program that may return at its top level, which APPS' judge takes for the body of a function."""
    try:
        return compile(*source, **how)
    except SyntaxError as error:
        if "outside function" not in (error.msg or ""):
            raise
        tree = compile(*source, flags=ONLY_AST, **how)
        names = next(one for one in in_function(tree, "pass").co_consts if type(one).__name__ == "code")
    for node in nodes(tree, but=("FunctionDef", "AsyncFunctionDef", "ClassDef")):
        if type(node).__name__ == "AnnAssign":
            vars(node)["simple"] = 0  # else a variable with an annotation cannot be global
    # so that its functions may change its variables
    return in_function(tree, f"global {', '.join(sorted({*names.co_varnames, *names.co_cellvars})) or '_'}")


def in_function(tree, first: str):
    """The code of a module, all of it but imports in a function that is called, which begins with that statement."""
    module = compile(f"def _():\n {first}\n_()", FILE, "exec", ONLY_AST, dont_inherit=True)
    define, run = module.body  # pyright: ignore[reportAttributeAccessIssue]
    define.name = run.value.func.id = FILE  # no name that a program can have
    imports = [node for node in tree.body if type(node).__name__ in ("Import", "ImportFrom")]
    define.body += [node for node in tree.body if node not in imports]
    module.body = [*imports, define, run]  # pyright: ignore[reportAttributeAccessIssue]
    return compile(module, FILE, "exec", dont_inherit=True)


def serve(module) -> None:
    """Answer the checker's questions about the program."""

    def write(*messages) -> None:
        rest = b"".join(map(frame, [*(["printed", *line] for line in peer.printed), *messages]))
        peer.printed.clear()
        while rest:
            rest = rest[os.write(3, rest) :]

    peer = Peer(lambda: scan(exactly(int.from_bytes(exactly(4), "big")).decode(), 0)[0], write, trusted=True)
    peer.keep(module)
    write(["ready"])
    while True:
        kind, *rest = peer.read()
        if kind == "news":
            peer.hear(*rest)
        else:
            peer.tell(peer.answer(kind, rest))


def exactly(size: int) -> bytes:
    parts = []
    while size:
        part = os.read(3, min(size, 1 << 20))
        if not part:
            os._exit(0)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


# --- the checker ----------------------------------------------------------------------------------------------------


class Running:
    """A program that runs, seen from the checker, which watches its processor time whenever it waits for it."""

    def __init__(self, checker: "Checker", order: bytes):
        self.checker = checker
        checker.control.send(order)
        pid, ancillary, *_ = checker.control.recvmsg(20, 64)
        self.pid = int(pid)
        fds = [int.from_bytes(ancillary[0][2][i : i + 4], sys.byteorder) for i in (0, 4)]
        self.link, self.fault = socket(AF_UNIX, SOCK_STREAM, 0, fds[0]), fds[1]
        self.link.setblocking(False)
        os.set_blocking(self.fault, False)
        self.inbox = bytearray()
        self.open = True
        self.status: int | None = None
        self.end: Ended | None = None

    def used(self) -> float:
        """Its processor time so far, if the system tells that of another process."""
        try:
            return time.clock_gettime(~self.pid << 3 | 2)  # Linux: the clock of all threads of a process
        except OSError:
            return 0.0

    def wait(self, end, events: int) -> int:
        """What has happened to this end of the program's, of those events. Raises: Ended at the deadline."""
        poll, limit = select.poll(), self.checker.seconds
        poll.register(end, events)
        while True:
            left = self.checker.until - self.checker.spent - self.used()
            if left < 0:
                raise self.kill(f"used more than {limit:g} s of processor time")
            for _, event in poll.poll(max(5, left * 1000 / self.checker.cores)):
                return event

    def exchange(self, out: bytes, enough: int | None) -> None:
        """Write, and read until there is enough: that many bytes, or all that ever come. Returns early at the end."""
        rest, written = memoryview(out), not out and enough is not None
        while self.open and (not written or enough is None or len(self.inbox) < enough):
            event = self.wait(self.link, select.POLLIN | (0 if written else select.POLLOUT))
            if event & ~select.POLLOUT:
                self.receive()
            elif rest:
                rest = rest[self.link.send(rest[: 1 << 16]) :]
            if not rest and not written:
                written = True
                if enough is None:
                    self.link.shutdown(SHUT_WR)

    def receive(self) -> None:
        try:
            data = self.link.recv(1 << 16)
        except ConnectionError:
            data = b""
        self.open = bool(data)
        self.inbox += data
        self.checker.received += len(data)
        if len(self.inbox) > MOST or self.checker.received > 8 * MOST:
            raise self.kill(f"wrote more than {MOST >> 20} MB")

    def read(self) -> list:
        """The next message. Raises: Ended if there is none, or no sense in it."""
        self.exchange(b"", 4)
        size = int.from_bytes(self.inbox[:4], "big")
        if size > MOST:
            raise self.kill(f"wrote more than {MOST >> 20} MB")
        self.exchange(b"", 4 + size)
        if len(self.inbox) < 4 + size or not size:
            raise self.fate()
        data, self.inbox = bytes(self.inbox[4 : 4 + size]), self.inbox[4 + size :]
        try:
            kind, *rest = scan(data.decode(), 0)[0]
            return [str(kind), *rest]
        except Exception:
            raise self.kill("answered what is no message") from None

    def write(self, *messages) -> None:
        self.exchange(b"".join(map(frame, messages)), 0)

    def finish(self) -> int:
        """Wait for its end; returns its exit code, negative for a signal."""
        if self.status is None:
            self.wait(self.checker.control, select.POLLIN)
            self.take_status()
        return self.status or 0

    def take_status(self) -> None:
        sent = b""
        while len(sent) < 40:
            sent += self.checker.control.recv(40 - len(sent))
        self.status = os.waitstatus_to_exitcode(int(sent[:20]))
        self.checker.spent += float(sent[20:])

    def kill(self, message: str) -> Ended:
        if self.status is None:
            try:
                self.checker.control.send(KILL) if self.checker.filtered else os.kill(self.pid, _signal.SIGKILL)
            except ProcessLookupError:  # it has just ended
                self.open = False
            self.take_status()
        self.end = self.end or Ended(CRASHED, message)
        return self.end

    def fate(self) -> Ended:
        code = self.finish()
        if self.end:
            return self.end
        try:
            stage, newline, message = os.read(self.fault, 4096).decode(errors="replace").rpartition("\n")
        except BlockingIOError:
            stage, newline, message = "", "", ""
        if self.checker.spent > self.checker.until:
            newline, message = "\n", f"used more than {self.checker.seconds:g} s of processor time"
        elif code < 0:
            message = message or f"was ended by signal {-code}, {_signal.strsignal(-code)}"
        outcome = CRASHED if stage or newline else UNCOMPILED
        self.end = Ended(outcome, message or f"ended itself with exit status {code}")
        return self.end

    def close(self) -> None:
        """End it, and let go of its descriptors."""
        self.kill("has ended before this test")
        self.open = False
        self.link.close()
        os.close(self.fault)


class Checker:
    def __init__(self, control: socket, given: dict, tests: dict):
        self.control, self.tests, self.setup = control, tests["tests"], tests["setup"]
        self.results, null = os.dup(1), os.open("/dev/null", os.O_RDWR)
        for number in range(3):  # a test's code prints nowhere, and not to the descriptor of the results
            os.dup2(null, number)
        os.close(null)
        self.nonce, self.process = bytes.fromhex(tests["nonce"]), os.getpid()
        self.seconds, self.tolerant = given["seconds"], given["compare"] == "apps"
        self.each, self.until = given["judge"] == "apps", self.seconds
        self.filtered, self.cores = bool(given["filter"]), os.cpu_count() or 1
        self.spent, self.received = 0.0, 0
        self.run: Running | None = None
        self.peer: Peer | None = None
        self.names: dict = {"__name__": TEST, "__builtins__": builtins}
        self.offered: dict = {}
        """Those of the program and of modules. A test may have bound the same names since, for all tests behind it."""
        self.compiled: dict = {}
        """The code object of each test that compiles, by its text."""
        self.stopped: Ended | None = None
        self.untouched = os.stat(".").st_ctime_ns  # when something was last put where the programs may write

    def judge(self) -> None:
        """Write a frame for each test: index, outcome, message, processor time, whether it trusts the program."""
        for index, test in enumerate(self.tests):
            if self.peer:
                self.peer.last, self.peer.failed = "", None
                self.peer.trusting = self.peer.unshown = self.peer.shown = False
            if self.each:
                self.until = self.used() + self.seconds
            try:
                if self.stopped:
                    raise self.stopped
                outcome, message = self.code(index, test[0]) if len(test) == 1 else self.printed(index, *test)
            except Ended as end:
                outcome, message = end.outcome, end.message
                self.stopped = end if outcome == UNCOMPILED or self.spent > self.until else self.stopped
                self.end()
            except Exception as error:  # of the checker itself, such as of a text that cannot be shown
                outcome, message = CRASHED, type(error).__name__
            trusting = bool(self.peer and self.peer.trusting)
            if os.getpid() != self.process:  # a test has forked: the copy has nothing to report
                os._exit(1)
            if outcome != PASSED and self.peer and self.peer.shown:  # it shall pass no test by what it has been told
                self.end()
                if os.stat(".").st_ctime_ns != self.untouched:
                    self.stopped = Ended(FAILED, "a file may have what an earlier test has told its operators")
            message = message if outcome == PASSED else message[:300]
            rest = self.nonce + frame([index, outcome, message, self.used(), trusting])
            while rest:
                rest = rest[os.write(self.results, rest) :]

    def end(self) -> None:
        if self.run:
            self.run.close()
            self.run = None

    def used(self) -> float:
        return self.spent + (self.run.used() if self.run else 0.0)

    # --- tests that are code

    def code(self, index: int, code: str) -> tuple[str, str]:
        try:
            try:
                test = self.compile(code)
            except Exception as error:
                return FAILED, f"test {index + 1} itself does not compile: {error}"
            self.start()
            self.peer.stops = "StopIteration" in code  # else `all(map(f, cases))` would hold when f raises it at once
            self.peer.expects = "AssertionError" in code
            try:
                exec(test, self.names)
            except Exception:
                if self.peer.failed is None:
                    raise
            if self.peer.failed:
                raise self.peer.failed
            if self.run.end:
                raise self.run.end  # again: the test has caught it
            return PASSED, ""
        except AssertionError as error:
            if MESSAGE in vars(error):  # an assertion of the program
                return CRASHED, vars(error)[MESSAGE]
            return FAILED, f"test {index + 1}: {self.failure(error, code)}"
        except BaseException as error:
            if isinstance(error, Ended):
                raise
            return CRASHED, vars(error).get(MESSAGE) or message_of(type(error).__name__, str(error)[:1000], None)

    def compile(self, code: str):
        if code not in self.compiled:
            self.compiled[code] = compile(code, TEST, "exec", dont_inherit=True)
        return self.compiled[code]

    def start(self) -> None:
        """A running program that serves calls, and the names for tests."""
        if self.run:
            return
        self.run = Running(self, b"c")
        if self.run.read() != ["ready"]:
            raise self.run.kill("answered what is no message")
        self.peer = Peer(self.run.read, self.run.write, trusted=False)
        self.peer.asserts = self.asserts
        self.offer("same", same)
        wanted, shadows, called, modules = set(), set(), set(), {}
        texts = [self.setup, *(test[0] for test in self.tests if len(test) == 1)]
        for code in texts:
            try:
                found = {name for part in parts(self.compile(code)) for name in part.co_names}
                # To walk a syntax tree takes longer than all the rest of this loop.
                known = found & sys.stdlib_module_names
                tree = compile(code, TEST, "exec", ONLY_AST, dont_inherit=True) if known else None
            except Exception:  # the test itself fails with it, where it is run
                continue
            wanted |= found - vars(builtins).keys() - MODULES
            shadows |= found & vars(builtins).keys()
            for name in found & MODULES:
                self.offer(name, __import__(name))
            for node in nodes(tree) if tree else ():
                match type(node).__name__, vars(node):
                    case "Call", fields:
                        called.add(vars(fields["func"]).get("id", ""))
                    case "Attribute", fields:
                        modules.setdefault(vars(fields["value"]).get("id", ""), set()).add(fields["attr"])
        # What tests call and do not look into is a function of that name, such as `copy` or `statistics`. A test that
        # imports one binds the name itself.
        wanted |= called & MODULES - modules.keys()
        for name in wanted & sys.stdlib_module_names & modules.keys():
            try:
                module = __import__(name, fromlist=[*modules[name]])  # with the modules in it
            except Exception:
                continue
            if all(hasattr(module, attribute) for attribute in modules[name]):  # else it is an object of the program's
                self.offer(name, module)
                wanted.remove(name)
        # A builtin means itself, and so does `same`, unless nothing else can be what is tested: a program must not
        # redefine `abs` or `set`.
        wanted = wanted - {"same"} or wanted or (shadows if len(shadows) == 1 else set())
        if any("stdout" in text or "stderr" in text for text in texts):
            self.peer.ask("prints")
        for name, value in self.peer.ask("names", *sorted(wanted)):
            if name in wanted:
                self.offer(name, self.peer.unpack(value))
        mine = [name for name, value in self.offered.items() if self.names.get(name) is value]
        exec(self.compile(self.setup), self.names)
        self.offered |= {name: self.names.get(name) for name in mine}  # the setup binds them anew at each start

    def offer(self, name: str, value) -> None:
        if self.names.get(name) is self.offered.get(name):
            self.names[name] = self.offered[name] = value

    def asserts(self, frame) -> bool:
        """Whether the `with` that a frame is about to leave asserts something, which a program must not silence."""
        texts = {code: list(nodes(compile(text, TEST, "exec", ONLY_AST))) for text, code in self.compiled.items()}
        named = [(name, node) for found in texts.values() for one in found for name, node in bindings(one)]
        helpers: set = set()
        while more := {name for name, node in named if speaks(node, helpers)} - helpers:
            helpers |= more
        found = next((found for code, found in texts.items() if frame.f_code in parts(code)), [])  # two may be alike
        blocks = [node for node in found if hasattr(node, "items") and vars(node).get("lineno") == frame.f_lineno]
        return not blocks or any(speaks(block, helpers) for block in blocks)

    def failure(self, error: AssertionError, code: str) -> str:
        line, reason = line_of(error, TEST), str(error)
        if self.peer.unshown:
            reason += (": " if reason else "") + UNSHOWN
        text = code.splitlines()[line - 1].strip() if line else code
        if isinstance(self.peer.last, tuple):
            name, args, result = self.peer.last
            call = f"{name}({', '.join(short(arg, 40) for arg in args)})"
            reason += (": " if reason else "") + f"{call} returned {short(result)}"
        text = text if len(text) <= 150 else text[:147] + "..."
        return f"{text}: {reason}" if reason else text

    # --- tests that are a standard input

    def printed(self, index: int, given: str, expected: str | None) -> tuple[str, str]:
        self.end()  # one program at a time: the nursery waits for its end
        run = Running(self, b"m")
        try:
            run.exchange(given.encode(errors="surrogateescape"), None)
            if run.finish() or self.spent > self.until:
                raise run.fate()
        finally:
            run.close()
        printed = bytes(run.inbox).decode(errors="replace")
        if expected is None:
            return PASSED, printed[:10_000]
        if (like_apps if self.tolerant else alike)(printed, expected):
            return PASSED, ""
        return FAILED, f"test {index + 1}: printed {short(printed)} for {short(given)}, not {short(expected)}"


def speaks(block, helpers: set) -> bool:
    """Whether a node of a syntax tree has an assertion, a call such as `self.assertEqual`, or one of the helpers."""
    words = [(type(node).__name__, vars(node)) for node in nodes(block)]
    kinds = {name for name, _ in words}
    return bool("Assert" in kinds or ("Raise" in kinds and kinds & {"If", "Match", "Try", "While"})) or any(
        fields.get("attr", "").startswith("assert") or {fields.get("attr"), fields.get("id")} & helpers
        for _, fields in words
    )


def bindings(node):
    """The names that a node of a syntax tree binds, each with the node that is behind it."""
    fields = vars(node)
    if isinstance(fields.get("name"), str):
        yield fields["name"], node
    behind = fields.get("value") or fields.get("iter")
    for target in fields.get("targets") or [fields.get("target")]:
        for one in nodes(target) if behind and target else ():
            if "id" in vars(one):
                yield vars(one)["id"], behind


def nodes(tree, but: tuple = ()):
    """The nodes of a syntax tree, but not what is in some kinds. `ast` takes as long to import as a program."""
    yield tree
    if type(tree).__name__ in but:
        return
    for value in vars(tree).values():
        for child in value if isinstance(value, list) else [value]:
            if hasattr(child, "_fields"):
                yield from nodes(child, but)


def parts(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, type(code)):
            yield from parts(constant)


# --- comparisons ----------------------------------------------------------------------------------------------------


def alike(printed: str, expected: str) -> bool:
    """Whether the texts are equal but for white space at the ends of lines and of the text."""
    found, wanted = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (printed, expected))
    return found == wanted


def like_apps(printed: str, expected: str) -> bool:
    """The tolerant comparison of APPS and CodeRL: of lines, of numbers, or of sets of words (Hendrycks et al. 2021)."""
    found, wanted = ([line.split() for line in text.split("\n") if line.strip()] for text in (printed, expected))
    if found == wanted:
        return True
    try:
        numbers = [[float(word) for line in lines for word in line] for lines in (found, wanted)]
        close = all(abs(one - other) <= 1e-8 + 1e-5 * abs(other) < float("inf") for one, other in zip(*numbers))
        if close and len(numbers[0]) == len(numbers[1]):
            return True
        rounded = [{frozenset(round(float(word), 3) for word in line) for line in lines} for lines in (found, wanted)]
        if rounded[0] == rounded[1]:
            return True
    except (ValueError, OverflowError):
        pass
    return {frozenset(line) for line in found} == {frozenset(line) for line in wanted}


def same(found, expected) -> bool:
    """For tests: APPS' tolerant comparison of values. Tuples are lists; the expected value may stand in a list.

    APPS takes the first item of any list for it, which lets a program pass that returns no more than that; only a list
    of one is taken so here.
    """
    found, expected = listed(found), listed(expected)
    return found == expected or (isinstance(expected, list) and len(expected) == 1 and found == expected[0])


def listed(value):
    if isinstance(value, (list, tuple)):
        return [listed(part) for part in value]
    return {name: listed(part) for name, part in value.items()} if isinstance(value, dict) else value


def main() -> None:
    given = scan(take().decode(), 0)[0]
    if given["run"]:
        die_with_parent(given["run"])
    if sys.platform == "linux":  # for all three processes: they cannot be looked into, and have no more rights
        if given["uid"] is not None:
            os.setgroups([])
            os.setresgid(*[given["uid"]] * 3)
            os.setresuid(*[given["uid"]] * 3)
        elif given["drop"]:
            call("capset", (0x20080522).to_bytes(8, sys.byteorder), bytes(24))
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        prctl(PR_SET_DUMPABLE, 0)
        if given["landlock"]:
            landlock(**given["landlock"])
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    control, theirs = socketpair(AF_UNIX, SOCK_STREAM)
    checker = os.getpid()
    if os.fork() == 0:
        try:
            control.close()
            os.closerange(0, 2)
            die_with_parent(checker)
            nursery(theirs, given)
        finally:
            os._exit(1)
    theirs.close()
    tests = scan(take().decode(), 0)[0]
    os.write(1, b"ready\n")
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (given["busy"], given["busy"] + 1))
    filter_calls(given)
    Checker(control, given, tests).judge()


if __name__ == "__main__":
    main()
