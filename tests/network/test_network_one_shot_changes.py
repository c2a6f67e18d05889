"""Joining a finished one-shot run over the network, one client at a time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from federations import LoopbackFederation, folder_experiment, is_training, rewrite
from flwr.app import Message as FlowerMessage
from safetensors.torch import load_file

from equivalent_runs import assert_close_tensors
from mpfedcl.core.errors import InvalidInput, RunCutShort
from mpfedcl.core.tensors import Tensors
from mpfedcl.inference.membership import leave
from mpfedcl.inference.one_shot import update_over_network
from mpfedcl.network.flower.transport import FlowerTransport
from one_shot_runs import assert_same_federation, contents, save_client, story_of

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("quick_network")]

NODES = {"a": 1, "b": 2, "c": 3, "d": 4}


class Sites:
    """Clients with their own vectors: some take part in a run, others join later one by one."""

    def __init__(
        self, folder: Path, clients: Path, method: str, names: str, **changes: Any
    ) -> None:
        experiment = folder_experiment(method, clients=len(names), **changes)
        self.clients = clients
        self.federation = LoopbackFederation(experiment, folder, count=0)
        self.come(*names)
        self.path = self.federation.serve().path

    def come(self, *names: str, **data: Path) -> None:
        """Connect these clients and no others."""
        self.federation.grid.nodes.clear()
        for name in names:
            place = data.get(name, self.clients / f"{name}.npz")
            self.federation.bring(NODES[name], name, place)

    def update(self, name: str) -> dict[str, Any]:
        return update_over_network(FlowerTransport(self.federation.grid), self.path, name)

    def own_classifier(self, name: str) -> Tensors:
        """Return the newest classifier that a client has stored."""
        files = sorted((self.federation.folder / f"memory-{name}").glob("*/round-*.safetensors"))
        kept = load_file(files[-1]).items()
        return {n.removeprefix("personal/"): v for n, v in kept if n.startswith("personal/")}


Start = Callable[..., Sites]


@pytest.fixture
def start(tmp_path: Path, clients: Path) -> Start:
    """Begin a federation of clients, by their names."""
    made: list[Sites] = []

    def begin(names: str, method: str = "fedgauss", **changes: Any) -> Sites:
        made.append(Sites(tmp_path / str(len(made)), clients, method, names, **changes))
        return made[-1]

    return begin


@pytest.mark.parametrize("method", ["fedgauss", "fedlda", "fedncm", "fedridge", "fedcof"])
def test_joining_later_equals_a_run_with_the_client(start: Start, method: str) -> None:
    sites, whole = start("abc", method), start("abcd", method)
    sites.come("d")
    change = sites.update("d")
    assert (change["event"], change["clients"]) == ("joined", ["a", "b", "c", "d"])
    assert_same_federation(sites.path, whole.path)
    # It has received its personal classifier, and the log has the event.
    assert_close_tensors(sites.own_classifier("d"), whole.own_classifier("d"), 1e-10)
    assert story_of(sites.path) == [("joined", "d")]


def test_accuracies_before_and_after_joining(start: Start) -> None:
    sites = start("abc")
    sites.come("d")
    change = sites.update("d")
    assert change["before"] is not None
    assert change["after"] is not None
    whole = start("abcd")
    wanted = json.loads((whole.path / "summary.json").read_text())["accuracy_per_client"]
    assert change["after"] == wanted["d"]


def test_new_samples_replace_all_samples_of_a_client(
    start: Start, clients: Path, tmp_path: Path
) -> None:
    newer = save_client(tmp_path / "newer" / "b.npz", 77, per_class=9)
    sites = start("abc", statistics__keep="clients")
    before = sites.own_classifier("b")
    sites.come("b", b=newer)
    assert sites.update("b")["event"] == "replaced"
    federation = LoopbackFederation(
        folder_experiment("fedgauss", clients=3), tmp_path / "whole", count=0
    )
    for name in "abc":
        place = newer if name == "b" else clients / f"{name}.npz"
        federation.bring(NODES[name], name, place)
    assert_same_federation(sites.path, federation.serve().path)
    # The same samples again change only the log.
    first = contents(sites.path)
    assert sites.update("b")["event"] == "replaced"
    assert_same_federation(sites.path, federation.path)
    assert story_of(sites.path) == [("replaced", "b")] * 2
    assert first.keys() == contents(sites.path).keys()
    assert not all(
        bool((before[name] == value).all()) for name, value in sites.own_classifier("b").items()
    )


def test_client_leaves_without_being_connected(start: Start) -> None:
    sites, without = start("abc", statistics__keep="clients"), start("ac")
    sites.come("d")
    sites.update("d")
    sites.federation.grid.nodes.clear()
    assert leave(sites.path, "d").names == ("a", "b", "c")
    assert leave(sites.path, "b").names == ("a", "c")
    assert_same_federation(sites.path, without.path)
    assert story_of(sites.path) == [("joined", "d"), ("left", "d"), ("left", "b")]


def test_samples_in_a_pooled_run_cannot_be_replaced(start: Start) -> None:
    sites = start("abc", statistics__keep="pooled")
    first = contents(sites.path)
    with pytest.raises(InvalidInput, match="only pooled statistics were kept"):
        sites.update("b")
    assert contents(sites.path) == first
    sites.come("d")
    assert sites.update("d")["event"] == "joined"


def test_statistics_are_validated_as_in_a_run(start: Start) -> None:
    def lie(client: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if not is_training(request):
            return reply
        return rewrite(reply, request, arrays=lambda x: {**x, "summed/sums": 3 * x["summed/sums"]})

    sites = start("abc")
    first = contents(sites.path)
    sites.come("d")
    sites.federation.grid._tamper = lie
    change = sites.update("d")
    assert (change["event"], change["clients"]) == ("rejected", ["a", "b", "c"])
    assert "has the norm" in change["reason"]
    assert contents(sites.path) == first


def test_other_connected_clients_are_not_asked(start: Start) -> None:
    sites = start("abc")
    sites.come("a", "b", "d")
    sites.federation.grid.requests.clear()
    sites.update("d")
    assert {name for name, _ in sites.federation.grid.requests} == {"d"}


def test_absent_or_silent_client_changes_nothing(start: Start) -> None:
    sites = start("abc", network__round_timeout=20.0)
    first = contents(sites.path)
    sites.come("a")
    with pytest.raises(RunCutShort, match=r"^d was not connected after 0.3 s\.$"):
        sites.update("d")
    sites.come("d")
    sites.federation.grid._tamper = lambda _, request, reply: (
        None if is_training(request) else reply
    )
    with pytest.raises(RunCutShort, match=r"^d did not answer: no answer within 20 s\.$"):
        sites.update("d")
    assert contents(sites.path) == first


def test_other_data_are_rejected(start: Start, tmp_path: Path) -> None:
    sites = start("abc")
    sites.come("d", d=save_client(tmp_path / "x" / "d.npz", 5, (0, 1, 2, 3)))
    with pytest.raises(
        RunCutShort, match=r"^d refuses or cannot take part\. d: it cannot use its data"
    ):
        sites.update("d")


def test_other_runs_are_rejected(three: Path, start: Start, tmp_path: Path) -> None:
    transport = FlowerTransport(start("ab").federation.grid)
    with pytest.raises(InvalidInput, match="it must be a run over a network"):
        update_over_network(transport, three, "d")
    with pytest.raises(InvalidInput, match="it must be a folder that holds a run"):
        update_over_network(transport, tmp_path / "nothing", "d")
    with pytest.raises(InvalidInput, match=r"the name is '\.\./d'; it must be"):
        update_over_network(transport, three, "../d")


def test_changed_federation_cannot_be_resumed(start: Start) -> None:
    sites = start("abc")
    sites.come("d")
    sites.update("d")
    first = contents(sites.path)
    sites.come("a", "b", "c")
    with pytest.raises(InvalidInput, match="which clients have joined or left since"):
        sites.federation.resume()
    assert contents(sites.path) == first
