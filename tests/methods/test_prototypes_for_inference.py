"""MPFed and prototypes for inference: FedAvg's weights, and prototypes once, at the end."""

from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from identities import after_rounds, assert_same_model, begin, both_engines
from tiny_method_inputs import draw, make_method

from mpfedcl.core.errors import InvalidInput
from mpfedcl.prototypes import PrototypePool, Prototypes

make_method = cache(make_method)
METHODS = pytest.mark.parametrize("method", ["mpfed", "proto-inference"])


def make_prototypes(rows: list[tuple[int, float, int]]) -> Prototypes:
    """Return prototypes in one dimension: class, place, samples."""
    labels, places, counts = zip(*rows, strict=True)
    vectors = torch.tensor(places).double().unsqueeze(1)
    return Prototypes(vectors, torch.tensor(labels), torch.tensor(counts))


@METHODS
@both_engines
def test_model_equals_fedavg(images: Path, engine: str, method: str) -> None:
    found = after_rounds(images, method, engine=engine)
    assert_same_model(found, after_rounds(images, "fedavg", engine=engine), engine)


@METHODS
@both_engines
def test_prototypes_are_sent_only_in_the_last_round(images: Path, engine: str, method: str) -> None:
    federation = begin(images, method, engine=engine, rounds=3)
    average = begin(images, "fedavg", engine=engine, rounds=3)
    for number in range(1, 4):
        record, plain = (each.run_round(evaluate=True) for each in (federation, average))
        is_last = number == 3
        assert (record.sent["prototype_floats"] > 0) == is_last
        assert (record.bytes["up"] > plain.bytes["up"]) == is_last
        assert record.bytes["down"] == plain.bytes["down"]
        assert (len(federation.pool) > 0) == is_last
        assert record.accuracy is not None
        assert plain.accuracy is not None
        for test in ("local_test", "global_test"):
            ours, theirs = record.accuracy[test], plain.accuracy[test]
            assert ours["global_classifier"] == theirs["global_classifier"]
            assert ours["personal_prototype"] is not None


def test_each_owner_counts_once() -> None:
    method = make_method("proto-inference")
    pool = PrototypePool.gather(
        {"a": make_prototypes([(0, 1.0, 9), (2, 5.0, 1)]), "b": make_prototypes([(0, 4.0, 1)])},
        num_classes=4,
        num_prototypes=1,
    )
    found = method.reference(pool)
    assert found.labels.tolist() == [0, 2]
    assert found.vectors.flatten().tolist() == [2.5, 5.0]


def test_centroids_are_weighted_by_their_share_of_the_owners_class() -> None:
    method = make_method("mpfed", prototypes__per_class=2)
    pool = PrototypePool.gather(
        {
            # Class 0 at 0 and 10: three quarters and one, of a; a half each, of b.
            "a": make_prototypes([(0, 0.0, 30), (0, 10.0, 10)]),
            "b": make_prototypes([(0, 1.0, 1), (0, 11.0, 1), (1, 3.0, 7)]),
        },
        num_classes=4,
        num_prototypes=2,
    )
    found = method.reference(pool)
    places = sorted(found.vectors[found.labels == 0].flatten().tolist())
    wanted = [(0.75 * 0 + 0.5 * 1) / 1.25, (0.25 * 10 + 0.5 * 11) / 0.75]
    assert places == pytest.approx(wanted)
    assert found.vectors[found.labels == 1].tolist() == [[3.0]]
    assert int(found.counts.sum()) == int(pool.counts.sum())


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_mpfed_with_one_prototype_per_class_equals_proto_inference(
    seed: int, sizes: list[int]
) -> None:
    rows = {
        f"client-{number}": Prototypes(
            draw(seed + number, size, 3), torch.arange(size), torch.arange(1, size + 1)
        )
        for number, size in enumerate(sizes)
    }
    pool = PrototypePool.gather(rows, num_classes=4, num_prototypes=1)
    found = make_method("mpfed", prototypes__per_class=1).reference(pool)
    wanted = make_method("proto-inference").reference(pool)
    assert found.labels.tolist() == wanted.labels.tolist()
    torch.testing.assert_close(found.vectors, wanted.vectors, rtol=1e-12, atol=1e-12)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    most=st.integers(1, 3),
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=4),
)
def test_merged_prototypes_stay_in_their_class(seed: int, most: int, sizes: list[int]) -> None:
    rows = {}
    for number, size in enumerate(sizes):
        labels = (torch.arange(size) // most).clamp(max=3)[: 4 * most]
        # Some coincide, also with another client's.
        vectors = draw(seed + number, len(labels), 2).round()
        rows[f"client-{number}"] = Prototypes(vectors, labels, torch.ones_like(labels))
    pool = PrototypePool.gather(rows, num_classes=4, num_prototypes=most)
    found = make_method("mpfed", prototypes__per_class=most).reference(pool)
    assert found.vectors.isfinite().all()
    assert torch.equal(found.present, pool.present)
    assert int(found.counts.sum()) == int(pool.counts.sum())
    for label in set(pool.labels.tolist()):
        ours, theirs = (each.vectors[each.labels == label] for each in (found, pool))
        assert len(ours) <= most
        # Means lie among what they are means of.
        assert (ours >= theirs.amin(0) - 1e-12).all()
        assert (ours <= theirs.amax(0) + 1e-12).all()


def test_privacy_budget_is_rejected() -> None:
    with pytest.raises(InvalidInput, match=r"with method mpfed it must be left out"):
        make_method("mpfed", privacy__epsilon=1.0)
