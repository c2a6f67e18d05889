"""A day of runs: 7 methods x 5 seeds x 4 data sets, of few rounds each so that the rest shows.

    python benchmarks/campaign.py [--before SRC]

SRC is the `src` folder of an older version, such as `git worktree add` makes: its `compare` is then
measured too, with as many jobs as there are cores.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import psutil
from PIL import Image

from measuring import RESULTS, Progress, Result, Table
from mpfedcl.engines.hardware import usable_cores

METHODS = ("mp-fedcl", "sp-fedcl", "fedavg", "fedprox", "fedproto", "moon", "local")
SEEDS = tuple(range(5))
ROUNDS = 3
WIDTH = 64


def save_pictures(folder: Path, count: int) -> None:
    """Write pictures of four classes by two painters, a stripe a class on noise."""
    random = numpy.random.default_rng(1)
    for number in range(count):
        pixels = random.integers(0, 160, (48, 48, 3), dtype=numpy.uint8)
        label = number % 4
        pixels[12 * label : 12 * label + 12] += 90
        place = folder / "ab"[number // 4 % 2] / f"class-{label}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{number:05}.png")


def save_vectors(file: Path, count: int, width: int, *, compressed: bool) -> None:
    """Write vectors around a centre per class, a fifth of them to test on."""
    random = numpy.random.default_rng(2)
    labels = random.integers(0, 10, count)
    centres = random.normal(size=(10, width)).astype(numpy.float32)
    vectors = centres[labels] + random.standard_normal((count, width), dtype=numpy.float32)
    cut = count * 4 // 5
    file.parent.mkdir(parents=True, exist_ok=True)
    save = numpy.savez_compressed if compressed else numpy.savez
    arrays: dict[str, Any] = {"x_train": vectors[:cut], "y_train": labels[:cut]}
    save(file, **arrays, x_test=vectors[cut:], y_test=labels[cut:])


def make_sets(folder: Path, quick: bool) -> dict[str, list[str]]:
    """Make the data that are not embedded; return the settings of each set."""
    save_pictures(folder / "pictures", 80 if quick else 1600)
    save_vectors(folder / "vectors" / "a.npz", 1000 if quick else 40_000, WIDTH, compressed=True)
    own = ["--encoder.name", "none", "--partition.kind", "label", "--dataset.name", "folder"]
    pictures = [*own, "--dataset.root", str(folder / "pictures"), "--dataset.image-size", "16"]
    vectors = [*own, "--dataset.root", str(folder / "vectors")]
    digits = ["--dataset.name", "mnist-sample"]
    return {
        "digits": digits,
        "features of digits": [*digits, "--encoder.name", "random-filters"],
        "pictures": pictures,
        "vectors": vectors if quick else [*vectors, "--dataset.train-size", "2000"],
    }


class Campaign:
    """All runs, made in one of several ways, each into a folder and with a cache of its own."""

    def __init__(self, folder: Path, quick: bool) -> None:
        self.folder = folder
        self.sets = make_sets(folder, quick)
        self.seeds = SEEDS[:1] if quick else SEEDS
        self.methods = METHODS[:2] if quick else METHODS
        self.common = ["--rounds", "1" if quick else str(ROUNDS), "--evaluate-every", "1000"]
        self._outs = iter(range(10_000))

    @property
    def num_runs(self) -> int:
        """How many runs there are."""
        return len(self.sets) * len(self.seeds) * len(self.methods)

    def call(self, *words: str, source: Path | None = None) -> subprocess.Popen[bytes]:
        """Start the command as from a shell, with the environment of one who set nothing."""
        env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        env["MPFEDCL_CACHE"] = str(self.folder / "cache" / ("old" if source else "new"))
        if source is not None:
            env["PYTHONPATH"] = str(source)
        command = [sys.executable, "-m", "mpfedcl", *words]
        return subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=self.folder
        )

    def one_by_one(self) -> float:
        """Make the runs of the first seed by a command each; return seconds for all seeds."""
        began = time.perf_counter()
        for words in self.sets.values():
            for method in self.methods:
                choice = ["--method", method, "--seed", str(self.seeds[0])]
                finish(self.call("run", *words, *self.common, *choice, "--out", self._new_folder()))
        return (time.perf_counter() - began) * len(self.seeds)

    def compare(self, jobs: str, source: Path | None = None) -> float:
        """Make all runs by a comparison per data set; return its seconds."""
        began = time.perf_counter()
        many = ["--methods", *self.methods, "--seeds", *map(str, self.seeds), "--jobs", jobs]
        for words in self.sets.values():
            out = self._new_folder()
            finish(self.call("compare", *words, *self.common, *many, "--out", out, source=source))
        return time.perf_counter() - began

    def _new_folder(self) -> str:
        return str(self.folder / "runs" / str(next(self._outs)))


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for a command, which must succeed."""
    _, said = process.communicate()
    if process.returncode:
        raise SystemExit(said.decode())


def measure_memory(folder: Path, cache_size: str) -> tuple[float, float]:
    """Return the megabytes that two jobs on large vectors take together, and the seconds."""
    env = {**os.environ, "MPFEDCL_CACHE_SIZE": cache_size, "MPFEDCL_CACHE": str(folder / "cache")}
    words = ["compare", "--dataset.name", "folder", "--dataset.root", str(folder / "large")]
    words += ["--encoder.name", "none", "--partition.kind", "iid", "--clients", "20"]
    words += ["--methods", "fedncm", "fedgauss", "--seeds", "0", "1", "--jobs", "2"]
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "mpfedcl", *words, "--out", str(folder / f"large-{cache_size}")],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    most = 0
    while process.poll() is None:
        most = max(most, _memory_of_tree(process.pid))
        time.sleep(0.2)
    finish(process)
    return most / 2**20, time.perf_counter() - began


def _memory_of_tree(root: int) -> int:
    """Return the bytes of a process and its children; what they share is counted once."""
    total = 0
    try:
        for each in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
            total += each.memory_full_info().pss
    except psutil.NoSuchProcess:
        pass
    return total


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run with tiny sizes")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--before", type=Path, help="src folder of an older version")
    arguments = parser.parse_args()
    progress, cores = Progress(), usable_cores()
    title = "A day of runs: 7 methods x 5 seeds x 4 data sets, few rounds each."
    result = Result("campaign", title, arguments.quick)
    with tempfile.TemporaryDirectory() as name:
        campaign = Campaign(Path(name), arguments.quick)
        ways: dict[str, Callable[[], float]] = {
            "`mpfedcl run`, a command for each run": campaign.one_by_one,
            "`compare --jobs 1`": lambda: campaign.compare("1"),
            "`compare`, by default `--jobs auto`": lambda: campaign.compare("auto"),
        }
        if arguments.before is not None:
            source = arguments.before.absolute()
            ways["`compare --jobs 0` of the version before"] = lambda: campaign.compare("0", source)
        seconds = {}
        for way, measure in ways.items():
            progress.say(way)
            seconds[way] = measure()
        first = next(iter(seconds.values()))
        rows = [
            [way, f"{each:.0f}", f"{each / campaign.num_runs:.2f}", f"{first / each:.1f}"]
            for way, each in seconds.items()
        ]
        result.tables.append(
            Table(
                f"{campaign.num_runs} runs on {cores} core{'' if cores == 1 else 's'}",
                ["way", "seconds", "seconds per run", "times as fast"],
                rows,
                "A command for each run: measured with the first seed, times the number of seeds.",
            )
        )
        megabytes = 20 if arguments.quick else 600
        count = megabytes * 2**20 // (4 * 512)
        save_vectors(Path(name) / "large" / "a.npz", count, 512, compressed=False)
        memory = {}
        for size, how in (("0", "each process its own"), ("2G", "one mapped file")):
            progress.say(f"{megabytes} MB in two jobs: {how}")
            memory[how] = measure_memory(Path(name), size)
        result.tables.append(
            Table(
                f"Two jobs on {megabytes} MB of vectors",
                ["inputs", "MB, all processes", "seconds"],
                [[how, f"{most:,.0f}", f"{took:.1f}"] for how, (most, took) in memory.items()],
                "The highest sum of memory (PSS): what processes share is counted once.",
            )
        )
    result.data = {"seconds": seconds, "memory": memory, "runs": campaign.num_runs, "cores": cores}
    result.write(arguments.out or (RESULTS / "quick" if arguments.quick else RESULTS))


if __name__ == "__main__":
    main()
