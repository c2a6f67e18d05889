"""The model card of a finished run, for readers and for model hubs."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from mpfedcl.core.errors import enumerate_names
from mpfedcl.core.files import write_atomically
from mpfedcl.data.samples import ArrayFormat
from mpfedcl.experiment.datasets import find_specification
from mpfedcl.experiment.descriptions import describe_budget, describe_partition
from mpfedcl.experiment.names import metric_title
from mpfedcl.methods import Method
from mpfedcl.prototypes import PrototypePool
from mpfedcl.report.run import RunRecords, federation_command, run_command
from mpfedcl.report.tables import metrics_table, predictors_table, text_table
from mpfedcl.report.wording import (
    PREDICTOR_TITLES,
    TEST_TITLES,
    calibration_sentence,
    describe_mean,
    describe_server_model,
    deviation,
    name_value,
    percent,
    printable_name,
    tests_differ,
)
from mpfedcl.runs.directory import RunDirectory

_KINDS = {
    "averaged": "a global model",
    "pool": "a prototype pool",
    "personal": "a personalized model of each client",
}


def write_card(
    directory: RunDirectory,
    method: type[Method],
    pool: PrototypePool | None,
    warn: Callable[[str], None],
) -> None:
    """Write CARD.md into the directory of a finished run; warn if that fails."""
    try:
        card = _Card(RunRecords.read(directory.path, with_rounds=False), method, pool)
        # Names that are not Unicode have been made printable.
        write_atomically(directory.path / "CARD.md", card.text().encode())
    # A run must not fail because of its card.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        warn(f"CARD.md could not be written ({reason}); the run is complete without it.")


class _Card:
    """The sections of a card as Markdown."""

    def __init__(self, run: RunRecords, method: type[Method], pool: PrototypePool | None) -> None:
        assert run.summary is not None
        assert run.partition is not None
        self.run, self.pool, self.partition = run, pool, run.partition
        self.summary = run.summary.to_json()
        self.method, self.trains = method, method.trains
        self.title = f"{run.method_name} on {run.data[0]}"
        shape, self.noun = run.partition.input_shape, "image"
        # Features of a frozen encoder were images.
        if shape and run.partition.encoder is None and run.partition.image_shape is None:
            is_token = run.partition.holds_tokens
            self.noun = ArrayFormat(tuple(shape), "int64" if is_token else "float32").noun
        personal = sorted((run.path / "models").glob("*.safetensors"))[:1]
        tensors = {
            "averaged": run.path / "model.safetensors",
            "pool": run.path / "pool.safetensors",
            **({"personal": personal[0]} if personal else {}),
        }
        self.files = {
            kind: str(file.relative_to(run.path))
            for kind, file in tensors.items()
            if file.is_file()
        }
        evaluated = (self.summary["accuracy_per_client"] or {}).items()
        self.metrics = None if self.summary["metric"] == "accuracy" else self.summary["metrics"]
        """All metrics, if another one than accuracy is primary."""
        self.accuracies = {name: value for name, value in evaluated if value is not None}

    def text(self) -> str:
        """Return the card, with YAML front matter for model hubs."""
        return "\n".join((
            self._front_matter(),
            self._introduction(),
            self._data(),
            self._predictors(),
            self._messages(),
            "## Privacy\n\n" + "".join(f"- {note}\n" for note in self._privacy_notes()),
            self._usage(),
            self._reproduction(),
        ))  # fmt: skip

    def _front_matter(self) -> str:
        """Return the YAML that model hubs read; values are in JSON, which YAML includes."""
        task = "image-classification" if self.noun == "image" else "tabular-classification"
        data = printable_name(self.run.data[0])
        metrics = [
            {
                "type": "accuracy",
                "name": f"accuracy % on the {TEST_TITLES[test]}, last round",
                "value": round(value, 4),
            }
            for test, predictor in self.run.predictors.items()
            if (value := self.summary["predictors"][test][predictor]) is not None
        ]
        primary = self.summary["metric"]
        metrics[:0] = [
            {
                "type": printable_name(primary),
                "name": f"{printable_name(metric_title(primary))} on the {title}, last round",
                "value": round(value, 4),
            }
            for test, title in TEST_TITLES.items()
            if self.metrics and (value := self.metrics[test].get(primary)) is not None
        ]
        result = {
            "task": {"type": task},
            "dataset": {"name": data, "type": data},
            "metrics": metrics,
        }
        fields = {
            "library_name": "mpfedcl",
            "pipeline_tag": task,
            "tags": ["federated-learning", task, printable_name(self.run.method_name)],
            "datasets": [data],
            "metrics": list(dict.fromkeys(each["type"] for each in metrics)) or ["accuracy"],
            "model-index": [{"name": printable_name(self.title), "results": [result]}],
        }
        lines = [
            f"{name}: {json.dumps(value, ensure_ascii=False)}\n"
            for name, value in fields.items()
            if metrics or name != "model-index"
        ]
        return f"---\n{''.join(lines)}---\n"

    def _introduction(self) -> str:
        summary = self.summary
        what = " and ".join(_KINDS[kind] for kind in self.files) or "no models were kept"
        effort = f"{summary['rounds']:,} rounds" if self.trains else "One-shot"
        clients, spread = self.partition.clients, summary.get("accuracy_spread")
        evaluated = escape_markdown(describe_mean(summary["accuracy_per_client"], clients, spread))
        over = f", {evaluated}" if "not evaluated" in evaluated else ""
        more = []
        if (
            summary["accuracy_global"] is not None
            and self.run.experiment.partition.test != "shared"
        ):
            more.append(
                f"On the global test set: **{percent(summary['accuracy_global'])} %** "
                f"({PREDICTOR_TITLES[self.run.predictors['global_test']]})."
            )
        if self.run.is_network:
            more += describe_server_model(summary["predictors"], self.run.predictors)
        accuracy = f"accuracy **{percent(summary['accuracy'])} %** on the local test sets"
        primary = f"Primary metric: {accuracy}"
        if self.metrics:
            value = name_value(summary["metric"], self.metrics["local_test"].get(summary["metric"]))
            primary = f"Primary metric: **{escape_markdown(value)}** over the samples of all local "
            primary += f"test sets; {accuracy}"
        judged = PREDICTOR_TITLES[summary["predictor"]]
        return (
            f"# {escape_markdown(self.title)}\n\n"
            f"{self.noun.capitalize()} classifiers {'trained' if self.trains else 'fitted'} by "
            "federated learning with mpfedcl "
            f"{escape_markdown(summary['versions']['mpfedcl'])}: {what}. "
            f"Method: {escape_markdown(self.run.method_name)}, "
            f"{escape_markdown(self.method.summary)}. {effort}, {len(clients):,} clients, "
            f"seed {summary['seed']}, settings in `experiment.toml`.\n\n"
            f"{primary} in the last round (predictor {judged}){over}.\n"
            + "".join(f"{each}\n" for each in more)
        )

    def _data(self) -> str:
        """Return data, license and partition."""
        experiment, nouns = self.run.experiment, f"{self.noun}s"
        sizes = [sum(each.train) for each in self.partition.clients.values()]
        classes = [escape_markdown(name) for name in self.partition.classes]
        held = f"{sum(sizes):,} training {nouns}, {min(sizes):,} to {max(sizes):,} per client."
        if experiment.privacy.has_budget:
            held = f"{len(sizes):,} clients; their numbers of samples are not shown under a "
            held += "privacy budget."
        if self.run.is_network:
            about = f"Each client's own {nouns}, which stayed with the client."
            source = "known to the clients; parts of a public data set if they were started with "
            source += "--share."
            split, is_shared = "as among the clients", False
        else:
            found = find_specification(experiment.dataset.name)
            about = f"{escape_markdown(experiment.dataset.name)}: {escape_markdown(found.summary)}."
            source = f"{escape_markdown(found.source)}. The terms of its publishers apply; mpfedcl "
            source += "grants no rights to data."
            if experiment.dataset.name in ("folder", "table") or ":" in experiment.dataset.name:
                source = f"{nouns} of the author of this run; the author's terms apply."
            split = describe_partition(experiment)
            is_shared = experiment.partition.test == "shared"
        tested = f"the same {nouns}" if is_shared else f"{nouns} of their own"
        return (
            f"## Data\n\n{about} {len(classes):,} classes: {enumerate_names(classes, 12)}. {held}"
            f"{self._describe_pixels()}\n\nSource and license: {source}\n\n"
            f"Partition: {split}; the clients are tested on {tested}.\n"
        )

    def _describe_pixels(self) -> str:
        """Return the size in pixels at which own images were used without an encoder."""
        dataset, encoder = self.run.experiment.dataset, self.run.experiment.encoder.name
        size = dataset.image_size
        if dataset.name != "folder" or not size or encoder not in ("none", "random-filters"):
            return ""
        return f" Used as {size} x {size} pixels, without a pretrained encoder."

    def _predictors(self) -> str:
        """Return the accuracies of all predictors, their spread over clients, the worst client."""
        table = predictors_table("", self.summary["predictors"], self.run.predictors)
        lines = [
            f"## Predictors\n\nAccuracy in %, round {self.summary['rounds']}.\n",
            text_table(table).markdown(),
            "A dash: the method has no such predictor.\n",
        ]
        if (found := self.run.metrics) is not None:
            shared = not tests_differ(found["local_test"], found["global_test"])
            every = metrics_table(found, self.summary["metric"], shared=shared)
            lines.append(text_table(every).markdown())
        if values := list(self.accuracies.values()):
            worst = min(self.accuracies, key=lambda name: self.accuracies[name])
            lowest = f"Worst client: {escape_markdown(worst)} with {percent(min(values))} %."
            if len(set(values)) == 1 < len(values):
                lowest = "All of them have the same accuracy."
            lines.append(
                f"Over the {len(values):,} evaluated clients the "
                f"{'accuracy' if self.metrics else 'primary metric'} is "
                f"{percent(fmean(values))} % with a standard deviation of "
                f"{percent(deviation(values))} (ddof 1). {lowest}\n"
            )
        if calibration := calibration_sentence(self.summary):
            lines.append(f"{calibration.capitalize()}.\n")
        lines.append("One run does not show the deviation over seeds; runs with other seeds do.\n")
        return "\n".join(lines)

    def _messages(self) -> str:
        summary = self.summary
        parameters, floats = summary["parameters_sent"], summary["prototype_floats_sent"]
        up, down = (f"{summary['bytes'][way] / 1e6:,.1f} MB" for way in ("up", "down"))
        most = f"In the last round a client sent at most {parameters:,} parameters and {floats:,} "
        most += "values of prototypes."
        if not self.trains:
            most = f"Each client sent sufficient statistics of its {self.noun}s once, at most "
            most += f"{parameters:,} values."
        total = f"In total, clients sent {up} to the server and received {down}."
        if not parameters and not floats:
            most, total = "Nothing: each client trained alone.", ""
        lines = ["## Messages\n", f"{most} {total}".strip()]
        if self.run.experiment.secure_aggregation:
            lines.append("The server saw only sums over clients (secure aggregation).")
        return "\n".join([*lines, f"Validation rejected {summary['rejected']:,} updates.\n"])

    def _privacy_notes(self) -> list[str]:
        """Return the privacy guarantee, and what the files may reveal."""
        summary, pool, noun = self.summary, self.pool, self.noun
        if told := summary.get("privacy"):
            against = "Local DP: it also holds against the server, because clients added the noise."
            experiment = self.run.experiment
            if experiment.secure_aggregation:
                against = (
                    "Distributed DP: clients added the noise before they masked their values; it "
                )
                against += (
                    f"holds against the server if {experiment.secure.honest_clients} or more "
                )
                against += "of the clients in each sum were honest."
            elif experiment.privacy.model == "central":
                against = "Central DP: it does not hold against the server, which received updates "
                against += "without noise."
            return [
                f"Differential privacy: {describe_budget(told)}. {against}",
                f"It covers training {noun}s in the model, the pool, the statistics and the "
                f"records. It does not cover test {noun}s: accuracies are exact.",
                "`partition.json` of a simulation and the folders `checkpoint` and `privacy` "
                "reveal more: do not publish them.",
                "Each further run on the same data spends its own budget; budgets add up.",
            ]
        notes = ["There is no privacy guarantee of any kind."]
        if pool is not None and len(pool):
            notes.append(
                f"Prototypes are means of embeddings. The pool has {len(pool):,}; the smallest is "
                f"the mean of {int(pool.counts.min()):,} {noun}s."
            )
            if alone := int((pool.counts == 1).sum()):
                notes.append(
                    f"A prototype of one {noun} is the embedding of that {noun}; {alone:,} are "
                    "like this. `--prototypes.min-cluster-size` prevents them."
                )
        if summary["parameters_sent"]:
            notes.append(
                "Parameters were sent, and parameters can reveal training data."
                if self.trains
                else f"Sufficient statistics were sent; over few {noun}s they can reveal these "
                f"{noun}s."
            )
        if "personal" in self.files:
            notes.append("The folder `models` holds the personalized models: do not publish it.")
        return notes

    def _usage(self) -> str:
        samples = "IMAGES" if self.noun == "image" else "VECTORS.npz"
        commands = f"mpfedcl predict RUN {samples}     # RUN: the folder this card is in\n"
        lines = ["## Use\n", code_block(f"{commands}mpfedcl report RUN", "sh")]
        if self.files:
            python = "from safetensors.torch import load_file\n"
            for kind, file in self.files.items():
                python += f"\n{kind} = load_file({printable_name(file)!r})"
            lines += ["Or in Python, in that folder:\n", code_block(python, "python")]
        if "pool" in self.files:
            article = "an image" if self.noun == "image" else "a sample"
            lines.append(
                "The pool has `vectors`, `labels`, `counts` and `owners`; "
                + (
                    f"{article} belongs to the class of the prototype nearest to its embedding.\n"
                    if self.trains
                    else "its vectors are the clients' class means, from which the model was "
                    "fitted.\n"
                )
            )
        return "\n".join(lines)

    def _reproduction(self) -> str:
        file, needs = Path("RUN/experiment.toml"), ""
        command = run_command(file)
        if self.run.is_network:
            command = federation_command(file)
        elif not find_specification(self.run.experiment.dataset.name).embedded:
            needs = f"\nIt needs the same {self.noun}s; replace its paths by yours.\n"
        versions = ", ".join(
            f"{name} {escape_markdown(v)}" for name, v in self.summary["versions"].items()
        )
        return (
            f"## Reproduction\n\n{code_block(command, 'sh')}{needs}\nVersions: {versions}; "
            f"threads {self.summary['threads']}.\n"
        )


# Markdown


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
