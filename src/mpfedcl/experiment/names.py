"""Names of methods, partitions, aggregation rules and encoders, known without importing torch.

A test holds `METHODS` to the files in `methods/`, `PARTITIONS` to the functions in
`data/partitions.py`, and `AGGREGATION_RULES` to the classes in `rounds/aggregation/`.
"""

import inspect
import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.plugins import entry_points, load

_METHODS = """
afd aso-fed async-share cmfl ditto dp-fedcl fed-dropout fedasync fedat fedavg fedavg-ft fedbabu
fedbn fedcof feddyn fedgauss fedlc fedlda fedmmd fedncm fednh fednova fedopt fedpcl fedper fedplvm
fedproc fedproto fedprox fedrep fedridge fedrod fedrs fedtgp fpl local local-gauss moon mp-fedcl
mpfed pfedme proto-attention proto-inference sageflow scaffold sp-fedcl
"""
METHODS = tuple(_METHODS.split())
"""Built-in methods."""
SECTIONS = {"aso-fed": "asofed", "dp-fedcl": "dbscan"}
"""Sections of methods that do not have the name of their method."""
PARTITIONS: dict[str, str] = {
    "classes": "A few classes for each client.",
    "feature": "One domain per client.",
    "iid": "Equal shares at random.",
    "label": "Dirichlet shares of each class.",
    "natural": "One client per domain; with `clients`, that many domains drawn by seed.",
    "quantity": "Dirichlet shares of all images, so that clients differ in size.",
}
SPLIT_BY_DOMAIN = ("feature", "natural")
"""Partitions that give whole domains to clients."""
AGGREGATION_RULES: dict[str, str] = {
    "centered-clipping": "the mean of updates clipped around a center (Karimireddy et al., 2021).",
    "geometric-median": "the point nearest to all updates in total (RFA, Pillutla et al., 2022).",
    "krum": "the one update that is nearest to its neighbors (Blanchard et al., 2017).",
    "mean": "the mean by number of samples, as in FedAvg.",
    "median": "the coordinate-wise median, all clients alike (Yin et al., 2018).",
    "multi-krum": "the mean of the n - f updates nearest to others (Blanchard et al., 2017).",
    "trimmed-mean": "the coordinate-wise mean without the extreme values (Yin et al., 2018).",
}

METRICS: dict[str, str] = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro F1",
    "auroc": "AUROC",
    "nll": "NLL",
    "brier": "Brier score",
    "ece": "ECE",
}
"""The metrics of a run, with their titles."""
_NOT_IN_PERCENT = ("nll", "brier")
_SMALLER_IS_BETTER = ("nll", "brier", "ece")


def check_metric_name(metric: str) -> None:
    """Reject a name that is neither a known metric nor package.module:function."""
    if metric not in METRICS and ":" not in metric:
        raise InvalidInput(
            f"metric is {metric!r}; it must be one of {', '.join(METRICS)}, or "
            f"package.module:function for your own{did_you_mean(metric, METRICS)}."
        )


def metric_title(metric: str) -> str:
    """Return the name of a metric in tables, with its unit.

    Example:
        >>> metric_title("macro_f1"), metric_title("nll"), metric_title("mine.scores:recall")
        ('macro F1 in %', 'NLL', 'recall')
    """
    title = METRICS.get(metric) or metric.rpartition(":")[2]
    return f"{title} in %" if is_in_percent(metric) else title


def is_in_percent(metric: str) -> bool:
    """Return whether the values of a metric are percentages."""
    return metric in METRICS and metric not in _NOT_IN_PERCENT


def metric_sign(metric: str) -> int:
    """Return -1 if smaller values of a metric are better, otherwise 1."""
    return -1 if metric in _SMALLER_IS_BETTER else 1


MODELS = ("mlp", "linear", "cnn", "cnn-small", "resnet8", "resnet18")
"""Built-in models."""
IMAGE_MODELS = MODELS[2:]
"""Those that take images as they are."""


def describe(index: Mapping[str, str]) -> str:
    """Return the entries of an index as one help text."""
    return " ".join(f"{name}: {line}" for name, line in index.items())


def splits_domains(kind: str) -> bool:
    """Return whether a partition assigns whole domains: its first parameter is `domains`."""
    if kind in PARTITIONS:
        return kind in SPLIT_BY_DOMAIN
    function = load(entry_points("mpfedcl.partitions")[kind], "partition.kind")
    return next(iter(inspect.signature(function).parameters)) == "domains"


def method_names() -> tuple[str, ...]:
    """Return the names of the built-in methods and of those that other packages offer."""
    return (*METHODS, *sorted(entry_points("mpfedcl.methods")))


def is_built_in(method: str) -> bool:
    """Return whether a method is part of this package, so that finding it runs no foreign code."""
    return ":" not in method and method not in entry_points("mpfedcl.methods")


def check_method_name(method: str) -> None:
    """Reject a name that is neither a known method nor package.module:Class."""
    if ":" in method or method in method_names():
        return
    if "," in method:
        raise InvalidInput(
            f"method is {method!r}; it must be one name, and several after --methods are separated "
            f"by spaces: {' '.join(method.replace(',', ' ').split())}."
        )
    question = did_you_mean(method, method_names())
    # All forty names would hide the suggestion.
    named = "those that mpfedcl methods lists" if question else ", ".join(method_names())
    raise InvalidInput(
        f"method is {method!r}; it must be one of {named}, or package.module:Class for a custom "
        f"one{question}."
    )


def name_method_class(method: type) -> str:
    """Return the name by which an experiment knows a class: built-in, or package.module:Class."""
    own, module, name = vars(method).get("name"), method.__module__, method.__qualname__
    if own in METHODS and module.startswith("mpfedcl.methods."):
        return str(own)
    if getattr(sys.modules.get(module), name, None) is not method:
        raise InvalidInput(
            f"method is the class {name}, which cannot be imported from {module}; it must be "
            "defined at the top of a module or of a notebook cell."
        )
    return f"{module}:{name}"


_LIKENESS = 0.66
"""Minimum similarity at which a name counts as a typing error of another."""
_MOST_SHOWN = 3


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a question to append to an error; empty if no known name is similar.

    Case, hyphens and underscores are ignored. The prefix is put before the suggestion.

    Example:
        >>> did_you_mean("fedvag", ["fedavg", "fedprox"]), did_you_mean("MP_FedCL", ["mp-fedcl"])
        (' (did you mean fedavg?)', ' (did you mean mp-fedcl?)')
    """
    plain = {_plain(each): prefix + each for each in known}
    return _ask([plain[each] for each in get_close_matches(_plain(name), plain, 1, _LIKENESS)])


def did_you_mean_setting(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the same question for settings, whose dotted names users shorten.

    Example:
        >>> known = ["rounds", "dataset.name", "dataset.root", "train.lr"]
        >>> did_you_mean_setting("lr", known), did_you_mean_setting("dataset", known)
        (' (did you mean train.lr?)', ' (did you mean dataset.name?)')
    """
    dotted, wanted = list(known), _plain(name)
    ends = [each for each in dotted if _plain(each.rpartition(".")[2]) == wanted]
    sections = [each for each in dotted if _plain(each.partition(".")[0]) == wanted]
    # The first setting of a section is the main one: dataset.name, partition.kind.
    if found := ends[:_MOST_SHOWN] or sections[:1]:
        return _ask([prefix + each for each in found])
    by_plain = {_plain(each.rpartition(".")[2]): each for each in reversed(dotted)}
    by_plain |= {_plain(each): each for each in dotted}
    close = get_close_matches(wanted, by_plain, 1, _LIKENESS)
    return _ask([prefix + by_plain[each] for each in close])


def describe_unknown_setting(name: str, question: str, otherwise: str) -> str:
    """Return the error of an unknown setting: the question if there is one, as a hint alone.

    Example:
        >>> question = did_you_mean_setting("lr", ["rounds", "train.lr"])
        >>> describe_unknown_setting("lr", question, "mpfedcl run --help lists all settings.")
        'lr is not a setting; did you mean train.lr?'
    """
    return f"{name} is not a setting; {question.strip(' ()') or otherwise}"


def _plain(name: str) -> str:
    return name.casefold().replace("-", "").replace("_", "").replace(".", "")


def _ask(found: list[str]) -> str:
    if not found:
        return ""
    *others, last = found
    named = f"{', '.join(others)} or {last}" if others else last
    return f" (did you mean {named}?)"


_ALONE = ("none", "resnet18", "random-filters", "random-resnet18")


def unknown_encoder(name: str) -> InvalidInput:
    """Return the error of an unknown encoder."""
    allowed = f"{', '.join(_ALONE)} or onnx:FILE"
    if name.startswith("sentence:"):
        return InvalidInput(
            f"encoder.name is {name!r}; it must be {allowed}. Texts are encoded before a run: "
            f"mpfedcl data encode DATA OUT --encoder {name} --text COLUMN --label COLUMN."
        )
    question = did_you_mean(name, _ALONE)
    return InvalidInput(f"encoder.name is {name!r}; it must be {allowed}{question}.")
