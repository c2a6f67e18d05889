"""Accuracy and loss of many clients by round: three lines in place of thousands."""

import numpy

from mpfedcl.core.json_files import Json
from mpfedcl.report.number_formatting import choose_evenly, finite_values, round_significant
from mpfedcl.rounds.record import RoundRecord

_TITLES = ("lower quartile", "median", "upper quartile")
_SHARES = (25, 50, 75)


class Quartiles:
    """The quartiles of each round, kept when the clients of the round are forgotten."""

    def __init__(self) -> None:
        self._accuracy: dict[int, list[float]] = {}
        self._loss: dict[int, list[float]] = {}

    def add(self, line: RoundRecord) -> None:
        """Take in a round."""
        if line.accuracy_spread is not None:
            self._accuracy[line.round] = line.accuracy_spread.quartiles
        elif known := finite_values(list((line.accuracy_per_client or {}).values())):
            self._accuracy[line.round] = numpy.percentile(known, _SHARES).tolist()
        if losses := finite_values(list((line.loss_per_client or {}).values())):
            self._loss[line.round] = numpy.percentile(losses, _SHARES).tolist()

    def describe(self, num_clients: int, most_points: int) -> Json:
        """Return a line per quartile, with at most so many rounds."""
        return {
            "names": [],
            "left_out": num_clients,
            "accuracy": _lines(self._accuracy, most_points),
            "loss": _lines(self._loss, most_points),
        }


def _lines(by_round: dict[int, list[float]], most_points: int) -> list[Json]:
    rounds = [list(by_round)[place] for place in choose_evenly(len(by_round), most_points)]
    return [
        {
            "name": title,
            "x": rounds,
            "mean": [round_significant(by_round[number][place], 5) for number in rounds],
        }
        for place, title in enumerate(_TITLES)
        if rounds
    ]
