"""Degenerate but legal data: every method runs to the end, and nothing is NaN."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file

from command_results import without_progress
from mpfedcl import Experiment, run
from mpfedcl.cli.main import main
from mpfedcl.runs.failure import describe_failure
from small_experiments import METHODS, read_records, read_summary

pytestmark = pytest.mark.whole

Bytes = NDArray[numpy.uint8]


def noise(count: int) -> Bytes:
    return numpy.random.default_rng(3).integers(0, 256, (count, 5, 5), dtype=numpy.uint8)


def save(path: Path, images: Bytes, labels: Any, tests: int = 8) -> None:
    labels = numpy.asarray(labels)
    numpy.savez(
        path,
        x_train=images,
        y_train=labels,
        x_test=numpy.resize(images, (tests, *images.shape[1:])),
        y_test=numpy.resize(labels, tests),
    )


def one_sample(root: Path) -> dict[str, Any]:
    save(root / "large.npz", noise(24), numpy.arange(24) % 3)
    save(root / "small.npz", noise(1), [1])
    return {"partition__kind": "feature"}


def one_class_each(root: Path) -> dict[str, Any]:
    save(root / "a.npz", noise(24), numpy.arange(24) % 3)
    return {"partition__kind": "classes", "partition__classes_per_client": 1}


def one_class_in_all(root: Path) -> dict[str, Any]:
    save(root / "a.npz", noise(24), [0] * 24)
    return {}


def a_class_nobody_has(root: Path) -> dict[str, Any]:
    save(root / "a.npz", noise(24), numpy.arange(24) % 2 * 4)
    return {}


def more_prototypes_than_images(root: Path) -> dict[str, Any]:
    save(root / "a.npz", noise(12), numpy.arange(12) % 3)
    return {"prototypes__per_class": 40}


def identical_images(root: Path) -> dict[str, Any]:
    save(root / "a.npz", numpy.full((24, 5, 5), 77, numpy.uint8), numpy.arange(24) % 3)
    return {}


def black_images(root: Path) -> dict[str, Any]:
    save(root / "a.npz", numpy.zeros((24, 5, 5), numpy.uint8), numpy.arange(24) % 3)
    return {"prototypes__normalize": False}


def a_client_without_tests(root: Path) -> dict[str, Any]:
    # Matched tests come out of a client's own images: from one image there is nothing to take.
    save(root / "a.npz", noise(7), [0, 0, 0, 0, 0, 1, 2])
    return {"partition__test": "matched", "partition__alpha": 0.05}


def one_client(root: Path) -> dict[str, Any]:
    save(root / "a.npz", noise(9), numpy.arange(9) % 3)
    return {"clients": 1}


def an_image_of_one_pixel(root: Path) -> dict[str, Any]:
    save(root / "a.npz", noise(12)[:, :1, :1], numpy.arange(12) % 3)
    return {}


CASES: list[Callable[[Path], dict[str, Any]]] = [
    one_sample,
    one_class_each,
    one_class_in_all,
    a_class_nobody_has,
    more_prototypes_than_images,
    identical_images,
    black_images,
    a_client_without_tests,
    one_client,
    an_image_of_one_pixel,
]


def make_experiment(case: Callable[[Path], dict[str, Any]], root: Path, method: str) -> Experiment:
    root.mkdir()
    changes = case(root)
    by_domain = changes.get("partition__kind") == "feature"
    settings = {
        "clients": None if by_domain else 3,
        "dataset__name": "folder",
        "encoder__name": "none",
        "dataset__root": root,
        "partition__test": "shared",
        "partition__alpha": 1.0,
        **changes,
    }
    return Experiment(method=method, rounds=2).replace(**settings)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_method_completes_on_degenerate_data(
    tmp_path: Path, case: Callable[[Path], dict[str, Any]], method: str
) -> None:
    run(make_experiment(case, tmp_path / "data", method), tmp_path / "run")
    for record in read_records(tmp_path / "run"):
        assert record["clients"]["rejected"] == {}
        assert record["clients"]["missing"] == []
        assert not record["unchanged"]
    summary = read_summary(tmp_path / "run")
    assert 0 <= summary["accuracy"] <= 100
    files = [*(tmp_path / "run").glob("*.safetensors"), *(tmp_path / "run" / "models").iterdir()]
    for file in files:
        for name, value in load_file(file).items():
            assert bool(value.isfinite().all()), f"{file.name}: {name}"


@pytest.mark.usefixtures("rendered_figures")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_degenerate_data_can_be_shown(
    tmp_path: Path,
    case: Callable[[Path], dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text(make_experiment(case, tmp_path / "data", "mp-fedcl").to_toml())
    with pytest.raises(SystemExit) as end:
        main(["run", str(file), "--out", str(tmp_path / "run"), "--predictors", "all"])
    said = capsys.readouterr()
    # Nothing can be learned from equal images.
    failure = describe_failure(tmp_path / "run")
    told = f"{failure}\n" if failure else ""
    assert (end.value.code, without_progress(said.err)) == (0, told)
    assert "mean over " in said.out
    assert (tmp_path / "run" / "partition.png").exists()


def test_accuracy_with_one_class_is_100(tmp_path: Path) -> None:
    run(make_experiment(one_class_in_all, tmp_path / "data", "mp-fedcl"), tmp_path / "run")
    predictors = read_summary(tmp_path / "run")["predictors"]
    # Of everybody's images nobody estimates a prior.
    assert predictors["global_test"].pop("global_classifier_estimated") is None
    assert {value for test in predictors.values() for value in test.values()} == {100.0}


def test_prototypes_of_identical_images_are_not_repeated(tmp_path: Path) -> None:
    run(make_experiment(identical_images, tmp_path / "data", "mp-fedcl"), tmp_path / "run")
    pool = load_file(tmp_path / "run" / "pool.safetensors")
    held = list(zip(pool["owners"].tolist(), pool["labels"].tolist(), strict=True))
    # A product of matrices may round equal rows differently, by where they stand: some processors'
    # do. Embeddings that differ so are two points, next to each other.
    for place in set(held):
        own = pool["vectors"][[each == place for each in held]]
        assert len(own) == 1 or float((own - own[0]).norm(dim=1).max()) < 1e-5


def test_client_without_test_samples_is_left_out_of_the_mean(tmp_path: Path) -> None:
    run(make_experiment(a_client_without_tests, tmp_path / "data", "local"), tmp_path / "run")
    partition = json.loads((tmp_path / "run" / "partition.json").read_text())["clients"]
    each = read_summary(tmp_path / "run")["accuracy_per_client"]
    untested = {name for name, client in partition.items() if client["test"] == 0}
    assert untested
    assert {name for name, value in each.items() if value is None} == untested
    known = [value for value in each.values() if value is not None]
    assert read_summary(tmp_path / "run")["accuracy"] == pytest.approx(sum(known) / len(known))
