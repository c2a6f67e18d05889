"""Exact bounds of update validation on prototypes."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from validation_cases import Usual, make_validator, prepare

from mpfedcl.prototypes import Prototypes


@pytest.fixture(scope="module")
def usual() -> Usual:
    return make_validator(prepare())


def rows(
    labels: Sequence[int], counts: Sequence[int], length: float = 0.5, width: int = 5
) -> Prototypes:
    vectors = torch.zeros(len(labels), width)
    if len(labels):
        vectors[:, 0] = length
    columns = (torch.tensor(each, dtype=torch.int64) for each in (labels, counts))
    return Prototypes(vectors, *columns)


COUNTS = "prototype counts must be at least 1 and sum to at most 10"
LABELS = "prototype labels must lie in 0..2"


@pytest.mark.parametrize(
    ("prototypes", "reason"),
    [
        (rows([0, 0, 2, 2], [1, 2, 3, 4]), None),
        (rows([0, 1], [5, 5]), None),
        (rows([0, 1], [5, 6]), COUNTS),
        (rows([0, 1], [5, 0]), COUNTS),
        (rows([0, 1], [2**62, 2**62]), COUNTS),
        (rows([0, 3], [1, 1]), LABELS),
        (rows([-1, 0], [1, 1]), LABELS),
        (rows([0, 0, 0], [1, 1, 1]), "a class has 3 prototypes; at most 2"),
        (rows([0], [1], length=1.0009), None),
        (rows([0], [1], length=1.0011), "a prototype has norm 1; at most 1.001"),
        (rows([0], [1], length=math.nan), "prototype vectors hold values that are not finite"),
        (rows([0], [1], width=4), "prototype vectors has shape [1, 4]; expected [1, 5]"),
    ],
)
def test_prototypes_are_validated(usual: Usual, prototypes: Prototypes, reason: str | None) -> None:
    validator, broadcast, update = usual
    assert validator.check(replace(update, prototypes=prototypes), broadcast) == reason


def test_types_and_shapes_of_prototypes_are_validated(usual: Usual) -> None:
    validator, broadcast, update = usual

    def check(**columns: Tensor) -> str | None:
        made = object.__new__(Prototypes)
        for name in ("vectors", "labels", "counts"):
            object.__setattr__(made, name, columns.get(name, getattr(rows([0], [1]), name)))
        return validator.check(replace(update, prototypes=made), broadcast)

    assert check() is None
    reason = check(labels=torch.tensor([0.0]))
    assert reason == "prototype labels has type torch.float32; expected torch.int64"
    reason = check(counts=torch.tensor([1.0]))
    assert reason == "prototype counts has type torch.float32; expected torch.int64"
    reason = check(vectors=torch.zeros(1, 5).double())
    assert reason == "prototype vectors has type torch.float64; expected torch.float32"
    reason = check(counts=torch.tensor([1, 1]))
    assert reason == "prototype counts has shape [2]; expected [1]"
    reason = check(labels=torch.tensor([[0]]))
    assert reason == "prototype labels has shape [1, 1]; expected [-1]"


def test_prototypes_of_a_method_without_them_are_rejected() -> None:
    validator, broadcast, update = make_validator(prepare("fedavg"))
    reason = validator.check(replace(update, prototypes=rows([0], [1])), broadcast)
    assert reason == "prototypes came although the method shares none"
    reason = validator.check(replace(update, prototypes=rows([], [], width=4)), broadcast)
    assert reason == "prototype vectors has shape [0, 4]; expected [0, 5]"
    assert validator.check(replace(update, prototypes=rows([], [])), broadcast) is None


def test_method_without_a_limit_accepts_any_number_of_prototypes() -> None:
    validator, broadcast, update = make_validator(prepare("dp-fedcl"))
    many = replace(update, prototypes=rows([0] * 9, [1] * 9))
    assert validator.check(many, broadcast) is None


@pytest.mark.parametrize(("length", "is_sound"), [(2.0, True), (2.0019, True), (2.003, False)])
def test_norm_of_raw_embeddings_is_bounded_by_max_norm(length: float, is_sound: bool) -> None:
    validator, broadcast, update = make_validator(prepare("fedproto", validation__max_norm=2.0))
    reason = validator.check(replace(update, prototypes=rows([0], [1], length=length)), broadcast)
    assert reason == (None if is_sound else "a prototype has norm 2; at most 2.002")


@pytest.mark.parametrize(
    ("held", "prototypes", "reason"),
    [
        ([7, 0, 3], rows([0, 0, 2], [3, 4, 3]), None),
        ([7, 0, 3], rows([0, 2], [1, 1]), None),
        (
            [7, 0, 3],
            rows([0, 0], [4, 4]),
            "class 0 stand for 8 samples; this client has announced 7",
        ),
        ([7, 0, 3], rows([1], [1]), "class 1 stand for 1 samples; this client has announced 0"),
        (
            [7, 0, 3],
            rows([0, 2], [1, 4]),
            "class 2 stand for 4 samples; this client has announced 3",
        ),
    ],
)
def test_prototype_counts_must_match_the_announced_counts(
    held: list[int], prototypes: Prototypes, reason: str | None
) -> None:
    validator, broadcast, update = make_validator(prepare(), label_counts={"a": held})
    found = validator.check(replace(update, prototypes=prototypes), broadcast)
    assert found == (None if reason is None else f"prototypes of {reason}")


def test_max_images_bounds_counts_under_differential_privacy() -> None:
    assembly = prepare(privacy__epsilon=3.0, network__max_images=12)
    validator, broadcast, update = make_validator(assembly, label_counts={"a": [0, 0, 0]})
    silent = replace(update, loss=None)
    assert validator.check(silent, broadcast) is None
    assert validator.check(replace(silent, prototypes=rows([0], [12])), broadcast) is None
    reason = validator.check(replace(silent, prototypes=rows([0], [13])), broadcast)
    assert reason == "prototype counts must be at least 1 and sum to at most 12"
    reason = validator.check(replace(silent, loss=math.nan), broadcast)
    assert reason == "loss is nan; it must be finite"
