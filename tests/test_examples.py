"""The scripts among the examples that have no test of their own elsewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mpfedcl
from command_processes import environment
from small_experiments import EXAMPLES


def test_own_model_and_data_run_by_name_with_running_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    name = "own_model_and_data"
    result = mpfedcl.run(
        "fedavg",
        tmp_path / "run",
        model=f"{name}:resnet",
        dataset={"name": f"{name}:Digits"},
        clients=2,
        rounds=1,
        train={"steps": 2},
    )
    mean = result.global_model.get_buffer("0.inner.1.running_mean")
    assert torch.count_nonzero(mean) == 16
    assert result.experiment.model.name == f"{name}:resnet"


@pytest.mark.thorough
def test_own_model_and_data_runs_as_it_stands(tmp_path: Path) -> None:
    words = [sys.executable, str(EXAMPLES / "own_model_and_data.py")]
    ended = subprocess.run(
        words, cwd=tmp_path, env=environment(), check=True, capture_output=True, text=True
    )
    rows = re.findall(r"^ (\S+) +[▲≈]?(\d+\.\d)\(", ended.stdout, re.MULTILINE)
    assert [name for name, _ in rows] == ["fedavg", "fedprox", "scaffold", "fedbn", "mp-fedcl"]
    assert all(float(accuracy) > 75 for _, accuracy in rows)
    [figure] = tmp_path.glob("runs/*/figure.pdf")
    assert figure.read_bytes().startswith(b"%PDF")
    assert len((EXAMPLES / "own_model_and_data.py").read_text().splitlines()) < 60
