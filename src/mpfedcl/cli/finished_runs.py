"""Use and change finished runs: `predict`, `export`, `join`, `leave`, `contribution`, `advise`."""

import csv
import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from mpfedcl.cli.arguments import Advise, Contribution, Export, Join, Leave, Predict
from mpfedcl.cli.terminal import print_json, stdout_console
from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.core.progress import ProgressBar, stderr_console
from mpfedcl.data.tables import name_label
from mpfedcl.experiment.descriptions import describe_data
from mpfedcl.inference.advice import CLASSIFIERS, advise
from mpfedcl.inference.contribution import OthersAccuracy, find_contributions
from mpfedcl.inference.export import export_run
from mpfedcl.inference.membership import JoinResult, join, leave
from mpfedcl.inference.predictor import Prediction, Predictor
from mpfedcl.inference.samples import NamedSample, list_samples, read_batches
from mpfedcl.report.tables import TextTable
from mpfedcl.report.wording import PREDICTOR_TITLES, percent
from mpfedcl.runs.directory import RunDirectory

_SOME_UNREADABLE = 3
_COLUMNS = 100
_SHORTEST_NAME = 12
_MOST_CLASSES_COUNTED = 6
_MOST_CLASSES_OF_A_SET = 4
_JOIN_PREDICTORS = {
    "classifier": "classifier",
    "pool": "pool's prototypes",
    "own": "own prototypes",
    "both": "pool + own",
}
_JOIN_EVENTS = {"joined": "joins", "replaced": "replaces its samples in"}
_MOST_CLASSES_COMPARED = 12


def predict_command(arguments: Predict) -> int:
    """Predict the readable samples, and report the others."""
    if not arguments.images:
        raise InvalidInput("IMAGES is missing; give at least one (see mpfedcl predict --help).")
    console = stderr_console()
    predictor = Predictor.load(
        arguments.run,
        arguments.client,
        held_out=arguments.held_out,
        false_alarms=arguments.false_alarms,
        coverage=arguments.coverage,
        weights=arguments.weights,
    )
    input_format = predictor.trained.input_format
    samples = list_samples(arguments.images, sys.stdin, input_format, predictor.trained.columns)
    if predictor.remark:
        console.print(predictor.remark)
    if predictor.has_prototypes and (arguments.json or arguments.csv):
        console.print(
            f"No class probabilities: in this run of {predictor.trained.experiment.method} the "
            "nearest prototype decides, by its distance."
        )
    predicted: list[tuple[str, Prediction]] = []
    answers: list[Prediction | str] = []
    with ProgressBar(console) as bar:
        task = bar.add_task("predicting", total=len(samples), note="")
        for name, found in _predict(predictor, samples):
            bar.update(task, advance=1)
            answers.append(found)
            if isinstance(found, str):
                console.print(f"mpfedcl: {found}")
            else:
                predicted.append((name, found))
            if arguments.json:
                line = {"error": found} if isinstance(found, str) else found.to_json()
                print(json.dumps({input_format.noun: name, **line}, allow_nan=False), flush=True)
    faults = len(samples) - len(predicted)
    told = console if arguments.json else stdout_console()
    if predicted and arguments.csv is not None:
        _write_csv(arguments.csv, samples, answers)
        told.print(_summarize_predictions(predictor, [each for _, each in predicted]))
        told.print(f"file: {arguments.csv} ({len(samples):,} rows)")
    elif predicted and not arguments.json:
        _predictions_table(predictor, predicted).show(stdout_console())
    if predicted:
        _report_accuracy(predictor, samples, answers, told)
        _report_drift(predictor, [each for _, each in predicted], told)
    if not faults:
        return 0
    return _SOME_UNREADABLE if faults < len(samples) else 2


def _predict(
    predictor: Predictor, samples: Sequence[NamedSample]
) -> Iterator[tuple[str, Prediction | str]]:
    """Yield each sample's name with its prediction or its error."""
    for names, readable, faults in read_batches(samples, predictor.trained.input_format):
        answers = iter(predictor.predict(readable))
        for place, name in enumerate(names):
            yield name, faults[place] if place in faults else next(answers)


def _write_csv(
    path: Path, samples: Sequence[NamedSample], answers: Sequence[Prediction | str]
) -> None:
    """Write each sample's cells and prediction as a row."""
    rows: list[dict[str, Any]] = []
    for sample, found in zip(samples, answers, strict=True):
        row = {"sample": sample.name, **sample.cells}
        if isinstance(found, str):
            row["error"] = found
        else:
            row["predicted"] = found.label
            if found.probabilities is None:
                row["distance"] = found.distance
            else:
                shares = found.probabilities.items()
                row |= {f"probability_{name}": share for name, share in shares}
            if found.unknown is not None:
                row["unknown"] = str(found.unknown).lower()
        rows.append(row)
    text = StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())


def _report_accuracy(
    predictor: Predictor,
    samples: Sequence[NamedSample],
    answers: Sequence[Prediction | str],
    console: Console,
) -> None:
    """Report the accuracy on the rows of tables that have a label."""
    columns = predictor.trained.columns
    if columns is None:
        return
    pairs = [
        (found.label, name_label(sample.cells.get(columns.label), predictor.class_names))
        for sample, found in zip(samples, answers, strict=True)
        if not isinstance(found, str)
    ]
    right = [label == truth for label, truth in pairs if truth is not None]
    if right:
        accuracy = percent(100 * sum(right) / len(right))
        console.print(f"accuracy on {len(right):,} rows with {columns.label!r}: {accuracy} %")


def _report_drift(
    predictor: Predictor, predictions: Sequence[Prediction], console: Console
) -> None:
    """Report drift of the samples as a whole."""
    drift = predictor.detect_drift(predictions)
    if drift is not None and drift.is_drift:
        console.print(f"Drift: {drift.describe(predictor.trained.input_format.noun)}")


def _predictions_table(
    predictor: Predictor, predicted: Sequence[tuple[str, Prediction]]
) -> TextTable:
    experiment = predictor.trained.experiment
    whose = (
        "the global model"
        if predictor.client is None
        else f"{predictor.client}'s personalized model"
    )
    data, _ = describe_data(experiment, predictor.trained.partition)
    title = f"{experiment.method} on {data}, {whose}"
    note = _summarize_predictions(predictor, [each for _, each in predicted])
    if predictor.has_prototypes:
        columns = ["label", "distance", "margin", "prototype of", "classifier", ""]
        cells = [_prototype_cells(each) for _, each in predicted]
    else:
        columns = ["label", "probability", "second best"]
        with_sets, coverage = predicted[0][1].set is not None, predictor.coverage
        columns += [f"{100 * coverage:g} % set"] if coverage is not None and with_sets else []
        columns += [] if predictor.threshold is None else [""]
        cells = [_classifier_cells(each)[: len(columns)] for _, each in predicted]
    widths = [max(len(row[n]) for row in [columns, *cells]) for n in range(len(columns))]
    room = max(_SHORTEST_NAME, _COLUMNS - sum(width + 3 for width in widths) - 3)
    # Long names are cut at the start, because their ends differ.
    names = [name if len(name) <= room else f"…{name[1 - room :]}" for name, _ in predicted]
    rows = [[name, *row] for name, row in zip(names, cells, strict=True)]
    return TextTable(title, [predictor.trained.input_format.noun, *columns], rows, note)


def _prototype_cells(prediction: Prediction) -> list[str]:
    margin, said, nearest = prediction.margin, prediction.classifier, prediction.nearest
    return [
        prediction.label,
        f"{prediction.distance:.3f}",
        "-" if margin is None else f"{margin:.3f}",
        "-" if nearest is None else nearest.client,
        f"{said.label} {100 * said.probability:.0f} %",
        "unknown" if prediction.unknown else "",
    ]


def _classifier_cells(prediction: Prediction) -> list[str]:
    second = prediction.second
    return [
        prediction.label,
        f"{prediction.probability:.3f}",
        "-" if second is None else f"{second.label} {second.probability:.3f}",
        *([] if prediction.set is None else [_list_most(prediction.set, _MOST_CLASSES_OF_A_SET)]),
        "unknown" if prediction.unknown else "",
    ]


def _list_most(words: Sequence[str], most: int, noun: str = "") -> str:
    left = len(words) - most
    return ", ".join(words[:most]) + (f" and {left} more{noun}" if left > 0 else "")


def _summarize_predictions(predictor: Predictor, predictions: Sequence[Prediction]) -> str:
    counts = Counter(each.label for each in predictions).most_common()
    listed = [f"{label} {count:,}" for label, count in counts]
    noun = predictor.trained.input_format.noun
    told = f"{len(predictions):,} {noun}s: {_list_most(listed, _MOST_CLASSES_COUNTED, ' classes')}"
    if predictor.has_prototypes:
        same = sum(each.label == each.classifier.label for each in predictions)
        told += f"\nthe classifier agrees on {same:,}"
    if (limit := predictor.threshold) is not None:
        unknown = sum(bool(each.unknown) for each in predictions)
        told += (
            f"\n{unknown:,} unknown: distance above {limit.distance:.3f}, as for "
            f"{limit.false_alarms:.1%} of {limit.images:,} held-out {noun}s"
        )
    return told


def export_command(arguments: Export) -> None:
    """Write the file and print the result of its check."""
    predictor = Predictor.load(
        arguments.run,
        arguments.client,
        false_alarms=arguments.false_alarms,
        weights=arguments.weights,
    )
    console = stderr_console()
    with console.status("exporting") if console.is_terminal else nullcontext():
        # Not into the models that a client keeps, because later runs replace them.
        done = export_run(predictor, arguments.out, rule=arguments.predictor, folder=arguments.run)
    if arguments.json:
        print_json({"path": str(done.path), "bytes": done.num_bytes, **done.note})
        return
    note, checked = done.note, done.note["checked"]
    shape = " x ".join(str(size) for size in note["input"]["shape"])
    stdout_console().print(
        f"{note['model']} model, by {note['predictor']}: {note['input']['name']} {shape} "
        f"({note['input']['type']}) to {', '.join(note['outputs'])}; "
        f"{len(note['classes'])} classes"
    )
    if "encoder" in note["input"]:
        stdout_console().print(f"The encoder {note['input']['encoder']} is not in the file.")
    stdout_console().print(
        f"checked against PyTorch on {checked['images']:,} {checked['from']}: "
        f"{checked['labels_differ']} labels differ, scores differ by up to "
        f"{checked['largest_difference']:.1e}"
    )
    stdout_console().print(f"file: {done.path} ({done.num_bytes:,} bytes)")


def join_command(arguments: Join) -> None:
    """Let a client try a run, and with --add join it."""
    console = stderr_console()
    joined = join(
        arguments.run,
        arguments.data,
        arguments.name,
        epochs=arguments.epochs,
        lr=arguments.lr,
        test_fraction=arguments.test_fraction,
        weights=arguments.weights,
        add=arguments.add,
        replace=arguments.replace,
        on_progress=lambda words: console.print(f"{words} ...") if console.is_terminal else None,
    )
    for notice in joined.notices:
        console.print(notice)
    if arguments.json:
        print_json({**joined.to_json(), "added": joined.was_added, "rejected": joined.rejected})
    else:
        _show_join(stdout_console(), arguments, joined)
    if arguments.add and joined.rejected is not None:
        raise InvalidInput(
            f"{joined.client} was not added: update validation rejects it ({joined.rejected})."
        )


def _show_join(console: Console, arguments: Join, joined: JoinResult) -> None:
    client, samples = joined.client, f"{joined.train_images:,} {joined.noun}s"
    before, after = joined.before, joined.after
    if joined.epochs is None:
        parts, whole = "statistics", "federation"
        columns = ["classifier of", "plain", "with prior correction"]
        rows = {
            "federation": [before.get("classifier"), before.get("classifier_prior")],
            f"federation with {client}": [after.get("classifier"), after.get("classifier_prior")],
            client: [after.get("personal"), after.get("personal_prior")],
        }
        told = f"statistics of {samples}; {client} now has {joined.classes_held} classes"
    else:
        parts, whole = "prototypes", "run"
        columns = ["model", *_JOIN_PREDICTORS.values()]
        rows = {"the run's model": [before[each] for each in _JOIN_PREDICTORS]}
        if epochs := joined.epochs:
            trained = f"after {epochs} epoch{'s' if epochs > 1 else ''}, lr {joined.lr:g}"
            rows[trained] = [after[each] for each in _JOIN_PREDICTORS]
        told = f"{joined.prototypes} prototypes of {samples} of {joined.classes_held} classes"
    TextTable(
        f"{client} {_JOIN_EVENTS[joined.event]} {arguments.run}: accuracy % on its "
        f"{joined.test_images:,} test {joined.noun}s",
        columns,
        [[title, *map(percent, values)] for title, values in rows.items()],
    ).show(console)
    console.print(told)
    if joined.was_added:
        words = ["mpfedcl", "leave", str(arguments.run), f"--name={client}"]
        console.print(f"{joined.event}; remove it with: {shlex.join(words)}")
    elif joined.rejected is None:
        console.print(f"The {whole} is unchanged; --add adds these {parts} to it.")
    if not joined.test_images:
        console.print(f"No {joined.noun}s were held out for testing: the classes have too few.")


def leave_command(arguments: Leave) -> None:
    """Remove a client from a run."""
    pool = leave(arguments.run, arguments.name)
    if arguments.json:
        print_json({"left": arguments.name, "pool": list(pool.names), "prototypes": len(pool)})
    else:
        stdout_console().print(
            f"{arguments.name} has left; the pool holds {len(pool)} prototypes of "
            f"{pool.num_clients} clients"
        )


def contribution_command(arguments: Contribution) -> None:
    """Show the client contributions, and write them into the run directory."""
    console = stderr_console()

    def tell(done: int, count: int) -> None:
        if console.is_terminal:
            console.print(f"without {done} of {count} clients", end="\r")

    found = find_contributions(arguments.run, on_progress=tell)
    with RunDirectory.resume(arguments.run, "RUN") as directory:
        directory.write_json("contribution.json", found.to_json())
    if arguments.json:
        print_json(found.to_json())
        return
    predictors = [
        PREDICTOR_TITLES[each] for each in (found.predictor_global, found.predictor_local)
    ]
    note = (
        f"Global: accuracy on the union of the others' test sets, by {predictors[0]}.\n"
        f"Local: mean accuracy on the others' local test sets, by {predictors[1]}.\n"
        "Points: gain of the others from the client; negative if they do better without it.\n"
        "The only client with a class seems harmful: the others' test sets lack that class."
    )
    if found.untested:
        note += f"\nWithout test samples here: {', '.join(found.untested)}."
    TextTable(
        f"client contributions in {arguments.run}: accuracy % of the others",
        ["client", "train", *("global", "without", "points"), *("local", "without", "points")],
        [
            [
                each.client,
                f"{each.images:,}",
                *_contribution_cells(each.global_test),
                *_contribution_cells(each.local_test),
            ]
            for each in found.clients
        ],
        note,
    ).show(stdout_console())


def _contribution_cells(found: OthersAccuracy) -> list[str]:
    return [percent(found.whole), percent(found.without), f"{found.difference:+.1f}"]


def advise_command(arguments: Advise) -> None:
    """Estimate whether a client would gain from joining."""
    found = advise(arguments.run, arguments.data, weights=arguments.weights)
    if arguments.json:
        print_json(found.to_json())
        return
    console, nouns = stdout_console(), f"{found.noun}s"
    TextTable(
        f"{arguments.data} with {arguments.run}: accuracy % on {found.samples:,} {nouns}",
        ["classifier", "accuracy"],
        [[CLASSIFIERS[name], percent(value)] for name, value in found.accuracy.items()],
    ).show(console)
    gains = sorted(found.classes, key=lambda each: (each.local - each.federation, each.name))
    TextTable(
        "per class, largest gain from the federation first",
        ["class", nouns, "local correct", "federation correct"],
        [
            [each.name, *(str(n) for n in (each.samples, each.local, each.federation))]
            for each in gains[:_MOST_CLASSES_COMPARED]
        ],
    ).show(console)
    console.print(
        f"Each {found.noun} was tested once, by classifiers that did not learn from it, in "
        f"{found.folds} folds."
    )
    compared = f"Compared: {CLASSIFIERS['local']}; {CLASSIFIERS[found.compared]}."
    console.print(f"{found.verdict} {compared}", style="bold")
    console.print("Nothing was sent or written.")
