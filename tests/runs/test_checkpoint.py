"""Checkpoints: what is saved comes back, what is damaged does not count."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mpfedcl.methods import Server
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.record import Attendance, RoundRecord
from mpfedcl.rounds.round_loop import RoundState
from mpfedcl.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
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
    state = RoundState(number, server, {"client-0": (number, rows), "ü/x": (1, rows)})
    clients = {"kept/client-0/a.weight": torch.randn(3, generator=random)}
    return Checkpoint(state, clients, make_record(number))


def assert_same_checkpoint(found: Checkpoint | None, wanted: Checkpoint) -> None:
    assert found is not None
    assert found.record == wanted.record
    assert found.state.round == wanted.state.round
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


def save_three(folder: Path) -> Path:
    for number in (1, 2, 3):
        save_checkpoint(folder, make_checkpoint(number))
    return folder


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "new", make_checkpoint(7))
    found, problems = load_checkpoint(tmp_path / "new")
    assert_same_checkpoint(found, make_checkpoint(7))
    assert problems == []


def test_nothing_to_load(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path) == (None, [])
    assert load_checkpoint(tmp_path / "absent") == (None, [])


def test_the_newest_and_the_one_before_are_kept(tmp_path: Path) -> None:
    assert files(save_three(tmp_path)) == [
        "round-000002.json",
        "round-000002.safetensors",
        "round-000003.json",
        "round-000003.safetensors",
    ]
    found, _ = load_checkpoint(tmp_path)
    assert_same_checkpoint(found, make_checkpoint(3))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path, place: int = -40) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))


def exchange(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


DAMAGE: dict[str, Any] = {
    "tensors cut off": lambda tensors, _: truncate(tensors),
    "tensors empty": lambda tensors, _: empty(tensors),
    "tensors flipped": lambda tensors, _: flip(tensors),
    "tensors flipped at the start": lambda tensors, _: flip(tensors, 0),
    "tensors missing": lambda tensors, _: tensors.unlink(),
    "tensors of another round": lambda tensors, _: tensors.write_bytes(
        tensors.with_name("round-000002.safetensors").read_bytes()
    ),
    "manifest cut off": lambda _, manifest: truncate(manifest),
    "manifest empty": lambda _, manifest: empty(manifest),
    "manifest {}": lambda _, manifest: manifest.write_text("{}"),
    "manifest []": lambda _, manifest: manifest.write_text("[]"),
    "manifest null": lambda _, manifest: manifest.write_text("null"),
    "manifest not text": lambda _, manifest: manifest.write_bytes(b"\xff\xfe\x00"),
    "another round in the manifest": lambda _, manifest: exchange(
        manifest, b'"round": 3', b'"round": 7'
    ),
    "another loss in the record": lambda _, manifest: exchange(
        manifest, b'"loss": 3.1', b'"loss": 3.5'
    ),
    "another age of prototypes": lambda _, manifest: exchange(
        manifest, b'"client-0": 3', b'"client-0": 2'
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_one_gives_way_to_the_one_before(tmp_path: Path, kind: str) -> None:
    save_three(tmp_path)
    DAMAGE[kind](tmp_path / "round-000003.safetensors", tmp_path / "round-000003.json")
    found, problems = load_checkpoint(tmp_path)
    assert_same_checkpoint(found, make_checkpoint(2))
    assert len(problems) == 1
    assert "round-000003 is damaged" in problems[0]


def test_every_flipped_byte_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make_checkpoint(1))
    manifest = tmp_path / "round-000001.json"
    sound = manifest.read_bytes()
    for place in range(len(sound)):
        flip(manifest, place)
        found, _ = load_checkpoint(tmp_path)
        # A flip can leave the same JSON (the case of an escape's hexadecimal digit).
        if json_or_none(manifest.read_bytes()) != json.loads(sound):
            assert found is None, f"byte {place} of {manifest.read_bytes()!r}"
        manifest.write_bytes(sound)


def json_or_none(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def test_a_crash_before_the_manifest_leaves_the_one_before(tmp_path: Path) -> None:
    save_three(tmp_path)
    (tmp_path / "round-000003.json").unlink()
    (tmp_path / ".round-000003.json.0123abcd.tmp").write_text('{"half')
    found, problems = load_checkpoint(tmp_path)
    assert_same_checkpoint(found, make_checkpoint(2))
    assert problems == []


def test_all_damaged(tmp_path: Path) -> None:
    save_three(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        flip(path)
    found, problems = load_checkpoint(tmp_path)
    assert found is None
    assert len(problems) == 2


def test_damaged_later_ones_do_not_outlive_the_rounds_run_anew(tmp_path: Path) -> None:
    save_three(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        flip(path)
    save_checkpoint(tmp_path, make_checkpoint(1))
    found, problems = load_checkpoint(tmp_path)
    assert_same_checkpoint(found, make_checkpoint(1))
    assert problems == []


def test_orphans_are_cleared_away(tmp_path: Path) -> None:
    save_three(tmp_path)
    (tmp_path / "round-000001.safetensors").write_bytes(b"left by a crash while deleting")
    save_checkpoint(tmp_path, make_checkpoint(4))
    assert files(tmp_path) == [
        "round-000003.json",
        "round-000003.safetensors",
        "round-000004.json",
        "round-000004.safetensors",
    ]
