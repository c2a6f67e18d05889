"""A client's own machine: what a server may ask of it, and what not."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from federations import LoopbackFederation, float64_experiment, folder_experiment, save_pictures
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from safetensors.torch import load_file

from mpfedcl import run
from mpfedcl.core.errors import InvalidInput, RunCutShort
from mpfedcl.experiment import Experiment
from mpfedcl.network.client.client import ClientRefusal, ClientSettings, NetworkClient
from mpfedcl.network.flower.records import from_records, to_records
from mpfedcl.network.message import FORMAT, Message, MessageError
from mpfedcl.network.packing import Introduction, pack_experiment

pytestmark = pytest.mark.usefixtures("quick_network")


def hello(experiment: Experiment, **changes: Any) -> Message:
    return Message({"format": FORMAT, "experiment": experiment.to_toml(), **changes})


@pytest.fixture
def client(tmp_path: Path) -> NetworkClient:
    data = save_pictures(tmp_path / "local_test", "cat", "dog")
    return NetworkClient(ClientSettings("north", tmp_path / "memory", data))


@pytest.mark.parametrize("allowed", ["", "other:Method custom_method:Scaffold"])
def test_code_of_ones_own_is_imported_only_where_allowed(
    images: Path, tmp_path: Path, allowed: str
) -> None:
    experiment = float64_experiment(
        images, "custom_method:Scaffold", rounds=1, network__patience=0.1
    )
    federation = LoopbackFederation(experiment, tmp_path, methods=allowed)
    if allowed:
        assert federation.serve().summary is not None
    else:
        with pytest.raises(RunCutShort, match="this client only imports those it was started"):
            federation.serve()


@pytest.mark.parametrize("name", ["os:system", "mpfedcl.methods.fedavg:FedAvg", ":", "a.b:c"])
def test_no_other_way_of_naming_code(client: NetworkClient, name: str) -> None:
    with pytest.raises(ClientRefusal, match="this client only imports those"):
        client.answer("hello", hello(folder_experiment().replace(method=name)))


def test_the_settings_of_a_class_are_checked_where_it_is_allowed(
    tmp_path: Path, client: NetworkClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = "pull_method:Pull"
    # This process has not seen the class: the section is a table of whatever was sent.
    monkeypatch.setattr("mpfedcl.experiment.method_settings._declared", {})
    asked = folder_experiment().replace(method=method, pull={"beta": -1})
    with pytest.raises(ClientRefusal, match="this client only imports those"):
        client.answer("hello", hello(asked))
    settings = ClientSettings(
        "north", tmp_path / "memory", tmp_path / "local_test", methods=(method,)
    )
    allowing = NetworkClient(settings)
    with pytest.raises(ClientRefusal, match=r"pull\.beta is -1; it must be greater than"):
        allowing.answer("hello", hello(asked))
    sound = folder_experiment().replace(method=method, pull={"beta": 2})
    assert Introduction.from_message(allowing.answer("hello", hello(sound))).name == "north"


def test_folders_and_files_that_a_server_names_are_never_used(
    tmp_path: Path, client: NetworkClient
) -> None:
    theirs = save_pictures(tmp_path / "theirs", "secret", "other")
    asked = folder_experiment().replace(
        dataset__root=theirs, encoder__weights=tmp_path / "theirs.safetensors", device="cuda"
    )
    told = Introduction.from_message(client.answer("hello", hello(asked)))
    assert told == Introduction("north", ("cat", "dog"), (3, 3), 6, 36, "", own_data=True)


@pytest.mark.parametrize("name", ["onnx:/etc/passwd", "onnx:x", "torchvision-x:/tmp/x", "x:y"])
def test_nor_is_an_encoder_that_is_a_file(client: NetworkClient, name: str) -> None:
    with pytest.raises(ClientRefusal, match="the client must say where that file is"):
        client.answer("hello", hello(folder_experiment().replace(encoder__name=name)))


def test_domains_that_a_server_names_are_no_paths(tmp_path: Path) -> None:
    root = tmp_path / "root"
    save_pictures(root / "inside", "cat", "dog")
    save_pictures(tmp_path / "outside", "cat", "dog")
    client = NetworkClient(ClientSettings("north", tmp_path / "memory", root, share=0))
    asked = folder_experiment(clients=1).replace(dataset__domains=("../outside",))
    with pytest.raises(ClientRefusal, match="its own log says why"):
        client.answer("hello", hello(asked))


def test_the_server_keeps_its_own_places_to_itself(tmp_path: Path) -> None:
    experiment = Experiment().replace(
        dataset__root=tmp_path,
        encoder__weights=tmp_path / "w",
        encoder__name=f"onnx:{tmp_path}/e",
        track_to=tmp_path,
    )
    sent = pack_experiment(experiment)
    assert str(tmp_path) not in sent
    assert 'name = "onnx:e"' in sent


def test_a_newer_server(client: NetworkClient) -> None:
    with pytest.raises(ClientRefusal, match="the server is of a newer version"):
        client.answer("hello", hello(folder_experiment(), format=FORMAT + 1))


def test_an_older_server_is_understood_well_enough_to_say_so(client: NetworkClient) -> None:
    """Introductions have no arrays, so that they are read whatever arrays are sent as."""
    asked = hello(folder_experiment(), format=3)
    records = RecordDict({"values": ConfigRecord({"json": json.dumps(asked.values)})})
    records["arrays"] = ArrayRecord({})
    assert dict(to_records(asked).array_records["arrays"]) == {}
    with pytest.raises(ClientRefusal, match="client is of a newer version; the server must be"):
        client.answer("hello", from_records(records))


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ("rounds = 0", "the server's experiment: rounds is 0; it must be"),
        ("rounds = ", "is not valid TOML"),
        ("unknown = 1", "unknown is not a setting"),
    ],
)
def test_an_experiment_that_is_none(client: NetworkClient, document: str, reason: str) -> None:
    with pytest.raises(ClientRefusal, match=reason):
        client.answer("hello", Message({"format": FORMAT, "experiment": document}))


def test_what_is_missing_in_a_message(client: NetworkClient) -> None:
    with pytest.raises(MessageError, match="format is None; it must be of type int"):
        client.answer("hello", Message({}))
    with pytest.raises(MessageError, match="experiment is 5; it must be of type str"):
        client.answer("hello", Message({"format": FORMAT, "experiment": 5}))
    known = folder_experiment().replace(dataset__classes=("cat", "dog"))
    known = known.resolved()
    with pytest.raises(MessageError, match="the pool cannot be read"):
        client.answer("round", hello(known))


def test_a_run_id_is_no_path(client: NetworkClient, tmp_path: Path) -> None:
    known = folder_experiment("fedavg").replace(dataset__classes=("cat", "dog")).resolved()
    pool = {
        "pool/vectors": numpy.zeros((0, 12)),
        **{f"pool/{name}": numpy.zeros(0, dtype="i8") for name in ("labels", "counts", "owners")},
    }
    asked = {"run": "../../x", "round": 1, "names": [], "settled": 0, "read": False}
    with pytest.raises(MessageError, match=r"run is '.*x'; it must be 32 hexadecimal digits"):
        client.answer("round", Message({**hello(known).values, **asked}, pool))
    assert not (tmp_path / "memory").exists()


def test_images_are_loaded_once_a_run(client: NetworkClient, tmp_path: Path) -> None:
    asked = hello(folder_experiment())
    client.answer("hello", asked)
    first = client.loaded
    save_pictures(tmp_path / "local_test", "cat", count=20)
    told = Introduction.from_message(client.answer("hello", asked))
    assert client.loaded is not first
    # A new run: images that have come since count.
    assert told.train == (10, 3)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"name": "a"}, "data is not set; a client needs a folder with its images"),
        ({"data": "x"}, "the name is ''; it must be printable text"),
        ({"name": "../a", "data": "x"}, "the name is '../a'; it must be printable text"),
        ({"name": "a", "share": "one"}, "share is 'one'; it must be a whole number"),
        ({"name": "a", "share": -1}, "share is -1; it must be a whole number"),
        ({"name": "a", "share": 0, "min-cluster-size": "x"}, "min-cluster-size is 'x'; it must"),
    ],
)
def test_settings_that_cannot_be(values: dict[str, Any], reason: str) -> None:
    with pytest.raises((InvalidInput, MessageError), match=reason):
        ClientSettings.parse(values)


def test_settings_by_flowers_own_habits() -> None:
    settings = ClientSettings.parse({"partition-id": 3, "num-partitions": 5})
    assert (settings.name, settings.share, settings.data) == ("client-3", 3, None)
    assert settings.state.name == "client-3"


def test_a_share_that_there_is_not(images: Path, tmp_path: Path) -> None:
    client = NetworkClient(ClientSettings("a", tmp_path, images, share=3))
    with pytest.raises(ClientRefusal, match=r"share is 3; .* so it must be from 0 to 2"):
        client.answer("hello", hello(float64_experiment(images)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"workers": 2}, "workers is 2; over a network it must be 1"),
    ],
)
def test_experiments_that_cannot_run_over_a_network(
    images: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    federation = LoopbackFederation(float64_experiment(images).replace(**changes), tmp_path)
    with pytest.raises(InvalidInput, match=reason):
        federation.serve()
    # Before anybody is asked, and before there is a folder.
    assert federation.grid.requests == []
    assert not federation.path.exists()


def test_single_precision_equals_the_simulation_too(images: Path, tmp_path: Path) -> None:
    experiment = float64_experiment(images, "fedavg", rounds=1, dtype="float32")
    found = LoopbackFederation(experiment, tmp_path).serve().path
    wanted = run(experiment, tmp_path / "simulation").path
    ours, theirs = (load_file(each / "model.safetensors") for each in (found, wanted))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-7)
