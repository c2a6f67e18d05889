"""The model card: what a finished run is, in a page that people and model hubs can read."""

from collections.abc import Callable

from mpfedcl.core.files import write_atomically
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.datasets import find_specification
from mpfedcl.experiment.wording import describe_partition
from mpfedcl.methods import Method
from mpfedcl.prototypes import PrototypePool
from mpfedcl.report.card_privacy import privacy_section
from mpfedcl.report.card_subject import CardSubject
from mpfedcl.report.headline import describe_mean, describe_server_model
from mpfedcl.report.markdown import (
    code_block,
    enumerate_names,
    escape_markdown,
    printable_name,
    yaml_string,
)
from mpfedcl.report.number_formatting import describe_calibration, deviation, mean
from mpfedcl.report.reproduction import (
    compare_command,
    federation_commands,
    run_command,
    without_local_paths,
)
from mpfedcl.report.tables import (
    PREDICTOR_TITLES,
    TextTable,
    judged_by,
    percent,
    predictors_table,
)
from mpfedcl.runs.directory import RunDirectory

_KINDS = {
    "averaged": "one global model",
    "pool": "a pool of prototypes",
    "personal": "each client's own model",
}
_MOST_CLIENTS = 20
_MOST_CLASSES = 4
_SEEDS = (0, 1, 2)


def write_card(
    directory: RunDirectory,
    method: type[Method],
    pool: PrototypePool | None,
    warn: Callable[[str], None],
) -> None:
    """Write CARD.md into the folder of a finished run; warn where that cannot be done."""
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
        # A name that is no Unicode, as file systems allow, has been made readable by now.
        write_atomically(path / "CARD.md", format_card(subject).encode())
    # The run is whole without it: whatever is wrong with a card must not cost one.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        warn(f"CARD.md could not be written ({reason}); the run is complete without it.")


def format_card(subject: CardSubject) -> str:
    """Return the card as Markdown, after the lines of YAML that model hubs look for."""
    parts = (
        _front_matter,
        _introduction,
        _data_section,
        _readings_section,
        _shared_section,
        privacy_section,
        _usage_section,
        _reproduction_section,
    )
    return "\n".join(part(subject) for part in parts)


def _tensor_kind(file: str) -> str:
    return {"model.safetensors": "averaged", "pool.safetensors": "pool"}.get(file, "personal")


def _front_matter(subject: CardSubject) -> str:
    summary = subject.summary
    task = "image-classification" if subject.noun == "image" else "tabular-classification"
    lines = [
        "---",
        "library_name: mpfedcl",
        f"pipeline_tag: {task}",
        "tags:",
        "- federated-learning",
        f"- {task}",
        f"- {yaml_string(subject.method)}",
        "datasets:",
        f"- {yaml_string(subject.data)}",
        "metrics:",
        "- accuracy",
    ]
    values = {test: summary["predictors"][test][r] for test, r in judged_by(summary).items()}
    if any(value is not None for value in values.values()):
        lines += [
            "model-index:",
            f"- name: {yaml_string(subject.title)}",
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
                f"      name: {yaml_string(f'accuracy % on the {test.replace(chr(95), chr(32))} set, last round')}",
                f"      value: {value:.4f}",
            ]
    return "\n".join([*lines, "---", ""])


def _introduction(subject: CardSubject) -> str:
    experiment, summary = subject.experiment, subject.summary
    kinds = {_tensor_kind(name): None for name in subject.files}
    what = " and ".join(_KINDS[kind] for kind in kinds) or "the models were not kept"
    effort = f"{summary['rounds']:,} rounds" if subject.trains else "One exchange"
    union = ""
    if summary["accuracy_global"] is not None and experiment.partition.test != "shared":
        union = (
            f"On all clients' test {subject.noun}s together: "
            f"**{percent(summary['accuracy_global'])} %** "
            f"({PREDICTOR_TITLES[summary['predictor_global']]}).\n"
        )
    clients, spread = subject.partition["clients"], summary.get("accuracy_spread")
    told = escape_markdown(describe_mean(summary["accuracy_per_client"], clients, spread))
    over = f", {told}" if "not read" in told else ""
    if subject.is_network:
        said = describe_server_model(summary["predictors"], judged_by(summary))
        union += "".join(f"{each}\n" for each in said)
    return (
        f"# {escape_markdown(subject.title)}\n\n"
        f"{subject.noun.capitalize()} classifiers {'trained' if subject.trains else 'made'} by "
        f"federated learning with mpfedcl {escape_markdown(summary['versions']['mpfedcl'])}: "
        f"{what}. "
        f"Method: {escape_markdown(subject.method)}, {escape_markdown(subject.about)}. "
        f"{effort}, "
        f"{len(subject.partition['clients']):,} clients, seed {summary['seed']}, settings in "
        "`experiment.toml`.\n\n"
        f"Headline: **{percent(summary['accuracy'])} %** of the clients' local test set "
        f"{subject.noun}s right, in the last round ({PREDICTOR_TITLES[summary['predictor']]}){over}.\n"
        f"{union}"
    )


def _data_section(subject: CardSubject) -> str:
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
    held = (
        f"{sum(sizes):,} training {nouns}, {min(sizes):,} to {max(sizes):,} per client."
        if not experiment.privacy.has_budget
        else f"{len(sizes):,} clients; how much each holds is not shown under a privacy budget."
    )
    left_out = len(holdings) - len(shown)
    of_whom = " in the last round" if subject.summary.get("accuracy_spread") else ""
    lowest = f"The {_MOST_CLIENTS} with the lowest accuracy{of_whom}"
    note = f"\n{lowest}; {left_out:,} more are left out.\n"
    return (
        "## Data\n\n"
        f"{summary} "
        f"{len(classes):,} classes: {enumerate_names(classes, 12)}. "
        f"{held}{_describe_pixels(experiment)}\n\n"
        f"Source and license: {source}\n\n"
        f"Skew: {split}; the clients are tested on "
        f"{f'the same {nouns}' if is_shared else f'{nouns} of their own'}."
        + ("\n" if experiment.privacy.has_budget else "")
        + (
            ""
            if experiment.privacy.has_budget
            else f"\n\n{grid.markdown()}{note if left_out else ''}"
        )
    )


def _describe_source(experiment: Experiment, nouns: str) -> str:
    if experiment.dataset.name in ("folder", "table"):
        return f"{nouns} of whoever made this run; their terms apply."
    source = escape_markdown(find_specification(experiment.dataset.name).source)
    return f"{source}. The terms of its publishers apply; mpfedcl grants no rights to data."


def _describe_pixels(experiment: Experiment) -> str:
    """Say that one's own pictures were seen as pixels, where they were."""
    size, encoder = experiment.dataset.image_size, experiment.encoder.name
    if experiment.dataset.name != "folder" or not size or encoder not in ("none", "random-filters"):
        return ""
    return f" Seen as {size} x {size} pixels, without a trained encoder."


def _list_classes(counts: list[int], classes: list[str]) -> str:
    """Return a client's classes, the largest first."""
    held = sorted((-count, place) for place, count in enumerate(counts) if count)
    return enumerate_names(
        [f"{classes[place]} ({-count:,})" for count, place in held], _MOST_CLASSES
    )


def _readings_section(subject: CardSubject) -> str:
    """Return all predictors on both tests, their deviation over clients, the worst case."""
    values, nouns = list(subject.accuracies.values()), f"{subject.noun}s"
    lines = [
        "## Readings\n",
        predictors_table("", subject.summary).markdown(),
        f"*own*: each client on its local test set {nouns}; *union*: on all clients' test {nouns} "
        "together. *personal*: a client's own model after its training; *averaged*: the server's. "
        "A dash: this method has no such thing.\n",
    ]
    if values:
        lines.append(
            f"Over the {len(values):,} clients that were evaluated, the headline is "
            f"{percent(mean(values))} % with a deviation of {percent(deviation(values))} "
            f"(ddof 1). {_describe_worst_client(subject)}\n"
        )
    if told := describe_calibration(subject.summary):
        lines.append(f"{told.capitalize()}.\n")
    public = without_local_paths(subject.experiment)
    several = [public.replace(seed=seed) for seed in _SEEDS]
    command = None if subject.is_network else compare_command(several)
    lines.append(
        "One run says nothing about the deviation over seeds; that takes several runs:\n\n"
        f"{code_block(command, 'sh')}"
        if command
        else "One run says nothing about the deviation over seeds; that takes several runs "
        "with other seeds.\n"
    )
    return "\n".join(lines)


def _describe_worst_client(subject: CardSubject) -> str:
    accuracies = subject.accuracies
    if len(set(accuracies.values())) == 1 and len(accuracies) > 1:
        return "All of them have the same accuracy."
    worst = min(accuracies, key=lambda name: accuracies[name])
    return f"Worst case: {escape_markdown(worst)} with {percent(accuracies[worst])} %."


def _shared_section(subject: CardSubject) -> str:
    summary = subject.summary
    sent = (summary["parameters_sent"], summary["prototype_floats_sent"])
    up, down = (f"{summary['bytes'][way] / 1e6:,.1f} MB {way}" for way in ("up", "down"))
    most = (
        f"In the last round a client sent at most {sent[0]:,} parameters and {sent[1]:,} numbers "
    )
    most += "of prototypes. All rounds together took"
    if not subject.trains:
        most = f"Each client sent sums over its {subject.noun}s once, at most {sent[0]:,} numbers. "
        most += "All together took"
    lines = [
        "## What was shared\n",
        f"{most} {up} to the server and {down} to the clients."
        if any(sent)
        else f"Nothing: each client {'trained' if subject.trains else 'was'} alone.",
        f"The guard rejected {summary['rejected']:,} updates.\n",
    ]
    if subject.experiment.secure_aggregation:
        lines.insert(2, "The server saw only totals over clients (secure aggregation).")
    return "\n".join(lines)


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
        else "its vectors are the clients' class means, of which the model was made.\n"
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
        f"## How to make it again\n\n{code_block(command, 'sh')}{needs}\nMade with {versions}, "
        f"threads {subject.summary['threads']}.\n"
    )
