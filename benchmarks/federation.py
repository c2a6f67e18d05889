"""What a round costs over Flower, against the simulation: seconds, and who used the processor.

    python benchmarks/federation.py [--rounds 10] [--poll 0.1 0.5 1]

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
    "flower-superlink": "server: SuperLink",
    "flwr-serverapp": "server: our ServerApp",
    "flower-superexec": "Flower's process a message, and who starts it",
    "flower-supernode": "clients: SuperNode",
    "mpfedcl.network.client.service": "clients: training",
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


@contextlib.contextmanager
def federation(folder: Path, poll: str) -> Iterator[Path]:
    """Run a server and clients in a folder."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    lab = folder / "lab"
    words = ["federation", "init", str(lab), "--clients", str(CLIENTS), "--port", port]
    subprocess.run([*PROGRAM, *words], check=True, stdout=subprocess.DEVNULL)
    env = {**os.environ, "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": poll, "OMP_NUM_THREADS": "1"}
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
        for number in range(CLIENTS):
            wait_for(lab / "clients" / f"client-{number}" / "supernode.log", "SuperNode ID")
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
        # User and system time; for the starter of processes also that of its children.
        count = 4 if "flower-superexec" in command else 2
        for name, kind in KINDS.items():
            if name in command:
                seconds[kind] += sum(times[:count])
    return seconds


def run_over_network(lab: Path, rounds: int, out: Path) -> tuple[float, dict[str, float]]:
    """Return the seconds of a round, and of the processor by kind of process and round."""
    words = ["federation", "start", str(lab), *SETTINGS, "--rounds", str(rounds), "--out", str(out)]
    process = subprocess.Popen([*PROGRAM, *words], stdout=subprocess.DEVNULL)
    records = out / "rounds.jsonl"
    wait_for(records, '"round": 2,')
    before, began = used(lab), time.monotonic()
    wait_for(records, f'"round": {rounds},', 600)
    after, ended = used(lab), time.monotonic()
    if process.wait(120):
        raise SystemExit("the run failed")
    each = rounds - 2
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


def start_of_a_process() -> tuple[float, float]:
    """Return the wall-clock and processor seconds of starting Flower's process for a message."""
    code = "import flwr.supernode.cli, flwr.supernode.runtime.run_clientapp, mpfedcl.flower_app"
    walls, processors = [], []
    for _ in range(3):
        began, before = time.monotonic(), os.times()
        subprocess.run([sys.executable, "-c", code], check=True)
        after = os.times()
        walls.append(time.monotonic() - began)
        processors.append(sum(after[2:4]) - sum(before[2:4]))
    return statistics.median(walls), statistics.median(processors)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What a round costs over Flower.")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of each run")
    parser.add_argument("--poll", nargs="+", default=["0.1", "0.5", "1"], help="seconds to try")
    arguments = parser.parse_args()
    wall, processor = start_of_a_process()
    columns, spent_by_poll, idle = [], [], []
    with tempfile.TemporaryDirectory() as name:
        simulated = simulate(arguments.rounds, Path(name) / "simulated")
        for poll in arguments.poll:
            place = Path(name) / f"poll-{poll}"
            place.mkdir()
            with federation(place, poll) as lab:
                before = used(lab)
                time.sleep(10)
                after = used(lab)
                idle.append(sum(after.values()) - sum(before.values()))
                seconds, spent = run_over_network(lab, arguments.rounds, place / "run")
            columns.append(seconds)
            spent_by_poll.append(spent)
    load = os.getloadavg()[0]
    heads = ["", *[f"poll every {poll} s" for poll in arguments.poll]]
    rows = [
        ["a round over Flower", *[f"{each:.1f}" for each in columns]],
        ["the same round simulated", *[f"{simulated:.2f}"] * len(columns)],
        *[[f"processor: {k}", *[f"{s[k]:.2f}" for s in spent_by_poll]] for k in KINDS.values()],
        ["processor while idle, a second", *[f"{each / 10:.3f}" for each in idle]],
    ]
    note = (
        f"Starting Flower's process for one message: {wall:.1f} s, of which {processor:.1f} s of "
        f"the processor. Load when this was measured: {load:.1f} on {os.cpu_count()} cores."
    )
    print(Table(f"Seconds a round, {CLIENTS} clients", heads, rows, note).markdown())


if __name__ == "__main__":
    main()
