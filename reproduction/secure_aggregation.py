"""Secure aggregation over a network of four processes: the table of docs/secure-aggregation.md.

Seconds, bytes and accuracy of a one-shot method and of five rounds; plain, with secure aggregation,
with a budget of epsilon 3, and with a client that is killed after it has shared its secrets and
before its update has arrived, and started again at once. Takes about five minutes.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from reproduction.runs import Runs

COMMAND = [sys.executable, "-m", "mpfedcl"]
NAMES = ("client-0", "client-1", "client-2", "client-3")
SETTINGS = ["--clients", "4", "--partition.alpha", "10", "--network.round-timeout", "60"]
SECURE, BUDGET = ["--secure-aggregation"], ["--privacy.epsilon", "3"]
EXCHANGE, ROUNDS = ["--method", "fedgauss"], ["--method", "fedavg", "--rounds", "5"]
RUNS: list[tuple[str, list[str], bool]] = [
    ("fedgauss", EXCHANGE, False),
    ("fedgauss, secure aggregation", EXCHANGE + SECURE, False),
    ("fedgauss, secure aggregation, epsilon 3", EXCHANGE + SECURE + BUDGET, False),
    ("the same, one client killed", EXCHANGE + SECURE + BUDGET, True),
    ("fedavg, 5 rounds", ROUNDS, False),
    ("fedavg, 5 rounds, secure aggregation", ROUNDS + SECURE, False),
    ("the same, one client killed", ROUNDS + SECURE, True),
]


def main(runs: Runs) -> None:
    """Run all and print the table."""
    runs.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="secure-aggregation-", dir=runs.folder))
    lab = folder / "lab"
    subprocess.run([*COMMAND, "federation", "init", str(lab), "--clients", "4"], check=True)
    print("| run | seconds | MB up | MB down | accuracy % | in the last round |")
    print("|---|---|---|---|---|---|")
    with started(lab, "server", folder / "server.log"):
        for number, (name, settings, kills) in enumerate(RUNS):
            if number == 0 or not runs.quick:
                measure(lab, folder, f"{number}", name, settings, kills=kills)


def measure(
    lab: Path, folder: Path, run: str, name: str, settings: list[str], *, kills: bool
) -> None:
    """Run one experiment with four clients and print its row."""
    out = folder / f"run-{run}"
    clients = []
    for share, client in enumerate(NAMES):
        clients.append(start(lab, client_words(share), folder / f"{client}.log"))
    try:
        time.sleep(8)
        began = time.monotonic()
        start_words = ["federation", "start", str(lab), *SETTINGS, *settings, "--out", str(out)]
        with (folder / f"start-{run}.log").open("wb") as log:
            running = subprocess.Popen([*COMMAND, *start_words], stdout=log, stderr=log)
        if kills:
            wait_until_shared(lab / "clients" / NAMES[1] / "memory")
            supervisor = psutil.Process(clients[1].pid)
            # Itself first, or it would start its process again.
            for part in (supervisor, *supervisor.children(recursive=True)):
                part.kill()
            clients.append(start(lab, client_words(1), folder / f"{NAMES[1]}.log"))
        running.wait(600)
        seconds = time.monotonic() - began
    finally:
        for process in clients:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
        for process in clients:
            process.wait(60)
    summary = json.loads((out / "summary.json").read_text())
    last = json.loads((out / "rounds.jsonl").read_text().splitlines()[-1])
    up, down = (summary["bytes"][way] / 1e6 for way in ("up", "down"))
    answered = f"{len(last['clients']['answered'])} of 4"
    print(
        f"| {name} | {seconds:.0f} | {up:.2f} | {down:.2f} | {summary['accuracy']:.1f} | "
        f"{answered} |",
        flush=True,
    )


def client_words(share: int) -> list[str]:
    """Return the command of a client."""
    return ["client", "--name", NAMES[share], "--share", str(share)]


def wait_until_shared(memory: Path) -> None:
    """Wait until a client has shared its secrets, and is to send its numbers next."""
    began, end = time.time(), time.monotonic() + 120
    while time.monotonic() < end:
        for file in memory.glob("*/secure-sum.json"):
            if file.stat().st_mtime > began and json.loads(file.read_bytes())["client"]["next"] in (
                "mask",
                "confirm",
            ):
                return
        time.sleep(0.005)
    raise SystemExit("the client has not begun a secure sum within 120 s")


def start(lab: Path, words: list[str], log: Path) -> "subprocess.Popen[bytes]":
    """Start a command of the federation in a group of its own."""
    kind, *rest = words
    with log.open("ab") as file:
        return subprocess.Popen(
            [*COMMAND, "federation", kind, str(lab), *rest],
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


@contextmanager
def started(lab: Path, kind: str, log: Path) -> Iterator[None]:
    """Keep a command running."""
    process = start(lab, [kind], log)
    time.sleep(10)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
