"""The number of processes of a run.

The rule depends on the experiment, the number of samples, and the cores and the memory that this
process may use. It measures no time, and `experiment.toml` records the number.
"""

import math
import multiprocessing
import os
import sys
from itertools import pairwise
from typing import NamedTuple

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.client_split import split_among_clients
from mpfedcl.data.sample_index import open_data_set
from mpfedcl.engines.hardware import PROCESS_BYTES, usable_cores, usable_memory
from mpfedcl.engines.worker_group import is_under_torchrun
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.datasets import GIVEN
from mpfedcl.methods import Asynchronous, LocalTraining, Method, find_method
from mpfedcl.models import mlp

LEAST_SECONDS = 8.0
"""A shorter run stays in one process: another one takes a second or two to start."""
_MULTIPLICATIONS = 1e10
"""Of training per second and core, about."""
_SAMPLE_SECONDS = 2e-5
"""Time of a sample in any model, however small."""
_ENCODED, _PIXELS = 512, 28 * 28
"""Values of a sample after an encoder, and of a small image."""
_CONVOLUTIONS, _TRAINED_ENCODER = 10**7, 2 * 10**9
"""Multiplications of a sample in the cnn, and in an encoder that is trained."""
_MEMORY_SHARE = 2
"""The samples of all processes take at most 1 / _MEMORY_SHARE of the usable memory."""

_OF_THIS_PROGRAM = (GIVEN, "__main__:")
"""How the names of data sets and models begin that no other process can open."""


class RunSize(NamedTuple):
    """The size of a run, as far as it is known before samples are read."""

    clients: int
    """Clients that take part in a round."""
    seconds: float
    """Estimated time in one process."""
    num_bytes: int
    """Estimated memory of the samples in each process."""
    all_clients: int = 0
    """Clients of the run."""


def choose_workers(experiment: Experiment) -> int:
    """Return the number of processes of a resolved experiment, as asked or by `share_cores`."""
    asked, cores = experiment.workers, usable_cores()
    if experiment.dataset.name.startswith(_OF_THIS_PROGRAM):
        if experiment.asked_workers > 1 or is_under_torchrun():
            raise InvalidInput(
                f"workers is {asked}; it must be 1 or auto, because the data are objects of this "
                "program, which other processes do not have."
            )
        return 1
    if experiment.asked_workers > 1 and str(experiment.model.name).startswith(_OF_THIS_PROGRAM):
        raise InvalidInput(
            f"workers is {asked}; it must be 1 or auto, because the model is an object of this "
            "program, which other processes do not have."
        )
    if is_under_torchrun() or asked == 1:
        return 1 if asked == "auto" else asked
    if asked != "auto":
        # More workers than cores or clients would only take memory.
        size = measure_run(experiment, find_method(experiment.method))
        own, clients = (0, asked) if size is None else (size.num_bytes, size.all_clients)
        return min(asked, cores, clients, _count_fitting(own, usable_memory()))
    threads = os.environ.get("OMP_NUM_THREADS", "")
    cores //= int(threads) if threads.isdecimal() and int(threads) else 1
    method = find_method(experiment.method)
    if cores <= 1 or _must_stay_alone(experiment, method):
        return 1
    size = measure_run(experiment, method)
    return 1 if size is None else share_cores(size, cores, usable_memory())


def share_cores(size: RunSize, cores: int, memory: int) -> int:
    """Return a worker per core, at most one per client of a round, if memory allows.

    Example:
        >>> share_cores(RunSize(clients=5, seconds=30, num_bytes=10**7), cores=2, memory=10**10)
        2
        >>> share_cores(RunSize(clients=5, seconds=2, num_bytes=10**7), cores=2, memory=10**10)
        1
    """
    if size.seconds < LEAST_SECONDS:
        return 1
    for_samples = max(1, memory // _MEMORY_SHARE // max(1, size.num_bytes))
    return min(cores, size.clients, for_samples, _count_fitting(size.num_bytes, memory))


def _count_fitting(num_bytes: int, memory: int) -> int:
    """Return how many processes fit into memory with their samples; one is always tried."""
    return max(1, memory // (PROCESS_BYTES + num_bytes))


def measure_run(experiment: Experiment, method: type[Method]) -> RunSize | None:
    """Return how large a resolved experiment is; None if that is not known before it begins."""
    if experiment.dataset.name == "table":
        return None
    index = open_data_set(experiment.dataset)
    # A wrong split is also reported here, before processes are started.
    split = split_among_clients(index, experiment)
    clients = len(split.training)
    if experiment.min_clients > clients:
        # The run rejects this when it begins.
        return None
    taking_part = max(experiment.min_clients, round(experiment.fraction * clients))
    samples = sum(len(each.labels) for each in split.training.values())
    training = LocalTraining.of(experiment.train, 1)
    passes = training.passes(samples / clients, experiment.train.batch_size)
    takes_features = index.array_format is not None or experiment.encoder.name not in (None, "none")
    side = experiment.dataset.image_size
    width = _ENCODED if takes_features else side**2 if side else _PIXELS
    if index.array_format is not None:
        width = math.prod(index.array_format.shape)
    work = width**2
    if method.trains:
        work = 3 * _count_multiplications(experiment, width, takes_features=takes_features)
    rows = experiment.rounds * passes * samples * taking_part / clients
    seconds = rows * (work / _MULTIPLICATIONS + _SAMPLE_SECONDS)
    num_bytes = 4 * (samples + len(split.test.labels)) * width
    return RunSize(taking_part, seconds, num_bytes, clients)


def _must_stay_alone(experiment: Experiment, method: type[Method]) -> bool:
    """Return whether several processes could not share a run, or would share one device."""
    return (
        sys.platform == "win32"
        or not sys.executable
        # This process is already one of several.
        or multiprocessing.parent_process() is not None
        # Clients of an asynchronous method send updates one by one.
        or issubclass(method, Asynchronous)
        # Clients mask their updates for each other.
        or experiment.secure_aggregation
        or experiment.device != "cpu"
        # Workers cannot import a method of the program that was started.
        or experiment.method.startswith("__main__:")
        or any(name.startswith(_OF_THIS_PROGRAM) for name in experiment.model.names)
    )


def _count_multiplications(experiment: Experiment, width: int, *, takes_features: bool) -> int:
    """Return the approximate number of multiplications of a sample in the model."""
    if experiment.encoder.train:
        return _TRAINED_ENCODER
    if experiment.model.name == "linear":
        return width
    if experiment.model.name != "mlp":
        return _CONVOLUTIONS
    default = mlp.HIDDEN_BEHIND_ENCODER if takes_features else mlp.HIDDEN_ON_PIXELS
    sizes = (width, *(experiment.model.hidden or default))
    return sum(fan_in * fan_out for fan_in, fan_out in pairwise(sizes))
