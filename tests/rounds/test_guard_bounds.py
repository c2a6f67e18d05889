"""The guard's bounds to the last number, on updates that are made by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mpfedcl.experiment import Experiment
from mpfedcl.gaussian import StackedSums
from mpfedcl.messages import Broadcast, StackMember, Update
from mpfedcl.methods import Context, Method, find_method
from mpfedcl.models import Mlp
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.rounds.assembly import Assembly, assemble
from mpfedcl.rounds.guard import Guard
from mpfedcl.tensors import Tensors

SIZES = {"a": 10, "b": 7}
WEIGHT = "classifier.weight"


class AddsUp(Method):
    """Sends sums beside its model, of which nothing is known."""

    name = "adds-up"

    def collect(self, inputs: Tensor, labels: Tensor) -> Tensors:
        return {"sums": torch.zeros(2, dtype=torch.float64), "none": torch.zeros(0)}


class Withholds(Method):
    """May have nothing to send."""

    name = "withholds"

    def finish(
        self, params: Tensors, context: Context, num_steps: int
    ) -> tuple[Tensors | None, Tensors]:
        return super().finish(params, context, num_steps)


def prepare(method: str | type[Method] = "mp-fedcl", **changes: Any) -> Assembly:
    found = find_method(method) if isinstance(method, str) else method
    settings = {"prototypes__per_class": 2, **changes}
    experiment = Experiment(method=method if isinstance(method, str) else "fedavg")
    resolved = experiment.replace(**settings).resolved(found.defaults)
    model = Mlp((4, 5), 3)
    return assemble(resolved, model, num_classes=3, input_size=4, method_class=found)


def make_guard(assembly: Assembly, **options: Any) -> tuple[Guard, Broadcast, Update]:
    """Return a guard, a broadcast and an honest update without any prototype."""
    like = next(iter(assembly.initial.values()))
    params = {n: v for n, v in assembly.initial.items() if assembly.method.shared(n)}
    pool = PrototypePool.empty(3, assembly.model.embedding_size, 2, dtype=like.dtype)
    guard = Guard(assembly, SIZES, **options)
    none = Prototypes.empty(assembly.model.embedding_size, like.dtype)
    loss = 0.5 if assembly.method.trains else None
    averaged = {name: value.clone() for name, value in guard.template.items()}
    update = Update("a", 10, averaged, none, loss, dict(guard.sums))
    return guard, Broadcast(1, params, {}, pool), update


@pytest.fixture(scope="module")
def usual() -> tuple[Guard, Broadcast, Update]:
    return make_guard(prepare())


Usual = tuple[Guard, Broadcast, Update]


def test_an_honest_update_is_sound(usual: Usual) -> None:
    guard, broadcast, update = usual
    assert guard.judge_form(update) is None
    assert guard.judge_shapes(update) is None
    assert guard.judge(update, broadcast) is None


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
def test_plain_values(usual: Usual, changes: dict[str, Any], reason: str | None) -> None:
    guard, broadcast, update = usual
    assert guard.judge(replace(update, **changes), broadcast) == reason


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
def test_the_form(usual: Usual, changes: dict[str, Any], reason: str | None) -> None:
    guard, _, update = usual
    assert guard.judge_form(replace(update, **changes)) == reason


def test_the_form_of_what_this_process_added_up(usual: Usual) -> None:
    guard, _, update = usual
    stack = StackedSums(torch.ones(2, 5), torch.tensor([0, 1]), [2], 3, None)
    assert guard.judge_form(replace(update, summed=stack.member(0))) is None


def test_names_shapes_and_types(usual: Usual) -> None:
    guard, broadcast, update = usual
    assert isinstance(update.averaged, dict)
    weight = update.averaged[WEIGHT]

    def judge(**tensors: Any) -> str | None:
        made = {**update.averaged, **tensors}  # type: ignore[dict-item]
        kept = {name: value for name, value in made.items() if value is not None}
        return guard.judge(replace(update, averaged=kept), broadcast)

    assert judge(x=weight) == "tensors ['x'] are missing or unknown"
    four = dict.fromkeys("wxyz", weight)
    assert judge(**four) == "tensors ['w', 'x', 'y'] are missing or unknown"
    assert judge(**{WEIGHT: None}) == f"tensors ['{WEIGHT}'] are missing or unknown"
    said = judge(**{WEIGHT: weight.T})
    assert said == f"tensor {WEIGHT} has shape [5, 3]; expected [3, 5]"
    said = judge(**{WEIGHT: weight.double()})
    assert said == f"tensor {WEIGHT} has type torch.float64; expected torch.float32"
    extra = replace(update, summed={"s": torch.zeros(1)})
    assert guard.judge(extra, broadcast) == "tensors ['s'] are missing or unknown"


def move(update: Update, by: float) -> Update:
    assert isinstance(update.averaged, dict)
    changed = {name: value.clone() for name, value in update.averaged.items()}
    changed[WEIGHT].view(-1)[0] += by
    return replace(update, averaged=changed)


def test_the_change_is_bounded() -> None:
    guard, broadcast, update = make_guard(prepare(guard__max_norm=4.0, dtype="float64"))
    for name, value in broadcast.params.items():
        value.zero_()
        assert isinstance(update.averaged, dict)
        update.averaged[name].zero_()
    assert guard.judge(move(update, 4.0), broadcast) is None
    said = guard.judge(move(update, -4.01), broadcast)
    assert said == "the model changed by 4.01; at most 4"
    for odd in (math.nan, math.inf, -math.inf, 1e200):
        said = guard.judge(move(update, odd), broadcast)
        assert said == "a tensor holds values that are not finite"
    # What the broadcast did not carry has changed by all that it is.
    without = replace(broadcast, params={})
    assert guard.judge(move(update, 4.01), without) == "the model changed by 4.01; at most 4"
    # The change counts, not the weights.
    for name, value in broadcast.params.items():
        value.fill_(100.0)
        assert isinstance(update.averaged, dict)
        update.averaged[name].fill_(100.0)
    assert guard.judge(move(update, 4.0), broadcast) is None
    assert guard.judge(move(update, 4.01), broadcast) == "the model changed by 4.01; at most 4"


def test_a_part_of_a_stack_is_judged_by_what_it_says(usual: Usual) -> None:
    guard, broadcast, update = usual
    stack: Any = SimpleNamespace(squared_changes=[0.0, 4e12, math.nan], template=guard.template)

    def judge(index: int) -> str | None:
        return guard.judge(replace(update, averaged=StackMember(stack, index)), broadcast)

    assert judge(0) is None
    assert judge(1) == "the model changed by 2e+06; at most 1e+06"
    assert judge(2) == "a tensor holds values that are not finite"


def test_only_who_may_withholds() -> None:
    guard, broadcast, update = make_guard(prepare(Withholds))
    assert guard.judge(replace(update, averaged=None), broadcast) is None


def test_who_trains_nothing_needs_no_loss() -> None:
    guard, broadcast, update = make_guard(prepare("fedncm"))
    assert update.loss is None
    assert guard.judge(update, broadcast) is None
    said = guard.judge(replace(update, loss=math.nan), broadcast)
    assert said == "loss is nan; it must be finite"


def test_announced_counts_are_held_against_the_sums() -> None:
    assembly = prepare("fedncm")
    guard, broadcast, update = make_guard(assembly, label_counts={"a": [10, 0, 0]})
    features = torch.nn.functional.normalize(torch.ones(10, 4), dim=1)
    labels = torch.zeros(10, dtype=torch.int64)
    honest = replace(update, summed=assembly.method.collect(features, labels))
    assert guard.judge(honest, broadcast) is None
    other, _, _ = make_guard(assembly, label_counts={"a": [9, 1, 0]})
    assert other.judge(honest, broadcast) is not None
    unannounced, _, _ = make_guard(assembly)
    assert unannounced.judge(honest, broadcast) is None


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
    guard, broadcast, update = make_guard(prepare(AddsUp))
    summed = {**update.summed, "sums": torch.tensor(values, dtype=torch.float64)}
    assert guard.judge(replace(update, summed=summed), broadcast) == reason


def test_sums_of_this_process_are_finite_or_not() -> None:
    guard, _, update = make_guard(prepare("fedncm"))
    features = torch.ones(2, 4)
    features[1, 0] = math.nan
    stack = StackedSums(features, torch.tensor([0, 1]), [1, 1], 3, None)
    sound, odd = (replace(update, summed=stack.member(index)) for index in (0, 1))
    assert guard._judge_sums(sound) is None
    assert guard._judge_sums(odd) == "the samples hold values that are not finite"


# Prototypes


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
        (rows([0], [1], length=1.0011), "a prototype has length 1; at most 1.001"),
        (rows([0], [1], length=math.nan), "prototype vectors hold values that are not finite"),
        (rows([0], [1], width=4), "prototype vectors has shape [1, 4]; expected [1, 5]"),
    ],
)
def test_prototypes(usual: Usual, prototypes: Prototypes, reason: str | None) -> None:
    guard, broadcast, update = usual
    assert guard.judge(replace(update, prototypes=prototypes), broadcast) == reason


def test_prototypes_of_other_types_and_shapes(usual: Usual) -> None:
    guard, broadcast, update = usual

    def judge(**columns: Tensor) -> str | None:
        made = object.__new__(Prototypes)
        for name in ("vectors", "labels", "counts"):
            object.__setattr__(made, name, columns.get(name, getattr(rows([0], [1]), name)))
        return guard.judge(replace(update, prototypes=made), broadcast)

    assert judge() is None
    said = judge(labels=torch.tensor([0.0]))
    assert said == "prototype labels has type torch.float32; expected torch.int64"
    said = judge(counts=torch.tensor([1.0]))
    assert said == "prototype counts has type torch.float32; expected torch.int64"
    said = judge(vectors=torch.zeros(1, 5).double())
    assert said == "prototype vectors has type torch.float64; expected torch.float32"
    said = judge(counts=torch.tensor([1, 1]))
    assert said == "prototype counts has shape [2]; expected [1]"
    said = judge(labels=torch.tensor([[0]]))
    assert said == "prototype labels has shape [1, 1]; expected [-1]"


def test_prototypes_that_nobody_shares() -> None:
    guard, broadcast, update = make_guard(prepare("fedavg"))
    said = guard.judge(replace(update, prototypes=rows([0], [1])), broadcast)
    assert said == "prototypes came although the method shares none"
    said = guard.judge(replace(update, prototypes=rows([], [], width=4)), broadcast)
    assert said == "prototype vectors has shape [0, 4]; expected [0, 5]"
    assert guard.judge(replace(update, prototypes=rows([], [])), broadcast) is None


def test_any_number_of_prototypes_where_the_method_says_so() -> None:
    guard, broadcast, update = make_guard(prepare("dp-fedcl"))
    many = replace(update, prototypes=rows([0] * 9, [1] * 9))
    assert guard.judge(many, broadcast) is None


@pytest.mark.parametrize(("length", "is_sound"), [(2.0, True), (2.0019, True), (2.003, False)])
def test_raw_embeddings_are_as_long_as_a_change_may_be(length: float, is_sound: bool) -> None:
    guard, broadcast, update = make_guard(prepare("fedproto", guard__max_norm=2.0))
    said = guard.judge(replace(update, prototypes=rows([0], [1], length=length)), broadcast)
    assert said == (None if is_sound else "a prototype has length 2; at most 2.002")


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
def test_prototypes_are_held_to_what_was_announced(
    held: list[int], prototypes: Prototypes, reason: str | None
) -> None:
    guard, broadcast, update = make_guard(prepare(), label_counts={"a": held})
    said = guard.judge(replace(update, prototypes=prototypes), broadcast)
    assert said == (None if reason is None else f"prototypes of {reason}")


def test_under_a_budget_nobody_says_how_many() -> None:
    assembly = prepare(privacy__epsilon=3.0, network__max_images=12)
    guard, broadcast, update = make_guard(assembly, label_counts={"a": [0, 0, 0]})
    silent = replace(update, loss=None)
    assert guard.judge(silent, broadcast) is None
    assert guard.judge(replace(silent, prototypes=rows([0], [12])), broadcast) is None
    said = guard.judge(replace(silent, prototypes=rows([0], [13])), broadcast)
    assert said == "prototype counts must be at least 1 and sum to at most 12"
    said = guard.judge(replace(silent, loss=math.nan), broadcast)
    assert said == "loss is nan; it must be finite"
