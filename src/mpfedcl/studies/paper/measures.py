"""The numbers that are read off runs."""

from dataclasses import replace

from mpfedcl.rounds import clock
from mpfedcl.studies.paper.item import Finished, Measure


def _last(test: str) -> Measure:
    return Measure(
        f"{test} test", "%", lambda run, _: run.accuracy(run.records[-1], test), better="higher"
    )


OWN = _last("own")
UNION = _last("union")
UNION_BESIDE = replace(UNION, name=OWN.name)
"""The same in a column of its own beside the own tests."""


def accuracy_of_client(name: str) -> Measure:
    """Return the measure of one client's accuracy on its own test."""

    def read(run: Finished, _: Finished | None) -> float | None:
        value: float | None = run.records[-1]["accuracy_per_client"].get(name)
        return value

    return Measure("own test", "%", read, better="higher")


def accuracy_after(rounds: int) -> Measure:
    """Return the measure of accuracy after so many rounds."""

    def read(run: Finished, _: Finished | None) -> float | None:
        record = run.records[min(rounds, len(run.records)) - 1]
        return run.accuracy(record) if record["accuracy"] else None

    return Measure("own test, after so many rounds", "%", read, better="higher")


def rounds_to(level: float) -> Measure:
    """Return the measure of rounds until an accuracy is first read; None where it never is."""

    def read(run: Finished, _: Finished | None) -> float | None:
        record = _first_at(run, level)
        return None if record is None else float(record)

    return Measure("rounds to reach", "rounds", read, better="lower")


def megabytes_to(level: float) -> Measure:
    """Return the measure of megabytes, up and down, until an accuracy is first read."""

    def read(run: Finished, _: Finished | None) -> float | None:
        last = _first_at(run, level)
        if last is None:
            return None
        return sum(sum(record["bytes"].values()) for record in run.records[:last]) / 1e6

    return Measure("megabytes to reach", "MB", read, better="lower")


def _same_time(run: Finished, against: Finished | None) -> float | None:
    """Return the accuracy at the last reading before the other run's training time is used up."""
    assert against is not None
    limit, spent, found = training_seconds(against), 0.0, None
    for record in run.records:
        spent += clock.training_seconds(record["seconds"])
        # A run's own time is reached exactly; rounding must not cut its last round off.
        if spent > limit * (1 + 1e-9):
            break
        if record["accuracy"]:
            found = run.accuracy(record)
    return found


SAME_TIME = Measure("own test, at the same training time", "%", _same_time, better="higher")


def _sent(name: str) -> Measure:
    return Measure("sent by a client", "numbers", lambda run, _: run.records[-1]["sent"][name])


PARAMETERS = _sent("parameters")
PROTOTYPES = _sent("prototype_floats")


def training_seconds(run: Finished) -> float:
    """Return how long a run trained: everything but reading and checkpoints."""
    return sum(clock.training_seconds(record["seconds"]) for record in run.records)


def _first_at(run: Finished, level: float) -> int | None:
    """Return the first evaluated round in which an accuracy was reached."""
    for record in run.read:
        value = run.accuracy(record)
        if value is not None and value >= level:
            number: int = record["round"]
            return number
    return None
