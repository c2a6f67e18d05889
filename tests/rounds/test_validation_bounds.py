"""Exact bounds of update validation, on handmade updates."""

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from validation_cases import Usual, make_validator, prepare

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods import CollectsStatistics, Context, Method, collect_statistics
from mpfedcl.methods.messages import StackMember, Update
from mpfedcl.prototypes import Prototypes

WEIGHT = "classifier.weight"


class AddsUp(CollectsStatistics):
    """Sends sums of unknown meaning next to its model."""

    name = "adds-up"

    def collect(self, inputs: Tensor, labels: Tensor) -> Tensors:
        return {"sums": torch.zeros(2, dtype=torch.float64), "none": torch.zeros(0)}


class Withholds(Method):
    """May withhold its update."""

    name = "withholds"
    may_withhold = True

    def finish(
        self, params: Tensors, context: Context, num_steps: int
    ) -> tuple[Tensors | None, Tensors]:
        return super().finish(params, context, num_steps)


@pytest.fixture(scope="module")
def usual() -> Usual:
    return make_validator(prepare())


def test_honest_update_is_accepted(usual: Usual) -> None:
    validator, broadcast, update = usual
    assert validator.check_form(update) is None
    assert validator.check_shapes(update) is None
    assert validator.check(update, broadcast) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"client": "c"}, "'c' is not a client of this federation"),
        ({"num_samples": 9}, "num_samples is 9; this client has 10"),
        ({"num_samples": 11}, "num_samples is 11; this client has 10"),
        ({"num_samples": 10.0}, "num_samples is 10.0; this client has 10"),
        ({"loss": None}, "loss is None; it must be finite"),
        ({"loss": 1}, "loss is 1; it must be finite"),
        ({"loss": -math.inf}, "loss is -inf; it must be finite"),
        ({"loss": math.nan}, "loss is nan; it must be finite"),
        ({"loss": math.nextafter(1e12, 2e12)}, "loss is 1e+12; at most 1e+12"),
        ({"loss": -2e12}, "loss is -2e+12; at most 1e+12"),
        ({"loss": 1e12}, None),
        ({"loss": -1e12}, None),
        ({"averaged": None}, "it withholds its update; this method never does"),
    ],
)
def test_plain_values_of_an_update_are_validated(
    usual: Usual, changes: dict[str, Any], reason: str | None
) -> None:
    validator, broadcast, update = usual
    assert validator.check(replace(update, **changes), broadcast) == reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"client": 5}, "the client's name is not text"),
        ({"prototypes": None}, "tensors or prototypes are missing"),
        ({"averaged": []}, "tensors or prototypes are missing"),
        ({"averaged": {"a": 5}}, "a is not a dense tensor"),
        ({"averaged": {"a": torch.eye(3).to_sparse()}}, "a is not a dense tensor"),
        ({"averaged": {"a": torch.zeros(3, device="meta")}}, "a holds no values"),
        ({"summed": {"s": "x"}}, "s is not a dense tensor"),
        ({"summed": {"s": torch.zeros(3, device="meta")}}, "s holds no values"),
        ({"prototypes": Prototypes.empty(5, device="meta")}, "vectors holds no values"),
        ({"averaged": None}, None),
        ({"averaged": StackMember(None, 0)}, None),  # type: ignore[arg-type]
    ],
)
def test_structure_of_an_update_is_validated(
    usual: Usual, changes: dict[str, Any], reason: str | None
) -> None:
    validator, _, update = usual
    assert validator.check_form(replace(update, **changes)) == reason


def test_names_shapes_and_types_of_tensors_are_validated(usual: Usual) -> None:
    validator, broadcast, update = usual
    assert isinstance(update.averaged, dict)
    weight = update.averaged[WEIGHT]

    def check(**tensors: Any) -> str | None:
        made = {**update.averaged, **tensors}  # type: ignore[dict-item]
        kept = {name: value for name, value in made.items() if value is not None}
        return validator.check(replace(update, averaged=kept), broadcast)

    assert check(x=weight) == "tensors ['x'] are missing or unknown"
    four = dict.fromkeys("wxyz", weight)
    assert check(**four) == "tensors ['w', 'x', 'y'] are missing or unknown"
    assert check(**{WEIGHT: None}) == f"tensors ['{WEIGHT}'] are missing or unknown"
    reason = check(**{WEIGHT: weight.T})
    assert reason == f"tensor {WEIGHT} has shape [5, 3]; expected [3, 5]"
    reason = check(**{WEIGHT: weight.double()})
    assert reason == f"tensor {WEIGHT} has type torch.float64; expected torch.float32"
    extra = replace(update, summed={"s": torch.zeros(1)})
    assert validator.check(extra, broadcast) == "tensors ['s'] are missing or unknown"


def move(update: Update, by: float) -> Update:
    assert isinstance(update.averaged, dict)
    changed = {name: value.clone() for name, value in update.averaged.items()}
    changed[WEIGHT].view(-1)[0] += by
    return replace(update, averaged=changed)


def test_norm_of_the_change_is_bounded() -> None:
    validator, broadcast, update = make_validator(
        prepare(validation__max_norm=4.0, dtype="float64")
    )
    for name, value in broadcast.params.items():
        value.zero_()
        assert isinstance(update.averaged, dict)
        update.averaged[name].zero_()
    assert validator.check(move(update, 4.0), broadcast) is None
    reason = validator.check(move(update, -4.01), broadcast)
    assert reason == "the model changed by 4.01; at most 4"
    for odd in (math.nan, math.inf, -math.inf, 1e200):
        reason = validator.check(move(update, odd), broadcast)
        assert reason == "a tensor holds values that are not finite"
    # A tensor that was not in the broadcast has changed by its whole value.
    without = replace(broadcast, params={})
    assert validator.check(move(update, 4.01), without) == "the model changed by 4.01; at most 4"
    # The bound applies to the change, not to the weights.
    for name, value in broadcast.params.items():
        value.fill_(100.0)
        assert isinstance(update.averaged, dict)
        update.averaged[name].fill_(100.0)
    assert validator.check(move(update, 4.0), broadcast) is None
    assert validator.check(move(update, 4.01), broadcast) == "the model changed by 4.01; at most 4"


def test_member_of_a_stack_is_validated_by_its_reported_change(usual: Usual) -> None:
    validator, broadcast, update = usual
    stack: Any = SimpleNamespace(squared_changes=[0.0, 4e12, math.nan], template=validator.template)

    def check(index: int) -> str | None:
        return validator.check(replace(update, averaged=StackMember(stack, index)), broadcast)

    assert check(0) is None
    assert check(1) == "the model changed by 2e+06; at most 1e+06"
    assert check(2) == "a tensor holds values that are not finite"


def test_method_that_may_withhold_is_accepted_without_tensors() -> None:
    validator, broadcast, update = make_validator(prepare(Withholds))
    assert validator.check(replace(update, averaged=None), broadcast) is None


def test_method_without_training_needs_no_loss() -> None:
    validator, broadcast, update = make_validator(prepare("fedncm"))
    assert update.loss is None
    assert validator.check(update, broadcast) is None
    reason = validator.check(replace(update, loss=math.nan), broadcast)
    assert reason == "loss is nan; it must be finite"


def test_sums_must_match_the_announced_counts() -> None:
    assembly = prepare("fedncm")
    validator, broadcast, update = make_validator(assembly, label_counts={"a": [10, 0, 0]})
    features = torch.nn.functional.normalize(torch.ones(10, 4), dim=1)
    labels = torch.zeros(10, dtype=torch.int64)
    honest = replace(update, summed=collect_statistics(assembly.method, features, labels))
    assert validator.check(honest, broadcast) is None
    other, _, _ = make_validator(assembly, label_counts={"a": [9, 1, 0]})
    assert other.check(honest, broadcast) is not None
    unannounced, _, _ = make_validator(assembly)
    assert unannounced.check(honest, broadcast) is None


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([1e100, -1e100], None),
        ([0.0, 0.0], None),
        ([0.0, 1.01e100], "the sums sums reach 1.01e+100; at most 1e+100"),
        ([-1.7e308, 0.0], "the sums sums reach 1.7e+308; at most 1e+100"),
        ([0.0, math.nan], "the sums sums hold values that are not finite"),
        ([-math.inf, 0.0], "the sums sums hold values that are not finite"),
    ],
)
def test_sums_are_bounded(values: Sequence[float], reason: str | None) -> None:
    validator, broadcast, update = make_validator(prepare(AddsUp))
    summed = {**update.summed, "sums": torch.tensor(values, dtype=torch.float64)}
    assert validator.check(replace(update, summed=summed), broadcast) == reason
