"""What somebody probably meant who gave a name that nobody knows."""

from collections.abc import Iterable
from difflib import get_close_matches

_LIKENESS = 0.66
"""From which share of common letters on two names are taken for the same one, mistyped."""
_MOST_SHOWN = 3


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the question, to stand behind a sentence; empty where no known name is near.

    Case, hyphens and underscores do not count.

    Example:
        >>> did_you_mean("fedvag", ["fedavg", "fedprox"]), did_you_mean("MP_FedCL", ["mp-fedcl"])
        (' (did you mean fedavg?)', ' (did you mean mp-fedcl?)')
    """
    plain = {_plain(each): each for each in known}
    return _ask([plain[each] for each in get_close_matches(_plain(name), plain, 1, _LIKENESS)])


def did_you_mean_setting(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the same question for settings, whose dotted names people shorten.

    Example:
        >>> known = ["rounds", "dataset.name", "dataset.root", "train.lr"]
        >>> did_you_mean_setting("lr", known), did_you_mean_setting("dataset", known)
        (' (did you mean train.lr?)', ' (did you mean dataset.name?)')
    """
    dotted, wanted = list(known), _plain(name)
    ends = [each for each in dotted if _plain(each.rpartition(".")[2]) == wanted]
    sections = [each for each in dotted if _plain(each.partition(".")[0]) == wanted]
    # The setting that a section begins with says which one: dataset.name, partition.kind.
    if found := ends[:_MOST_SHOWN] or sections[:1]:
        return _ask([prefix + each for each in found])
    by_plain = {_plain(each.rpartition(".")[2]): each for each in reversed(dotted)}
    by_plain |= {_plain(each): each for each in dotted}
    close = get_close_matches(wanted, by_plain, 1, _LIKENESS)
    return _ask([prefix + by_plain[each] for each in close])


def _plain(name: str) -> str:
    return name.casefold().replace("-", "").replace("_", "").replace(".", "")


def _ask(found: list[str]) -> str:
    if not found:
        return ""
    *others, last = found
    named = f"{', '.join(others)} or {last}" if others else last
    return f" (did you mean {named}?)"
