"""The items: which cells, which settings, which numbers beside them."""

from pathlib import Path

import pytest

from mpfedcl.core.errors import InvalidInput
from mpfedcl.studies.paper import ITEM_IDS, PaperItem, find_items, published
from mpfedcl.studies.paper.datasets import PaperDatasets
from mpfedcl.studies.paper.items import select_tracks
from small_experiments import save_images


@pytest.fixture
def everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PaperDatasets:
    """A data folder that holds all of the paper's sets, as far as a look at them tells."""
    for name, domains in {
        "mnist": ["mnist"],
        "digit5": ["mnist", "mnist_m", "svhn", "synth", "usps"],
        "office10": ["amazon", "caltech", "dslr", "webcam"],
        "domainnet": ["clipart", "infograph", "painting", "quickdraw", "real", "sketch"],
    }.items():
        for domain in domains:
            save_images(tmp_path / name / f"{domain}.npz", num_classes=10)
    monkeypatch.delenv("MPFEDCL_DATA", raising=False)
    return PaperDatasets(tmp_path)


def item(name: str, sets: PaperDatasets) -> PaperItem:
    (found,) = find_items([name], sets)
    return found


def test_every_published_number_stands_in_exactly_one_cell(everything: PaperDatasets) -> None:
    printed = sorted(
        [n for row in published.LABEL_SKEW.values() for n in row.values()]
        + [n for row in published.FEATURE_SKEW_DIGITS.values() for n in row.values()]
        + [n for t in published.EFFICIENCY.values() for r in t.values() for n in r.values()]
        + [n for t in published.EQUAL_TIME.values() for r in t.values() for n in r.values()]
    )
    shown = sorted(
        (cell.published.mean, cell.published.deviation)
        for each in find_items(ITEM_IDS, everything)
        for cell in each.cells
        if cell.published is not None and cell.published.deviation is not None
    )
    assert shown == printed


def test_rounds_are_the_paper_s(everything: PaperDatasets) -> None:
    table = item("label", everything)
    rounds = {c.row: c.experiment.rounds for c in table.cells if c.track == "paper"}
    assert rounds == {
        "local": 60, "fedavg": 110, "fedprox": 100, "fedproto": 100,
        "dp-fedcl": 60, "sp-fedcl": 60, "mp-fedcl": 60,
    }  # fmt: skip
    assert {c.experiment.rounds for c in table.cells if c.track == "tuned"} == {60}
    by_domain = item("feature", everything)
    assert {c.experiment.rounds for c in by_domain.cells if c.row == "fedavg"} == {130, 60}


def test_settings_are_the_defaults_but_for_what_a_table_varies(everything: PaperDatasets) -> None:
    for cell in item("label", everything).cells:
        assert cell.experiment.partition.alpha == 0.05
        assert cell.experiment.train.lr == 0.01
    alphas = {c.experiment.partition.alpha for c in item("alpha", everything).cells}
    assert alphas == {0.1, 0.2, 0.3, 0.5, 0.7, 1.0}
    clients = {c.experiment.clients for c in item("clients", everything).cells}
    assert clients == {5, 10, 20, 40}
    assert {c.experiment.prototypes.per_class for c in item("k", everything).cells} >= {1, 2, 3, 4}


def test_a_stand_in_goes_by_its_own_name_and_without_the_paper_s_numbers(tmp_path: Path) -> None:
    sets = PaperDatasets(tmp_path)
    table = item("label", sets)
    assert table.columns == {"mnist-sample": "MNIST sample"}
    assert all(cell.published is None for cell in table.cells)
    assert item("feature", sets).cells == ()
    assert any(
        "Digit-5 is not in the data folder as a whole; it is left out." in s for s in sets.missing
    )
    assert any("MNIST sample stands in." in s for s in sets.missing)


def test_rows_and_columns_have_titles(everything: PaperDatasets) -> None:
    for each in find_items(ITEM_IDS, everything):
        for cell in each.cells:
            assert cell.row in each.rows
            assert cell.column in each.columns
            if each.axis:
                float(cell.column)
        places = [(c.track, c.panel, c.measure.name, c.row, c.column) for c in each.cells]
        assert len(places) == len(set(places))


def test_experiments_are_listed_once(everything: PaperDatasets) -> None:
    wanted = item("feature", everything).experiments()
    assert len(wanted) == len({(track, each.to_toml()) for track, each in wanted}) == 2 * 7 * 3


def test_all_and_unknown_names(everything: PaperDatasets) -> None:
    assert [each.id for each in find_items(["all"], everything)] == list(ITEM_IDS)
    assert [each.id for each in find_items(["k", "k", "sent"], everything)] == ["k", "sent"]
    with pytest.raises(InvalidInput, match="'tables' is not a table of the paper"):
        find_items(["tables"], everything)


def test_tracks_can_be_chosen(everything: PaperDatasets) -> None:
    table = select_tracks(item("label", everything), ["paper"])
    assert {cell.track for cell in table.cells} == {"paper"}
