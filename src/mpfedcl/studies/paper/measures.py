"""The numbers of a run that tables show."""

from dataclasses import replace

from mpfedcl.rounds import clock
from mpfedcl.studies.paper.item import FinishedRun, Measure


def _last_round_accuracy(test: str) -> Measure:
    return Measure(
        f"{test.replace('_', ' ')} set",
        "%",
        lambda run, _: run.accuracy(run.records[-1], test),
        better="higher",
    )


OWN_TEST = _last_round_accuracy("local_test")
UNION_TEST = _last_round_accuracy("global_test")
UNION_TEST_COLUMN = replace(UNION_TEST, name=OWN_TEST.name)
"""The same in a column of its own beside the local test sets."""


def accuracy_of_client(name: str) -> Measure:
    """Return the measure of one client's accuracy on its local test set."""
    return Measure(
        "local test set",
        "%",
        lambda run, _: run.records[-1]["accuracy_per_client"].get(name),
        better="higher",
    )


def accuracy_after(rounds: int) -> Measure:
    """Return the measure of accuracy after a number of rounds."""

    def compute(run: FinishedRun, _: FinishedRun | None) -> float | None:
        record = run.records[min(rounds, len(run.records)) - 1]
        return run.accuracy(record) if record["accuracy"] else None

    return Measure("local test set, after the given rounds", "%", compute, better="higher")


def rounds_to_accuracy(level: float) -> Measure:
    """Return the measure of rounds until an accuracy is first reached; None where it never is."""

    def compute(run: FinishedRun, _: FinishedRun | None) -> float | None:
        record = _first_round_at(run, level)
        return None if record is None else float(record)

    return Measure("rounds to reach", "rounds", compute, better="lower")


def megabytes_to_accuracy(level: float) -> Measure:
    """Return the measure of megabytes, up and down, until an accuracy is first reached."""

    def compute(run: FinishedRun, _: FinishedRun | None) -> float | None:
        last = _first_round_at(run, level)
        if last is None:
            return None
        return sum(sum(record["bytes"].values()) for record in run.records[:last]) / 1e6

    return Measure("megabytes to reach", "MB", compute, better="lower")


def _accuracy_at_equal_time(run: FinishedRun, compared_with: FinishedRun | None) -> float | None:
    """Return the accuracy at the last reading before the other run's training time is used up."""
    assert compared_with is not None
    limit, spent, found = training_seconds(compared_with), 0.0, None
    for record in run.records:
        spent += clock.training_seconds(record["seconds"])
        # A run's own time is reached exactly; rounding must not cut its last round off.
        if spent > limit * (1 + 1e-9):
            break
        if record["accuracy"]:
            found = run.accuracy(record)
    return found


EQUAL_TIME = Measure(
    "local test set, at the same training time", "%", _accuracy_at_equal_time, better="higher"
)


def _numbers_sent(name: str) -> Measure:
    return Measure("sent by a client", "numbers", lambda run, _: run.records[-1]["sent"][name])


PARAMETERS_SENT = _numbers_sent("parameters")
PROTOTYPE_FLOATS_SENT = _numbers_sent("prototype_floats")


def training_seconds(run: FinishedRun) -> float:
    """Return how long a run trained: everything but evaluation and checkpoints."""
    return sum(clock.training_seconds(record["seconds"]) for record in run.records)


def _first_round_at(run: FinishedRun, level: float) -> int | None:
    """Return the first evaluated round in which an accuracy was reached."""
    for record in run.evaluated_records:
        value = run.accuracy(record)
        if value is not None and value >= level:
            number: int = record["round"]
            return number
    return None
