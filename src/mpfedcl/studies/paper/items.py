"""The paper's tables and figures by name, in its order."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from mpfedcl.errors import InvalidInput
from mpfedcl.studies.paper import accuracy, efficiency, illustrations, robustness
from mpfedcl.studies.paper.item import Item, Track
from mpfedcl.studies.paper.sets import Sets

_MAKERS: dict[str, Callable[[Sets], Item]] = {
    "sent": accuracy.sent,
    "label": accuracy.label_skew,
    "feature": accuracy.feature_skew,
    "k": robustness.choose_k,
    "alpha": robustness.degrees_of_skew,
    "clients": robustness.numbers_of_clients,
    "efficiency": efficiency.after_the_rounds,
    "rounds": efficiency.at_rounds,
    "reach": efficiency.to_reach,
    "time": efficiency.at_the_same_time,
    "curves": efficiency.per_round,
    "partitions": illustrations.partitions,
    "embeddings": illustrations.embeddings,
}
ITEM_IDS = tuple(_MAKERS)


def find_items(ids: Iterable[str], sets: Sets) -> list[Item]:
    """Return the items by id, `all` for every one, with the data sets that there are."""
    wanted = list(dict.fromkeys(ids))
    if not wanted:
        raise InvalidInput(
            f"no table is named; it must be all, or one or more of {', '.join(ITEM_IDS)}."
        )
    if "all" in wanted:
        wanted = list(ITEM_IDS)
    for each in wanted:
        if each not in _MAKERS:
            raise InvalidInput(
                f"{each!r} is no table of the paper; it must be all, or one or more of "
                f"{', '.join(ITEM_IDS)}."
            )
    return [_MAKERS[each](sets) for each in wanted]


def choose_tracks(item: Item, tracks: Iterable[Track]) -> Item:
    """Return an item with the cells of some tracks only."""
    kept = set(tracks)
    return replace(item, cells=tuple(cell for cell in item.cells if cell.track in kept))
