"""What travels: sizes to the byte, and updates that are written out."""

from typing import Any

import torch

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods.messages import Broadcast, Failure, StackMember, Total, Update, fill_part
from mpfedcl.prototypes import PrototypePool, Prototypes

CPU = torch.device("cpu")
META = torch.device("meta")


class Pair:
    """A stack of two clients' tensors."""

    template: Tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.float64)}  # noqa: RUF012

    def tensors(self, index: int) -> Tensors:
        return {name: torch.full_like(value, index) for name, value in self.template.items()}


def rows(count: int) -> Prototypes:
    ones = torch.ones(count, dtype=torch.int64)
    return Prototypes(torch.ones(count, 5), ones, ones)


def member(index: int) -> StackMember:
    stack: Any = Pair()
    return StackMember(stack, index)


def test_num_bytes_of_a_broadcast() -> None:
    pool = PrototypePool.gather({"x": rows(2)}, num_classes=3)
    sent = Broadcast(7, {"a": torch.zeros(3)}, {"b": torch.zeros(2, dtype=torch.float64)}, pool)
    # Two vectors of five floats, and a label, a count and an owner each.
    assert sent.num_bytes == 3 * 4 + 2 * 8 + 2 * 5 * 4 + 3 * 2 * 8
    empty = PrototypePool.empty(3, 5)
    assert Broadcast(7, {}, {}, empty).num_bytes == 0
    moved = Broadcast(7, sent.params, sent.extra, empty).to(META)
    assert (moved.round, set(moved.params), set(moved.extra)) == (7, {"a"}, {"b"})
    parts = [moved.params["a"], moved.extra["b"], moved.pool.vectors]
    assert all(part.device == META for part in parts)


def test_num_bytes_of_an_update() -> None:
    summed = {"s": torch.zeros(6, dtype=torch.float64)}
    update = Update("x", 9, {"a": torch.zeros(3)}, rows(2), 0.5, summed)
    assert update.num_parameters == 3 + 6
    assert update.num_bytes == 3 * 4 + 6 * 8 + 2 * 5 * 4 + 2 * 2 * 8
    withheld = Update("x", 9, None, rows(0), None)
    assert (withheld.num_parameters, withheld.num_bytes) == (0, 0)
    assert (withheld.summed, withheld.processed) == ({}, ())
    shared = Update("x", 9, member(1), rows(0), 0.5)
    assert (shared.num_parameters, shared.num_bytes) == (6 + 4, 6 * 4 + 4 * 8)


def test_update_moves_to_another_device() -> None:
    update = Update("x", 9, {"a": torch.zeros(3)}, rows(2), 0.5, {"s": torch.zeros(6)}, ("clip",))
    moved = update.to(META)
    assert isinstance(moved.averaged, dict)
    for part in (moved.averaged["a"], moved.summed["s"], moved.prototypes.vectors):
        assert part.device == META
    assert (moved.client, moved.num_samples, moved.loss) == ("x", 9, 0.5)
    assert moved.processed == ("clip",)
    assert Update("x", 9, None, rows(0), None).to(CPU).averaged is None


def test_stacked_update_is_written_out() -> None:
    update = Update("x", 9, member(1), rows(1), 0.5)
    written = update.written_out()
    assert isinstance(written.averaged, dict)
    assert written.averaged["a"].tolist() == [[1.0] * 3] * 2
    plain = Update("x", 9, {"a": torch.ones(1)}, rows(1), 0.5, {"s": torch.ones(1)})
    again = plain.written_out()
    assert again.averaged is plain.averaged
    assert again.summed == plain.summed


def test_failure_has_client_and_reason() -> None:
    assert Failure("x", "gone") == Failure(client="x", reason="gone")


def test_total_has_no_client_name() -> None:
    total = Total(("a", "b"), 2.0, {}, {}, 9, 1.5, True, 7, 8)
    # So that it comes before every name.
    assert total.client == ""
    assert total.client < min(total.clients)
    assert total.noise is None


# Parts of a model

UNITS = {"hidden.0": torch.tensor([True, False, True])}
"""Of three units the second is left out."""
WHOLE = {
    "hidden.0.weight": torch.zeros(3, 2),
    "hidden.0.bias": torch.zeros(3),
    "classifier.weight": torch.zeros(2, 3),
    "classifier.bias": torch.zeros(2),
}


def part_broadcast() -> Broadcast:
    return Broadcast(1, WHOLE, {}, PrototypePool.empty(2, 3), units={"x": UNITS})


def test_num_bytes_to_clients_with_a_partial_model() -> None:
    sent = part_broadcast()
    whole = (6 + 3 + 6 + 2) * 4
    # A row, a bias and a column less, and a byte that says which units these are.
    part = whole - (2 + 1 + 2) * 4 + 1
    assert sent.num_bytes_to([]) == 0
    assert sent.num_bytes_to(["y"]) == whole
    assert sent.num_bytes_to(["x"]) == part
    assert sent.num_bytes_to(["x", "y", "z"]) == part + 2 * whole
    assert sent.to(META).units["x"]["hidden.0"].device == META


def test_partial_update_is_filled_with_the_server_values() -> None:
    server = {name: torch.full_like(value, 5) for name, value in WHOLE.items()}
    sent = Broadcast(1, server, {}, PrototypePool.empty(2, 3), units={"x": UNITS})
    averaged = {name: torch.ones_like(value) for name, value in WHOLE.items()}
    found = fill_part(Update("x", 9, {**averaged, "more": torch.ones(1)}, rows(0), 0.5), sent)
    assert isinstance(found.averaged, dict)
    assert found.averaged["hidden.0.weight"].tolist() == [[1, 1], [5, 5], [1, 1]]
    assert found.averaged["hidden.0.bias"].tolist() == [1, 5, 1]
    assert found.averaged["classifier.weight"].tolist() == [[1, 5, 1], [1, 5, 1]]
    assert found.averaged["classifier.bias"].tolist() == [1, 1]
    assert found.averaged["more"].tolist() == [1]
    assert found.left_out == 2 + 1 + 2
    assert found.num_parameters == 17 + 1 - 5
    assert found.num_bytes == (17 + 1 - 5) * 4
    withheld = Update("x", 9, None, rows(0), None)
    assert fill_part(withheld, sent) is withheld
