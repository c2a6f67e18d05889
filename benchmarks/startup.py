"""From the command to the first round: who waits for what."""

import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from command_runs import can_use_workers, watch_run
from measuring import Progress, Result, Spread, Table, interleave, ms, parse_arguments

MOMENTS = ("round 1 begun", "round 1 done", "round 2 done", "ended")
_MOST_PACKAGES = 12


def time_run(folder: Path, numbers: Iterator[int], workers: int) -> dict[str, float]:
    """Run two rounds by the command line; return when each moment came."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    settings: dict[str, object] = {"rounds": 2, "evaluate-every": 2}
    if workers > 1:
        settings["workers"] = workers
    watched = watch_run(settings, folder / f"{next(numbers)}", env)
    times = (watched.begun, *watched.rounds[:2], watched.ended)
    return dict(zip(MOMENTS, times, strict=True))


def time_command(*words: str) -> float:
    """Return the seconds that a command takes from start to end."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return time.perf_counter() - began


def weigh_imports() -> dict[str, float]:
    """Return the seconds that each package's own modules take to import, the heaviest first."""
    done = subprocess.run(
        [
            sys.executable,
            "-X",
            "importtime",
            "-c",
            "import mpfedcl.cli.main, mpfedcl.cli.run",
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    weights: dict[str, float] = defaultdict(float)
    for line in done.stderr.splitlines():
        cells = line.removeprefix("import time:").split("|")
        if len(cells) == 3 and cells[0].strip().isdecimal():
            weights[cells[2].strip().partition(".")[0]] += int(cells[0]) / 1e6
    return dict(sorted(weights.items(), key=lambda item: -item[1]))


def main() -> None:
    """Measure and write."""
    arguments = parse_arguments(__doc__)
    repeats = 1 if arguments.quick else 5
    progress = Progress()
    result = Result("startup", (__doc__ or "").strip(), arguments.quick)
    counts = {"one process": 1, **({"2 workers": 2} if can_use_workers() else {})}
    with tempfile.TemporaryDirectory() as name:
        outs = iter(range(1000))
        runs = interleave(
            {title: partial(time_run, Path(name), outs, count) for title, count in counts.items()},
            repeats,
            progress=progress,
        )
    commands = {
        "python alone": ("-c", "pass"),
        "import torch": ("-c", "import torch"),
        "import mpfedcl": ("-c", "import mpfedcl"),
        "mpfedcl --help": ("-m", "mpfedcl", "--help"),
        "mpfedcl run --help": ("-m", "mpfedcl", "run", "--help"),
        "mpfedcl methods": ("-m", "mpfedcl", "methods"),
    }
    timed = interleave(
        {title: partial(time_command, *words) for title, words in commands.items()},
        repeats,
        progress=progress,
    )
    packages = interleave({"imports": weigh_imports}, repeats, progress=progress)["imports"]
    means = {
        name: Spread.of([weights.get(name, 0.0) for weights in packages]).median
        for name in packages[0]
    }
    heaviest = sorted(means.items(), key=lambda item: -item[1])[:_MOST_PACKAGES]

    result.tables += [
        Table(
            "`mpfedcl run --rounds 2`, ms since the command",
            ["", *MOMENTS],
            [
                [title, *(Spread.of([run[m] for run in found]).milliseconds() for m in MOMENTS)]
                for title, found in runs.items()
            ],
        ),
        Table(
            "Commands, ms from start to end",
            ["command", "ms"],
            [[title, Spread.of(found).milliseconds()] for title, found in timed.items()],
        ),
        Table(
            "Imports of a run by package, own modules only",
            ["package", "ms"],
            [*([name, ms(value)] for name, value in heaviest), ["all", ms(sum(means.values()))]],
            "By `-X importtime`, which itself takes time: the shares count, not the sum.",
        ),
    ]
    result.data = {"runs": runs, "commands": timed, "imports": means}
    result.notes.append(f"{repeats} repeats after a warm one; files and bytecode in the cache.")
    progress.close()
    result.write(arguments.out)


if __name__ == "__main__":
    main()
