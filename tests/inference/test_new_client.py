"""A new client of a finished run: its images, training and accuracy."""

import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy

from mpfedcl import InvalidInput, prototype_contrastive_loss, run
from mpfedcl.core.rng import seed_for
from mpfedcl.data.loading import load_federated_data
from mpfedcl.engines.trainers.base import draw_batches
from mpfedcl.experiment import Experiment
from mpfedcl.inference.membership import join
from mpfedcl.inference.new_client import NewClient
from mpfedcl.inference.predictor import Predictor
from mpfedcl.inference.trained_run import load_trained_run
from mpfedcl.methods import prototype_rule
from mpfedcl.prototypes import cluster_prototypes
from small_experiments import save_images, small

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def finished(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of MP-FedCL; tests that change it make a copy."""
    return run(small(images), tmp_path_factory.mktemp("runs") / "finished").path


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images of a client that comes late: 21 to train on, 15 to be tested on."""
    path = tmp_path_factory.mktemp("late") / "late.npz"
    save_images(path, num_train=21, num_test=15)
    return path


def write_pictures(folder: Path, classes: dict[str, int], size: int = 6) -> Path:
    """Write class folders with gray images, each class with a different bright stripe."""
    random = numpy.random.default_rng(5)
    for label, (name, count) in enumerate(sorted(classes.items())):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(0, 120, (size, size), dtype=numpy.uint8)
            pixels[label % size] += 120
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def change(path: Path, copy: Path, **settings: Any) -> Path:
    """Return a copy of a run with a changed experiment.toml."""
    shutil.copytree(path, copy)
    experiment = Experiment.from_toml(copy / "experiment.toml").replace(**settings)
    (copy / "experiment.toml").write_text(experiment.to_toml())
    return copy


def test_join_without_training_equals_plain_arithmetic(finished: Path, late: Path) -> None:
    trained = load_trained_run(finished)
    joined = join(finished, late, "late", epochs=0)
    with numpy.load(late) as archive:
        pixels = {part: archive[f"x_{part}"].reshape(-1, 36) / 255 for part in ("train", "test")}
        labels = {part: torch.from_numpy(archive[f"y_{part}"]) for part in ("train", "test")}
    params = trained.parameters()

    def embed(part: str) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.from_numpy((pixels[part] - 0.5) / 0.5).float()
        for layer in range(3):
            weight, bias = params[f"hidden.{layer}.weight"], params[f"hidden.{layer}.bias"]
            hidden = (hidden @ weight.T + bias).clamp(min=0)
        logits = hidden @ params["classifier.weight"].T + params["classifier.bias"]
        return hidden / hidden.norm(dim=1, keepdim=True), logits

    embeddings, _ = embed("train")
    expected = cluster_prototypes(
        embeddings,
        labels["train"],
        num_classes=3,
        num_prototypes=2,
        seed=seed_for(0, 3, "late", "clusters"),
    )
    own = joined.outcome.prototypes
    torch.testing.assert_close(own.vectors, expected.vectors)
    assert own.labels.tolist() == expected.labels.tolist()
    assert own.counts.tolist() == expected.counts.tolist()
    assert int(own.counts.sum()) == joined.train_images == 21
    assert trained.pool is not None
    queries, logits = embed("test")
    sources = {
        "pool": (trained.pool.vectors, trained.pool.labels),
        "own": (own.vectors, own.labels),
        "both": (
            torch.cat([trained.pool.vectors, own.vectors]),
            torch.cat([trained.pool.labels, own.labels]),
        ),
    }
    right = {"classifier": logits.argmax(dim=1) == labels["test"]}
    for name, (vectors, classes) in sources.items():
        nearest = [int(((vectors - query) ** 2).sum(dim=1).argmin()) for query in queries]
        right[name] = classes[nearest] == labels["test"]
    by_hand = {name: 100 * int(each.sum()) / 15 for name, each in right.items()}
    assert joined.before == pytest.approx(by_hand)
    assert joined.after == joined.before


@pytest.mark.parametrize("epochs", [1, 3])
def test_training_is_that_of_a_client_in_a_round(finished: Path, late: Path, epochs: int) -> None:
    """Compared with plain autograd and torch's own optimizer."""
    trained = load_trained_run(finished)
    new_client = NewClient(trained, late, "late")
    assert trained.pool is not None
    learned = new_client.train(trained.parameters(), trained.pool, epochs=epochs, lr=0.05)
    params = {name: value.clone().requires_grad_() for name, value in trained.parameters().items()}
    optimizer = torch.optim.SGD(params.values(), lr=0.05, momentum=0.5)
    settings = trained.experiment.replace(train__epochs=epochs)
    for batch in draw_batches(new_client.client, settings, round_number=3):
        embeddings, logits = trained.model.apply(params, new_client.client.inputs[batch])
        z, labels = (
            prototype_rule(trained.method).project(embeddings),
            new_client.client.labels[batch],
        )
        contrast = prototype_contrastive_loss(z, labels, trained.pool, temperature=0.07)
        loss = cross_entropy(logits, labels) + contrast
        gradients = torch.autograd.grad(loss, list(params.values()))
        for value, gradient in zip(params.values(), gradients, strict=True):
            value.grad = gradient
        optimizer.step()
    for name, value in params.items():
        torch.testing.assert_close(learned.params[name], value.detach(), rtol=1e-4, atol=1e-6)
    assert learned.rejected is None


def test_epochs_of_a_new_client_replace_the_fixed_steps_of_a_run(
    finished: Path, late: Path, tmp_path: Path
) -> None:
    fixed = change(finished, tmp_path / "fixed", train__steps=7)
    found, wanted = (join(path, late, "late", epochs=2).outcome for path in (fixed, finished))
    assert all(torch.equal(found.params[name], value) for name, value in wanted.params.items())


def test_training_uses_the_padded_pool_of_the_run(images: Path, late: Path, tmp_path: Path) -> None:
    """With K = 40 no client has K prototypes of a class, and all slots are padded."""
    path = run(small(images, prototypes__per_class=40), tmp_path / "run").path
    trained = load_trained_run(path)
    assert trained.pool is not None
    assert bool((trained.pool.slots() < 0).all())
    expected = NewClient(trained, late, "late").train(trained.parameters(), trained.pool, epochs=1)
    learned = join(path, late, "late", epochs=1).outcome
    for name, value in expected.params.items():
        assert torch.equal(learned.params[name], value)


def test_evaluation_does_not_depend_on_the_batch_size(
    finished: Path, late: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = join(finished, late, "late", epochs=1)
    monkeypatch.setattr("mpfedcl.inference.new_client.INPUTS_AT_ONCE", 3)
    batched = join(finished, late, "late", epochs=1)
    assert batched.test_images > 3
    assert (batched.before, batched.after) == (whole.before, whole.after)


def test_training_on_own_images_lowers_the_loss(finished: Path, late: Path) -> None:
    losses = [join(finished, late, "late", epochs=n).outcome.update.loss for n in (1, 5, 20)]
    assert losses == sorted(set(losses), key=lambda each: -(each or 0))


def test_trial_is_deterministic_and_changes_no_file(finished: Path, late: Path) -> None:
    before = {file: file.read_bytes() for file in sorted(finished.rglob("*")) if file.is_file()}
    first, second = (join(finished, late, "late", epochs=2) for _ in range(2))
    assert torch.equal(first.outcome.prototypes.vectors, second.outcome.prototypes.vectors)
    assert first.to_json() == second.to_json()
    after = {file: file.read_bytes() for file in sorted(finished.rglob("*")) if file.is_file()}
    assert before == after


def test_late_domain_gets_the_split_of_a_run_with_it(tmp_path: Path) -> None:
    """Under feature skew, whatever the layout: the split goes by seed and name."""
    for number, domain in enumerate(("ink", "oil", "pen")):
        write_pictures(tmp_path / "set" / domain, {"a": 7 + number, "b": 9, "c": 4})
    base = small(tmp_path / "set", clients=None, rounds=1, seed=3).replace(
        partition__kind="feature", partition__test="matched"
    )
    for changes in ({}, {"dataset__per_class": 3, "dataset__test_per_class": 2}):
        experiment = base.replace(**changes)
        path = tmp_path / f"run-{len(changes)}"
        run(experiment.replace(dataset__domains=("ink", "oil")), path)
        new_client = NewClient(load_trained_run(path), tmp_path / "set" / "pen", "pen")
        everyone = load_federated_data(experiment)
        wanted = everyone.client("pen")
        assert torch.equal(new_client.client.inputs, wanted.inputs)
        assert torch.equal(new_client.client.labels, wanted.labels)
        assert torch.equal(new_client.data.test_inputs, everyone.test_inputs[wanted.test])
        assert torch.equal(new_client.data.test_labels, everyone.test_labels[wanted.test])


def test_missing_classes_keep_the_label_numbers(tmp_path: Path) -> None:
    write_pictures(tmp_path / "set" / "all", {"ant": 8, "bee": 8, "cat": 8})
    path = run(small(tmp_path / "set"), tmp_path / "run").path
    write_pictures(tmp_path / "new", {"ant": 4, "cat": 6})
    joined = join(path, tmp_path / "new", "new", epochs=1)
    assert set(joined.outcome.prototypes.labels.tolist()) == {0, 2}
    assert (joined.classes_held, joined.train_images, joined.test_images) == (2, 5, 5)


def test_num_prototypes_is_limited_by_the_images(finished: Path, tmp_path: Path) -> None:
    """K = 2, one training image of each class: one prototype each, its own embedding."""
    save_images(tmp_path / "few.npz", num_train=3, num_test=3)
    for epochs in (0, 1):
        own = join(finished, tmp_path / "few.npz", "few", epochs=epochs).outcome.prototypes
        assert own.labels.tolist() == [0, 1, 2]
        assert own.counts.tolist() == [1, 1, 1]
        torch.testing.assert_close(own.vectors.norm(dim=1), torch.ones(3))


def test_join_with_one_image(tmp_path: Path, finished: Path) -> None:
    write_pictures(tmp_path / "one", {"0": 1})
    joined = join(finished, tmp_path / "one", "one", epochs=1)
    assert (joined.train_images, joined.test_images, len(joined.outcome.prototypes)) == (1, 0, 1)
    assert set(joined.after.values()) == {None}


def test_images_are_converted_to_the_runs_format(tmp_path: Path, finished: Path) -> None:
    random = numpy.random.default_rng(1)
    images = random.integers(0, 255, (9, 12, 10, 3), dtype=numpy.uint8)
    numpy.savez(tmp_path / "rgb.npz", x_train=images, y_train=numpy.arange(9) % 3)
    joined = join(finished, tmp_path / "rgb.npz", "rgb", test_fraction=0.34)
    assert (joined.train_images, joined.test_images) == (6, 3)


def test_test_fraction_sets_the_share_held_out(tmp_path: Path, finished: Path) -> None:
    write_pictures(tmp_path / "new", {"0": 10, "1": 10})
    sizes = {}
    for fraction in (None, 0.2, 0.9):
        joined = join(finished, tmp_path / "new", "new", epochs=0, test_fraction=fraction)
        sizes[fraction] = (joined.train_images, joined.test_images)
    assert sizes == {None: (10, 10), 0.2: (16, 4), 0.9: (2, 18)}


@pytest.mark.parametrize(
    ("method", "changes", "expected"),
    [
        ("fedavg", {}, "shares no prototypes"),
        ("local", {}, "shares no prototypes"),
        ("fedproto", {}, "keep their models"),
        ("mp-fedcl", {"share_model": False}, "keep their models"),
    ],
)
def test_runs_without_pool_or_global_model_are_rejected(
    images: Path, late: Path, tmp_path: Path, method: str, changes: Any, expected: str
) -> None:
    path = run(small(images, method, rounds=1, **changes), tmp_path / "run").path
    with pytest.raises(InvalidInput, match=expected):
        join(path, late, "late", add=True)


@pytest.mark.parametrize("method", ["sp-fedcl", "dp-fedcl"])
def test_join_runs_of_other_prototype_methods(
    images: Path, late: Path, tmp_path: Path, method: str
) -> None:
    path = run(small(images, method), tmp_path / "run").path
    joined = join(path, late, "late", add=True)
    assert joined.was_added
    assert "late" in load_trained_run(path).pool.names  # type: ignore[union-attr]


def test_join_with_raw_embeddings_in_double_precision(
    images: Path, late: Path, tmp_path: Path
) -> None:
    experiment = small(images, prototypes__normalize=False, dtype="float64")
    path = run(experiment, tmp_path / "run").path
    assert join(path, late, "late", epochs=1, add=True).was_added
    pool = load_trained_run(path).pool
    assert pool is not None
    assert pool.vectors.dtype == torch.float64


def test_update_out_of_bounds_is_rejected(finished: Path, late: Path, tmp_path: Path) -> None:
    path = change(finished, tmp_path / "strict", validation__max_norm=1e-6)
    before = (path / "pool.safetensors").read_bytes()
    for epochs, reason in ((0, "a prototype has norm"), (1, "the model changed by")):
        joined = join(path, late, "late", epochs=epochs, add=True)
        assert reason in (joined.outcome.rejected or "")
        assert not joined.was_added
    assert (path / "pool.safetensors").read_bytes() == before
    assert not (path / "joins.jsonl").exists()


def test_diverged_training_is_rejected(finished: Path, late: Path, tmp_path: Path) -> None:
    path = change(finished, tmp_path / "copy")
    joined = join(path, late, "late", epochs=3, lr=1e30, add=True)
    assert "must be finite" in (joined.outcome.rejected or "")
    assert not joined.was_added


def test_unfinished_run_is_rejected(finished: Path, late: Path, tmp_path: Path) -> None:
    path = change(finished, tmp_path / "copy")
    (path / "summary.json").unlink()
    with pytest.raises(InvalidInput, match="has not ended"):
        join(path, late, "late")


def test_predictions_use_the_prototypes_of_a_joined_client(finished: Path, tmp_path: Path) -> None:
    """One image per class, so that each is its own nearest prototype."""
    path = change(finished, tmp_path / "copy")
    save_images(tmp_path / "few.npz", num_train=3, num_test=3)
    join(path, tmp_path / "few.npz", "few", epochs=0, add=True)
    with numpy.load(tmp_path / "few.npz") as archive:
        images, labels = archive["x_train"], archive["y_train"]
    for client in (None, "few"):
        for prediction, label in zip(
            Predictor.load(path, client).predict(images), labels, strict=True
        ):
            assert prediction.nearest is not None
            assert prediction.nearest.client == "few"
            assert (prediction.label, prediction.nearest.count) == (str(label), 1)
            assert prediction.distance == pytest.approx(0, abs=1e-3)
