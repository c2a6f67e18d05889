"""The model card of a finished run, for readers and for model hubs."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from mpfedcl.core.errors import enumerate_names
from mpfedcl.core.files import write_atomically
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.datasets import find_specification
from mpfedcl.experiment.wording import describe_budget, describe_data, describe_partition
from mpfedcl.methods import Method
from mpfedcl.prototypes import PrototypePool
from mpfedcl.report.reproduction import (
    compare_command,
    federation_commands,
    run_command,
    without_local_paths,
)
from mpfedcl.report.tables import TextTable, predictors_table, text_table
from mpfedcl.report.wording import (
    PREDICTOR_TITLES,
    TEST_TITLES,
    calibration_sentence,
    describe_mean,
    describe_server_model,
    deviation,
    judged_by,
    percent,
    printable_name,
)
from mpfedcl.runs.directory import RunDirectory

_KINDS = {
    "averaged": "a global model",
    "pool": "a prototype pool",
    "personal": "a personalized model of each client",
}
_MOST_CLIENTS = 20
_MOST_CLASSES = 4
_SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class CardSubject:
    """The run that a card describes."""

    experiment: Experiment
    about: str
    """Summary of the method."""
    summary: dict[str, Any]
    partition: dict[str, Any]
    pool: PrototypePool | None
    files: list[str]
    """Files of tensors in the run directory."""
    trains: bool = True
    """False: a one-shot method."""

    @property
    def data(self) -> str:
        """Name of the data."""
        return describe_data(self.experiment, self.partition)[0]

    @property
    def is_network(self) -> bool:
        """Whether the clients ran on their own machines with their own data."""
        return bool(self.partition.get("network"))

    @property
    def title(self) -> str:
        """Title of the card."""
        return f"{self.method} on {self.data}"

    @property
    def method(self) -> str:
        """Name of the method."""
        return str(self.summary.get("method_name") or self.experiment.method)

    @property
    def noun(self) -> str:
        """Word for a sample; features of a frozen encoder were images."""
        is_flat = len(self.partition.get("input_shape") or ()) == 1
        return "vector" if is_flat and "encoder" not in self.partition else "image"

    @property
    def accuracies(self) -> dict[str, float]:
        """Accuracy of each evaluated client on its local test set."""
        predictors = self.summary["accuracy_per_client"] or {}
        return {name: value for name, value in predictors.items() if value is not None}


def write_card(
    directory: RunDirectory,
    method: type[Method],
    pool: PrototypePool | None,
    warn: Callable[[str], None],
) -> None:
    """Write CARD.md into the directory of a finished run; warn if that fails."""
    path = directory.path
    try:
        personal = sorted((path / "models").glob("*.safetensors"))[:1]
        files = [path / "model.safetensors", path / "pool.safetensors", *personal]
        subject = CardSubject(
            directory.read_experiment(),
            method.summary,
            directory.read_summary() or {},
            directory.read_json("partition.json") or {},
            pool,
            [str(each.relative_to(path)) for each in files if each.is_file()],
            method.trains,
        )
        # Names that are not Unicode have been made printable.
        write_atomically(path / "CARD.md", format_card(subject).encode())
    # A run must not fail because of its card.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        warn(f"CARD.md could not be written ({reason}); the run is complete without it.")


def format_card(subject: CardSubject) -> str:
    """Return the card as Markdown with YAML front matter for model hubs."""
    parts = (
        _front_matter,
        _introduction,
        _data_section,
        _predictors_section,
        _shared_section,
        _privacy_section,
        _usage_section,
        _reproduction_section,
    )
    return "\n".join(part(subject) for part in parts)


def _tensor_kind(file: str) -> str:
    return {"model.safetensors": "averaged", "pool.safetensors": "pool"}.get(file, "personal")


def _front_matter(subject: CardSubject) -> str:
    """Return the YAML that model hubs read."""
    task = "image-classification" if subject.noun == "image" else "tabular-classification"
    data, predictors = yaml_string(subject.data), subject.summary["predictors"]
    metrics = [
        "    - type: accuracy\n"
        f"      name: {yaml_string(f'accuracy % on the {TEST_TITLES[test]}, last round')}\n"
        f"      value: {value:.4f}\n"
        for test, predictor in judged_by(subject.summary).items()
        if (value := predictors[test][predictor]) is not None
    ]
    index = (
        f"model-index:\n- name: {yaml_string(subject.title)}\n"
        f"  results:\n  - task:\n      type: {task}\n"
        f"    dataset:\n      name: {data}\n      type: {data}\n"
        f"    metrics:\n{''.join(metrics)}"
    )
    return (
        f"---\nlibrary_name: mpfedcl\npipeline_tag: {task}\n"
        f"tags:\n- federated-learning\n- {task}\n- {yaml_string(subject.method)}\n"
        f"datasets:\n- {data}\nmetrics:\n- accuracy\n{index if metrics else ''}---\n"
    )


def _introduction(subject: CardSubject) -> str:
    experiment, summary = subject.experiment, subject.summary
    kinds = {_tensor_kind(name): None for name in subject.files}
    what = " and ".join(_KINDS[kind] for kind in kinds) or "no models were kept"
    effort = f"{summary['rounds']:,} rounds" if subject.trains else "One-shot"
    more = []
    if summary["accuracy_global"] is not None and experiment.partition.test != "shared":
        more.append(
            f"On the global test set: **{percent(summary['accuracy_global'])} %** "
            f"({PREDICTOR_TITLES[summary['predictor_global']]})."
        )
    if subject.is_network:
        more += describe_server_model(summary["predictors"], judged_by(summary))
    clients, spread = subject.partition["clients"], summary.get("accuracy_spread")
    evaluated = escape_markdown(describe_mean(summary["accuracy_per_client"], clients, spread))
    over = f", {evaluated}" if "not evaluated" in evaluated else ""
    return (
        f"# {escape_markdown(subject.title)}\n\n"
        f"{subject.noun.capitalize()} classifiers {'trained' if subject.trains else 'fitted'} by "
        f"federated learning with mpfedcl {escape_markdown(summary['versions']['mpfedcl'])}: "
        f"{what}. Method: {escape_markdown(subject.method)}, {escape_markdown(subject.about)}. "
        f"{effort}, {len(clients):,} clients, seed {summary['seed']}, settings in "
        "`experiment.toml`.\n\n"
        f"Primary metric: accuracy **{percent(summary['accuracy'])} %** on the local test sets in "
        f"the last round (predictor {PREDICTOR_TITLES[summary['predictor']]}){over}.\n"
        + "".join(f"{each}\n" for each in more)
    )


def _data_section(subject: CardSubject) -> str:
    """Return data, license and partition."""
    experiment, partition, nouns = subject.experiment, subject.partition, f"{subject.noun}s"
    has_budget = experiment.privacy.has_budget
    sizes = [sum(each["train"]) for each in partition["clients"].values()]
    classes = [escape_markdown(name) for name in partition["classes"]]
    if subject.is_network:
        summary = f"Each client's own {nouns}, which stayed with the client."
        source = (
            "known to the clients; parts of a public data set if they were started with --share."
        )
        split, is_shared = "as among the clients", False
    else:
        name, about = experiment.dataset.name, find_specification(experiment.dataset.name).summary
        summary = f"{escape_markdown(name)}: {escape_markdown(about)}."
        source, split = _describe_source(experiment, nouns), describe_partition(experiment)
        is_shared = experiment.partition.test == "shared"
    held = f"{sum(sizes):,} training {nouns}, {min(sizes):,} to {max(sizes):,} per client."
    if has_budget:
        held = f"{len(sizes):,} clients; their numbers of samples are not shown under a privacy "
        held += "budget."
    return (
        f"## Data\n\n{summary} {len(classes):,} classes: {enumerate_names(classes, 12)}. "
        f"{held}{_describe_pixels(experiment)}\n\n"
        f"Source and license: {source}\n\n"
        f"Partition: {split}; the clients are tested on "
        f"{f'the same {nouns}' if is_shared else f'{nouns} of their own'}.\n"
        f"{'' if has_budget else _clients_table(subject, classes)}"
    )


def _clients_table(subject: CardSubject, classes: list[str]) -> str:
    """Return the clients with the lowest accuracy; those without an accuracy come last."""
    holdings, accuracies = subject.partition["clients"], subject.accuracies
    ranked = sorted(holdings, key=lambda name: accuracies.get(name, 101.0))[:_MOST_CLIENTS]
    shown, nouns = [name for name in holdings if name in set(ranked)], f"{subject.noun}s"
    columns = ["client", f"training {nouns}", f"test {nouns}", f"classes held ({nouns})"]
    rows = [
        [
            escape_markdown(name),
            f"{sum(holdings[name]['train']):,}",
            f"{holdings[name]['test']:,}",
            _list_classes(holdings[name]["train"], classes),
            percent(accuracies.get(name)),
        ]
        for name in shown
    ]
    note = ""
    if left_out := len(holdings) - len(shown):
        when = " in the last round" if subject.summary.get("accuracy_spread") else ""
        note = f"\nThe {_MOST_CLIENTS} with the lowest accuracy{when}; {left_out:,} more are left "
        note += "out.\n"
    return f"\n{TextTable('', [*columns, 'accuracy %'], rows).markdown()}{note}"


def _describe_source(experiment: Experiment, nouns: str) -> str:
    if experiment.dataset.name in ("folder", "table"):
        return f"{nouns} of the author of this run; the author's terms apply."
    source = escape_markdown(find_specification(experiment.dataset.name).source)
    return f"{source}. The terms of its publishers apply; mpfedcl grants no rights to data."


def _describe_pixels(experiment: Experiment) -> str:
    """Return the size in pixels at which own images were used without an encoder."""
    size, encoder = experiment.dataset.image_size, experiment.encoder.name
    if experiment.dataset.name != "folder" or not size or encoder not in ("none", "random-filters"):
        return ""
    return f" Used as {size} x {size} pixels, without a pretrained encoder."


def _list_classes(counts: list[int], classes: list[str]) -> str:
    """Return a client's classes, the most frequent first."""
    held = sorted((-count, place) for place, count in enumerate(counts) if count)
    return enumerate_names(
        [f"{classes[place]} ({-count:,})" for count, place in held], _MOST_CLASSES
    )


def _predictors_section(subject: CardSubject) -> str:
    """Return the accuracies of all predictors, their spread over clients, the worst client."""
    summary, accuracies = subject.summary, subject.accuracies
    caption = f"accuracy %, round {summary['rounds']}"
    table = text_table(predictors_table(caption, summary["predictors"], judged_by(summary)))
    lines = [
        "## Predictors\n",
        table.markdown(),
        "A dash: the method has no such predictor.\n",
    ]
    if values := list(accuracies.values()):
        worst = min(accuracies, key=lambda name: accuracies[name])
        lowest = f"Worst client: {escape_markdown(worst)} with {percent(accuracies[worst])} %."
        if len(set(values)) == 1 < len(values):
            lowest = "All of them have the same accuracy."
        lines.append(
            f"Over the {len(values):,} evaluated clients the primary metric is "
            f"{percent(fmean(values))} % with a standard deviation of {percent(deviation(values))} "
            f"(ddof 1). {lowest}\n"
        )
    if calibration := calibration_sentence(summary):
        lines.append(f"{calibration.capitalize()}.\n")
    public = without_local_paths(subject.experiment)
    several = [public.replace(seed=seed) for seed in _SEEDS]
    command = None if subject.is_network else compare_command(several)
    do = f"do:\n\n{code_block(command, 'sh')}" if command else "with other seeds do.\n"
    lines.append(f"One run does not show the deviation over seeds. Several runs {do}")
    return "\n".join(lines)


def _shared_section(subject: CardSubject) -> str:
    summary = subject.summary
    sent = (summary["parameters_sent"], summary["prototype_floats_sent"])
    up, down = (f"{summary['bytes'][way] / 1e6:,.1f} MB" for way in ("up", "down"))
    most = f"In the last round a client sent at most {sent[0]:,} parameters and {sent[1]:,} values "
    most += "of prototypes. In total, clients sent"
    if not subject.trains:
        most = "Each client sent sufficient statistics of its "
        most += f"{subject.noun}s once, at most {sent[0]:,} values. In total, clients sent"
    lines = [
        "## Messages\n",
        f"{most} {up} to the server and received {down}."
        if any(sent)
        else "Nothing: each client trained alone.",
        f"Validation rejected {summary['rejected']:,} updates.\n",
    ]
    if subject.experiment.secure_aggregation:
        lines.insert(2, "The server saw only sums over clients (secure aggregation).")
    return "\n".join(lines)


def _privacy_section(subject: CardSubject) -> str:
    """Return the privacy guarantee, and what the files may reveal."""
    if told := subject.summary.get("privacy"):
        return "## Privacy\n\n" + "".join(f"- {note}\n" for note in _budget_notes(subject, told))
    summary, pool, noun = subject.summary, subject.pool, subject.noun
    notes = ["There is no privacy guarantee of any kind."]
    if pool is not None and len(pool):
        alone = int((pool.counts == 1).sum())
        notes.append(
            f"Prototypes are means of embeddings. The pool has {len(pool):,}; the smallest is the "
            f"mean of {int(pool.counts.min()):,} {subject.noun}s."
        )
        if alone:
            notes.append(
                f"A prototype of one {noun} is the embedding of that {noun}; {alone:,} are like "
                "this. `--prototypes.min-cluster-size` prevents them."
            )
    if summary["parameters_sent"] and subject.trains:
        notes.append("Parameters were sent, and parameters can reveal training data.")
    elif summary["parameters_sent"]:
        notes.append(
            f"Sufficient statistics were sent; over few {noun}s they can reveal these {noun}s."
        )
    if any(name.startswith("models/") for name in subject.files):
        notes.append("The folder `models` holds the personalized models: do not publish it.")
    return "## Privacy\n\n" + "".join(f"- {note}\n" for note in notes)


def _budget_notes(subject: CardSubject, told: Mapping[str, Any]) -> list[str]:
    """Return the files that a privacy budget covers, and those it does not."""
    model = subject.experiment.privacy.model
    noun = subject.noun
    against = (
        "Central DP: it does not hold against the server, which received updates without noise."
        if model == "central"
        else "Local DP: it also holds against the server, because clients added the noise."
    )
    return [
        f"Differential privacy: {describe_budget(told)}. {against}",
        f"It covers training {noun}s in the model, the pool, the statistics and the records. It "
        f"does not cover test {noun}s: accuracies are exact.",
        "`partition.json` of a simulation and the folders `checkpoint` and `privacy` reveal more: "
        "do not publish them.",
        "Each further run on the same data spends its own budget; budgets add up.",
    ]


def _usage_section(subject: CardSubject) -> str:
    samples = "IMAGES" if subject.noun == "image" else "VECTORS.npz"
    commands = (
        f"mpfedcl predict RUN {samples}     # RUN: the folder this card is in\nmpfedcl report RUN"
    )
    lines = "\n".join(
        f"{_tensor_kind(each)} = load_file({printable_name(each)!r})" for each in subject.files
    )
    python = code_block(f"from safetensors.torch import load_file\n\n{lines}", "python")
    about_pool = "The pool has `vectors`, `labels`, `counts` and `owners`; " + (
        f"{'an image' if subject.noun == 'image' else 'a sample'} belongs to the class of the "
        "prototype nearest to its embedding.\n"
        if subject.trains
        else "its vectors are the clients' class means, from which the model was fitted.\n"
    )
    return "\n".join(
        [
            "## Use\n",
            code_block(commands, "sh"),
            *(["Or in Python, in that folder:\n", python] if subject.files else []),
            *([about_pool] if "pool.safetensors" in subject.files else []),
        ]
    )


def _reproduction_section(subject: CardSubject) -> str:
    public = without_local_paths(subject.experiment)
    command = run_command(public) or "mpfedcl run RUN/experiment.toml"
    if subject.is_network:
        command = federation_commands(public, list(subject.partition["clients"]))
    needs = (
        ""
        if subject.is_network or find_specification(subject.experiment.dataset.name).embedded
        else (f"\nIt needs the same {subject.noun}s; replace its paths by yours.\n")
    )
    versions = ", ".join(
        f"{name} {escape_markdown(v)}" for name, v in subject.summary["versions"].items()
    )
    return (
        f"## Reproduction\n\n{code_block(command, 'sh')}{needs}\nVersions: {versions}; "
        f"threads {subject.summary['threads']}.\n"
    )


# Markdown and YAML


_SPECIAL = re.compile(r"([\\`*_\[\]<>|&~$@]|:(?=//)|(?<=www)\.)", re.IGNORECASE)
"""Characters that Markdown acts on within a line, and those in addresses, which some readers turn
into links."""


def escape_markdown(name: str) -> str:
    """Return a name that Markdown shows as plain text within a line or a cell."""
    return _SPECIAL.sub(r"\\\1", printable_name(name).strip()) or "(no name)"


def code_block(text: str, language: str = "") -> str:
    """Return a block of code that no line of the text can end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}{language}\n{text}\n{ticks}\n"


def yaml_string(value: str) -> str:
    """Return a quoted string for YAML, which accepts the strings of JSON."""
    return json.dumps(printable_name(value), ensure_ascii=False)
