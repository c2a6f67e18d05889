"""What a budget costs, against formulas written out, and against noise that is drawn."""

import math

import pytest
import torch

from mpfedcl.core.errors import InvalidInput
from mpfedcl.gaussian import unpack_symmetric
from mpfedcl.gaussian.mechanism import PrivateSums, gaussian_multiplier
from mpfedcl.privacy.plan import Plan, to_json


def plan(**changes: object) -> Plan:
    values = {
        "unit": "record",
        "delta": 1e-5,
        "images": 4000,
        "clients": 4,
        "classes": 10,
        "dimensions": 16,
    }
    return Plan(**values | changes)  # type: ignore[arg-type]


def test_noise_and_errors_match_the_formulas() -> None:
    (row,) = plan().for_sums([3.0])
    z = gaussian_multiplier(3.0, 1e-5)
    assert row.sigma_means == pytest.approx(z * math.sqrt(2), rel=1e-4)
    assert row.sigma_moments == pytest.approx(z * 1.5, rel=1e-4)
    assert row.moment_sigma == pytest.approx(z * 1.5 * math.sqrt(2), rel=1e-4)
    assert row.means_error == pytest.approx(row.sigma_means * 4 / 400, rel=1e-9)


def test_errors_match_drawn_noise() -> None:
    made = plan()
    (row,) = made.for_sums([3.0])
    noise = torch.randn(2000, 16).norm(dim=1).mean() * row.sigma_means / 400
    assert row.means_error == pytest.approx(float(noise), rel=0.05)
    mechanism = PrivateSums("record", 1.5, row.sigma_moments, is_local=False)
    zeros = {
        "counts": torch.zeros(1),
        "sums": torch.zeros(1, 16),
        "moment": torch.zeros(16 * 17 // 2),
    }
    largest = [
        float(torch.linalg.eigvalsh(unpack_symmetric(mechanism.add_noise(zeros)["moment"], 16))[-1])
        for _ in range(20)
    ]
    # Of small matrices it is a little less than in the limit.
    expected = row.moments_error * 4000 / 16
    assert 0.7 * expected < sum(largest) / 20 < 1.1 * expected


def test_local_noise_adds_up_over_clients() -> None:
    (central,), (local,) = plan().for_sums([3.0]), plan(model="local").for_sums([3.0])
    assert local.sigma_means == central.sigma_means
    assert local.moment_sigma == pytest.approx(central.moment_sigma)
    assert local.means_error == pytest.approx(2 * central.means_error)
    assert local.moments_error == pytest.approx(2 * central.moments_error)


def test_advice_depends_on_the_number_of_images() -> None:
    sizes = (200, 600, 100_000)
    found = [plan(images=n, dimensions=64).for_sums([3.0])[0].advice for n in sizes]
    assert found == ["nothing", "means", "moments"]


def test_clipping_is_included_in_the_error_of_the_means() -> None:
    # 1,000 clients of 60 images: each adds 10 of its 26.8 of length.
    (row,) = plan(unit="client", clients=1000, images=60_000).for_sums([3.0])
    z = gaussian_multiplier(3.0, 1e-5)
    kept = 10 / (60 * math.sqrt(0.2))
    assert row.means_error == pytest.approx(10 * z * 4 / (kept * 6000), rel=1e-4)
    (few,) = plan(unit="client", clients=1000, images=1000).for_sums([3.0])
    assert few.means_error == pytest.approx(10 * z * 4 / 100, rel=1e-4)


def test_clients_needed_for_rounds_match_the_formula() -> None:
    changes = {"unit": "client", "rounds": 10, "parameters": 10_000}
    (row,) = plan(**changes, clients=1000).for_rounds([3.0])
    z = gaussian_multiplier(3.0, 1e-5) * math.sqrt(10)
    assert row.multiplier == pytest.approx(z, rel=1e-6)
    assert row.model_error == pytest.approx(z * 100 / 1000, rel=1e-6)
    assert row.clients_needed == math.ceil(z * 100)
    assert row.advice == "model"
    assert plan(**changes, clients=100).for_rounds([3.0])[0].advice == "nothing"


def test_plan_is_written_as_json() -> None:
    made = plan()
    told = to_json(made, made.for_sums([1.0, 3.0]))
    assert told["images"] == 4000
    assert [each["epsilon"] for each in told["budgets"]] == [1.0, 3.0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(
            ({name: 0}, f"{name} is 0; it must be at least 1")
            for name in ("images", "clients", "classes", "dimensions", "parameters")
        ),
        ({"rounds": -1}, "rounds is -1; it must be at least 0"),
        ({"fraction": 0.0}, "fraction is 0; it must be above 0"),
        ({"fraction": 1.01}, "fraction is 1.01; it must be above 0 and at most 1"),
        ({"rounds": 3}, "unit is 'record'; with rounds it must be client"),
    ],
)
def test_invalid_plan_is_rejected(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        plan(**changes)


def test_smallest_plan_is_accepted() -> None:
    least = plan(images=1, clients=1, classes=1, dimensions=1, parameters=1, fraction=1.0)
    assert least.for_sums([3.0])[0].advice == "nothing"


def test_epsilon_of_zero_is_rejected() -> None:
    with pytest.raises(InvalidInput, match=r"privacy.epsilon is 0"):
        plan().for_sums([0.0])
