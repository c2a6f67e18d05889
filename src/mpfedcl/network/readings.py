"""What clients read by themselves: only they have their test images, so it comes a round late."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpfedcl.methods import READINGS, TESTS
from mpfedcl.network.message import MessageError
from mpfedcl.rounds.evaluation import AccuracyTable, ConfusionCounts, RoundReadings


@dataclass(frozen=True)
class ClientReadings:
    """What a client read of the round before: it travels with the next update."""

    table: AccuracyTable
    is_personal: bool
    """Whether the client trained in that round, so that its personal readings count."""
    confusion: ConfusionCounts | None = None

    def to_values(self) -> dict[str, Any]:
        """Return plain values, as a message has them."""
        return {
            "table": self.table,
            "is_personal": self.is_personal,
            "confusion": self.confusion,
        }


def unpack_readings(values: Mapping[str, Any], num_classes: int) -> ClientReadings:
    """Read a client's readings; nothing in them is trusted."""
    table, is_personal = values.get("table"), values.get("is_personal")
    confusion = values.get("confusion")
    try:
        sound: AccuracyTable = {
            test: {str(reading): _percent(table[test].get(reading)) for reading in READINGS}  # type: ignore[index]
            for test in TESTS
        }
    except (TypeError, KeyError, AttributeError, OverflowError):
        raise MessageError("a reading must be a table by test and reading") from None
    if type(is_personal) is not bool or not (
        confusion is None
        or (isinstance(confusion, list) and all(isinstance(row, list) for row in confusion))
    ):
        raise MessageError("a reading must say whether it is personal, and count in rows")
    readings = ClientReadings(sound, is_personal, confusion)
    if reason := _judge(readings, num_classes):
        raise MessageError(reason)
    return readings


def gather_readings(readings: Mapping[str, ClientReadings]) -> RoundReadings | None:
    """Join what clients read, in order of name; None where nobody did."""
    if not readings:
        return None
    return RoundReadings.of_tables(
        {name: readings[name].table for name in sorted(readings)},
        [name for name in sorted(readings) if readings[name].is_personal],
        {n: counts for n in sorted(readings) if (counts := readings[n].confusion) is not None},
    )


def _judge(readings: ClientReadings, num_classes: int) -> str | None:
    """Return what is wrong: readings are percentages, confusions counts of images."""
    said = [value for row in readings.table.values() for value in row.values() if value is not None]
    if not all(type(value) is float and 0 <= value <= 100 for value in said):
        return "a reading is not in 0 to 100 %"
    rows = readings.confusion or []
    width = num_classes + 1
    if rows and (len(rows) != num_classes or any(len(row) != width for row in rows)):
        return f"confusions must be [{num_classes}][{width}] counts"
    if any(type(count) is not int or not 0 <= count < 2**40 for row in rows for count in row):
        return "confusions must be counts of images"
    return None


def _percent(value: Any) -> Any:
    return float(value) if type(value) in (int, float) else value
