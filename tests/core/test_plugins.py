"""Entry points of other packages: found without an import, used by name."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.plugins import entry_points, load
from mpfedcl.data.loading import load_federated_data
from mpfedcl.data.sample_index import open_data_set
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.datasets import find_specification
from mpfedcl.experiment.settings import DatasetSettings
from mpfedcl.models.encoders.encoder import find_encoder

MODULE = '''
import numpy

from mpfedcl.experiment.datasets import DatasetSpecification

def striped(labels, num_clients, *, seed):
    """Deal samples in turn."""
    return [numpy.arange(first, len(labels), num_clients) for first in range(num_clients)]

def open_twins(dataset):
    from mpfedcl.data.sample_index import open_data_set
    return open_data_set(type(dataset)(name="mnist-sample"))

twins = DatasetSpecification("twins", "digits", "nowhere", always={}, open=open_twins)

class MeanEncoder:
    name, fingerprint, feature_size = "mean", "00", 1
    def __init__(self, rest, settings, device):
        self.rest = rest
'''
ENTRIES = """
[mpfedcl.partitions]
striped = tiny_plugin:striped
missing = tiny_plugin:nothing
[mpfedcl.datasets]
twins = tiny_plugin:twins
[mpfedcl.encoders]
mean = tiny_plugin:MeanEncoder
onnx = tiny_plugin:MeanEncoder
[console_scripts]
tiny = tiny_plugin:striped
"""


@pytest.fixture(autouse=True)
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a tiny distribution on sys.path."""
    (tmp_path / "tiny_plugin.py").write_text(MODULE)
    info = tmp_path / "tiny_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    entry_points.cache_clear()
    yield
    sys.modules.pop("tiny_plugin", None)
    entry_points.cache_clear()


def test_entry_points_are_found_without_importing_them() -> None:
    assert list(entry_points("mpfedcl.partitions")) == ["striped", "missing"]
    assert entry_points("mpfedcl.methods") == {}
    assert "tiny_plugin" not in sys.modules


def test_object_that_cannot_be_imported_is_rejected() -> None:
    entry = entry_points("mpfedcl.partitions")["missing"]
    with pytest.raises(InvalidInput, match=r"partition.kind is 'missing'.*tiny_plugin:nothing"):
        load(entry, "partition.kind")


@pytest.mark.whole
def test_partition_of_another_package_splits_the_samples(tmp_path: Path) -> None:
    # In a new process, because settings list the partitions when they are imported.
    program = """
        from mpfedcl import Experiment
        from mpfedcl.data.client_split import split_among_clients
        from mpfedcl.data.sample_index import open_data_set
        experiment = Experiment(clients=5, partition={"kind": "striped"}).resolved()
        split = split_among_clients(open_data_set(experiment.dataset), experiment)
        print(split.training.sizes.tolist(), split.training["client-1"].rows[:3].tolist())
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert ended.stdout.split("] ")[0] == str([400] * 5)[:-1]
    assert ended.stdout.endswith("[1, 6, 11]\n")


def test_data_set_of_another_package_is_opened() -> None:
    assert find_specification("twins").summary == "digits"
    assert len(open_data_set(DatasetSettings(name="twins")).class_names) == 10
    data = load_federated_data(Experiment(clients=2, dataset={"name": "twins"}))
    assert len(data.clients) == 2


def test_encoder_of_another_package_is_found_but_never_replaces_a_built_in_one() -> None:
    assert find_encoder("mean:7", Path("weights")).rest == "7"  # type: ignore[attr-defined]
    with pytest.raises(InvalidInput, match=r"onnx:nothing\.onnx.*cannot be read"):
        find_encoder("onnx:nothing.onnx", None)
