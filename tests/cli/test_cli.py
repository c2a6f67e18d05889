"""The command line as a user has it: help, runs, catalogs, and what they print."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from command_processes import call, environment
from command_results import Cli, Said, assert_fits, assert_one_sentence, without_progress
from mpfedcl import run
from mpfedcl.methods import PREDICTORS
from mpfedcl.report.wording import PREDICTOR_TITLES
from small_experiments import (
    METHODS,
    Say,
    flags,
    read_summary,
    save_domains_of_vectors,
    save_images,
    small,
)

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("elsewhere", "small_models")]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("run --method nope", "method is 'nope'"),
        ("run --partition.alpha nan", "partition.alpha is nan"),
        ("run --clients 3000 --partition.min-size 1", "clients is 3000; it must be at most 2,000"),
    ],
)
def test_invalid_input_in_a_separate_process_gives_a_one_line_error(
    tmp_path: Path, words: str, expected: str
) -> None:
    ended = call(*words.split(), cwd=tmp_path)
    assert expected in assert_one_sentence(Said(ended.returncode, ended.stdout, ended.stderr))


def test_console_command_prints_help_and_version() -> None:
    script = Path(sys.executable).with_name("mpfedcl")
    for words, expected in (("--help", "mpfedcl compare"), ("--version", "0.")):
        ended = subprocess.run(
            [script, words],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        assert expected in ended.stdout


def test_help_and_invalid_settings_do_not_import_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from mpfedcl.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: print(bool({'torch', 'polars'} & {*sys.modules}))"
    )
    words_of_all = ("--help", "run --help", "run --rounds 0", "run --lr 1", "run --method FedAvg")
    for words in map(str.split, words_of_all):
        ended = subprocess.run(
            [sys.executable, "-c", program, *words],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        assert ended.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    "words", ["", "-h", "--help", "help", "run --help", "compare --help", "methods --help"]
)
def test_help_is_printed(cli: Cli, words: str) -> None:
    said = cli(*words.split())
    assert (said.code, said.err) == (0, "")
    assert "mpfedcl" in said.out


@pytest.mark.parametrize(
    "words", ["data", "data --help", "data list --help", "data show --help", "data encode --help"]
)
def test_help_of_data_commands_is_printed(cli: Cli, words: str) -> None:
    said = cli(*words.split())
    assert (said.code, said.err) == (0, "")
    assert "data" in said.out


@pytest.mark.usefixtures("rendered_figures")
def test_run_prints_its_result_table(images: Path, tmp_path: Path, cli: Cli) -> None:
    said = cli("run", *flags(images), "--out", tmp_path / "run")
    assert (said.code, without_progress(said.err)) == (0, "")
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


def test_run_prints_all_predictors(images: Path, tmp_path: Path, cli: Cli) -> None:
    settings = flags(images, partition__test="matched")
    said = cli("run", *settings, "--out", tmp_path / "run", "--predictors", "all")
    summary = read_summary(tmp_path / "run")
    assert_fits(said.out)
    judged = {"local_test": "personal_prototype", "global_test": "global_prototype"}
    for predictor in PREDICTORS:
        words = PREDICTOR_TITLES[predictor].split()
        for test, by_this in judged.items():
            value = summary["predictors"][test][predictor]
            star = "*" if predictor == by_this else ""
            words.append(("-" if value is None else f"{value:.1f}") + star)
        assert any(line.split() == words for line in said.out.splitlines()), said.out
    union = summary["predictors"]["global_test"]["global_prototype"]
    assert f"global test set: {union:.1f} % (global, prototype)" in said.out
    assert "sent per client and round: " in said.out


@pytest.mark.usefixtures("rendered_figures")
def test_one_shot_run_prints_its_statistics(tmp_path: Path, cli: Cli) -> None:
    root = save_domains_of_vectors(tmp_path / "vectors")
    settings = ["--method", "fedgauss", "--dataset.name", "folder", "--dataset.root", root]
    settings += ["--partition.kind", "feature", "--statistics.random-features", "8"]
    said = cli("run", *settings, "--out", tmp_path / "run")
    assert said.code == 0
    assert_fits(said.out)
    # Of 5 values, a constant and 8 random features: counts of 3 classes, their sums of 14 numbers,
    # half of a symmetric 14 by 14, and one number.
    assert f"sent once per client: {3 + 3 * 14 + 14 * 15 // 2 + 1} values of statistics" in said.out
    union = read_summary(tmp_path / "run")["predictors"]["global_test"]["global_classifier"]
    assert f"global test set: {union:.1f} % (global, classifier)" in said.out
    card = (tmp_path / "run" / "CARD.md").read_text()
    assert "Each client sent sufficient statistics of its vectors once, at most 151 values." in card
    assert "One-shot, 2 clients" in card
    assert "Sufficient statistics were sent" in card


def test_run_prints_json(images: Path, tmp_path: Path, cli: Cli) -> None:
    said = cli("run", *flags(images), "--out", tmp_path / "run", "--json")
    assert json.loads(said.out) == {
        "path": str(tmp_path / "run"),
        **read_summary(tmp_path / "run"),
    }


def test_run_directory_is_chosen_if_none_is_given(images: Path, cli: Cli) -> None:
    paths = [
        json.loads(cli("run", *flags(images, method=method, rounds=1), "--json").out)["path"]
        for method in ("local", "local", "fedavg")
    ]
    assert paths == [
        "runs/local-folder-label-seed0",
        "runs/local-folder-label-seed0-2",
        "runs/fedavg-folder-label-seed0",
    ]


def test_flags_override_the_file(images: Path, tmp_path: Path, cli: Cli) -> None:
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


def test_boolean_flags_can_be_negated(images: Path, tmp_path: Path, cli: Cli) -> None:
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


def test_damaged_checkpoint_is_reported(images: Path, tmp_path: Path, cli: Cli) -> None:
    run(small(images), tmp_path / "run")
    (tmp_path / "run" / "checkpoint" / "round-000002.json").write_text("{}")
    said = cli("run", "--resume", tmp_path / "run", "--json")
    assert said.code == 0
    assert "round-000002 is damaged" in said.err
    assert json.loads(said.out)["rounds"] == 2


@pytest.mark.usefixtures("rendered_figures")
@pytest.mark.parametrize("method", ["mp-fedcl", "fedavg"])
def test_run_without_any_accepted_client_finishes(
    images: Path, tmp_path: Path, cli: Cli, method: str
) -> None:
    words = flags(images, method=method, validation__max_norm=1e-9)
    said = cli("run", *words, "--out", tmp_path / "run", "--predictors", "all")
    assert said.code == 0
    for number in (1, 2):
        assert f"Round {number}: no client was accepted" in said.err
    summary = read_summary(tmp_path / "run")
    assert summary["rejected"] == 6
    assert summary["loss"] is None
    assert (tmp_path / "run" / "accuracy.png").exists()


# Catalogues


def test_methods_are_listed(cli: Cli) -> None:
    said = cli("methods")
    assert (said.code, said.err) == (0, "")
    assert_fits(said.out)
    found = json.loads(cli("methods", "--json").out)
    assert list(found) == sorted(found)
    assert {*METHODS, "fedgauss", "fedlda", "fedncm", "fedridge", "fedcof"} <= {*found}
    assert found["mp-fedcl"]["predictor_global"] == "global_prototype"
    for name, told in found.items():
        assert name in said.out
        assert told["family"] in said.out


def test_data_list_shows_which_sets_are_available(tmp_path: Path, cli: Cli) -> None:
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


@pytest.mark.usefixtures("rendered_figures")
@pytest.mark.parametrize("kind", ["label", "iid", "classes", "quantity"])
def test_data_show_prints_and_draws_the_partition(
    tmp_path: Path, cli: Cli, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("data", "show", "mnist-sample", "--partition.kind", kind, "--clients", 5)
    said = cli(*words, "--out", tmp_path / "picture.png")
    assert (said.code, said.err) == (0, "")
    assert_fits(said.out)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    # A figure that is there need not be drawn again.
    monkeypatch.setattr("mpfedcl.report.drawings.draw_partition", lambda *_: None)
    content = json.loads(cli(*words, "--out", tmp_path / "picture.png", "--json").out)
    assert content["classes"] == list("0123456789")
    assert list(content["clients"]) == [f"client-{number}" for number in range(5)]
    assert sum(sum(client["train"]) for client in content["clients"].values()) == 2000
    assert all(client["test"] == 1000 for client in content["clients"].values())
    assert cli(*words, "--out", tmp_path / "picture.png").out == said.out


def test_flags_without_a_value_combine_with_a_file(said: Say, images: Path, tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(small(images, rounds=1).to_toml())
    code, out, _ = said("run", path, "--json", "--out", tmp_path / "run")
    assert code == 0
    assert json.loads(out)["rounds"] == 1
