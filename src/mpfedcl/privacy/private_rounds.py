"""Releases under a privacy budget: their conditions, schedule and content.

A one-shot method releases noisy statistics once. A method that averages models releases in each
round the mean change of the model with noise (DP-FedAvg: each client's change is clipped, all
clients have equal weights, and the sum is divided by the public expected number of clients), and
one noisy prototype per class if clients share prototypes. The server continues from releases only.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors, pack_tensors, take_group
from mpfedcl.gaussian.mechanism import add_exact_noise, draw_noise, require_extra
from mpfedcl.methods import (
    CollectsStatistics,
    Method,
    OneShot,
    PredictorName,
    SharesPrototypes,
    prototype_rule,
)
from mpfedcl.privacy.accounting import calibrate_multiplier
from mpfedcl.privacy.ledger import Ledger, ReleaseLog
from mpfedcl.prototypes import Prototypes

if TYPE_CHECKING:
    from mpfedcl.rounds.collector import UpdateCollector
    from mpfedcl.rounds.record import RoundRecord

ROUNDING = 1e-5
"""Tolerance of a clipped norm that is computed again."""
MODEL_CLIP = 1.0
"""The default of `privacy.clip` for models: honest changes have a norm of 0.2 to 1.6."""
BOTH = math.sqrt(2)
"""Sensitivity of a model and prototypes together, each of sensitivity 1."""


def check_budget(method: Method) -> None:
    """Reject a privacy budget that this method cannot keep."""
    experiment, settings = method.experiment, method.experiment.privacy
    if not settings.has_budget:
        return
    require_extra()
    if isinstance(method, OneShot):
        if not method.has_private_sums:
            raise _no_mechanism(method, "it needs the class means of single clients")
    elif not (method.trains and method.shares_model):
        raise _no_mechanism(method, "its clients share no model")
    elif not method.plain_average or isinstance(method, CollectsStatistics):
        raise _no_mechanism(method, "its server does not only average")
    if method.trains and settings.unit == "record":
        raise InvalidInput(
            "privacy.unit is 'record'; with rounds of training it must be client: the effect of "
            "one image on a model is not bounded. One-shot methods support it."
        )
    if method.trains and settings.model == "local":
        raise InvalidInput(
            "privacy.model is 'local'; with rounds of training it must be central: the noise of "
            "each client would drown the model."
        )
    required = {"aggregation__rule": "mean", "prototypes__min_cluster_size": 1}
    if method.trains and experiment.fraction < 1:
        # Privacy amplification by sampling needs an independent draw for each client.
        required["min_clients"] = 1
    for name, value in required.items():
        if experiment.setting(name) != value:
            raise InvalidInput(
                f"{name.replace('__', '.')} is {experiment.setting(name)!r}; with a privacy budget "
                f"it must be {value}: the sensitivity is not bounded otherwise."
            )
    if method.trains and experiment.setting("update__clip") is not None:
        raise InvalidInput(
            f"update.clip is {experiment.setting('update__clip'):g}; with a privacy budget it must "
            "be left out: privacy.clip is the largest norm of a change."
        )


def _no_mechanism(method: Method, why: str) -> InvalidInput:
    return InvalidInput(
        f"privacy.epsilon is {method.experiment.privacy.epsilon:g}; with method {method.name} it "
        f"must be left out: {why}. A budget is kept for fedgauss, fedlda, fedncm and fedridge, and "
        "for methods that average models, such as fedavg, fedprox and mp-fedcl."
    )


def release_sensitivity(method: type[Method]) -> float:
    """Return the sensitivity of a round's release, relative to the clip of the model."""
    shares_prototypes = issubclass(method, SharesPrototypes) and not issubclass(method, OneShot)
    return BOTH if shares_prototypes else 1.0


def released_predictors(method: Method) -> tuple[PredictorName, ...]:
    """Return the predictors whose accuracy may be released.

    Under a budget, personal models, label priors and unshared prototypes are excluded: they depend
    on training samples without noise.
    """
    if not method.experiment.privacy.has_budget:
        return method.predictors
    plain: tuple[PredictorName, ...] = ("global_classifier", "global_classifier_estimated")
    return (*plain, "global_prototype") if isinstance(method, SharesPrototypes) else plain


_KEPT_REMARKS = ("warnings", "refused")
"""Other remarks may reveal the number of sampled clients."""
ALL_CLIENTS = "global"
"""The owner of prototypes that are aggregated over clients."""


@dataclass(frozen=True)
class Released:
    """The release of a round; the server uses nothing else."""

    means: Tensors
    sums: Tensors
    prototypes: dict[str, Prototypes] | None
    """None: the previous prototypes are kept."""
    statistics: Tensors = field(default_factory=dict)
    """Statistics that a one-shot method keeps."""


class PrivateRounds:
    """The releases of one run, of a method that `check_budget` has accepted.

    `num_clients` are those at the start, `dimension` is that of an embedding.
    """

    def __init__(self, method: Method, num_clients: int, dimension: int) -> None:
        self.log: ReleaseLog | None = ReleaseLog()
        """The log of releases; None in a worker process, which receives the releases."""
        self._method, self._experiment = method, method.experiment
        self._settings = method.experiment.privacy
        self._num_clients, self._dimension = num_clients, dimension
        self._sensitivity = release_sensitivity(type(method))

    @property
    def samples(self) -> bool:
        """Whether clients are sampled secretly."""
        return self._method.trains and self._experiment.fraction < 1

    def begin(self) -> None:
        """Open the ledger, unless the run has one."""
        if self.log is None or self.log.ledger is not None:
            return
        method, settings = self._method, self._settings
        epsilon, delta, multiplier = settings.epsilon, settings.delta, settings.noise
        assert epsilon is not None
        sampling = self._experiment.fraction if method.trains else 1.0
        if isinstance(method, OneShot):
            assert method.private_sums is not None
            multiplier = method.private_sums.multiplier
        elif multiplier is None:
            multiplier = self._sensitivity * calibrate_multiplier(
                epsilon, delta, self._experiment.rounds, sampling=sampling
            )
        unit = settings.unit_for(trains=method.trains)
        self.log.begin(
            Ledger(
                unit=unit,
                epsilon=epsilon,
                delta=delta,
                multiplier=multiplier,
                sampling=sampling,
                clients=self._num_clients,
                releases={},
            )
        )

    @property
    def ledger(self) -> Ledger | None:
        """The ledger; None in a worker process."""
        return None if self.log is None else self.log.ledger

    def choose(self, round_number: int, names: Sequence[str]) -> bytes:
        """Return the sampled clients as bytes; each is drawn independently."""
        if self.log is None:
            return b""
        share, draw = self._experiment.fraction, secrets.SystemRandom()
        chosen = self.log.choose(
            round_number, lambda: [name for name in names if draw.random() < share]
        )
        here = set(names)
        return "\n".join(name for name in chosen if name in here).encode()

    def release(self, round_number: int, start: Tensors, collector: "UpdateCollector") -> bytes:
        """Return a round's release as bytes; its noise is drawn once, even after a crash."""
        if self.log is None:
            return b""
        self.begin()
        assert self.log.ledger is not None
        ledger, method = self.log.ledger, self._method

        def make() -> Tensors:
            if isinstance(method, OneShot):
                return self._noisy_sums(method, collector)
            shares = isinstance(method, SharesPrototypes)
            rows = self._noisy_prototypes(collector, ledger) if shares else {}
            return {**self._noisy_means(start, collector, ledger), **rows}

        multiplier = ledger.multiplier / self._sensitivity
        return pack_tensors(self.log.release(round_number, multiplier, make))

    def open(self, content: bytes, like: Tensor) -> Released:
        """Read a release."""
        released = {name: value.to(like.device) for name, value in load(content).items()}
        if isinstance(self._method, OneShot):
            return self._open_sums(self._method, released, like)
        noisy = take_group(released, "prototypes/")
        rows = {ALL_CLIENTS: self._class_prototypes(noisy, like)} if noisy else None
        return Released(take_group(released, "averaged/"), {}, rows)

    def redact(self, record: "RoundRecord", num_chosen: int) -> "RoundRecord":
        """Return a round's record without the fields that no noise protects."""
        changes: dict[str, Any] = {"loss": None, "loss_per_client": {}}
        if self.ledger is not None:
            changes["privacy"] = self.ledger.summary()
        if self.samples:
            # The number and names of the sampled clients must stay secret.
            expected = self._experiment.fraction * self._num_clients / max(1, num_chosen)
            changes |= {
                "clients": type(record.clients)(answered=[], missing=[], rejected={}),
                "bytes": {name: round(size * expected) for name, size in record.bytes.items()},
                "processed": {},
                "remarks": {n: v for n, v in record.remarks.items() if n in _KEPT_REMARKS},
                "withheld": [],
                # Of many clients, only participants have a row.
                **({} if record.accuracy_spread is None else _without_rows(record)),
                "unchanged": False,
            }
        return record.model_copy(update=changes)

    # One-shot methods

    def _noisy_sums(self, method: OneShot, collector: "UpdateCollector") -> Tensors:
        mechanism = method.private_sums
        assert mechanism is not None
        if collector.noise is not None:
            return {**collector.sums, "noises": collector.noise}
        noisy = dict(collector.sums) if mechanism.is_local else mechanism.add_noise(collector.sums)
        noises = len(collector.accepted) if mechanism.is_local else 1
        return {**noisy, "noises": torch.tensor(float(noises), dtype=torch.float64)}

    def _open_sums(self, method: OneShot, noisy: Tensors, like: Tensor) -> Released:
        mechanism = method.private_sums
        assert mechanism is not None
        own = mechanism.repair(noisy, float(noisy["noises"]))
        held = own["counts"].nonzero().squeeze(1)
        means = own["sums"][held] / own["counts"][held].unsqueeze(1)
        rows = Prototypes(means.to(like.dtype), held, own["counts"][held].long())
        return Released({}, own, {ALL_CLIENTS: rows}, method.pool_of_one(own))

    # Methods with rounds

    def _noisy_means(self, start: Tensors, collector: "UpdateCollector", ledger: Ledger) -> Tensors:
        """Return start + (Σ change_i + noise) / expected clients, by name."""
        expected = ledger.sampling * ledger.clients
        clip = (self._settings.clip or MODEL_CLIP) * (1 + ROUNDING)
        sigma = ledger.multiplier * clip / expected
        means, num_updates = collector.means(), sum(map(bool, collector.weights.values()))
        found = {}
        for name, like in collector.template.items():
            begin = start.get(name, torch.zeros_like(like)).double()
            change = means[name].double() - begin if name in means else torch.zeros_like(begin)
            noisy = begin + change * (num_updates / expected)
            if collector.noise is None:
                noisy = noisy + draw_noise(sigma, like.shape).to(begin)
            found[f"averaged/{name}"] = noisy.to(like.dtype)
        return found

    def _noisy_prototypes(self, collector: "UpdateCollector", ledger: Ledger) -> Tensors:
        """Return noisy counts and sums of embeddings by class; each client's have norm 1."""
        total: Tensor | None = None
        for rows in collector.prototypes.values():
            own = _class_sums(rows, self._method.num_classes)
            scaled = own / own.norm().clamp(min=1e-300)
            total = scaled if total is None else total + scaled
        if total is None:
            total = torch.zeros(self._method.num_classes, 1 + self._dimension).double()
        noisy = add_exact_noise(total, ledger.multiplier)
        return {
            "prototypes/counts": noisy[:, 0].clone(),
            "prototypes/sums": noisy[:, 1:].clone(),
            "prototypes/sigma": torch.tensor(ledger.multiplier, dtype=torch.float64),
        }

    def _class_prototypes(self, noisy: Mapping[str, Tensor], like: Tensor) -> Prototypes:
        """Return one prototype for each class whose count exceeds two standard deviations."""
        counts = noisy["counts"]
        held = (counts > 2 * noisy["sigma"]).nonzero().squeeze(1)
        means = noisy["sums"][held] / counts[held].unsqueeze(1)
        if prototype_rule(self._method).max_norm < math.inf:
            means = means * (1 / means.norm(dim=1, keepdim=True).clamp(min=1))
        return Prototypes(means.to(like.dtype), held, counts[held].round().clamp(min=1).long())


def _class_sums(rows: Prototypes, num_classes: int) -> Tensor:
    """Return [C, 1 + d]: sample counts and sums of embeddings by class."""
    counts = rows.counts.double().unsqueeze(1)
    parts = torch.cat([counts, counts * rows.vectors.double()], dim=1)
    return parts.new_zeros(num_classes, parts.shape[1]).index_add_(0, rows.labels, parts)


def _without_rows(record: "RoundRecord") -> dict[str, Any]:
    """Return the fields of a record that have a row for each client, without the rows."""
    changes: dict[str, Any] = {"accuracy_per_client": {}}
    if record.metrics is not None:
        changes["metrics"] = record.metrics.model_copy(update={"per_client": {}})
    return changes
