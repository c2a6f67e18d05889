"""The plan of a run: an experiment with every default resolved, checked once before data are read.

Simulation and server call `plan`, so that both reject the same settings with the same message. Two
choices need more than the settings: `choose_workers` opens the data set without reading samples,
and `plan_evaluation` needs the loaded data and the model.
"""

import multiprocessing
import os
import re
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
import torch

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.client_split import split_among_clients
from mpfedcl.data.samples import SampleIndex
from mpfedcl.data.sources import open_data_set
from mpfedcl.engines.hardware import usable_cores
from mpfedcl.engines.workers import is_under_torchrun
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.wording import describe_missing_encoder
from mpfedcl.methods import Asynchronous, ClosedForm, Method, SharesPrototypes, find_method
from mpfedcl.models import Model, mlp
from mpfedcl.privacy.accounting import spent_epsilon
from mpfedcl.privacy.ledger import FOLDER, read_ledger
from mpfedcl.privacy.releases import planned_releases
from mpfedcl.privacy.secure_aggregation import LEAST_CLIENTS
from mpfedcl.privacy.secure_aggregation.checks import check_secure_aggregation
from mpfedcl.privacy.secure_aggregation.layout import fix_noise
from mpfedcl.rounds.evaluation import Workload, settle_evaluation
from mpfedcl.rounds.systems import check_clock, check_timing, refuse_over_network

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
"""The samples of all processes take at most 1 / _MEMORY_SHARE of the machine's memory."""
_SLACK = 1 + 1e-6
"""Rounding of a privacy budget."""


@dataclass(frozen=True)
class Facts:
    """The circumstances of a run that its experiment does not contain."""

    over_network: bool = False
    """Whether the clients are on other machines."""
    run: Path | None = None
    """The directory of a run that is resumed: its experiment is resolved already."""


@dataclass(frozen=True)
class Plan:
    """A resolved and checked experiment, and notices for the user."""

    experiment: Experiment
    notices: tuple[str, ...] = ()


SIMULATION = Facts()


def resolve(experiment: Experiment) -> Experiment:
    """Return the experiment with the defaults of its method and its data set."""
    return experiment.resolved(find_method(experiment.method).defaults)


def plan(experiment: Experiment, facts: Facts = SIMULATION) -> Plan:
    """Resolve and check an experiment, and keep its rounds and noise within the privacy budget."""
    method, asked = find_method(experiment.method), experiment
    notices: list[str] = []
    if facts.over_network:
        experiment = _plan_over_network(method, experiment)
    else:
        if facts.run is None:
            notices += describe_missing_encoder(asked)
            experiment = resolve(experiment)
        check_timing(method, experiment)
        check_clock(method, experiment)
        check_secure_aggregation(experiment)
    if asked.rounds not in (experiment.rounds, Experiment.model_fields["rounds"].default):
        notices.append(
            f"rounds is {asked.rounds}, but {experiment.method} is a one-shot method: one round is "
            "run."
        )
    rounds = _count_affordable_rounds(experiment, facts.run)
    if rounds < experiment.rounds:
        notices.append(
            f"The privacy budget covers {rounds} of {experiment.rounds} rounds; the run ends after "
            f"round {rounds}."
        )
        experiment = experiment.replace(rounds=rounds)
    return Plan(fix_noise(experiment), tuple(notices))


def _plan_over_network(method: type[Method], experiment: Experiment) -> Experiment:
    """Return the experiment with the server's defaults; reject settings that need a simulation."""
    encoder = experiment.encoder.name
    is_asynchronous = issubclass(method, Asynchronous)
    if is_asynchronous and experiment.systems.kind is None:
        # Asynchronous methods run on wall-clock time.
        experiment = experiment.replace(systems__kind="none")
    experiment = resolve(experiment)
    refuse_over_network(method, experiment)
    check_timing(method, experiment)
    check_secure_aggregation(experiment)
    if experiment.dataset.name == "table":
        raise InvalidInput(
            "dataset.name is 'table'; over a network it must be left out, because clients do not "
            "exchange the statistics that standardize columns. Clients may use vectors in npz "
            "files."
        )
    if experiment.asked_workers > 1:
        raise InvalidInput(f"workers is {experiment.workers}; over a network it must be 1.")
    changes = {
        "workers": 1,
        # Clients evaluate only their own data, which is cheap: all predictors in every round.
        "evaluate_every": 1 if experiment.evaluate_every == "auto" else experiment.evaluate_every,
        "evaluate_predictors": "all",
        # Clients with vectors need no encoder, so the default is chosen after their introduction.
        "encoder__name": encoder,
    }
    if experiment.secure_aggregation:
        # A sum of fewer clients cannot be opened.
        changes["min_clients"] = max(experiment.min_clients, LEAST_CLIENTS)
    if experiment.validation.bounds == "auto":
        # Recorded in experiment.toml, so that a simulation gives the same result. Bounds compare
        # single updates, which secure aggregation hides and asynchronous methods receive singly.
        is_hidden = experiment.secure_aggregation or experiment.privacy.has_budget
        changes["validation__bounds"] = "off" if is_hidden or is_asynchronous else "on"
    return experiment.replace(**changes)


# The privacy budget


def _count_affordable_rounds(experiment: Experiment, run: Path | None) -> int:
    """Return the rounds that the privacy budget covers, at most those of the experiment.

    Releases of a resumed run are spent, including those that no checkpoint contains.
    """
    settings, method = experiment.privacy, find_method(experiment.method)
    ledger = read_ledger(run) if run is not None else None
    if settings.epsilon is None or not method.trains or (ledger is None and settings.noise is None):
        # The noise is calibrated to the number of rounds.
        return experiment.rounds
    multiplier = settings.noise if ledger is None else ledger.multiplier
    spent = {} if ledger is None else ledger.releases
    delta = settings.delta if ledger is None else ledger.delta
    epsilon = settings.epsilon if ledger is None else ledger.epsilon
    sampling = experiment.fraction if ledger is None else ledger.sampling
    assert multiplier is not None
    done = 0 if run is None else _last_number(run / FOLDER, r"release-(\d+)-.*")

    def cost(rounds: int) -> float:
        planned = planned_releases(
            experiment.replace(rounds=rounds),
            shares_prototypes=issubclass(method, SharesPrototypes),
            first=done + 1,
        )
        releases = dict(spent)
        for sensitivity, count in planned.items():
            kind = multiplier / sensitivity
            releases[kind] = releases.get(kind, 0) + count
        return spent_epsilon(releases, delta, sampling=sampling)

    if cost(experiment.rounds) <= epsilon * _SLACK:
        return experiment.rounds
    low, high = done, experiment.rounds
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= epsilon * _SLACK else (low, middle)
    saved = 0 if run is None else _last_number(run / "checkpoint", r"round-(\d+)\.json")
    if low == 0 or low <= saved:
        raise InvalidInput(
            f"privacy.epsilon is {epsilon:g}; {cost(done) if done else 0:.3f} is spent after "
            f"{done} rounds, and the rest does not cover another: rounds must be {done}, or "
            "privacy.noise must be larger."
        )
    return low


def _last_number(folder: Path, pattern: str) -> int:
    found = [re.fullmatch(pattern, path.name) for path in folder.glob("*")]
    return max((int(each[1]) for each in found if each), default=0)


# Evaluation


def plan_evaluation(experiment: Experiment, data: FederatedData, model: Model) -> Experiment:
    """Choose the evaluated rounds and clients from sizes, equally in all processes."""
    method = find_method(experiment.method)(experiment, data.num_classes)
    if isinstance(method, ClosedForm):
        model = method.make_model(data.input_size)
    like = model.init(torch.Generator(), torch.float32)
    work = Workload.of(
        method,
        torch.from_numpy(data.label_counts()),
        (len(data.test_labels), sum(len(client.test) for client in data.clients)),
        sum(value.numel() for value in like.values()),
        model.embedding_size,
    )
    return settle_evaluation(experiment, method, work)


# Workers. The rule depends only on the experiment, the number of samples and the cores of the
# machine, and measures no time: on the same machine the same experiment has the same workers, and
# so a bit-identical result.


@dataclass(frozen=True)
class WorkerChoice:
    """The number of processes of a run, and notices for the user."""

    count: int
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunSize:
    """The size of a run, as far as it is known before samples are read."""

    clients: int
    """Clients that take part in a round."""
    seconds: float
    """Estimated time in one process."""
    num_bytes: int
    """Estimated memory of the samples in each process."""


def choose_workers(experiment: Experiment) -> WorkerChoice:
    """Return the processes of a resolved experiment: as asked, or by the rule of `share_cores`."""
    method = find_method(experiment.method)
    if experiment.workers != "auto":
        return _limit_workers(experiment, experiment.workers)
    if is_under_torchrun() or (cores := _free_cores()) == 1:
        return WorkerChoice(1)
    size = measure_run(experiment, method)
    if size is None or size.seconds < LEAST_SECONDS:
        return WorkerChoice(1)
    if reason := _find_obstacle(experiment, method):
        return WorkerChoice(1, (f"1 worker of {cores} cores: {reason}.",))
    return share_cores(size, cores, psutil.virtual_memory().total)


def _limit_workers(experiment: Experiment, asked: int) -> WorkerChoice:
    """Return at most one worker per core and per client: more of them would only take memory."""
    if asked == 1 or is_under_torchrun():
        return WorkerChoice(asked)
    limits = {"cores": usable_cores()}
    if experiment.dataset.name != "table":
        split = split_among_clients(open_data_set(experiment.dataset), experiment)
        limits["clients"] = len(split.training)
    number = min(asked, *limits.values())
    if number == asked:
        return WorkerChoice(asked)
    told = ", ".join(f"{count:,} {kind}" for kind, count in limits.items())
    return WorkerChoice(number, (f"workers is {asked}; the run has {number} ({told}).",))


def share_cores(size: RunSize, cores: int, memory: int) -> WorkerChoice:
    """Return a worker per core, at most one per client of a round, if memory allows.

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
    """Return how large a resolved experiment is; None if that is not known before it begins."""
    if experiment.dataset.name == "table":
        return None
    index = open_data_set(experiment.dataset)
    # A wrong split is also reported here, before processes are started.
    split = split_among_clients(index, experiment)
    clients, width = len(split.training), _count_values(index, experiment)
    if experiment.min_clients > clients:
        # The run rejects this when it begins.
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
    """Return the cores for processes: fewer if OMP_NUM_THREADS gives each several threads."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(asked) if asked.isdecimal() and int(asked) else 1
    return max(1, usable_cores() // threads)


def _find_obstacle(experiment: Experiment, method: type[Method]) -> str | None:
    """Return why a long run stays in one process, or None."""
    if sys.platform == "win32" or not sys.executable:
        return "workers cannot be started here"
    if multiprocessing.parent_process() is not None:
        return "this process is already one of several"
    if issubclass(method, Asynchronous):
        return f"clients of the asynchronous method {experiment.method} send updates one by one"
    if experiment.secure_aggregation:
        return "clients mask their updates for each other (secure aggregation)"
    if experiment.device != "cpu":
        return f"all workers would share the device {experiment.device}"
    if experiment.method.startswith("__main__:"):
        return "workers cannot import a method of the program that was started"
    return None


def _count_values(index: SampleIndex, experiment: Experiment) -> int:
    """Return the approximate number of values of a sample."""
    if index.vector_width is not None:
        return index.vector_width
    if experiment.encoder.name not in (None, "none"):
        return _ENCODED
    side = experiment.dataset.image_size
    return _PIXELS if side is None else side**2


def _count_multiplications(experiment: Experiment, width: int, *, takes_features: bool) -> int:
    """Return the approximate number of multiplications of a sample in the model."""
    if experiment.encoder.train:
        return _TRAINED_ENCODER
    if experiment.model.name == "cnn":
        return _CONVOLUTIONS
    default = mlp.HIDDEN_BEHIND_ENCODER if takes_features else mlp.HIDDEN_ON_PIXELS
    sizes = (width, *(experiment.model.hidden or default))
    return sum(fan_in * fan_out for fan_in, fan_out in pairwise(sizes))
