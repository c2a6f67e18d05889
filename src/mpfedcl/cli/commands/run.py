"""`mpfedcl run`."""

import json
import signal
from pathlib import Path
from typing import Any

from rich.console import Console

from mpfedcl.api import resume, run
from mpfedcl.cli.arguments.experiments import Run
from mpfedcl.cli.progress import progress_bar, stderr_console, stdout_console, stop_after_round
from mpfedcl.engines.workers import is_worker
from mpfedcl.experiment import RESULT_NEUTRAL_SETTINGS, Experiment
from mpfedcl.experiment.wording import describe_data
from mpfedcl.methods import find_method, name_method
from mpfedcl.rounds.metrics import mean_accuracy
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.observer import Observer, RunResult
from mpfedcl.runs.simulation import follow


def run_command(arguments: Run) -> int:
    """Run or resume an experiment; show progress, then the end table."""
    if is_worker():
        # torchrun starts the same command many times; one of them does the talking.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        follow()
        return 0
    console = stderr_console()
    with stop_after_round(console) as stop, progress_bar(console, "rounds") as bar:
        task = bar.add_task("starting", total=None, note="")

        def on_start(experiment: Experiment, rounds_done: int) -> None:
            bar.update(
                task,
                description=_name(experiment),
                total=experiment.rounds,
                completed=rounds_done,
            )

        def on_round(record: Any) -> None:
            bar.update(task, advance=1, note=describe_round(record))

        observer = Observer(on_start, on_round, console.print, stop)
        if arguments.resume is not None:
            asked = arguments.settings
            result = resume(
                arguments.resume,
                asked.rounds,
                observer,
                **{name: asked.setting(name) for name in RESULT_NEUTRAL_SETTINGS},
            )
        else:
            result = run(arguments.settings, arguments.out, observer)
    if result.summary is None:
        method = result.experiment.method
        # The current folder is searched for a class only if it is named again.
        again = f" --method {method}" if ":" in method else ""
        console.print(
            f"Stopped after round {len(result.history)} of {result.experiment.rounds}. "
            f"Resume with: mpfedcl run --resume {result.path}{again}"
        )
        return 130
    show_result(result, draw_figures(result), arguments.predictors, as_json=arguments.json)
    return 0


def show_result(result: RunResult, figures: list[Path], predictors: str, *, as_json: bool) -> None:
    """Print what came of a finished run."""
    assert result.summary is not None
    if as_json:
        print(json.dumps({"path": str(result.path), **result.summary}, indent=2))
    else:
        _show(stdout_console(), result, figures, all_predictors=predictors == "all")


def draw_figures(result: RunResult) -> list[Path]:
    """Draw the run's figures into its directory."""
    from mpfedcl.report.results import load

    written = []
    for each, drawing in load(result.path).figures.items():
        written.append(result.path / f"{each}.png")
        drawing.save(written[-1])
    return written


def describe_round(record: Any) -> str:
    """Return a round's numbers, short enough to stand beside a bar."""
    found = mean_accuracy(record)
    accuracy = "" if found is None else f"accuracy {found:.1f} %  "
    loss = "" if record["loss"] is None else f"loss {record['loss']:.3f}"
    rejected = (
        f"  {len(record['clients']['rejected'])} rejected" if record["clients"]["rejected"] else ""
    )
    return accuracy + loss + rejected


def _name(experiment: Experiment) -> str:
    """Return what the method is called: a class from outside as it calls itself."""
    return name_method(experiment.method, find_method(experiment.method))


def _describe_sent(experiment: Experiment, summary: dict[str, Any]) -> str:
    """Say what a client sent: each round, or once."""
    parameters, floats = summary["parameters_sent"], summary["prototype_floats_sent"]
    if find_method(experiment.method).trains:
        return f"sent per client and round: {parameters:,} parameters, {floats:,} prototype floats"
    return f"sent once per client: {parameters:,} numbers of sums"


def _show(
    console: Console, result: RunResult, figures: list[Path], *, all_predictors: bool
) -> None:
    from mpfedcl.report.tables import (
        PREDICTOR_TITLES,
        calibration_sentence,
        clients_table,
        describe_mean,
        describe_server_model,
        fairness_sentence,
        judged_by,
        percent,
        predictors_table,
        text_table,
    )

    summary = result.summary
    assert summary is not None
    experiment = result.experiment
    content = RunDirectory(result.path).read_json("partition.json") or {}
    title = f"{_name(experiment)} on {', '.join(describe_data(experiment, content))}"
    if all_predictors:
        caption = f"accuracy in %, round {summary['rounds']}"
        table = predictors_table(caption, summary["predictors"], judged_by(summary))
        text_table(table, title).show(console)
    clients_table(
        f"{title}\n{PREDICTOR_TITLES[summary['predictor']]}, local test set, round {summary['rounds']}",
        summary["accuracy_per_client"],
        spread := summary.get("accuracy_spread"),
    ).show(console)
    told = describe_mean(summary["accuracy_per_client"], content.get("clients", ()), spread)
    console.print(f"{told}: {percent(summary['accuracy'])} %")
    if spread := fairness_sentence(summary):
        console.print(spread)
    if content.get("network"):
        for sentence in describe_server_model(summary["predictors"], judged_by(summary)):
            console.print(sentence)
    if summary["accuracy_global"] is not None and experiment.partition.test != "shared":
        read_by = PREDICTOR_TITLES[summary["predictor_global"]]
        console.print(f"global test set: {percent(summary['accuracy_global'])} % ({read_by})")
    console.print(_describe_sent(experiment, summary))
    if told := calibration_sentence(summary):
        console.print(told)
    if summary["rejected"]:
        first = next(record for record in result.history if record["clients"]["rejected"])
        client, reason = next(iter(first["clients"]["rejected"].items()))
        console.print(
            f"{summary['rejected']} updates were rejected, the first in round {first['round']}, "
            f"{client}: {reason}"
        )
    console.print(f"run: {result.path}")
    names = ", ".join(each.name for each in figures)
    console.print(f"in it: CARD.md, summary.json, {names}")
