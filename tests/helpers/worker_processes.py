"""Runs in several processes: started, waited for and looked at from outside."""

import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from command_processes import CommandProcess, environment, forked_from_server
from small_experiments import HIDDEN, flags


def start(words: list[str], cwd: Path, **changes: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        cwd=cwd,
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run_together(
    words: Sequence[object],
    cwd: Path,
    size: int,
    *,
    small_model: bool = False,
    program: Callable[[list[str]], object] | None = None,
) -> None:
    """Run a command in several processes that meet as those of torchrun do, to its end."""
    meeting = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "LOCAL_RANK": "0",
    }
    members = [
        CommandProcess(
            words, cwd, meeting | {"RANK": str(rank)}, small_model=small_model, program=program
        )
        for rank in range(size)
    ]
    try:
        said = [member.communicate() for member in members]
        assert [member.returncode for member in members] == [0] * size, said
    finally:
        for member in members:
            member.kill()


def wait_for_rounds(path: Path, count: int) -> None:
    file = path / "rounds.jsonl"
    for _ in range(4800):
        if file.exists() and file.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"{file} never had {count} rounds")


def children(process: CommandProcess) -> list[int]:
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in listed]


def listening_addresses(process: int) -> set[str]:
    """Return the addresses, as the kernel writes them, on which a process waits for calls."""
    held = {
        str(each.readlink()) for each in Path(f"/proc/{process}/fd").iterdir() if each.is_symlink()
    }
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]
    ]
    # Column 3 is the state, 0A for listening; column 9 the number of the socket.
    return {
        words[1].partition(":")[0]
        for words in lines
        if words[3] == "0A" and f"socket:[{words[9]}]" in held
    }


def is_gone(process: int) -> bool:
    """Wait a while for a process to end; a zombie has ended."""
    for _ in range(2400):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def start_two(
    images: Path,
    tmp_path: Path,
    commands: list[CommandProcess],
    *,
    forked: bool = True,
    dtype: str = "float32",
    worker_timeout: int = 300,
) -> tuple[CommandProcess, int]:
    """Start a run without end in two processes, and wait for its first rounds.

    The worker is forked as the leader is, or else started from nothing by it.
    """
    endless = {"rounds": 100_000, "evaluate_every": 100_000, "model__hidden": HIDDEN}
    # Not as many for the one as for the other: a client is trained by both.
    words = ["run", *flags(images, clients=5, dtype=dtype, **endless), "--workers", 2]
    words += ["--worker-timeout", worker_timeout]
    others = set(forked_from_server())
    leader = CommandProcess([*words, "--out", "run"], tmp_path, forked_workers=forked)
    commands.append(leader)
    wait_for_rounds(tmp_path / "run", 3)
    (worker,) = set(forked_from_server()) - others - {leader.pid} if forked else children(leader)
    return leader, worker
