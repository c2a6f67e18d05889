"""Which of several methods is best, and which cannot be told from it."""

import math
from collections.abc import Mapping, Sequence

from mpfedcl.report.numbers import known, mean

_QUANTILES = {
    2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262,
}  # fmt: skip
"""Student's t, 97.5 %, by the number of pairs; beyond ten, as for ten: rather too wide."""


def marks(values: Mapping[str, Sequence[float | None]]) -> dict[str, str | None]:
    """Return "best", "within" or None for each name, by paired differences over seeds.

    within: the 95 % interval of the difference to the best contains 0. One seed says nothing.
    """
    means = {name: mean(known(each)) for name, each in values.items() if None not in each and each}
    ranked = {name: each for name, each in means.items() if each is not None}
    found: dict[str, str | None] = dict.fromkeys(values)
    if len(ranked) < 2:
        return found
    best = max(ranked, key=lambda name: ranked[name])
    found[best] = "best"
    for name in ranked.keys() - {best}:
        pairs = zip(values[best], values[name], strict=False)
        if _cannot_be_told([a - b for a, b in pairs if a is not None and b is not None]):
            found[name] = "within"
    return found


def _cannot_be_told(differences: Sequence[float]) -> bool:
    count, middle = len(differences), mean(differences)
    if count < 2 or middle is None:
        return middle == 0
    variance = sum((each - middle) ** 2 for each in differences) / (count - 1)
    return middle <= _QUANTILES[min(count, 10)] * math.sqrt(variance / count)
