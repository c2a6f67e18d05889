"""`mpfedcl predict`."""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console

from mpfedcl.cli.arguments.deployment import Predict
from mpfedcl.cli.progress import progress_bar, stderr_console, stdout_console
from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment.wording import describe_data
from mpfedcl.inference.calibration import log_drift
from mpfedcl.inference.predictor import Measured, Prediction, Predictor, load_predictor
from mpfedcl.inference.samples import NamedSample, list_samples, read_batches
from mpfedcl.report.tables import TextTable

_SOME_UNREADABLE = 3
_COLUMNS = 100
_SHORTEST_NAME = 12
_MOST_CLASSES_COUNTED = 6
_MOST_CLASSES_OF_A_SET = 4

_Batch = tuple[list[str], list[Measured], dict[int, str]]
"""Names, the model outputs for readable samples, and the errors of the others by place."""


def predict_command(arguments: Predict) -> int:
    """Predict the readable samples, and report the others."""
    if not arguments.images:
        raise InvalidInput("IMAGES is missing; give at least one (see mpfedcl predict --help).")
    console = stderr_console()
    predictor = load_predictor(
        arguments.run,
        arguments.client,
        held_out=arguments.held_out,
        false_alarms=arguments.false_alarms,
        coverage=arguments.coverage,
        probabilities=arguments.probabilities,
        weights=arguments.weights,
    )
    _refuse_contradictions(arguments, predictor)
    input_format = predictor.trained.input_format
    samples = list_samples(arguments.images, sys.stdin, input_format, predictor.trained.columns)
    if predictor.remark:
        console.print(predictor.remark)
    predicted: list[tuple[str, Prediction]] = []
    faults = 0
    with progress_bar(console) as bar:
        task = bar.add_task("predicting", total=len(samples), note="")
        batches: Iterable[_Batch] = _measure(predictor, samples)
        if arguments.estimate_prior:
            # The estimate needs all samples before the first prediction.
            batches = list(batches)
            _estimate_prior(predictor, batches, console)
        for name, found in _predict(predictor, batches):
            bar.update(task, advance=1)
            if isinstance(found, str):
                faults += 1
                console.print(f"mpfedcl: {found}")
            else:
                predicted.append((name, found))
            if arguments.json:
                told = {"error": found} if isinstance(found, str) else found.to_json()
                print(json.dumps({input_format.noun: name, **told}, allow_nan=False), flush=True)
    if predicted and not arguments.json:
        _table(predictor, predicted).show(stdout_console())
    if predicted:
        _report_drift(predictor, [each for _, each in predicted], arguments)
    if not faults:
        return 0
    return _SOME_UNREADABLE if faults < len(samples) else 2


def _refuse_contradictions(arguments: Predict, predictor: Predictor) -> None:
    if arguments.probabilities and not arguments.json:
        raise InvalidInput("probabilities is True; it must be given together with --json.")
    if arguments.estimate_prior:
        predictor.refuse_to_estimate()
    if arguments.log and predictor.threshold is None:
        raise InvalidInput(
            "log is True; it must be left out, because this model has no threshold for unknown "
            "samples."
        )


def _measure(predictor: Predictor, samples: Sequence[NamedSample]) -> Iterator[_Batch]:
    for names, readable, faults in read_batches(samples, predictor.trained.input_format):
        yield names, predictor.measure(readable), faults


def _predict(
    predictor: Predictor, batches: Iterable[_Batch]
) -> Iterator[tuple[str, Prediction | str]]:
    """Yield each sample's name with its prediction or its error."""
    for names, measured, faults in batches:
        answers = (each for part in measured for each in predictor.decide(part))
        for place, name in enumerate(names):
            yield name, faults[place] if place in faults else next(answers)


def _estimate_prior(predictor: Predictor, batches: Iterable[_Batch], console: Console) -> None:
    shares = predictor.adopt_prior([part for _, measured, _ in batches for part in measured])
    common = sorted(shares.items(), key=lambda each: -each[1])
    console.print(
        "Estimated shares: " + ", ".join(f"{name} {100 * share:.1f} %" for name, share in common)
    )


def _report_drift(
    predictor: Predictor, predictions: Sequence[Prediction], arguments: Predict
) -> None:
    """Report drift of the samples as a whole."""
    drift = predictor.judge_drift(predictions)
    if drift is None:
        return
    if drift.is_drift:
        sentence = f"Drift: {drift.describe(predictor.trained.input_format.noun)}"
        (stderr_console() if arguments.json else stdout_console()).print(sentence)
    if arguments.log:
        log_drift(predictor.trained.path, drift, predictor.client)


def _table(predictor: Predictor, predicted: Sequence[tuple[str, Prediction]]) -> TextTable:
    experiment = predictor.trained.experiment
    whose = (
        "the global model"
        if predictor.client is None
        else f"{predictor.client}'s personalized model"
    )
    data, _ = describe_data(experiment, predictor.trained.partition)
    title = f"{experiment.method} on {data}, {whose}"
    note = _sum_up(predictor, [each for _, each in predicted])
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
    # The end of a long name tells samples apart.
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
        *([] if prediction.set is None else [_list_set(prediction.set)]),
        "unknown" if prediction.unknown else "",
    ]


def _list_set(classes: Sequence[str]) -> str:
    more = len(classes) - _MOST_CLASSES_OF_A_SET
    return ", ".join(classes[:_MOST_CLASSES_OF_A_SET]) + (f" and {more} more" if more > 0 else "")


def _sum_up(predictor: Predictor, predictions: Sequence[Prediction]) -> str:
    counts = Counter(each.label for each in predictions).most_common()
    listed = ", ".join(f"{label} {count:,}" for label, count in counts[:_MOST_CLASSES_COUNTED])
    others = len(counts) - _MOST_CLASSES_COUNTED
    more = f" and {others} more classes" if others > 0 else ""
    noun = predictor.trained.input_format.noun
    lines = [f"{len(predictions):,} {noun}s: {listed}{more}"]
    if predictor.has_prototypes:
        same = sum(each.label == each.classifier.label for each in predictions)
        lines.append(f"the classifier agrees on {same:,}")
    if (limit := predictor.threshold) is not None:
        unknown = sum(bool(each.unknown) for each in predictions)
        lines.append(
            f"{unknown:,} unknown: farther than {limit.distance:.3f}, like "
            f"{limit.false_alarms:.1%} of {limit.images:,} held-out {noun}s"
        )
    return "\n".join(lines)
