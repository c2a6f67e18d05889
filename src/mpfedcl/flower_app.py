"""The Flower apps that `flwr run` starts; the server app has all that accompanies a run."""

from typing import TYPE_CHECKING

from mpfedcl.network.flower.apps import client_app, make_server_app

if TYPE_CHECKING:
    from mpfedcl.runs.observer import Companions

__all__ = ["client_app", "server_app"]


def _find_companions() -> "Companions":
    # Only when a run begins: a client's process for each message must not load torch.
    from mpfedcl.api import COMPANIONS

    return COMPANIONS


server_app = make_server_app(_find_companions)
