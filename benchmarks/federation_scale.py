"""What many clients cost Flower's server: requests, processor, memory and its database.

    python benchmarks/federation_scale.py [--clients 50] [--fraction 1] [--rounds 6]

A server with TLS and keys, and clients that are threads of one process: each has a key of its own
and speaks to the server as a client does, but trains nothing. It answers at once with what it was
sent, changed a little: 798,474 parameters, 3.2 MB. So messages are all that costs. Run it on an
idle machine. It prints the numbers of docs/federation.md, "At scale".
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy
import psutil

from federation import PROGRAM, make_lab, wait_for
from measuring import Table
from mpfedcl.methods import TESTS
from mpfedcl.network.client.client import NetworkClient
from mpfedcl.network.flower.client import take_part
from mpfedcl.network.packing import Introduction
from mpfedcl.network.setup.folders import ClientFolder, ClientSettings
from mpfedcl.network.transport import Kind, Message

SPAWN = multiprocessing.get_context("spawn")
SUPERLINK, RUN = "mpfedcl.network.flower.superlink", "mpfedcl.flower_app"
IDLE_SECONDS = 20.0
MEGABYTE = 2**20


class Echo:
    """Answers as a client does that has trained, at no cost."""

    lock = threading.Lock()
    known: Introduction | None = None
    """What a client that has data says of itself; the others say the same."""

    def __init__(self, name: str, memory: Path) -> None:
        self._name, self._memory = name, memory
        self._random = numpy.random.default_rng(sum(name.encode()))

    def answer(self, kind: Kind, message: Message) -> Message:
        """Return the answer to a request."""
        late = {"late": {"table": {test: {} for test in TESTS}, "is_personal": False}}
        if kind == "close":
            return Message(late)
        with self.lock:
            if Echo.known is None:
                client = NetworkClient(ClientSettings(self._name, self._memory, share=0))
                Echo.known = Introduction.from_message(self._name, client.answer("hello", message))
        if kind == "hello":
            return Echo.known.to_message()
        none = {"labels": numpy.zeros(0, "i8"), "counts": numpy.zeros(0, "i8")}
        none["vectors"] = message.arrays["pool/vectors"][:0]
        values: dict[str, Any] = {"num_samples": Echo.known.num_samples, "loss": 1.0}
        values |= {"withheld": False, "processed": [], **(late if message.values["read"] else {})}
        # Each changes it in a way of its own: what is equal the server stores once.
        change = numpy.float32(1e-3 * self._random.standard_normal())
        averaged = {
            name.replace("params/", "averaged/"): array + change
            for name, array in message.arrays.items()
            if name.startswith("params/")
        }
        return Message(values, averaged | {f"prototypes/{n}": each for n, each in none.items()})


def be_clients(roots: Sequence[Path], requests: Any) -> None:
    """Be the process of all clients, which counts their requests."""
    send = httpx.Client.send

    def count(self: httpx.Client, *words: Any, **options: Any) -> httpx.Response:
        with requests.get_lock():
            requests.value += 1
        return send(self, *words, **options)

    httpx.Client.send = count  # type: ignore[method-assign]
    for root in roots:
        place = ClientFolder.open(root, None)
        work = (place, place.server, Echo(place.name, place.memory).answer, lambda _: None)
        threading.Thread(target=take_part, args=work, daemon=True).start()
    threading.Event().wait()


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
    lab, _ = make_lab(folder, clients)
    said = folder / "said"
    requests = SPAWN.Value("q", 0)
    roots = sorted((lab / "clients").iterdir())
    with said.open("wb") as file:
        words = [*PROGRAM, "federation", "server", str(lab)]
        server = subprocess.Popen(words, stdout=file, stderr=file)
    process = SPAWN.Process(target=be_clients, args=(roots, requests))
    try:
        wait_for(said, "Ctrl-C ends it")
        process.start()
        for root in roots:
            wait_for(root / "flower" / "node.json", "node")
        yield Lab(lab, requests)
    finally:
        if process.pid is not None:
            process.terminate()
            process.join(60)
        server.terminate()
        server.wait(60)


def seconds_used(process: psutil.Process) -> float:
    """Return a process's time on the processor, of user and system."""
    return float(sum(process.cpu_times()[:2]))


class Memory:
    """The most memory that processes have had so far, of their own: without pages of files."""

    def __init__(self, *processes: psutil.Process) -> None:
        self.most = {process.pid: 0 for process in processes}
        self.is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self.is_over.wait(0.05):
            for pid, most in self.most.items():
                # It has no more of it once it has ended.
                with contextlib.suppress(OSError, ValueError):
                    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
                    (own,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
                    self.most[pid] = max(most, int(own) * 1024)


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
    settings = ["--clients", str(clients), "--partition.kind", "iid", "--rounds", str(rounds)]
    # Nothing is read, so that messages are what costs.
    settings += ["--evaluate-every", str(rounds), "--network.patience", "600", *words]
    command = [*PROGRAM, "federation", "start", str(lab.folder), "--out", str(out), *settings]
    records = out / "rounds.jsonl"
    rows: list[list[str]] = []
    began, used, requests = 0.0, 0.0, 0
    with Memory(superlink, run) as memory:
        started = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_for(out / "partition.json", "clients", 900)
        before = [memory.most[each.pid] / MEGABYTE for each in (superlink, run)]
        for number in range(1, rounds):
            wait_for(records, f'"round": {number},', 900)
            now, spent, made = time.monotonic(), seconds_used(superlink), lab.requests.value
            sizes = [memory.most[each.pid] / MEGABYTE for each in (superlink, run)]
            sizes.append(lab.database_bytes() / MEGABYTE)
            costs = [f"{now - began:.1f}", f"{spent - used:.1f}", str(made - requests)]
            cells = ["-"] * 3 if number == 1 else costs
            rows.append([str(number), *cells, *(f"{each:.0f}" for each in sizes)])
            began, used, requests = now, spent, made
        if started.wait(600):
            raise SystemExit("the run failed")
    lines = records.read_text(encoding="utf-8").splitlines()
    answered = [len(json.loads(line)["clients"]["answered"]) for line in lines]
    heads = ["round", "seconds", "SuperLink s", "requests", "SuperLink MB", "run MB", "database MB"]
    note = (
        f"Answered: {answered}. MB are the most so far, without pages of files; before the first "
        f"round {before[0]:.0f} and {before[1]:.0f}. Requests are the clients'. Database when the "
        f"run is over: {lab.database_bytes() / MEGABYTE:.0f} MB."
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
