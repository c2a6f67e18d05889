"""Classes of the user's own, named on the command line as package.module:Class."""

import importlib
import sys
from pathlib import Path
from typing import TypeVar

from mpfedcl.errors import InvalidInput

_Base = TypeVar("_Base")


def import_class(field: str, name: str, base: type[_Base]) -> type[_Base]:
    """Return the class that a field names; it must be a subclass of a public class of mpfedcl."""
    module_name, _, class_name = name.partition(":")
    # An installed command does not look in the current folder, where a user's own module lives.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    # A user's module may fail in any way while it is imported; the sentence says how.
    except Exception as error:
        raise InvalidInput(
            f"{field} is {name!r}; it must name an importable package.module:Class "
            f"({type(error).__name__}: {error})."
        ) from None
    if not (isinstance(found, type) and issubclass(found, base)):
        raise InvalidInput(
            f"{field} is {name!r}; it must name a subclass of mpfedcl.{base.__name__}."
        )
    return found
