"""The command line: what it prints, and one clear sentence with exit code 2 for bad input."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
from PIL import Image

from mpfedcl import run
from mpfedcl.cli import main
from small_runs import Say, call, environment, flags, read_summary, save_images, small

PIXELS = ("--dataset.name", "folder", "--encoder.name", "none")


class Said(NamedTuple):
    """What a command answered."""

    code: int
    out: str
    err: str


Cli = Callable[..., Said]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be in a folder of its own, without a data folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("MPFEDCL_DATA", str(tmp_path / "no data"))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Call the command line in this process."""

    def run_words(*words: object) -> Said:
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        assert isinstance(end.value.code, int)
        return Said(end.value.code, *capsys.readouterr())

    return run_words


def assert_one_sentence(said: Said) -> str:
    assert said.code == 2, said.err
    assert said.out == ""
    assert said.err.startswith("mpfedcl: ")
    assert said.err.endswith(".\n")
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.err
    return said.err


@pytest.fixture
def refused(cli: Cli) -> Callable[..., str]:
    """Call the command line, hold it to one sentence and to leaving nothing behind."""

    def run_words(*words: object) -> str:
        before = sorted(Path.cwd().rglob("*"))
        sentence = assert_one_sentence(cli(*words))
        assert sorted(Path.cwd().rglob("*")) == before
        return sentence

    return run_words


Refused = Callable[..., str]

BAD_SETTINGS: list[tuple[str, str]] = [
    ("--method nope", "method is 'nope'; it must be one of dp-fedcl, fedavg, "),
    ("--method nowhere.at.all:Mine", "method is 'nowhere.at.all:Mine'"),
    ("--method json:Absent", "method is 'json:Absent'"),
    ("--method json:JSONDecoder", "must name a subclass of mpfedcl.Method"),
    ("--method json:dumps", "must name a subclass of mpfedcl.Method"),
    ("--method :Mine", "method is ':Mine'"),
    ("--method json:", "method is 'json:'"),
    ("--method .relative:Mine", "method is '.relative:Mine'"),
    ("--method fedavg --no-share-model", "share_model is False"),
    ("--method fedprox --no-share-model", "share_model is False"),
    ("--dataset.name nope", "dataset.name is 'nope'; it must be one of mnist-sample, mnist,"),
    ("--dataset.name mnist", "dataset.name is 'mnist'"),
    ("--dataset.name folder --encoder.name none", "dataset.root"),
    ("--dataset.train-size 0", "dataset.train_size is 0"),
    ("--dataset.train-size 2001", "dataset.train_size is 2,001; it must be at most 2,000"),
    ("--dataset.domains nope", "dataset.domains has 'nope'"),
    ("--dataset.test-fraction 1", "dataset.test_fraction is 1"),
    ("--rounds 0", "rounds is 0; it must be greater than or equal to 1"),
    ("--rounds -3", "rounds is -3"),
    ("--rounds 1.5", "--rounds is '1.5'; it must be a whole number"),
    ("--rounds many", "--rounds is 'many'; it must be a whole number"),
    ("--clients 0", "clients is 0"),
    ("--clients 2001 --partition.min-size 1", "clients is 2001; it must be at most 2,000"),
    ("--clients 99999999999 --partition.min-size 1", "clients is 99999999999; "),
    ("--partition.min-size 1000", "partition.min_size is 1,000"),
    ("--clients 4 --partition.alpha 0.001 --partition.min-size 499", "min_size is 499"),
    ("--partition.alpha 0", "partition.alpha is 0.0; it must be greater than 0"),
    ("--partition.alpha -1", "partition.alpha is -1.0; it must be greater than 0"),
    ("--partition.alpha nan", "partition.alpha is nan"),
    ("--partition.alpha inf", "partition.alpha is inf"),
    ("--partition.alpha much", "--partition.alpha is 'much'; it must be a number"),
    ("--partition.kind nope", "partition.kind is 'nope'; it must be one of"),
    ("--partition.kind classes --partition.classes-per-client 11", "classes_per_client is 11"),
    ("--partition.kind feature", "mnist-sample has one domain"),
    ("--prototypes.per-class 0", "prototypes.per_class is 0"),
    ("--prototypes.pool-ttl 0", "prototypes.pool_ttl is 0"),
    ("--prototypes.min-cluster-size 0", "prototypes.min_cluster_size is 0"),
    ("--contrast.temperature 0", "contrast.temperature is 0.0"),
    ("--contrast.weight -1", "contrast.weight is -1.0"),
    ("--contrast.form nope", "contrast.form is 'nope'"),
    ("--train.lr 0", "train.lr is 0.0"),
    ("--train.lr nan", "train.lr is nan"),
    ("--train.momentum 1", "train.momentum is 1.0"),
    ("--train.batch-size 0", "train.batch_size is 0"),
    ("--train.epochs 0", "train.epochs is 0"),
    ("--fraction 0", "fraction is 0.0"),
    ("--fraction 1.01", "fraction is 1.01"),
    ("--min-clients 6", "min_clients is 6; it must be at most the number of clients, 5"),
    ("--evaluate-every 0", "evaluate_every is 0"),
    ("--seed -1", "seed is -1"),
    ("--seed 9223372036854775808", "seed is 9223372036854775808"),
    ("--dtype float16", "dtype is 'float16'"),
    ("--device nope", "device is 'nope'"),
    ("--device meta", "device is 'meta'"),
    ("--guard.max-norm 0", "guard.max_norm is 0.0"),
    ("--fedprox.mu -0.1", "fedprox.mu is -0.1"),
    ("--dbscan.eps 0", "dbscan.eps is 0.0"),
    ("--nope 3", "--nope"),
    ("absent.toml", "absent.toml does not exist"),
    (".", "cannot be read"),
    ("one.toml two.toml", "two.toml"),
    ("--resume absent", "resume is 'absent'"),
    ("--resume .", "resume is '.'"),
    (
        "--resume . --out x",
        "resume goes with --rounds, --engine, --workers, --trail, --track and --track-to alone",
    ),
]


@pytest.mark.parametrize(("words", "expected"), BAD_SETTINGS, ids=[w for w, _ in BAD_SETTINGS])
def test_bad_settings(refused: Refused, words: str, expected: str) -> None:
    assert expected in refused("run", *words.split(" "))


BAD_COMMANDS: list[tuple[str, str]] = [
    ("nope", "'nope' is not a command; it must be one of run, compare, "),
    ("data nope", "'data nope' is not a command; it must be one of run, compare"),
    ("data show nope", "dataset.name is 'nope'"),
    ("data show mnist", "dataset.name is 'mnist'"),
    ("data show --partition.alpha 0", "partition.alpha is 0"),
    ("data show --out absent/picture.png", "absent/picture.png: No such file"),
    ("data show --out picture.nope", "picture.nope"),
    ("methods --nope", "--nope"),
    ("compare --method fedavg", "use --methods"),
    ("compare --seed 3", "use --seeds"),
    ("compare --methods fedavg fedavg", "methods is ['fedavg', 'fedavg']"),
    ("compare --methods", "methods"),
    ("compare --seeds 1 0 1", "seeds is [1, 0, 1]"),
    ("compare --seeds -1", "seed is -1"),
    ("compare --seeds one", "seeds"),
    ("compare --methods fedavg nope", "method is 'nope'"),
    ("compare --jobs -1", "jobs is -1"),
    ("compare absent.toml", "absent.toml does not exist"),
]


@pytest.mark.parametrize(("words", "expected"), BAD_COMMANDS, ids=[w for w, _ in BAD_COMMANDS])
def test_bad_commands(refused: Refused, words: str, expected: str) -> None:
    assert expected in refused(*words.split(" "))


BAD_FILES: dict[str, tuple[str, str]] = {
    "no TOML": ("rounds = = 3", "is not valid TOML"),
    "an unknown key": ("round = 3", "round is not a setting"),
    "an unknown key of a section": (
        "[partition]\nalfa = 1",
        "partition.alfa is not a setting; [partition] has kind, alpha,",
    ),
    "an unknown section": ("[sorcery]\nlevel = 3", "sorcery is not a setting"),
    "a section that is none": ("partition = 3", "partition is 3"),
    "text for a number": ('rounds = "many"', "rounds is 'many'"),
    "a fraction of a round": ("rounds = 2.5", "rounds is 2.5"),
    "no number": ("[partition]\nalpha = nan", "partition.alpha is nan"),
    "a bad value of a section": ("[prototypes]\nper_class = 0", "prototypes.per_class is 0"),
    "a newer format": ("format = 2", "has format 2; this mpfedcl reads formats up to 1"),
    "a format that is none": ('format = "new"', "has format 'new'"),
    "twice the same": ("rounds = 1\nrounds = 2", "is not valid TOML"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_files_of_settings(tmp_path: Path, refused: Refused, kind: str) -> None:
    document, expected = BAD_FILES[kind]
    file = tmp_path / "bad.toml"
    file.write_text(document)
    sentence = refused("run", file)
    assert expected in sentence
    assert "bad.toml" in sentence


def test_a_file_of_settings_that_is_no_text(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe\x00")
    assert "bad.toml cannot be read" in refused("run", tmp_path / "bad.toml")


# Data


def image_arrays(**changes: Any) -> dict[str, Any]:
    arrays: dict[str, Any] = {
        "x_train": numpy.zeros((12, 4, 4), numpy.uint8),
        "y_train": numpy.arange(12) % 3,
        "x_test": numpy.zeros((6, 4, 4), numpy.uint8),
        "y_test": numpy.arange(6) % 3,
    }
    return {name: value for name, value in (arrays | changes).items() if value is not None}


BAD_ARCHIVES: dict[str, tuple[dict[str, Any], str]] = {
    "a missing key": (image_arrays(y_train=None), "lacks y_train"),
    "a missing test label": (image_arrays(y_test=None), "lacks y_test"),
    "other keys": ({"images": numpy.zeros(3)}, "lacks x_train, y_train"),
    "floats": (image_arrays(x_train=numpy.zeros((12, 4, 4))), "dtype float64; it must be uint8"),
    "labels as floats": (image_arrays(y_train=numpy.zeros(12)), "y_train has dtype float64"),
    "a negative label": (image_arrays(y_train=numpy.arange(12) - 1), "has the label -1"),
    "a label beyond reason": (image_arrays(y_train=numpy.arange(12) * 10**6), "has the label"),
    "pickled objects": (
        image_arrays(y_train=numpy.array([{}] * 12, dtype=object)),
        "pickle",
    ),
    "too few labels": (image_arrays(y_train=numpy.arange(11) % 3), "12 images and y_train 11"),
    "no images": (
        image_arrays(x_train=numpy.zeros((0, 4, 4), numpy.uint8), y_train=numpy.zeros(0, int)),
        "0 images",
    ),
    "flat images": (image_arrays(x_train=numpy.zeros((12, 16), numpy.uint8)), "shape (12, 16)"),
}


@pytest.mark.parametrize("kind", BAD_ARCHIVES)
def test_bad_archives(tmp_path: Path, refused: Refused, kind: str) -> None:
    arrays, expected = BAD_ARCHIVES[kind]
    (tmp_path / "data").mkdir()
    numpy.savez(tmp_path / "data" / "bad.npz", **arrays)
    sentence = refused("run", *PIXELS, "--dataset.root", tmp_path / "data")
    assert expected in sentence
    assert "bad.npz" in sentence


def test_labels_out_of_the_range_of_a_known_set(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    labels = numpy.arange(12)
    numpy.savez(tmp_path / "data" / "mnist" / "mnist.npz", **image_arrays(y_train=labels))
    sentence = refused("run", "--dataset.name", "mnist", "--dataset.root", tmp_path / "data")
    assert "has the label 11; labels must be 0 to 9" in sentence


def save_pictures(root: Path) -> Path:
    for name in ("cat", "dog"):
        (root / "photo" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("L", (4, 4), 20 * number).save(root / "photo" / name / f"{number}.png")
    return root


def test_an_image_folder_with_an_empty_class(tmp_path: Path, refused: Refused) -> None:
    root = save_pictures(tmp_path / "data")
    (root / "photo" / "emu").mkdir()
    sentence = refused("run", *PIXELS, "--dataset.root", root)
    assert "photo/emu has no images" in sentence


@pytest.mark.parametrize("content", [b"", b"no picture", b"\x89PNG\r\n\x1a\n half"])
def test_an_image_folder_with_a_broken_file(
    tmp_path: Path, refused: Refused, content: bytes
) -> None:
    root = save_pictures(tmp_path / "data")
    (root / "photo" / "cat" / "2.png").write_bytes(content)
    sentence = refused("run", *PIXELS, "--dataset.root", root)
    assert "cat/2.png" in sentence


def test_a_file_for_a_folder_of_data(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "data").write_text("nothing")
    sentence = refused("run", *PIXELS, "--dataset.root", tmp_path / "data")
    assert "is a file" in sentence


# The output folder


def test_a_folder_that_holds_another_run(images: Path, tmp_path: Path, refused: Refused) -> None:
    run(small(images), tmp_path / "run")
    before = {each: each.stat().st_mtime_ns for each in (tmp_path / "run").rglob("*.*")}
    sentence = refused("run", *flags(images, rounds=3), "--out", tmp_path / "run")
    assert f"out is '{tmp_path / 'run'}'; it already holds a run" in sentence
    assert "--resume" in sentence
    assert {each: each.stat().st_mtime_ns for each in (tmp_path / "run").rglob("*.*")} == before


def test_a_folder_that_holds_something_else(images: Path, tmp_path: Path, refused: Refused) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.txt").write_text("precious")
    assert "must be a new or an empty folder" in refused("run", *flags(images), "--out", folder)
    assert [each.name for each in folder.iterdir()] == ["chapter.txt"]


def test_out_is_a_file(images: Path, tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "file").write_text("precious")
    assert "this is a file" in refused("run", *flags(images), "--out", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"


def test_an_empty_folder_will_do(images: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "empty").mkdir()
    assert cli("run", *flags(images, rounds=1), "--out", tmp_path / "empty").code == 0


@pytest.mark.parametrize("command", ["run", "compare"])
@pytest.mark.parametrize("place", ["/dev/null/run", "/proc/run", "FILE/run"])
def test_nowhere_to_write(
    images: Path, tmp_path: Path, refused: Refused, command: str, place: str
) -> None:
    (tmp_path / "file").write_text("")
    place = place.replace("FILE", str(tmp_path / "file"))
    assert place in refused(command, *flags(images), "--out", place)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(images: Path, tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    sentence = refused("run", *flags(images), "--out", tmp_path / "locked" / "run")
    assert "Permission denied" in sentence


def test_resume_of_a_newer_format(images: Path, tmp_path: Path, refused: Refused) -> None:
    run(small(images), tmp_path / "run")
    file = tmp_path / "run" / "experiment.toml"
    file.write_text(file.read_text().replace("format = 1", "format = 99"))
    assert "has format 99" in refused("run", "--resume", tmp_path / "run")


@pytest.mark.parametrize("words", ["--seed 5", "--train.lr 0.5", "--method local"])
def test_resume_with_other_settings(
    images: Path, tmp_path: Path, refused: Refused, words: str
) -> None:
    run(small(images), tmp_path / "run")
    sentence = refused("run", "--resume", tmp_path / "run", *words.split())
    assert (
        "resume goes with --rounds, --engine, --workers, --trail, --track and --track-to alone"
        in sentence
    )


def test_resume_with_fewer_rounds(images: Path, tmp_path: Path, refused: Refused) -> None:
    run(small(images), tmp_path / "run")
    assert "rounds is 1; " in refused("run", "--resume", tmp_path / "run", "--rounds", 1)


# As a user has it


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("run --method nope", "method is 'nope'"),
        ("run --partition.alpha nan", "partition.alpha is nan"),
        ("run --clients 3000 --partition.min-size 1", "clients is 3000; it must be at most 2,000"),
    ],
)
def test_bad_input_in_a_process_of_its_own(tmp_path: Path, words: str, expected: str) -> None:
    ended = call(*words.split(), cwd=tmp_path)
    assert expected in assert_one_sentence(Said(ended.returncode, ended.stdout, ended.stderr))


def test_the_console_command() -> None:
    script = Path(sys.executable).with_name("mpfedcl")
    for words, expected in (("--help", "mpfedcl compare"), ("--version", "0.")):
        ended = subprocess.run(
            [script, words],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        assert expected in ended.stdout


def test_help_and_bad_settings_do_not_wait_for_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from mpfedcl.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    for words in (["--help"], ["run", "--help"], ["run", "--rounds", "0"]):
        ended = subprocess.run(
            [sys.executable, "-c", program, *words],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert ended.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    "words", ["", "-h", "--help", "help", "run --help", "compare --help", "methods --help"]
)
def test_help(cli: Cli, words: str) -> None:
    said = cli(*words.split())
    assert (said.code, said.err) == (0, "")
    assert "mpfedcl" in said.out


@pytest.mark.parametrize("words", ["data", "data --help", "data list --help", "data show --help"])
def test_help_on_data(cli: Cli, words: str) -> None:
    said = cli(*words.split())
    assert (said.code, said.err) == (0, "")
    assert "data" in said.out


# Runs


def assert_fits(text: str) -> None:
    # A path is never folded, so that it can be copied.
    assert max(len(line) for line in text.splitlines() if "/" not in line) <= 100


def test_a_run_and_its_end_table(images: Path, tmp_path: Path, cli: Cli) -> None:
    said = cli("run", *flags(images), "--out", tmp_path / "run")
    assert (said.code, said.err) == (0, "")
    assert_fits(said.out)
    summary = read_summary(tmp_path / "run")
    assert f"mean over clients: {summary['accuracy']:.1f} %" in said.out
    assert f"{summary['parameters_sent']:,} parameters" in said.out
    for name, value in summary["accuracy_per_client"].items():
        assert any(line.split() == [name, f"{value:.1f}"] for line in said.out.splitlines()), (
            said.out
        )
    for figure in ("accuracy.png", "partition.png"):
        assert (tmp_path / "run" / figure).read_bytes().startswith(b"\x89PNG")


def test_all_readings_of_a_run(images: Path, tmp_path: Path, cli: Cli) -> None:
    said = cli("run", *flags(images), "--out", tmp_path / "run", "--readings", "all")
    readings = read_summary(tmp_path / "run")["readings"]
    assert_fits(said.out)
    for title in ("personal", "averaged"):
        for rule in ("classifier", "prototype"):
            own, union = (readings[test][f"{title}_{rule}"] for test in ("own", "union"))
            words = [f"{title},", rule, f"{own:.1f}", f"{union:.1f}"]
            assert any(line.split() == words for line in said.out.splitlines()), said.out


def test_a_run_as_json(images: Path, tmp_path: Path, cli: Cli) -> None:
    said = cli("run", *flags(images), "--out", tmp_path / "run", "--json")
    assert json.loads(said.out) == {
        "path": str(tmp_path / "run"),
        **read_summary(tmp_path / "run"),
    }


def test_a_folder_is_found_if_none_is_given(images: Path, cli: Cli) -> None:
    paths = [
        json.loads(cli("run", *flags(images, method=method, rounds=1), "--json").out)["path"]
        for method in ("local", "local", "fedavg")
    ]
    assert paths == [
        "runs/local-folder-label-seed0",
        "runs/local-folder-label-seed0-2",
        "runs/fedavg-folder-label-seed0",
    ]


def test_flags_win_over_the_file(images: Path, tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        'method = "fedprox"\nrounds = 3\nclients = 2\n[encoder]\nname = "none"\n'
        '[dataset]\nname = "folder"\n'
        f'root = "{images}"\n[fedprox]\nmu = 0.5\n[partition]\nkind = "iid"\n'
    )
    words = ("--rounds", 1, "--fedprox.mu", 0.25, "--out", tmp_path / "run")
    assert cli("run", file, *words).code == 0
    used = tomllib.loads((tmp_path / "run" / "experiment.toml").read_text())
    assert (used["method"], used["rounds"], used["clients"]) == ("fedprox", 1, 2)
    assert used["fedprox"]["mu"] == 0.25
    assert used["partition"]["kind"] == "iid"


def test_booleans_can_be_said_both_ways(images: Path, tmp_path: Path, cli: Cli) -> None:
    words = ("--no-share-model", "--prototypes.no-normalize", "--partition.no-balanced")
    assert cli("run", *flags(images, rounds=1), *words, "--out", tmp_path / "run").code == 0
    used = tomllib.loads((tmp_path / "run" / "experiment.toml").read_text())
    assert used["share_model"] is False
    assert used["prototypes"]["normalize"] is False
    assert used["partition"]["balanced"] is False
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_resume_with_more_rounds(images: Path, tmp_path: Path, cli: Cli) -> None:
    assert cli("run", *flags(images), "--out", tmp_path / "run").code == 0
    said = cli("run", "--resume", tmp_path / "run", "--rounds", 3, "--json")
    assert said.code == 0
    assert json.loads(said.out)["rounds"] == 3


def test_a_damaged_checkpoint_is_told(images: Path, tmp_path: Path, cli: Cli) -> None:
    run(small(images), tmp_path / "run")
    (tmp_path / "run" / "checkpoint" / "round-000002.json").write_text("{}")
    said = cli("run", "--resume", tmp_path / "run", "--json")
    assert said.code == 0
    assert "round-000002 is damaged" in said.err
    assert json.loads(said.out)["rounds"] == 2


@pytest.mark.parametrize("method", ["mp-fedcl", "fedavg"])
def test_a_run_in_which_nobody_is_ever_accepted(
    images: Path, tmp_path: Path, cli: Cli, method: str
) -> None:
    words = flags(images, method=method, guard__max_norm=1e-9)
    said = cli("run", *words, "--out", tmp_path / "run", "--readings", "all")
    assert said.code == 0
    for number in (1, 2):
        assert f"Round {number}: no client was accepted" in said.err
    summary = read_summary(tmp_path / "run")
    assert summary["rejected"] == 6
    assert summary["loss"] is None
    assert (tmp_path / "run" / "accuracy.png").exists()


# Catalogues


def test_methods(cli: Cli) -> None:
    said = cli("methods")
    assert (said.code, said.err) == (0, "")
    assert_fits(said.out)
    found = json.loads(cli("methods", "--json").out)
    assert list(found) == [
        "dp-fedcl",
        "fedavg",
        "fedproto",
        "fedprox",
        "local",
        "mp-fedcl",
        "sp-fedcl",
    ]
    for name, summary in found.items():
        assert name in said.out
        assert summary
        assert "\n" not in summary


def test_data_list(tmp_path: Path, cli: Cli) -> None:
    save_images(tmp_path / "data" / "mnist" / "mnist.npz")
    said = cli("data", "list")
    assert (said.code, said.err) == (0, "")
    assert_fits(said.out)
    sets = json.loads(cli("data", "list", "--json").out)
    assert {"mnist-sample", "mnist", "folder"} <= sets.keys()
    assert all(name in said.out for name in sets)
    assert sets["mnist-sample"]["here"] == "yes"
    assert "CC BY-SA 3.0" in sets["mnist-sample"]["source"]
    assert sets["mnist"]["here"] == "no"
    known = json.loads(cli("data", "list", "--json", "--root", tmp_path / "data").out)
    assert known["mnist"]["here"] == "yes"


@pytest.mark.parametrize("kind", ["label", "iid", "classes", "quantity"])
def test_data_show(tmp_path: Path, cli: Cli, kind: str) -> None:
    words = ("data", "show", "mnist-sample", "--partition.kind", kind, "--clients", 5)
    said = cli(*words, "--out", tmp_path / "picture.png")
    assert (said.code, said.err) == (0, "")
    assert_fits(said.out)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads(cli(*words, "--out", tmp_path / "picture.png", "--json").out)
    assert content["classes"] == list("0123456789")
    assert list(content["clients"]) == [f"client-{number}" for number in range(5)]
    assert sum(sum(client["train"]) for client in content["clients"].values()) == 2000
    assert all(client["test"] == 1000 for client in content["clients"].values())
    assert cli(*words, "--out", tmp_path / "picture.png").out == said.out


def test_flags_without_a_value_go_with_a_file(said: Say, images: Path, tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(small(images, rounds=1).to_toml())
    code, out, _ = said("run", path, "--json", "--out", tmp_path / "run")
    assert code == 0
    assert json.loads(out)["rounds"] == 1
