"""A federation of real processes on this machine, and ways to disturb it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from mpfedcl.core.files import write_atomically

Found = TypeVar("Found")

_MARK = "MPFEDCL_TEST_FEDERATION"
LONG = 480.0
"""Seconds after which a wait has failed: far more than anything takes, for machines under load."""

SUPERLINK = "mpfedcl.network.flower.superlink"
SERVER_EXECUTOR = "mpfedcl.flower_app"
CLIENT_EXECUTOR = "mpfedcl.network.flower.client"
CLIENTS = ("client-0", "client-1", "client-2")
"""Those that are always there; each holds a share of the embedded data."""


def wait_until(find: Callable[[], Found | None], what: str, seconds: float = LONG) -> Found:
    """Wait until something is found; a wait that is too long fails."""
    end = time.monotonic() + seconds
    while not (found := find()):
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.1)
    return found


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class Program:
    """A command of ours that was started, its output in a file."""

    process: subprocess.Popen[bytes]
    file: Path

    @property
    def output(self) -> str:
        return " ".join(self.file.read_text(errors="replace").split())

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait(self, seconds: float = LONG) -> int:
        return self.process.wait(seconds)

    def wait_for_output(self, words: str) -> None:
        def find() -> bool:
            # In this order: what ends may have printed just before.
            is_running = self.is_running
            is_said = words in self.output
            assert is_said or is_running, self.output
            return is_said

        wait_until(find, f"it says {words!r}")

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End it without a chance to tidy up."""
        self.process.kill()
        self.process.wait(LONG)


@dataclass
class FederationRun:
    """A run under way, with the command that started it."""

    program: Program
    path: Path
    status_file: Path

    def records(self) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            lines = (self.path / "rounds.jsonl").read_text().splitlines(keepends=True)
            return [json.loads(line) for line in lines if line.endswith("\n")]
        return []

    @property
    def recorded(self) -> int:
        """The last round on record."""
        return len(self.records())

    def status(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(self.status_file.read_text())
            return found
        return {}

    def executor(self) -> psutil.Process:
        """Return the server's process that runs it."""
        return psutil.Process(wait_until(lambda: self.status().get("pid"), "the run begins"))

    def finish(self, seconds: float = LONG) -> None:
        """Wait for its end, which must be a good one."""
        assert self.program.wait(seconds) == 0, self.program.output

    def wait_for_record(
        self, fits: Callable[[dict[str, Any]], bool], what: str, after: int = 0
    ) -> dict[str, Any]:
        """Wait for a record, after a round, that is as wanted."""

        def find() -> dict[str, Any] | None:
            is_running = self.program.is_running
            found = [each for each in self.records() if each["round"] > after and fits(each)]
            assert found or is_running, self.program.output
            return found[0] if found else None

        return wait_until(find, f"{what}; the last record: {self.records()[-1:]}")

    def wait_for_answer(self, name: str, after: int) -> dict[str, Any]:
        return self.wait_for_record(
            lambda each: name in each["clients"]["answered"], f"{name} answers", after
        )

    def wait_for_missing(self, name: str, after: int) -> dict[str, Any]:
        return self.wait_for_record(
            lambda each: name in each["clients"]["missing"], f"{name} is missing", after
        )

    def wait_for_training(self, name: str, number: int = 1) -> int:
        """Wait until a round, this one or a later, waits for a client's answer; return it.

        The record of a round comes later: clients evaluate it with the message of the next.
        """

        def find() -> int | None:
            is_running, status = self.program.is_running, self.status()
            assert is_running, self.program.output
            waits = status.get("what") == "training" and name in status["waiting"]
            return int(status["round"]) if waits and status["round"] >= number else None

        return wait_until(find, f"round {number} waits for {name}")


@dataclass
class ProcessFederation:
    """A federation's folder, and the processes that were started for it."""

    root: Path
    port: int = field(default_factory=free_port)
    prefix: tuple[str, ...] = ()
    """Before every command: what puts it elsewhere, such as into a network namespace."""

    def __post_init__(self) -> None:
        self.root.mkdir(exist_ok=True)
        self.programs: list[Program] = []
        self.clients: dict[str, Program] = {}
        self.server: Program | None = None
        self._run: FederationRun | None = None

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

    def start(self, *words: object, prefix: Sequence[str] | None = None) -> Program:
        """Start one of our commands."""
        path = self.root / f"output-{len(self.programs)}"
        with path.open("wb") as file:
            process = subprocess.Popen(
                self._command(words, prefix),
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

    def start_server(self, *words: object) -> Program:
        self.server = server = self.start("server", "lab", *words)
        server.wait_for_output("Ctrl-C ends it")
        return server

    def start_clients(
        self, commands: dict[str, Sequence[object]], prefix: Sequence[str] | None = None
    ) -> None:
        """Start clients all at once, and wait until the server has let them in."""
        for name, words in commands.items():
            self.clients[name] = self.start("client", "lab", "--name", name, *words, prefix=prefix)
        for name in commands:
            self.clients[name].wait_for_output(f"{name} is connected to")

    def repair(self) -> None:
        """Start the server and those clients again that a test has ended."""
        if self.server is None or not self.server.is_running:
            self.start_server()
        self.start_clients(
            {
                name: ("--share", share)
                for share, name in enumerate(CLIENTS)
                if name not in self.clients or not self.clients[name].is_running
            }
        )

    def begin(self, name: str, *settings: object) -> FederationRun:
        """Start a run; the clients' number is that of the embedded data's shares."""
        path = self.root / name
        return self._start_run(path, "--out", path, "--clients", len(CLIENTS), *settings)

    def resume(self, run: FederationRun, *settings: object) -> FederationRun:
        return self._start_run(run.path, "--resume", run.path, *settings)

    def _start_run(self, path: Path, *words: object) -> FederationRun:
        if self._run is not None and self._run.program.is_running:
            # A test that failed has left it behind.
            self._run.program.kill()
            before = set(self.find(SERVER_EXECUTOR))
            for process in before:
                process.kill()
            wait_until(lambda: set(self.find(SERVER_EXECUTOR)) - before, "the run before ends")
        # Of a run that was killed.
        status = self.folder / "server" / "status.json"
        status.unlink(missing_ok=True)
        self._run = FederationRun(self.start("start", "lab", *words), path, status)
        return self._run

    def find(self, what: str, client: str | None = None) -> list[psutil.Process]:
        """Return the processes of a kind, of all or of one client."""
        end = f"clients/{client}/flower" if client else ""
        return [
            process
            for process, (command, home) in self.processes().items()
            if what in command and home.endswith(end)
        ]

    def find_one(self, what: str, client: str | None = None) -> psutil.Process:
        return wait_until(lambda: self.find(what, client), f"a process {what} of {client}")[0]

    def processes(self) -> dict[psutil.Process, tuple[str, str]]:
        """Return all processes that come from here, with command line and Flower's folder."""
        found = {}
        for process in psutil.process_iter(["environ", "cmdline"]):
            variables = process.info["environ"] or {}
            if variables.get(_MARK) == str(self.root):
                command = " ".join(process.info["cmdline"] or ())
                found[process] = command, variables.get("FLWR_HOME", "")
        return found

    def finish(self) -> None:
        """End everything that was started here, and see that nothing is left."""
        running = [program for program in reversed(self.programs) if program.is_running]
        for program in running:
            program.process.send_signal(signal.SIGTERM)
        for program in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.process.wait(LONG)
        end = time.monotonic() + LONG
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.2)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        assert not left, f"left over: {left}"
        if self.server in running:
            assert self.server.wait() == 0, self.server.output

    def _command(self, words: Sequence[object], prefix: Sequence[str] | None = None) -> list[str]:
        place = self.prefix if prefix is None else prefix
        ours = [sys.executable, "-m", "mpfedcl", "federation"]
        return [*place, *ours, *(str(word) for word in words)]

    def environment(self) -> dict[str, str]:
        return {**os.environ, _MARK: str(self.root), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


class FaultLog:
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
