"""Thresholds for unknown images: the guarantee they give, and what runs leave."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpfedcl import resume, run
from mpfedcl.data.loading import load_data_and_model
from mpfedcl.inference.calibration import FALSE_ALARM_RATES, find_sharpness, find_thresholds
from mpfedcl.inference.trained_run import load_trained_run
from mpfedcl.methods import prototype_rule
from mpfedcl.runs.observer import Observer
from small_experiments import small
from worker_processes import run_together

pytestmark = pytest.mark.whole


def calibration_of(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((path / "calibration.json").read_text())
    return content


def test_thresholds_in_closed_form() -> None:
    # 19 images: the 19th of 20 parts is all that 5 % leaves, and 1 % cannot be told at all.
    assert find_thresholds(torch.arange(19).double()) == {"0.05": 18.0, "0.1": 17.0, "0.2": 15.0}
    assert find_thresholds(torch.arange(99).double())["0.01"] == 98.0
    assert find_thresholds(torch.arange(1000).double())["0.05"] == 950.0
    assert find_thresholds(torch.zeros(0).double()) == {}


@pytest.mark.parametrize("factor", [0.25, 1.0, 3.0])
def test_sharpness_undoes_a_factor_of_the_scores(factor: float) -> None:
    """Three images in four are of the likelier class, so its score must lead by log 3."""
    lead = torch.tensor([[torch.log(torch.tensor(3.0)), 0.0]]).double().expand(400, 2)
    truth = (torch.arange(400) % 4 == 0).long()
    assert find_sharpness(lead / factor, truth) == pytest.approx(factor, rel=1e-3)


@given(st.lists(st.floats(0, 2), min_size=2, max_size=120))
def test_false_alarm_rate_holds_on_exchangeable_distances(values: list[float]) -> None:
    """Each in turn is the new image: over all of them at most a share α is flagged."""
    alarms = dict.fromkeys(FALSE_ALARM_RATES, 0)
    for place, value in enumerate(values):
        others = torch.tensor(values[:place] + values[place + 1 :], dtype=torch.float64)
        for rate, threshold in find_thresholds(others).items():
            alarms[float(rate)] += value > threshold
    assert all(count <= rate * len(values) + 1e-9 for rate, count in alarms.items())


@pytest.mark.parametrize("method", ["mp-fedcl", "fedproto"])
def test_thresholds_are_quantiles_of_the_test_images(
    images: Path, tmp_path: Path, method: str
) -> None:
    path = run(small(images, method, partition__test="matched"), tmp_path / "run").path
    trained, found = load_trained_run(path), calibration_of(path)
    data, model = load_data_and_model(trained.experiment, torch.device("cpu"))
    assert trained.reference is not None
    prototypes = trained.reference.vectors.double().numpy()

    def quantile(client: str | None, rows: torch.Tensor) -> float:
        embeddings, _ = model.apply(trained.parameters(client), data.test_inputs[rows])
        points = prototype_rule(trained.method).project(embeddings).double().numpy()
        gaps = numpy.linalg.norm(points[:, None] - prototypes[None], axis=2).min(axis=1)
        return float(numpy.sort(gaps)[int(numpy.ceil((len(gaps) + 1) * 0.8)) - 1])

    if method == "mp-fedcl":
        everything = torch.arange(len(data.test_labels))
        assert found["global"]["images"] == len(everything)
        assert found["global"]["thresholds"]["0.2"] == pytest.approx(
            quantile(None, everything), rel=1e-5
        )
    else:
        assert found["global"] is None
    for client in data.clients:
        told = found["clients"][client.name]
        assert told["images"] == len(client.test)
        assert told["thresholds"]["0.2"] == pytest.approx(
            quantile(client.name, client.test), rel=1e-5
        )


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_methods_without_prototypes_have_prediction_sets_only(
    images: Path, tmp_path: Path, method: str
) -> None:
    found = calibration_of(run(small(images, method), tmp_path / "run").path)
    measured = [each for each in (found["global"], *found["clients"].values()) if each]
    assert len(measured) == (4 if method == "fedavg" else 3)
    assert all(each.keys() == {"images", "sets"} for each in measured)


def test_only_kept_personal_models_are_calibrated(images: Path, tmp_path: Path) -> None:
    path = run(small(images, fraction=0.4), tmp_path / "sampled").path
    kept = {file.stem for file in (path / "models").iterdir()}
    assert set(calibration_of(path)["clients"]) == kept
    path = run(small(images, personal_models=False), tmp_path / "none").path
    assert calibration_of(path)["clients"] == {}
    assert calibration_of(path)["global"]["images"] == 30


def test_resumed_run_has_the_same_calibration(images: Path, tmp_path: Path) -> None:
    whole = run(small(images), tmp_path / "whole").path
    rounds: list[object] = []
    observer = Observer(on_round=rounds.append, should_stop=lambda: bool(rounds))
    parts = run(small(images), tmp_path / "parts", observer).path
    assert not (parts / "calibration.json").exists()
    resume(parts)
    assert calibration_of(parts) == calibration_of(whole)


@pytest.mark.usefixtures("small_model")
def test_workers_have_the_same_calibration_but_for_rounding(images: Path, tmp_path: Path) -> None:
    experiment = small(images, dtype="float64")
    alone = calibration_of(run(experiment, tmp_path / "alone").path)
    (tmp_path / "settings.toml").write_text(experiment.to_toml())
    run_together(["run", "settings.toml", "--out", "together"], tmp_path, 2, small_model=True)
    together = calibration_of(tmp_path / "together")
    assert list(alone["clients"]) == list(together["clients"])
    for name, found in alone["clients"].items():
        other = together["clients"][name]
        assert other["images"] == found["images"]
        assert other["thresholds"] == pytest.approx(found["thresholds"], rel=1e-5)
    assert together["global"]["thresholds"] == pytest.approx(alone["global"]["thresholds"])
