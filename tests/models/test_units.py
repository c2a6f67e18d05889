"""Parts of a network: which numbers belong to some of its units."""

import torch

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods.messages import Broadcast
from mpfedcl.models import Mlp
from mpfedcl.models.units import count_bytes, feeding_layers, hidden_units, mask_params
from mpfedcl.prototypes import PrototypePool


def first_units(params: Tensors, share: float) -> Tensors:
    return {
        layer: torch.arange(size) < round(share * size)
        for layer, size in hidden_units(params).items()
    }


def count(model: Mlp, share: float) -> int:
    params = model.init(torch.Generator(), torch.float32)
    masks = mask_params(params, first_units(params, share))
    return sum(int(mask.sum()) for mask in masks.values())


def test_parameter_counts_match_the_models_of_the_paper() -> None:
    pixels, head = Mlp((784, 512, 512, 256), 10), Mlp((512, 256), 10)
    assert (count(pixels, 1), count(pixels, 0.75)) == (798_474, 525_130)
    assert (count(head, 1), count(head, 0.75)) == (133_898, 100_426)


def test_mask_selects_rows_and_columns_of_units() -> None:
    params = Mlp((2, 3, 2), 2).init(torch.Generator(), torch.float32)
    units = {"hidden.0": torch.tensor([True, False, True]), "hidden.1": torch.tensor([False, True])}
    masks = {name: mask.int().tolist() for name, mask in mask_params(params, units).items()}
    assert masks == {
        "hidden.0.weight": [[1, 1], [0, 0], [1, 1]],
        "hidden.0.bias": [1, 0, 1],
        "hidden.1.weight": [[0, 0, 0], [1, 0, 1]],
        "hidden.1.bias": [0, 1],
        "classifier.weight": [[0, 1], [0, 1]],
        "classifier.bias": [1, 1],
    }
    # A layer that nobody thins, and none at all.
    assert mask_params(params, {"hidden.1": units["hidden.1"]})["hidden.0.bias"].all()
    assert all(mask.all() for mask in mask_params(params, {}).values())


def test_layers_are_sorted_by_number() -> None:
    params = Mlp((5, *range(1, 13)), 2).init(torch.Generator(), torch.float32)
    shuffled = {name: params[name] for name in sorted(params)}
    assert list(hidden_units(shuffled).values()) == list(range(1, 13))
    assert feeding_layers(shuffled)["hidden.10"] == "hidden.9"
    assert feeding_layers(shuffled)["classifier"] == "hidden.11"


def test_mask_of_filters_covers_their_flattened_pixels() -> None:
    params = {
        "classifier.bias": torch.zeros(2),
        "classifier.weight": torch.zeros(2, 3),
        "conv.0.bias": torch.zeros(2),
        "conv.0.weight": torch.zeros(2, 1, 3, 3),
        "encoder.conv1.weight": torch.zeros(4, 3, 7, 7),
        "hidden.0.bias": torch.zeros(3),
        "hidden.0.weight": torch.zeros(3, 8),
    }
    assert hidden_units(params) == {"conv.0": 2, "hidden.0": 3}
    masks = mask_params(params, {"conv.0": torch.tensor([False, True])})
    assert masks["conv.0.weight"].flatten(1).all(1).tolist() == [False, True]
    assert not masks["conv.0.weight"][0].any()
    assert masks["conv.0.bias"].tolist() == [False, True]
    # Two filters of 2 x 2 pixels each, laid out flat.
    assert masks["hidden.0.weight"].tolist() == [[False] * 4 + [True] * 4] * 3
    assert all(masks[name].all() for name in ("hidden.0.bias", "encoder.conv1.weight"))
    # Filters that are normalized together stay together.
    normed = {**params, "norm.0.weight": torch.ones(2), "norm.0.bias": torch.zeros(2)}
    assert hidden_units(normed) == {"hidden.0": 3}


def test_bytes_of_a_submodel_are_counted() -> None:
    params = Mlp((784, 512, 512, 256), 10).init(torch.Generator(), torch.float32)
    units = first_units(params, 0.75)
    assert count_bytes(units) == (512 + 512 + 256) / 8
    extra = {"hidden.0.weight": torch.zeros(10)}
    sent = Broadcast(1, params, extra, PrototypePool.empty(10, 256), {"a": units})
    assert sent.num_bytes_to(["b"]) == sent.num_bytes == 4 * 798_474 + 40
    assert sent.num_bytes_to(["a", "b"]) == 4 * (525_130 + 798_474) + 80 + 160
