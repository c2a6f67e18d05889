"""Settings of a user's own class: texts, whatever a file has."""

from pathlib import Path

import pytest

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment


def test_numbers_in_options_of_a_file_become_text(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text("[options]\nbeta = 0.5\nsteps = 3\nfast = true\nname = 'x'\n")
    found = Experiment.from_toml(path)
    assert found.options == {"beta": "0.5", "steps": "3", "fast": "true", "name": "x"}
    assert Experiment.parse_toml(found.to_toml(), path) == found
    for wrong in ("[1]", "nan", "{a = 1}"):
        path.write_text(f"[options]\nbeta = {wrong}\n")
        with pytest.raises(InvalidInput, match=r"options\.beta"):
            Experiment.from_toml(path)
