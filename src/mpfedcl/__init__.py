"""mpfedcl: federated learning on non-IID client data.

import mpfedcl
result = mpfedcl.run("mp-fedcl", rounds=60, train={"lr": 0.1})
print(result)

comparison = mpfedcl.load("demo")     # or mpfedcl.compare(...)
comparison.frame(), comparison.plot()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpfedcl.api import compare, export, report, resume, run, tune
    from mpfedcl.core.errors import InvalidInput, RunWarning
    from mpfedcl.experiment import Experiment
    from mpfedcl.inference.predictor import Prediction, Predictor
    from mpfedcl.methods import Batch, Context, Method, find_method
    from mpfedcl.prototypes import (
        PrototypePool,
        Prototypes,
        cluster_prototypes,
        prototype_contrastive_loss,
    )
    from mpfedcl.report.results import LoadedComparison, LoadedRun, LoadedSearch, load
    from mpfedcl.report.tracking import Tracker
    from mpfedcl.runs.observer import Observer, RunResult

_HOMES = {
    "api": ("compare", "export", "resume", "run", "tune"),
    "core.errors": ("InvalidInput", "RunWarning"),
    "experiment": ("Experiment",),
    "inference.predictor": ("Prediction", "Predictor"),
    "methods": ("Batch", "Context", "Method", "find_method"),
    "prototypes": (
        "PrototypePool",
        "Prototypes",
        "cluster_prototypes",
        "prototype_contrastive_loss",
    ),
    "report.results": ("LoadedComparison", "LoadedRun", "LoadedSearch", "load"),
    "report.tracking": ("Tracker",),
    "runs.observer": ("Observer", "RunResult"),
}
"""The modules of the public names."""
__all__ = [
    "Batch",
    "Context",
    "Experiment",
    "InvalidInput",
    "LoadedComparison",
    "LoadedRun",
    "LoadedSearch",
    "Method",
    "Observer",
    "Prediction",
    "Predictor",
    "PrototypePool",
    "Prototypes",
    "RunResult",
    "RunWarning",
    "Tracker",
    "__version__",
    "cluster_prototypes",
    "compare",
    "export",
    "find_method",
    "load",
    "prototype_contrastive_loss",
    "report",
    "resume",
    "run",
    "tune",
]


if TYPE_CHECKING:
    __version__: str


def __getattr__(name: str) -> Any:
    # Names are fetched when first used: `mpfedcl --help` must not wait for torch.
    if name == "__version__":
        return import_module("importlib.metadata").version("mpfedcl")
    if name == "report":
        # A package that can be called, as it is also imported.
        return import_module("mpfedcl.report")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"mpfedcl.{home}"), name)
    raise AttributeError(f"module 'mpfedcl' has no attribute {name!r}")


def __dir__() -> list[str]:
    # Notebooks complete from this; names that are not fetched yet are in no other list.
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "import_module"})
