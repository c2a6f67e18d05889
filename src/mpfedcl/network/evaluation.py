"""What clients read by themselves: only they have their test images, so it comes a round late."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpfedcl.methods import PREDICTORS, TESTS
from mpfedcl.network.message import MessageError
from mpfedcl.rounds.evaluation import AccuracyTable, ConfusionCounts, RoundEvaluation


@dataclass(frozen=True)
class ClientEvaluation:
    """What a client read of the round before: it travels with the next update."""

    table: AccuracyTable
    is_personal: bool
    """Whether the client trained in that round, so that its personal predictors count."""
    confusion: ConfusionCounts | None = None

    def to_values(self) -> dict[str, Any]:
        """Return plain values, as a message has them."""
        return {
            "table": self.table,
            "is_personal": self.is_personal,
            "confusion": self.confusion,
        }


def unpack_evaluation(values: Mapping[str, Any], num_classes: int) -> ClientEvaluation:
    """Read a client's predictors; nothing in them is trusted."""
    table, is_personal = values.get("table"), values.get("is_personal")
    confusion = values.get("confusion")
    try:
        sound: AccuracyTable = {
            test: {str(predictor): _percent(table[test].get(predictor)) for predictor in PREDICTORS}  # type: ignore[index]
            for test in TESTS
        }
    except (TypeError, KeyError, AttributeError, OverflowError):
        raise MessageError("a reading must be a table by test and reading") from None
    if type(is_personal) is not bool or not (
        confusion is None
        or (isinstance(confusion, list) and all(isinstance(row, list) for row in confusion))
    ):
        raise MessageError("a reading must say whether it is personal, and count in rows")
    predictors = ClientEvaluation(sound, is_personal, confusion)
    if reason := _judge(predictors, num_classes):
        raise MessageError(reason)
    return predictors


def gather_evaluations(predictors: Mapping[str, ClientEvaluation]) -> RoundEvaluation | None:
    """Join what clients read, in order of name; None where nobody did."""
    if not predictors:
        return None
    return RoundEvaluation.of_tables(
        {name: predictors[name].table for name in sorted(predictors)},
        [name for name in sorted(predictors) if predictors[name].is_personal],
        {n: counts for n in sorted(predictors) if (counts := predictors[n].confusion) is not None},
    )


def _judge(predictors: ClientEvaluation, num_classes: int) -> str | None:
    """Return what is wrong: predictors are percentages, confusions counts of images."""
    said = [
        value for row in predictors.table.values() for value in row.values() if value is not None
    ]
    if not all(type(value) is float and 0 <= value <= 100 for value in said):
        return "a predictor is not in 0 to 100 %"
    rows = predictors.confusion or []
    width = num_classes + 1
    if rows and (len(rows) != num_classes or any(len(row) != width for row in rows)):
        return f"confusions must be [{num_classes}][{width}] counts"
    if any(type(count) is not int or not 0 <= count < 2**40 for row in rows for count in row):
        return "confusions must be counts of images"
    return None


def _percent(value: Any) -> Any:
    return float(value) if type(value) in (int, float) else value
