"""Run experiments: `run`, `compare` and `tune`."""

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from rich.console import Console

from mpfedcl.api import resume, run, run_or_resume
from mpfedcl.cli.arguments import Compare, FederationStart, Run, Tune
from mpfedcl.cli.terminal import print_json, stdout_console, stop_after_round
from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import unused_folder
from mpfedcl.core.progress import ProgressBar, stderr_console
from mpfedcl.engines.worker_group import is_under_torchrun, is_worker
from mpfedcl.experiment import RESULT_NEUTRAL_SETTINGS, Experiment
from mpfedcl.experiment.descriptions import (
    describe_data,
    describe_missing_encoder,
    describe_partition,
)
from mpfedcl.experiment.names import metric_title
from mpfedcl.methods import find_method, name_method, name_methods
from mpfedcl.report.export import write_comparison
from mpfedcl.report.tables import TextTable, clients_table, predictors_table, text_table
from mpfedcl.report.tracking import make_trackers, read_failures
from mpfedcl.report.wording import (
    PREDICTOR_TITLES,
    calibration_sentence,
    describe_mean,
    describe_round,
    describe_server_model,
    fairness_sentence,
    imbalance_sentence,
    judged_by,
    metric_sentence,
    metric_value,
    percent,
)
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.failure import describe_failure
from mpfedcl.runs.observer import Observer, RunResult
from mpfedcl.runs.simulation import follow
from mpfedcl.studies.comparison import Comparison, MethodChoice, choose_methods, read_tuned
from mpfedcl.studies.jobs import JobOptions, Jobs, count_jobs
from mpfedcl.studies.tuning import Search, TuningResult, describe_changes, run_searches


def run_command(arguments: Run) -> int:
    """Run or resume an experiment; show progress, then the end table."""
    if is_worker():
        # torchrun starts the same command in all processes; only the leader prints.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        follow()
        return 0
    console = stderr_console()
    with stop_after_round(console) as stop, ProgressBar(console, "rounds") as bar:
        task = bar.add_task("starting", total=None, note="")

        def on_start(experiment: Experiment, rounds_done: int) -> None:
            name = _method_name(experiment)
            bar.update(task, description=name, total=experiment.rounds, completed=rounds_done)

        def on_round(record: Any) -> None:
            bar.update(task, advance=1, note=describe_round(record))

        def on_warning(sentence: str) -> None:
            (late.append if is_over else console.print)(sentence)

        def on_finish(_: RunResult) -> None:
            is_over.append(True)

        # What is wrong with the whole run is said below its table.
        late: list[str] = []
        is_over: list[bool] = []
        observer = Observer(on_start, on_round, on_warning, stop, on_finish)
        asked = arguments.settings
        if arguments.resume is None:
            result = run(asked, arguments.out, observer)
        else:
            neutral = {name: asked.setting(name) for name in RESULT_NEUTRAL_SETTINGS}
            result = resume(arguments.resume, asked.rounds, observer, **neutral)
    if result.summary is None:
        method = result.experiment.method
        # The current folder is searched only for a class that the command line names.
        again = f" --method {method}" if ":" in method else ""
        console.print(
            f"Stopped after round {len(result.history)} of {result.experiment.rounds}. "
            f"Resume with: mpfedcl run --resume {result.path}{again}"
        )
        return 130
    show_result(result, arguments)
    for sentence in late:
        console.print(sentence)
    return 0


def show_result(result: RunResult, arguments: Run | FederationStart) -> None:
    """Draw the figures of a finished run into its directory, and print its results."""
    # Imported late: matplotlib takes a second to load.
    from mpfedcl.report.results import load

    assert result.summary is not None
    figures = load(result.path).figures
    for name, drawing in figures.items():
        drawing.save(result.path / f"{name}.png")
    if arguments.json:
        print_json({"path": str(result.path), **result.summary})
    else:
        _show_run(stdout_console(), result, all_predictors=arguments.predictors == "all")
        names = ", ".join(f"{name}.png" for name in figures)
        stdout_console().print(f"in it: CARD.md, summary.json, {names}")


def _method_name(experiment: Experiment) -> str:
    """Return the display name of the method."""
    return name_method(experiment.method, find_method(experiment.method))


def _show_run(console: Console, result: RunResult, *, all_predictors: bool) -> None:
    summary = result.summary
    assert summary is not None
    experiment = result.experiment
    content = RunDirectory(result.path).read_json("partition.json") or {}
    title = f"{_method_name(experiment)} on {', '.join(describe_data(experiment, content))}"
    if all_predictors:
        caption = f"accuracy in %, round {summary['rounds']}"
        table = predictors_table(caption, summary["predictors"], judged_by(summary))
        text_table(table, title).show(console)
    clients_table(
        f"{title}\n{PREDICTOR_TITLES[summary['predictor']]}, local test set, "
        f"round {summary['rounds']}",
        summary["accuracy_per_client"],
        experiment.metric,
        (summary["metrics"] or {}).get("per_client", {}),
    ).show(console)
    spread = summary.get("accuracy_spread")
    told = describe_mean(summary["accuracy_per_client"], content.get("clients", ()), spread)
    console.print(f"{told}: {percent(summary['accuracy'])} %")
    confusion = RunDirectory(result.path).read_json("confusion.json")
    for sentence in (
        metric_sentence(summary),
        imbalance_sentence(confusion) if confusion else "",
        fairness_sentence(summary),
    ):
        if sentence:
            console.print(sentence)
    if content.get("network"):
        for sentence in describe_server_model(summary["predictors"], judged_by(summary)):
            console.print(sentence)
    if summary["accuracy_global"] is not None and experiment.partition.test != "shared":
        read_by = PREDICTOR_TITLES[summary["predictor_global"]]
        console.print(f"global test set: {percent(summary['accuracy_global'])} % ({read_by})")
    parameters, floats = summary["parameters_sent"], summary["prototype_floats_sent"]
    if find_method(experiment.method).trains:
        told = f"client and round: {parameters:,} parameters, {floats:,} prototype floats"
        console.print(f"sent per {told}")
    else:
        console.print(f"sent once per client: {parameters:,} values of statistics")
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


def compare_command(arguments: Compare) -> int:
    """Execute the missing runs, then print tables and draw figures."""
    check_runs("compare", arguments.file, arguments.settings, arguments.jobs)
    # Missing packages are reported before the first run.
    make_trackers(arguments.settings.track)
    path = arguments.out or unused_folder(Path("runs") / "comparison")
    named: list[MethodChoice] = list(arguments.methods)
    if arguments.tuned is not None:
        neutral = {name: arguments.settings.setting(name) for name in RESULT_NEUTRAL_SETTINGS}
        found = read_tuned(arguments.tuned, arguments.methods)
        named = [each.replace(**neutral) for each in found]
    methods, left_out = choose_methods(arguments.settings, named)
    comparison = Comparison.prepare(arguments.settings, methods, arguments.seeds, path)
    total = sum(each.experiment.rounds for each in comparison.planned_runs)
    console = stderr_console()
    for name, reason in left_out.items():
        console.print(f"{name} is left out: {reason}")
    title = f"{len(comparison.planned_runs)} runs"
    if not _execute(arguments, path, title, total, comparison.rounds_done, comparison.run):
        return 130
    for each in comparison.planned_runs:
        for sentence in read_failures(each.path):
            console.print(f"{each.path.name}: {sentence}")
    content, tables = write_comparison(comparison, all_predictors=arguments.predictors == "all")
    if arguments.json:
        print_json({"path": str(path), **content})
        return 0
    for table in tables:
        table.show(stdout_console())
    for each in comparison.planned_runs:
        if failure := describe_failure(each.path):
            name, seed = _method_name(each.experiment), each.experiment.seed
            stdout_console().print(f"{name}, seed {seed}: {failure}")
    stdout_console().print(f"comparison: {path}")
    figures = sorted(each.name for each in comparison.path.glob("*.png"))
    told = f"in it: {', '.join(['table.md', 'comparison.json', *figures])}"
    stdout_console().print(fill(told, 100, break_on_hyphens=False))
    return 0


def tune_command(arguments: Tune) -> int:
    """Run the missing trials, then write and print the chosen settings."""
    check_runs("tune", arguments.file, arguments.settings, arguments.jobs)
    if arguments.settings.partition.validation:
        raise InvalidInput(
            f"partition.validation is {arguments.settings.partition.validation:g}; it must be 0: "
            "tune holds out images itself, see --validation."
        )
    path = arguments.out or unused_folder(Path("runs") / "tuning")
    searches = _prepare_searches(arguments, path)
    total = sum(search.most_rounds for search in searches)
    if not _execute(
        arguments,
        path,
        f"{len(searches)} methods",
        total,
        lambda: sum(search.rounds_done() for search in searches),
        lambda options: run_searches(searches, options),
    ):
        return 130
    found = [search.write_result() for search in searches]
    for each in found:
        each.write_best(path)
    if arguments.json:
        methods = {each.method: each.to_json() for each in found}
        print_json({"path": str(path), "methods": methods})
        return 0
    _tuning_table(found).show(stdout_console())
    stdout_console().print(f"search: {path}")
    stdout_console().print(
        "in it: <method>/tuning.json, and best-<method>.toml for mpfedcl run; on test images: "
        f"mpfedcl compare --tuned {path}"
    )
    return 0


def _execute(
    arguments: Compare | Tune,
    path: Path,
    title: str,
    total: int,
    rounds_done: Callable[[], int],
    execute: Callable[[JobOptions], bool],
) -> bool:
    """Execute runs with a progress bar; return whether all are complete."""
    console = stderr_console()
    for notice in describe_missing_encoder(arguments.settings):
        console.print(notice)
    with stop_after_round(console) as stop, ProgressBar(console, "rounds") as bar:
        task = bar.add_task(title, total=total, note="")

        def advance() -> None:
            bar.update(task, completed=rounds_done())

        # Includes the runs of an earlier command.
        advance()
        is_complete = execute(JobOptions(run_or_resume, arguments.jobs, stop, advance))
        if is_complete:
            # Searches stop poor trials early.
            bar.update(task, completed=total)
    if not is_complete:
        console.print(f"Stopped. The same command with --out {path} continues where it stopped.")
    return is_complete


def _prepare_searches(arguments: Tune, path: Path) -> list[Search]:
    methods = arguments.methods
    if not methods or len(set(methods)) < len(methods):
        raise InvalidInput(f"methods is {list(methods)}; it must name at least one, and each once.")
    return [
        Search.prepare(
            arguments.settings,
            method,
            path / method.replace(":", "."),
            arguments.budget,
            arguments.seeds,
            validation=arguments.validation,
        )
        for method in methods
    ]


def _tuning_table(found: Sequence[TuningResult]) -> TextTable:
    names = name_methods(each.method for each in found)
    first = next((each for each in found if not each.is_fixed), found[0])
    rungs = ", ".join(f"{rung.settings} to round {rung.rounds}" for rung in first.rungs)
    partition = describe_partition(
        first.base.replace(partition__validation=first.validation), with_seed=False
    )
    return TextTable(
        f"{first.base.dataset.name}, {partition}\n"
        f"validation {metric_title(first.metric)}; trials: {rungs}",
        ["method", "chosen", "score", "± error", "defaults", "trials", "rounds"],
        [
            [
                names[each.method],
                "nothing to choose" if each.is_fixed else _list_changes(each),
                metric_value(each.metric, each.score),
                percent(each.standard_error),
                metric_value(each.metric, each.default_score),
                str(len(each.trials)),
                f"{each.rounds_run:,}",
            ]
            for each in found
        ],
        "Chosen: the fewest changes among trials within the standard error (±) of the best.\n"
        "No test image was opened. Scores of chosen settings are optimistic: the best of many.",
    )


def _list_changes(found: TuningResult) -> str:
    """Return the changes to the defaults, two per line."""
    words = describe_changes(found.changes)
    lines = [", ".join(words[place : place + 2]) for place in range(0, len(words), 2)]
    return ",\n".join(lines) or "the defaults"


def check_runs(command: str, file: Path | None, settings: Experiment, jobs: Jobs) -> None:
    """Reject settings that do not apply to several runs, and torchrun."""
    if is_under_torchrun():
        # Each of its processes would start all runs.
        raise InvalidInput(
            f"{command} was started by torchrun; it must be started without it, and --workers and "
            "--jobs set the number of processes."
        )
    for name, many in (("method", "methods"), ("seed", "seeds")):
        if file is None and getattr(settings, name) != getattr(Experiment(), name):
            raise InvalidInput(
                f"{name} is {getattr(settings, name)!r}; it must be left out: {command} takes "
                f"--{many}."
            )
    count_jobs(jobs)
