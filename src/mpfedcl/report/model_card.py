"""The model card: what a finished run is, in a page that people and model hubs can read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpfedcl.experiment.datasets import find_specification
from mpfedcl.files import write_atomically
from mpfedcl.prototypes import PrototypePool
from mpfedcl.report.markdown import code_block, escape_markdown, printable_name, yaml_string
from mpfedcl.report.model_card_sections import CardSubject, data_section, readings_section
from mpfedcl.report.reproduction import run_command, without_local_paths
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


def write_card(
    directory: RunDirectory, about: str, pool: PrototypePool | None, warn: Callable[[str], None]
) -> None:
    """Write CARD.md into the folder of a finished run; warn where that cannot be done."""
    try:
        subject = CardSubject(
            directory.read_experiment(),
            about,
            directory.read_summary() or {},
            directory.read_json("partition.json") or {},
            pool,
            _list_tensor_files(directory.path),
        )
        # A name that is no Unicode, as file systems allow, has been made readable by now.
        write_atomically(directory.path / "CARD.md", format_card(subject).encode())
    # The run is whole without it: whatever is wrong with a card must not cost one.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        warn(f"CARD.md could not be written ({reason}); the run is complete without it.")


def format_card(subject: CardSubject) -> str:
    """Return the card as Markdown, after the lines of YAML that model hubs look for."""
    parts = (
        _front_matter,
        _introduction,
        data_section,
        readings_section,
        _shared_section,
        _privacy_section,
        _usage_section,
        _reproduction_section,
    )
    return "\n".join(part(subject) for part in parts)


def _list_tensor_files(path: Path) -> list[str]:
    several = [path / "model.safetensors", path / "pool.safetensors"]
    personal = sorted((path / "models").glob("*.safetensors"))[:1]
    return [str(each.relative_to(path)) for each in [*several, *personal] if each.is_file()]


def _tensor_kind(file: str) -> str:
    return {"model.safetensors": "averaged", "pool.safetensors": "pool"}.get(file, "personal")


def _title(subject: CardSubject) -> str:
    return f"{subject.experiment.method} on {subject.data}"


def _front_matter(subject: CardSubject) -> str:
    summary, experiment = subject.summary, subject.experiment
    task = "image-classification" if subject.noun == "image" else "tabular-classification"
    lines = [
        "---",
        "library_name: mpfedcl",
        f"pipeline_tag: {task}",
        "tags:",
        "- federated-learning",
        f"- {task}",
        f"- {yaml_string(experiment.method)}",
        "datasets:",
        f"- {yaml_string(subject.data)}",
        "metrics:",
        "- accuracy",
    ]
    values = {test: summary["readings"][test][summary["reading"]] for test in TESTS}
    if any(value is not None for value in values.values()):
        lines += [
            "model-index:",
            f"- name: {yaml_string(_title(subject))}",
            "  results:",
            "  - task:",
            f"      type: {task}",
            "    dataset:",
            f"      name: {yaml_string(subject.data)}",
            f"      type: {yaml_string(subject.data)}",
            "    metrics:",
        ]
    for test, value in values.items():
        if value is not None:
            lines += [
                "    - type: accuracy",
                f"      name: {yaml_string(f'accuracy % on the {test} test, last round')}",
                f"      value: {value:.4f}",
            ]
    return "\n".join([*lines, "---", ""])


def _introduction(subject: CardSubject) -> str:
    experiment, summary = subject.experiment, subject.summary
    kinds = {_tensor_kind(name): None for name in subject.files}
    what = " and ".join(_KINDS[kind] for kind in kinds) or "the models were not kept"
    return (
        f"# {escape_markdown(_title(subject))}\n\n"
        f"{subject.noun.capitalize()} classifiers trained by federated learning with mpfedcl "
        f"{escape_markdown(summary['versions']['mpfedcl'])}: {what}. "
        f"Method: {escape_markdown(experiment.method)}, {escape_markdown(subject.about)}. "
        f"{summary['rounds']:,} rounds, "
        f"{len(subject.partition['clients']):,} clients, seed {summary['seed']}, settings in "
        "`experiment.toml`.\n\n"
        f"Headline: **{percent(summary['accuracy'])} %** of the clients' own test "
        f"{subject.noun}s right, in the last round ({READING_TITLES[summary['reading']]}).\n"
    )


def _shared_section(subject: CardSubject) -> str:
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


def _privacy_section(subject: CardSubject) -> str:
    summary, pool, noun = subject.summary, subject.pool, subject.noun
    notes = ["There is no privacy guarantee of any kind."]
    if pool is not None and len(pool):
        alone = int((pool.counts == 1).sum())
        notes.append(
            f"Prototypes are averages of embeddings. The pool has {len(pool):,}; the one that "
            f"stands for the fewest {subject.noun}s stands for {int(pool.counts.min()):,}."
        )
        if alone:
            notes.append(
                f"A prototype of one {noun} is that {noun}'s embedding, and {alone:,} are such; "
                "`--prototypes.min-cluster-size` forbids them."
            )
    if summary["parameters_sent"]:
        notes.append("Weights travelled too, and weights can give away what they were trained on.")
    if any(name.startswith("models/") for name in subject.files):
        notes.append(
            "The folder `models` holds each client's own model: leave it out before you publish."
        )
    return "## Privacy\n\n" + "".join(f"- {note}\n" for note in notes)


def _usage_section(subject: CardSubject) -> str:
    samples = "IMAGES" if subject.noun == "image" else "VECTORS.npz"
    commands = (
        f"mpfedcl predict RUN {samples}     # RUN: the folder this card is in\nmpfedcl report RUN"
    )
    lines = "\n".join(
        f"{_tensor_kind(each)} = load_file({printable_name(each)!r})" for each in subject.files
    )
    python = code_block(_PYTHON.format(lines=lines), "python")
    about_pool = (
        "The pool has `vectors`, `labels`, `counts` and `owners`; "
        f"{'an image' if subject.noun == 'image' else 'a sample'} belongs to the class of the "
        "prototype nearest to its embedding.\n"
    )
    return "\n".join(
        [
            "## How to use it\n",
            code_block(commands, "sh"),
            *(["Or in Python, in that folder:\n", python] if subject.files else []),
            *([about_pool] if "pool.safetensors" in subject.files else []),
        ]
    )


def _reproduction_section(subject: CardSubject) -> str:
    command = (
        run_command(without_local_paths(subject.experiment)) or "mpfedcl run RUN/experiment.toml"
    )
    needs = (
        ""
        if find_specification(subject.experiment.dataset.name).embedded
        else (f"\nIt needs the same {subject.noun}s; where a path stands, yours goes there.\n")
    )
    versions = ", ".join(
        f"{name} {escape_markdown(v)}" for name, v in subject.summary["versions"].items()
    )
    return (
        f"## How to make it again\n\n{code_block(command, 'sh')}{needs}\nMade with {versions}, "
        f"threads {subject.summary['threads']}.\n"
    )
