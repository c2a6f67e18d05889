"""Clients' states in a file behave as a dict does, and every kept checkpoint finds its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_experiments import assert_same_tensors

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.engines import client_states
from mpfedcl.engines.client_states import SLOTS, ClientStates, restore_states
from mpfedcl.rounds.engine import StatePlace

NAMES = [f"client-{number}" for number in range(8)]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_memory() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_states, "MOST_IN_MEMORY", 100)
        yield


def make(number: int, size: int = 5) -> Tensors:
    return {"w": torch.arange(size) + 0.5 * number, "n": torch.tensor(number)}


def states_in(folder: Path, rank: int = 0, ranks: int = 1) -> ClientStates:
    own = NAMES[rank::ranks]
    found = ClientStates("own", own, CPU)
    found.keep_in(StatePlace(folder, NAMES, rank, ranks), some_rest=False)
    return found


def assert_same(found: ClientStates, wanted: dict[str, Tensors]) -> None:
    assert sorted(found) == sorted(wanted)
    assert len(found) == len(wanted)
    for name in NAMES:
        assert (name in found) == (name in wanted)
    for name, state in wanted.items():
        assert_same_tensors(found[name], state)


def reopen(folder: Path, checkpoint: Tensors) -> ClientStates:
    """Return the states as a resumed run finds them."""
    found = states_in(folder)
    restore_states([found], checkpoint)
    return found


EVENTS = ["go on", "go on", "killed", "killed once it was written", "killed and damaged"]
ROUND = st.tuples(
    st.dictionaries(st.sampled_from(NAMES), st.integers(0, 99)), st.sampled_from(EVENTS)
)
"""Whose states change and to what, and what happens at the end of the round."""


@settings(max_examples=40, deadline=None)
@given(st.lists(ROUND, max_size=12))
def test_any_rounds_and_kills(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[tuple[dict[str, int], str]]
) -> None:
    folder = tmp_path_factory.mktemp("run") / "checkpoint"
    states, model = states_in(folder), dict[str, Tensors]()
    # Checkpoints on disk, oldest first, with what they must come to; the last may be on its way.
    kept: list[tuple[Tensors, dict[str, Tensors]]] = []
    for changes, event in rounds:
        states.begin_round()
        for name, number in changes.items():
            states[name] = model[name] = make(number)
        assert_same(states, model)
        # All that may be returned to is whole, though this round has written.
        for checkpoint, wanted in kept:
            assert_same(reopen(folder, checkpoint), wanted)
        kept = [*kept, (states.snapshot(), dict(model))][-3:]
        if event == "go on":
            continue
        lost = {"killed": 1, "killed once it was written": 0, "killed and damaged": 2}[event]
        kept = kept[: len(kept) - lost]
        states, model = states_in(folder), {}
        if kept:
            states, model = reopen(folder, kept[-1][0]), dict(kept[-1][1])
        kept = kept[-2:]
        assert_same(states, model)


def test_a_file_does_not_grow_with_the_rounds(tmp_path: Path) -> None:
    states = states_in(tmp_path / "checkpoint")
    sizes = []
    for number in range(12):
        states.begin_round()
        for name in NAMES[:2]:
            states[name] = make(number)
        states.snapshot()
        sizes.append((tmp_path / "checkpoint" / "clients-own.slots").stat().st_size)
    assert sizes[3] == sizes[-1]


def test_few_states_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_states, "MOST_IN_MEMORY", 10**6)
    states = states_in(tmp_path / "checkpoint")
    states["client-1"] = make(1)
    assert not (tmp_path / "checkpoint").exists()
    assert sorted(states.snapshot()) == ["own/client-1/n", "own/client-1/w"]


def test_a_file_is_worth_it_earlier_where_some_clients_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_states, "MOST_IN_MEMORY", 8 * len(NAMES) * 4 * 10)
    for size, some_rest, is_in_file in ((80, False, False), (11, True, True), (10, True, False)):
        states = ClientStates("own", NAMES, CPU)
        folder = tmp_path / f"{size}"
        states.keep_in(StatePlace(folder, NAMES), some_rest=some_rest)
        states["client-1"] = {"w": torch.zeros(size)}
        assert folder.exists() == is_in_file


def test_what_fits_no_slot_stays_in_memory_until_it_does(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    states = states_in(folder)
    states["client-1"], states["client-2"] = make(1), make(2, 5000)
    assert sorted(states.snapshot()) == ["own/client-2/n", "own/client-2/w", "slots/own"]
    wanted = {"client-1": make(1), "client-2": make(2, 5000)}
    assert_same(reopen(folder, states.snapshot()), wanted)
    states["client-2"], states["client-1"] = make(3), make(4, 5000)
    assert_same(reopen(folder, states.snapshot()), {"client-1": make(4, 5000), "client-2": make(3)})
    del states["client-1"], states["client-2"]
    assert_same(states, {})


@pytest.mark.parametrize("others", [1, 2, 3])
def test_another_number_of_processes_goes_on(tmp_path: Path, others: int) -> None:
    folder = tmp_path / "checkpoint"
    model: dict[str, Tensors] = {}
    index = torch.full((len(NAMES),), -1)
    for ranks in (2, others, 3):
        group = [states_in(folder, rank, ranks) for rank in range(ranks)]
        for each in group:
            each.restore({}, index if bool((index >= 0).any()) else None)
        for number in range(5):
            for each in group:
                each.begin_round()
            for place, name in enumerate(NAMES[: 3 + number]):
                group[place % ranks][name] = model[name] = make(10 * ranks + number)
        index = torch.stack([each.snapshot()[f"{SLOTS}/own"] for each in group]).amax(0)
    assert_same(reopen(folder, {f"{SLOTS}/own": index}), model)


def test_what_is_cut_off_or_out_of_reach_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    states = states_in(folder)
    for number, name in enumerate(NAMES):
        states[name] = make(number)
    found = states.snapshot()
    with pytest.raises(InvalidInput, match="workers is too many"):
        ClientStates("own", NAMES, CPU).restore({}, found[f"{SLOTS}/own"])
    with pytest.raises(ValueError, match="clients"):
        states_in(folder).restore({}, found[f"{SLOTS}/own"][:3])
    path = folder / "clients-own.slots"
    with path.open("r+b") as file:
        file.truncate(4096 * 3)
    with pytest.raises(InvalidInput, match="is cut off; it must be"):
        reopen(folder, found)
    path.unlink()
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        reopen(folder, found)
