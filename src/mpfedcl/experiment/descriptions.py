"""Short descriptions of an experiment, for titles and tables."""

from collections.abc import Iterable, Mapping
from typing import Any

from mpfedcl.experiment.experiment import PIXELS_PER_SIDE, Experiment


def describe_data(
    experiment: Experiment, partition: Mapping[str, Any], *, with_seed: bool = True
) -> tuple[str, str]:
    """Return the data of a run and how they are split."""
    if partition.get("network"):
        seed = f", seed {experiment.seed}" if with_seed else ""
        return "its clients' own data", f"over a network{seed}"
    return experiment.dataset.name, describe_partition(experiment, with_seed=with_seed)


def describe_by_method(settings: Iterable[tuple[str, str]]) -> str:
    """Return a setting that all runs share, or each of its values with the methods that have it.

    Args:
        settings: The method and the value of each run.

    Example:
        >>> describe_by_method([("FedAvg", "0.1"), ("FedProx", "0.1")])
        '0.1'
        >>> describe_by_method([("FedAvg", "0.1"), ("FedProx", "0.01"), ("MOON", "0.1")])
        '0.1 (FedAvg, MOON) and 0.01 (FedProx)'
    """
    methods: dict[str, dict[str, None]] = {}
    for method, value in settings:
        methods.setdefault(value, {})[method] = None
    if len(methods) == 1:
        return next(iter(methods))
    *others, last = (f"{value} ({', '.join(names)})" for value, names in methods.items())
    return f"{', '.join(others)} and {last}"


def describe_budget(told: Mapping[str, Any]) -> str:
    """Return a privacy budget and the part that is spent, from a run's summary."""
    unit = {"record": "one image", "client": "all images of one client"}[told["unit"]]
    return (
        f"epsilon {told['spent']:.3g} of {told['epsilon']:g} spent at delta {told['delta']:g}, "
        f"for adding or removing {unit}"
    )


def describe_partition(experiment: Experiment, *, with_seed: bool = True) -> str:
    """Return the partition in a few words."""
    partition = experiment.partition
    known = {
        "label": f"label skew Dir({partition.alpha:g})",
        "quantity": f"quantity skew Dir({partition.alpha:g})",
        "classes": f"{partition.classes_per_client} classes per client",
        "feature": "feature skew",
    }
    words = known.get(partition.kind, partition.kind)
    if partition.validation:
        words += f", {100 * partition.validation:g} % of training held out as test"
    return f"{words}, seed {experiment.seed}" if with_seed else words


def describe_missing_encoder(asked: Experiment) -> list[str]:
    """Return a hint if a run on the user's images lacks encoder weights, else nothing."""
    if not asked.lacks_encoder:
        return []
    size = asked.dataset.image_size or PIXELS_PER_SIDE
    return [
        f"No encoder weights were found, so methods use raw pixels ({size} x {size}), which costs "
        "accuracy. --encoder.weights FILE names ResNet-18 weights; --encoder.name onnx:FILE "
        "selects another encoder."
    ]
