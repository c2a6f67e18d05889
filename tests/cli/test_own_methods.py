"""Methods of one's own on the command line: their flags, their help, and where they come from."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pull_method
from command_processes import call, environment
from mpfedcl import Experiment
from mpfedcl.cli.main import parse
from mpfedcl.core.errors import InvalidInput
from small_experiments import Say, flags, read_summary

pytestmark = pytest.mark.whole

PULL = "pull_method:Pull"
SOURCE = Path(__file__).parents[2] / "src" / "mpfedcl"


def test_flags_of_custom_methods_have_help_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--pull.beta",
        "0.5",
        "--pull.norm",
        "absolute",
        "--pull.layers",
        "hidden",
        "classifier",
    ]
    found = parse(["run", "--method", PULL, *words, "--pull.limit", "3"]).settings
    wanted = {"beta": 0.5, "norm": "absolute", "layers": ("hidden", "classifier"), "limit": 3.0}
    assert found == Experiment(method=PULL, pull=wanted)
    assert parse(["run", f"--method={PULL}"]).settings == Experiment(method=PULL)
    with pytest.raises(SystemExit):
        parse(["run", "--method", PULL, "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--pull.beta FLOAT Weight of the pull to zero. (default: 0.01)" in text
    assert "--pull.norm {square,absolute}" in text
    assert "--pull.limit FLOAT Longest pull [default: none]." in text
    with pytest.raises(SystemExit):
        parse(["run", "--help"])
    text = capsys.readouterr().out
    assert "--pull" not in text
    assert "--fedprox.mu FLOAT" in text
    assert parse(["run"]).settings == Experiment()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (f"--method {PULL} --pull.beta -1", "pull.beta is -1.0; it must be greater than or equal"),
        (f"--method {PULL} --pull.beta much", "--pull.beta is 'much'; it must be a number"),
        (f"--method {PULL} --pull.norm odd", "--pull.norm is 'odd'; it must be one of"),
        (f"--method {PULL} --pull.gamma 1", "--pull.gamma is not an option"),
        ("--pull.beta 1", "--pull.beta is not an option"),
        ("--method fedprox --fedprox.mu -1", "fedprox.mu is -1.0; it must be greater than or"),
        ("--fedprox.nu 1", "--fedprox.nu is not an option"),
        ("--method odd", "method is 'odd'; it must be one of "),
        ("--method pull_method:Missing", "method is 'pull_method:Missing'; it must name an import"),
        ("--method pull_method:Careless", "whose settings have the section 'train'"),
        ("--method pull_method:Shadow", "whose settings have the section 'resolved'"),
        ("--method pull_method:Demanding", "whose setting 'beta' has no default; it must have one"),
        ("--method pull_method:Undecided --undecided.sizes x", "Error parsing --undecided.sizes"),
    ],
)
def test_invalid_flags_of_custom_methods_are_rejected(words: str, sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(["run", *words.split()])
    assert sentence in str(caught.value)


def test_file_names_the_method_and_flags_override_it(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(f'method = "{PULL}"\n[pull]\nbeta = 0.5\nnorm = "absolute"\n')
    found = parse(["run", str(file), "--pull.beta", "0.25"]).settings
    assert found == Experiment(method=PULL, pull={"beta": 0.25, "norm": "absolute"})
    assert parse(["run", "--method", PULL, str(file)]).settings == Experiment(
        method=PULL, pull={"beta": 0.5, "norm": "absolute"}
    )
    # Another method than the file's: what the file says of its own section is left out.
    other = parse(["run", str(file), "--method", "fedavg"]).settings
    assert other.resolved() == Experiment(method="fedavg").resolved()
    file.write_text(f'method = "{PULL}"\n[pull]\nbeta = -1\n')
    with pytest.raises(InvalidInput, match=r"x\.toml: pull\.beta is -1; it must be greater"):
        parse(["run", str(file)])


def test_file_with_an_unusual_suffix_is_read_completely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpfedcl.experiment.method_settings._declared", {})
    file = tmp_path / "settings.txt"
    file.write_text(f'method = "{PULL}"\n[pull]\nbeta = 0.5\n')
    found = parse(["run", str(file), "--rounds", "3"]).settings
    assert (found.rounds, found.setting("pull__beta")) == (3, 0.5)
    assert parse(["run", str(file), "--method", "fedavg"]).settings == Experiment(method="fedavg")


def test_commands_with_several_methods_have_the_flags_of_all() -> None:
    for command in ("compare", "tune"):
        words = ["--methods", "fedavg", PULL, "custom_method:Scaffold", "--pull.beta", "2"]
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(SOURCE.parents[1] / "examples")
            found = parse([command, *words, "--my-scaffold.server-lr", "3"]).settings
        assert (found.setting("pull__beta"), found.setting("my_scaffold__server_lr")) == (2, 3)
    with pytest.raises(InvalidInput, match=r"--pull\.beta is not an option"):
        parse(["compare", "--methods", "fedavg", "--pull.beta", "2"])


@pytest.mark.whole
@pytest.mark.usefixtures("forked_jobs")
def test_custom_method_is_compared_and_resumed(images: Path, tmp_path: Path, said: Say) -> None:
    words = [*flags(images, model__hidden=(8,)), "--pull.beta", 0.5]
    assert (
        said("compare", "--methods", PULL, "fedavg", "--seeds", 0, *words, "--out", tmp_path)[0]
        == 0
    )
    path = tmp_path / f"{PULL.replace(':', '.')}-seed0"
    assert "[pull]\nbeta = 0.5\n" in (path / "experiment.toml").read_text()
    assert "[pull]" not in (tmp_path / "fedavg-seed0" / "experiment.toml").read_text()
    assert said("run", "--resume", path, "--rounds", 3)[0] == 0
    assert read_summary(path)["rounds"] == 3
    code, _, error = said("run", "--resume", path, "--pull.beta", 1)
    assert code == 2
    assert "other settings stay as they were" in error


def run_installed(*words: object, cwd: Path) -> int:
    """Call the installed command, which does not look in the current folder by itself."""
    program = [str(Path(sys.executable).with_name("mpfedcl")), *map(str, words)]
    return subprocess.run(program, cwd=cwd, env=environment(), timeout=300, check=False).returncode


@pytest.mark.thorough
@pytest.mark.whole
def test_class_in_the_current_folder_is_found_by_the_method_flag_only(
    images: Path, tmp_path: Path
) -> None:
    shutil.copy(pull_method.__file__, tmp_path / "here_only.py")
    named = ["--method", "here_only:Pull"]
    words = [*flags(images, model__hidden=(8,)), "--pull.beta", 0.5, "--out", "run"]
    assert run_installed("run", *named, *words, "--workers", 2, cwd=tmp_path) == 0
    toml = tmp_path / "run" / "experiment.toml"
    assert "[pull]\nbeta = 0.5\n" in toml.read_text()
    for again in (["run", "run/experiment.toml"], ["run", "--resume", "run", "--rounds", 3]):
        ended = call(*again, cwd=tmp_path)
        assert ended.returncode == 2
        assert "method is 'here_only:Pull'; it must name an importable" in ended.stderr
        assert "the current folder is searched if --method names it" in ended.stderr
    again = ["run", "--resume", "run", "--rounds", "3", "--workers", "1", *named]
    assert call(*again, cwd=tmp_path).returncode == 0
    # Whoever only reads a run needs no class, and runs none.
    (tmp_path / "here_only.py").unlink()
    ended = call("report", "run", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "here_only:Pull" in page
    assert "beta = 0.5" in page
