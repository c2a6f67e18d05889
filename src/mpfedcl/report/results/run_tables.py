"""What runs have measured, in long form: the columns of each table are declared with it."""

from collections.abc import Iterator, Sequence

from mpfedcl.experiment.wording import describe_data, describe_partition
from mpfedcl.methods import PREDICTORS, TESTS, PredictorName, Test
from mpfedcl.report.results.long_table import LongTable, Value
from mpfedcl.report.run_description import RunRecords
from mpfedcl.rounds.clock import training_seconds

_RUN = {"method": str, "seed": int, "run": str}
"""With what every row begins: whose it is, and the folder of the run."""
_ROUND = {"round": int, "last": bool}


def accuracy_table(runs: Sequence[RunRecords]) -> LongTable:
    """Return accuracy in % by round, test and reading.

    Readings that a run never has are left out, and so is what was not read in a round.
    `last` is the last round evaluated, and `judged` the predictor that the method is judged by.
    """
    columns = {**_ROUND, "test": str, "predictor": str, "judged": bool, "accuracy": float}

    def rows(run: RunRecords) -> Iterator[tuple[Value, ...]]:
        read = [(line.round, line.accuracy) for line in run.rounds if line.accuracy]
        had = [
            (test, predictor)
            for test in TESTS
            for predictor in PREDICTORS
            if any(table.get(test, {}).get(predictor) is not None for _, table in read)
        ]
        for number, table in read:
            for test, predictor in had:
                if predictor not in table.get(test, {}):
                    continue
                judged = run.predictors[test] == predictor
                is_last = number == read[-1][0]
                yield number, is_last, test, predictor, judged, table[test][predictor]

    return LongTable(_RUN | columns, [(*_name(run), *row) for run in runs for row in rows(run)])


def clients_table(runs: Sequence[RunRecords]) -> LongTable:
    """Return each client's accuracy in % on its local test set by round, by the method's reading."""
    columns = {**_ROUND, "client": str, "accuracy": float}
    rows = [
        (*_name(run), line.round, line is run.last_evaluated, client, accuracy)
        for run in runs
        for line in run.rounds
        for client, accuracy in (line.accuracy_per_client or {}).items()
    ]
    return LongTable(_RUN | columns, rows)


def rounds_table(runs: Sequence[RunRecords]) -> LongTable:
    """Return loss, traffic, time and attendance by round; seconds are without evaluation."""
    columns = {
        "round": int,
        "loss": float,
        "bytes_up": int,
        "bytes_down": int,
        "seconds": float,
        "virtual_seconds": float,
        "answered": int,
        "missing": int,
        "rejected": int,
    }
    rows = [
        (
            *_name(run),
            line.round,
            line.loss,
            line.bytes.get("up", 0),
            line.bytes.get("down", 0),
            training_seconds(line.seconds),
            line.virtual_seconds,
            len(line.clients.answered),
            len(line.clients.missing),
            len(line.clients.rejected),
        )
        for run in runs
        for line in run.rounds
    ]
    return LongTable(_RUN | columns, rows)


def runs_table(runs: Sequence[RunRecords]) -> LongTable:
    """Return a row per run: its last accuracy on both tests, and what it cost."""
    columns = {
        "dataset": str,
        "split": str,
        "rounds": int,
        "finished": bool,
        "predictor": str,
        "accuracy": float,
        "predictor_global": str,
        "accuracy_global": float,
        "megabytes": float,
        "seconds": float,
    }
    return LongTable(_RUN | columns, [(*_name(run), *_sum_up(run)) for run in runs])


def last_accuracy(run: RunRecords, test: Test, predictor: PredictorName) -> float | None:
    """Return a predictor of the last round that was evaluated, unrounded."""
    table = run.last_evaluated.accuracy if run.last_evaluated else None
    return (table or {}).get(test, {}).get(predictor)


def _name(run: RunRecords) -> tuple[Value, ...]:
    return run.experiment.method, run.experiment.seed, run.name


def _sum_up(run: RunRecords) -> tuple[Value, ...]:
    over_network = run.partition is not None and run.partition.network
    data, _ = describe_data(run.experiment, {"network": over_network})
    split = describe_partition(run.experiment, with_seed=False)
    headline = {
        test: (predictor, last_accuracy(run, test, predictor))
        for test, predictor in run.predictors.items()
    }
    return (
        data,
        "over a network" if over_network else split,
        run.rounds[-1].round,
        run.summary is not None,
        *headline["local_test"],
        *headline["global_test"],
        sum(sum(line.bytes.values()) for line in run.rounds) / 1e6,
        sum(training_seconds(line.seconds) for line in run.rounds),
    )
