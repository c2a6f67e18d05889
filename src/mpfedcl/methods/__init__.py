"""The federated methods by name, and the classes needed to write a new method.

To add a method, add a file that defines it to this folder.
"""

import importlib
from collections.abc import Iterable

from pydantic import Field

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.plugins import entry_points, import_class
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.method_settings import built_in_sections, declare
from mpfedcl.experiment.names import METHODS, check_method_name, is_built_in
from mpfedcl.experiment.settings import Settings
from mpfedcl.methods._asynchronous import Arrival, Asynchronous, mix
from mpfedcl.methods._hook_checks import check_hook_names, check_hook_results
from mpfedcl.methods._one_shot import ClosedForm, CollectsStatistics, OneShot, collect_statistics
from mpfedcl.methods._partial_model import PartialModel
from mpfedcl.methods._prototypes import (
    PrototypeRule,
    SharesPrototypes,
    prototype_rule,
    shares_prototypes_in,
)
from mpfedcl.methods._two_models import TwoModels
from mpfedcl.methods.base import (
    Batch,
    Context,
    Family,
    FullBatch,
    LayerNames,
    LocalTraining,
    Method,
    Public,
    Server,
    Tally,
    update_template,
)
from mpfedcl.methods.fedavg import FedAvg
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.methods.predictors import PREDICTORS, TESTS, PredictorKind, PredictorName, Test
from mpfedcl.prototypes import PrototypePool, Prototypes

__all__ = [
    "PREDICTORS",
    "TESTS",
    "Arrival",
    "Asynchronous",
    "Batch",
    "Broadcast",
    "ClosedForm",
    "CollectsStatistics",
    "Context",
    "Experiment",
    "Family",
    "FedAvg",
    "Field",
    "FullBatch",
    "InvalidInput",
    "LayerNames",
    "LocalTraining",
    "Method",
    "OneShot",
    "PartialModel",
    "PredictorKind",
    "PredictorName",
    "PrototypePool",
    "PrototypeRule",
    "Prototypes",
    "Public",
    "Server",
    "Settings",
    "SharesPrototypes",
    "Tally",
    "Tensors",
    "Test",
    "TwoModels",
    "Update",
    "built_in_methods",
    "check_hook_names",
    "check_hook_results",
    "check_method",
    "collect_statistics",
    "find_method",
    "is_built_in",
    "mix",
    "name_method",
    "name_methods",
    "prototype_rule",
    "shares_prototypes_in",
    "update_template",
]


_LONGEST_NAME = 60


def built_in_methods() -> dict[str, type[Method]]:
    """Return the methods of this folder by name, sorted."""
    return {name: _import_built_in(name) for name in METHODS}


def _import_built_in(name: str) -> type[Method]:
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    classes = [each for each in vars(module).values() if isinstance(each, type)]
    return next(cls for cls in classes if issubclass(cls, Method) and cls.name == name)


def check_method(method: type[Method]) -> None:
    """Check a method class: raise `InvalidInput` that names the first check it fails.

    The checks cover name, summary and predictors; a loss that runs under `torch.func.vmap`; the
    same results from the loop and the batched engines over three rounds in float64; and resuming
    from a checkpoint. They run on generated data and take a few seconds.

    Example:
        >>> from mpfedcl.methods import check_method, find_method
        >>> check_method(find_method("fedprox"))
    """
    # The checks run engines, which are built on this package.
    importlib.import_module("mpfedcl.runs.method_checks").check_method(method)


def find_method(name: str) -> type[Method]:
    """Return a method by name, or a custom class by `package.module:Class`."""
    check_method_name(name)
    return _import_built_in(name) if is_built_in(name) else _import_method(name)


def name_methods(methods: Iterable[str]) -> dict[str, str]:
    """Return the names of methods in tables and figures; custom classes have their `name`.

    A class without its own `name` is listed under the name of the class; if two names are equal,
    all methods keep the names that were passed.
    """
    named = {each: name_method(each, find_method(each)) for each in methods}
    return named if len(set(named.values())) == len(named) else {each: each for each in named}


def name_method(given: str, method: type[Method]) -> str:
    """Return the name of a method in tables and figures; `given` is the value of --method."""
    own = vars(method).get("name")
    # The name of a built-in method would be misleading.
    if is_built_in(given) or not isinstance(own, str) or own in METHODS:
        return given.rpartition(":")[2]
    is_usable = own.isprintable() and 0 < len(own) <= _LONGEST_NAME
    return own if is_usable else given.rpartition(":")[2]


def _import_method(name: str) -> type[Method]:
    point = entry_points("mpfedcl.methods").get(name)
    found = import_class("method", point.value if point else name, Method)
    primary = found.primary_predictor
    for predictor in (primary, found.primary_predictor_global or primary):
        if predictor not in PREDICTORS:
            raise InvalidInput(
                f"method is {name!r}, whose primary predictor is {predictor!r}; it must be one of "
                f"{', '.join(PREDICTORS)}."
            )
    check_hook_names(found)
    _declare_settings(name, found)
    return found


def _declare_settings(name: str, method: type[Method]) -> None:
    """Declare the settings section of a custom class."""
    try:
        kind = method.settings_class()
    # Names in annotations are looked up only now, and may be missing.
    except Exception as error:
        raise InvalidInput(
            f"method is {name!r}, whose annotations cannot be read ({error}); settings must be a "
            "class that its module imports."
        ) from None
    if not (isinstance(kind, type) and issubclass(kind, Settings)):
        raise InvalidInput(
            f"method is {name!r}, whose settings are {kind!r}; they must be a subclass of "
            "mpfedcl.methods.Settings."
        )
    if kind.__module__ == built_in_sections.__module__:
        # Inherited from a built-in method, whose section every experiment has.
        kind = Settings
    taken = {*Experiment.model_fields, *built_in_sections()}
    is_taken = kind.section in taken or hasattr(Experiment, kind.section)
    if kind is not Settings and (not kind.section.isidentifier() or is_taken):
        raise InvalidInput(
            f"method is {name!r}, whose settings have the section {kind.section!r}; it must be a "
            f"name, and none of {', '.join(sorted(taken))} or another word of an experiment."
        )
    if needed := [each for each, field in kind.model_fields.items() if field.is_required()]:
        raise InvalidInput(
            f"method is {name!r}, whose setting {needed[0]!r} has no default; it must have one."
        )
    declare(name, kind)
