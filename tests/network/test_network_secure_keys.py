"""The keys of clients in secure aggregation: who knows whom again, and what a server cannot put in."""

import json
from pathlib import Path

import pytest
from federations import LoopbackFederation, rewrite
from flwr.app import Message as FlowerMessage
from secure_federations import round_of, secure_experiment, stage_of

from mpfedcl.core.errors import InvalidInput
from mpfedcl.network.client.identity import Identity, KnownClients, fingerprint
from mpfedcl.network.flower.records import from_records
from mpfedcl.network.setup.keys import make_node_key
from mpfedcl.privacy.secure_aggregation import ProtocolError
from mpfedcl.privacy.secure_aggregation.client import SumClient
from mpfedcl.privacy.secure_aggregation.roster import Session
from mpfedcl.privacy.secure_aggregation.signatures import is_signed
from small_experiments import read_records

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("quick_network")]


def with_keys(federation: LoopbackFederation, folder: Path) -> LoopbackFederation:
    """Give each client a key, as `mpfedcl federation init` makes it."""
    for share in range(4):
        key = folder / f"client-{share}.key"
        make_node_key(key, folder / f"client-{share}.pub")
        federation.join(share, key=str(key))
    return federation


@pytest.mark.whole
def test_clients_with_keys_know_each_other_again(images: Path, tmp_path: Path) -> None:
    federation = with_keys(LoopbackFederation(secure_experiment(images), tmp_path), tmp_path)
    federation.serve()
    assert all(len(record["clients"]["answered"]) == 4 for record in read_records(federation.path))
    known = json.loads((federation.state_folder(0) / "known-clients.json").read_text())
    assert known["client-1"] == (tmp_path / "client-1.pub").read_text().strip()
    assert set(known) == {"client-1", "client-2", "client-3"}


@pytest.mark.whole
@pytest.mark.parametrize("is_honest", [True, False])
def test_server_cannot_put_in_its_own_keys(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_honest: bool
) -> None:
    """A server that stands between the clients would read their shares; they stop instead.

    Where it is a client that shows such keys, an honest server leaves that client out.
    """
    if not is_honest:
        monkeypatch.setattr("mpfedcl.network.server.secure_round.find_odd", lambda *_: {})
    stranger = tmp_path / "stranger.key"
    make_node_key(stranger, tmp_path / "stranger.pub")

    def forge(name: str, request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        number = round_of(request)
        if name != "client-1" or stage_of(request) != "advertise" or number not in (2, 3):
            return reply
        session = Session(from_records(request.content).values["run"], number, 0.5)
        advert = SumClient(name, session).advertise()
        # First signed by the right key, as something else; then by a key that nobody knows.
        signer = Identity(tmp_path / "client-1.key" if number == 2 else stranger)
        content = advert.signed_content(session, "client-0" if number == 2 else name)
        forged = advert.signed(signer.sign(content), signer.public).to_values()
        return rewrite(reply, request, lambda _: {"advert": forged})

    plan = secure_experiment(images, rounds=4)
    federation = with_keys(LoopbackFederation(plan, tmp_path, forge), tmp_path)
    federation.serve()
    records = read_records(federation.path)
    rejected = [record["clients"]["rejected"] for record in records]
    if is_honest:
        assert [list(each) for each in rejected] == [[], ["client-1"], ["client-1"], []]
        assert "its keys are not signed" in rejected[1]["client-1"]
        assert "signed by another key than before" in rejected[2]["client-1"]
        return
    assert [record["unchanged"] for record in records] == [False, True, True, False]
    assert "the keys of client-1 are not signed by that client" in rejected[1]["client-0"]
    assert "client-1 shows another key than before" in rejected[2]["client-0"]
    assert "does not have this client's own keys" in rejected[2]["client-1"]


def test_changed_key_is_refused(tmp_path: Path) -> None:
    known = KnownClients(tmp_path / "known.json")
    assert known.meet({"ana": b"key 1", "bo": b"key 2"}) == ["ana", "bo"]
    assert known.meet({"ana": b"key 1"}) == []
    with pytest.raises(ProtocolError, match="ana shows another key than before"):
        known.meet({"ana": b"key 3"})
    (tmp_path / "known.json").write_text("{")
    with pytest.raises(InvalidInput, match="cannot be read"):
        known.meet({"ana": b"key 3"})


@pytest.mark.parametrize("content", [b"", b"no key", b"-----BEGIN OPENSSH PRIVATE KEY-----"])
def test_file_that_is_no_key(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(InvalidInput, match="cannot be read as a client's key"):
        Identity(tmp_path / "key")


def test_signatures(tmp_path: Path) -> None:
    make_node_key(tmp_path / "key", tmp_path / "pub")
    identity = Identity(tmp_path / "key")
    signature = identity.sign(b"content")
    assert is_signed(identity.public, signature, b"content")
    assert not is_signed(identity.public, signature, b"other content")
    assert not is_signed(identity.public, b"", b"content")
    assert not is_signed(b"no key", signature, b"content")
    assert fingerprint(identity.public).startswith("SHA256:")
