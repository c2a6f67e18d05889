"""Runs on tables: training, resume, prediction, joining, export, and rejected input."""

import datetime
import json
from pathlib import Path
from typing import Any

import numpy
import polars
import pytest
from sklearn.datasets import load_breast_cancer, load_digits, load_wine

from command_results import Refused
from mpfedcl import Experiment, InvalidInput, Predictor, resume, run
from mpfedcl.data.client_split import split_among_clients
from mpfedcl.data.sample_index import open_data_set
from mpfedcl.data.tables import read_rows
from mpfedcl.inference.export import export_run, load_check_samples
from mpfedcl.inference.membership import join
from mpfedcl.inference.trained_run import load_trained_run
from mpfedcl.runs.plan import plan
from small_experiments import Say, Warnings

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("own_places")]


def on_table(root: Path, label: str, **changes: Any) -> Experiment:
    settings = {
        "dataset__name": "table",
        "dataset__root": root,
        "dataset__label": label,
        "train__lr": 0.1,
    }
    return Experiment(method="fedavg", rounds=2).replace(**settings | changes)


def breast_cancer() -> polars.DataFrame:
    found = load_breast_cancer()
    frame = polars.DataFrame(found.data, schema=list(found.feature_names))
    sites = [f"clinic-{n % 3}" for n in range(len(found.data))]
    return frame.with_columns(
        diagnosis=polars.Series(found.target_names[found.target].tolist()),
        clinic=polars.Series(sites),
    )


@pytest.fixture(scope="module")
def cancer_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on three clinics, some numbers missing; the last rows are new to it."""
    root, frame = tmp_path_factory.mktemp("cancer"), breast_cancer()
    frame[469:].drop("diagnosis").write_csv(root / "new.csv")
    frame[469:].write_parquet(root / "late.parquet")
    is_known = polars.int_range(469) >= 7
    seen = frame[:469].with_columns(polars.when(is_known).then("mean area").alias("mean area"))
    seen.write_csv(root / "breast.csv")
    experiment = on_table(
        root / "breast.csv",
        "diagnosis",
        method="mp-fedcl",
        dataset__client="clinic",
        partition__kind="feature",
    )
    warnings = Warnings()
    result = run(experiment, root / "run", warnings.observer())
    assert warnings == [
        "breast.csv: missing values: 7, in 1 of 30 columns; a number counts as the column's mean, "
        "a word as none of its words."
    ]
    assert result.accuracy is not None
    # Six in ten are benign.
    assert result.accuracy > 88
    assert result.summary is not None
    assert list(result.summary["accuracy_per_client"]) == ["clinic-0", "clinic-1", "clinic-2"]
    return result.path


@pytest.mark.parametrize("name", ["wine", "digits"])
def test_real_tables_reach_their_accuracy_under_label_skew(tmp_path: Path, name: str) -> None:
    found = {"wine": load_wine, "digits": load_digits}[name]()
    frame = polars.DataFrame(found.data).with_columns(kind=found.target)
    frame.write_csv(tmp_path / "t.csv")
    experiment = on_table(tmp_path / "t.csv", "kind", partition__alpha=2.0, train__epochs=3)
    summary = run(experiment, tmp_path / "run").summary
    assert summary is not None
    assert summary["predictors"]["global_test"]["global_classifier"] > 80
    with pytest.raises(InvalidInput, match="has one domain"):
        run(experiment.replace(partition__kind="feature"), tmp_path / "other")


def test_new_rows_are_predicted(cancer_run: Path, said: Say) -> None:
    root = cancer_run.parent
    code, out, _ = said("predict", cancer_run, root / "new.csv", "--json")
    assert code == 0
    answers = [json.loads(line) for line in out.splitlines()]
    assert answers[7]["vector"] == f"{root}/new.csv[7]"
    truth = breast_cancer()[469:]["diagnosis"].to_list()
    right = numpy.mean([each["label"] == t for each, t in zip(answers, truth, strict=True)])
    assert right > 0.9
    # A table with its labels is as good, whatever the kind of file.
    assert said("predict", cancer_run, root / "late.parquet", "--json")[1].count("\n") == 100


@pytest.mark.parametrize("kind", ["polars", "pandas", "dicts", "path"])
def test_tables_in_memory_are_predicted_like_files(
    cancer_run: Path, said: Say, kind: str, tmp_path: Path
) -> None:
    """With gaps and with columns that the run does not know."""
    frame = breast_cancer()[469:].with_columns(day=datetime.date(2020, 1, 1))
    is_known = polars.int_range(100) >= 7
    frame = frame.with_columns(polars.when(is_known).then("mean area").alias("mean area"))
    path = tmp_path / "new.csv"
    frame.write_csv(path)
    wanted = [
        json.loads(line) for line in said("predict", cancer_run, path, "--json")[1].split("\n")[:-1]
    ]
    predictor = Predictor.load(cancer_run)
    table: Any = path if kind == "path" else frame
    if kind == "dicts":
        table = frame.to_dicts()
    elif kind == "pandas":
        table = pytest.importorskip("pandas").DataFrame(frame.to_dict(as_series=False))
    found = [each.to_json() for each in predictor.predict(table)]
    assert [{"vector": f"{path}[{n}]", **each} for n, each in enumerate(found)] == wanted
    assert len(predictor.embed(table)) == 100


def test_invalid_tables_in_memory_give_one_line(cancer_run: Path, tmp_path: Path) -> None:
    predictor, frame = Predictor.load(cancer_run), breast_cancer()
    for table, complaint in (
        (frame.drop("mean area"), "the given table lacks the column 'mean area'; it has"),
        (frame[:0], "the given table has no rows"),
        ([{"a": object()}], "the given table: column 'a' holds Object|lacks the column"),
        (frame.with_columns(polars.lit("x").alias("mean area")), "'mean area' has 'x' in row 1"),
        (str(tmp_path / "no.csv"), "no.csv"),
    ):
        with pytest.raises(InvalidInput, match=complaint) as caught:
            predictor.predict(table)
        assert "\n" not in str(caught.value)


def test_written_file_keeps_columns_and_adds_probabilities(
    tmp_path: Path, said: Say, refused: Refused
) -> None:
    """The probabilities are those of Python; the accuracy is that of the written labels."""
    frame = breast_cancer().with_columns(
        diagnosis=(polars.col("diagnosis") == "benign").cast(polars.Float64),
        patient=polars.format("p{}", polars.int_range(569)),
    )
    frame[:469].write_parquet(tmp_path / "seen.parquet")
    experiment = on_table(
        tmp_path / "seen.parquet", "diagnosis", dataset__drop=("patient", "clinic")
    )
    path = run(experiment, tmp_path / "run").path
    assert Predictor.load(path).class_names == ("0", "1")
    truth = polars.when(polars.int_range(100) > 0).then("diagnosis").alias("diagnosis")
    frame[469:].with_columns(truth).write_csv(tmp_path / "new.csv")
    code, out, _ = said("predict", path, tmp_path / "new.csv", "--csv", tmp_path / "out.csv")
    assert code == 0
    answers = polars.read_csv(tmp_path / "out.csv")
    assert answers.columns[:2] == ["sample", "mean radius"]
    assert answers["patient"].to_list() == [f"p{n}" for n in range(469, 569)]
    found = Predictor.load(path).predict(tmp_path / "new.csv")
    for name in "01":
        wanted = [each.probabilities[name] for each in found if each.probabilities]
        assert answers[f"probability_{name}"].to_list() == pytest.approx(wanted)
    assert [str(each) for each in answers["predicted"]] == [each.label for each in found]
    right = answers[1:].select(polars.col("predicted") == polars.col("diagnosis")).to_series()
    accuracy = 100 * right.sum() / 99
    assert f"accuracy on 99 rows with 'diagnosis': {accuracy:.1f} %" in out
    assert "out.csv (100 rows)" in out
    assert said("predict", path, tmp_path / "new.csv", "--csv", tmp_path / "no" / "out.csv")[0] == 2


def test_prototype_runs_say_why_they_give_no_probabilities(
    cancer_run: Path, tmp_path: Path, said: Say
) -> None:
    words = ("predict", cancer_run, cancer_run.parent / "late.parquet")
    code, out, error = said(*words, "--csv", tmp_path / "out.csv")
    assert (code, "accuracy on 100 rows with 'diagnosis'" in out) == (0, True)
    assert "No class probabilities: in this run of mp-fedcl the nearest prototype decides" in error
    answers = polars.read_csv(tmp_path / "out.csv")
    assert answers.columns[-3:] == ["predicted", "distance", "unknown"]
    assert "No class probabilities" in said(*words, "--json")[2]
    assert "No class probabilities" not in said(*words)[2]


def test_unusable_files_are_named(cancer_run: Path, tmp_path: Path, said: Say) -> None:
    (tmp_path / "bad.csv").write_text("mean radius,b\n1,2\n")
    (tmp_path / "bad.txt").write_text("1")
    code, _, error = said("predict", cancer_run, tmp_path / "bad.csv", tmp_path / "bad.txt")
    assert code == 2
    assert "bad.csv lacks the column 'mean texture'; it has mean radius, b." in error
    assert "bad.txt is not a table; this run takes rows of a CSV or Parquet file." in error


def test_client_joins_with_a_table(cancer_run: Path, tmp_path: Path, said: Say) -> None:
    late = cancer_run.parent / "late.parquet"
    joined = join(cancer_run, late, "late")
    assert joined.before["classifier"] is not None
    assert joined.before["classifier"] > 85
    frame = polars.read_parquet(late)
    gaps = frame.with_columns(
        polars.when(polars.int_range(100) > 0).then(polars.col("diagnosis")).alias("diagnosis")
    )
    gaps.write_csv(tmp_path / "gaps.csv")
    words = ("join", cancer_run, "--data", tmp_path / "gaps.csv", "--name", "late")
    code, out, error = said(*words)
    assert (code, error) == (0, "gaps.csv: rows without a label, left out: 1.\n")
    assert "vectors of 2 classes" in out
    frame.with_columns(diagnosis=polars.lit("unclear")).write_csv(tmp_path / "gaps.csv")
    assert (
        "which has the class 'unclear'; the run's classes are benign, malignant" in said(*words)[2]
    )


@pytest.fixture(scope="module")
def scaled_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on three clinics with other units each, which standardize by themselves."""
    root, frame = tmp_path_factory.mktemp("scaled"), breast_cancer()
    clinic = polars.int_range(569) % 3
    scaled = frame.with_columns(polars.col(frame.columns[:30]) * (1 + 9 * clinic) + 100 * clinic)
    scaled[:469].write_csv(root / "breast.csv")
    for name, own in scaled[469:].partition_by("clinic", as_dict=True).items():
        own.write_csv(root / f"{name[0]}.csv")
    experiment = on_table(
        root / "breast.csv",
        "diagnosis",
        method="mp-fedcl",
        dataset__client="clinic",
        dataset__standardize="client",
        partition__kind="feature",
    )
    return run(experiment, root / "run").path


def test_client_is_predicted_by_its_own_statistics(scaled_run: Path) -> None:
    """Test rows get the labels that the run counted; nearly all new rows get the right one."""
    experiment = load_trained_run(scaled_run).experiment
    frame = polars.read_csv(scaled_run.parent / "breast.csv")
    split = split_among_clients(open_data_set(experiment.dataset), experiment)
    confusion = json.loads((scaled_run / "confusion.json").read_text())
    for name, places in split.local_test.items():
        predictor = Predictor.load(scaled_run, name)
        found = predictor.predict(frame[split.test.rows[places]])
        counted = numpy.array(confusion["clients"][name]).sum(axis=0)
        labels = [each.label for each in found]
        assert [labels.count(each) for each in predictor.class_names] == counted.tolist()
        new = polars.read_csv(scaled_run.parent / f"{name}.csv")
        right = zip(predictor.predict(new), new["diagnosis"], strict=True)
        assert numpy.mean([each.label == truth for each, truth in right]) > 0.85
    remark = Predictor.load(scaled_run).remark or ""
    assert "by the training rows of all clients, because dataset.standardize is client" in remark


def test_new_client_is_standardized_by_its_own_rows(scaled_run: Path, tmp_path: Path) -> None:
    """Its units do not matter. It is not added, because the run could not keep its statistics."""
    frame = breast_cancer()[469:]
    frame.write_csv(tmp_path / "own.csv")
    frame.with_columns(polars.col(frame.columns[:30]) * 1024 + 4096).write_csv(tmp_path / "far.csv")
    own, far = (join(scaled_run, tmp_path / f"{name}.csv", "late") for name in ("own", "far"))
    assert own.before == far.before
    assert own.before["classifier"] is not None
    assert own.before["classifier"] > 80
    with pytest.raises(InvalidInput, match=r"^add is given; it must be left out"):
        join(scaled_run, tmp_path / "own.csv", "late", add=True)


def test_exported_file_describes_the_columns(cancer_run: Path, tmp_path: Path) -> None:
    predictor = Predictor.load(cancer_run)
    trained = predictor.trained
    assert trained.columns is not None
    exported = export_run(predictor, tmp_path / "m.onnx")
    numbers = exported.note["input"]["columns"]
    assert [each["name"] for each in numbers] == breast_cancer().columns[:30]
    path = cancer_run.parent / "new.csv"
    by_hand = polars.read_csv(path).select(
        (polars.col(each["name"]) - each["mean"]) / each["deviation"] for each in numbers
    )
    rows, _ = read_rows(path, trained.columns)
    numpy.testing.assert_allclose(by_hand.to_numpy(), rows, rtol=1e-9, atol=1e-12)
    # What a traced file is checked with before it is written: rows by the columns of the run.
    samples, origin = load_check_samples(trained, 50)
    assert (len(samples), origin) == (50, "test vectors of table")
    assert {each.label for each in predictor.predict(samples)} == {"benign", "malignant"}


def test_resume_with_another_table_is_rejected(cancer_run: Path) -> None:
    """Last: the table is changed."""
    assert len(resume(cancer_run, rounds=3).history) == 3
    path = cancer_run.parent / "breast.csv"
    frame = polars.read_csv(path)
    frame.with_columns(polars.col("mean radius") + 1).write_csv(path)
    with pytest.raises(InvalidInput, match="was started with other data"):
        resume(cancer_run, rounds=4)


def test_data_command_shows_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Say, refused: Refused
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{n},{'xyz'[n % 3]},{n % 2},{'ns'[n % 4 > 1]}\n" for n in range(24))
    (tmp_path / "t.csv").write_text("a,b,kind,site\n" + rows + ",x,0,n\n")
    words = ["--dataset.root", "t.csv", "--dataset.label", "kind", "--dataset.client", "site"]
    code, out, _ = said("data", "show", "table", *words, "--partition.kind", "feature")
    assert code == 0
    assert "t.csv: missing values: 1, in 1 of 2 columns; a number counts" in out
    assert "samples: vectors of 4 numbers" in out
    words_of_client = [*words, "--partition.kind", "feature", "--dataset.standardize", "client"]
    assert said("data", "show", "table", *words_of_client)[0] == 0
    assert "table" in said("data", "list")[1]
    sentence = refused("run", "--dataset.name", "table", *words[:2], "--dataset.label", "kin")
    assert "dataset.label is 'kin'; it must be a column of t.csv (did you mean kind?)." in sentence


def test_tables_are_rejected_over_a_network(cancer_run: Path) -> None:
    with pytest.raises(
        InvalidInput, match=r"dataset.name is .table.; over a network dataset.label and"
    ):
        plan(on_table(cancer_run.parent / "breast.csv", "diagnosis"), over_network=True)
