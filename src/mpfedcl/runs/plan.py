"""The plan of a run: an experiment with every default resolved, checked once before data are read.

Simulation and server call `plan`, so that both reject the same settings with the same message.
`plan_evaluation` needs more than the settings: the loaded data and the model.
"""

import re
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import torch

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.objects import use_objects
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.descriptions import describe_missing_encoder
from mpfedcl.experiment.names import METRICS
from mpfedcl.methods import (
    Asynchronous,
    ClosedForm,
    Method,
    OneShot,
    PartialModel,
    TwoModels,
    find_method,
)
from mpfedcl.models import Model
from mpfedcl.privacy.accounting import spent_epsilon
from mpfedcl.privacy.ledger import FOLDER, read_ledger
from mpfedcl.privacy.private_rounds import release_sensitivity
from mpfedcl.privacy.secure_aggregation import LEAST_CLIENTS, check_secure_aggregation
from mpfedcl.privacy.secure_aggregation.layout import fix_noise
from mpfedcl.rounds.assembly import clients_models_error
from mpfedcl.rounds.evaluation import Workload, settle_evaluation
from mpfedcl.rounds.metrics import find_own_metric
from mpfedcl.rounds.systems import check_clock, check_timing, refuse_over_network

_ANY_CLASSES = 2
_SLACK = 1 + 1e-6
"""Rounding of a privacy budget."""


@dataclass(frozen=True)
class Plan:
    """A resolved and checked experiment, and notices for the user."""

    experiment: Experiment
    notices: tuple[str, ...] = ()


def resolve(experiment: Experiment) -> Experiment:
    """Return the experiment with the defaults of its method and its data set."""
    experiment = use_objects(experiment)
    return experiment.resolved(find_method(experiment.method).defaults)


def plan(experiment: Experiment, *, over_network: bool = False, run: Path | None = None) -> Plan:
    """Resolve and check an experiment, and keep its rounds and noise within the privacy budget.

    Args:
        experiment: The settings as given.
        over_network: Whether the clients are on other machines.
        run: The directory of a run that is resumed: its experiment is resolved already.
    """
    method, asked = find_method(experiment.method), experiment
    notices: list[str] = []
    if over_network:
        experiment = _plan_over_network(method, experiment)
    else:
        if run is None:
            notices += describe_missing_encoder(asked)
            experiment = resolve(experiment)
        check_timing(method, experiment)
        check_clock(method, experiment)
        check_secure_aggregation(experiment)
    _check_models_of_clients(method, experiment)
    if asked.rounds not in (experiment.rounds, Experiment.model_fields["rounds"].default):
        notices.append(
            f"rounds is {asked.rounds}, but {experiment.method} is a one-shot method: one round is "
            "run."
        )
    rounds = _count_affordable_rounds(experiment, run)
    if rounds < experiment.rounds:
        notices.append(
            f"The privacy budget covers {rounds} of {experiment.rounds} rounds; the run ends after "
            f"round {rounds}."
        )
        experiment = experiment.replace(rounds=rounds)
    return Plan(fix_noise(experiment), tuple(notices))


def _check_models_of_clients(kind: type[Method], experiment: Experiment) -> None:
    """Reject different models for methods whose clients share parameters."""
    if experiment.model.clients:
        others = Asynchronous | OneShot | PartialModel | TwoModels
        is_plain = kind.trains and not issubclass(kind, others)
        if not is_plain or kind(experiment, _ANY_CLASSES).shares_model:
            raise clients_models_error(experiment)


def _plan_over_network(method: type[Method], experiment: Experiment) -> Experiment:
    """Return the experiment with the server's defaults; reject settings that need a simulation."""
    encoder = experiment.encoder.name
    is_asynchronous = issubclass(method, Asynchronous)
    if is_asynchronous and experiment.systems.kind is None:
        # Asynchronous methods run on wall-clock time.
        experiment = experiment.replace(systems__kind="none")
    if ":" in experiment.dataset.name:
        raise InvalidInput(
            f"dataset.name is {experiment.dataset.name!r}, objects of this program; over a network "
            "it must be a named set or left out: clients have npz files or folders."
        )
    experiment = resolve(experiment)
    refuse_over_network(method, experiment)
    check_timing(method, experiment)
    check_secure_aggregation(experiment)
    dataset = experiment.dataset
    is_agreed = dataset.label and dataset.columns and dataset.standardize != "federated"
    if dataset.name == "table" and not is_agreed:
        raise InvalidInput(
            "dataset.name is 'table'; over a network dataset.label and dataset.columns must name "
            "what all tables have, and dataset.standardize must be 'client' or 'none', because "
            "clients do not exchange statistics of columns."
        )
    if experiment.metric not in METRICS:
        raise InvalidInput(
            f"metric is {experiment.metric!r}; over a network it must be one of "
            f"{', '.join(METRICS)}, because clients run no code that a server names."
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
    if ledger is not None:
        multiplier, spent, sampling = ledger.multiplier, ledger.releases, ledger.sampling
        epsilon, delta = ledger.epsilon, ledger.delta
    else:
        assert settings.noise is not None
        multiplier, spent, sampling = settings.noise, {}, experiment.fraction
        epsilon, delta = settings.epsilon, settings.delta
    done = 0 if run is None else _last_number(run / FOLDER, r"release-(\d+)-.*")

    def cost(rounds: int) -> float:
        kind = multiplier / release_sensitivity(method)
        releases = {**spent, kind: spent.get(kind, 0) + rounds - done}
        return spent_epsilon(releases, delta, sampling=sampling)

    if cost(experiment.rounds) <= epsilon * _SLACK:
        return experiment.rounds
    affordable = done + bisect_right(range(done + 1, experiment.rounds), epsilon * _SLACK, key=cost)
    saved = 0 if run is None else _last_number(run / "checkpoint", r"round-(\d+)\.json")
    if affordable == 0 or affordable <= saved:
        raise InvalidInput(
            f"privacy.epsilon is {epsilon:g}; {cost(done) if done else 0:.3f} is spent after "
            f"{done} rounds, and the rest does not cover another: rounds must be {done}, or "
            "privacy.noise must be larger."
        )
    return affordable


def _last_number(folder: Path, pattern: str) -> int:
    found = [re.fullmatch(pattern, path.name) for path in folder.glob("*")]
    return max((int(each[1]) for each in found if each), default=0)


# Evaluation


def plan_evaluation(experiment: Experiment, data: FederatedData, model: Model) -> Experiment:
    """Choose the evaluated rounds and clients from sizes, equally in all processes."""
    # Before round 1, so that a function that fails costs no training.
    find_own_metric(experiment.metric, data.num_classes)
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
