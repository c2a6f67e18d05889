"""The methods, found by name, and all that is needed to write one.

A file in this folder that defines a method is all it takes to add one.
"""

import importlib
from collections.abc import Iterable

from pydantic import Field

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.plugins import entry_points, import_class
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.method_settings import (
    built_in_sections,
    declare,
)
from mpfedcl.experiment.names import METHODS, check_method_name, is_built_in
from mpfedcl.experiment.settings import Settings
from mpfedcl.methods._asynchronous import Arrival, Asynchronous
from mpfedcl.methods._predictors import PREDICTORS, TESTS, PredictorName, Test
from mpfedcl.methods._round_values import Batch, Context, FullBatch, Public, Server, Tally
from mpfedcl.methods.base import Family, Method
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.prototypes import PrototypePool, Prototypes

__all__ = [
    "PREDICTORS",
    "TESTS",
    "Arrival",
    "Asynchronous",
    "Batch",
    "Broadcast",
    "Context",
    "Experiment",
    "Family",
    "Field",
    "FullBatch",
    "InvalidInput",
    "Method",
    "PredictorName",
    "PrototypePool",
    "Prototypes",
    "Public",
    "Server",
    "Settings",
    "Tally",
    "Tensors",
    "Test",
    "Update",
    "built_in_methods",
    "find_method",
    "is_built_in",
    "name_method",
    "name_methods",
]


_LONGEST_NAME = 60


def built_in_methods() -> dict[str, type[Method]]:
    """Return the methods of this folder by name, sorted."""
    for name in METHODS:
        importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    ours = [
        cls
        for cls in _subclasses(Method)
        # What several methods have in common inherits a name, and is none of them.
        if cls.__module__.startswith(__name__) and "name" in vars(cls)
    ]
    return {name: cls for name in METHODS for cls in ours if cls.name == name}


def find_method(name: str) -> type[Method]:
    """Return a method by name, or a class of the user's own by `package.module:Class`."""
    check_method_name(name)
    return built_in_methods()[name] if is_built_in(name) else _import_method(name)


def name_methods(methods: Iterable[str]) -> dict[str, str]:
    """Return what methods are called in tables and figures: classes from outside by their `name`.

    One that has none of its own is called as its class is; where two would be called the same, all
    keep the names that they were given by.
    """
    named = {each: name_method(each, find_method(each)) for each in methods}
    return named if len(set(named.values())) == len(named) else {each: each for each in named}


def name_method(given: str, method: type[Method]) -> str:
    """Return what a method that was given by a name is called."""
    own = vars(method).get("name")
    # One that is also a built-in method's would claim to be that.
    if is_built_in(given) or not isinstance(own, str) or own in METHODS:
        return given.rpartition(":")[2]
    is_usable = own.isprintable() and 0 < len(own) <= _LONGEST_NAME
    return own if is_usable else given.rpartition(":")[2]


def _import_method(name: str) -> type[Method]:
    point = entry_points("mpfedcl.methods").get(name)
    found = import_class("method", point.value if point else name, Method)
    for predictor in (found.predictor, found.global_test_predictor or found.predictor):
        if predictor not in PREDICTORS:
            raise InvalidInput(
                f"method is {name!r}, whose predictor is {predictor!r}; it must be one of "
                f"{', '.join(PREDICTORS)}."
            )
    _declare_settings(name, found)
    return found


def _declare_settings(name: str, method: type[Method]) -> None:
    """Let experiments know the section of a class from outside."""
    try:
        kind = method.settings_class()
    # Names in annotations are looked up only now, and may be missing.
    except Exception as error:
        raise InvalidInput(
            f"method is {name!r}, whose annotations cannot be read ({error}); settings must be a "
            "class that its module knows."
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


def _subclasses(cls: type[Method]) -> list[type[Method]]:
    return [each for child in cls.__subclasses__() for each in (child, *_subclasses(child))]
