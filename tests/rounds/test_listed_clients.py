"""Which clients a record lists."""

from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfedcl.rounds.fairness import measure_fairness
from mpfedcl.rounds.listed_clients import (
    MOST_LISTED,
    ListedAccuracies,
    list_accuracies,
    mean_accuracy,
)
from mpfedcl.rounds.record import RoundRecord
from small_experiments import build_federation, save_vectors, small


def name_all(values: list[float | None]) -> dict[str, float | None]:
    return {f"client-{number:04}": value for number, value in enumerate(values)}


def test_few_clients_are_all_listed() -> None:
    few = name_all([50.0, None] * (MOST_LISTED // 2))
    assert list_accuracies(few, ["client-0000"]) == ListedAccuracies(few, None)


@given(values=st.lists(st.none() | st.floats(0, 100), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_of_many_those_that_took_part_and_how_all_are_spread(values: list[float | None]) -> None:
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
def test_a_record_mentions_only_who_took_part(tmp_path: Path, method: str) -> None:
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
    told, answered = record.to_json(), set(record.clients.answered)
    assert len(answered) == 13
    assert record.clients.missing == []
    assert set(record.loss_per_client or {}) == answered
    assert set(record.accuracy_per_client or {}) <= answered
    absent = [name for name in loop.engine.sizes if name not in answered]
    text = record.model_dump_json()
    assert not any(f'"{name}"' in text for name in absent)
    # Everybody is tested on the global model; of personal ones three are read.
    assert record.accuracy is not None
    assert record.accuracy_spread is not None
    assert record.accuracy_spread.clients == (1300 if method == "fedavg" else 3)
    main = loop._method.predictor_on("local_test")
    assert record.accuracy["local_test"][main] == pytest.approx(mean_accuracy(told), abs=1e-3)
    assert RoundRecord.model_validate(told) == record


def test_a_record_of_few_clients_has_no_spread(tmp_path: Path) -> None:
    save_vectors(tmp_path / "all.npz", num_train=60, num_test=9)
    record = build_federation(small(tmp_path, partition__kind="iid")).run_round(evaluate=True)
    assert "accuracy_spread" not in record.to_json()
