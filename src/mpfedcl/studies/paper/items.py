"""The paper's tables and figures by name, in its order."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from mpfedcl.core.errors import InvalidInput
from mpfedcl.studies.paper import accuracy, efficiency, illustrations, robustness
from mpfedcl.studies.paper.datasets import PaperDatasets
from mpfedcl.studies.paper.item import PaperItem, Track

_BUILDERS: dict[str, Callable[[PaperDatasets], PaperItem]] = {
    "sent": accuracy.sent_table,
    "label": accuracy.label_skew_table,
    "feature": accuracy.feature_skew_table,
    "k": robustness.prototypes_per_class_figure,
    "alpha": robustness.label_skew_figure,
    "clients": robustness.client_count_figure,
    "efficiency": efficiency.final_accuracy_table,
    "rounds": efficiency.accuracy_at_rounds_figure,
    "reach": efficiency.rounds_to_accuracy_table,
    "time": efficiency.equal_time_table,
    "curves": efficiency.accuracy_curves_figure,
    "partitions": illustrations.partition_pictures,
    "embeddings": illustrations.embedding_pictures,
}
ITEM_IDS = tuple(_BUILDERS)


def find_items(ids: Iterable[str], datasets: PaperDatasets) -> list[PaperItem]:
    """Return the items by id, `all` for every one, with the data sets that there are."""
    wanted = list(dict.fromkeys(ids))
    if not wanted:
        raise InvalidInput(
            f"no table is named; it must be all, or one or more of {', '.join(ITEM_IDS)}."
        )
    if "all" in wanted:
        wanted = list(ITEM_IDS)
    for each in wanted:
        if each not in _BUILDERS:
            raise InvalidInput(
                f"{each!r} is not a table of the paper; it must be all, or one or more of "
                f"{', '.join(ITEM_IDS)}."
            )
    return [_BUILDERS[each](datasets) for each in wanted]


def select_tracks(item: PaperItem, tracks: Iterable[Track]) -> PaperItem:
    """Return an item with the cells of some tracks only."""
    kept = set(tracks)
    return replace(item, cells=tuple(cell for cell in item.cells if cell.track in kept))
