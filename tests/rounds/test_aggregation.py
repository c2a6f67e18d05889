"""Aggregation rules: by hand, against numpy, and with two processes."""

from collections.abc import Iterator, Sequence

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.methods.messages import StackMember, Update
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.aggregation import Aggregator, find_aggregator
from mpfedcl.rounds.aggregation.by_distances import (
    CenteredClipping,
    GeometricMedian,
    Krum,
    MultiKrum,
)
from mpfedcl.rounds.aggregation.coordinate_wise import CoordinateMedian, TrimmedMean
from mpfedcl.rounds.aggregation.mean import WeightedMean

pytestmark = pytest.mark.whole

RULES = {
    "mean": WeightedMean,
    "median": CoordinateMedian,
    "trimmed-mean": TrimmedMean,
    "krum": Krum,
    "multi-krum": MultiKrum,
    "geometric-median": GeometricMedian,
    "centered-clipping": CenteredClipping,
}
values = st.floats(-1e6, 1e6, allow_nan=False)
rows = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(values, min_size=width, max_size=width), min_size=1)
)


def make_update(client: str, values: Sequence[float], num_samples: int = 1) -> Update:
    tensors = {"w": torch.tensor(values, dtype=torch.float64)}
    return Update(client, num_samples, tensors, Prototypes.empty(2), 0.0)


class Alone:
    """The only process of a run."""

    def sum(self, tensors: Tensors) -> Tensors:
        return tensors

    def gather(self, content: bytes) -> list[bytes]:
        return [content]

    def gather_to_leader(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        return parts

    def broadcast(self, content: bytes) -> bytes:
        return content


class Two(Alone):
    """The second of two processes, run after the first one was recorded."""

    def __init__(self, other: "Recorder") -> None:
        self._other = other

    def sum(self, tensors: Tensors) -> Tensors:
        return {name: value + self._other.summed[name] for name, value in tensors.items()}

    def gather(self, content: bytes) -> list[bytes]:
        return [self._other.gathered.pop(0), content]


class Recorder(Alone):
    def __init__(self) -> None:
        self.summed: Tensors = {}
        self.gathered: list[bytes] = []

    def sum(self, tensors: Tensors) -> Tensors:
        self.summed = tensors
        return tensors

    def gather(self, content: bytes) -> list[bytes]:
        self.gathered.append(content)
        return [content]


def test_rules_are_found_by_name() -> None:
    assert {name: find_aggregator(name) for name in RULES} == RULES
    with pytest.raises(InvalidInput) as caught:
        Experiment(aggregation={"rule": "mode"})
    assert str(caught.value) == (
        "aggregation.rule is 'mode'; it must be 'centered-clipping', 'geometric-median', 'krum', "
        "'mean', 'median', 'multi-krum' or 'trimmed-mean'."
    )


@given(rows)
def test_median_equals_numpy(values: list[list[float]]) -> None:
    rule = CoordinateMedian({}, Experiment())
    for number, row in enumerate(values):
        rule.add(make_update(f"client-{number}", row), number + 1)
    wanted = numpy.median(numpy.array(values), axis=0)
    numpy.testing.assert_allclose(rule.result()["w"].numpy(), wanted, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("rule", RULES.values())
@given(rows, st.data())
def test_two_processes_equal_one(
    rule: type[Aggregator], values: list[list[float]], data: st.DataObject
) -> None:
    template = {"w": torch.zeros(len(values[0]), dtype=torch.float64)}
    alone, first, second = (rule(template, Experiment()) for _ in range(3))
    for number, row in enumerate(values):
        weight = data.draw(st.integers(1, 50))
        update = make_update(f"client-{number}", row)
        alone.add(update, weight)
        data.draw(st.sampled_from([first, second])).add(update, weight)
    recorder = Recorder()
    first.merge(recorder)
    second.merge(Two(recorder))
    torch.testing.assert_close(second.result()["w"], alone.result()["w"])


@pytest.mark.parametrize("rule", RULES.values())
def test_no_updates_and_zero_weights_have_no_result(rule: type[Aggregator]) -> None:
    made = rule({"w": torch.zeros(1, dtype=torch.float64)}, Experiment())
    assert made.result() == {}
    made.add(make_update("a", [3.0]), 0)
    made.merge(Alone())
    assert made.result() == {}
    made.add(make_update("b", [5.0]), 2)
    assert made.result()["w"].tolist() == [5.0]


class Pair:
    """Two clients of a stack."""

    def __init__(self) -> None:
        self.values = torch.tensor([[1.0, 2.0], [3.0, 8.0]], dtype=torch.float64)
        self.template = {"w": self.values[0]}
        self.squared_changes = (5.0, 73.0)

    def __len__(self) -> int:
        return 2

    def weighted_sum(self, weights: torch.Tensor) -> Tensors:
        return {"w": weights @ self.values}

    def tensors(self, index: int) -> Tensors:
        return {"w": self.values[index]}


@pytest.mark.parametrize(
    ("rule", "wanted"), [("mean", [2.0, 5.0]), ("median", [3.0, 5.0])], ids=["mean", "median"]
)
def test_rules_accept_members_of_a_stack(rule: str, wanted: list[float]) -> None:
    made = find_aggregator(rule)({}, Experiment())
    for index, name in enumerate(("a", "b")):
        update = make_update(name, [0.0])
        member = Update(name, 1, StackMember(Pair(), index), update.prototypes, 0.0)
        made.add(member, 1)
    if rule == "median":
        made.add(make_update("c", [9.0, 5.0]), 1)
    assert made.result()["w"].tolist() == wanted
