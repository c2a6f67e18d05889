"""The command line in the hands of strangers: their run directories, and too little memory."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from command_processes import call, command, environment
from handwritten_runs import write_run
from mpfedcl.cli import main as program
from small_experiments import flags

pytestmark = pytest.mark.whole

METHOD = """
from pathlib import Path
from mpfedcl import Method

Path("taken-over").touch()


class Evil(Method):
    name, summary = "evil", "Runs where it should not."
"""


@pytest.mark.sampled(2)
@pytest.mark.whole
@pytest.mark.parametrize("words", ["predict run x.png", "run --resume run"])
def test_run_directory_does_not_execute_code_of_the_current_folder(
    tmp_path: Path, words: str
) -> None:
    path = write_run(tmp_path / "run")
    file = path / "experiment.toml"
    file.write_text(file.read_text().replace('"mp-fedcl"', '"evil:Evil"'))
    partition = json.loads((path / "partition.json").read_bytes())
    (path / "partition.json").write_text(json.dumps({**partition, "input_shape": [4, 4]}))
    (tmp_path / "evil.py").write_text(METHOD)
    ended = subprocess.run(
        command(*words.split()),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2
    assert "method is 'evil:Evil'; it must name an importable" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not (tmp_path / "taken-over").exists()


MODELS = """
from pathlib import Path
from torch import nn

Path(__name__ + " was imported").touch()


def small(num_classes, input_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, num_classes))
"""


@pytest.mark.whole
def test_models_of_the_current_folder_are_used_if_the_command_names_them(
    images: Path, tmp_path: Path
) -> None:
    for name in ("my_nets", "other_nets"):
        (tmp_path / f"{name}.py").write_text(MODELS)
    given = ["--rounds", 1, "--model.name", "my_nets:small", "--out", "run"]
    ended = call("run", *flags(images, method="fedavg"), *given, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (tmp_path / "my_nets was imported").unlink()
    samples = str(images / "stripes.npz")
    for words in (["predict", "run", samples, "--csv", "p.csv"], ["export", "run"]):
        refused = call(*words, cwd=tmp_path)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert "the current folder is searched if --model.name names it" in refused.stderr
        ended = call(words[0], "--model.name", "my_nets:small", *words[1:], cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
    # Only the module that was named: the run may be a stranger's.
    (tmp_path / "my_nets was imported").unlink()
    file = tmp_path / "run" / "experiment.toml"
    file.write_text(file.read_text().replace("my_nets:small", "other_nets:small"))
    refused = call("predict", "run", samples, "--model.name", "my_nets:small", cwd=tmp_path)
    assert refused.returncode == 2
    assert "model.name is 'other_nets:small'; it must name an importable" in refused.stderr
    assert (tmp_path / "my_nets was imported").exists()
    assert not (tmp_path / "other_nets was imported").exists()


def ask_for_an_exabyte() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def ask_for_memory() -> None:
    bytearray(2**60)


def fail() -> None:
    raise RuntimeError("a mistake of ours")


@pytest.mark.parametrize("ask", [ask_for_an_exabyte, ask_for_memory])
def test_out_of_memory_gives_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ask: object
) -> None:
    monkeypatch.setattr(program, "_dispatch", lambda _: ask())  # type: ignore[operator]
    with pytest.raises(SystemExit) as end:
        program.main([])
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert said.startswith("mpfedcl: there is not enough memory; clients, model and samples must")
    assert said.count("\n") == 1


def test_other_runtime_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_dispatch", lambda _: fail())
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        program.main([])
