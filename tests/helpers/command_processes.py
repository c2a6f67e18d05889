"""`mpfedcl` in processes of its own, all forked from one that has torch loaded.

Python, torch and what a run needs take four seconds of a processor to load, for a second's test.
So there is one process for each that runs tests, which loads them once; what is killed, limited and
interrupted is a process of its own. `test_cli` and others start `mpfedcl` from nothing, too.
"""

import fcntl
import importlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from small_experiments import HIDDEN
from unrendered_figures import render

FORKS = multiprocessing.get_context("forkserver")
PRELOADED = [
    *("mpfedcl.cli.run", "mpfedcl.cli.finished_runs"),
    "mpfedcl.report.figures",
    "mpfedcl.runs.worker",
    "mpfedcl.network.client.client",
    "warm_commands",
]
FORKS.set_forkserver_preload(PRELOADED)


def start_server() -> None:
    """Start the process that others are forked from, if there is none yet."""
    # It does not look where this process does, and is silent about what it cannot import.
    places = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(places)}):
        forkserver.ensure_running()


def environment(**changes: str) -> dict[str, str]:
    kept = {name: each for name, each in os.environ.items() if not name.startswith("MPFEDCL")}
    return kept | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"} | changes


def command(*words: object) -> list[str]:
    """Return the words that start `mpfedcl` from nothing."""
    return [sys.executable, "-m", "mpfedcl", *(str(word) for word in words)]


class CommandProcess:
    """A process that runs a command, to be used like one of `subprocess`."""

    def __init__(
        self,
        words: Sequence[object],
        cwd: Path,
        variables: Mapping[str, str] | None = None,
        *,
        new_session: bool = False,
        file_size: int | None = None,
        small_model: bool = False,
        forked_jobs: bool = False,
        forked_workers: bool = False,
        figures: bool = False,
        program: Callable[[list[str]], object] | None = None,
    ) -> None:
        """Run `mpfedcl`, or the main function of another program.

        `small_model` makes that of the fixture of this name of the paper's, in this process alone;
        `forked_jobs` and `forked_workers` have the processes of --jobs and --workers forked like
        this one, not started from nothing; `figures` makes pixels of what is drawn.
        """
        pipes = [FORKS.Pipe(duplex=False) for _ in range(2)]
        self._said = [bytearray(), bytearray()]
        self._readers = [
            threading.Thread(target=_read, args=(pipe[0], said), daemon=True)
            for pipe, said in zip(pipes, self._said, strict=True)
        ]
        given = [str(word) for word in words]
        writers = [pipe[1] for pipe in pipes]
        places = (str(cwd), environment(**variables or {}))
        start_server()
        forked = (forked_jobs, forked_workers)
        changes = (new_session, file_size, small_model, forked, figures, program)
        self._process = FORKS.Process(target=_run, args=(given, *places, writers, *changes))
        self._process.start()
        for writer in writers:
            writer.close()
        for reader in self._readers:
            reader.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 300) -> int:
        """Wait for its end; return its exit code."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("mpfedcl", timeout)
        return self._process.exitcode

    def first_line(self, timeout: float = 120) -> str:
        """Wait for the first line of its output; return what there is if it ends before."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._said[0] and self._readers[0].is_alive():
            assert time.monotonic() < deadline, "it said nothing"
            time.sleep(0.01)
        return bytes(self._said[0]).partition(b"\n")[0].decode()

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Wait for its end; return its output and errors."""
        for reader in self._readers:
            reader.join(timeout)
        self.wait(timeout)
        out, err = (bytes(said).decode() for said in self._said)
        return out, err


def call(
    *words: object, cwd: Path, variables: Mapping[str, str] | None = None, **changes: Any
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end in a process of its own; `changes` are those of `CommandProcess`."""
    process = CommandProcess(words, cwd, variables, **changes)
    try:
        out, err = process.communicate()
    finally:
        process.kill()
    given = [str(word) for word in words]
    return subprocess.CompletedProcess(given, process.wait(), out, err)


def with_states_in_files(words: list[str]) -> None:
    """Run a command that keeps nothing of clients in memory between rounds."""
    from mpfedcl.cli.main import main
    from mpfedcl.engines import client_states

    vars(client_states)["MOST_IN_MEMORY"] = 0
    main(words)


def into_a_full_disk(words: list[str]) -> None:
    """Run `mpfedcl` with a file on a full disk as standard output."""
    _write_to(os.open("/dev/full", os.O_WRONLY), words)


def into_a_closed_pipe(words: list[str]) -> None:
    """Run `mpfedcl` with a closed pipe as standard output."""
    reading, writing = os.pipe()
    os.close(reading)
    _write_to(writing, words)


def _write_to(file: int, words: list[str]) -> None:
    from mpfedcl.cli.main import main

    os.dup2(file, 1)
    os.close(file)
    main(words)


def forked_from_server() -> list[int]:
    """Return all processes that were forked here and have not ended."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server is None:
        return []
    listed = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return [int(child) for child in listed]


def _read(pipe: Connection, said: bytearray) -> None:
    with os.fdopen(os.dup(pipe.fileno()), "rb", buffering=0) as stream:
        pipe.close()
        while content := stream.read(65536):
            said.extend(content)


def _run(
    words: list[str],
    cwd: str,
    variables: dict[str, str],
    streams: list[Connection],
    new_session: bool,
    file_size: int | None,
    small_model: bool,
    forked: tuple[bool, bool],
    figures: bool,
    program: Callable[[list[str]], object] | None,
) -> None:
    """Become the program."""
    import torch

    from mpfedcl.cli.main import main
    from mpfedcl.engines import worker_group
    from mpfedcl.models import mlp
    from mpfedcl.studies import jobs

    for number, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), number)
        stream.close()
    if new_session:
        os.setsid()
    if file_size is not None:
        # The system refuses as it does on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)
    render(pixels=figures)
    if small_model:
        vars(mlp)["HIDDEN_ON_PIXELS"] = HIDDEN
    forked_jobs, forked_workers = forked
    if any(forked):
        # It knows the server that it was forked from, but would start another.
        vars(forkserver._forkserver)["ensure_running"] = lambda: None
    if forked_jobs:
        vars(jobs)["multiprocessing"] = SimpleNamespace(get_context=lambda _: FORKS)
    if forked_workers:
        vars(worker_group)["subprocess"] = FORKED_WORKERS
    (program or main)(words)


class _ForkedWorker:
    """What `engines.worker_group` needs of a process that it starts."""

    def __init__(self, words: list[str], *, env: dict[str, str], **_: object) -> None:
        stdin, self.stdin = FORKS.Pipe(duplex=False)
        streams = {0: stdin, 2: Connection(os.dup(2), readable=False)}
        places = (str(Path.cwd()), env)
        self._process = FORKS.Process(target=_work, args=(words[-1], *places, streams))
        self._process.start()
        for stream in streams.values():
            stream.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("worker", timeout or 0)


FORKED_WORKERS = SimpleNamespace(
    Popen=_ForkedWorker,
    PIPE=subprocess.PIPE,
    DEVNULL=subprocess.DEVNULL,
    TimeoutExpired=subprocess.TimeoutExpired,
)
"""In place of `subprocess`, where a run starts its workers."""


def _work(module: str, cwd: str, variables: dict[str, str], streams: dict[int, Connection]) -> None:
    """Become a worker."""
    os.setpgid(0, 0)
    # Out of the way of the numbers that they are to have.
    kept = {
        number: fcntl.fcntl(each.fileno(), fcntl.F_DUPFD, 1000) for number, each in streams.items()
    }
    for stream in streams.values():
        stream.close()
    for number, descriptor in kept.items():
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    sys.exit(importlib.import_module(module).main())
