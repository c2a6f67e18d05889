"""The prototype map: principal components of the pool."""

import json
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from sklearn.decomposition import PCA

from mpfedcl import resume, run
from mpfedcl.experiment import Experiment
from mpfedcl.report.prototype_map import describe_prototype_map, project_to_plane
from mpfedcl.runs.observer import Observer
from small_experiments import small

pytestmark = pytest.mark.whole

Json = dict[str, object]


def map_of(path: Path) -> dict[str, object]:
    experiment = Experiment.from_toml(path / "experiment.toml")
    partition = json.loads((path / "partition.json").read_text())
    return describe_prototype_map(path, experiment, partition["classes"])


@given(st.integers(0, 10_000), st.integers(3, 40), st.integers(2, 12))
def test_the_plane_is_that_of_scikit_learn(seed: int, count: int, size: int) -> None:
    vectors = numpy.random.default_rng(seed).normal(size=(count, size)) * numpy.arange(1, size + 1)
    places, shares = project_to_plane(vectors)
    expected = PCA(2, svd_solver="full").fit(vectors)
    assert shares == pytest.approx(expected.explained_variance_ratio_.tolist())
    # The sign of a direction is free if the variances differ.
    if min(abs(numpy.diff(expected.explained_variance_ratio_))) > 1e-3:
        theirs = expected.transform(vectors)
        assert numpy.allclose(numpy.abs(places), numpy.abs(theirs), atol=1e-6)


def test_the_sign_is_fixed() -> None:
    vectors = numpy.random.default_rng(0).normal(size=(20, 5))
    assert numpy.allclose(project_to_plane(vectors)[0], -project_to_plane(-vectors)[0])


@pytest.mark.parametrize("count", [1, 2])
def test_few_points_have_a_place(count: int) -> None:
    places, shares = project_to_plane(numpy.ones((count, 3)))
    assert places.tolist() == [[0.0, 0.0]] * count
    assert shares == [0.0, 0.0]


def test_each_prototype_is_shown(images: Path, tmp_path: Path) -> None:
    run(small(images), tmp_path / "run")
    found = map_of(tmp_path / "run")
    pool = load_file(tmp_path / "run" / "pool.safetensors")
    assert found["class"] == pool["labels"].tolist()
    assert found["count"] == pool["counts"].tolist()
    assert found["total"] == len(pool["labels"])
    assert map_of(tmp_path / "run") == found


def test_the_pool_of_an_earlier_end_is_not_shown(images: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(small(images), path)
    assert "count" in map_of(path)
    rounds: list[object] = []
    resume(path, 5, Observer(on_round=rounds.append, should_stop=lambda: bool(rounds)))
    assert (path / "pool.safetensors").is_file()
    said = map_of(path)["missing"]
    assert "has not ended; the pool in its folder may be from before it was resumed" in str(said)
    resume(path)
    assert "count" in map_of(path)


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_without_a_pool_there_is_no_map(images: Path, tmp_path: Path, method: str) -> None:
    run(small(images, method), tmp_path / "run")
    assert map_of(tmp_path / "run") == {
        "missing": f"{method} shares no prototypes, so there is no map."
    }
