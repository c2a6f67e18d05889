"""Sections of the model card: the clients' data, and the accuracy of the models."""

from dataclasses import dataclass
from typing import Any

from mpfedcl.experiment import Experiment
from mpfedcl.experiment.datasets import find_specification
from mpfedcl.experiment.wording import describe_data, describe_partition
from mpfedcl.methods import READINGS
from mpfedcl.prototypes import PrototypePool
from mpfedcl.report.markdown import code_block, enumerate_names, escape_markdown
from mpfedcl.report.number_formatting import deviation, mean
from mpfedcl.report.reproduction import compare_command, without_local_paths
from mpfedcl.report.tables import TextTable, percent, readings_table

_MOST_CLIENTS = 20
_MOST_CLASSES = 4
_SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class CardSubject:
    """The run that a card describes."""

    experiment: Experiment
    about: str
    """The method in one line."""
    summary: dict[str, Any]
    partition: dict[str, Any]
    pool: PrototypePool | None
    files: list[str]
    """Files of tensors that the run has left."""

    @property
    def data(self) -> str:
        """What the data are called."""
        return describe_data(self.experiment, self.partition)[0]

    @property
    def noun(self) -> str:
        """What a sample is; those of a frozen encoder's features were images."""
        is_flat = len(self.partition.get("input_shape") or ()) == 1
        return "vector" if is_flat and "encoder" not in self.partition else "image"

    @property
    def accuracies(self) -> dict[str, float]:
        """The clients that were read, and how well each does on its own test."""
        readings = self.summary["accuracy_per_client"] or {}
        return {name: value for name, value in readings.items() if value is not None}


def data_section(subject: CardSubject) -> str:
    """Return what the data are, whose, and how they are split among the clients."""
    experiment, partition = subject.experiment, subject.partition
    spec, holdings = find_specification(experiment.dataset.name), partition["clients"]
    sizes = [sum(each["train"]) for each in holdings.values()]
    classes = [escape_markdown(name) for name in partition["classes"]]
    accuracies, nouns = subject.accuracies, f"{subject.noun}s"
    # The worst first, where not all fit; who was not read comes last.
    ranked = sorted(holdings, key=lambda name: accuracies.get(name, 101.0))[:_MOST_CLIENTS]
    shown = [name for name in holdings if name in set(ranked)]
    grid = TextTable(
        "",
        ["client", f"training {nouns}", f"test {nouns}", f"classes held ({nouns})", "accuracy %"],
        [
            [
                escape_markdown(name),
                f"{sum(holdings[name]['train']):,}",
                f"{holdings[name]['test']:,}",
                _list_classes(holdings[name]["train"], classes),
                percent(accuracies.get(name)),
            ]
            for name in shown
        ],
    )
    is_shared = experiment.partition.test == "shared"
    summary = f"{escape_markdown(experiment.dataset.name)}: {escape_markdown(spec.summary)}."
    source, split = _describe_source(experiment, nouns), describe_partition(experiment)
    if partition.get("network"):
        summary = f"Each client's own {nouns}, which stayed with it."
        source = "as each client has them; parts of a public set where it was started with --share."
        split, is_shared = "as it is among the clients", False
    left_out = len(holdings) - len(shown)
    note = f"\nThe {_MOST_CLIENTS} with the lowest accuracy; {left_out:,} more are left out.\n"
    return (
        "## Data\n\n"
        f"{summary} "
        f"{len(classes):,} classes: {enumerate_names(classes, 12)}. "
        f"{sum(sizes):,} training {nouns}, {min(sizes):,} to {max(sizes):,} per client.\n\n"
        f"Source and licence: {source}\n\n"
        f"Skew: {split}; the clients are tested on "
        f"{f'the same {nouns}' if is_shared else f'{nouns} of their own'}."
        f"\n\n{grid.markdown()}{note if left_out else ''}"
    )


def _describe_source(experiment: Experiment, nouns: str) -> str:
    if experiment.dataset.name == "folder":
        return f"{nouns} of whoever made this run; their terms hold."
    source = escape_markdown(find_specification(experiment.dataset.name).source)
    return f"{source}. The terms of its publishers hold; mpfedcl grants no rights to data."


def _list_classes(counts: list[int], classes: list[str]) -> str:
    """Return a client's classes, the largest first."""
    held = sorted((-count, place) for place, count in enumerate(counts) if count)
    return enumerate_names(
        [f"{classes[place]} ({-count:,})" for count, place in held], _MOST_CLASSES
    )


def readings_section(subject: CardSubject) -> str:
    """Return the four readings on both tests, their deviation over clients, the worst case."""
    summary, values = subject.summary, list(subject.accuracies.values())
    grid, nouns = readings_table("", summary["readings"]), f"{subject.noun}s"
    for row, reading in zip(grid.rows, READINGS, strict=True):
        row[0] += " (headline)" if reading == summary["reading"] else ""
    lines = [
        "## Readings\n",
        grid.markdown(),
        f"*own*: each client on its own test {nouns}; *union*: on all clients' test {nouns} "
        "together. *personal*: a client's own model after its training; *averaged*: the server's. "
        "A dash: this method has no such thing.\n",
    ]
    if values:
        lines.append(
            f"Over the {len(values):,} clients that were read, the headline is "
            f"{percent(mean(values))} % with a deviation of {percent(deviation(values))}. "
            f"{_describe_worst_client(subject)}\n"
        )
    command = _several_seeds_command(subject.experiment)
    lines.append(
        "One run says nothing of the deviation over seeds; that takes several runs:\n\n"
        f"{code_block(command, 'sh')}"
        if command
        else "One run says nothing of the deviation over seeds; that takes several runs with other "
        "seeds.\n"
    )
    return "\n".join(lines)


def _describe_worst_client(subject: CardSubject) -> str:
    accuracies = subject.accuracies
    if len(set(accuracies.values())) == 1 and len(accuracies) > 1:
        return "All of them have the same accuracy."
    worst = min(accuracies, key=lambda name: accuracies[name])
    return f"Worst case: {escape_markdown(worst)} with {percent(accuracies[worst])} %."


def _several_seeds_command(experiment: Experiment) -> str | None:
    public = without_local_paths(experiment)
    return compare_command([public.replace(seed=seed) for seed in _SEEDS])
