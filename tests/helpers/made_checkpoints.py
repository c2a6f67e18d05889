"""Checkpoints made by hand, for tests of what is saved and read."""

import torch

from mpfedcl.methods import Server
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.record import Attendance, RoundRecord
from mpfedcl.rounds.state import RoundState
from mpfedcl.runs.checkpoint import Checkpoint
from small_experiments import Json, assert_same_tensors


def make_record(number: int) -> Json:
    attendance = Attendance(answered=["client-0"], missing=[], rejected={})
    return RoundRecord(
        round=number,
        loss=0.1 + number,
        accuracy=None,
        accuracy_per_client=None,
        seconds={},
        bytes={},
        clients=attendance,
    ).to_json()


def make_checkpoint(number: int) -> Checkpoint:
    random = torch.Generator().manual_seed(number)
    rows = Prototypes(
        torch.randn(2, 4, generator=random), torch.tensor([0, 2]), torch.tensor([5, number])
    )
    server = Server(
        {"a.weight": torch.randn(3, 2, generator=random)},
        {"control": torch.randn(3, generator=random, dtype=torch.float64)},
    )
    received = {"client-0": (number, rows), "ü/x": (1, rows)}
    state = RoundState(number, server, received, number / 3, {"client-0": -6.0, "ü/x": 0.1})
    clients = {"kept/client-0/a.weight": torch.randn(3, generator=random)}
    return Checkpoint(state, clients, make_record(number))


def assert_same_checkpoint(found: Checkpoint | None, wanted: Checkpoint) -> None:
    assert found is not None
    assert found.record == wanted.record
    assert found.state.round == wanted.state.round
    # By these the next round's updates are bounded.
    assert found.state.median_norm == wanted.state.median_norm
    assert found.state.reputations == wanted.state.reputations
    assert_same_tensors(found.state.server.params, wanted.state.server.params)
    assert_same_tensors(found.state.server.extra, wanted.state.server.extra)
    assert_same_tensors(found.clients, wanted.clients)
    assert list(found.state.prototypes) == list(wanted.state.prototypes)
    for name, (received, rows) in wanted.state.prototypes.items():
        assert found.state.prototypes[name][0] == received
        for column in ("vectors", "labels", "counts"):
            assert torch.equal(
                getattr(found.state.prototypes[name][1], column), getattr(rows, column)
            )
