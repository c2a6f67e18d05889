"""`mpfedcl run`."""

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from mpfedcl.cli.arguments.experiments import Run
from mpfedcl.cli.progress import gentle_interrupt, messages, progress_bar, results
from mpfedcl.engines.process_group import is_follower
from mpfedcl.experiment import INDIFFERENT, Experiment
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.run_loop import Observer, RunResult
from mpfedcl.runs.simulation import follow, resume, run


def run_command(arguments: Run) -> int:
    """Run or resume an experiment; show progress, then the end table."""
    if is_follower():
        # torchrun starts the same command many times; one of them does the talking.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        follow()
        return 0
    console = messages()
    with gentle_interrupt(console) as stop, progress_bar(console) as bar:
        task = bar.add_task("starting", total=None, note="")

        def on_start(experiment: Experiment, rounds_done: int) -> None:
            bar.update(
                task,
                description=experiment.method,
                total=experiment.rounds,
                completed=rounds_done,
            )

        def on_round(record: Any) -> None:
            bar.update(task, advance=1, note=note_round(record))

        observer = Observer(on_start, on_round, console.print, stop)
        if arguments.resume is not None:
            asked = arguments.settings
            result = resume(
                arguments.resume,
                asked.rounds,
                observer,
                **{name: asked.setting(name) for name in INDIFFERENT},
            )
        else:
            result = run(arguments.settings, arguments.out, observer)
    if result.summary is None:
        console.print(
            f"Stopped after round {len(result.history)} of {result.experiment.rounds}. "
            f"Go on with: mpfedcl run --resume {result.path}"
        )
        return 130
    show_result(result, draw_figures(result), arguments.readings, as_json=arguments.json)
    return 0


def show_result(result: RunResult, figures: list[Path], readings: str, *, as_json: bool) -> None:
    """Print what came of a finished run."""
    assert result.summary is not None
    if as_json:
        print(json.dumps({"path": str(result.path), **result.summary}, indent=2))
    else:
        _show(results(), result, figures, all_readings=readings == "all")


def draw_figures(result: RunResult) -> list[Path]:
    """Draw the run's figures into its directory."""
    from mpfedcl.report.figures import draw_partition, draw_run_curves

    content = RunDirectory(result.path).read_json("partition.json")
    assert content is not None
    data, split = describe_data(result.experiment, content)
    name = f"{result.experiment.method} on {data}"
    curves, partition = result.path / "accuracy.png", result.path / "partition.png"
    draw_run_curves(result.history, f"{name}, clients' own tests", curves)
    draw_partition(content, f"training images, {split}", partition)
    if not result.experiment.diagnostics:
        return [curves, partition]
    from mpfedcl.report.convergence import draw_convergence

    convergence = result.path / "convergence.png"
    draw_convergence(result.history, f"{name}, local objectives", convergence)
    return [curves, partition, convergence]


def describe_data(experiment: Experiment, partition: Mapping[str, Any]) -> tuple[str, str]:
    """Return what the data of a run are, and how they are dealt out, as far as that is known."""
    if partition.get("network"):
        return "its clients' own data", f"over a network, seed {experiment.seed}"
    return experiment.dataset.name, describe_partition(experiment)


def describe_partition(experiment: Experiment, *, with_seed: bool = True) -> str:
    """Return the partition in a few words."""
    partition = experiment.partition
    words = {
        "label": f"label skew Dir({partition.alpha:g})",
        "quantity": f"quantity skew Dir({partition.alpha:g})",
        "classes": f"{partition.classes_per_client} classes a client",
        "feature": "feature skew",
        "iid": "iid",
    }[partition.kind]
    if partition.validation:
        words += f", {100 * partition.validation:g} % of training held out as test"
    return f"{words}, seed {experiment.seed}" if with_seed else words


def note_round(record: Any) -> str:
    """Say of a round what fits beside a bar."""
    readings = [v for v in (record["accuracy_per_client"] or {}).values() if v is not None]
    accuracy = f"accuracy {sum(readings) / len(readings):.1f} %  " if readings else ""
    loss = "" if record["loss"] is None else f"loss {record['loss']:.3f}"
    rejected = (
        f"  {len(record['clients']['rejected'])} rejected" if record["clients"]["rejected"] else ""
    )
    return accuracy + loss + rejected


def _example(history: list[dict[str, Any]]) -> str:
    record = next(record for record in history if record["clients"]["rejected"])
    client, reason = next(iter(record["clients"]["rejected"].items()))
    return f"the first in round {record['round']}, {client}: {reason}"


def _show(console: Console, result: RunResult, figures: list[Path], *, all_readings: bool) -> None:
    from mpfedcl.report.tables import READING_TITLES, clients_grid, percent, readings_grid

    summary = result.summary
    assert summary is not None
    experiment = result.experiment
    content = RunDirectory(result.path).read_json("partition.json") or {}
    title = f"{experiment.method} on {', '.join(describe_data(experiment, content))}"
    if all_readings:
        readings_grid(title, summary["readings"]).show(console)
    clients_grid(
        f"{title}\n{READING_TITLES[summary['reading']]}, own test, round {summary['rounds']}",
        summary,
    ).show(console)
    console.print(
        f"mean over clients: {percent(summary['accuracy'])} %\n"
        f"sent by a client in a round: {summary['parameters_sent']:,} parameters, "
        f"{summary['prototype_floats_sent']:,} prototype floats"
    )
    if (found := RunDirectory(result.path).read_json("convergence.json")) is not None:
        from mpfedcl.report.convergence import constants_line, convergence_grid

        convergence_grid("does the paper's convergence section hold?", found).show(console)
        console.print(constants_line(found))
    if summary["rejected"]:
        console.print(f"{summary['rejected']} updates were rejected, {_example(result.history)}")
    console.print(f"run: {result.path}")
    files = ["CARD.md", "summary.json", *(["convergence.json"] if experiment.diagnostics else [])]
    console.print(f"in it: {', '.join(files)}, {', '.join(each.name for each in figures)}")
