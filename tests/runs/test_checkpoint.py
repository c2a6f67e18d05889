"""Checkpoints: what is saved comes back, what is damaged does not count."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from made_checkpoints import assert_same_checkpoint, make_checkpoint
from mpfedcl.core.files import FORMAT
from mpfedcl.rounds.state import ArrivalCounts, ArrivalState, Dispatch, SentModel
from mpfedcl.runs.checkpoint import (
    _sign,
    checkpoint_from_bytes,
    checkpoint_to_bytes,
    load_checkpoint,
    save_checkpoint,
)
from small_experiments import Json, assert_same_tensors


def save_three(folder: Path) -> Path:
    for number in (1, 2, 3):
        save_checkpoint(make_checkpoint(number), folder)
    return folder


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_checkpoint_is_restored(tmp_path: Path) -> None:
    save_checkpoint(make_checkpoint(7), tmp_path / "new")
    found, problems = load_checkpoint(tmp_path / "new")
    assert_same_checkpoint(found, make_checkpoint(7))
    assert problems == []


def test_no_checkpoint_is_found_in_an_empty_folder(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path) == (None, [])
    assert load_checkpoint(tmp_path / "absent") == (None, [])


def test_two_newest_checkpoints_are_kept(tmp_path: Path) -> None:
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
def test_previous_checkpoint_replaces_a_damaged_one(tmp_path: Path, kind: str) -> None:
    save_three(tmp_path)
    DAMAGE[kind](tmp_path / "round-000003.safetensors", tmp_path / "round-000003.json")
    found, problems = load_checkpoint(tmp_path)
    assert_same_checkpoint(found, make_checkpoint(2))
    assert len(problems) == 1
    assert "round-000003 is damaged" in problems[0]


def test_every_flipped_byte_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    save_checkpoint(make_checkpoint(1), tmp_path)
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


def test_crash_before_the_manifest_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    save_three(tmp_path)
    (tmp_path / "round-000003.json").unlink()
    (tmp_path / ".round-000003.json.0123abcd.tmp").write_text('{"half')
    found, problems = load_checkpoint(tmp_path)
    assert_same_checkpoint(found, make_checkpoint(2))
    assert problems == []


def test_no_checkpoint_is_loaded_if_all_are_damaged(tmp_path: Path) -> None:
    save_three(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        flip(path)
    found, problems = load_checkpoint(tmp_path)
    assert found is None
    assert len(problems) == 2


def test_damaged_later_checkpoints_are_removed_by_a_new_one(tmp_path: Path) -> None:
    save_three(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        flip(path)
    save_checkpoint(make_checkpoint(1), tmp_path)
    found, problems = load_checkpoint(tmp_path)
    assert_same_checkpoint(found, make_checkpoint(1))
    assert problems == []


def test_orphaned_tensor_files_are_removed(tmp_path: Path) -> None:
    save_three(tmp_path)
    (tmp_path / "round-000001.safetensors").write_bytes(b"left by a crash while deleting")
    save_checkpoint(make_checkpoint(4), tmp_path)
    assert files(tmp_path) == [
        "round-000003.json",
        "round-000003.safetensors",
        "round-000004.json",
        "round-000004.safetensors",
    ]


# Checkpoints whose hash is right and that are none


def forge_manifest(path: Path, change: Callable[[Json], Any]) -> None:
    """Change the newest manifest and sign it again."""
    file = sorted(path.glob("round-*.json"))[-1]
    manifest = json.loads(file.read_bytes())
    del manifest["sha256"]
    forged = change(manifest)
    content = file.with_suffix(".safetensors").read_bytes()
    signed = {"sha256": _sign(json.dumps(forged), content), **forged}
    file.write_text(json.dumps(signed))


ODD_MANIFESTS: dict[str, Callable[[Json], Json]] = {
    "no record": lambda m: {**m, "record": None},
    "an odd record": lambda m: {**m, "record": {"round": 2}},
    "no round": lambda m: {k: v for k, v in m.items() if k != "round"},
    "a round as a text": lambda m: {**m, "round": "3"},
    "round 0": lambda m: {**m, "round": 0},
    "a round without end": lambda m: {**m, "round": 10**9 + 1},
    "an age without end": lambda m: {**m, "received": dict.fromkeys(m["received"], 10**9 + 1)},
    "the next format": lambda m: {**m, "format": FORMAT + 1},
    "clients as a list": lambda m: {**m, "received": []},
    "a client that is not there": lambda m: {**m, "received": {"nobody": 1}},
    "an age below 0": lambda m: {**m, "received": dict.fromkeys(m["received"], -1)},
    "a length of nothing": lambda m: {**m, "median_norm": 0.0},
    "a length without end": lambda m: {**m, "median_norm": 1e999},
    "a standing beyond all": lambda m: {**m, "reputations": {"client-0": 6.1}},
    "a format to come": lambda m: {**m, "format": 999},
}


@pytest.mark.parametrize("name", ODD_MANIFESTS)
def test_invalid_manifest_with_a_valid_hash_is_damaged(tmp_path: Path, name: str) -> None:
    forge_manifest(save_three(tmp_path), ODD_MANIFESTS[name])
    found, problems = load_checkpoint(tmp_path)
    assert_same_checkpoint(found, make_checkpoint(2))
    assert problems[0].startswith("round-000003 is damaged (")


def test_unchanged_manifest_with_a_new_hash_is_loaded(tmp_path: Path) -> None:
    forge_manifest(save_three(tmp_path), lambda manifest: manifest)
    found, problems = load_checkpoint(tmp_path)
    assert_same_checkpoint(found, make_checkpoint(3))
    assert problems == []


def test_largest_allowed_values_are_loaded(tmp_path: Path) -> None:
    last = {"round": 10**9, "received": {"client-0": 10**9, "ü/x": 0}, "format": FORMAT}
    forge_manifest(save_three(tmp_path), lambda manifest: {**manifest, **last})
    found, problems = load_checkpoint(tmp_path)
    assert problems == []
    assert found is not None
    assert found.state.round == 10**9
    assert [age for age, _ in found.state.prototypes.values()] == [10**9, 0]


def test_checkpoint_without_bounds_is_loaded(tmp_path: Path) -> None:
    bounds = {"median_norm", "reputations"}
    forge_manifest(
        save_three(tmp_path),
        lambda m: {name: each for name, each in m.items() if name not in bounds},
    )
    found, problems = load_checkpoint(tmp_path)
    assert problems == []
    assert found is not None
    assert (found.state.median_norm, found.state.reputations) == (None, {})


def test_invalid_tensors_with_a_valid_hash_are_damaged(tmp_path: Path) -> None:
    save_three(tmp_path)
    (tmp_path / "round-000003.safetensors").write_bytes(b"\xff" * 64)
    forge_manifest(tmp_path, lambda manifest: manifest)
    found, problems = load_checkpoint(tmp_path)
    assert_same_checkpoint(found, make_checkpoint(2))
    assert "round-000003 is damaged" in problems[0]


@pytest.mark.parametrize("sizes", [[4], [5, -1], [2, 1], [2, 3], [2, 2, 0]])
def test_prototypes_with_impossible_sizes_are_rejected(sizes: list[int]) -> None:
    manifest, _, content = checkpoint_to_bytes(make_checkpoint(3)).partition(b"\n")
    tensors = {**load(content), "prototypes/sizes": torch.tensor(sizes)}
    with pytest.raises(ValueError, match="prototypes cannot be those of 2 clients"):
        checkpoint_from_bytes(manifest + b"\n" + save(tensors))


def test_checkpoint_is_restored_from_bytes() -> None:
    sent = checkpoint_to_bytes(make_checkpoint(3))
    assert_same_checkpoint(checkpoint_from_bytes(sent), make_checkpoint(3))


def test_private_server_state_is_restored(tmp_path: Path) -> None:
    kept = make_checkpoint(1)
    kept.state.server.private["secret"] = torch.ones(2)
    save_checkpoint(kept, tmp_path)
    found, _ = load_checkpoint(tmp_path)
    assert found is not None
    assert_same_tensors(found.state.server.private, {"secret": torch.ones(2)})


def test_dispatched_clients_are_restored(tmp_path: Path) -> None:
    whole = make_checkpoint(2)
    under_way = Dispatch(client="ü/x", number=4, version=7, round=2, sent=1.5, due=2.5, tier=1)
    counts = ArrivalCounts(version=8, sendings=5, answers=3, ticks=2, under_way=[under_way])
    sent = SentModel({"a.weight": torch.ones(3, 2)}, {"control": torch.zeros(3)})
    state = replace(whole.state, virtual_seconds=2.25, arrivals=ArrivalState(counts, {7: sent}))
    save_checkpoint(replace(whole, state=state), tmp_path)
    found, problems = load_checkpoint(tmp_path)
    assert problems == []
    assert found is not None
    assert found.state.virtual_seconds == 2.25
    assert found.state.arrivals is not None
    assert found.state.arrivals.counts == counts
    assert_same_tensors(found.state.arrivals.models[7].params, sent.params)
    assert_same_tensors(found.state.arrivals.models[7].extra, sent.extra)
