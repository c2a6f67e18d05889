"""The examples in the docstrings of what users import: each is run as it stands."""

import doctest
import inspect
from pathlib import Path

import pytest

import mpfedcl

pytestmark = pytest.mark.whole

NAMES = [
    "Experiment",
    "Method",
    pytest.param("Predictor", marks=pytest.mark.whole),
    "PrototypePool",
    "Tracker",
    "cluster_prototypes",
    "compare",
    "load",
    "prototype_contrastive_loss",
    pytest.param("resume", marks=pytest.mark.whole),
    pytest.param("run", marks=pytest.mark.whole),
]


@pytest.mark.parametrize("name", NAMES)
def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    public = getattr(mpfedcl, name)
    module = inspect.getmodule(public)
    example = doctest.DocTestParser().get_doctest(
        inspect.getdoc(public) or "", {**vars(module), "folder": tmp_path}, name, None, None
    )
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
