"""The methods, found by name. A file in this folder that defines one is all it takes to add one."""

import importlib
import pkgutil

from mpfedcl.errors import InvalidInput
from mpfedcl.messages import Broadcast, Update
from mpfedcl.methods.base import READINGS, Batch, Context, Method, Reading, Server, Tally
from mpfedcl.tensors import Tensors
from mpfedcl.user_classes import import_class

__all__ = [
    "READINGS",
    "Batch",
    "Broadcast",
    "Context",
    "Method",
    "Reading",
    "Server",
    "Tally",
    "Tensors",
    "Update",
    "built_in_methods",
    "find_method",
    "is_built_in",
]


def built_in_methods() -> dict[str, type[Method]]:
    """Return the methods of this folder by name, sorted."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    found = {cls.name: cls for cls in _subclasses(Method) if cls.__module__.startswith(__name__)}
    return dict(sorted(found.items()))


def is_built_in(name: str) -> bool:
    """Tell whether a method would be one of this folder: finding it runs nobody else's code."""
    return ":" not in name


def find_method(name: str) -> type[Method]:
    """Return a method by name, or a class of the user's own by `package.module:Class`."""
    if not is_built_in(name):
        return _import_method(name)
    methods = built_in_methods()
    if name not in methods:
        raise InvalidInput(
            f"method is {name!r}; it must be one of {', '.join(methods)}, "
            "or package.module:Class for your own."
        )
    return methods[name]


def _import_method(name: str) -> type[Method]:
    found = import_class("method", name, Method)
    if found.reading not in READINGS:
        raise InvalidInput(
            f"method is {name!r}, whose reading is {found.reading!r}; it must be one of "
            f"{', '.join(READINGS)}."
        )
    return found


def _subclasses(cls: type[Method]) -> list[type[Method]]:
    return [each for child in cls.__subclasses__() for each in (child, *_subclasses(child))]
