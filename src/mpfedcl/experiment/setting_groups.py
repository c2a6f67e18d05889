"""Settings that are treated alike wherever experiments are compared, resumed or read again."""

from collections.abc import Mapping
from typing import Any

RESULT_NEUTRAL_SETTINGS: Mapping[str, Any] = {
    "engine": "auto",
    "workers": "auto",
    "worker_timeout": 300.0,
    "track": (),
    "track_to": None,
    "trail": True,
}
"""Settings that do not change the result, at their defaults: where clients train, and what is
recorded beside the result. A run may be resumed with others."""
ONCE_THE_ONLY_VALUES: Mapping[str, Any] = {
    "model__name": "mlp",
    "systems__kind": "none",
    "public__size": 0,
}
"""Settings that are filled in, and that experiments of older versions do not have: their values."""
CHOSEN_BY_A_RUN: Mapping[str, Any] = {
    "workers": "auto",
    "evaluate_every": "auto",
    "evaluate_clients": None,
}
"""What leaves the choice to a run, which writes down what it chose."""
