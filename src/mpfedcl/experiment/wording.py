"""An experiment in a few words, for titles and tables."""

from collections.abc import Mapping
from typing import Any

from mpfedcl.experiment.experiment import Experiment


def describe_data(
    experiment: Experiment, partition: Mapping[str, Any], *, with_seed: bool = True
) -> tuple[str, str]:
    """Return what the data of a run are, and how they are split, as far as that is known."""
    if partition.get("network"):
        seed = f", seed {experiment.seed}" if with_seed else ""
        return "its clients' own data", f"over a network{seed}"
    return experiment.dataset.name, describe_partition(experiment, with_seed=with_seed)


def describe_budget(told: Mapping[str, Any]) -> str:
    """Return a privacy budget and what is spent of it, as a run's summary tells it."""
    unit = {"record": "one image", "client": "all that one client has"}[told["unit"]]
    return (
        f"epsilon {told['spent']:.3g} of {told['epsilon']:g} spent at delta {told['delta']:g}, "
        f"for {unit} that comes or goes"
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
