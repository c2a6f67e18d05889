"""The classes that a federation's clients agree on, where nobody has named them before."""

from collections import Counter
from collections.abc import Collection, Mapping

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.network.packing import Introduction

_MOST_CLASSES = 1000
"""Of all clients together, where nobody has named them: every client's model has so many outputs,
and the confusion matrix grows with their square."""


def agree_on_classes(
    experiment: Experiment, members: Mapping[str, Introduction]
) -> tuple[Experiment, dict[str, str]]:
    """Return the experiment with the classes of its clients, where it did not name them.

    Return also why some clients cannot take part, by name. Those come first whose classes go
    together with most others': one with odd names must not end what the others have in common.
    """
    if experiment.dataset.classes:
        return experiment, {}
    refused = _find_too_many(members.values())
    left = [each for name, each in members.items() if name not in refused]
    if not left:
        reasons = (f"{name}: {reason}." for name, reason in sorted(refused.items()))
        raise InvalidInput(f"no client can take part. {' '.join(reasons)}")
    alike = {_kind(member): member for member in left}
    counts = Counter(map(_kind, left))
    fits = {
        kind: sum(counts[o] for o, other in alike.items() if not _explain_mixed_up(each, other))
        for kind, each in alike.items()
    }
    agreed: list[Introduction] = []
    for member in sorted(left, key=lambda each: (-fits[_kind(each)], each.name)):
        if reason := _explain_mixed_up(member, *agreed):
            refused[member.name] = reason
        else:
            agreed.append(member)
    classes = _all_classes(agreed)
    if len(classes) < 2:
        raise InvalidInput(
            f"the clients have only the class {', '.join(classes)}; there must be two or more."
        )
    return experiment.replace(dataset__classes=classes), refused


def _find_too_many(members: Collection[Introduction]) -> dict[str, str]:
    """Return whose classes are more than everybody should bear, and why, by name."""
    known: set[str] = set()
    refused: dict[str, str] = {}
    # Who brings most comes last, so that it cannot leave the others without room.
    for member in sorted(members, key=lambda each: (len(each.classes), each.name)):
        together = known.union(member.classes)
        if len(together) <= _MOST_CLASSES:
            known = together
        else:
            refused[member.name] = (
                f"with its {len(member.classes):,} classes there are {len(together):,}; at most "
                f"{_MOST_CLASSES:,}, unless dataset.classes names them"
            )
    return refused


def _kind(member: Introduction) -> tuple[tuple[str, ...], bool]:
    """Return what decides who it goes together with: most clients are alike, and compared once."""
    return member.classes, member.own_data


def _all_classes(members: Collection[Introduction]) -> list[str]:
    return sorted({name for member in members for name in member.classes})


def _explain_mixed_up(newest: Introduction, *others: Introduction) -> str | None:
    """Return why somebody's labels would stand for other classes with the newest client."""
    classes = _all_classes([newest, *others])
    for each in (newest, *others):
        if not each.own_data and len(each.classes) < len(classes):
            return (
                f"{each.name} has a share of the experiment's data set, which has the classes "
                f"{shorten_list(each.classes)}, and not all of {shorten_list(classes)}"
            )
        if _are_numbers(each.classes) and list(each.classes) != classes[: len(each.classes)]:
            who = "it has" if each is newest else f"with it {each.name} has"
            return (
                f"{who} classes by number, {shorten_list(each.classes)}, which are not the first "
                f"of all clients' classes, {shorten_list(classes)}: dataset.classes must name the "
                "classes in order"
            )
    return None


def _are_numbers(classes: Collection[str]) -> bool:
    """Tell whether classes may be the labels of an npz file, which stand for places."""
    return all(name.isdecimal() for name in classes)


def shorten_list(names: Collection[str]) -> str:
    """Return names for a sentence, a dozen at most."""
    shown = ", ".join(list(names)[:12])
    return shown if len(names) <= 12 else f"{shown} and {len(names) - 12} more"
