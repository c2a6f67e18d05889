"""`mpfedcl predict`."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from mpfedcl.cli.arguments.deployment import Predict
from mpfedcl.cli.progress import progress_bar, stderr_console, stdout_console
from mpfedcl.deployment.input_samples import NamedSample, list_samples, read_batches
from mpfedcl.deployment.predictor import Prediction, Predictor
from mpfedcl.errors import InvalidInput
from mpfedcl.report.tables import TextTable

_SOME_UNREADABLE = 3
_COLUMNS = 100
_SHORTEST_NAME = 12
_MOST_CLASSES_COUNTED = 6


def predict_command(arguments: Predict) -> int:
    """Predict what can be read, name what cannot."""
    if not arguments.images:
        raise InvalidInput("IMAGES is missing; give at least one (see mpfedcl predict --help).")
    console = stderr_console()
    predictor = Predictor.load(
        arguments.run,
        arguments.client,
        false_alarms=arguments.false_alarms,
        weights=arguments.weights,
    )
    input_format = predictor.trained.input_format
    samples = list_samples(arguments.images, sys.stdin, input_format, predictor.trained.columns)
    if predictor.remark:
        console.print(predictor.remark)
    predicted: list[tuple[str, Prediction]] = []
    faults = 0
    with progress_bar(console) as bar:
        task = bar.add_task("predicting", total=len(samples), note="")
        for name, found in _predict(predictor, samples):
            bar.update(task, advance=1)
            if isinstance(found, str):
                faults += 1
                console.print(f"mpfedcl: {found}")
            elif not arguments.json:
                predicted.append((name, found))
            if arguments.json:
                told = {"error": found} if isinstance(found, str) else found.to_json()
                print(json.dumps({input_format.noun: name, **told}, allow_nan=False), flush=True)
    if predicted:
        _table(predictor, predicted).show(stdout_console())
    if not faults:
        return 0
    return _SOME_UNREADABLE if faults < len(samples) else 2


def _predict(
    predictor: Predictor, samples: Sequence[NamedSample]
) -> Iterator[tuple[str, Prediction | str]]:
    """Yield each sample's name with what is said of it, or with what is wrong with it."""
    for names, readable, faults in read_batches(samples, predictor.trained.input_format):
        answers = iter(predictor.predict(readable))
        for place, name in enumerate(names):
            yield name, faults[place] if place in faults else next(answers)


def _table(predictor: Predictor, predicted: Sequence[tuple[str, Prediction]]) -> TextTable:
    experiment = predictor.trained.experiment
    whose = "the averaged model" if predictor.client is None else f"{predictor.client}'s own model"
    title = f"{experiment.method} on {experiment.dataset.name}, {whose}"
    note = _sum_up(predictor, [each for _, each in predicted])
    columns = ["label", "probability"]
    if predictor.has_prototypes:
        columns = ["label", "distance", "margin", "prototype of", "classifier", ""]
    cells = [_cells(each) for _, each in predicted]
    widths = [max(len(row[n]) for row in [columns, *cells]) for n in range(len(columns))]
    room = max(_SHORTEST_NAME, _COLUMNS - sum(width + 3 for width in widths) - 3)
    # The end of a long name tells samples apart.
    names = [name if len(name) <= room else f"…{name[1 - room :]}" for name, _ in predicted]
    rows = [[name, *row] for name, row in zip(names, cells, strict=True)]
    return TextTable(title, [predictor.trained.input_format.noun, *columns], rows, note)


def _cells(prediction: Prediction) -> list[str]:
    if prediction.nearest is None:
        return [prediction.label, f"{prediction.classifier.probability:.3f}"]
    margin, said = prediction.margin, prediction.classifier
    return [
        prediction.label,
        f"{prediction.distance:.3f}",
        "-" if margin is None else f"{margin:.3f}",
        prediction.nearest.client,
        f"{said.label} {100 * said.probability:.0f} %",
        "unknown" if prediction.unknown else "",
    ]


def _sum_up(predictor: Predictor, predictions: Sequence[Prediction]) -> str:
    counts = Counter(each.label for each in predictions).most_common()
    listed = ", ".join(f"{label} {count:,}" for label, count in counts[:_MOST_CLASSES_COUNTED])
    others = len(counts) - _MOST_CLASSES_COUNTED
    more = f" and {others} more classes" if others > 0 else ""
    noun = predictor.trained.input_format.noun
    lines = [f"{len(predictions):,} {noun}s: {listed}{more}"]
    if predictor.has_prototypes:
        same = sum(each.label == each.classifier.label for each in predictions)
        lines.append(f"the classifier says the same of {same:,}")
    if (limit := predictor.threshold) is not None:
        unknown = sum(bool(each.unknown) for each in predictions)
        lines.append(
            f"{unknown:,} unknown: farther than {limit.distance:.3f}, as {limit.false_alarms:.1%} "
            f"of {limit.images:,} held-out {noun}s are"
        )
    return "\n".join(lines)
