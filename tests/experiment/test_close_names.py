"""Names that nobody knows: which one was probably meant."""

from pathlib import Path

import pytest

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.names import METHODS, did_you_mean, did_you_mean_setting

KNOWN = ["rounds", "dataset.name", "dataset.root", "partition.alpha", "train.lr", "fedopt.lr"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("fedvag", "fedavg"),
        ("FedAvg", "fedavg"),
        ("MP-FedCL", "mp-fedcl"),
        ("mp_fedcl", "mp-fedcl"),
        ("FEDGAUSS", "fedgauss"),
        ("scafold", "scaffold"),
    ],
)
def test_close_method_names_are_suggested(name: str, meant: str) -> None:
    assert did_you_mean(name, METHODS) == f" (did you mean {meant}?)"


def test_known_name_is_its_own_suggestion() -> None:
    assert all(f"mean {name}?" in did_you_mean(name, METHODS) for name in METHODS)


@pytest.mark.parametrize("name", ["nope", "", "-", "xyz"])
def test_distant_names_give_no_suggestion(name: str) -> None:
    assert did_you_mean(name, METHODS) == ""
    assert did_you_mean_setting(name, KNOWN) == ""


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("alpha", "partition.alpha"),
        ("lr", "train.lr or fedopt.lr"),
        ("dataset", "dataset.name"),
        ("Dataset_Root", "dataset.root"),
        ("partition.alfa", "partition.alpha"),
        ("round", "rounds"),
    ],
)
def test_close_setting_names_are_suggested(name: str, meant: str) -> None:
    assert did_you_mean_setting(name, KNOWN) == f" (did you mean {meant}?)"


@pytest.mark.parametrize(
    ("document", "meant"),
    [
        ("lr = 0.1", "; did you mean train.lr?"),
        ("round = 3", "round is not a setting; did you mean rounds?"),
        ("[trian]\nlr = 1", "trian is not a setting; did you mean train?"),
        ("mu = 1", "mu is not a setting; did you mean fedprox.mu or moon.mu?"),
        ("[partition]\nalfa = 1", "; did you mean partition.alpha?"),
        ("[partitoin]\nalpha = 1", "partitoin is not a setting; did you mean partition?"),
    ],
)
def test_unknown_settings_in_files_give_a_suggestion(document: str, meant: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        Experiment.parse_toml(document, Path("mine.toml"))
    assert meant in str(refusal.value)
