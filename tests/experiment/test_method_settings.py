"""Sections that methods declare in their own files, read without running them."""

import copy
import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mpfedcl
from command_processes import environment
from mpfedcl import Experiment, InvalidInput
from mpfedcl.core.plugins import entry_points
from mpfedcl.data.partitions import PARTITION_FUNCTIONS
from mpfedcl.experiment.method_settings import built_in_sections
from mpfedcl.experiment.names import (
    AGGREGATION_RULES,
    METHODS,
    PARTITIONS,
    SECTIONS,
    SPLIT_BY_DOMAIN,
    method_names,
)
from mpfedcl.methods import built_in_methods, find_method
from mpfedcl.rounds.aggregation import RULES

NOWHERE = Path("x.toml")
OUTSIDE = "not_here.module:Mine"


def test_index_lists_all_methods_and_their_sections() -> None:
    methods = built_in_methods()
    files = sorted((Path(mpfedcl.__file__).parent / "methods").glob("[!_]*.py"))
    names = [file.stem.replace("_", "-") for file in files]
    assert list(methods) == list(METHODS)
    assert names == sorted({*METHODS, "base", "messages", "predictors"})
    own = {name: cls.settings_class().section for name, cls in methods.items()}
    named = {name: SECTIONS.get(name, name.replace("-", "_")) for name in METHODS}
    assert all(section in ("", named[name]) for name, section in own.items())
    assert built_in_sections().keys() == set(own.values()) - {""}


def test_index_lists_all_partitions_and_aggregation_rules() -> None:
    assert list(RULES) == list(AGGREGATION_RULES)
    assert sorted(PARTITION_FUNCTIONS) == list(PARTITIONS)
    for kind, partition in PARTITION_FUNCTIONS.items():
        first = next(iter(inspect.signature(partition).parameters))
        assert (first == "domains") == (kind in SPLIT_BY_DOMAIN)


def test_every_setting_of_a_method_has_a_description() -> None:
    for kind in built_in_sections().values():
        assert kind.section not in Experiment.model_fields
        assert all(field.description for field in kind.model_fields.values())


def test_sections_of_methods_behave_like_built_in_sections() -> None:
    experiment = Experiment(method="fedprox", fedprox={"mu": 0.5})
    assert experiment.setting("fedprox__mu") == 0.5
    assert experiment.replace(fedprox__mu=1, rounds=3).setting("fedprox__mu") == 1.0
    assert ("fedprox.mu", 0.5) in experiment.flattened()
    # The others' are there too, with their defaults, and in the same order however they came.
    assert ("dbscan.min_samples", 3) in experiment.flattened()
    same = Experiment(dbscan={}, fedprox=experiment.fedprox, method="fedprox")  # type: ignore[attr-defined]
    assert same == experiment
    assert same.to_toml() == experiment.to_toml()
    assert Experiment.parse_toml("[fedprox]\nmu = 2\n", NOWHERE).setting("fedprox__mu") == 2.0
    assert Experiment.parse_toml(experiment.to_toml(), NOWHERE) == experiment
    assert experiment != experiment.replace(fedprox__mu=0.25)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"fedprox": {"mu": -1}}, "fedprox.mu is -1; it must be greater than or equal to 0."),
        ({"fedprox": {"nu": 1}}, "fedprox.nu is not a setting; [fedprox] has mu."),
        ({"fedprox": 3}, "fedprox is 3; it must be a table of settings."),
        ({"scaffoldd": {"x": 1}}, "scaffoldd is not a setting; did you mean scaffold?"),
        ({"method": "mine"}, "method is 'mine'; it must be one of "),
        ({"method": "mine", "undeclared": {}}, "method is 'mine'; it must be one of "),
        ({"method": OUTSIDE, "undeclared": 3}, "undeclared is not a setting; "),
        ({"method": OUTSIDE, "fedprox": {"mu": -1}}, "fedprox.mu is -1; it must be"),
        ({"method": 3}, "method is '3'; it must be one of"),
    ],
)
def test_invalid_method_settings_are_rejected(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Experiment(**values)
    assert str(caught.value).startswith(sentence)
    assert str(caught.value).endswith((".", "?"))


def test_section_of_a_class_that_is_not_loaded_is_kept_as_a_table() -> None:
    document = (
        f'method = "{OUTSIDE}"\n[undeclared]\nbeta = 0.5\nnames = ["a", "b"]\nother = {{x = 1}}\n'
    )
    experiment = Experiment.parse_toml(document, NOWHERE)
    table = {"beta": 0.5, "names": ["a", "b"], "other": {"x": 1}}
    assert experiment.setting("undeclared__beta") == 0.5
    assert dict(experiment.flattened())["undeclared"] == table
    for kept in (experiment, experiment.replace(rounds=3), experiment.resolved()):
        assert (
            dict(Experiment.parse_toml(kept.to_toml(), NOWHERE).flattened())["undeclared"] == table
        )
    # To another method it says nothing.
    assert experiment.replace(method="fedavg") == Experiment(method="fedavg")


def test_experiments_are_pickled_and_copied() -> None:
    table = Experiment(method=OUTSIDE, undeclared={"beta": 0.5})
    for experiment in (Experiment(method="fedprox", fedprox={"mu": 0.5}).resolved(), table):
        assert pickle.loads(pickle.dumps(experiment)) == experiment
        assert copy.deepcopy(experiment) == experiment


def test_names_and_sections_are_found_without_importing_torch() -> None:
    program = (
        "import sys; from mpfedcl.experiment import Experiment\n"
        "print(Experiment(fedprox={'mu': 2}, partition={'kind': 'iid'}).setting('fedprox__mu'))\n"
        "print(sorted({'torch', 'tyro', 'mpfedcl.methods'} & sys.modules.keys()))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert ended.stdout.splitlines() == ["2.0", "[]"]


def test_method_of_an_installed_package_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "offered.py").write_text(
        "from mpfedcl.methods import Method\n\n\nclass Offered(Method):\n"
        "    name, summary = 'offered', 'FedAvg by another name'\n"
    )
    described = tmp_path / "offered-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[mpfedcl.methods]\noffered = offered:Offered\n")
    monkeypatch.syspath_prepend(tmp_path)
    entry_points.cache_clear()
    try:
        assert "offered" in method_names()
        assert Experiment(method="offered").method == "offered"
        assert find_method("offered").summary == "FedAvg by another name"
    finally:
        entry_points.cache_clear()
