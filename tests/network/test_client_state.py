"""What a client keeps between rounds: always the round that counts, and never much more."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfedcl.network.client.state import ClientStateStore
from mpfedcl.network.message import MessageError

RUN = "0123456789abcdef" * 2
CPU = torch.device("cpu")


def mark(number: int) -> dict[str, torch.Tensor]:
    return {"personal/x": torch.tensor([float(number)])}


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / RUN).iterdir())


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 3)), min_size=1, max_size=12)
)
def test_whatever_happens_the_round_that_counts_is_there(
    history: list[tuple[bool, bool, int]],
) -> None:
    """A round is asked for or not, counts or not, and the server may lose its newest checkpoint."""
    with TemporaryDirectory() as place:
        store = ClientStateStore(Path(place), RUN)
        # What the server has written down after each round: the client's last one that counted.
        checkpoints, versions, version = [0], {0: 0}, 0
        for is_asked, counts, lost in history:
            if lost == 3 and len(checkpoints) > 1:
                checkpoints.pop()
            number, settled = len(checkpoints), checkpoints[-1]
            if not is_asked:
                checkpoints.append(settled)
                continue
            found = store.load(settled, CPU)
            assert ("personal/x" in found) == (settled > 0)
            if settled:
                assert float(found["personal/x"]) == versions[settled]
            version += 1
            store.save(number, mark(version), after=settled)
            assert len(kept(Path(place))) <= 3
            if counts:
                versions[number] = version
            checkpoints.append(number if counts else settled)


def test_many_rounds_that_do_not_count(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path, RUN)
    store.save(1, mark(1), after=0)
    for number in range(2, 9):
        store.save(number, mark(number), after=1)
    assert float(store.load(1, CPU)["personal/x"]) == 1
    assert kept(tmp_path) == [
        "round-000001-after-000000.safetensors",
        "round-000008-after-000001.safetensors",
    ]


def test_a_round_is_saved_anew_once_its_outcome_is_known(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path, RUN)
    for number in (1, 2):
        store.save(number, mark(number), after=number - 1)
    store.replace(2, mark(20))
    assert [float(store.load(n, CPU)["personal/x"]) for n in (1, 2)] == [1, 20]
    assert len(kept(tmp_path)) == 2
    # Also where the disk is new.
    elsewhere = ClientStateStore(tmp_path / "new", RUN)
    elsewhere.replace(1, mark(7))
    assert float(elsewhere.load(1, CPU)["personal/x"]) == 7


def test_a_server_that_begins_anew(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path, RUN)
    for number in range(1, 6):
        store.save(number, mark(number), after=number - 1)
    store.save(1, mark(100), after=0)
    store.save(2, mark(200), after=1)
    assert float(store.load(1, CPU)["personal/x"]) == 100
    assert float(store.load(2, CPU)["personal/x"]) == 200


def test_what_is_damaged_or_gone_is_nothing(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path, RUN)
    assert store.load(0, CPU) == store.load(7, CPU) == {}
    store.save(1, mark(1), after=0)
    (path,) = (tmp_path / RUN).iterdir()
    path.write_bytes(path.read_bytes()[:20])
    assert store.load(1, CPU) == {}
    assert store.load(-1, CPU) == {}


def test_nobody_else_may_look(tmp_path: Path) -> None:
    ClientStateStore(tmp_path, RUN).save(1, mark(1), after=0)
    assert (tmp_path / RUN).stat().st_mode & 0o777 == 0o700


def test_old_runs_are_forgotten(tmp_path: Path) -> None:
    (tmp_path / "something-else").mkdir()
    for number in range(12):
        ClientStateStore(tmp_path, f"{number:032x}").save(1, mark(1), after=0)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"{number:032x}" for number in range(4, 12)] + ["something-else"]


@pytest.mark.parametrize("run", ["", "x", RUN.upper(), RUN[:-1], RUN + "0", f"../{RUN[3:]}", "/"])
def test_a_run_is_named_by_digits(tmp_path: Path, run: str) -> None:
    with pytest.raises(MessageError, match="it must be 32 hexadecimal digits"):
        ClientStateStore(tmp_path, run)
