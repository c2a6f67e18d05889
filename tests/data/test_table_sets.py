"""Tables: what is read, and what becomes of the columns."""

import datetime
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import polars
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from sklearn.preprocessing import StandardScaler

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.client_split import is_same_partition, split_among_clients
from mpfedcl.data.loading import load_federated_data
from mpfedcl.data.sample_index import open_data_set
from mpfedcl.data.samples import SampleIndex
from mpfedcl.data.tables import TableStore, fit_columns, open_own_tables
from mpfedcl.experiment import Experiment
from table_files import open_table, save_table


def table(root: Path, **changes: Any) -> Experiment:
    settings = {"dataset__name": "table", "dataset__root": root, "dataset__label": "y"}
    return Experiment(clients=2, dtype="float64").replace(**settings | changes)


def load(root: Path, **changes: Any) -> FederatedData:
    return load_federated_data(table(root, partition__kind="iid", **changes))


def rows_of(data: FederatedData) -> list[list[float]]:
    """All rows, each client's training rows first, then the test."""
    parts = [*(client.inputs for client in data.clients), data.test_inputs]
    return sorted(row for part in parts for row in part.tolist())


def sites_of(found: SampleIndex) -> dict[str, list[str]]:
    names = found.class_names
    return {each.name: [names[n] for n in each.train.labels] for each in found.domains}


@pytest.mark.parametrize("kind", ["feature", "label"])
def test_standardization_equals_that_of_pooled_training_rows(tmp_path: Path, kind: str) -> None:
    x, y = load_breast_cancer(return_X_y=True)
    frame = polars.DataFrame(x).with_columns(y=y, site=numpy.arange(len(x)) % 3)
    frame.write_parquet(tmp_path / "breast.parquet")
    experiment = table(
        tmp_path / "breast.parquet", clients=3, dataset__client="site", partition__kind=kind
    ).resolved()
    data = load_federated_data(experiment)
    found = open_data_set(experiment.dataset)
    split = split_among_clients(found, experiment)
    training = numpy.concatenate([each.rows for each in split.training.values()])
    assert 0 < len(training) < 0.6 * len(x)
    oracle = StandardScaler().fit(x[training])
    columns = data.partition["columns"]["columns"]
    numpy.testing.assert_allclose([c["mean"] for c in columns], oracle.mean_, rtol=1e-12)
    numpy.testing.assert_allclose([c["deviation"] for c in columns], oracle.scale_, rtol=1e-12)
    for name, subset in split.training.items():
        wanted = oracle.transform(x[subset.rows])
        numpy.testing.assert_allclose(data.client(name).inputs, wanted, rtol=1e-9, atol=1e-12)
    numpy.testing.assert_allclose(
        data.test_inputs, oracle.transform(x[split.test.rows]), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("kind", ["feature", "label"])
def test_each_client_may_standardize_by_its_own_training_rows(tmp_path: Path, kind: str) -> None:
    """Test rows by the statistics of the client whom they test; words are those of all clients."""
    x, y = load_breast_cancer(return_X_y=True)
    site = numpy.arange(len(x)) % 3
    x = x * (1 + site[:, None])
    frame = polars.DataFrame(x).with_columns(
        word=polars.Series(numpy.array(["p", "q", "r"])[site]), y=y, site=site
    )
    frame.write_parquet(tmp_path / "breast.parquet")
    experiment = table(
        tmp_path / "breast.parquet",
        clients=3,
        dataset__client="site",
        dataset__standardize="client",
        partition__kind=kind,
        partition__alpha=2.0,
    ).resolved()
    data = load_federated_data(experiment)
    split = split_among_clients(open_data_set(experiment.dataset), experiment)
    words = numpy.eye(3)[site]
    for name, subset in split.training.items():
        oracle = StandardScaler().fit(x[subset.rows])
        tested = split.local_test[name]
        for rows, found in (
            (subset.rows, data.client(name).inputs),
            (split.test.rows[tested], data.test_inputs[tested]),
        ):
            wanted = numpy.hstack([oracle.transform(x[rows]), words[rows]])
            numpy.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)
        own = list(data.partition["clients"][name]["columns"].values())
        numpy.testing.assert_allclose([mean for mean, _ in own], oracle.mean_, rtol=1e-12)
    changed = experiment.replace(dataset__standardize="federated")
    assert not is_same_partition(data.partition, load_federated_data(changed).partition)
    assert is_same_partition(data.partition, load_federated_data(experiment).partition)


def test_named_columns_are_used_in_their_order_with_their_words(tmp_path: Path) -> None:
    path = save_table(tmp_path / "t.csv", "a,b,sex,y\n1,5,f,0\n3,6,m,0\n1,7,m,1\n3,8,x,1\n")
    named = {"dataset__columns": ("sex=m|f|d", "a"), "dataset__standardize": "none"}
    data = load(path, clients=1, **named)
    assert rows_of(data) == [[0, 0, 0, 3], [0, 1, 0, 1], [1, 0, 0, 1], [1, 0, 0, 3]]
    lines = "".join(f"{n},{n % 2}\n" for n in range(30))
    humid = open_table(save_table(tmp_path / "humid.csv", "humid,y\n" + lines), columns=("humid",))
    assert len(humid.store) == 30
    scaled = load(path, clients=1, dataset__columns=("a", "b"))
    plain = load(path, clients=1, dataset__drop=("sex",))
    assert is_same_partition(scaled.partition, plain.partition)


def test_columns_may_stay_as_they_are(tmp_path: Path) -> None:
    path = save_table(tmp_path / "t.csv", "a,b,y\n5,7,0\n7,7,0\n,7,1\n9,7,1\n")
    data = load(path, clients=1, dataset__standardize="none")
    assert rows_of(data) == [[0, 7], [5, 7], [7, 7], [9, 7]]
    assert "a number counts as 0, a word" in data.notices[0]


def test_statistics_of_clients_need_tables_and_test_rows_of_their_own(tmp_path: Path) -> None:
    path = save_table(tmp_path / "t.csv", "a,y\n" + "".join(f"{n},{n % 2}\n" for n in range(12)))
    with pytest.raises(InvalidInput, match=r"^partition.test is 'shared'; it must be 'matched' if"):
        load(path, dataset__standardize="client", partition__test="shared")
    with pytest.raises(
        InvalidInput, match=r"it must be 'federated' or 'none', because dataset.nam"
    ):
        Experiment().replace(dataset__standardize="client").resolved()
    with pytest.raises(InvalidInput, match=r"standardize is 'pooled'; it must be 'federated', 'cl"):
        Experiment().replace(dataset__standardize="pooled")


def test_column_statistics_are_precise_far_from_zero() -> None:
    raw = polars.DataFrame({"far": [1e9, 1e9 + 1, 1e9 + 2, 1e9 + 3], "same": [0.1] * 4})
    fitted = fit_columns(raw, "y", [numpy.array([0]), numpy.array([1, 2, 3]), numpy.array([], int)])
    far, same = fitted.columns
    assert (far.kind, same.kind) == ("numeric", "numeric")
    assert far.kind == "numeric"
    assert far.mean == 1e9 + 1.5
    assert far.deviation == pytest.approx(1.25**0.5, rel=1e-15)
    vectors = fitted.transform(raw.with_columns(same=polars.Series([0.1, 7, -7, 0.1])))
    assert vectors[:, 1].tolist() == [0, 0, 0, 0]
    assert vectors[:, 0].tolist() == pytest.approx(
        [-1.3416407865, -0.4472135955, 0.4472135955, 1.3416407865]
    )


@pytest.mark.parametrize("count", [3, 7, 1000, 12_345])
def test_constant_column_becomes_zero(count: int) -> None:
    for value in (0.1, 1 / 3, 1e-300, 3e38, -7e15):
        raw = polars.DataFrame({"a": numpy.full(count, value)})
        fitted = fit_columns(raw, "y", numpy.array_split(numpy.arange(count), 3))
        assert not fitted.transform(raw).any()


def test_words_are_one_hot_encoded() -> None:
    """By hand: rows 0 to 3 train; `plum` is nobody's, row 5 is missing."""
    words = polars.DataFrame({"fruit": ["pear", "apple", "pear", "apple", "plum", None]})
    clients = [numpy.array([0, 1]), numpy.array([2, 3])]
    fitted = fit_columns(words, "y", clients)
    assert fitted.to_json()["columns"] == [
        {"kind": "text", "name": "fruit", "categories": ["apple", "pear"]}
    ]
    vectors = fitted.transform(words)
    assert vectors.tolist() == [[0, 1], [1, 0], [0, 1], [1, 0], [0, 0], [0, 0]]


def test_columns_are_fitted_to_training_rows_only(tmp_path: Path) -> None:
    """Two rows of a class: one trains. Means and words are of the rows that do."""
    save_table(tmp_path / "t.csv", "a,b,y\n0,x,0\n10,y,0\n0,x,1\n10,y,1\n")
    experiment = table(tmp_path / "t.csv", clients=1, partition__kind="iid").resolved()
    data = load_federated_data(experiment)
    split = split_among_clients(open_data_set(experiment.dataset), experiment)
    (rows,) = (each.rows for each in split.training.values())
    number, word = data.partition["columns"]["columns"]
    assert number["mean"] == numpy.mean([0, 10, 0, 10], where=numpy.isin(range(4), rows))
    assert word["categories"] == sorted({"xyxy"[row] for row in rows})


def test_missing_values_are_reported_and_replaced_by_the_mean(tmp_path: Path) -> None:
    path = save_table(
        tmp_path / "t.csv",
        "age, sex ,y\n1,f,b\n,f,b\nNA,,b\n ? ,m,b\n3,m,a\n5,f,\n1,f,a\n3,m,a\nnan,f,a\n\n",
    )
    found = open_table(path)
    assert len(found.store) == 8
    assert found.class_names == ("a", "b")
    assert found.notices == (
        "t.csv: missing values: 5, in 2 of 2 columns; a number counts as the column's mean, a word "
        "as none of its words. rows without a label, left out: 2.",
    )
    data = load(path, clients=1)
    assert data.notices == found.notices
    assert sum(row[0] == 0 for row in rows_of(data)) >= 4
    assert sum(row[1:] == [0, 0] for row in rows_of(data)) == 1
    whole = open_table(save_table(tmp_path / "whole.csv", "a,y\n1,0\n2,1\n"))
    assert whole.notices == ()
    one = open_table(save_table(tmp_path / "one.csv", "a,y\n1,0\n,1\n"))
    assert one.notices == (
        "one.csv: missing values: 1, in 1 of 1 columns; a number counts as the column's mean, a "
        "word as none of its words.",
    )


CELLS = {"size": [1.5, 2.0, 3.0, 4.0], "hot": [True, False, True, False], "y": [1, 0, 10, 9]}


@pytest.mark.parametrize("extension", ["csv", "parquet"])
def test_csv_and_parquet_files_agree(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"t.{extension}"
    frame = polars.DataFrame({**CELLS, "hue": ["red", None, "blue ", "red"]})
    getattr(frame, f"write_{extension}")(path)
    found = open_table(path)
    assert found.class_names == ("0", "1", "9", "10")
    assert found.names_classes
    assert found.domains[0].train.labels.tolist() == [1, 0, 3, 2]
    assert sites_of(found) == {"t": ["1", "0", "10", "9"]}
    store: Any = found.store
    assert store.raw["size"].to_list() == [1.5, 2, 3, 4]
    assert store.raw["hot"].to_list() == [1, 0, 1, 0]
    assert store.raw["hue"].to_list() == ["red", None, "blue", "red"]


def test_domains_are_files_or_values_of_a_column(tmp_path: Path) -> None:
    save_table(tmp_path / "north.csv", "a,who,y\n1,x,cat\n2,z,dog\n")
    polars.DataFrame({"y": ["dog"], "a": [3], "who": ["x"]}).write_parquet(
        tmp_path / "south.parquet"
    )
    save_table(tmp_path / ".hidden.csv", "broken")
    save_table(tmp_path / "README.txt", "not a table")
    found = open_table(tmp_path)
    assert sites_of(found) == {"north": ["cat", "dog"], "south": ["dog"]}
    assert sites_of(open_table(tmp_path, client="who")) == {"x": ["cat", "dog"], "z": ["dog"]}
    chosen = open_table(tmp_path, domains=("south",))
    assert sites_of(chosen) == {"south": ["dog"]}
    assert chosen.class_names == ("cat", "dog")


def test_each_domain_of_a_table_is_a_client_under_feature_skew(tmp_path: Path) -> None:
    x, y = load_wine(return_X_y=True)
    sites = numpy.where(x[:, 0] > numpy.median(x[:, 0]), "strong", "light")
    path = tmp_path / "wine.csv"
    polars.DataFrame(x).with_columns(y=y, site=sites).write_csv(path)
    data = load_federated_data(
        table(path, clients=None, dataset__client="site", partition__kind="feature")
    )
    assert data.names == ("light", "strong")
    counts = numpy.stack([numpy.bincount(y[sites == name], minlength=3) for name in data.names])
    assert (numpy.abs(data.label_counts() - counts / 2) <= 0.5).all()
    pooled = load(path, dataset__client="site", clients=4)
    assert pooled.names == ("client-0", "client-1", "client-2", "client-3")
    assert pooled.input_size == 13


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["2", "10", "1"], ("1", "2", "10")),
        (["2.0", "10", "01"], ("1", "2", "10")),
        (["-1", "1", "NA"], ("-1", "1")),
        (["b", "NA", "a"], ("NA", "a", "b")),
        (["true", "false", "true"], ("false", "true")),
        (["10", "9", "x"], ("10", "9", "x")),
    ],
)
def test_classes_are_words_or_whole_numbers(
    tmp_path: Path, labels: Sequence[str], classes: tuple[str, ...]
) -> None:
    lines = "".join(f"{n},{label}\n" for n, label in enumerate(labels))
    assert open_table(save_table(tmp_path / "t.csv", "a,y\n" + lines)).class_names == classes


def test_columns_that_only_look_like_ids_dates_or_sentences_are_kept(tmp_path: Path) -> None:
    """Few values, repeated ones, fractions, and numbers of another name."""
    frame = polars.DataFrame({"n": range(100)}).select(
        serial="n",
        fluid=polars.col("n") + 0.5,
        wardid=polars.col("n") % 20,
        visit_id=polars.col("n") % 25,
        answer=polars.format("one of {} answers", polars.col("n") % 24),
        ward=polars.format("w{}", polars.col("n") % 50),
        spell=polars.format("2020-01-0{} or so", polars.col("n") % 9),
        y=polars.col("n") % 2,
    )
    frame.write_csv(tmp_path / "t.csv")
    store: Any = open_table(tmp_path / "t.csv").store
    assert store.raw.columns == frame.columns[:-1]


def test_dropped_columns_may_hold_anything_and_be_in_some_files_only(tmp_path: Path) -> None:
    day = datetime.date(2020, 1, 1)
    polars.DataFrame({"a": [1], "day": [day], "y": [0]}).write_parquet(tmp_path / "b.parquet")
    save_table(tmp_path / "a.csv", "a,y,note\n1,0,once upon a time\n2,1,the end\n")
    store: Any = open_table(tmp_path, drop=("day", "note")).store
    assert store.raw.columns == ["a"]
    assert len(store) == 3


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ([0.5, 1.0, 2.5], ("0.5", "1", "2.5")),
        (range(25), tuple(map(str, range(25)))),
    ],
)
def test_named_classes_may_be_any_numbers(
    tmp_path: Path, labels: Sequence[float], classes: tuple[str, ...]
) -> None:
    path = save_table(tmp_path / "t.csv", "a,y\n" + "".join(f"1,{each}\n" for each in labels))
    with pytest.raises(InvalidInput, match="no measurement"):
        open_table(path)
    assert open_table(path, classes=classes).class_names == classes


def test_many_numbers_are_classes_if_most_have_ten_rows(tmp_path: Path) -> None:
    """Real regression targets are refused; 25 well-filled classes are not."""
    x, y = load_diabetes(return_X_y=True)
    polars.DataFrame(x).with_columns(y=y).write_csv(tmp_path / "diabetes.csv")
    with pytest.raises(InvalidInput, match=r"214 different numbers, 214 of them in under 10 rows"):
        open_table(tmp_path / "diabetes.csv")
    lines = "".join(f"1,{n % 25}\n" for n in range(240))
    path = save_table(tmp_path / "classes.csv", "a,y\n" + lines)
    assert len(open_table(path).class_names) == 25


def test_column_with_a_word_in_any_file_is_text(tmp_path: Path) -> None:
    save_table(tmp_path / "a.csv", "code,y\n1,0\n2,1\n")
    save_table(tmp_path / "b.csv", "code,y\nx,0\n1,1\n")
    store: Any = open_table(tmp_path).store
    assert store.raw["code"].to_list() == ["1", "2", "x", "1"]


def test_new_rows_are_transformed_with_the_columns_of_a_run(tmp_path: Path) -> None:
    """A column of words stays one where all words look like numbers, and the other way round."""
    save_table(tmp_path / "t.csv", "a,code,y\n1,1,0\n3,x,0\n1,1,1\n3,x,1\n")
    data = load(tmp_path / "t.csv", clients=1)
    run_columns = fit_columns(
        polars.DataFrame({"a": [1.0, 3.0], "code": ["1", "x"]}),
        "y",
        [numpy.arange(2)],
    )
    assert data.partition["columns"]["columns"][0]["name"] == "a"
    new = save_table(tmp_path / "new.csv", "code,more,y,a\n1,9,1,5\n2,9,1,\n")
    found = open_own_tables(new, run_columns)
    assert str(found) == "vectors of 3 numbers"
    loaded = found.store.load(numpy.arange(2), *found.store.inspect())
    assert loaded.tolist() == [[3, 1, 0], [0, 0, 0]]
    save_table(new, "code,y,a\n1,1,old\n")
    with pytest.raises(InvalidInput, match=r"column 'a' has 'old' in row 1; it must be a number"):
        open_own_tables(new, run_columns)
    save_table(new, "code,y,a\n1,1,1e38\n")
    tiny = fit_columns(
        polars.DataFrame({"a": [0.0, 1e-9], "code": ["1", "1"]}),
        "y",
        [numpy.arange(2)],
    )
    found = open_own_tables(new, tiny)
    with pytest.raises(InvalidInput, match="too far from those of the training rows"):
        found.store.load(numpy.arange(1), *found.store.inspect())
    save_table(new, "code,a\n1,1\n")
    with pytest.raises(InvalidInput, match=r"lacks the column 'y'; it has code, a\."):
        open_own_tables(new, run_columns)


def test_changed_columns_change_the_partition(tmp_path: Path) -> None:
    """Standardized rows hide a shift; the columns on record do not."""
    path = save_table(tmp_path / "t.csv", "a,y\n" + "".join(f"{n},{n % 2}\n" for n in range(12)))
    before = load(path).partition
    assert is_same_partition(before, load(path).partition)
    save_table(path, "a,y\n" + "".join(f"{n + 5},{n % 2}\n" for n in range(12)))
    assert not is_same_partition(before, load(path).partition)


def test_time_of_a_wide_table_grows_with_its_width(tmp_path: Path) -> None:
    """A second; by column, and with names sought in lists, 8,000 columns took twelve."""
    names = [f"c{place}" for place in range(8000)]
    rows = [[*(str(row * place % 7) for place in range(8000)), "ab"[row % 2]] for row in range(6)]
    lines = [",".join(cells) for cells in [[*names, "y"], *rows]]
    (tmp_path / "wide.csv").write_text("\n".join(lines))
    began = time.process_time()
    store = open_data_set(table(tmp_path / "wide.csv").dataset).store
    assert time.process_time() - began < 7
    assert isinstance(store, TableStore)
    assert store.raw.columns == names
    assert store.raw.row(2) == tuple(float(2 * place % 7) for place in range(8000))


@pytest.mark.parametrize("names", [("^.*$", "a"), ("*", "a"), ("^a$", "a")])
def test_column_named_like_a_pattern_is_that_column(tmp_path: Path, names: Sequence[str]) -> None:
    lines = [",".join([*names, "y"]), "1,TRUE,no", "2,?,yes", "?,0,yes"]
    (tmp_path / "odd.csv").write_text("\n".join(lines))
    store = open_data_set(table(tmp_path / "odd.csv").dataset).store
    assert isinstance(store, TableStore)
    assert store.raw.columns == list(names)
    assert store.raw.rows() == [(1.0, 1.0), (2.0, None), (None, 0.0)]
