"""Golden runs: what the code gave when they were recorded (`make golden` compares all of them)."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from golden_cases import METHODS, SMALL, Case, all_cases, choose

from golden import (
    Comparison,
    Explanation,
    Golden,
    Outcome,
    Runner,
    digest,
    read_explanations,
    read_golden,
    relative_difference,
    write_digests,
    write_folder,
)
from mpfedcl.methods import built_in_methods

pytestmark = pytest.mark.whole

HERE = Path(__file__).parent
GOLDEN = HERE / "golden.json"


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as running:
        yield running


@pytest.mark.parametrize("case", choose(small=True), ids=lambda case: case.name)
def test_result_is_the_golden_one(runner: Runner, case: Case) -> None:
    explanations = read_explanations(HERE / "explained.toml")
    verdict = Comparison(read_golden(GOLDEN), explanations).compare(case, runner)
    assert verdict.status in ("equal bits", "equal to 1e-10", "explained"), str(verdict)


def test_table_has_every_method_and_is_recorded() -> None:
    assert sorted(METHODS) == sorted(built_in_methods())
    cases = all_cases()
    names = {case.name for case in cases}
    assert len(names) == len(cases)
    assert names >= set(SMALL)
    assert names >= {case.like for case in cases if case.like}
    find = read_golden(GOLDEN)
    assert [case.name for case in cases if find(case) is None] == []
    assert GOLDEN.stat().st_size < 300_000


@pytest.mark.parametrize("change", [1e-13, 1e-8, -1e-3])
@pytest.mark.parametrize("at", [0, 57, 199])
def test_digest_sees_what_whole_tensors_show(change: float, at: int) -> None:
    wanted = numpy.cos(numpy.arange(200.0)).reshape(10, 20)
    found = wanted.copy()
    found.flat[at] += change
    whole, by_digest = (relative_difference(found, each) for each in (wanted, digest(wanted)))
    assert (whole > 1e-10) == (by_digest > 1e-10) == (abs(change) > 1e-10)
    assert relative_difference(wanted, digest(wanted)) == 0


def test_digest_sees_other_shapes_orders_and_nan() -> None:
    wanted = numpy.arange(12.0).reshape(3, 4)
    assert relative_difference(wanted.T.copy(), digest(wanted)) == math.inf
    swapped = wanted.copy()
    swapped[2, 2], swapped[2, 3] = wanted[2, 3], wanted[2, 2]
    assert relative_difference(swapped, digest(wanted)) > 1e-3
    swapped[2, 2] = math.nan
    assert relative_difference(swapped, digest(wanted)) == math.inf
    assert relative_difference(swapped, wanted) == math.inf


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_is_recorded_is_read_again(tmp_path: Path, is_whole: bool) -> None:
    base = Outcome(
        {"global_model/w": numpy.arange(6.0), "pool/vectors": numpy.ones((2, 3))},
        {"accuracy/local_test/global_classifier": 50.0, "epsilon": None},
    )
    other = Outcome(
        {"global_model/w": base.tensors["global_model/w"] + 1e-15},
        {"accuracy/local_test/global_classifier": None, "epsilon": 2.0},
    )
    first, second = Case("x/loop/1", "x"), Case("x/loopback", "x", like="x/loop/1")
    for case, outcome in ((first, base), (second, other)):
        write_folder(tmp_path, case, outcome)
    write_digests(tmp_path / "golden.json", {first: base, second: other})
    find = read_golden(tmp_path if is_whole else tmp_path / "golden.json")
    for case, outcome in ((first, base), (second, other)):
        golden = find(case)
        assert golden is not None
        assert golden.sha256 == outcome.sha256()
        assert max(golden.differences(outcome).values()) <= 1e-12
        swapped = base if outcome is other else other
        assert max(golden.differences(swapped).values()) == math.inf
    assert find(Case("y", "y")) is None


class Shifted(Runner):
    """Returns a known outcome, a number away from the recorded one."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self._outcome = outcome

    def run(self, case: Case) -> Outcome:
        return self._outcome


@pytest.mark.parametrize(
    ("shift", "explanation", "status"),
    [
        (0.0, None, "equal bits"),
        (1e-14, None, "equal to 1e-10"),
        (1e-5, None, "DIFFERS"),
        (1e-5, Explanation("a/*", "why"), "explained"),
        (1e-5, Explanation("b/*", "why"), "DIFFERS"),
        (1e-5, Explanation("a/*", "why", within=1e-6), "DIFFERS"),
        (1e-5, Explanation("a/*", "why", tensors="pool/*"), "DIFFERS"),
    ],
)
def test_difference_is_reported_unless_it_is_explained(
    shift: float, explanation: Explanation | None, status: str
) -> None:
    wanted = numpy.arange(1.0, 7.0)
    outcome = Outcome({"global_model/w": wanted * (1 + shift)}, {"loss": 1.0})
    recorded = Outcome({"global_model/w": wanted}, {"loss": 1.0})
    golden = Golden(recorded.tensors, recorded.numbers, recorded.sha256())
    comparison = Comparison(lambda _: golden, [explanation] if explanation else [])
    verdict = comparison.compare(Case("a/b", "x"), Shifted(outcome))
    assert verdict.status == status
    assert verdict.is_failure == (status == "DIFFERS")
    if status in ("DIFFERS", "explained"):
        assert "1.0e-05 at global_model/w" in verdict.remark
