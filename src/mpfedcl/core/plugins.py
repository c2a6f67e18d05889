"""Extensions: classes named as package.module:Class, and entry points of installed packages."""

import importlib
import sys
from collections.abc import Callable
from functools import cache
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, TypeVar, cast

from mpfedcl.core.errors import InvalidInput, explain

_Base = TypeVar("_Base")


@cache
def entry_points(group: str) -> dict[str, EntryPoint]:
    """Return what installed packages offer to a group, by name; nothing is imported.

    Groups are mpfedcl.methods, mpfedcl.datasets, mpfedcl.models, mpfedcl.encoders,
    mpfedcl.partitions and mpfedcl.aggregators. Built-in names take precedence, so callers look
    here only for names that they do not know.
    """
    return {each.name: each for each in metadata.entry_points(group=group)}


def load(entry: EntryPoint, field: str) -> Any:
    """Import the object of an entry point, which a settings field names."""
    try:
        return entry.load()
    # A package may fail in any way while it is imported.
    except Exception as error:
        raise InvalidInput(
            f"{field} is {entry.name!r}, which {entry.value} of an installed package offers, but "
            f"it cannot be imported ({type(error).__name__}: {explain(error)})."
        ) from None


def allow_current_folder() -> None:
    """Let classes come from the current folder, where an installed command does not look.

    This is done only if the command line names such a class: a run directory from elsewhere must
    not choose which code of the current folder is run.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def import_from_current_folder(field: str, name: str) -> None:
    """Import the module of a class or function that the command line names, also from this folder.

    Afterwards the folder is not searched: a run directory must not choose other code in it.
    """
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        _import(field, name, "name")
    finally:
        sys.path.remove(folder)


def import_class(field: str, name: str, base: type[_Base]) -> type[_Base]:
    """Return the class that a field names; it must be a subclass of a public class of mpfedcl."""
    found = _import(field, name, "Class")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise InvalidInput(
            f"{field} is {name!r}; it must name a subclass of mpfedcl.{base.__name__}."
        )
    return found


def import_function(field: str, name: str) -> Callable[..., Any]:
    """Return the function that a field names."""
    found = _import(field, name, "function")
    if not callable(found):
        raise InvalidInput(f"{field} is {name!r}; it must name a function.")
    return cast(Callable[..., Any], found)


def _import(field: str, name: str, kind: str) -> object:
    module_name, _, object_name = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), object_name)
    # A user's module may fail in any way while it is imported.
    except Exception as error:
        elsewhere = str(Path.cwd()) not in sys.path
        here = f"; the current folder is searched if --{field} names it, or with PYTHONPATH=."
        raise InvalidInput(
            f"{field} is {name!r}; it must name an importable package.module:{kind} "
            f"({type(error).__name__}: {explain(error)}){here if elsewhere else '.'}"
        ) from None
