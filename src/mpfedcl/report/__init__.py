"""Tables, figures and the HTML report for people.

`mpfedcl.report(result)` calls the function of that name, `mpfedcl.api.report`.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Report(ModuleType):
    """The package, which is called as the function: both have the name `mpfedcl.report`."""

    def __call__(self, *results: Any, **options: Any) -> Any:
        return import_module("mpfedcl.api").report(*results, **options)


sys.modules[__name__].__class__ = _Report
