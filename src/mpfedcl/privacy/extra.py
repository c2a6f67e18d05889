"""The packages of the extra `privacy`, imported when a budget is there to be kept."""

import importlib
from typing import Any

from mpfedcl.core.errors import InvalidInput


def import_extra(module: str) -> Any:
    """Return a module of the extra, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InvalidInput(
            f"privacy.epsilon is given, which needs {error.name or module}; it must be installed: "
            "pip install 'mpfedcl[privacy]'."
        ) from None


def require_extra() -> None:
    """Refuse to begin what could not be finished without the extra."""
    for module in ("dp_accounting", "opendp"):
        import_extra(module)
