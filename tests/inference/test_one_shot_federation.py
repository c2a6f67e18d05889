"""One-shot runs: joining and leaving equal a run with exactly these clients from the start."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from crashes_at_file_operations import OPERATIONS
from mpfedcl import InvalidInput, resume, run
from mpfedcl.data.loading import load_federated_data
from mpfedcl.gaussian import ABSENT, random_features
from mpfedcl.inference.membership import join, leave
from mpfedcl.inference.one_shot import open_federation
from mpfedcl.inference.trained_run import load_trained_run
from one_shot_runs import (
    RANDOM,
    WIDTH,
    assert_same_federation,
    choose,
    contents,
    events_of,
    federation,
    save_client,
    story_of,
    tensors_of,
)

pytestmark = pytest.mark.whole
METHODS = ("fedgauss", "fedlda", "fedncm", "fedridge", "fedcof")


@pytest.fixture
def path(three: Path, tmp_path: Path) -> Path:
    """A copy of the run of a, b and c."""
    return Path(shutil.copytree(three, tmp_path / "run"))


# Exact joining and leaving


def test_statistics_equal_those_of_pooled_samples(four: Path) -> None:
    data = load_federated_data(federation(four.parent / "data").resolved())
    inputs = torch.cat([client.inputs for client in data.clients])
    labels = torch.cat([client.labels for client in data.clients])
    features = random_features(inputs, RANDOM)
    found = load_file(four / "statistics.safetensors")
    assert {value.dtype for value in found.values()} == {torch.float64}
    torch.testing.assert_close(found["moment"], features.T @ features, rtol=0, atol=1e-12)
    for label in range(3):
        own = features[labels == label]
        assert found["counts"][label] == len(own)
        torch.testing.assert_close(found["sums"][label], own.sum(0), rtol=0, atol=1e-12)
    parts = [load_file(four / "statistics" / f"{name}.safetensors") for name in "abcd"]
    for name in ("counts", "sums", "moment"):
        total = torch.stack([part[name] for part in parts]).sum(0)
        torch.testing.assert_close(found[name], total, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_join_and_leave_equal_runs_with_and_without_the_client(
    method: str, clients: Path, tmp_path: Path
) -> None:
    few = run(federation(choose(clients, tmp_path / "few", "abc"), method), tmp_path / "abc").path
    all_of_them = choose(clients, tmp_path / "all", "abcd")
    whole = run(federation(all_of_them, method), tmp_path / "abcd").path
    grown = Path(shutil.copytree(few, tmp_path / "grown"))
    joined = join(grown, clients / "d.npz", "d", add=True)
    assert joined.was_added
    assert joined.after["classifier"] is not None
    assert_same_federation(grown, whole)
    # Original and joined clients leave alike.
    for path in (whole, grown):
        leave(path, "d")
        assert_same_federation(path, few)
    leave(whole, "b")
    assert open_federation(whole).pool.names == ("a", "c")
    assert (method == "fedncm" or method == "fedcof") == (
        "moment" not in load_file(whole / "statistics.safetensors")
    )


def test_join_and_leave_in_single_precision(clients: Path, tmp_path: Path) -> None:
    """Updates are rounded; statistics are added and subtracted in double precision."""
    single = {"dtype": "float32"}
    few = federation(choose(clients, tmp_path / "few", "abc"), **single)
    path = run(few, tmp_path / "abc").path
    before = load_file(path / "statistics.safetensors")
    join(path, clients / "d.npz", "d", add=True)
    leave(path, "d")
    for name, value in load_file(path / "statistics.safetensors").items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=1e-12)


def test_replace_equals_a_run_with_the_new_samples(
    path: Path, four: Path, clients: Path, tmp_path: Path
) -> None:
    join(path, save_client(tmp_path / "first.npz", 77), "d", add=True)
    assert join(path, clients / "d.npz", "d", add=True, replace=True).event == "replaced"
    assert_same_federation(path, four)
    # Original clients may be replaced too, and come back to where they were.
    before = tensors_of(path)["statistics.safetensors"]
    join(path, clients / "d.npz", "a", add=True, replace=True)
    counts = json.loads((path / "partition.json").read_text())["clients"]["a"]["train"]
    assert counts == [6, 6, 6]
    join(path, clients / "a.npz", "a", add=True, replace=True)
    for name, value in tensors_of(path)["statistics.safetensors"].items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=1e-10)
    assert story_of(path)[-2:] == [("replaced", "a"), ("replaced", "a")]


def test_unknown_class_is_rejected(path: Path, clients: Path) -> None:
    with pytest.raises(InvalidInput, match=r"has the label 3; labels must be 0 to 2\."):
        join(path, clients / "e.npz", "e", add=True)


def test_class_that_nobody_holds_is_never_predicted(path: Path, tmp_path: Path) -> None:
    for name in "abc":
        file = save_client(tmp_path / f"{name}.npz", 5, (0, 1))
        join(path, file, name, add=True, replace=True)
    assert load_trained_run(path).class_names == ("0", "1", "2")
    bias = load_file(path / "model.safetensors")["bias"]
    assert (bias[2] == ABSENT).all()
    assert not (bias[:2, 0] == ABSENT).any()


def test_join_without_add_writes_nothing(path: Path, clients: Path) -> None:
    with OPERATIONS.watch(path) as seen:
        joined = join(path, clients / "d.npz", "d")
    assert seen == []
    assert not joined.was_added
    assert joined.before.keys() == {"classifier", "classifier_prior"}
    assert joined.after.keys() == {"classifier", "classifier_prior", "personal", "personal_prior"}
    assert None not in joined.after.values()


def test_log_records_every_change(path: Path, clients: Path) -> None:
    join(path, clients / "d.npz", "d", add=True)
    leave(path, "a")
    leave(path, "d")
    assert story_of(path) == [("joined", "d"), ("left", "a"), ("left", "d")]
    assert events_of(path)[0]["counts"] == [6, 6, 6]


def test_leaving_removes_the_client_from_all_files(path: Path, three: Path, clients: Path) -> None:
    leave(path, "b")
    names = [file.name for file in path.rglob("*") if file.is_file()]
    assert not any(name.startswith(("b.", "round")) and "jsonl" not in name for name in names)
    assert "b" not in json.loads((path / "partition.json").read_text())["clients"]
    assert load_trained_run(path).clients == ("a", "c")
    # The client may join again.
    join(path, clients / "b.npz", "b", add=True)
    assert_same_federation(path, three)


# Rejected changes


def test_pooled_statistics_allow_joining_but_not_leaving(clients: Path, tmp_path: Path) -> None:
    keep = {"statistics__keep": "pooled"}
    data = choose(clients, tmp_path / "data", "abc")
    path = run(federation(data, **keep), tmp_path / "pooled").path
    assert not (path / "statistics").exists()
    before = contents(path)
    for act in (
        lambda: leave(path, "a"),
        lambda: join(path, clients / "d.npz", "a", add=True, replace=True),
    ):
        with pytest.raises(InvalidInput, match="only pooled statistics were kept"):
            act()
    assert contents(path) == before
    join(path, clients / "d.npz", "d", add=True)
    assert not (path / "statistics").exists()


def test_names_of_unknown_or_existing_clients_are_rejected(path: Path, clients: Path) -> None:
    before = contents(path)
    data = clients / "d.npz"
    with pytest.raises(InvalidInput, match="'a', a client of the federation"):
        join(path, data, "a", add=True)
    with pytest.raises(InvalidInput, match="printable text"):
        join(path, data, "../a", add=True)
    with pytest.raises(InvalidInput, match=r"it must be one of a, b, c\."):
        leave(path, "z")
    for given in ({"epochs": 2}, {"lr": 0.1}):
        with pytest.raises(InvalidInput, match=f"{next(iter(given))} is given"):
            join(path, data, "d", **given)
    assert contents(path) == before
    leave(path, "a")
    with pytest.raises(InvalidInput, match=r"leave is 'a'; it must be one of b, c\."):
        leave(path, "a")
    leave(path, "b")
    with pytest.raises(InvalidInput, match="'c', the last client"):
        leave(path, "c")
    with pytest.raises(InvalidInput, match="clients have joined or left since"):
        resume(path)


def test_damaged_and_foreign_files_are_rejected(path: Path, four: Path) -> None:
    pooled, own = path / "statistics.safetensors", path / "statistics" / "b.safetensors"
    sound, good = load_file(pooled), own.read_bytes()

    def rejects(words: str) -> None:
        before = contents(path)
        with pytest.raises(InvalidInput, match=words):
            leave(path, "b")
        assert contents(path) == before

    own.write_bytes(good[:100])
    rejects("b.safetensors cannot be read as safetensors")
    shutil.copy(path / "statistics" / "a.safetensors", own)
    part = load_file(own)
    save_file(part | {"counts": part["counts"] + 1}, own, {"encoder": "null"})
    rejects("statistics.* has counts or sums that no samples")
    save_file(part | {"moment": torch.zeros(3, 3, dtype=torch.float64)}, own, {"encoder": "null"})
    rejects(rf"moment of shape \[3, 3\]; in this federation it must be \[{WIDTH}, {WIDTH}\]")
    save_file(part, own, {"encoder": '"abc"'})
    rejects("statistics of another encoder")
    own.unlink()
    rejects("is missing")
    own.write_bytes(good)
    save_file(sound | {"sums": sound["sums"] * torch.nan}, pooled, {"encoder": "null"})
    rejects("not finite")
    save_file(sound | {"counts": torch.zeros(5, dtype=torch.float64)}, pooled)
    rejects(r"counts of shape \[5\]")
    shutil.copy(four / "statistics.safetensors", pooled)
    rejects("statistics.* has counts or sums that no samples")
    pooled.unlink()
    rejects("has no statistics.safetensors")
