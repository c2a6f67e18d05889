"""The model card: what a finished run is, in a page that people and model hubs can read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpfedcl.experiment.datasets import specification
from mpfedcl.files import write_atomically
from mpfedcl.prototypes import PrototypePool
from mpfedcl.report.card_numbers import Subject, describe_data, describe_readings
from mpfedcl.report.markdown import escape, fence, plain, quote
from mpfedcl.report.reproduction import run_command, without_places
from mpfedcl.report.tables import READING_TITLES, percent
from mpfedcl.rounds.evaluation import TESTS
from mpfedcl.runs.directory import RunDirectory

_KINDS = {
    "averaged": "one averaged model",
    "pool": "a pool of prototypes",
    "personal": "each client's own model",
}
_PYTHON = """\
from safetensors.torch import load_file

{lines}"""


def leave_card(
    directory: RunDirectory, about: str, pool: PrototypePool | None, warn: Callable[[str], None]
) -> None:
    """Write CARD.md into the folder of a finished run; warn where that cannot be done."""
    try:
        subject = Subject(
            directory.read_experiment(),
            about,
            directory.read_summary() or {},
            directory.read_json("partition.json") or {},
            pool,
            _list_files(directory.path),
        )
        # A name that is no Unicode, as file systems allow, has been made readable by now.
        write_atomically(directory.path / "CARD.md", describe_card(subject).encode())
    # The run is whole without it: whatever is wrong with a card must not cost one.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        warn(f"CARD.md could not be written ({reason}); the run is complete without it.")


def describe_card(subject: Subject) -> str:
    """Return the card as Markdown, after the lines of YAML that model hubs look for."""
    parts = (_front, _opening, describe_data, describe_readings, _shared, _privacy, _use, _again)
    return "\n".join(part(subject) for part in parts)


def _list_files(path: Path) -> list[str]:
    several = [path / "model.safetensors", path / "pool.safetensors"]
    personal = sorted((path / "models").glob("*.safetensors"))[:1]
    return [str(each.relative_to(path)) for each in [*several, *personal] if each.is_file()]


def _name_kind(file: str) -> str:
    return {"model.safetensors": "averaged", "pool.safetensors": "pool"}.get(file, "personal")


def _title(subject: Subject) -> str:
    return f"{subject.experiment.method} on {subject.data}"


def _front(subject: Subject) -> str:
    summary, experiment = subject.summary, subject.experiment
    lines = [
        "---",
        "library_name: mpfedcl",
        "pipeline_tag: image-classification",
        "tags:",
        "- federated-learning",
        "- image-classification",
        f"- {quote(experiment.method)}",
        "datasets:",
        f"- {quote(subject.data)}",
        "metrics:",
        "- accuracy",
    ]
    values = {test: summary["readings"][test][summary["reading"]] for test in TESTS}
    if any(value is not None for value in values.values()):
        lines += [
            "model-index:",
            f"- name: {quote(_title(subject))}",
            "  results:",
            "  - task:",
            "      type: image-classification",
            "    dataset:",
            f"      name: {quote(subject.data)}",
            f"      type: {quote(subject.data)}",
            "    metrics:",
        ]
    for test, value in values.items():
        if value is not None:
            lines += [
                "    - type: accuracy",
                f"      name: {quote(f'accuracy % on the {test} test, last round')}",
                f"      value: {value:.4f}",
            ]
    return "\n".join([*lines, "---", ""])


def _opening(subject: Subject) -> str:
    experiment, summary = subject.experiment, subject.summary
    kinds = {_name_kind(name): None for name in subject.files}
    what = " and ".join(_KINDS[kind] for kind in kinds) or "the models were not kept"
    return (
        f"# {escape(_title(subject))}\n\n"
        f"Image classifiers trained by federated learning with mpfedcl "
        f"{escape(summary['versions']['mpfedcl'])}: {what}. Method: {escape(experiment.method)}, "
        f"{escape(subject.about)}. {summary['rounds']:,} rounds, "
        f"{len(subject.partition['clients']):,} clients, seed {summary['seed']}, settings in "
        "`experiment.toml`.\n\n"
        f"Headline: **{percent(summary['accuracy'])} %** of the clients' own test images right, "
        f"in the last round ({READING_TITLES[summary['reading']]}).\n"
    )


def _shared(subject: Subject) -> str:
    summary = subject.summary
    sent = (summary["parameters_sent"], summary["prototype_floats_sent"])
    lines = [
        "## What was shared\n",
        f"In the last round a client sent at most {sent[0]:,} parameters and {sent[1]:,} numbers "
        f"of prototypes. All rounds together took {_megabytes(summary, 'up')} MB up to the server "
        f"and {_megabytes(summary, 'down')} MB down to the clients."
        if any(sent)
        else "Nothing: each client trained alone.",
        f"The guard rejected {summary['rejected']:,} updates.\n",
    ]
    return "\n".join(lines)


def _megabytes(summary: dict[str, Any], way: str) -> str:
    return f"{summary['bytes'][way] / 1e6:,.1f}"


def _privacy(subject: Subject) -> str:
    summary, pool = subject.summary, subject.pool
    notes = ["There is no privacy guarantee of any kind."]
    if pool is not None and len(pool):
        alone = int((pool.counts == 1).sum())
        notes.append(
            f"Prototypes are averages of embeddings. The pool has {len(pool):,}; the one that "
            f"stands for the fewest images stands for {int(pool.counts.min()):,}."
        )
        if alone:
            notes.append(
                f"A prototype of one image is that image's embedding, and {alone:,} are such; "
                "`--prototypes.min-cluster-size` forbids them."
            )
    if summary["parameters_sent"]:
        notes.append("Weights travelled too, and weights can give away what they were trained on.")
    if any(name.startswith("models/") for name in subject.files):
        notes.append(
            "The folder `models` holds each client's own model: leave it out before you publish."
        )
    return "## Privacy\n\n" + "".join(f"- {note}\n" for note in notes)


def _use(subject: Subject) -> str:
    commands = (
        "mpfedcl predict RUN IMAGES     # RUN: the folder this card is in\nmpfedcl report RUN"
    )
    lines = "\n".join(f"{_name_kind(each)} = load_file({plain(each)!r})" for each in subject.files)
    python = fence(_PYTHON.format(lines=lines), "python")
    about_pool = (
        "The pool has `vectors`, `labels`, `counts` and `owners`; an image belongs to the class of "
        "the prototype nearest to its embedding.\n"
    )
    return "\n".join(
        [
            "## How to use it\n",
            fence(commands, "sh"),
            *(["Or in Python, in that folder:\n", python] if subject.files else []),
            *([about_pool] if "pool.safetensors" in subject.files else []),
        ]
    )


def _again(subject: Subject) -> str:
    command = run_command(without_places(subject.experiment)) or "mpfedcl run RUN/experiment.toml"
    needs = (
        ""
        if specification(subject.experiment.dataset.name).embedded
        else ("\nIt needs the same images; where a path stands, yours goes there.\n")
    )
    versions = ", ".join(f"{name} {escape(v)}" for name, v in subject.summary["versions"].items())
    return (
        f"## How to make it again\n\n{fence(command, 'sh')}{needs}\nMade with {versions}, "
        f"threads {subject.summary['threads']}.\n"
    )
