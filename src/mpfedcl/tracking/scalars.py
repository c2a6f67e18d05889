"""A round as numbers by name: what any tracker draws curves of."""

from mpfedcl.runs.observer import Record


def round_scalars(record: Record) -> dict[str, float]:
    """Return a round's numbers; what was not measured in it is left out."""
    clients = record["clients"]
    found = {
        "loss": record["loss"],
        **{
            f"accuracy/{test}/{reading}": value
            for test, table in (record["accuracy"] or {}).items()
            for reading, value in table.items()
        },
        **{f"bytes/{way}": value for way, value in record["bytes"].items()},
        **{f"seconds/{phase}": value for phase, value in record["seconds"].items()},
        "attendance/answered": len(clients["answered"]),
        "attendance/missing": len(clients["missing"]),
        "attendance/rejected": len(clients["rejected"]),
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def client_scalars(record: Record) -> dict[str, float]:
    """Return each client's accuracy on its own test, by the reading the method is judged by."""
    readings = record["accuracy_per_client"] or {}
    return {name: float(value) for name, value in readings.items() if value is not None}
