"""The classes of a federation: all that its clients have, as far as these go together."""

from collections.abc import Collection, Mapping

from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.network.packing import Introduction


def find_odd_classes(members: Mapping[str, Introduction]) -> dict[str, str]:
    """Return which clients' classes do not go with those of most others, and why not.

    Of two that do not go together the one leaves that disagrees with more of the others.
    """
    # Most clients have the same, and are compared once.
    alike: dict[tuple[tuple[str, ...], bool], list[Introduction]] = {}
    for _, member in sorted(members.items()):
        alike.setdefault((member.classes, member.own_data), []).append(member)
    groups = list(alike.values())
    odd: dict[str, str] = {}
    while True:
        others = [[each for each in groups if _disagree(group[0], each[0])] for group in groups]
        counts = [sum(map(len, each)) for each in others]
        if not any(counts):
            return odd
        worst = max(range(len(groups)), key=lambda place: (counts[place], place))
        reason = _explain(groups[worst][0], others[worst][0][0])
        odd |= {member.name: reason for member in groups.pop(worst)}


def agree_on_classes(experiment: Experiment, members: Mapping[str, Introduction]) -> Experiment:
    """Return the experiment with the classes of all its clients, where it did not name them."""
    if experiment.dataset.classes:
        return experiment
    classes = sorted({name for member in members.values() for name in member.classes})
    if len(classes) < 2:
        raise InvalidInput(
            f"the clients know the class {', '.join(classes)} alone; there must be two or more."
        )
    return experiment.replace(dataset__classes=classes)


def list_some(names: Collection[str]) -> str:
    """Return names as they fit into a sentence."""
    shown = ", ".join(list(names)[:12])
    return shown if len(names) <= 12 else f"{shown} and {len(names) - 12} more"


def _disagree(one: Introduction, other: Introduction) -> bool:
    return not (_admits(one, other) and _admits(other, one))


def _admits(one: Introduction, other: Introduction) -> bool:
    """Tell whether a client can take part with the other's classes beside its own."""
    classes = sorted({*one.classes, *other.classes})
    if not one.own_data:
        # A share of the experiment's data set has the set's classes, and no others.
        return len(classes) == len(one.classes)
    # Labels by number stand for places, so they must be the first.
    return not _are_numbers(one.classes) or list(one.classes) == classes[: len(one.classes)]


def _explain(odd: Introduction, other: Introduction) -> str:
    return (
        f"its classes, {list_some(odd.classes)}, do not go with those of {other.name}, "
        f"{list_some(other.classes)}: dataset.classes must name the classes in order"
    )


def _are_numbers(classes: Collection[str]) -> bool:
    """Tell whether classes may be the labels of an npz file, which stand for places."""
    return all(name.isdecimal() for name in classes)
