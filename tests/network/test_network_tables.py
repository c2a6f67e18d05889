"""Federations whose clients bring tables: agreed columns, each client's own statistics."""

import json
from pathlib import Path
from typing import Any

import polars
import pytest
import torch
from federations import OWN_TESTS, LoopbackFederation, assert_like_simulation, folder_experiment
from sklearn.datasets import load_breast_cancer

from mpfedcl import InvalidInput, Predictor, run
from mpfedcl.core.errors import RunCutShort
from mpfedcl.data.sample_index import open_own_samples
from mpfedcl.data.secret_split import find_secret, split_by_secret
from mpfedcl.data.tables import declare_columns
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.settings import DatasetSettings
from mpfedcl.network.client.client import NetworkClient
from mpfedcl.network.client.policy import ClientPolicy
from mpfedcl.network.setup.folders import ClientSettings
from mpfedcl.network.transport import FORMAT, Message
from mpfedcl.runs.plan import plan
from small_experiments import read_summary

SITES = ("north", "south", "west")
COLUMNS = ("mean radius", "worst area", "ward=er|icu", "mean texture")


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A file per site, each in its own units and order of columns; some cells are missing."""
    found = load_breast_cancer()
    frame = polars.DataFrame(found.data, schema=list(found.feature_names)).with_columns(
        diagnosis=polars.Series(found.target_names[found.target]),
        ward=polars.Series([("icu", "er", None)[n % 3] for n in range(569)]),
    )
    folder = tmp_path / "tables"
    folder.mkdir()
    for number, name in enumerate(SITES):
        own = frame[number :: len(SITES)][:80]
        gap = polars.when(polars.int_range(80) > 3).then(polars.col("mean texture"))
        scaled = own.with_columns(polars.col("mean radius") * 10**number, gap.alias("mean texture"))
        names = scaled.columns[number:] + scaled.columns[:number]
        scaled.select(names).write_csv(folder / f"{name}.csv")
    return folder


def on_tables(method: str, **changes: Any) -> Experiment:
    settings = {
        "dataset__name": "table",
        "dataset__label": "diagnosis",
        "dataset__columns": COLUMNS,
        "dataset__standardize": "client",
        "partition__kind": "feature",
        "partition__test": "matched",
        "clients": 3,
    }
    return folder_experiment(method, **settings | changes)


def federate(experiment: Experiment, tables: Path, folder: Path) -> LoopbackFederation:
    federation = LoopbackFederation(experiment, folder, count=0)
    for number, name in enumerate(SITES):
        federation.bring(number + 1, name, tables / f"{name}.csv")
    return federation


def split_rows(
    experiment: Experiment, tables: Path, folder: Path, name: str
) -> tuple[polars.DataFrame, polars.DataFrame]:
    """Return a client's rows to train and to test on."""
    file, columns = tables / f"{name}.csv", declare_columns(experiment.dataset)
    index = open_own_samples(file, None, columns)
    secret = find_secret(folder / f"memory-{name}")
    (domain,) = split_by_secret(index, secret, OWN_TESTS).domains
    assert domain.test is not None
    frame = polars.read_csv(file)
    return frame[domain.train.rows], frame[domain.test.rows]


@pytest.mark.parametrize("method", ["mp-fedcl", "fedavg", "fedgauss"])
@pytest.mark.parametrize("standardize", ["client", "none"])
def test_clients_with_tables_equal_simulation(
    tables: Path, tmp_path: Path, method: str, standardize: str
) -> None:
    experiment = on_tables(method, dataset__standardize=standardize)
    found = federate(experiment, tables, tmp_path).serve().path
    # The simulation is given what each client makes of its rows, and of its secret.
    own = {}
    for name in SITES:
        settings = ClientSettings(
            name,
            tmp_path / f"memory-{name}",
            tables / f"{name}.csv",
            policy=ClientPolicy(data={"test_fraction": OWN_TESTS}),
        )
        client = NetworkClient(settings)
        client.answer("hello", Message({"format": FORMAT, "experiment": experiment.to_toml()}))
        assert client.loaded is not None
        data = client.loaded[1]
        (samples,) = data.clients
        numbers = samples.inputs[:, [0, 1, 4]]
        if standardize == "client":
            torch.testing.assert_close(numbers.mean(dim=0), torch.zeros(3).double())
        else:
            assert (numbers[:, :2] > 1).all()
        train, test = (samples.inputs, samples.labels), (data.test_inputs, data.test_labels)
        own[name] = tuple(tuple(each.numpy() for each in part) for part in (train, test))
    plain = DatasetSettings()
    given = experiment.replace(dataset=plain.model_dump())
    wanted = run(given, tmp_path / "simulated", data=own)
    assert_like_simulation(found, wanted.path, wanted.experiment)


def test_client_predicts_rows_with_its_own_model_and_statistics(
    tables: Path, tmp_path: Path
) -> None:
    federation = federate(on_tables("fedproto"), tables, tmp_path)
    summary = read_summary(federation.serve().path)
    for name in SITES:
        (kept,) = (tmp_path / f"memory-{name}").glob("**/partition.json")
        columns = json.loads(kept.read_text())["columns"]["columns"]
        assert [each["name"] for each in columns] == [each.partition("=")[0] for each in COLUMNS]
        predictor = Predictor.load(kept.parent, name)
        _, frame = split_rows(on_tables("fedproto"), tables, tmp_path, name)
        found = predictor.predict(frame)
        right = [each.label == truth for each, truth in zip(found, frame["diagnosis"], strict=True)]
        accuracy = summary["accuracy_per_client"][name]
        assert 100 * sum(right) / len(right) == pytest.approx(accuracy)


def test_table_without_an_agreed_column_is_refused(
    tables: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tables / "west.csv"
    polars.read_csv(path).drop("worst area").write_csv(path)
    experiment = on_tables("fedavg", min_clients=3)
    with pytest.raises(RunCutShort, match="it cannot use its data, its encoder or its model"):
        federate(experiment, tables, tmp_path).serve()
    assert "west.csv lacks the column 'worst area'" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [{"dataset__label": None}, {"dataset__columns": ()}, {"dataset__standardize": "federated"}],
)
def test_clients_must_agree_on_columns_and_need_no_common_statistics(changes: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^dataset.name is 'table'; over a network dataset.l"):
        plan(on_tables("fedavg", **changes), over_network=True)
