"""What many clients cost Flower's server: requests, processor, memory and its database.

    python benchmarks/federation_scale.py [--clients 50] [--fraction 1] [--rounds 6]

A server with TLS and keys, and clients as processes, forked from one that has torch loaded, so that
fifty need 2 GB. A message has 798,474 parameters, 3.2 MB. Run it on an idle machine. It prints the
numbers of docs/federation.md, "At scale".
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import tomli_w

from federation import PROGRAM, wait_for
from measuring import Table
from mpfedcl.network.flower import client_executor
from mpfedcl.network.flower.programs import environment
from mpfedcl.network.setup.folders import ClientFolder

FORKS = multiprocessing.get_context("forkserver")
PRELOADED = ["federation_scale", "mpfedcl.network.client.client"]
SUPERLINK, RUN = "mpfedcl.network.flower.superlink", "mpfedcl.flower_app"
IDLE_SECONDS = 20.0
MEGABYTE = 2**20


def take_part(root: Path, variables: dict[str, str], requests: Any) -> None:
    """Be a client's process, which counts its requests."""
    os.environ.update(variables)
    send = httpx.Client.send

    def count(self: httpx.Client, *words: Any, **options: Any) -> httpx.Response:
        with requests.get_lock():
            requests.value += 1
        return send(self, *words, **options)

    httpx.Client.send = count  # type: ignore[method-assign]
    with (root / "supernode.log").open("ab") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    sys.argv[1:] = [str(root)]
    client_executor.main()


@dataclass
class Lab:
    """A federation that runs, and what its processes have used."""

    folder: Path
    requests: Any
    """Of all clients together."""

    def find(self, what: str) -> psutil.Process:
        """Return the server's process of a kind."""
        home = str((self.folder / "server").resolve())
        for process in psutil.process_iter(["environ", "cmdline"]):
            if (process.info["environ"] or {}).get("FLWR_HOME", "").startswith(home) and any(
                what == word for word in process.info["cmdline"] or ()
            ):
                return process
        raise SystemExit(f"there is no process {what}")

    def database_bytes(self) -> int:
        """Return what the SuperLink has on disk."""
        return sum(each.stat().st_size for each in (self.folder / "server").glob("state.db*"))


@contextlib.contextmanager
def running(folder: Path, clients: int) -> Iterator[Lab]:
    """Run a server and so many clients."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    lab = folder / "lab"
    words = ["federation", "init", str(lab), "--clients", str(clients), "--port", port]
    subprocess.run([*PROGRAM, *words], check=True, stdout=subprocess.DEVNULL)
    said = folder / "said"
    FORKS.set_forkserver_preload(PRELOADED)
    requests = FORKS.Value("q", 0)
    processes = []
    with said.open("wb") as file:
        words = [*PROGRAM, "federation", "server", str(lab)]
        server = subprocess.Popen(words, stdout=file, stderr=file)
    try:
        wait_for(said, "Ctrl-C ends it")
        for share, root in enumerate(sorted((lab / "clients").iterdir())):
            place = ClientFolder.open(root, None)
            values = {"name": place.name, "share": share, "memory": str(place.memory)}
            settings = {**values, "server": f"127.0.0.1:{port}"}
            place.settings.write_text(tomli_w.dumps(settings), encoding="utf-8")
            variables = environment(place.flower_home)
            processes.append(FORKS.Process(target=take_part, args=(root, variables, requests)))
            processes[-1].start()
        for root in (lab / "clients").iterdir():
            wait_for(root / "flower" / "node.json", "true")
        yield Lab(lab, requests)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(60)
        server.terminate()
        server.wait(60)


def seconds_used(process: psutil.Process) -> float:
    """Return a process's time on the processor, of user and system."""
    return float(sum(process.cpu_times()[:2]))


def peak_bytes(process: psutil.Process) -> int:
    """Return the largest memory that a process has had (Linux alone says it)."""
    for line in Path(f"/proc/{process.pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("the system does not say how large a process has been")


def measure_idle(lab: Lab, clients: int) -> list[list[str]]:
    """Return what clients cost that nobody asks, once they look as seldom as they ever do."""
    superlink = lab.find(SUPERLINK)
    time.sleep(IDLE_SECONDS)
    requests, used = lab.requests.value, seconds_used(superlink)
    time.sleep(IDLE_SECONDS)
    requests, used = lab.requests.value - requests, seconds_used(superlink) - used
    return [
        ["idle: requests of a client, a second", f"{requests / IDLE_SECONDS / clients:.2f}"],
        ["idle: processor of the SuperLink, of a core", f"{100 * used / IDLE_SECONDS:.0f} %"],
        ["idle: processor of a request, ms", f"{1000 * used / max(1, requests):.1f}"],
    ]


def measure_run(lab: Lab, clients: int, words: Sequence[str], rounds: int, out: Path) -> Table:
    """Return what a run's rounds cost, and what its memory and database came to."""
    superlink, run = lab.find(SUPERLINK), lab.find(RUN)
    before = {"SuperLink": peak_bytes(superlink), "the run": peak_bytes(run)}
    settings = ["--clients", str(clients), "--partition.kind", "iid", "--rounds", str(rounds)]
    # Nothing is read, so that messages are what costs.
    settings += ["--evaluate-every", str(rounds), "--network.patience", "300", *words]
    command = [*PROGRAM, "federation", "start", str(lab.folder), "--out", str(out), *settings]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    records = out / "rounds.jsonl"
    rows: list[list[str]] = []
    began, used, requests = 0.0, 0.0, 0
    for number in range(1, rounds):
        wait_for(records, f'"round": {number},', 600)
        now, spent, made = time.monotonic(), seconds_used(superlink), lab.requests.value
        peaks = [peak_bytes(each) / MEGABYTE for each in (superlink, run)]
        size = lab.database_bytes() / MEGABYTE
        costs = (now - began, spent - used, made - requests)
        cells = ["-"] * 3 if number == 1 else [f"{costs[0]:.1f}", f"{costs[1]:.1f}", str(costs[2])]
        rows.append([str(number), *cells, *(f"{each:.0f}" for each in peaks), f"{size:.0f}"])
        began, used, requests = now, spent, made
    if started.wait(600):
        raise SystemExit("the run failed")
    lines = records.read_text(encoding="utf-8").splitlines()
    answered = [len(json.loads(line)["clients"]["answered"]) for line in lines]
    idle = ", ".join(f"{name} {size / MEGABYTE:.0f} MB" for name, size in before.items())
    heads = ["round", "seconds", "SuperLink s", "requests", "SuperLink MB", "run MB", "database MB"]
    note = (
        f"Answered: {answered}. MB are the most so far; before the run: {idle}. Requests are the "
        f"clients'. Database when the run is over: {lab.database_bytes() / MEGABYTE:.0f} MB."
    )
    return Table(f"{clients} clients, {' '.join(words)}", heads, rows, note)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What many clients cost Flower's server.")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--fraction", type=float, default=1.0)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--no-idle", action="store_true", help="only the run")
    given = parser.parse_args()
    words = ["--method", given.method, "--fraction", str(given.fraction)]
    with tempfile.TemporaryDirectory() as name, running(Path(name), given.clients) as lab:
        idle = [] if given.no_idle else measure_idle(lab, given.clients)
        table = measure_run(lab, given.clients, words, given.rounds, Path(name) / "run")
    if idle:
        print(Table(f"{given.clients} clients that nobody asks", ["", ""], idle).markdown())
    print(table.markdown())
    print(f"Load when this was measured: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.")


if __name__ == "__main__":
    main()
