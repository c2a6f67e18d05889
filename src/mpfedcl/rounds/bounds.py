"""Bounds on updates that come from what the other clients send: what honest clients keep anyway.

The guard rejects what no honest client could send. What one could send and did not is bounded here:
by how many samples the others have, and by how far they moved the model in the round before. An
update is cut down to its bounds and still counts, so an honest client that differs loses a little,
and a lie gains little. All of it is known before a round's first update comes, so that updates
fold one by one.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from types import MappingProxyType

from torch import Tensor

from mpfedcl.experiment.settings import ValidationSettings
from mpfedcl.rounds.standing import trusted, update_standings

_MOST_MEDIANS = 5
"""Sums cannot be weighed less: a client with so many times the share cap is rejected."""


class RelativeBounds:
    """The bounds of one round.

    Args:
        settings: How strict they are.
        median_size: The median of the samples that clients claim to have, the lower of two; None
            without clients. One client of two must not set its own bound.
        length: The median length of the changes of the round before; None in the first one.
        standings: How far each client has gone the others' way so far.
    """

    def __init__(
        self,
        settings: ValidationSettings,
        median_size: int | None,
        length: float | None,
        standings: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.standings = standings
        self._settings = settings
        self._stated = settings.stated_sizes
        self.odd_factor = settings.odd_factor
        """How much the others must differ from a client's class means before it is rejected."""
        self._most_samples = math.inf if median_size is None else settings.share_cap * median_size
        self.longest_change = None if length is None else self.longest_of([length])
        """The length to which changes are clipped; None where no round before tells one."""

    def longest_of(self, lengths: Sequence[float]) -> float | None:
        """Return the length to which changes are clipped where these were seen."""
        found = [each for each in lengths if each > 0]
        return self._settings.clip_factor * median(found) if found else None

    def trust(self, client: str, standings: Mapping[str, float]) -> float:
        """Return what part of a client's weight counts by its standing."""
        return trusted(standings.get(client, 0.0), self._settings.strictness)

    def judge_directions(self, sketches: Mapping[str, Tensor]) -> dict[str, float]:
        """Return all standings after a round with these changes."""
        return update_standings(self.standings, sketches, self._settings.strictness)

    def judge_claim(self, client: str, num_samples: int) -> str | None:
        """Return why a client's sums may not count in full, as sums must, or None."""
        most = self._stated.get(client, _MOST_MEDIANS * self._most_samples)
        if num_samples <= most:
            return None
        return (
            f"it claims {num_samples:,} samples; at most {most:,.0f}, as the others have so few. "
            f"If it is true, say so: --validation.sizes {client}:{num_samples}"
        )

    def share(self, client: str, num_samples: int) -> float:
        """Return what part of a client's samples counts: at most `share_cap` times the median."""
        most = self._stated.get(client, self._most_samples)
        return min(1.0, most / max(1, num_samples))
