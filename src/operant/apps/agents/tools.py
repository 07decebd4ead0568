"""A world in which the policy may call tools before it answers: `--env tools --env.tools python,search`.

A call is what the chat template of the model makes of one; a model whose template knows no tools writes

    <python>print(2 ** 10)</python>

with the name of the tool and the text of its first argument, and reads `<result>1024</result>` behind it. A reply
without a call is the answer, which the reward of the run judges; of an episode that ends before, it judges an empty
reply. Results are no replies: they carry no gradient.
"""

import ast
import difflib
import json
import re
import sqlite3
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from transformers.utils import get_json_schema

from operant.apps.agents.program import AgentWorld, ModelClient
from operant.apps.agents.protocol import Json
from operant.import_by_name import Table
from operant.sandbox.jail import Jail, JailOptions, Program, Stdin
from operant.types import OperantError, Task, cores, describe_error, name_of, of_user, require, shown

LONGEST = 20_000
"""Characters of the program or the query of a call."""
Turns = Generator[list[tuple[str, object]], list[str], None]
"""The calls of each turn as names and arguments, and their results."""


class ToolWorld(AgentWorld):
    """Episodes of calls and results, of several turns; the last reply is the answer.

    tools: `python`, which runs a program behind a wall (docs/sandbox.md), `search`, which finds words in the texts of
        `folder`, and functions of your own, module:function or from Python, whose arguments have annotations and
        lines under "Args:" in the docstring.
    calls: most calls of an episode; one more ends it, without an answer.
    characters: of a result; the rest is cut.
    seconds: of processor time of a program; other calls have twice as long and a second.
    """

    pays = False

    def __init__(
        self,
        tools: Sequence[Any] | str = ("python",),
        *,
        folder: str | None = None,
        calls: int = 4,
        characters: int = 1000,
        seconds: float = 4.0,
        deadline: float = 60.0,
    ):
        named = [tools] if isinstance(tools, str) or callable(tools) else list(tools)
        require(named, "env.tools is empty: name one tool, such as python")
        for option, number in (("calls", calls), ("characters", characters), ("seconds", seconds)):
            require(number > 0, f"env.{option}={shown(number)}: it must be above 0")
        self.calls, self.characters, self.seconds = calls, characters, seconds
        bundled = {"python": "operant.apps.agents.tools:python_tool", "search": "operant.apps.agents.tools:search_tool"}
        table, self.tools = Table("tool", "operant.tools", bundled), dict[str, Callable[..., object]]()
        own = {"python": seconds, "search": folder}
        for one in named:
            found = table.find(one) if isinstance(one, str) else one
            found = found(own[one]) if isinstance(one, str) and one in own else found
            name = name_of(found)
            require(name not in self.tools, f"env.tools: two tools have the name {name!r}; rename one")
            self.tools[name] = found
        names = "|".join(map(re.escape, self.tools))
        self._calls = re.compile(rf"<({names})>((?:(?!<\1>).)*?)(?:</\1>|$)", re.DOTALL)
        if folder is not None and "search" not in self.tools:
            raise OperantError(f"env.folder={shown(folder)}: only the tool search reads it; add it to env.tools")
        super().__init__(self._play, deadline=max(deadline, calls * (2 * seconds + 2)))
        self.at_once = cores()
        self.__name__ = "tools"

    @cached_property
    def schemas(self) -> list[Json]:
        """The tools as chat templates read them. Raises: OperantError for a function without annotations."""
        remedy = 'give each argument an annotation, and a line under "Args:" in the docstring'
        with of_user("a tool cannot be described (", f"): {remedy}"):
            return [get_json_schema(tool) for tool in self.tools.values()]

    def check(self) -> None:
        """Describe the tools, before a model loads. Raises: OperantError."""
        assert self.schemas

    def _play(self, task: Task, client: ModelClient) -> None:
        by_template = "tools" in str(self.tokenizer.chat_template or "")
        made, failed, client.answered = 0, 0, False
        client.report(calls=made, failed_calls=failed)
        turns = self._by_template(task, client) if by_template else self._by_tags(task, client)
        calls = next(turns)
        while calls:
            results = [self._result(*call) for call in calls[: self.calls - made]]
            made, failed = made + len(calls), failed + sum(not good for good, _ in results)
            client.report(calls=made, failed_calls=failed)
            if made > self.calls:
                return
            calls = turns.send([result for _, result in results])
        client.answered = True

    def _by_template(self, task: Task, client: ModelClient) -> Turns:
        prompt: Any = task.prompt
        messages = list(prompt) if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        while True:
            message = client.message(messages, tools=self.schemas)
            asked = message.get("tool_calls") or []
            results = yield [(call["function"]["name"], call["function"]["arguments"]) for call in asked]
            answers = [
                {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": result}
                for call, result in zip(asked, results, strict=True)
            ]
            messages += [message, *answers]

    def _by_tags(self, task: Task, client: ModelClient) -> Turns:
        text: Any = task.prompt
        if not isinstance(text, str):
            raise OperantError("the prompt is a list of messages, and the chat template of the model knows no tools")
        while True:
            reply = client.complete(text)
            results = yield self._calls.findall(reply)
            text += reply + "".join(f"<result>{result}</result>" for result in results)

    def _result(self, name: str, arguments: str | Mapping[str, object]) -> tuple[bool, str]:
        """Whether a call went well, and what the policy reads of it."""
        if name not in self.tools:
            near = difflib.get_close_matches(name, self.tools, 1)
            return False, f"there is no tool {name[:50]!r}{f', did you mean {near[0]!r}?' if near else ''}"
        tool = self.tools[name]
        try:
            with suppress(ValueError, TypeError):  # a text between tags need not be JSON
                read = json.loads(arguments)
                arguments = read if isinstance(read, dict) else arguments
            if isinstance(arguments, str):
                arguments = dict.fromkeys(self._parameters(name)[:1], arguments)
            if unknown := [key for key in arguments if key not in self._parameters(name)]:
                return False, f"{name} has no argument {unknown[0][:50]!r}; it has {', '.join(self._parameters(name))}"
            own = tool.__module__ == __name__  # these bound themselves, whatever else the machine computes
            result = tool(**arguments) if own else _within(partial(tool, **arguments), 2 * self.seconds + 1)
            text, good = result if isinstance(result, str) else json.dumps(result, default=str), True
        except TimeoutError:
            text, good = f"the call took longer than {2 * self.seconds + 1:g} seconds", False
        except Exception as error:
            text, good = describe_error(error), False
        return good, text if len(text) <= self.characters else text[: self.characters] + " ..."

    def _parameters(self, name: str) -> list[str]:
        known = {schema["function"]["name"]: schema["function"]["parameters"] for schema in self.schemas}
        return list(known[name].get("properties", {}))


def _within(call: Callable[[], object], seconds: float) -> object:
    """What a call returns. Raises: TimeoutError after so many seconds; its thread goes on, as Python can end none."""
    answer = Future[object]()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="tool", daemon=True).start()  # a pool would wait for it at the end of the run
    return answer.result(min(seconds, threading.TIMEOUT_MAX))


def python_tool(seconds: float) -> Callable[[str], str]:
    """The tool `python`. Raises: OperantError if no program can be isolated here."""
    jail = Jail(JailOptions(seconds=seconds))
    free = threading.Semaphore(jail.at_once)  # each episode calls from a thread of its own

    def python(code: str) -> str:
        """Run a Python program, and return what it prints and the value of its last line.

        Args:
            code: The program.
        """
        require(len(code) <= LONGEST, f"the program has {len(code)} characters, at most {LONGEST} are read")
        with free:
            [verdict] = jail.run([Program(_with_value(code), [Stdin("", None)])])
        if verdict.outcome != "passed":
            raise OperantError(verdict.message or verdict.outcome)
        return verdict.message.rstrip("\n")

    return python


def _with_value(code: str) -> str:
    """A program that prints the value of its last line, too, if that is an expression."""
    try:
        code = code.replace("\r\n", "\n").replace("\r", "\n")
        *_, last = ast.parse(code).body or [None]
        if isinstance(last, ast.Expr):  # what stands before it stays, so that a message names the line of the program
            *lines, own = code.encode().split(b"\n")[: last.lineno]
            before = b"\n".join([*lines, own[: last.col_offset]]).decode()
            return f"{before}_ = ({ast.get_source_segment(code, last)})\nif _ is not None: print(_)\n"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass  # the harness says what is wrong with it
    return code


def search_tool(folder: str | None) -> Callable[[str], str]:
    """The tool `search`: BM25 over the paragraphs of the .txt and .md files of a folder, by SQLite.

    Raises: OperantError if there is no such folder, or no text in it.
    """
    paths = sorted(p for p in Path(folder).rglob("*") if p.suffix in (".txt", ".md") and p.is_file()) if folder else []
    require(paths, f"env.folder={shown(folder)}: the tool search needs a folder with .txt or .md files")
    index, one = sqlite3.connect(":memory:", check_same_thread=False), threading.Lock()
    index.execute("CREATE VIRTUAL TABLE texts USING fts5(name, text, tokenize='porter unicode61')")
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        parts = [part for part in re.split(r"\n\s*\n", text) if part.strip()]
        index.executemany("INSERT INTO texts VALUES (?, ?)", [(path.name, part.strip()) for part in parts])

    def search(query: str) -> str:
        """Find the paragraphs of a collection of texts that fit a query best.

        Args:
            query: The words to look for.
        """
        words = re.findall(r"\w+", query[:LONGEST])
        require(words, "the query has no words")
        asked = " OR ".join(f'"{word}"' for word in words)
        select = "SELECT name, text FROM texts WHERE texts MATCH ? ORDER BY rank, rowid LIMIT 3"
        with one:
            found = [f"[{name}] {text}" for name, text in index.execute(select, [asked])]
        return "\n".join(found) or "nothing was found"

    return search
