"""Metrics against scikit-learn, fairness, and the clients listed in a record."""

from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from sklearn import metrics as oracle

from mpfedcl import InvalidInput, Predictor, run
from mpfedcl.api import resume
from mpfedcl.data.loading import load_data_and_model
from mpfedcl.engines import evaluation
from mpfedcl.experiment.names import METRICS
from mpfedcl.methods import PredictorKind, find_method, prototype_rule
from mpfedcl.rounds import scoring
from mpfedcl.rounds.metrics import (
    MOST_LISTED,
    NUM_BINS,
    MetricValues,
    PredictedSamples,
    add_bins,
    count_bins,
    count_confusions,
    expected_calibration_error,
    find_own_metric,
    jain_index,
    join_metrics,
    list_accuracies,
    mean_accuracy,
    measure,
    measure_fairness,
)
from mpfedcl.rounds.record import RoundRecord
from small_experiments import build_federation, read_records, read_summary, save_vectors, small


def test_calibration_error_matches_a_hand_computation() -> None:
    """Use ten at 0.9 with 7 correct and ten at 0.6 with 6 correct: half of 20 points."""
    scores = torch.tensor([[0.9, 0.1]] * 10 + [[0.6, 0.4]] * 10, dtype=torch.float64).log()
    labels = torch.tensor([0] * 7 + [1] * 3 + [0] * 6 + [1] * 4)
    assert expected_calibration_error(count_bins(scores, labels)) == pytest.approx(10.0)


def test_error_of_perfect_calibration_is_zero() -> None:
    """Use bins whose share of correct predictions equals their probability."""
    scores, labels = [], []
    for right in (6, 7, 8, 9):
        scores += [[right / 10, 1 - right / 10]] * 10
        labels += [0] * right + [1] * (10 - right)
    bins = count_bins(torch.tensor(scores, dtype=torch.float64).log(), torch.tensor(labels))
    assert expected_calibration_error(bins) == pytest.approx(0, abs=1e-9)
    assert expected_calibration_error(add_bins([])) is None
    assert expected_calibration_error([]) is None


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(0, 60))
def test_bins_of_parts_add_up_and_agree_with_numpy(seed: int, count: int, cut: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(count, 4, generator=draw)
    labels = torch.randint(4, (count,), generator=draw)
    whole = count_bins(scores, labels)
    parts = [count_bins(scores[:cut], labels[:cut]), count_bins(scores[cut:], labels[cut:])]
    assert add_bins(parts) == add_bins(reversed(parts)) == whole
    # Adding up several clients or processes with the same predictions does not change the error.
    assert expected_calibration_error(add_bins([whole] * 3)) == expected_calibration_error(whole)
    exponents = numpy.exp(scores.double().numpy())
    shares = exponents / exponents.sum(axis=1, keepdims=True)
    top, right = shares.max(axis=1), shares.argmax(axis=1) == labels.numpy()
    place = numpy.digitize(top, numpy.linspace(0, 1, NUM_BINS + 1), right=True)
    gaps = [
        (place == n).mean() * abs(right[place == n].mean() - top[place == n].mean())
        for n in set(place.tolist())
    ]
    assert expected_calibration_error(whole) == pytest.approx(100 * sum(gaps), abs=1e-5)


def error_of(path: Path) -> dict[str, float]:
    found: dict[str, float] = read_summary(path)["calibration_error"]
    records = read_records(path)
    assert records[-1]["calibration_error"] == found
    assert all("calibration_error" not in each for each in records[:-1])
    assert set(found) == {"local_test", "global_test"}
    return found


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("method", "change"),
    [
        pytest.param("fedgauss", {"workers": 2}, marks=pytest.mark.whole),
        ("local-gauss", {"engine": "stacked"}),
        ("local", {"engine": "stacked"}),
        ("fedavg", {"engine": "stacked"}),
    ],
)
def test_engines_agree_on_the_calibration_error(
    vectors: Path, tmp_path: Path, method: str, change: dict[str, Any]
) -> None:
    experiment = small(vectors, method, dtype="float64", partition__test="matched")
    run(experiment, tmp_path / "one")
    run(experiment.replace(**change), tmp_path / "other")
    one = error_of(tmp_path / "one")
    assert all(0 < value < 100 for value in one.values())
    assert one == pytest.approx(error_of(tmp_path / "other"), abs=1e-4)


def test_prototype_predictors_have_no_calibration_error(images: Path, tmp_path: Path) -> None:
    run(small(images, rounds=1), tmp_path / "run")
    assert read_summary(tmp_path / "run")["calibration_error"] == {
        "local_test": None,
        "global_test": None,
    }


# All metrics of a predictor

Array = numpy.ndarray[Any, Any]


def by_scikit_learn(classes: Array, labels: Array, shares: Array | None) -> MetricValues:
    """Return all metrics but the calibration error, which scikit-learn does not have."""
    used = sorted({*labels.tolist(), *classes[classes >= 0].tolist()})
    present = sorted(set(labels.tolist()))
    found: MetricValues = {
        "accuracy": 100 * oracle.accuracy_score(labels, classes),
        "balanced_accuracy": 100
        * oracle.recall_score(labels, classes, average="macro", labels=present),
        "macro_f1": 100
        * oracle.f1_score(labels, classes, average="macro", labels=used, zero_division=0),
    }
    if shares is None:
        return found
    everything = range(shares.shape[1])
    areas = [oracle.roc_auc_score(labels == each, shares[:, each]) for each in present]
    return found | {
        "auroc": 100 * float(numpy.mean(areas)) if len(present) > 1 else None,
        "nll": oracle.log_loss(labels, shares, labels=everything),
        "brier": oracle.brier_score_loss(labels, shares, labels=everything),
    }


def assert_same_metrics(found: MetricValues, wanted: MetricValues) -> None:
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, abs=1e-9), name


@settings(max_examples=60, deadline=None)
@pytest.mark.filterwarnings("ignore:Only one class is present")
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(2, 5), st.integers(1, 5))
def test_metrics_are_those_of_scikit_learn(seed: int, count: int, classes: int, kept: int) -> None:
    """Few digits give ties, and labels of few classes leave some without a sample."""
    draw = numpy.random.default_rng(seed)
    shares = draw.dirichlet(numpy.ones(classes), count).round(1) + 0.1
    shares /= shares.sum(axis=1, keepdims=True)
    labels = draw.integers(0, min(kept, classes), count)
    samples = PredictedSamples(
        torch.from_numpy(shares).argmax(1), torch.from_numpy(labels), torch.from_numpy(shares)
    )
    found = measure(samples, classes, "accuracy")
    assert_same_metrics(found, by_scikit_learn(samples.classes.numpy(), labels, shares))
    # Twice the same samples have the same metrics.
    twice = PredictedSamples.join([samples, samples])
    assert twice is not None
    assert_same_metrics(measure(twice, classes, "accuracy"), found)


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_calibration_error_is_that_of_the_bins(seed: int, count: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(count, 3, generator=draw, dtype=torch.float64)
    labels = torch.randint(3, (count,), generator=draw)
    found = measure(PredictedSamples(scores.argmax(1), labels, scores.softmax(1)), 3, "accuracy")
    wanted = expected_calibration_error(count_bins(scores, labels))
    assert found["ece"] == pytest.approx(wanted, abs=1e-6)


def test_metrics_in_closed_form() -> None:
    labels = torch.tensor([0, 1, 2, 3] * 5)
    even = torch.full((20, 4), 0.25, dtype=torch.float64)
    found = measure(PredictedSamples(torch.zeros(20).long(), labels, even), 4, "accuracy")
    assert found == pytest.approx(
        {
            "accuracy": 25,
            "balanced_accuracy": 25,
            # The one predicted class has precision 1/4 and recall 1.
            "macro_f1": 10,
            "auroc": 50,
            "nll": numpy.log(4),
            "brier": 0.75,
            "ece": 0,
        }
    )
    certain = torch.nn.functional.one_hot(labels).double()
    best = measure(PredictedSamples(labels, labels, certain), 4, "accuracy")
    assert list(best.values()) == [100, 100, 100, 100, 0, 0, 0]


def test_undefined_metrics_are_none() -> None:
    labels, shares = torch.tensor([1, 1, 0]), torch.full((3, 2), 0.5, dtype=torch.float64)
    one_class = measure(PredictedSamples(labels[:2], labels[:2], shares[:2]), 2, "accuracy")
    assert [name for name, value in one_class.items() if value is None] == ["auroc"]
    without = measure(PredictedSamples(torch.tensor([1, -1, 0]), labels, None), 2, "accuracy")
    assert [without[name] for name in ("auroc", "nll", "brier", "ece")] == [None] * 4
    # No prediction is a wrong one.
    assert without["accuracy"] == pytest.approx(100 * 2 / 3)
    assert without["balanced_accuracy"] == pytest.approx(75)
    broken = measure(PredictedSamples(labels, labels, shares * torch.nan), 2, "accuracy")
    assert (broken["accuracy"], broken["nll"]) == (100, None)
    nothing = PredictedSamples(labels[:0], labels[:0], shares[:0])
    assert measure(nothing, 2, "accuracy") == dict.fromkeys(METRICS)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_counts_and_values_of_clients_give_the_metrics_over_all(
    seed: int, sizes: list[int]
) -> None:
    draw = torch.Generator().manual_seed(seed)
    clients, confusions, values = [], {}, {}
    for number, size in enumerate(sizes):
        shares = torch.rand(size, 3, generator=draw, dtype=torch.float64).softmax(1)
        labels = torch.randint(3, (size,), generator=draw)
        clients.append(PredictedSamples(shares.argmax(1), labels, shares))
        values[f"client-{number}"] = measure(clients[-1], 3, "accuracy")
        if size:
            confusions[f"client-{number}"] = count_confusions(shares.argmax(1), labels, 3)
    whole = PredictedSamples.join(clients)
    assert whole is not None
    found, wanted = join_metrics(confusions, values), measure(whole, 3, "accuracy")
    assert (found.pop("auroc"), found.pop("ece")) == (None, None)
    assert found == pytest.approx({name: wanted[name] for name in found})


def recall_of_last(probabilities: Array, labels: Array) -> float:
    last = probabilities.shape[1] - 1
    found: float = (probabilities.argmax(1)[labels == last] == last).mean()
    return found


def fails(probabilities: Array, labels: Array) -> float:
    raise ValueError("first line\nsecond line")


def says_nothing(probabilities: Array, labels: Array) -> None:
    return None


def changes_its_input(probabilities: Array, labels: Array) -> float:
    probabilities[0] = 0
    return 1.0


def refuses_one_class(probabilities: Array, labels: Array) -> float:
    if len(set(labels.tolist())) < 2:
        raise ValueError("one class")
    return 0.5


OWN = f"{__name__}:recall_of_last"


def test_own_metric_gets_probabilities_and_labels() -> None:
    own = find_own_metric(OWN, 3)
    shares = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.1, 0.8], [0.2, 0.7, 0.1]], dtype=torch.float64)
    samples = PredictedSamples(shares.argmax(1), torch.tensor([0, 2, 2]), shares)
    assert measure(samples, 3, OWN, own)[OWN] == 0.5
    assert find_own_metric("macro_f1", 3) is None
    # NaN is undefined.
    none = PredictedSamples(samples.classes[:1], samples.labels[:1], shares[:1])
    with pytest.warns(RuntimeWarning, match="empty slice|invalid value"):
        assert measure(none, 3, OWN, own)[OWN] is None


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("fails", "which failed (ValueError: first line at "),
        ("says_nothing", "which returned 'None'; it must return a number"),
        ("changes_its_input", "which failed (ValueError: assignment destination is read-only at "),
        ("absent", "it must name an importable package.module:function (AttributeError"),
        ("OWN", "it must name a function."),
    ],
)
def test_failing_function_is_refused_before_training(
    images: Path, tmp_path: Path, function: str, said: str
) -> None:
    metric = f"{__name__}:{function}"
    with pytest.raises(InvalidInput) as refusal:
        run(small(images, metric=metric), tmp_path / "run")
    assert str(refusal.value).startswith(f"metric is {metric!r}")
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run" / "rounds.jsonl").exists()


def test_function_that_fails_for_one_client_has_no_value_there(tmp_path: Path) -> None:
    save_vectors(tmp_path / "set" / "one.npz")
    metric = f"{__name__}:refuses_one_class"
    skewed = {
        "partition__kind": "classes",
        "partition__classes_per_client": 1,
        "partition__test": "matched",
    }
    run(small(tmp_path / "set", "fedavg", metric=metric, **skewed), tmp_path / "run")
    found = read_summary(tmp_path / "run")
    assert (found["metric"], found["metrics"]["local_test"][metric]) == (metric, 0.5)
    assert {each[metric] for each in found["metrics"]["per_client"].values()} == {None}
    assert [each["metric"]["global_test"] for each in read_records(tmp_path / "run")] == [0.5] * 2


def predictions_of(path: Path, name: str, kind: PredictorKind) -> tuple[Array, Array, Array]:
    """Return classes and probabilities for the global test set, from the saved models; labels."""
    trained = Predictor.load(path, name).trained
    experiment = trained.experiment
    data, model = load_data_and_model(experiment, torch.device("cpu"))
    method = find_method(experiment.method)(experiment, data.num_classes)
    file = f"models/{name}" if kind.model == "personal" else "model"
    embeddings, scores = model.apply(load_file(path / f"{file}.safetensors"), data.test_inputs)
    if kind.rule == "prototype":
        rule = prototype_rule(method)
        pool = trained.reference
        assert pool is not None
        squares = torch.cdist(rule.project(embeddings).double(), pool.vectors.double()) ** 2
        nearest = torch.stack(
            [squares[:, pool.labels == n].amin(1) for n in range(data.num_classes)], dim=1
        )
        scores = -nearest / (2 * experiment.contrast.temperature)
    shares = scores.double().softmax(1).numpy()
    return shares.argmax(1), shares, data.test_labels.numpy()


@pytest.mark.parametrize("test", ["matched", "shared"])
@pytest.mark.parametrize("method", ["fedavg", "local", "mp-fedcl"])
def test_summary_has_the_metrics_of_the_saved_models(
    vectors: Path, tmp_path: Path, method: str, test: str
) -> None:
    path = run(small(vectors, method, partition__test=test), tmp_path / "run").path
    summary = read_summary(path)
    experiment = Predictor.load(path, "client-0").trained.experiment
    data, _ = load_data_and_model(experiment, torch.device("cpu"))
    pooled, whole = [], []
    for client in data.clients:
        for of, predictor in (("local", "predictor"), ("global", "predictor_global")):
            kind = PredictorKind.of(summary[predictor])
            found = predictions_of(path, client.name, kind)
            if of == "global":
                whole.append(by_scikit_learn(found[0], found[2], found[1]))
                continue
            classes, shares, labels = (each[client.test.numpy()] for each in found)
            pooled.append((classes, labels, shares))
            assert_close(
                summary["metrics"]["per_client"][client.name],
                by_scikit_learn(classes, labels, shares),
            )
            own = summary["metrics"]["per_client"][client.name]
            assert own["accuracy"] == pytest.approx(summary["accuracy_per_client"][client.name])
    columns = [numpy.concatenate(each) for each in zip(*pooled, strict=True)]
    if test == "matched":
        assert_close(summary["metrics"]["local_test"], by_scikit_learn(*columns))
    else:
        assert summary["metrics"]["local_test"] == summary["metrics"]["global_test"]
    means: MetricValues = {
        name: float(numpy.mean([each[name] for each in whole])) for name in whole[0]
    }
    assert_close(summary["metrics"]["global_test"], means)
    errors = summary["calibration_error"]
    if method == "fedavg" or (method == "local" and test == "matched"):
        assert summary["metrics"]["local_test"]["ece"] == pytest.approx(errors["local_test"])


def assert_close(found: MetricValues, wanted: MetricValues) -> None:
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_too_many_samples_are_measured_by_client_only(
    vectors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    for module in (scoring, evaluation):
        # 60 test samples of 3 classes.
        monkeypatch.setattr(module, "MOST_PROBABILITIES", 60 * 3 - 1)
    run(small(vectors, method, partition__test="matched"), tmp_path / "run")
    found = read_summary(tmp_path / "run")
    assert set(found["metrics"]["local_test"].values()) == {None}
    assert found["accuracy"] is not None


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("fedgauss", {"workers": 2}),
        pytest.param("mp-fedcl", {"workers": 2}, marks=pytest.mark.whole),
        ("mp-fedcl", {"engine": "stacked"}),
    ],
)
def test_engines_agree_on_the_metrics(
    vectors: Path, tmp_path: Path, method: str, change: dict[str, Any]
) -> None:
    experiment = small(vectors, method, dtype="float64", metric="nll", partition__test="matched")
    run(experiment, tmp_path / "one")
    run(experiment.replace(**change), tmp_path / "other")
    one, other = (read_summary(tmp_path / name)["metrics"] for name in ("one", "other"))
    assert list(one["per_client"]) == list(other["per_client"])
    for test in ("local_test", "global_test"):
        assert one[test] == pytest.approx(other[test], rel=1e-5, abs=1e-4)
    for name, values in one["per_client"].items():
        assert other["per_client"][name] == pytest.approx(values, rel=1e-5, abs=1e-4)


def test_primary_metric_is_recorded_in_each_round_and_all_metrics_in_the_last(
    vectors: Path, tmp_path: Path
) -> None:
    plain = run(small(vectors, "fedavg"), tmp_path / "plain").path
    path = run(small(vectors, "fedavg", metric="brier"), tmp_path / "run").path
    records, summary = read_records(path), read_summary(path)
    assert [set(each["metric"]) for each in records] == [{"local_test", "global_test"}] * 2
    assert "metrics" not in records[0]
    assert records[1]["metrics"] == summary["metrics"] == read_summary(plain)["metrics"]
    assert records[1]["metric"]["local_test"] == summary["metrics"]["local_test"]["brier"]
    # A run that goes on has the records of one that never stopped.
    longer = run(small(vectors, "fedavg", metric="brier", rounds=3), tmp_path / "longer").path
    resume(path, 3)
    assert [each.get("metrics") for each in read_records(path)] == [
        each.get("metrics") for each in read_records(longer)
    ]


ACCURACIES = st.lists(st.floats(0, 100), min_size=1, max_size=60)


def test_jains_index_in_closed_form() -> None:
    assert jain_index([7.0] * 5) == pytest.approx(1)
    assert jain_index([0.0, 0.0]) == 1
    # One client has everything: 1/n. Two of four are served alike: 2/4.
    assert jain_index([80.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain_index([50.0, 50.0, 0.0, 0.0]) == 0.5
    # (1 + 2 + 3)^2 / (3 (1 + 4 + 9)).
    assert jain_index([1.0, 2.0, 3.0]) == pytest.approx(36 / 42)


def test_deciles_are_means_of_tenths() -> None:
    found = measure_fairness(range(100))
    assert found is not None
    assert (found.worst, found.worst_decile, found.best_decile) == (0, 4.5, 94.5)
    assert found.std == pytest.approx(stdev(range(100)), abs=1e-4)
    # Of eleven clients a tenth is two, of five it is one.
    eleven = measure_fairness([*range(11)])
    five = measure_fairness([5.0, 4.0, 3.0, 2.0, 9.0])
    assert eleven is not None
    assert five is not None
    assert (eleven.worst_decile, eleven.best_decile) == (0.5, 9.5)
    assert (five.worst_decile, five.best_decile) == (2, 9)


def test_fairness_ignores_clients_that_were_not_evaluated() -> None:
    found = measure_fairness([None, float("nan"), 40.0])
    assert found is not None
    assert (found.clients, found.mean, found.std, found.jain) == (1, 40, None, 1)
    assert measure_fairness([None]) is None
    assert measure_fairness([]) is None


@given(ACCURACIES)
def test_fairness_values_keep_their_order(values: list[float]) -> None:
    found = measure_fairness(values)
    assert found is not None
    rounding = 1e-4
    assert 1 / len(values) - rounding <= found.jain <= 1 + rounding
    assert found.mean == pytest.approx(fmean(values), abs=rounding)
    assert found.worst <= found.worst_decile + rounding
    assert found.worst_decile <= found.mean + rounding <= found.best_decile + 2 * rounding


def name_all(values: list[float | None]) -> dict[str, float | None]:
    return {f"client-{number:04}": value for number, value in enumerate(values)}


def test_few_clients_are_all_listed() -> None:
    few = name_all([50.0, None] * (MOST_LISTED // 2))
    assert list_accuracies(few, ["client-0000"]) == (few, None)


@given(values=st.lists(st.none() | st.floats(0, 100), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_many_clients_are_listed_by_participation_and_spread(values: list[float | None]) -> None:
    several = (values * (MOST_LISTED + 1))[: MOST_LISTED + len(values)]
    many = name_all(several)
    rows, spread = list_accuracies(many, ["client-0000", "client-1000", "elsewhere"])
    read = {name: many[name] for name in ("client-0000", "client-1000")}
    assert rows == {name: value for name, value in read.items() if value is not None}
    known = [value for value in several if value is not None]
    if not known:
        assert spread is None
        return
    assert spread is not None
    fairness = measure_fairness(several)
    assert fairness is not None
    assert {**dict(fairness), "quartiles": spread.quartiles} == dict(spread)
    assert spread.quartiles == pytest.approx(numpy.percentile(known, [25, 50, 75]), abs=1e-4)


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_record_names_only_participating_clients(tmp_path: Path, method: str) -> None:
    save_vectors(tmp_path / "all.npz", num_train=2600, num_test=30)
    experiment = small(
        tmp_path,
        method,
        clients=1300,
        fraction=0.01,
        evaluate_clients=3,
        partition__kind="iid",
        partition__min_size=1,
        partition__test="shared",
    )
    loop = build_federation(experiment)
    record = loop.run_round(evaluate=True)
    written, answered = record.to_json(), set(record.clients.answered)
    assert len(answered) == 13
    assert record.clients.missing == []
    assert set(record.loss_per_client or {}) == answered
    assert set(record.accuracy_per_client or {}) <= answered
    absent = [name for name in loop.engine.sizes if name not in answered]
    text = record.model_dump_json()
    assert not any(f'"{name}"' in text for name in absent)
    # The global model is tested on all clients, personal models on three.
    assert record.accuracy is not None
    assert record.accuracy_spread is not None
    assert record.accuracy_spread.clients == (1300 if method == "fedavg" else 3)
    main = loop._method.predictor_on("local_test")
    assert record.accuracy["local_test"][main] == pytest.approx(mean_accuracy(written), abs=1e-3)
    assert RoundRecord.model_validate(written) == record


def test_record_of_few_clients_has_no_spread(tmp_path: Path) -> None:
    save_vectors(tmp_path / "all.npz", num_train=60, num_test=9)
    record = build_federation(small(tmp_path, partition__kind="iid")).run_round(evaluate=True)
    assert "accuracy_spread" not in record.to_json()
