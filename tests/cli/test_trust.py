"""The command line in the hands of strangers: their run directories, and too little memory."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from command_processes import command, environment
from handwritten_runs import write_run
from mpfedcl.cli import main as program

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
