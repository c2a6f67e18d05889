"""mpfedcl: federated learning on non-IID client data.

from mpfedcl import Experiment, run
result = run(Experiment(method="mp-fedcl", rounds=60))
print(result.accuracy, result.path)

comparison = mpfedcl.load("demo")     # or mpfedcl.compare(...)
comparison.frame(), comparison.plot()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpfedcl.api import compare, resume, run, tune
    from mpfedcl.core.errors import InvalidInput
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
    from mpfedcl.runs.observer import RunResult

_HOMES = {
    "Batch": "methods",
    "Context": "methods",
    "Experiment": "experiment",
    "InvalidInput": "core.errors",
    "LoadedComparison": "report.results",
    "LoadedRun": "report.results",
    "LoadedSearch": "report.results",
    "Method": "methods",
    "Prediction": "inference.predictor",
    "Predictor": "inference.predictor",
    "PrototypePool": "prototypes",
    "Prototypes": "prototypes",
    "RunResult": "runs.observer",
    "Tracker": "report.tracking",
    "cluster_prototypes": "prototypes",
    "compare": "api",
    "find_method": "methods",
    "load": "report.results",
    "prototype_contrastive_loss": "prototypes",
    "resume": "api",
    "run": "api",
    "tune": "api",
}
__all__ = [
    "Batch",
    "Context",
    "Experiment",
    "InvalidInput",
    "LoadedComparison",
    "LoadedRun",
    "LoadedSearch",
    "Method",
    "Prediction",
    "Predictor",
    "PrototypePool",
    "Prototypes",
    "RunResult",
    "Tracker",
    "__version__",
    "cluster_prototypes",
    "compare",
    "find_method",
    "load",
    "prototype_contrastive_loss",
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
    if name not in _HOMES:
        raise AttributeError(f"module 'mpfedcl' has no attribute {name!r}")
    return getattr(import_module(f"mpfedcl.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    # Notebooks complete from this; names that are not fetched yet are in no other list.
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "import_module"})
