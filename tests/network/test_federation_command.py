"""`mpfedcl federation` with invalid input: a one-line error, exit code 2, no files."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from federations import save_pictures

from command_processes import environment
from command_results import Refused
from mpfedcl import Experiment, run
from mpfedcl.network.flower.programs import end_of_log
from mpfedcl.network.setup.folders import make_federation
from small_experiments import Say

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("federation") / "lab"
    make_federation(root, ["client-0", "client-1"], None, 9)
    return root


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "one of --clients and --names must be given"),
        (["--clients", "2", "--names", "a"], "one of --clients and --names must be given"),
        (["--clients", "0"], "clients is 0; it must be from 1 to 1000"),
        (["--clients", "1001"], "clients is 1001; it must be from 1 to 1000"),
        (["--clients", "2", "--port", "0"], "port is 0; it must be from 1 to 65535"),
        (["--clients", "2", "--port", "65536"], "port is 65536; it must be from 1 to 65535"),
        (["--names", "a", "b/c"], "names has 'b/c'; a client's name must be of letters"),
        (["--clients", "2", "--host", "a:1"], "host is 'a:1'; it must be a host name"),
    ],
)
def test_invalid_init_arguments_are_rejected(
    said: Say, tmp_path: Path, words: list[str], reason: str
) -> None:
    assert_sentence(said("federation", "init", tmp_path / "new", *words), reason)
    assert not (tmp_path / "new").exists()


def assert_sentence(output: tuple[int, str, str], reason: str) -> None:
    code, out, err = output
    assert (code, out) == (2, "")
    assert reason in " ".join(err.split())
    assert "Traceback" not in err


def test_init_prints_the_next_commands(said: Say, tmp_path: Path) -> None:
    code, out, err = said("federation", "init", tmp_path / "lab", "--clients", 11)
    assert (code, err) == (0, "")
    assert "client-00, client-01" in out
    assert "mpfedcl federation server" in " ".join(out.split())
    assert (tmp_path / "lab/clients/client-10/node.key").is_file()


def test_malformed_update_is_rejected(said: Say, lab: Path, three: Path, tmp_path: Path) -> None:
    words = ("federation", "update", lab)
    assert_sentence(said(*words, "--client", "d"), "--run is missing; it must be given")
    assert_sentence(said(*words, "--run", three), "--client is missing; it must be given")
    given = (*words, "--client", "d", "--run")
    assert_sentence(said(*given, tmp_path), "it must be a folder that holds a run")
    assert_sentence(said(*given, three), "it must be a run over a network")
    trained = run(Experiment(method="fedavg", rounds=1, clients=2), tmp_path / "run").path
    assert_sentence(said(*given, trained), "it must be a run of a one-shot method")


def test_folder_without_federation_is_rejected(said: Say, tmp_path: Path) -> None:
    for words in (["server"], ["start"]):
        output = said("federation", *words, tmp_path)
        assert_sentence(output, "federation.toml does not exist; the folder must be a federation")
    assert_sentence(
        said("federation", "client", tmp_path, "--share", 0), "is not a client's folder; it must be"
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--name", "client-0"], "one of --data and --share must be given"),
        (["--name", "client-0", "--data", "x", "--share", "0"], "one of --data and --share"),
        (["--name", "client-0", "--data", "missing"], "data is 'missing', which does not exist"),
        (["--name", "client-7", "--share", "0"], "name is 'client-7'; it must be one of client-0"),
        (
            ["--name", "client-0", "--share", "0", "--policy", "missing.toml"],
            "policy is 'missing.toml', which does not exist",
        ),
    ],
)
def test_invalid_client_arguments_are_rejected(
    said: Say, lab: Path, words: list[str], reason: str
) -> None:
    assert_sentence(said("federation", "client", lab, *words), reason)


def test_client_key_readable_by_others_is_rejected(said: Say, lab: Path) -> None:
    key = lab / "clients/client-1/node.key"
    key.chmod(0o644)
    output = said("federation", "client", lab, "--name", "client-1", "--share", 0)
    assert_sentence(output, "can be read by others; its mode must be 0600")
    key.rename(key.with_suffix(".away"))
    output = said("federation", "client", lab, "--name", "client-1", "--share", 0)
    assert_sentence(output, "node.key does not exist; mpfedcl federation init makes it")


def test_server_secret_readable_by_others_is_rejected(said: Say, tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    secret = make_federation(lab, ["a"], None, 9).secret
    secret.chmod(0o640)
    output = said("federation", "server", lab)
    assert_sentence(output, "control.secret can be read by others; its mode must be 0600")
    output = said("federation", "start", lab)
    assert_sentence(output, "has no address of the server; the server must have been started")


def test_folders_writable_by_others_are_rejected(said: Say, tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    make_federation(lab, ["a"], None, 9)
    client = lab / "clients/a"
    client.chmod(0o755)
    (client / "ca.pem").chmod(0o666)
    output = said("federation", "client", lab, "--name", "a", "--share", 0)
    assert_sentence(output, "ca.pem can be changed by others; the mode of")
    (lab / "server").chmod(0o770)
    assert_sentence(said("federation", "server", lab), "server can be changed by others; the mode")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--resume", "missing"], "must be a folder"),
        (["--rounds", "0"], "rounds is 0; it must be"),
        (["--method", "fedx"], "method is 'fedx'"),
        (["--workers", "2"], "workers is 2; over a network it must be 1"),
        (["missing.toml"], "missing.toml does not exist"),
        (["--out", "."], "it must be a new or an empty folder"),
    ],
)
def test_invalid_start_arguments_are_rejected(
    said: Say, lab: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], reason: str
) -> None:
    monkeypatch.chdir(lab)
    assert_sentence(said("federation", "start", lab, *words), reason)


def test_missing_flower_names_the_package_to_install(
    said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = save_pictures(tmp_path / "local_test", "cat", "dog")
    make_federation(tmp_path / "lab", ["a"], None, 9)
    # As Python does where it was not found before.
    monkeypatch.setitem(sys.modules, "flwr", None)
    for words in (
        ["init", tmp_path / "new", "--clients", 2],
        ["server", tmp_path / "lab"],
        ["client", tmp_path / "lab", "--name", "a", "--data", data],
        ["start", tmp_path / "lab"],
    ):
        output = said("federation", *words)
        assert_sentence(
            output, "is not installed; a federation needs pip install 'mpfedcl[flower]'"
        )
    assert not (tmp_path / "new").exists()


def test_help_loads_neither_torch_nor_flower() -> None:
    code = (
        "import sys\nfrom mpfedcl.cli.main import main\n"
        "try:\n    main(['federation', 'client', '--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'flwr', 'cryptography')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == 0
    assert "--policy" in done.stdout


def test_port_in_use_names_the_flag_to_change_it(said: Say, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        make_federation(tmp_path / "lab", ["a"], None, port)
        code, out, err = said("federation", "server", tmp_path / "lab")
    assert (code, out) == (2, "")
    assert f"port is {port}, which is in use" in err
    assert "mpfedcl federation init NEW_FOLDER --port N" in err


def test_broken_flower_installation_is_reported(
    refused: Refused, lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flwr").mkdir()
    (tmp_path / "flwr" / "__init__.py").write_text("raise ImportError('half of it\\nis here')")
    for name in list(sys.modules):
        if name.startswith(("flwr", "mpfedcl.network.flower.control")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    for words in (["server", lab], ["start", lab]):
        sentence = refused("federation", *words)
        assert "cannot be loaded (ImportError: half of it is here); pip install" in sentence


def test_end_of_log_is_the_error_of_a_traceback(tmp_path: Path) -> None:
    log = tmp_path / "supernode.log"
    assert end_of_log(log) == "it is empty"
    log.write_text("begun\nTraceback (most recent call last):\n  File x\n    y\nImportError: no.\n")
    assert end_of_log(log) == "ImportError: no"
