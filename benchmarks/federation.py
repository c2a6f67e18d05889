"""What a round costs over Flower, against the simulation: seconds, and who used the processor.

    python benchmarks/federation.py [--rounds 10]

A server and three clients on this machine, TLS and keys on. Run it on an idle machine: what is
waited for is wall-clock time. It prints the tables of docs/federation.md.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from measuring import Table

PROGRAM = [sys.executable, "-m", "mpfedcl"]
KINDS = {
    "mpfedcl.network.flower.superlink": "server: Flower's SuperLink",
    "mpfedcl.flower_app": "server: the run",
    "mpfedcl.network.flower.client": "the clients",
}
CLIENTS = 3
SETTINGS = ["--clients", str(CLIENTS), "--partition.alpha", "1"]


def wait_for(path: Path, words: str, seconds: float = 180) -> None:
    """Wait until a file has these words in it."""
    end = time.monotonic() + seconds
    while not (path.is_file() and words in path.read_text(errors="replace")):
        if time.monotonic() > end:
            raise SystemExit(f"{path} does not say {words!r} within {seconds:g} s")
        time.sleep(0.1)


def make_lab(folder: Path, clients: int) -> tuple[Path, str]:
    """Make the folders of a federation on a free port; return them and the port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    lab = folder / "lab"
    words = ["federation", "init", str(lab), "--clients", str(clients), "--port", port]
    subprocess.run([*PROGRAM, *words], check=True, stdout=subprocess.DEVNULL)
    return lab, port


@contextlib.contextmanager
def federation(folder: Path) -> Iterator[Path]:
    """Run a server and clients in a folder."""
    lab, _ = make_lab(folder, CLIENTS)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[bytes]] = []
    try:
        commands = [["server", str(lab)]]
        for number in range(CLIENTS):
            name = f"client-{number}"
            commands.append(["client", str(lab), "--name", name, "--share", str(number)])
        for command in commands:
            said = folder / f"said-{len(started)}"
            with said.open("wb") as file:
                words = [*PROGRAM, "federation", *command]
                started.append(subprocess.Popen(words, env=env, stderr=file, stdout=file))
            wait_for(said, "Ctrl-C ends it")
        yield lab
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGINT)
        for process in started:
            process.wait(60)


def used(lab: Path) -> dict[str, float]:
    """Return the processor's seconds that each kind of process has used, with its children."""
    seconds = dict.fromkeys(KINDS.values(), 0.0)
    for process in psutil.process_iter(["environ", "cmdline", "cpu_times"]):
        home = (process.info["environ"] or {}).get("FLWR_HOME", "")
        times = process.info["cpu_times"]
        if not home.startswith(str(lab.resolve())) or times is None:
            continue
        command = " ".join(process.info["cmdline"] or ())
        for name, kind in KINDS.items():
            if name in command:
                # User and system time.
                seconds[kind] += sum(times[:2])
    return seconds


def run_over_network(lab: Path, rounds: int, out: Path) -> tuple[float, dict[str, float]]:
    """Return the seconds of a round, and of the processor by kind of process and round."""
    words = ["federation", "start", str(lab), *SETTINGS, "--rounds", str(rounds), "--out", str(out)]
    process = subprocess.Popen([*PROGRAM, *words], stdout=subprocess.DEVNULL)
    records = out / "rounds.jsonl"
    wait_for(records, '"round": 2,')
    before, began = used(lab), time.monotonic()
    # Before the last one: with it the run's process ends.
    wait_for(records, f'"round": {rounds - 1},', 600)
    after, ended = used(lab), time.monotonic()
    if process.wait(120):
        raise SystemExit("the run failed")
    each = rounds - 3
    spent = {kind: (after[kind] - before[kind]) / each for kind in after}
    return (ended - began) / each, spent


def simulate(rounds: int, out: Path) -> float:
    """Return the seconds of a round in one process."""
    words = ["run", *SETTINGS, "--rounds", str(rounds), "--out", str(out)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*PROGRAM, *words], check=True, stdout=subprocess.DEVNULL, env=env)
    lines = (out / "rounds.jsonl").read_text().splitlines()[2:]
    seconds: list[float] = [sum(json.loads(line)["seconds"].values()) for line in lines]
    return statistics.mean(seconds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What a round costs over Flower.")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of each run")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        simulated = simulate(rounds, place / "simulated")
        with federation(place) as lab:
            before = used(lab)
            time.sleep(10)
            after = used(lab)
            idle = sum(after.values()) - sum(before.values())
            seconds, spent = run_over_network(lab, rounds, place / "run")
    rows = [
        ["a round over Flower", f"{seconds:.1f}"],
        ["the same round simulated", f"{simulated:.2f}"],
        *[[f"processor: {kind}", f"{spent[kind]:.2f}"] for kind in KINDS.values()],
        ["processor while idle, a second", f"{idle / 10:.3f}"],
    ]
    load = os.getloadavg()[0]
    note = f"Load when this was measured: {load:.1f} on {os.cpu_count()} cores."
    print(Table(f"Seconds a round, {CLIENTS} clients", ["", "seconds"], rows, note).markdown())


if __name__ == "__main__":
    main()
