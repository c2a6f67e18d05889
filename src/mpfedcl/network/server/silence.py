"""Clients that do not answer: after twice in a row they are left out for a while.

A round waits for everybody until its time is up; one client that is connected and says nothing
would cost that time in every round. But where now this client is silent and now that, leaving some
out saves no time, and costs what they would have sent: then all are asked.
"""

from collections.abc import Collection

import torch

from mpfedcl.core.tensors import Tensors

_PREFIX = "silent/"
_PATIENCE = 2
"""Times in a row that a client may be silent before it is left out."""
_LONGEST_REST = 64
"""Rounds that a client is left out at most, however often it was silent."""


class SilentClients:
    """How often each client was silent in a row, and when it is asked again.

    After the second time it is left out of 2 rounds, then of 4, of 8 and so on; yet all are asked
    in the round after one whose time was up because of a client that was not silent before.
    """

    def __init__(self) -> None:
        self._times: dict[str, int] = {}
        self._asked_in: dict[str, int] = {}
        """The round in which each silent client is asked again."""

    def note_answers(self, names: Collection[str]) -> None:
        """Note that clients have answered, come back or introduced themselves."""
        for name in names:
            self._times.pop(name, None)
            self._asked_in.pop(name, None)

    def note_silence(self, names: Collection[str], round_number: int) -> None:
        """Note that clients were asked in a round, and had not answered when its time was up."""
        for name in names:
            times = self._times[name] = self._times.get(name, 0) + 1
            rest = 2 ** (times - 1) if times >= _PATIENCE else 0
            self._asked_in[name] = round_number + 1 + min(rest, _LONGEST_REST)
        if any(self._times[name] == 1 for name in names):
            # Who was left out was left out in vain: the round lasted as long.
            self._asked_in = dict.fromkeys(self._asked_in, round_number + 1)

    def resting(self, round_number: int) -> dict[str, str]:
        """Return the clients that are left out of a round, with the reason for its record."""
        return {
            name: f"silent {self._times[name]} times in a row; asked again in round {asked_in}"
            for name, asked_in in self._asked_in.items()
            if asked_in > round_number
        }

    def state(self) -> Tensors:
        """Return what a resumed run must know."""
        return {
            f"{_PREFIX}{name}": torch.tensor([times, self._asked_in[name]])
            for name, times in self._times.items()
        }

    def restore(self, state: Tensors) -> None:
        """Continue from what `state` returned; entries of others are passed over."""
        found = {n.removeprefix(_PREFIX): v for n, v in state.items() if n.startswith(_PREFIX)}
        self._times = {name: int(each[0]) for name, each in found.items()}
        self._asked_in = {name: int(each[1]) for name, each in found.items()}
