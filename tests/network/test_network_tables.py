"""Federations whose clients bring tables: agreed columns, each client's own statistics."""

import json
from pathlib import Path
from typing import Any

import polars
import pytest
from federations import LoopbackFederation, assert_like_simulation, folder_experiment
from sklearn.datasets import load_breast_cancer

from mpfedcl import InvalidInput, Predictor, run
from mpfedcl.core.errors import RunCutShort
from mpfedcl.experiment import Experiment
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


@pytest.mark.parametrize("method", ["mp-fedcl", "fedavg", "fedgauss"])
@pytest.mark.parametrize("standardize", ["client", "none"])
def test_clients_with_tables_equal_simulation(
    tables: Path, tmp_path: Path, method: str, standardize: str
) -> None:
    experiment = on_tables(method, dataset__standardize=standardize)
    found = federate(experiment, tables, tmp_path).serve().path
    simulated = experiment.replace(dataset__root=tables)
    assert_like_simulation(found, run(simulated, tmp_path / "simulated").path, simulated)


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
        frame = polars.read_csv(tables / f"{name}.csv")
        found = predictor.predict(frame)
        right = [each.label == truth for each, truth in zip(found, frame["diagnosis"], strict=True)]
        assert abs(100 * sum(right) / 80 - summary["accuracy_per_client"][name]) < 10


def test_table_without_an_agreed_column_is_refused(
    tables: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tables / "west.csv"
    polars.read_csv(path).drop("worst area").write_csv(path)
    experiment = on_tables("fedavg", min_clients=3)
    with pytest.raises(RunCutShort, match="it cannot use its data, its encoder or its model"):
        federate(experiment, tables, tmp_path).serve()
    assert "west.csv lacks the column 'worst area'" in capfd.readouterr()[1]


@pytest.mark.parametrize(
    "changes",
    [{"dataset__label": None}, {"dataset__columns": ()}, {"dataset__standardize": "federated"}],
)
def test_clients_must_agree_on_columns_and_need_no_common_statistics(changes: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^dataset.name is 'table'; over a network dataset.l"):
        plan(on_tables("fedavg", **changes), over_network=True)
