"""A federation of real processes on this machine, and the means to disturb it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mpfedcl.files import write_atomically

Found = TypeVar("Found")

_MARK = "MPFEDCL_LABORATORY"
LONG = 240.0
"""Seconds after which a wait has failed: far more than anything takes, for machines under load."""

SUPERLINK, SUPERNODE = "flower-superlink", "flower-supernode"
SERVER_APP, CLIENT_APP, RESIDENT = (
    "flwr-serverapp",
    "flwr-clientapp",
    "mpfedcl.network.client.service",
)


def until(look: Callable[[], Found | None], what: str, seconds: float = LONG) -> Found:
    """Wait until a look at something finds it; a wait that is too long fails."""
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.1)
    return found


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class Program:
    """A command of ours that runs, its words in a file."""

    process: subprocess.Popen[bytes]
    words: Path

    def said(self) -> str:
        return " ".join(self.words.read_text(errors="replace").split())

    def wait(self, seconds: float = LONG) -> int:
        return self.process.wait(seconds)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End it without a chance to tidy up."""
        self.process.kill()
        self.process.wait(10)


@dataclass
class Course:
    """A run that goes on."""

    program: Program
    path: Path

    def records(self) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            lines = (self.path / "rounds.jsonl").read_text().splitlines(keepends=True)
            return [json.loads(line) for line in lines if line.endswith("\n")]
        return []

    def until_record(
        self, fits: Callable[[dict[str, Any]], bool], what: str, after: int = 0
    ) -> dict[str, Any]:
        """Wait for a record, after a round, that is as wanted."""

        def look() -> dict[str, Any] | None:
            found = [each for each in self.records() if each["round"] > after and fits(each)]
            assert found or self.program.process.poll() is None, self.program.said()
            return found[0] if found else None

        return until(look, f"{what}; the last record: {self.records()[-1:]}")

    def until_round(self, number: int) -> None:
        self.until_record(lambda record: record["round"] >= number, f"round {number}")

    def until_answer(self, name: str, after: int) -> dict[str, Any]:
        return self.until_record(
            lambda each: name in each["clients"]["answered"], f"{name} answers", after
        )

    def until_missing(self, name: str, after: int) -> dict[str, Any]:
        return self.until_record(
            lambda each: name in each["clients"]["missing"], f"{name} is missing", after
        )

    @property
    def round(self) -> int:
        """The last round on record."""
        return len(self.records())


@dataclass
class Laboratory:
    """A federation's folder, and the processes that were started for it."""

    root: Path
    port: int = field(default_factory=free_port)
    within: tuple[str, ...] = ()
    """Words before every command: what puts it elsewhere, such as into a network namespace."""

    def __post_init__(self) -> None:
        self.root.mkdir(exist_ok=True)
        self.programs: list[Program] = []
        self.clients: dict[str, Program] = {}
        self.server: Program | None = None

    @property
    def folder(self) -> Path:
        return self.root / "lab"

    def call(self, *words: object, seconds: float = LONG) -> subprocess.CompletedProcess[str]:
        """Run one of our commands to its end."""
        return subprocess.run(
            self._command(words),
            cwd=self.root,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def spawn(self, *words: object, within: Sequence[str] | None = None) -> Program:
        """Start one of our commands."""
        path = self.root / f"words-{len(self.programs)}"
        with path.open("wb") as file:
            process = subprocess.Popen(
                self._command(words, within),
                cwd=self.root,
                env=self.environment(),
                stdout=file,
                stderr=file,
            )
        self.programs.append(Program(process, path))
        return self.programs[-1]

    def make(self, *words: object) -> None:
        done = self.call("init", "lab", "--port", self.port, *words)
        assert done.returncode == 0, done.stderr

    def start_server(self) -> Program:
        self.server = server = self.spawn("server", "lab")
        self.until_said(server, "Ctrl-C ends it")
        return server

    def start_client(self, name: str, *words: object, within: Sequence[str] | None = None) -> None:
        """Start a client and wait until the server has it."""
        log = self.folder / "clients" / name / "supernode.log"
        before = _count(log, "SuperNode ID")
        self.clients[name] = self.spawn("client", "lab", "--name", name, *words, within=within)
        until(lambda: _count(log, "SuperNode ID") > before, f"{name} is let in")

    def begin(self, name: str, *settings: object) -> Course:
        """Start a run; the clients' number is that of the embedded data's shares."""
        path = self.root / name
        words = ["start", "lab", "--out", path, "--clients", 3, *settings]
        return Course(self.spawn(*words), path)

    def resume(self, course: Course, *settings: object) -> Course:
        words = ["start", "lab", "--resume", course.path, *settings]
        return Course(self.spawn(*words), course.path)

    def status(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self.folder / "server/status.json").read_text())
            return found
        return {}

    def until_said(self, program: Program, words: str) -> None:
        def look() -> bool:
            # In this order: what ends may have spoken just before.
            has_ended = program.process.poll() is not None
            is_said = words in program.said()
            assert is_said or not has_ended, program.said()
            return is_said

        until(look, f"it says {words!r}")

    def until_asked(self, name: str) -> None:
        """Wait until a round waits for this client's answer."""

        def look() -> bool:
            status = self.status()
            return status.get("what") == "training" and name in status.get("waiting", ())

        until(look, f"{name} is asked")

    def find(self, what: str, client: str | None = None) -> list[int]:
        """Return the processes of a kind, of all or of one client."""
        home = f"clients/{client}/flower" if client else ""
        return [
            pid
            for pid, (command, home_of) in self.living().items()
            if what in command and home_of.endswith(home)
        ]

    def one(self, what: str, client: str | None = None) -> int:
        return until(lambda: self.find(what, client), f"a process {what} of {client}")[0]

    def fresh(self, what: str, client: str) -> int:
        """Wait for a process that is not there yet: one that has not done its work."""
        before = set(self.find(what, client))
        return until(lambda: set(self.find(what, client)) - before, f"a new {what}").pop()

    def living(self) -> dict[int, tuple[str, str]]:
        """Return all processes that come from here: command line and Flower's folder, by number."""
        return dict(_living(str(self.root)))

    def finish(self) -> None:
        """End everything that was started here, and see that nothing is left."""
        for program in reversed(self.programs):
            if program.process.poll() is None:
                program.process.send_signal(signal.SIGTERM)
        for program in self.programs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.process.wait(60)
        end = time.monotonic() + 30
        while (left := self.living()) and time.monotonic() < end:
            time.sleep(0.2)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for program in self.programs:
            program.process.wait(10)
        assert not left, f"left over: {left}"

    def _command(self, words: Sequence[object], within: Sequence[str] | None = None) -> list[str]:
        place = self.within if within is None else within
        ours = [sys.executable, "-m", "mpfedcl", "federation"]
        return [*place, *ours, *(str(word) for word in words)]

    def environment(self) -> dict[str, str]:
        return {**os.environ, _MARK: str(self.root), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def _count(log: Path, words: str) -> int:
    with contextlib.suppress(FileNotFoundError):
        return log.read_text(errors="replace").count(words)
    return 0


def _living(root: str) -> Iterator[tuple[int, tuple[str, str]]]:
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = dict(
                each.split("=", 1)
                for each in (place / "environ").read_bytes().decode(errors="replace").split("\0")
                if "=" in each
            )
            if variables.get(_MARK) == root:
                command = (place / "cmdline").read_bytes().decode(errors="replace")
                yield int(place.name), (command.replace("\0", " "), variables.get("FLWR_HOME", ""))


class Notebook:
    """What happened to whom, and how long it took; the table of docs/federation.md."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, str, str]] = []

    def write(self, fault: str, happened: str, seconds: float, lost: str) -> None:
        self.lines.append((fault, happened, f"{seconds:.0f} s", lost))

    def save(self, path: Path) -> None:
        heads = ("fault", "what happened", "until all was well again", "lost")
        rows = [heads, tuple("---" for _ in heads), *self.lines]
        text = "\n".join("| " + " | ".join(row) + " |" for row in rows)
        write_atomically(path, (text + "\n").encode())
