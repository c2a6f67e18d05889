"""What commands that make several runs have in common."""

from pathlib import Path

from mpfedcl.core.errors import InvalidInput
from mpfedcl.engines.workers import is_under_torchrun
from mpfedcl.experiment import Experiment
from mpfedcl.studies.jobs import Jobs, count_jobs


def refuse_torchrun(command: str) -> None:
    """Refuse to make several runs in several processes that each would make them all."""
    if is_under_torchrun():
        raise InvalidInput(
            f"{command} was started by torchrun; it must be started alone, where --workers and "
            "--jobs say how many processes it takes."
        )


def check_runs(command: str, file: Path | None, settings: Experiment, jobs: Jobs) -> None:
    """Refuse what several runs cannot be made with."""
    refuse_torchrun(command)
    for name, many in (("method", "methods"), ("seed", "seeds")):
        if file is None and getattr(settings, name) != getattr(Experiment(), name):
            raise InvalidInput(
                f"{name} is {getattr(settings, name)!r}; {command} takes several: use --{many}."
            )
    count_jobs(jobs)
