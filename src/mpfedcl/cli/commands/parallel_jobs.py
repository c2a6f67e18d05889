"""What commands that make several runs have in common."""

from pathlib import Path

from mpfedcl.engines.hardware import usable_cores
from mpfedcl.engines.process_group import is_under_torchrun
from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import Experiment


def refuse_torchrun(command: str) -> None:
    """Refuse to make several runs in several processes that each would make them all."""
    if is_under_torchrun():
        raise InvalidInput(
            f"{command} was started by torchrun; it must be started alone, where --workers and "
            "--jobs say how many processes it takes."
        )


def check_job_count(jobs: int, workers: int = 1) -> int:
    """Return how many runs are made at the same time: as asked, or as many as there are cores."""
    if jobs < 0:
        raise InvalidInput(f"jobs is {jobs}; it must be 0 (one per core) or more.")
    return jobs or max(1, usable_cores() // workers)


def find_job_count(command: str, file: Path | None, settings: Experiment, jobs: int) -> int:
    """Return how many runs are made at the same time, once the arguments are checked."""
    refuse_torchrun(command)
    for name, many in (("method", "methods"), ("seed", "seeds")):
        if file is None and getattr(settings, name) != getattr(Experiment(), name):
            raise InvalidInput(
                f"{name} is {getattr(settings, name)!r}; {command} takes several: use --{many}."
            )
    return check_job_count(jobs, settings.workers)
