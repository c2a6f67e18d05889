"""The process that leads a team: it calls the others together and says what is to be done."""

from collections.abc import Iterator
from contextlib import contextmanager

from mpfedcl.errors import InvalidInput, LostWorker, RunCutShort
from mpfedcl.experiment import Experiment
from mpfedcl.engines.process_group import Team, is_follower, team_of


def refuse_to_follow() -> None:
    """Refuse to begin a run in a process that was started to work for another."""
    if is_follower():
        raise InvalidInput(
            "this process was started by torchrun to work for another; only the command must be "
            "started so: torchrun -m mpfedcl run. In Python, give the experiment workers."
        )


@contextmanager
def led(experiment: Experiment) -> Iterator[tuple[Experiment, Team | None]]:
    """Call a team together for an experiment and tell it what to do, if more than one process."""
    try:
        with team_of(experiment.workers) as team:
            if team is not None:
                experiment = experiment.replace(workers=team.size)
                team.share(experiment.to_toml().encode())
            yield experiment, team
    except RunCutShort:
        raise
    except LostWorker as error:
        raise LostWorker(f"a worker was lost before the first round ({error}).") from None
