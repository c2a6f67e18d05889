"""mpfedcl: federated learning on non-IID client data.

from mpfedcl import Experiment, run
result = run(Experiment(method="mp-fedcl", rounds=60))
print(result.accuracy, result.path)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpfedcl.api import resume, run, tune
    from mpfedcl.deployment.predictor import Prediction, Predictor
    from mpfedcl.errors import InvalidInput
    from mpfedcl.experiment import Experiment
    from mpfedcl.methods import Batch, Context, Method
    from mpfedcl.prototypes import (
        PrototypePool,
        Prototypes,
        cluster_prototypes,
        prototype_contrastive_loss,
    )
    from mpfedcl.runs.observer import RunResult
    from mpfedcl.tracking import Tracker

_HOMES = {
    "Batch": "methods",
    "Context": "methods",
    "Experiment": "experiment",
    "InvalidInput": "errors",
    "Method": "methods",
    "Prediction": "deployment.predictor",
    "Predictor": "deployment.predictor",
    "PrototypePool": "prototypes",
    "Prototypes": "prototypes",
    "RunResult": "runs.observer",
    "Tracker": "tracking",
    "cluster_prototypes": "prototypes",
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
    "Method",
    "Prediction",
    "Predictor",
    "PrototypePool",
    "Prototypes",
    "RunResult",
    "Tracker",
    "cluster_prototypes",
    "prototype_contrastive_loss",
    "resume",
    "run",
    "tune",
]


def __getattr__(name: str) -> Any:
    # Names are fetched when first used: `mpfedcl --help` must not wait for torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'mpfedcl' has no attribute {name!r}")
    return getattr(import_module(f"mpfedcl.{_HOMES[name]}"), name)
