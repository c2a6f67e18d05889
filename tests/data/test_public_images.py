"""Training images that the server has in place of a client."""

from pathlib import Path
from typing import Any

import numpy
import pytest

from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.loading import load_federated_data
from small_experiments import save_images, small

KINDS: dict[str, dict[str, Any]] = {
    "shared test": {},
    "matched test": {"partition__test": "matched"},
    "iid": {"partition__kind": "iid"},
    "validation": {"partition__validation": 0.2},
    "feature": {"partition__kind": "feature", "clients": None},
}


@pytest.fixture(scope="module")
def domains(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("domains")
    save_images(root / "one.npz", num_train=60)
    save_images(root / "two.npz", num_train=90)
    return root


def load(root: Path, size: int, kind: str) -> FederatedData:
    return load_federated_data(small(root, "fedavg", public__size=size, **KINDS[kind]))


def rows_of(data: FederatedData) -> tuple[list[bytes], list[bytes]]:
    """Return the clients' images and the public ones."""
    held = [row.tobytes() for each in data.clients for row in each.inputs.numpy()]
    assert data.public is not None
    return held, [row.tobytes() for row in data.public[0].numpy()]


@pytest.mark.parametrize("kind", KINDS)
def test_public_images_belong_to_no_client(domains: Path, kind: str) -> None:
    plain, data = load(domains, 0, kind), load(domains, 6, kind)
    assert plain.public is None
    assert "public" not in plain.partition
    held, public = rows_of(data)
    assert data.public is not None
    # Of two domains each gives its part, rounded up.
    assert len(public) == len(data.public[1]) == (7 if kind == "feature" else 6)
    if kind not in ("matched test", "validation"):
        # There, clients with fewer images have others to be tested on.
        everyone = [row.tobytes() for each in plain.clients for row in each.inputs.numpy()]
        assert sorted([*held, *public]) == sorted(everyone)
    counted = numpy.bincount(data.public[1].numpy(), minlength=3).tolist()
    assert data.partition["public"] == counted


def test_public_images_are_limited_to_a_tenth_with_a_notice(domains: Path) -> None:
    data = load(domains, 1000, "iid")
    assert data.public is not None
    assert len(data.public[1]) == 15
    assert data.notices[-1].startswith("public.size is 1,000; 15 training images are held out")
    assert not load(domains, 6, "iid").notices


def test_public_images_are_drawn_by_seed(domains: Path) -> None:
    once, again = (rows_of(load(domains, 6, "iid"))[1] for _ in range(2))
    assert once == again
    other = small(domains, "fedavg", public__size=6, partition__kind="iid", seed=1)
    assert rows_of(load_federated_data(other))[1] != once


def test_every_client_keeps_training_images(tmp_path: Path) -> None:
    """Of domains with few images at most a tenth goes, and never all."""
    save_images(tmp_path / "one.npz", num_train=3)
    save_images(tmp_path / "two.npz", num_train=40)
    data = load(tmp_path, 1000, "feature")
    assert [len(each.labels) for each in data.clients] == [2, 36]
