"""The layers of exported networks equal the functions that they replace."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfedcl import PrototypePool, Prototypes
from mpfedcl.inference.onnx_graph import PrototypeDistances


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 12))
def test_exported_distances_equal_those_of_the_pool(
    seed: int, num_classes: int, count: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(num_classes, (count,), generator=draw)
    vectors = torch.randn(count, 6, generator=draw)
    shared = Prototypes(vectors, labels, torch.ones(count, dtype=torch.int64))
    pool = PrototypePool.gather({"a": shared}, num_classes=num_classes)
    z = torch.randn(9, 6, generator=draw)
    assert torch.allclose(PrototypeDistances(pool)(z), pool.distances_by_class(z), atol=1e-5)
    # A prototype itself is at distance 0 to the last digit, which a product would not give.
    at_home = PrototypeDistances(pool)(pool.vectors).amin(dim=1)
    assert at_home.tolist() == [0.0] * count
