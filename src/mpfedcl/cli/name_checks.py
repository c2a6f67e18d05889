"""Names that commands are given, checked before torch is loaded, which takes seconds."""

import os
from typing import Any

from mpfedcl.cli.arguments.experiments import Compare, DataFetch, DataShow, Run, Tune
from mpfedcl.data.folders import find_set_folder
from mpfedcl.data.public.sources import fetch_plan
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.datasets import find_specification
from mpfedcl.experiment.names import check_encoder_name, check_method_name

_ALL = "all"
"""In the place of a method's name: every method that fits."""


def check_names(arguments: Any) -> None:
    """Refuse unknown names of methods, data sets and encoders, and sets that are not here."""
    for method in getattr(arguments, "methods", ()):
        if method != _ALL:
            check_method_name(method)
    if isinstance(arguments, DataFetch):
        fetch_plan(arguments.name)
    settings = getattr(arguments, "settings", None)
    if not isinstance(settings, Experiment):
        return
    dataset = settings.dataset
    if isinstance(arguments, DataShow):
        dataset = dataset.model_copy(update={"name": arguments.name})
    spec = find_specification(dataset.name)
    if settings.encoder.name is not None:
        check_encoder_name(settings.encoder.name)
    # Over a network the data are with the clients; a process that torchrun has started must first
    # join the others, or they would wait for it.
    is_read_here = isinstance(arguments, Run | Compare | Tune | DataShow)
    if is_read_here and "RANK" not in os.environ and not spec.embedded and dataset.name != "table":
        find_set_folder(dataset)
