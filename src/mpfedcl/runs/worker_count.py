"""How many processes share a run: one per core, where it is long enough to gain by them.

By a rule that looks at the experiment, the number of samples and the machine's cores, and measures
nothing: the same experiment has the same workers on the same machine, and so the same bits.
"""

import multiprocessing
import os
import sys
from dataclasses import dataclass
from itertools import pairwise

import psutil

from mpfedcl.data.client_split import split_among_clients
from mpfedcl.data.reader import open_data_set
from mpfedcl.data.samples import SampleIndex
from mpfedcl.engines.hardware import usable_cores
from mpfedcl.engines.process_group import is_under_torchrun
from mpfedcl.experiment import Experiment
from mpfedcl.methods import Asynchronous, Method
from mpfedcl.models import mlp

LEAST_SECONDS = 8.0
"""A run that takes about so long stays in one process: another takes a second or two to start."""
_MULTIPLICATIONS = 1e10
"""Per second and core, about: what training reaches."""
_SAMPLE_SECONDS = 2e-5
"""That a sample takes in any model, however small."""
_ENCODED, _PIXELS = 512, 28 * 28
"""Numbers of a sample behind an encoder, and of a small picture."""
_CONVOLUTIONS, _TRAINED_ENCODER = 10**7, 2 * 10**9
"""Multiplications of a sample's way through the cnn, and through an encoder that is trained."""
_MEMORY_SHARE = 2
"""All processes' samples take at most one part of so many of the machine's memory."""


@dataclass(frozen=True)
class WorkerChoice:
    """How many processes a run has, and what its user should know of that."""

    count: int
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunSize:
    """What a run's length depends on, as far as it is known before samples are opened."""

    clients: int
    """That take part in a round."""
    seconds: float
    """In one process, about."""
    num_bytes: int
    """That the samples take in each process, about."""


def choose_workers(experiment: Experiment, method: type[Method]) -> WorkerChoice:
    """Return the processes of a resolved experiment: as asked, or by the rule of `share_cores`."""
    if experiment.workers != "auto":
        return WorkerChoice(experiment.workers)
    if is_under_torchrun() or (cores := _free_cores()) == 1:
        return WorkerChoice(1)
    size = measure_run(experiment, method)
    if size is None or size.seconds < LEAST_SECONDS:
        return WorkerChoice(1)
    if reason := _find_obstacle(experiment, method):
        return WorkerChoice(1, (f"1 worker of {cores} cores: {reason}.",))
    return share_cores(size, cores, psutil.virtual_memory().total)


def share_cores(size: RunSize, cores: int, memory: int) -> WorkerChoice:
    """Return a worker per core, at most one per client of a round, as far as memory allows.

    Example:
        >>> share_cores(RunSize(clients=5, seconds=30, num_bytes=10**7), cores=2, memory=10**10)
        WorkerChoice(count=2, notices=('2 workers (2 cores, 5 clients per round).',))
        >>> share_cores(RunSize(clients=5, seconds=2, num_bytes=10**7), cores=2, memory=10**10)
        WorkerChoice(count=1, notices=())
    """
    if size.seconds < LEAST_SECONDS:
        return WorkerChoice(1)
    fitting = max(1, memory // _MEMORY_SHARE // max(1, size.num_bytes))
    number = min(cores, size.clients, fitting)
    told = f"{cores} cores, {size.clients:,} clients per round"
    if number == fitting < min(cores, size.clients):
        told += ", whose samples take much of the memory"
    return WorkerChoice(number, (f"{number} worker{'s' * (number > 1)} ({told}).",))


def measure_run(experiment: Experiment, method: type[Method]) -> RunSize | None:
    """Return how large a resolved experiment is; None where that is not known before it begins."""
    if experiment.dataset.name == "table":
        return None
    index = open_data_set(experiment.dataset)
    # Also because what is wrong with the split had better be said before processes are started.
    split = split_among_clients(index, experiment)
    clients, width = len(split.training), _count_numbers(index, experiment)
    if experiment.min_clients > clients:
        # Refused as soon as the run begins.
        return None
    taking_part = max(experiment.min_clients, round(experiment.fraction * clients))
    samples = sum(len(each.labels) for each in split.training.values())
    passes = experiment.rounds * experiment.train.epochs * samples * taking_part / clients
    takes_features = index.vector_width is not None or experiment.encoder.name not in (None, "none")
    work = width**2
    if method.trains:
        work = 3 * _count_multiplications(experiment, width, takes_features=takes_features)
    seconds = passes * (work / _MULTIPLICATIONS + _SAMPLE_SECONDS)
    return RunSize(taking_part, seconds, 4 * (samples + len(split.test.labels)) * width)


def _free_cores() -> int:
    """Return the cores for processes: fewer where OMP_NUM_THREADS gives each several threads."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(asked) if asked.isdecimal() and int(asked) else 1
    return max(1, usable_cores() // threads)


def _find_obstacle(experiment: Experiment, method: type[Method]) -> str | None:
    """Return why a long run stays in one process; None where nothing speaks against more."""
    if sys.platform == "win32" or not sys.executable:
        return "others cannot be started here"
    if multiprocessing.parent_process() is not None:
        return "this process works beside others already"
    if isinstance(method, Asynchronous):
        return f"with {experiment.method}, which is asynchronous, clients answer one by one"
    if experiment.secure_aggregation:
        return "with secure aggregation clients mask their updates for each other"
    if experiment.device != "cpu":
        return f"all would share the device {experiment.device}"
    if experiment.method.startswith("__main__:"):
        return "others cannot import a method of the program that was started"
    return None


def _count_numbers(index: SampleIndex, experiment: Experiment) -> int:
    """Return about how many numbers a sample has."""
    if index.vector_width is not None:
        return index.vector_width
    if experiment.encoder.name not in (None, "none"):
        return _ENCODED
    side = experiment.dataset.image_size
    return _PIXELS if side is None else side**2


def _count_multiplications(experiment: Experiment, width: int, *, takes_features: bool) -> int:
    """Return about how many multiplications a sample takes in the model."""
    if experiment.encoder.train:
        return _TRAINED_ENCODER
    if experiment.model.name == "cnn":
        return _CONVOLUTIONS
    default = mlp.HIDDEN_BEHIND_ENCODER if takes_features else mlp.HIDDEN_ON_PIXELS
    sizes = (width, *(experiment.model.hidden or default))
    return sum(fan_in * fan_out for fan_in, fan_out in pairwise(sizes))
