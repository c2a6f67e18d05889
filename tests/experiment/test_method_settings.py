"""Sections that methods declare in their own files, read without running them."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command_processes import environment
from mpfedcl import Experiment, InvalidInput
from mpfedcl.experiment.method_settings import built_in_sections
from mpfedcl.experiment.settings import Settings
from mpfedcl.experiment.source_files import (
    method_files,
    partition_files,
    rule_files,
)
from mpfedcl.methods import built_in_methods
from mpfedcl.rounds.processors.clip import ClipSettings
from mpfedcl.rounds.processors.compress import CompressSettings

NOWHERE = Path("x.toml")
OUTSIDE = "not_here.module:Mine"


def test_names_are_those_of_the_files() -> None:
    assert list(built_in_methods()) == list(method_files())
    kinds = ["classes", "feature", "iid", "label", "natural", "quantity"]
    assert list(partition_files()) == kinds


def test_what_is_read_is_what_would_be_imported() -> None:
    real = [cls.settings_class() for cls in built_in_methods().values()]
    kinds: list[type[Settings]] = [*real, ClipSettings, CompressSettings]
    named: dict[str, list[type[Settings]]] = {}
    for kind in kinds:
        if kind is not Settings:
            named.setdefault(kind.section, []).append(kind)
    assert named.keys() == built_in_sections().keys()
    for section, kind in built_in_sections().items():
        # Several files may declare parts of one section.
        fields = {n: field for each in named[section] for n, field in each.model_fields.items()}
        assert kind.__doc__ == named[section][0].__doc__
        assert repr(kind.model_fields) == repr({n: fields[n] for n in kind.model_fields})
        assert kind.model_fields.keys() == fields.keys()
        assert all(field.description for field in kind.model_fields.values())


def test_each_section_is_one_methods_own() -> None:
    files = [*method_files().values(), *rule_files().values()]
    texts = [path.read_text() for path in files]
    for section in built_in_sections():
        assert section not in Experiment.model_fields
        assert sum(f'section = "{section}"' in text for text in texts) == (section != "update")


def test_sections_are_used_like_all_others() -> None:
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
        ({"scaffoldd": {"x": 1}}, "scaffoldd is not a setting; an experiment has method, rounds,"),
        ({"method": "mine"}, "method is 'mine'; it must be one of "),
        ({"method": "mine", "mine": {}}, "method is 'mine'; it must be one of "),
        ({"method": OUTSIDE, "mine": 3}, "mine is not a setting; an experiment has method,"),
        ({"method": OUTSIDE, "fedprox": {"mu": -1}}, "fedprox.mu is -1; it must be"),
        ({"method": 3}, "method is '3'; it must be one of"),
    ],
)
def test_what_is_refused(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Experiment(**values)
    assert str(caught.value).startswith(sentence)
    assert str(caught.value).endswith(".")


def test_the_section_of_a_class_that_is_not_loaded_stays_a_table() -> None:
    document = f'method = "{OUTSIDE}"\n[mine]\nbeta = 0.5\nnames = ["a", "b"]\nother = {{x = 1}}\n'
    experiment = Experiment.parse_toml(document, NOWHERE)
    table = {"beta": 0.5, "names": ["a", "b"], "other": {"x": 1}}
    assert experiment.setting("mine__beta") == 0.5
    assert dict(experiment.flattened())["mine"] == table
    for kept in (experiment, experiment.replace(rounds=3), experiment.resolved()):
        assert dict(Experiment.parse_toml(kept.to_toml(), NOWHERE).flattened())["mine"] == table
    # To another method it says nothing.
    assert experiment.replace(method="fedavg") == Experiment(method="fedavg")


def test_experiments_travel_between_processes() -> None:
    table = Experiment(method=OUTSIDE, mine={"beta": 0.5})
    for experiment in (Experiment(method="fedprox", fedprox={"mu": 0.5}).resolved(), table):
        assert pickle.loads(pickle.dumps(experiment)) == experiment
        assert copy.deepcopy(experiment) == experiment


def test_names_and_sections_are_known_without_torch() -> None:
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
