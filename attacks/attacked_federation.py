"""A federation of three clients within this process; the third client is malicious."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from federations import LoopbackFederation, float64_experiment
from loopback import Tamper

from small_experiments import Json, save_images

ATTACKER = "client-2"


@contextmanager
def attacked_federation(
    tamper: Tamper, rounds: int, method: str = "mp-fedcl"
) -> Iterator[LoopbackFederation]:
    """Make it, in a folder of its own: the real apps, and every message as Flower stores it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        save_images(folder / "images" / "stripes.npz")
        settings: Json = {
            "rounds": rounds,
            "clients": 3,
            "partition__kind": "iid",
            # As a server has it that was told nothing; the tests have it off.
            "validation__bounds": "auto",
            "network__patience": 1.0,
        }
        experiment = float64_experiment(folder / "images", method, **settings)
        yield LoopbackFederation(experiment, folder, tamper)
