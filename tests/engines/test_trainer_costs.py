"""What each trainer is thought to cost, and what that depends on."""

from dataclasses import replace
from pathlib import Path

import pytest

from mpfedcl.engines import hardware, trainer_costs
from mpfedcl.engines.trainer_costs import OWN_LOSS, PLAIN_LOSS, Training

MNIST_MODEL = {"weight_bytes": 4 * 796_672, "num_units": 3354}
HEAD = {"weight_bytes": 4 * 133_632, "num_units": 1034}
SMALL = {"weight_bytes": 4 * 16_704, "num_units": 586}


@pytest.fixture(autouse=True)
def _large_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_costs, "largest_cache", lambda: 32 * 2**20)


def shape(clients: int, rows: int, model: dict[str, int], operations: int = PLAIN_LOSS) -> Training:
    return Training(clients, rows, -(-rows // 32), min(32, rows), operations, **model)


def cheapest(training: Training) -> str:
    return min(costs := training.with_layers(), key=lambda name: costs[name])


MEASURED = [
    ((2, 400, MNIST_MODEL), "direct"),
    ((5, 400, MNIST_MODEL), "direct"),
    ((32, 512, MNIST_MODEL), "direct"),
    ((2, 192, HEAD), "direct"),
    ((32, 32, MNIST_MODEL), "factored"),
    ((64, 20, MNIST_MODEL), "factored"),
    ((8, 64, HEAD), "factored"),
    ((5, 1024, HEAD, OWN_LOSS), "stacked"),
    ((5, 1024, HEAD), "direct"),
]


@pytest.mark.parametrize(("case", "winner"), MEASURED)
def test_the_winner_is_as_measured(case: tuple[int, int, dict[str, int]], winner: str) -> None:
    assert cheapest(shape(*case)) == winner


@pytest.mark.parametrize(
    ("case", "winner"),
    [
        ((32, 32, HEAD, OWN_LOSS), "loop"),
        ((16, 400, HEAD, OWN_LOSS), "loop"),
        ((5, 400, SMALL, OWN_LOSS), "stacked"),
        ((32, 32, SMALL, OWN_LOSS), "stacked"),
        ((2, 400, SMALL, OWN_LOSS), "loop"),
    ],
)
def test_the_winner_beyond_linear_layers_is_as_measured(
    case: tuple[int, int, dict[str, int], int], winner: str
) -> None:
    costs = shape(*case).with_anything()
    assert min(costs, key=lambda name: costs[name]) == winner


def test_rows_are_written_out_where_there_are_many() -> None:
    found = [shape(8, rows, MNIST_MODEL).is_written_out for rows in (16, 64, 192, 512)]
    assert found == [False, False, True, True]


def test_more_company_never_speaks_for_training_in_turn() -> None:
    for rows in (16, 64, 256, 1024):
        gaps = [
            each["direct"] - min(each["factored"], each["stacked"])
            for each in (shape(count, rows, HEAD).with_layers() for count in (1, 2, 8, 64))
        ]
        assert gaps == sorted(gaps)


def test_a_model_beyond_the_cache_costs_more_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    training = shape(8, 256, MNIST_MODEL)
    near = training.with_layers()["direct"]
    monkeypatch.setattr(trainer_costs, "largest_cache", lambda: 2 * training.weight_bytes)
    assert training.with_layers()["direct"] == near
    monkeypatch.setattr(trainer_costs, "largest_cache", lambda: 2 * training.weight_bytes - 1)
    assert training.with_layers()["direct"] > near
    assert (
        replace(training, num_rows=1).with_layers()["direct"]
        > replace(training, num_steps=1).with_layers()["direct"]
    )


# The cache itself


def write(folder: Path, *sizes: str) -> Path:
    for number, size in enumerate(sizes):
        (folder / f"index{number}").mkdir(parents=True)
        (folder / f"index{number}" / "size").write_text(size)
    return folder


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        (("32K\n", "1024K\n", "32768K\n"), 32 * 2**20),
        (("48K", "2M"), 2 * 2**20),
        (("512",), 512),
        ((), hardware.USUAL_CACHE),
        (("many", "", "K", "-1K"), hardware.USUAL_CACHE),
    ],
)
def test_the_largest_cache_is_read(tmp_path: Path, sizes: tuple[str, ...], wanted: int) -> None:
    assert hardware.largest_cache(write(tmp_path / "cache", *sizes)) == wanted
