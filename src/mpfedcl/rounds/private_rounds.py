"""Rounds under a privacy budget: who takes part, and what leaves the server's hands.

Of a one-shot method that are noisy sums, once. Of a method that averages it is, in each
round, the mean change of the model with noise (DP-FedAvg: each client's change is clipped, all
count alike, and the sum is divided by the number of clients that are expected, which is no secret),
and now and then one noisy prototype per class. All else that a round makes of clients' samples is
made of these alone.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from mpfedcl.core.tensors import Tensors, pack_tensors
from mpfedcl.methods import Method, OneShot, SharesPrototypes, prototype_rule
from mpfedcl.privacy.accounting import calibrate_multiplier
from mpfedcl.privacy.ledger import Ledger, ReleaseLog
from mpfedcl.privacy.noise import add_exact_noise, draw_noise
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.budget_check import (
    BOTH,
    planned_releases,
    releases_prototypes,
)
from mpfedcl.rounds.processors.clip import MODEL_CLIP, ROUNDING
from mpfedcl.rounds.record import Attendance, RoundRecord
from mpfedcl.rounds.update_collector import UpdateCollector

_KEPT_REMARKS = ("warnings", "refused")
"""What the others say may tell how many clients were drawn."""
EVERYBODY = "everybody"
"""Whose the prototypes are that no single client's can be told from."""


@dataclass(frozen=True)
class Released:
    """All that the server goes on with, of a round."""

    means: Tensors
    sums: Tensors
    prototypes: dict[str, Prototypes] | None
    """None: those of before stay."""
    statistics: Tensors = field(default_factory=dict)
    """What a one-shot method keeps."""


class PrivateRounds:
    """The releases of one run.

    Args:
        method: With a budget that `check_budget` has let pass.
        num_clients: Clients at the start.
        dimension: Of an embedding.
    """

    def __init__(self, method: Method, num_clients: int, dimension: int) -> None:
        self.log: ReleaseLog | None = ReleaseLog()
        """Where releases are kept; None in a process that is told them by another."""
        self._method = method
        self._experiment = method.experiment
        self._settings = method.experiment.privacy
        self._num_clients = num_clients
        self._dimension = dimension

    @property
    def samples(self) -> bool:
        """Whether it is a secret who takes part in a round."""
        return self._method.trains and self._experiment.fraction < 1

    def begin(self) -> None:
        """Open the ledger, where the run has none yet."""
        if self.log is None or self.log.ledger is not None:
            return
        epsilon, settings = self._settings.epsilon, self._settings
        assert epsilon is not None
        sampling = self._experiment.fraction if self._method.trains else 1.0
        unit = settings.unit_for(trains=self._method.trains)
        multiplier = self._settings.noise
        if isinstance(self._method, OneShot):
            assert self._method.private_sums is not None
            multiplier = self._method.private_sums.multiplier
        elif multiplier is None:
            planned = planned_releases(
                self._experiment, shares_prototypes=isinstance(self._method, SharesPrototypes)
            )
            multiplier = calibrate_multiplier(epsilon, settings.delta, planned, sampling=sampling)
        self.log.begin(
            Ledger(unit, epsilon, settings.delta, multiplier, sampling, self._num_clients)
        )

    @property
    def ledger(self) -> Ledger | None:
        """What is spent; None in a process that does not know."""
        return None if self.log is None else self.log.ledger

    def choose(self, round_number: int, names: Sequence[str]) -> bytes:
        """Return who takes part, each by a draw of its own, for all processes to be told."""
        if self.log is None:
            return b""
        share, draw = self._experiment.fraction, secrets.SystemRandom()
        chosen = self.log.choose(
            round_number, lambda: [name for name in names if draw.random() < share]
        )
        here = set(names)
        return "\n".join(name for name in chosen if name in here).encode()

    def release(self, round_number: int, start: Tensors, collector: UpdateCollector) -> bytes:
        """Return a round's release, for all processes to be told; drawn once, whatever happens."""
        if self.log is None:
            return b""
        self.begin()
        assert self.log.ledger is not None
        ledger = self.log.ledger
        if isinstance(self._method, OneShot):
            made = self.log.release(
                round_number, ledger.multiplier, lambda: self._noisy_sums(collector)
            )
            return pack_tensors(made)
        due = isinstance(self._method, SharesPrototypes) and releases_prototypes(
            self._experiment, round_number
        )
        multiplier = ledger.multiplier / (BOTH if due else 1.0)
        made = self.log.release(
            round_number,
            multiplier,
            lambda: {
                **self._noisy_means(start, collector, ledger),
                **(self._noisy_prototypes(collector, ledger, self._dimension) if due else {}),
            },
        )
        return pack_tensors(made)

    def open(self, content: bytes, like: Tensor) -> Released:
        """Return what the server goes on with, from a release and nothing else."""
        released = {name: value.to(like.device) for name, value in load(content).items()}
        if isinstance(self._method, OneShot):
            return self._open_sums(self._method, released, like)
        noisy = _group(released, "prototypes")
        rows = {EVERYBODY: self._class_prototypes(noisy, like)} if noisy else None
        return Released(_group(released, "averaged"), {}, rows)

    def tell(self, record: RoundRecord, num_chosen: int) -> RoundRecord:
        """Return a round's record without what no noise protects."""
        changes: dict[str, Any] = {"loss": None, "loss_per_client": {}}
        if self.ledger is not None:
            changes["privacy"] = self.ledger.told()
        if self.samples:
            # How many were drawn, and who, would undo what drawing them is worth.
            expected = self._experiment.fraction * self._num_clients / max(1, num_chosen)
            changes |= {
                "clients": Attendance(answered=[], missing=[], rejected={}),
                "bytes": {name: round(size * expected) for name, size in record.bytes.items()},
                "processed": {},
                "remarks": {n: told for n, told in record.remarks.items() if n in _KEPT_REMARKS},
                "withheld": [],
                # Of many clients only those that took part have a row.
                **({} if record.accuracy_spread is None else {"accuracy_per_client": {}}),
                "unchanged": False,
            }
        return record.model_copy(update=changes)

    # One exchange

    def _noisy_sums(self, collector: UpdateCollector) -> Tensors:
        assert isinstance(self._method, OneShot)
        mechanism = self._method.private_sums
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
        return Released({}, own, {EVERYBODY: rows}, method.pool_of_one(own))

    # Rounds

    def _noisy_means(self, start: Tensors, collector: UpdateCollector, ledger: Ledger) -> Tensors:
        """Return start + (Σ change_i + noise) / expected clients, by name."""
        expected = ledger.sampling * ledger.clients
        clip = (self._settings.clip or MODEL_CLIP) * (1 + ROUNDING)
        sigma = ledger.multiplier * clip / expected
        means, answers = collector.means(), sum(map(bool, collector.weights.values()))
        found = {}
        for name, like in collector.template.items():
            begin = start.get(name, torch.zeros_like(like)).double()
            change = means[name].double() - begin if name in means else torch.zeros_like(begin)
            noisy = begin + change * (answers / expected)
            if collector.noise is None:
                noisy = noisy + draw_noise(sigma, like.shape).to(begin)
            found[f"averaged/{name}"] = noisy.to(like.dtype)
        return found

    def _noisy_prototypes(
        self, collector: UpdateCollector, ledger: Ledger, dimension: int
    ) -> Tensors:
        """Return noisy counts and sums of embeddings by class; each client's have length 1."""
        total: Tensor | None = None
        for rows in collector.prototypes.values():
            own = _class_sums(rows, self._method.num_classes)
            scaled = own / own.norm().clamp(min=1e-300)
            total = scaled if total is None else total + scaled
        if total is None:
            total = torch.zeros(self._method.num_classes, 1 + dimension).double()
        noisy = add_exact_noise(total, ledger.multiplier)
        return {
            "prototypes/counts": noisy[:, 0].clone(),
            "prototypes/sums": noisy[:, 1:].clone(),
            "prototypes/sigma": torch.tensor(ledger.multiplier, dtype=torch.float64),
        }

    def _class_prototypes(self, noisy: Mapping[str, Tensor], like: Tensor) -> Prototypes:
        """Return one prototype for each class whose count stands out of the noise."""
        counts = noisy["counts"]
        held = (counts > 2 * noisy["sigma"]).nonzero().squeeze(1)
        means = noisy["sums"][held] / counts[held].unsqueeze(1)
        if prototype_rule(self._method).max_norm < math.inf:
            means = means * (1 / means.norm(dim=1, keepdim=True).clamp(min=1))
        return Prototypes(means.to(like.dtype), held, counts[held].round().clamp(min=1).long())


def _class_sums(rows: Prototypes, num_classes: int) -> Tensor:
    """Return [C, 1 + d]: how many samples prototypes stand for, and the sum of these."""
    counts = rows.counts.double().unsqueeze(1)
    parts = torch.cat([counts, counts * rows.vectors.double()], dim=1)
    return parts.new_zeros(num_classes, parts.shape[1]).index_add_(0, rows.labels, parts)


def _group(tensors: Tensors, prefix: str) -> Tensors:
    start = f"{prefix}/"
    return {n.removeprefix(start): v for n, v in tensors.items() if n.startswith(start)}
