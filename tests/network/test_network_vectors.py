"""Vectors over a network: clients with files of their own, and those that do not fit."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from federations import LoopbackFederation, float64_experiment, folder_experiment, save_pictures
from safetensors.torch import load_file
from small_experiments import METHODS, read_records, save_vectors

from mpfedcl import Predictor, run
from mpfedcl.core.errors import RunCutShort
from mpfedcl.data.samples import VectorFormat
from mpfedcl.inference.membership import join
from mpfedcl.network.message import Message, MessageError
from mpfedcl.network.packing import Introduction

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("quick_network")]

Json = dict[str, Any]


def federate(folder: Path, *widths: int, **changes: Any) -> LoopbackFederation:
    """Let clients come with vectors of these widths, the first from a folder, others with files."""
    settings = {"encoder__name": None, "clients": len(widths), **changes}
    federation = LoopbackFederation(folder_experiment(**settings), folder, count=0)
    for number, width in enumerate(widths):
        file = folder / f"site-{number}" / "v.npz"
        save_vectors(file, width=width)
        federation.bring(number + 1, f"client-{number}", file if number else file.parent)
    return federation


def read(path: Path, name: str) -> Json:
    content: Json = json.loads((path / name).read_text())
    return content


def test_clients_with_vectors_need_no_encoder(tmp_path: Path) -> None:
    federation = federate(tmp_path, 5, 5)
    result = federation.serve()
    assert result.experiment.encoder.name == "none"
    assert read_records(federation.path)[1]["clients"]["answered"] == ["client-0", "client-1"]
    form = read(federation.path, "federation.json")
    assert (form["input_size"], form["encoder"], form["samples"]) == (5, "", "vectors")
    assert read(federation.path, "partition.json")["input_shape"] == [5]
    resumed = federation.resume(rounds=3)
    assert len(resumed.history) == 3


def test_the_servers_own_data_set_does_not_matter(tmp_path: Path) -> None:
    """What the experiment says of digits is not for clients with data of their own."""
    changes = {
        "dataset__name": "mnist-sample",
        "partition__min_size": None,
        "model__hidden": (),
    }
    federation = federate(tmp_path, 5, 5, **changes)
    model = federation.serve().path / "model.safetensors"
    assert load_file(model)["hidden.0.weight"].shape == (256, 5)


def test_the_run_is_used_as_any_other(tmp_path: Path) -> None:
    federation = federate(tmp_path, 5, 5)
    federation.serve()
    predictor = Predictor.load(federation.path)
    assert predictor.trained.input_format == VectorFormat(5, "float64")
    assert len(predictor.predict(numpy.eye(5))) == 5
    assert join(federation.path, tmp_path / "site-0" / "v.npz", "late").noun == "vector"
    assert "own vectors" in (federation.path / "CARD.md").read_text(encoding="utf-8")


def test_one_of_another_width_is_refused_with_the_reason(tmp_path: Path) -> None:
    federation = federate(tmp_path, 5, 4, 5, min_clients=2)
    result = federation.serve()
    assert result.history[0]["clients"]["answered"] == ["client-0", "client-2"]
    alone = federate(tmp_path / "alone", 5, 4, min_clients=2)
    reason = "client-1: its inputs have 4 numbers, the others' 5: vectors must be of one width"
    with pytest.raises(RunCutShort, match=reason):
        alone.serve()


@pytest.mark.usefixtures("own_places")
@pytest.mark.parametrize("encoder", ["none", "random-resnet18"])
def test_images_and_vectors_do_not_go_together(tmp_path: Path, encoder: str) -> None:
    federation = federate(tmp_path, 36, 36, clients=3, min_clients=3, encoder__name="none")
    federation.bring(3, "pictures", save_pictures(tmp_path / "pictures", "0", "1", "2", count=4))
    if encoder != "none":
        federation.experiment = federation.experiment.replace(encoder__name=encoder)
    with pytest.raises(RunCutShort) as caught:
        federation.serve()
    refused = {
        "none": "pictures: it has images, the others vectors",
        "random-resnet18": "client-0: it has vectors, but encoder.name is 'random-resnet18', and",
    }
    assert refused[encoder] in str(caught.value)


def test_an_encoder_of_its_own_is_refused_by_the_client(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    federation = LoopbackFederation(folder_experiment(clients=1), tmp_path, count=0)
    save_vectors(tmp_path / "v.npz")
    federation.bring(1, "odd", tmp_path / "v.npz", encoder="random-resnet18")
    with pytest.raises(RunCutShort, match="it cannot use its data or its encoder"):
        federation.serve()
    assert "encoder.name is 'random-resnet18', but the samples are vectors" in capfd.readouterr()[1]


@pytest.mark.parametrize("method", METHODS)
def test_shares_of_a_set_of_vectors_give_what_a_simulation_gives(
    vectors: Path, tmp_path: Path, method: str
) -> None:
    experiment = float64_experiment(vectors, method, rounds=2, clients=3, encoder__name=None)
    federation = LoopbackFederation(experiment, tmp_path)
    ours = federation.serve()
    theirs = run(experiment, tmp_path / "simulated")
    assert ours.accuracy == theirs.accuracy
    for left, right in zip(ours.history, theirs.history, strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-9)


def test_a_client_of_the_first_version_has_images() -> None:
    said = Introduction("a", ("x",), (1,), 0, 9, "").to_message()
    old = Message({name: value for name, value in said.values.items() if name != "samples"})
    assert Introduction.from_message(old).samples == "images"


@pytest.mark.parametrize("own_data", ["yes", 1, None])
def test_refuses_data_that_are_its_own_in_other_words(own_data: object) -> None:
    said = Introduction("a", ("x",), (1,), 0, 9, "", own_data=True).to_message()
    assert Introduction.from_message(said).own_data
    with pytest.raises(MessageError, match=r"own_data is .*; it must be true or false"):
        Introduction.from_message(Message({**said.values, "own_data": own_data}))


@pytest.mark.parametrize("samples", ["sounds", 3, None, ["images"]])
def test_refuses_samples_of_another_kind(samples: object) -> None:
    said = Introduction("a", ("x",), (1,), 0, 9, "").to_message()
    with pytest.raises(MessageError, match="it must be images or vectors"):
        Introduction.from_message(Message({**said.values, "samples": samples}))
