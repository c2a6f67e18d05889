"""`data fetch` and `data prepare` as commands: what they download, write and say."""

import hashlib
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import tyro
from download_cases import quick
from original_files import (
    write_cifar100,
    write_mnist,
    write_mnist_m,
    write_svhn,
    write_usps,
)

from download_server import BrokenServer, free_port, send, serve
from image_sets import read_image_set
from mpfedcl.cli.arguments import DataFetch, DataPrepare
from mpfedcl.cli.data import data_fetch_command, data_prepare_command
from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.public.prepare import preparable_domains
from mpfedcl.data.public.sources import (
    FETCH_PLANS,
    FetchPlan,
    PublicFile,
    PublicSource,
)
from mpfedcl.experiment.settings import DatasetSettings

pytestmark = pytest.mark.whole


def fetch_command(name: str, root: Path, replace: bool = False) -> None:
    with quick():
        data_fetch_command(DataFetch(name, root, replace))


def prepare_command(name: str, source: Path, root: Path | None, replace: bool = False) -> None:
    data_prepare_command(DataPrepare(name, source, root, replace))


@pytest.fixture(autouse=True)
def _own_surroundings(no_proxy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPFEDCL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def publish(
    server: BrokenServer, name: str, write: Callable[[Path], Any], folder: Path
) -> PublicSource:
    """Write the originals of a source and put them on the server."""
    write(folder / name)
    files = tuple(
        PublicFile(
            path.name,
            (server.answer(f"/{name}/{path.name}", serve(path.read_bytes())),),
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_size,
        )
        for path in sorted((folder / name).iterdir())
    )
    return PublicSource(name, f"http://example.org/{name}", (name,), files)


@pytest.fixture
def _published(server: BrokenServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the public addresses by the server's; all else stays as it is."""
    web = tmp_path / "web"
    mnist = publish(server, "mnist", write_mnist, web)
    usps = publish(server, "usps", write_usps, web)
    svhn = publish(server, "svhn", write_svhn, web)
    by_hand = FETCH_PLANS["digit5"].by_hand
    monkeypatch.setitem(FETCH_PLANS, "mnist", FetchPlan("mnist", (mnist,)))
    monkeypatch.setitem(FETCH_PLANS, "usps", FetchPlan("digit5", (usps,)))
    monkeypatch.setitem(FETCH_PLANS, "digit5", FetchPlan("digit5", (mnist, svhn, usps), by_hand))


@pytest.mark.usefixtures("_published")
def test_fetched_data_can_be_used(
    tmp_path: Path, server: BrokenServer, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    fetch_command("mnist", data)
    assert len(server.requests) == 4
    (domain,) = read_image_set(DatasetSettings(name="mnist", root=data)).domains
    assert len(domain.train_images) == 12
    said = capsys.readouterr()
    assert "prepared mnist: 12 training and 11 test images" in said.out
    assert str(data / "originals" / "mnist") in said.out
    # No bar where nobody looks.
    assert said.err == ""
    fetch_command("mnist", data)
    assert len(server.requests) == 4
    assert "kept mnist" in capsys.readouterr().out


@pytest.mark.usefixtures("_published")
def test_digit5_lists_manual_downloads_and_uses_them(
    tmp_path: Path, server: BrokenServer, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    fetch_command("digit5", data)
    said = capsys.readouterr().out
    assert "SynthDigits (SynthDigits.zip) and MNIST-M (mnist_m.tar.gz) have no stable" in said
    assert f"put them into {data / 'originals'} and run" in said
    written = sorted(path.name for path in (data / "digit5").iterdir())
    assert written == ["mnist.npz", "svhn.npz", "usps.npz"]
    asked = len(server.requests)
    write_mnist_m(data / "originals" / "mnist_m")
    write_svhn(data / "originals" / "synth", "synth_", labels=range(10))
    fetch_command("digit5", data)
    assert len(server.requests) == asked
    said = capsys.readouterr().out
    assert "prepared mnist_m" in said
    assert "prepared synth" in said
    assert "by hand" not in said
    assert len(list((data / "digit5").iterdir())) == 5


@pytest.mark.usefixtures("_published")
def test_single_domain_of_digit5_is_fetched(tmp_path: Path, server: BrokenServer) -> None:
    write_mnist(tmp_path / "data" / "originals" / "mnist")
    fetch_command("usps", tmp_path / "data")
    assert [path.name for path in (tmp_path / "data" / "digit5").iterdir()] == ["usps.npz"]
    assert [path for path, _ in server.requests] == ["/usps/usps.bz2", "/usps/usps.t.bz2"]


@pytest.mark.usefixtures("_published")
def test_failed_fetch_is_resumed(tmp_path: Path, server: BrokenServer) -> None:
    path = "/mnist/train-images-idx3-ubyte.gz"
    good = server.answers[path]
    server.answer(path, send(500, Content_Length=0))
    with pytest.raises(InvalidInput, match=r"train-images-idx3-ubyte\.gz could not be fetched"):
        fetch_command("mnist", tmp_path / "data")
    assert not (tmp_path / "data" / "mnist").exists()
    server.requests.clear()
    server.answers[path] = good
    fetch_command("mnist", tmp_path / "data")
    # Files come in order of name: two were there already.
    assert [asked for asked, _ in server.requests] == [path, "/mnist/train-labels-idx1-ubyte.gz"]


@pytest.mark.usefixtures("_published")
def test_replace_prepares_again_from_the_originals(tmp_path: Path, server: BrokenServer) -> None:
    data = tmp_path / "data"
    fetch_command("mnist", data)
    (data / "mnist" / "mnist.npz").write_bytes(b"spoilt")
    fetch_command("mnist", data, replace=True)
    assert len(read_image_set(DatasetSettings(name="mnist", root=data)).domains) == 1
    assert len(server.requests) == 4
    shutil.rmtree(data / "originals")
    fetch_command("mnist", data, replace=True)
    assert len(server.requests) == 8


def test_offline_fetch_gives_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"http://127.0.0.1:{free_port()}/usps.bz2"
    lonely = PublicSource(
        "usps", "http://example.org", ("usps",), (PublicFile("usps.bz2", (address,), "0" * 64),)
    )
    monkeypatch.setitem(FETCH_PLANS, "usps", FetchPlan("digit5", (lonely,)))
    with pytest.raises(InvalidInput, match=r"usps\.bz2 could not be fetched") as caught:
        fetch_command("usps", tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["cifar", "sixdomain", "folder", "../mnist"])
def test_names_without_a_fetch_plan_are_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match="cannot be fetched; it must be one of mnist, digit5"):
        fetch_command(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_prepare_reports_found_and_missing_domains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "my [bold] downloads"
    write_usps(source)
    write_svhn(source)
    prepare_command("digit5", source, tmp_path / "data [red]")
    said = capsys.readouterr().out
    assert said.splitlines()[0] == f"digit5: {tmp_path / 'data [red]' / 'digit5'}"
    assert "prepared usps: 10 training and 3 test images, 16 x 16 gray" in said
    assert "prepared svhn: 10 training and 4 test images, 32 x 32 RGB" in said
    assert "missing mnist_m: mnist_m_train_labels.txt" in said
    assert "missing synth: synth_train_32x32.mat, synth_test_32x32.mat, or SynthDigits.zip" in said


def test_prepare_writes_to_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_usps(tmp_path / "source")
    prepare_command("digit5", tmp_path / "source", None)
    assert (tmp_path / "cache" / "mpfedcl" / "digit5" / "usps.npz").is_file()
    monkeypatch.setenv("MPFEDCL_DATA", str(tmp_path / "named"))
    prepare_command("digit5", tmp_path / "source", None)
    assert (tmp_path / "named" / "digit5" / "usps.npz").is_file()


def test_prepare_rejects_an_empty_source(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with pytest.raises(InvalidInput) as caught:
        prepare_command("digit5", tmp_path / "source", tmp_path / "data")
    sentence = str(caught.value)
    assert "which holds no originals of digit5; it must hold at least one of: mnist:" in sentence
    for name in ("train-images-idx3-ubyte", "train_32x32.mat", "usps.bz2", "SynthDigits.zip"):
        assert name in sentence
    assert not (tmp_path / "data" / "digit5").exists()


def test_prepare_overwrites_only_with_replace(tmp_path: Path) -> None:
    write_usps(tmp_path / "source")
    source, data = tmp_path / "source", tmp_path / "data"
    prepare_command("digit5", source, data)
    with pytest.raises(InvalidInput, match=r"already has usps.* --replace must be given"):
        prepare_command("digit5", source, data)
    prepare_command("digit5", source, data, replace=True)


def test_fetch_and_prepare_arguments_are_parsed() -> None:
    fetch = tyro.cli(DataFetch, args=["digit5", "--root", "d", "--replace"])
    assert fetch == DataFetch("digit5", Path("d"), True)
    prepare = tyro.cli(DataPrepare, args=["mnist", "--source", "s"])
    assert prepare == DataPrepare("mnist", Path("s"), None, False)


@pytest.mark.parametrize(
    ("command", "words"), [(DataFetch, []), (DataPrepare, ["mnist"]), (DataPrepare, [])]
)
def test_missing_required_arguments_are_rejected(
    command: type[Any], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        tyro.cli(command, args=words)
    assert ended.value.code == 2
    assert "required" in capsys.readouterr().err.lower()


def test_list_of_public_files_is_valid() -> None:
    names = set()
    for name, plan in FETCH_PLANS.items():
        for source in plan.sources:
            assert set(source.domains) <= set(preparable_domains(plan.set_name)), name
            assert urlsplit(source.page).scheme in ("http", "https")
            for original in source.files:
                names.add((source.name, original.name))
                assert Path(original.name).name == original.name
                assert len(bytes.fromhex(original.sha256)) == 32
                assert original.addresses
                for address in original.addresses:
                    assert urlsplit(address).scheme in ("http", "https")
                    assert address.endswith(f"/{original.name}")
    assert len(names) == 4 + 2 + 2 + 18 + 1 + 1
    sources = {source for plan in FETCH_PLANS.values() for source in plan.sources}
    digests = [original.sha256 for source in sources for original in source.files]
    assert len(set(digests)) == len(digests)


def test_cifar_is_fetched_from_its_archive(
    tmp_path: Path, server: BrokenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(folder: Path) -> None:
        write_cifar100(tmp_path / "cifar-100-binary")
        folder.mkdir(parents=True)
        with tarfile.open(folder / "cifar-100-binary.tar.gz", "w:gz") as tar:
            tar.add(tmp_path / "cifar-100-binary", "cifar-100-binary")

    published = publish(server, "cifar100", write, tmp_path / "web")
    plan = FETCH_PLANS["cifar100"]
    assert [each.name for each in plan.sources[0].files] == [each.name for each in published.files]
    monkeypatch.setitem(FETCH_PLANS, "cifar100", FetchPlan("cifar100", (published,)))
    fetch_command("cifar100", tmp_path / "data")
    (domain,) = read_image_set(DatasetSettings(name="cifar100", root=tmp_path / "data")).domains
    assert domain.train_labels.tolist() == [0, 1, 99, 2]
