"""The Flower apps that `flwr run` starts; the server app has all that accompanies a run."""

from typing import TYPE_CHECKING

from mpfedcl.network.flower.apps import client_app, make_server_app

if TYPE_CHECKING:
    from mpfedcl.experiment import Experiment
    from mpfedcl.runs.observer import Attach

__all__ = ["client_app", "server_app"]


def _companions(experiment: "Experiment") -> "Attach":
    # Only when a run begins: a client's process for each message must not load torch.
    from mpfedcl.api import companions

    return companions(experiment)


server_app = make_server_app(_companions)
