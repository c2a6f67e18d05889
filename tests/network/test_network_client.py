"""A client on its own machine: settings, refusals, and its state on disk."""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import pytest
import torch
from federations import LoopbackFederation, float64_experiment, folder_experiment, save_pictures
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from mpfedcl import run
from mpfedcl.core.errors import InvalidInput, RunCutShort
from mpfedcl.experiment import Experiment
from mpfedcl.network.client import ClientRefusal
from mpfedcl.network.client.client import NetworkClient
from mpfedcl.network.client.policy import BUILT_IN, ClientPolicy
from mpfedcl.network.client.state import ClientStateStore
from mpfedcl.network.flower.records import to_records
from mpfedcl.network.packing import Introduction
from mpfedcl.network.setup.folders import ClientSettings
from mpfedcl.network.transport import FORMAT, Message, MessageError
from mpfedcl.runs.plan import plan
from opened_records import from_records

RUN = "0123456789abcdef" * 2
pytestmark = pytest.mark.usefixtures("quick_network")


def hello(experiment: Experiment, **changes: Any) -> Message:
    return Message({"format": FORMAT, "experiment": experiment.to_toml(), **changes})


@pytest.fixture
def client(tmp_path: Path) -> NetworkClient:
    data = save_pictures(tmp_path / "local_test", "cat", "dog")
    return NetworkClient(ClientSettings("north", tmp_path / "memory", data))


@pytest.mark.parametrize("allowed", ["", "other:Method custom_method:Scaffold"])
def test_custom_method_is_imported_only_if_allowed(
    images: Path, tmp_path: Path, allowed: str
) -> None:
    experiment = float64_experiment(
        images, "custom_method:Scaffold", rounds=1, network__patience=0.1
    )
    federation = LoopbackFederation(experiment, tmp_path, methods=allowed)
    if allowed:
        assert federation.serve().summary is not None
    else:
        with pytest.raises(RunCutShort, match="methods is built-in; the server asked for"):
            federation.serve()


@pytest.mark.parametrize("name", ["os:system", "mpfedcl.methods.fedavg:FedAvg", ":", "a.b:c"])
def test_other_code_names_are_rejected(client: NetworkClient, name: str) -> None:
    with pytest.raises(ClientRefusal, match="methods is built-in; the server asked for"):
        client.answer("hello", hello(folder_experiment().replace(method=name)))


@pytest.mark.parametrize("name", ["os:getcwd", "given:abc", ":"])
def test_no_function_of_data_is_called_for_a_server(client: NetworkClient, name: str) -> None:
    asked = folder_experiment().replace(dataset__name=name)
    with pytest.raises(ClientRefusal, match="a client imports no function that a server names"):
        client.answer("hello", hello(asked))
    with pytest.raises(InvalidInput, match="over a network it must be a named set"):
        plan(asked, over_network=True)


def test_settings_of_an_allowed_custom_method_are_checked(
    tmp_path: Path, client: NetworkClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = "pull_method:Pull"
    # This process has not seen the class: the section is a table of whatever was sent.
    monkeypatch.setattr("mpfedcl.experiment.method_settings._declared", {})
    asked = folder_experiment().replace(method=method, pull={"beta": -1})
    with pytest.raises(ClientRefusal, match="methods is built-in; the server asked for"):
        client.answer("hello", hello(asked))
    settings = ClientSettings(
        "north",
        tmp_path / "memory",
        tmp_path / "local_test",
        policy=ClientPolicy(allow={"methods": (method, BUILT_IN)}),
    )
    allowing = NetworkClient(settings)
    with pytest.raises(ClientRefusal, match=r"pull\.beta is -1; it must be greater than"):
        allowing.answer("hello", hello(asked))
    sound = folder_experiment().replace(method=method, pull={"beta": 2})
    told = Introduction.from_message("north", allowing.answer("hello", hello(sound)))
    assert sum(told.train) + told.test == 12


def test_paths_from_the_server_are_ignored(tmp_path: Path, client: NetworkClient) -> None:
    theirs = save_pictures(tmp_path / "theirs", "secret", "other")
    asked = folder_experiment().replace(
        dataset__root=theirs, encoder__weights=tmp_path / "theirs.safetensors", device="cuda"
    )
    told = Introduction.from_message("north", client.answer("hello", hello(asked)))
    assert sum(told.train) + told.test == 12
    wanted = Introduction(
        "north", ("cat", "dog"), told.train, told.test, 36, "", "images", (6, 6), own_data=True
    )
    assert told == replace(wanted, embedding_size=12)


@pytest.mark.parametrize("name", ["onnx:/etc/passwd", "onnx:x", "torchvision-x:/tmp/x", "x:y"])
@pytest.mark.parametrize("own", [None, ""])
def test_server_cannot_name_an_encoder_file(tmp_path: Path, name: str, own: str | None) -> None:
    data = save_pictures(tmp_path / "local_test", "cat", "dog")
    client = NetworkClient(ClientSettings("north", tmp_path / "memory", data, encoder=own))
    with pytest.raises(ClientRefusal, match="the client must give the path of that file"):
        client.answer("hello", hello(folder_experiment().replace(encoder__name=name)))


def test_settings_file_of_another_version_is_rejected_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('name = "north"\nmemory = "old"\n')
    with pytest.raises(InvalidInput, match="state: Field required"):
        ClientSettings.read(file)


def test_domain_names_from_server_are_not_paths(tmp_path: Path) -> None:
    root = tmp_path / "root"
    save_pictures(root / "inside", "cat", "dog")
    save_pictures(tmp_path / "outside", "cat", "dog")
    client = NetworkClient(ClientSettings("north", tmp_path / "memory", root, share=0))
    asked = folder_experiment(clients=1).replace(dataset__domains=("../outside",))
    with pytest.raises(ClientRefusal, match="its own log contains the reason"):
        client.answer("hello", hello(asked))


def test_newer_server_is_refused(client: NetworkClient) -> None:
    with pytest.raises(ClientRefusal, match="the server is of a newer version"):
        client.answer("hello", hello(folder_experiment(), format=FORMAT + 1))


def test_older_server_gets_a_message_about_its_version(client: NetworkClient) -> None:
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
def test_invalid_experiment_is_rejected(client: NetworkClient, document: str, reason: str) -> None:
    with pytest.raises(ClientRefusal, match=reason):
        client.answer("hello", Message({"format": FORMAT, "experiment": document}))


def test_malformed_requests_are_rejected(client: NetworkClient) -> None:
    with pytest.raises(MessageError, match="format is None; it must be of type int"):
        client.answer("hello", Message({}))
    with pytest.raises(MessageError, match="experiment is 5; it must be of type str"):
        client.answer("hello", Message({"format": FORMAT, "experiment": 5}))
    known = folder_experiment().replace(dataset__classes=("cat", "dog"))
    known = known.resolved()
    with pytest.raises(MessageError, match="the pool cannot be read"):
        client.answer("round", hello(known, run=RUN, round=1))


def test_run_id_cannot_be_a_path(client: NetworkClient, tmp_path: Path) -> None:
    known = folder_experiment("fedavg").replace(dataset__classes=("cat", "dog")).resolved()
    pool = {
        "pool/vectors": numpy.zeros((0, 12)),
        **{f"pool/{name}": numpy.zeros(0, dtype="i8") for name in ("labels", "counts", "owners")},
    }
    asked = {"run": "../../x", "round": 1, "names": [], "settled": 0, "read": False}
    with pytest.raises(MessageError, match=r"run is '.*x'; it must be 32 hexadecimal digits"):
        client.answer("round", Message({**hello(known).values, **asked}, pool))
    assert not (tmp_path / "memory").exists()


def test_data_is_loaded_once_per_run(client: NetworkClient, tmp_path: Path) -> None:
    asked = hello(folder_experiment())
    client.answer("hello", asked)
    first = client.loaded
    save_pictures(tmp_path / "local_test", "cat", count=20)
    told = Introduction.from_message("north", client.answer("hello", asked))
    assert client.loaded is not first
    # A new run: images that have come since count.
    assert sum(told.train) + told.test == 26


def test_share_out_of_range_is_rejected(images: Path, tmp_path: Path) -> None:
    client = NetworkClient(ClientSettings("a", tmp_path, images, share=3))
    with pytest.raises(ClientRefusal, match=r"share is 3; it must be from 0 to 2"):
        client.answer("hello", hello(float64_experiment(images)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"workers": 2}, "workers is 2; over a network it must be 1"),
        ({"metric": "math:sqrt"}, "metric is 'math:sqrt'; over a network it must be one of acc"),
    ],
)
def test_experiments_that_cannot_run_over_a_network_are_rejected(
    images: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    federation = LoopbackFederation(float64_experiment(images).replace(**changes), tmp_path)
    with pytest.raises(InvalidInput, match=reason):
        federation.serve()
    # Before any client is asked, and before a folder is created.
    assert federation.grid.requests == []
    assert not federation.path.exists()


def test_single_precision_equals_simulation(images: Path, tmp_path: Path) -> None:
    experiment = float64_experiment(images, "fedavg", rounds=1, dtype="float32")
    found = LoopbackFederation(experiment, tmp_path).serve().path
    wanted = run(experiment, tmp_path / "simulation").path
    ours, theirs = (load_file(each / "model.safetensors") for each in (found, wanted))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-7)


CPU = torch.device("cpu")


def mark(number: int) -> dict[str, torch.Tensor]:
    return {"personal/x": torch.tensor([float(number)])}


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / RUN).iterdir())


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 3)), min_size=1, max_size=12)
)
def test_accepted_round_survives_any_sequence(
    history: list[tuple[bool, bool, int]],
) -> None:
    """Rounds may be skipped or rejected, and the server may lose its newest checkpoint."""
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


def test_many_rejected_rounds_keep_the_accepted_state(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path, RUN)
    store.save(1, mark(1), after=0)
    for number in range(2, 9):
        store.save(number, mark(number), after=1)
    assert float(store.load(1, CPU)["personal/x"]) == 1
    assert kept(tmp_path) == [
        "round-000001-after-000000.safetensors",
        "round-000008-after-000001.safetensors",
    ]


def test_state_of_a_round_can_be_replaced(tmp_path: Path) -> None:
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


def test_states_of_a_restarted_run_replace_the_old_ones(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path, RUN)
    for number in range(1, 6):
        store.save(number, mark(number), after=number - 1)
    store.save(1, mark(100), after=0)
    store.save(2, mark(200), after=1)
    assert float(store.load(1, CPU)["personal/x"]) == 100
    assert float(store.load(2, CPU)["personal/x"]) == 200


def test_damaged_or_missing_state_is_empty(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path, RUN)
    assert store.load(0, CPU) == store.load(7, CPU) == {}
    store.save(1, mark(1), after=0)
    (path,) = (tmp_path / RUN).iterdir()
    path.write_bytes(path.read_bytes()[:20])
    assert store.load(1, CPU) == {}
    assert store.load(-1, CPU) == {}


def test_state_folder_is_private(tmp_path: Path) -> None:
    ClientStateStore(tmp_path, RUN).save(1, mark(1), after=0)
    assert (tmp_path / RUN).stat().st_mode & 0o777 == 0o700


def test_state_of_old_runs_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "something-else").mkdir()
    for number in range(12):
        ClientStateStore(tmp_path, f"{number:032x}").save(1, mark(1), after=0)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"{number:032x}" for number in range(4, 12)] + ["something-else"]


@pytest.mark.parametrize("run", ["", "x", RUN.upper(), RUN[:-1], RUN + "0", f"../{RUN[3:]}", "/"])
def test_run_id_is_hexadecimal(tmp_path: Path, run: str) -> None:
    with pytest.raises(MessageError, match="it must be 32 hexadecimal digits"):
        ClientStateStore(tmp_path, run)
