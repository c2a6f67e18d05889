"""Client states in files behave like a dict, and every kept checkpoint finds its states."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.engines import client_states
from mpfedcl.engines.client_states import FILES, ClientStates
from small_experiments import assert_same_tensors

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
    found.keep_in(folder, NAMES, some_rest=False)
    return found


def assert_same(found: ClientStates, wanted: dict[str, Tensors]) -> None:
    assert sorted(found) == sorted(wanted)
    assert len(found) == len(wanted)
    for name in NAMES:
        assert (name in found) == (name in wanted)
    for name, state in wanted.items():
        assert_same_tensors(found[name], state)


def reopen(folder: Path, checkpoint: Tensors, number: int = 0) -> ClientStates:
    """Return the states as found by a run that resumes after a round."""
    found = states_in(folder)
    found.restore(checkpoint, number)
    return found


def assert_readable(folder: Path, checkpoint: Tensors, wanted: dict[str, Tensors]) -> None:
    """Check the states of a checkpoint on a copy: a run that resumes removes later files."""
    with tempfile.TemporaryDirectory() as copy:
        if folder.exists():
            shutil.copytree(folder, copy, dirs_exist_ok=True)
        assert_same(reopen(Path(copy), checkpoint), wanted)


EVENTS = ["go on", "go on", "killed", "killed once it was written", "killed and damaged"]
ROUND = st.tuples(
    st.dictionaries(st.sampled_from(NAMES), st.integers(0, 99)), st.sampled_from(EVENTS)
)
"""Whose states change and to what, and what happens at the end of the round."""


@pytest.mark.whole
@settings(max_examples=40, deadline=None)
@given(st.lists(ROUND, max_size=12))
def test_every_kept_checkpoint_finds_its_states_after_kills(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[tuple[dict[str, int], str]]
) -> None:
    folder = tmp_path_factory.mktemp("run") / "checkpoint"
    states, model = states_in(folder), dict[str, Tensors]()
    # Checkpoints on disk, oldest first: round, content and states.
    kept: list[tuple[int, Tensors, dict[str, Tensors]]] = []
    done = 0
    for changes, event in rounds:
        states.begin_round()
        done += 1
        for name, number in changes.items():
            states[name] = model[name] = make(number)
        assert_same(states, model)
        # All checkpoints that a run may resume from are complete, although this round has written.
        for _, checkpoint, wanted in kept:
            assert_readable(folder, checkpoint, wanted)
        # The oldest of three is removed once the newest is written.
        kept = [*kept, (done, states.snapshot(), dict(model))]
        if event == "go on":
            kept = kept[-2:]
            continue
        lost = {"killed": 1, "killed once it was written": 0, "killed and damaged": 2}[event]
        kept = kept[: len(kept) - lost]
        states, model, done = states_in(folder), {}, 0
        if kept:
            done, checkpoint, wanted = kept[-1]
            states, model = reopen(folder, checkpoint, done), dict(wanted)
        kept = kept[-2:]
        assert_same(states, model)


def test_files_do_not_accumulate_with_the_rounds(tmp_path: Path) -> None:
    states = states_in(tmp_path / "checkpoint")
    counts = []
    for number in range(12):
        states.begin_round()
        for name in NAMES[:2]:
            states[name] = make(number)
        states.snapshot()
        counts.append(len(list((tmp_path / "checkpoint").rglob("*.safetensors"))))
    assert counts[3] == counts[-1]


def test_few_states_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_states, "MOST_IN_MEMORY", 10**6)
    states = states_in(tmp_path / "checkpoint")
    states["client-1"] = make(1)
    assert not (tmp_path / "checkpoint").exists()
    assert sorted(states.snapshot()) == ["own/client-1/n", "own/client-1/w"]


def test_files_are_used_earlier_if_some_clients_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_states, "MOST_IN_MEMORY", 8 * len(NAMES) * 4 * 10)
    for size, some_rest, is_in_file in ((80, False, False), (11, True, True), (10, True, False)):
        states = ClientStates("own", NAMES, CPU)
        folder = tmp_path / f"{size}"
        states.keep_in(folder, NAMES, some_rest=some_rest)
        states["client-1"] = {"w": torch.zeros(size)}
        assert folder.exists() == is_in_file


def test_states_of_any_size_are_replaced_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    states = states_in(folder)
    states["client-1"], states["client-2"] = make(1), make(2, 5000)
    assert sorted(states.snapshot()) == ["files/own"]
    wanted = {"client-1": make(1), "client-2": make(2, 5000)}
    assert_readable(folder, states.snapshot(), wanted)
    # Again in the same round.
    states["client-2"], states["client-1"] = make(3), make(4, 5000)
    wanted = {"client-1": make(4, 5000), "client-2": make(3)}
    assert_readable(folder, states.snapshot(), wanted)
    del states["client-1"], states["client-2"]
    assert_same(states, {})
    with pytest.raises(KeyError):
        states["client-1"]


@pytest.mark.parametrize("others", [1, 2, 3])
def test_resume_with_another_number_of_processes(tmp_path: Path, others: int) -> None:
    folder = tmp_path / "checkpoint"
    model: dict[str, Tensors] = {}
    index, done = torch.full((len(NAMES), 2), -1), 0
    for ranks in (2, others, 3):
        group = [states_in(folder, rank, ranks) for rank in range(ranks)]
        for each in group:
            each.restore({f"{FILES}/own": index} if bool((index >= 0).any()) else {}, done)
        for number in range(5):
            for each in group:
                each.begin_round()
            done += 1
            for place, name in enumerate(NAMES[: 3 + number]):
                group[place % ranks][name] = model[name] = make(10 * ranks + number)
        index = torch.stack([each.snapshot()[f"{FILES}/own"] for each in group]).amax(0)
    assert_same(reopen(folder, {f"{FILES}/own": index}, done), model)


def test_damaged_missing_and_unreachable_files_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    states = states_in(folder)
    for number, name in enumerate(NAMES):
        states[name] = make(number)
    found = states.snapshot()
    with pytest.raises(InvalidInput, match="workers is too many"):
        ClientStates("own", NAMES, CPU).restore(found, 0)
    with pytest.raises(ValueError, match="clients"):
        states_in(folder).restore({f"{FILES}/own": found[f"{FILES}/own"][:3]}, 0)
    path = folder / "clients" / "own" / "3-0.safetensors"
    content = path.read_bytes()
    for changed in (content[:-1], content[:-1] + bytes([content[-1] ^ 1]), b""):
        path.write_bytes(changed)
        with pytest.raises(InvalidInput, match=r"3-0\.safetensors is damaged"):
            reopen(folder, found)["client-3"]
    path.unlink()
    with pytest.raises(InvalidInput, match=r"3-0\.safetensors is missing"):
        states["client-3"]
    with pytest.raises(InvalidInput, match=r"3-0\.safetensors is missing"):
        reopen(folder, found)


def test_links_and_pipes_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    states = states_in(folder)
    states["client-3"] = make(3)
    path = folder / "clients" / "own" / "3-0.safetensors"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InvalidInput, match="not a regular file"):
        states["client-3"]
    # A link is replaced, not followed.
    path.unlink()
    (tmp_path / "target").write_text("kept")
    path.symlink_to(tmp_path / "target")
    states["client-3"] = make(4)
    assert (tmp_path / "target").read_text() == "kept"
    assert_same(states, {"client-3": make(4)})
