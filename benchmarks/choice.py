"""Where each trainer wins: the sweep behind the constants of trainer_choice.py and factored.py."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from measuring import Progress, Result, Spread, Table, interleave, parse_arguments
from mpfedcl.engines import factored, trainer_choice
from mpfedcl.rounds.round_loop import RoundLoop
from workloads import Workload, head_clients, mnist_clients

CONTENDERS: Mapping[str, tuple[str, int, int]] = {
    "loop": ("loop", 0, 0),
    "stacked": ("stacked", 0, 0),
    "factored": ("stacked", 10**9, 10**9),
    "written": ("stacked", 10**9, 0),
}
"""Engine, trainer_choice.MOST_ROWS and factored.WRITTEN_OUT_FROM that force each of them;
`written` is factored training whose weights are written out at the end."""
NEIGHBOURS = 0.05
"""Two that differ by less are as good as each other."""


def rounds_of(federation: RoundLoop, most_rows: int, written_from: int) -> Callable[[], float]:
    """Return the seconds of a round's parts that depend on the trainer."""

    def run() -> float:
        before = trainer_choice.MOST_ROWS, factored.WRITTEN_OUT_FROM
        trainer_choice.MOST_ROWS, factored.WRITTEN_OUT_FROM = most_rows, written_from
        try:
            seconds = federation.run_round(evaluate=False).seconds
        finally:
            trainer_choice.MOST_ROWS, factored.WRITTEN_OUT_FROM = before
        return seconds["train"] + seconds["embed"] + seconds["aggregate"]

    return run


def pick(workload: Workload, num_clients: int, num_rows: int) -> str:
    """Return what the engine `auto` takes, by the constants as they are."""
    if num_rows <= trainer_choice.most_rows(num_clients):
        return "written" if num_rows >= factored.WRITTEN_OUT_FROM else "factored"
    model = workload.federation().state.server.params
    size = sum(value.numel() for value in model.values())
    stacks = num_clients >= trainer_choice.FEWEST_STACKED and size <= trainer_choice.SMALL_MODEL
    return "stacked" if stacks else "loop"


def sweep(
    make: Callable[[int, int], Workload],
    rows: list[int],
    clients: list[int],
    repeats: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Measure every cell of the grid."""
    cells = []
    for num_rows in rows:
        for num_clients in clients:
            workload = make(num_clients, num_rows)
            contenders = {
                name: rounds_of(workload.federation(engine=engine), most, written)
                for name, (engine, most, written) in CONTENDERS.items()
            }
            found = interleave(contenders, repeats, progress=progress, warm=2, patience=6)
            medians = {name: Spread.of(times).median for name, times in found.items()}
            cells.append(
                {
                    "rows": num_rows,
                    "clients": num_clients,
                    "seconds": found,
                    "medians": medians,
                    "auto": pick(workload, num_clients, num_rows),
                }
            )
    return cells


def tabulate(title: str, cells: list[dict[str, Any]], clients: list[int]) -> tuple[Table, str]:
    """Return who wins where, and what the engine's choice costs against the best."""
    by_rows: dict[int, list[str]] = {}
    losses = []
    for cell in cells:
        medians: dict[str, float] = cell["medians"]
        best = min(medians.values())
        winners = [name for name, value in medians.items() if value <= best * (1 + NEIGHBOURS)]
        loss = medians[cell["auto"]] / best - 1
        losses.append(loss)
        text = f"{'/'.join(winners)} {medians['loop'] / best:.1f}x"
        if loss > NEIGHBOURS:
            text += f" (auto: {cell['auto']}, +{loss:.0%})"
        by_rows.setdefault(cell["rows"], []).append(text)
    headers = ["rows", *(f"{count} clients" for count in clients)]
    table = Table(title, headers, [[str(rows), *cells] for rows, cells in by_rows.items()])
    mean, worst = sum(losses) / len(losses), max(losses)
    return table, f"{title}: auto costs {mean:.0%} more than the best on average, {worst:.0%} most."


def main() -> None:
    """Measure and write."""
    arguments = parse_arguments(__doc__)
    torch.set_num_threads(1)
    rows, clients = [16, 64, 128, 192, 256, 384, 512], [2, 5, 8, 32]
    if arguments.quick:
        rows, clients = [8, 64], [2, 8]
    progress = Progress()
    result = Result("choice", (__doc__ or "").strip(), arguments.quick)
    began = time.monotonic()
    for title, make in (("MNIST model", mnist_clients), ("head", head_clients)):
        cells = sweep(make, rows, clients, 5, progress)
        table, note = tabulate(title, cells, clients)
        result.tables.append(table)
        result.notes.append(note)
        result.data[title] = cells
    result.notes.append(
        "Seconds of train, embed and aggregate in a round of MP-FedCL, 1 thread, batches of 32, "
        f"medians of 5; who is within {NEIGHBOURS:.0%} of the best wins too; `2.0x` is how much "
        f"faster than the loop. Took {time.monotonic() - began:.0f} s."
    )
    progress.close()
    result.write(arguments.out)


if __name__ == "__main__":
    main()
