"""What the engine `auto` costs against the best trainer and against the loop, shape by shape."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from measuring import Progress, Result, Table, ms, parse_arguments
from mpfedcl.rounds.loop import RoundLoop
from workloads import Workload, head_clients, mnist_clients

METHODS = {"fedavg": "FedAvg", "mp-fedcl": "MP-FedCL"}
CLIENTS = (1, 2, 5, 8, 20, 32, 100)
ROWS = (16, 20, 64, 100, 200, 400, 1024)
MOST_SAMPLES = 3300
"""Of all clients together, to bound the time; costs go by clients and rows, not by their number."""
TRAINERS = ("loop", "direct", "factored", "stacked")
HOPELESS = 1.6
"""One that takes so many times as long as the best, once warm, is not measured again."""
ALLOWED = 0.05


@dataclass
class Contender:
    """A trainer, or `auto`, at work on a shape."""

    name: str
    federation: RoundLoop

    def run(self) -> float:
        """Return the seconds of a round's parts that depend on the trainer."""
        seconds = self.federation.run_round(evaluate=False).seconds
        return seconds["train"] + seconds["embed"] + seconds["aggregate"]


def force(name: str, federation: RoundLoop) -> None:
    """Give all clients the trainer of this name."""
    engine: Any = federation.engine
    choice = engine._trainers
    choose = choice._choose

    def choose_one(tasks: Any, received: Any) -> Any:
        # Finds the layers that the trainers need.
        choose(tasks, received)
        return [(getattr(choice, f"_{name}"), tasks)]

    choice._choose = choose_one


def find_pick(federation: RoundLoop) -> str:
    """Return the trainer that `auto` has given to clients, which are all of one size."""
    (name,) = federation.engine.remarks()["training"]
    return str(name)


def measure(workload: Workload, method: str, repeats: int, progress: Progress) -> dict[str, Any]:
    """Measure all contenders in turn; those out of the running only at first."""
    contenders = [
        Contender(name, workload.federation(method, engine="loop" if name == "loop" else "auto"))
        for name in (*TRAINERS, "auto")
    ]
    for each in contenders:
        if each.name not in ("auto", "loop"):
            force(each.name, each.federation)
    found: dict[str, list[float]] = {each.name: [] for each in contenders}
    for repeat in range(-2, repeats):
        for each in contenders:
            progress.say(f"{workload.name}, {METHODS[method]}, {each.name}: {repeat + 1}")
            found[each.name].append(each.run())
        if repeat == -1:
            last = {name: times[-1] for name, times in found.items()}
            best = min(last.values())
            contenders = [
                each
                for each in contenders
                if each.name in ("loop", "auto") or last[each.name] <= HOPELESS * best
            ]
    # The first round has no pool, and the second one warms up.
    lowest = {name: min(times[2:] or times[1:]) for name, times in found.items()}
    picked = find_pick(contenders[-1].federation)
    own = min(lowest["auto"], lowest[picked])
    best = min(lowest[name] for name in TRAINERS)
    return {
        "seconds": found,
        "lowest": lowest,
        "picked": picked,
        "regret": own / min(best, own) - 1,
        "over_loop": own / lowest["loop"],
    }


def tabulate(title: str, cells: dict[tuple[int, int], dict[str, Any]]) -> tuple[Table, str]:
    """Return a row for each shape, and what the choice costs at most."""
    rows = []
    for (clients, samples), cell in cells.items():
        lowest = cell["lowest"]
        best = min(lowest[name] for name in TRAINERS)
        marks = ["**" if lowest[name] <= best * (1 + ALLOWED) else "" for name in TRAINERS]
        times = [f"{m}{ms(lowest[n])}{m}" for n, m in zip(TRAINERS, marks, strict=True)]
        tail = [cell["picked"], f"{cell['regret']:.0%}", f"{cell['over_loop']:.2f}"]
        rows.append([f"{clients} x {samples}", *times, *tail])
    headers = ["clients x rows", *TRAINERS, "auto takes", "regret", "auto/loop"]
    regrets = [cell["regret"] for cell in cells.values()]
    slowest = max(cell["over_loop"] for cell in cells.values())
    note = (
        f"{title}: auto costs {sum(regrets) / len(regrets):.1%} more than the best on average, "
        f"{max(regrets):.0%} at most; at most {slowest:.2f} times the loop."
    )
    return Table(f"{title}, ms", headers, rows), note


def main() -> None:
    """Measure and write."""
    arguments = parse_arguments(__doc__)
    torch.set_num_threads(1)
    shapes, repeats = [(n, r) for n in CLIENTS for r in ROWS if n * r <= MOST_SAMPLES], 4
    if arguments.quick:
        shapes, repeats = [(2, 16), (8, 64)], 1
    progress = Progress()
    result = Result("choice", (__doc__ or "").strip(), arguments.quick)
    began = time.monotonic()
    kinds: dict[str, Callable[[int, int], Workload]] = {
        "MNIST model": mnist_clients,
        "head": head_clients,
    }
    for model, make in kinds.items():
        for method, name in METHODS.items():
            title = f"{model}, {name}"
            cells = {each: measure(make(*each), method, repeats, progress) for each in shapes}
            table, note = tabulate(title, cells)
            result.tables.append(table)
            result.notes.append(note)
            result.data[title] = {f"{n} x {r}": cell for (n, r), cell in cells.items()}
    result.notes.append(
        "Train, embed and aggregate of a round, 1 thread, batches of 32, lowest of "
        f"{repeats} in turn; bold: within {ALLOWED:.0%} of the best. A trainer that takes "
        f"{HOPELESS:g} times the best is measured once. Took {time.monotonic() - began:.0f} s."
    )
    progress.close()
    result.write(arguments.out)


if __name__ == "__main__":
    main()
