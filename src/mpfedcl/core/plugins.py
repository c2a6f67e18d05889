"""Classes of the user's own, named as package.module:Class."""

import importlib
import importlib.metadata
import sys
from functools import cache
from pathlib import Path
from typing import TypeVar

from mpfedcl.core.errors import InvalidInput

_Base = TypeVar("_Base")


@cache
def entry_points(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Return what installed packages offer under a group, such as `mpfedcl.methods`, by name."""
    return {each.name: each for each in importlib.metadata.entry_points(group=group)}


def allow_current_folder() -> None:
    """Let classes come from the current folder, where an installed command does not look.

    Only if the command line names such a class: a run directory from elsewhere must not
    choose what is run of the folder that its reader happens to be in.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def import_class(field: str, name: str, base: type[_Base]) -> type[_Base]:
    """Return the class that a field names; it must be a subclass of a public class of mpfedcl."""
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    # A user's module may fail in any way while it is imported; the sentence says how.
    except Exception as error:
        elsewhere = str(Path.cwd()) not in sys.path
        here = f"; the current folder is searched if --{field} names it" if elsewhere else ""
        raise InvalidInput(
            f"{field} is {name!r}; it must name an importable package.module:Class "
            f"({type(error).__name__}: {error}){here}."
        ) from None
    if not (isinstance(found, type) and issubclass(found, base)):
        raise InvalidInput(
            f"{field} is {name!r}; it must name a subclass of mpfedcl.{base.__name__}."
        )
    return found
