"""Validation images: held out of each client's training images, in place of the test images."""

from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfedcl import run
from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.client_split import ClientSplit, split_among_clients
from mpfedcl.data.image_files import ImageFileStore
from mpfedcl.data.loading import load_federated_data
from mpfedcl.data.samples import DomainIndex, SampleIndex, Subset
from mpfedcl.experiment import Experiment
from small_experiments import save_images, small

KINDS = ("label", "iid", "classes", "quantity", "feature")


def make_sample_index(counts: list[list[int]], *, official: bool) -> SampleIndex:
    """Return a set that never has to be opened; `counts` are images of each class by domain."""
    domains, begin = [], 0
    for number, sizes in enumerate(counts):
        parts = []
        for _ in range(2 if official else 1):
            labels = numpy.repeat(numpy.arange(len(sizes)), sizes)
            parts.append(Subset(numpy.arange(begin, begin + len(labels)), labels))
            begin += len(labels)
        domains.append(DomainIndex(f"domain-{number}", *parts))
    return SampleIndex("folder", tuple("abc"), tuple(domains), ImageFileStore([]))


def split_images(sample_index: SampleIndex, **changes: Any) -> ClientSplit:
    base = Experiment().replace(dataset__name="folder", encoder__name="none", partition__alpha=2.0)
    clients = None if changes["partition__kind"] == "feature" else 3
    return split_among_clients(sample_index, base.replace(clients=clients, **changes).resolved())


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.lists(st.integers(6, 30), min_size=3, max_size=3), min_size=2, max_size=3),
    official=st.booleans(),
    kind=st.sampled_from(KINDS),
    test=st.sampled_from(["shared", "matched"]),
    fraction=st.floats(0.3, 0.9),
    seed=st.integers(0, 1000),
)
def test_validation_images_are_a_share_of_the_training_images(
    counts: list[list[int]], official: bool, kind: str, test: str, fraction: float, seed: int
) -> None:
    sample_index = make_sample_index(counts, official=official)
    common = {"partition__kind": kind, "partition__test": test, "seed": seed}
    whole = split_images(sample_index, **common)
    held = split_images(sample_index, **common, partition__validation=fraction)
    assert list(held.training) == list(whole.training)
    validation = []
    for name, before in whole.training.items():
        kept = held.training[name]
        assert len(kept.rows) >= 1
        assert set(kept.rows) <= set(before.rows)
        assert numpy.array_equal(before.labels[numpy.isin(before.rows, kept.rows)], kept.labels)
        for label in range(3):
            total = int((before.labels == label).sum())
            expected = max(1, round(total * (1 - fraction))) if total else 0
            assert int((kept.labels == label).sum()) == expected
        rest = set(before.rows) - set(kept.rows)
        validation.append(rest)
        if test == "matched":
            assert set(held.test.rows[held.local_test[name]]) == rest
        else:
            assert numpy.array_equal(held.local_test[name], numpy.arange(len(held.test.rows)))
    # Each validation image once, and no test image among all that are ever opened.
    assert sorted(held.test.rows) == sorted(row for rest in validation for row in rest)
    assert not set(held.all_rows) & set(whole.test.rows)


def test_validation_draw_depends_on_the_seed_only() -> None:
    sample_index = make_sample_index([[40, 40, 40]], official=True)
    common = {"partition__kind": "label", "partition__test": "shared"}
    first, again, less = (
        split_images(sample_index, **common, partition__validation=share)
        for share in (0.25, 0.25, 0.0)
    )
    for name, part in first.training.items():
        assert numpy.array_equal(part.rows, again.training[name].rows)
    assert numpy.array_equal(first.test.rows, again.test.rows)
    assert sum(len(part.rows) for part in less.training.values()) == 120
    assert len(less.test.rows) == 120
    other = split_images(sample_index, **common, partition__validation=0.25, seed=1)
    assert set(other.test.rows) != set(first.test.rows)


def test_single_images_stay_in_training() -> None:
    sample_index = make_sample_index([[1, 1, 1], [10, 1, 2]], official=True)
    split = split_images(sample_index, partition__kind="feature", partition__validation=0.5)
    assert [len(part.labels) for part in split.training.values()] == [3, 7]
    assert [len(own) for own in split.local_test.values()] == [0, 6]
    assert split.test.labels.tolist() == [0, 0, 0, 0, 0, 2]


def test_validation_without_images_is_rejected() -> None:
    sample_index = make_sample_index([[1, 1, 1], [1, 1, 1]], official=True)
    with pytest.raises(InvalidInput) as refused:
        split_images(sample_index, partition__kind="feature", partition__validation=0.5)
    assert str(refused.value).startswith("partition.validation is 0.5 and holds out no image")


@pytest.mark.parametrize("share", [-0.1, 1, 1.5])
def test_validation_fraction_out_of_range_is_rejected(share: float) -> None:
    with pytest.raises(InvalidInput, match=r"partition\.validation is"):
        Experiment().replace(partition__validation=share)


def spoil_test_images(path: Path) -> None:
    """Change pixels of x_test behind the archive's back, so that reading them fails."""
    content = bytearray(path.read_bytes())
    begin = content.index(b"x_test.npy")
    # Beyond the header and what is read along with it.
    content[begin + 15_000] ^= 255
    path.write_bytes(content)


@pytest.mark.parametrize("test", ["shared", "matched"])
def test_test_images_are_never_read_during_validation(tmp_path: Path, test: str) -> None:
    save_images(tmp_path / "stripes.npz", num_test=600)
    experiment = small(tmp_path, partition__test=test)
    before = load_federated_data(experiment.replace(partition__validation=0.2))
    spoil_test_images(tmp_path / "stripes.npz")
    if test == "shared":
        with pytest.raises(InvalidInput, match="x_test"):
            load_federated_data(experiment)
    after = load_federated_data(experiment.replace(partition__validation=0.2))
    assert before.test_inputs.equal(after.test_inputs)
    assert [each.inputs.sum() for each in before.clients] == [
        each.inputs.sum() for each in after.clients
    ]


def test_client_without_validation_images_is_excluded_from_the_mean(tmp_path: Path) -> None:
    save_images(tmp_path / "few.npz", num_train=3)
    save_images(tmp_path / "many.npz", num_train=30)
    experiment = small(
        tmp_path, "fedavg", partition__kind="feature", partition__test="matched",
        partition__validation=0.2, clients=None, rounds=1,
    )  # fmt: skip
    result = run(experiment, tmp_path / "run")
    per_client = result.history[-1]["accuracy_per_client"]
    assert per_client["few"] is None
    assert per_client["many"] is not None
    assert result.accuracy == per_client["many"]
