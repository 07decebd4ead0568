"""Programs that attack whoever runs them, from hostile_programs.txt, and a room of canaries for them.

For tests/test_hostile_programs.py and benchmarks/hostile.py.

Each proves its harm: it passes a test that no honest answer of it passes, changes something in a room of canaries, or
never ends. `forged` programs do not compute what the test expects; the function of a `harms` program returns 42 after
what it should not be able to do, and that of a `reads` program returns a secret. Run without a sandbox, they harm the
canaries alone: what would be a bomb is a small one.
"""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path

from operant.sandbox.jail import Code, Program, Stdin, Verdict

SQUARES, PROOF = "assert f(3, 4) == 25", "assert f() == 42"


@dataclass(frozen=True)
class Hostile:
    name: str
    kind: str
    """forged, reads, harms or hangs."""
    source: str
    test: str
    """Python code, or what it should print."""


def _all() -> list[Hostile]:
    found = []
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    for section in re.split(r"^### (?=\w+: )", text, flags=re.MULTILINE)[1:]:
        head, _, rest = section.partition("\n")
        source, _, test = rest.partition("### test\n")
        kind, _, name = head.partition(": ")
        found.append(Hostile(name, kind, source, test.strip() or (SQUARES if kind == "forged" else PROOF)))
    return found


ALL = _all()


class Room:
    """Canaries: files, a process, servers and a secret. A program that finds one proves it."""

    def __init__(self, folder: Path):
        self.folder, self.secret = folder, uuid.uuid4().hex
        (folder / "folder").mkdir(parents=True)
        (folder / "cwd").mkdir()
        for name, text in (("secret.txt", self.secret), ("precious.txt", "precious"), ("folder/inside.txt", "inside")):
            (folder / name).write_text(text, encoding="utf-8")
        self.canary = subprocess.Popen(["sleep", "600"], cwd=folder, env={"SECRET": self.secret})
        self.server = socket.create_server(("127.0.0.1", 0))
        self.visits = 0
        threading.Thread(target=self._serve, daemon=True).start()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.listener.bind(str(folder / "listener"))
        self.listener.setblocking(False)
        self.before = self.state()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.server.accept()
                self.visits += 1
                with connection:
                    connection.sendall(self.secret.encode())

    def state(self) -> dict[str, object]:
        """Everything that a program should leave as it is."""
        found: dict[str, object] = {"visits": self.visits}
        for path in sorted(self.folder.rglob("*")):
            if "cwd" not in path.relative_to(self.folder).parts:
                status = path.lstat()
                text = path.read_bytes() if path.is_file() else b""
                found[str(path)] = (status.st_mode, status.st_mtime if path.is_file() else 0, text)
        with contextlib.suppress(OSError):
            found["letters"] = self.listener.recv(99)
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{self.canary.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            found["canary"] = (words[0] in "SRD", words[16])
        return found

    def close(self) -> None:
        self.canary.kill()
        self.canary.wait()
        self.server.close()
        self.listener.close()

    def program(self, hostile: Hostile) -> Program:
        head = f"ROOM, CANARY, PORT = {str(self.folder)!r}, {self.canary.pid}, {self.server.getsockname()[1]}\n"
        if hostile.test == "stdin":
            return Program(head + hostile.source, [Stdin("", "never")])
        secret = hostile.test.replace("42", repr(self.secret)) if hostile.kind == "reads" else hostile.test
        return Program(head + hostile.source, [Code(secret)])

    def unprotected(self, hostile: Hostile, seconds: float = 1.5) -> str:
        """What it does to a plain runner: one that executes program and tests, and looks at the exit status."""
        program = self.program(hostile)
        file = self.folder / "cwd/naive.py"
        [test] = program.tests
        file.write_text(f"{program.source}\n{test.code if isinstance(test, Code) else ''}\n", encoding="utf-8")
        none = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        given = {"cwd": file.parent, "env": {"SECRET": self.secret}, "start_new_session": True}
        process = subprocess.Popen([sys.executable, str(file)], **given, **none)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
        return self.harm(hostile, passed=status == 0, ended=status is not None)

    def harm(self, hostile: Hostile, passed: bool, ended: bool) -> str:
        """What has happened, in a word or two; empty for nothing."""
        if passed:
            return {"forged": "passed", "reads": "read it"}.get(hostile.kind, "did it")
        if not ended:
            return "never ended"
        return "" if self.state() == self.before else "left traces"


def judged(room: Room, hostile: Hostile, verdict: Verdict) -> str:
    """The harm that it has done from inside the jail; empty for none."""
    return room.harm(hostile, passed=verdict.outcome == "passed", ended=True)
