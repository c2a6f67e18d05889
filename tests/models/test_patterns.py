"""The trained part of a model: its names, its initial values, and the constants."""

import pytest
import torch

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import generator
from mpfedcl.experiment import Experiment
from mpfedcl.models import Cnn, Mlp, Model
from mpfedcl.models.patterns import PartOfModel, find_matches

NAMES = ("body.weight", "body.lora_a", "head.weight", "head.bias")
DOUBLE = torch.float64


def test_names_match_any_of_the_patterns() -> None:
    assert find_matches("model.train", ["head.*"], NAMES) == {"head.weight", "head.bias"}
    assert find_matches("model.train", ["*lora_*", "*.bias"], NAMES) == {"body.lora_a", "head.bias"}
    assert find_matches("model.train", ["*"], NAMES) == set(NAMES)


@pytest.mark.parametrize(
    ("pattern", "end"),
    [
        ("tail.*", "must match some of body.weight, body.lora_a, head.weight, head.bias."),
        ("lora_*", "head.weight, head.bias: did you mean '*.lora_*'?"),
        ("Head.*", "head.bias."),
    ],
)
def test_a_pattern_without_a_match_is_rejected_with_the_names(pattern: str, end: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        find_matches("model.train", ["head.*", pattern], NAMES)
    message = str(caught.value)
    assert message.startswith(f"model.train is {pattern!r}, which matches no parameter; it must")
    assert message.endswith(end)


def test_one_pattern_may_be_given_without_a_list() -> None:
    patterns = Experiment(model={"train": "head.*", "share": ["*.weight", "*.bias"]}).model
    assert patterns.train == ("head.*",)
    assert patterns.share == ("*.weight", "*.bias")


def test_message_has_the_first_and_the_last_of_many_names() -> None:
    names = [f"layer{number}" for number in range(99)]
    with pytest.raises(InvalidInput, match=r"layer1, layer2, \.\.\., layer96, layer97, layer98\."):
        find_matches("model.train", ["head"], names)


@pytest.mark.parametrize("whole", [Mlp((36, 8, 5), 3), Cnn((6, 6), 3, (5,), has_norm=True)])
@pytest.mark.parametrize("patterns", [("classifier.*",), ("hidden.0.*", "*.bias")])
def test_part_computes_what_the_whole_model_computes(
    whole: Model, patterns: tuple[str, ...]
) -> None:
    initial = whole.init(generator(0), DOUBLE)
    part = PartOfModel(whole, patterns, initial)
    params = part.init(generator(0), DOUBLE)
    assert all(torch.equal(value, initial[name]) for name, value in params.items())
    assert part.fits(params)
    assert not part.fits(initial)
    moved = {name: value + 0.1 for name, value in params.items()}
    inputs = torch.rand(4, 36, generator=generator(1), dtype=DOUBLE)
    for found, wanted in zip(
        part.apply(moved, inputs), whole.apply(initial | moved, inputs), strict=True
    ):
        assert torch.equal(found, wanted)
    stacked = {name: torch.stack([params[name], moved[name]]) for name in params}
    _, together = part.apply_many(stacked, inputs)
    torch.testing.assert_close(together[1], part.apply(moved, inputs)[1])
