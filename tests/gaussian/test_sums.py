"""Features of norm 1 and their sums: closed forms, loops, and impossible statistics."""

import numpy
import pytest
import torch
from clients_cases import draw_clients, within_by_loop
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from feature_maps import features_of
from mpfedcl.core.tensors import Tensors
from mpfedcl.gaussian import (
    SecondMoment,
    find_impossible_sums,
    pack_symmetric,
    random_features,
    sum_samples,
    unit_features,
    unpack_symmetric,
)


def collect_sums(features: Tensor, labels: Tensor, num_classes: int) -> Tensors:
    return sum_samples(features, labels, num_classes, "within")


@given(
    arrays.arrays(
        numpy.float64,
        arrays.array_shapes(min_dims=2, max_dims=2, max_side=6),
        elements=st.floats(-1e6, 1e6, allow_subnormal=False),
    )
)
def test_features_have_norm_1_and_keep_signs(values: numpy.ndarray) -> None:
    inputs = torch.from_numpy(values)
    found = unit_features(inputs)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(len(inputs), dtype=torch.float64))
    some = inputs.abs().sum(1) > 0
    assert torch.equal(found[some].sign(), inputs[some].sign())


def test_features_match_hand_computed_values() -> None:
    # Roots 1, 2, 2: length 3.
    found = unit_features(torch.tensor([[1.0, -4.0, 4.0], [0.0, 0.0, 0.0]], dtype=torch.float64))
    expected = torch.tensor([[1 / 3, -2 / 3, 2 / 3], [3**-0.5] * 3], dtype=torch.float64)
    torch.testing.assert_close(found, expected)


def test_largest_floats_give_features_of_norm_1() -> None:
    largest = torch.finfo(torch.float32).max
    expected = torch.tensor([[0.5, -0.5, 0.5, 0.5]])
    torch.testing.assert_close(unit_features(largest * expected.sign()), expected)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_packed_symmetric_matrix_is_unpacked(size: int) -> None:
    root = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    matrix = root + root.T
    packed = pack_symmetric(matrix)
    assert packed.shape == (size * (size + 1) // 2,)
    assert torch.equal(unpack_symmetric(packed, size), matrix)


def test_sums_of_a_client_match_a_loop() -> None:
    (client,) = draw_clients(0, [[4, 0, 1, 7]])
    found = collect_sums(client.features, client.labels, 4)
    assert found["counts"].tolist() == [4, 0, 1, 7]
    for label in range(4):
        expected = client.features[client.labels == label].sum(0)
        torch.testing.assert_close(found["sums"][label], expected)
    within = within_by_loop(client, 4)
    torch.testing.assert_close(unpack_symmetric(found["within"], 6), torch.from_numpy(within))
    assert float(found["scatter"]) == pytest.approx((within**2).sum() / (12 - 3))


def test_sums_without_samples_are_zero() -> None:
    found = collect_sums(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), 2)
    assert {name: tuple(each.shape) for name, each in found.items()} == {
        "counts": (2,),
        "sums": (2, 3),
        "within": (6,),
        "scatter": (),
    }
    assert all(not each.any() for each in found.values())


def test_single_sample_has_no_scatter() -> None:
    found = collect_sums(torch.tensor([[0.6, 0.8]]), torch.tensor([1]), 2)
    assert not found["within"].any()
    assert float(found["scatter"]) == 0


def honest(dtype: torch.dtype = torch.float32) -> Tensors:
    (client,) = draw_clients(3, [[5, 6, 0]])
    return collect_sums(client.features.to(dtype), client.labels, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_honest_sums_are_accepted(dtype: torch.dtype) -> None:
    assert find_impossible_sums(honest(dtype), 11, in_full=True) is None


def lie(summed: Tensors, name: str, factor: float = 1.0, add: float = 0.0) -> Tensors:
    return {**summed, name: summed[name] * factor + add}


@pytest.mark.parametrize(
    ("summed", "words"),
    [
        (lie(honest(), "counts", add=0.5), "integers"),
        (lie(honest(), "counts", factor=-1), "nonnegative"),
        (lie(honest(), "counts", factor=2), "sum to 22; this client has 11"),
        (lie(honest(), "sums", factor=9), "at most its count"),
        (lie(honest(), "within", factor=3), "trace"),
        (lie(honest(), "scatter", factor=3), "scatter"),
    ],
)
def test_impossible_sums_are_detected(summed: Tensors, words: str) -> None:
    assert words in str(find_impossible_sums(summed, 11, in_full=False))


def test_negative_scatter_is_detected_in_the_full_check() -> None:
    summed = honest(torch.float64)
    matrix = unpack_symmetric(summed["within"], 6)
    spectrum, basis = torch.linalg.eigh(matrix)
    # The same trace, with a negative direction.
    spectrum[0] -= 1.0
    spectrum[-1] += 1.0
    false = (basis * spectrum) @ basis.T
    forged = {
        **summed,
        "within": pack_symmetric(false),
        "scatter": false.square().sum() / 9,
    }
    assert find_impossible_sums(forged, 11, in_full=False) is None
    assert "positive" in str(find_impossible_sums(forged, 11, in_full=True))


def test_moment_must_have_the_trace_of_its_samples() -> None:
    (client,) = draw_clients(3, [[5, 6, 0]])
    counts = torch.tensor([5.0, 6, 0], dtype=torch.float64)
    sums = torch.zeros(3, 6, dtype=torch.float64).index_add_(0, client.labels, client.features)
    moment = pack_symmetric(client.features.T @ client.features)
    whole = {"counts": counts, "sums": sums, "moment": moment}
    assert find_impossible_sums(whole, 11, in_full=True) is None
    assert "trace" in str(find_impossible_sums(lie(whole, "moment", 0.5), 11, in_full=True))


@pytest.mark.parametrize("second_moment", [None, "within", "moment"])
def test_second_moment_matches_a_loop(second_moment: SecondMoment | None) -> None:
    for client in draw_clients(4, [[3, 0, 2], [0, 9, 9], [1, 0, 0], [0, 0, 0]]):
        found = sum_samples(client.features, client.labels, 3, second_moment)
        assert set(found) - {"counts", "sums", "scatter"} == {second_moment} - {None}
        if second_moment == "within":
            within = unpack_symmetric(found["within"], 6)
            torch.testing.assert_close(within, torch.from_numpy(within_by_loop(client, 3)))
        if second_moment == "moment":
            moment = unpack_symmetric(found["moment"], 6)
            torch.testing.assert_close(moment, client.features.T @ client.features)


def test_nan_features_stay_nan() -> None:
    assert unit_features(torch.tensor([[torch.nan, 1.0]])).isnan().any()


@pytest.mark.parametrize("count", [0, 1, 3, 512])
def test_random_features_match_the_formula_and_have_norm_one(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 3, generator=generator, dtype=torch.float64)
    inputs[0] = 0
    found = random_features(inputs, count)
    torch.testing.assert_close(found.square().sum(1), torch.ones(200).double())
    assert torch.equal(found, random_features(inputs, count))
    if count == 512:
        torch.testing.assert_close(found, torch.from_numpy(features_of(inputs.numpy())))
    # Not only the direction of a sample, but also its length matters.
    assert not torch.allclose(found[1:], random_features(4 * inputs[1:], count), atol=1e-3)
    assert random_features(torch.tensor([[torch.nan, 1.0]]), count).isnan().any()
