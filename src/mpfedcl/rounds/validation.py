"""Update validation: every update is checked before it touches the server's state.

The server of a federation computes with values from clients that it cannot trust. A NaN, a forged
sample count or a tensor of another shape must cost that client its round, never the other clients
their model.

Prototypes and class means are also compared with those of the other clients. They cannot be
averaged robustly: prototypes are collected, and statistics must stay sums. So misplaced ones are
left out: single prototypes, all of a client, or a client's statistics as a whole.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods import CollectsStatistics, SharesPrototypes, prototype_rule
from mpfedcl.methods.messages import Broadcast, StackMember, Update
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.aggregation.by_distances import weiszfeld
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.processors.clip import squared_change

_VARIANCES = "running_var"
LARGEST_LOSS = 1e12
"""Largest absolute loss of a client, so that the mean over clients stays finite."""
LARGEST_SUM = 1e100
"""Largest absolute value of a statistic, so that sums over clients stay finite."""


class UpdateValidator:
    """Checks updates against what an honest client could send.

    `sizes` are training samples by client, `label_counts` those by class that clients on other
    machines have announced; None for clients of this program.
    """

    def __init__(
        self,
        assembly: Assembly,
        sizes: Mapping[str, int],
        label_counts: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._method = method = assembly.method
        self.template = assembly.template
        """Tensors with the shapes and types of the averaged parameters."""
        self.sums = assembly.sums
        """Tensors with the shapes and types of the summed statistics."""
        self._sizes, self._label_counts = sizes, label_counts
        self._is_private = method.experiment.privacy.has_budget
        self._max_images = method.experiment.network.max_images
        self._num_classes = method.num_classes
        self._dimension = assembly.model.embedding_size
        self._classifier = assembly.model.classifier
        self._most_prototypes = prototype_rule(method).max_prototypes
        self._max_norm = method.experiment.validation.max_norm
        # The norm of a unit vector may exceed 1 by rounding, and 1 may be the bound.
        self._max_prototype_norm = min(1.001 * self._max_norm, prototype_rule(method).max_norm)

    def classifier_of(self, broadcast: Broadcast) -> Tensor | None:
        """Return the rows of the global model's last layer [C, d], if clients share it."""
        wanted = (self._num_classes, self._dimension)
        shared = (broadcast.params.get(name) for name in sorted(self._classifier))
        return next((each for each in shared if each is not None and each.shape == wanted), None)

    @property
    def bytes_up(self) -> int:
        """The size of a full update without prototypes."""
        tensors = [*self.template.values(), *self.sums.values()]
        return sum(each.numel() * each.element_size() for each in tensors)

    def check_form(self, update: Update) -> str | None:
        """Return why an update is malformed, or None if its tensors can be inspected."""
        if not isinstance(update.client, str):
            return "the client's name is not text"
        if not isinstance(update.prototypes, Prototypes) or not isinstance(
            update.averaged, dict | StackMember | None
        ):
            return "tensors or prototypes are missing"
        # Stack members are made in this process; only tensors come from other machines.
        averaged = update.averaged if isinstance(update.averaged, dict) else {}
        parts = {**averaged, **update.summed, "vectors": update.prototypes.vectors}
        for name, value in parts.items():
            if not isinstance(value, Tensor) or value.layout is not torch.strided:
                return f"{name} is not a dense tensor"
            if value.device.type == "meta":
                return f"{name} holds no values"
        return None

    def check_shapes(self, update: Update) -> str | None:
        """Return which tensors have an unexpected name, shape or type, or None."""
        averaged = update.averaged if isinstance(update.averaged, dict) else self.template
        return _check_tensors(averaged, self.template) or _check_tensors(update.summed, self.sums)

    def check(self, update: Update, broadcast: Broadcast) -> str | None:
        """Return why a well-formed update must be rejected, or None if it is valid."""
        return (
            self._check_numbers(update)
            or self.check_shapes(update)
            or self._check_change(update.averaged, broadcast)
            or self._check_sums(update)
            or self._check_prototypes(update, broadcast.pool.vectors.dtype)
        )

    def _check_numbers(self, update: Update) -> str | None:
        expected = self._sizes.get(update.client)
        if expected is None:
            return f"{update.client!r} is not a client of this federation"
        if type(update.num_samples) is not int or update.num_samples != expected:
            return f"num_samples is {update.num_samples!r}; this client has {expected}"
        if update.loss is None and (self._is_private or not self._method.trains):
            return None
        if type(update.loss) is not float or not math.isfinite(update.loss):
            return f"loss is {update.loss!r}; it must be finite"
        if abs(update.loss) > LARGEST_LOSS:
            return f"loss is {update.loss:.3g}; at most {LARGEST_LOSS:g}"
        return None

    def _check_change(
        self, averaged: Tensors | StackMember | None, broadcast: Broadcast
    ) -> str | None:
        if averaged is None:
            withholds = "it withholds its update; this method never does"
            return None if self._method.may_withhold else withholds
        squares = squared_change(averaged, broadcast)
        # The sum of squares is finite only if every value is: one pass serves both checks.
        if not math.isfinite(squares):
            return "a tensor holds values that are not finite"
        if math.sqrt(squares) > self._max_norm:
            return f"the model changed by {math.sqrt(squares):.3g}; at most {self._max_norm:g}"
        if isinstance(averaged, dict):
            for name, value in averaged.items():
                # Of batch normalization; their square root would be NaN.
                if name.endswith(_VARIANCES) and bool((value < 0).any()):
                    return f"tensor {name} holds a variance below 0"
        return None

    def _check_sums(self, update: Update) -> str | None:
        for name, value in update.summed.items():
            largest = float(value.abs().max()) if value.numel() else 0.0
            if not math.isfinite(largest):
                return f"the sums {name} hold values that are not finite"
            if largest > LARGEST_SUM:
                return f"the sums {name} reach {largest:.3g}; at most {LARGEST_SUM:g}"
        if not isinstance(self._method, CollectsStatistics):
            return None
        announced = None if self._label_counts is None else self._label_counts[update.client]
        return self._method.validate_statistics(update, announced=announced)

    def _check_prototypes(self, update: Update, dtype: torch.dtype) -> str | None:
        prototypes = update.prototypes
        count = prototypes.labels.shape[0] if prototypes.labels.ndim == 1 else -1
        if count and not isinstance(self._method, SharesPrototypes):
            return "prototypes came although the method shares none"
        form = {
            "labels": ([count], torch.int64),
            "counts": ([count], torch.int64),
            "vectors": ([count, self._dimension], dtype),
        }
        for name, (shape, kind) in form.items():
            value = getattr(prototypes, name)
            if problem := _check_tensor(f"prototype {name}", value, torch.Size(shape), kind):
                return problem
        if count == 0:
            return None
        if not prototypes.vectors.isfinite().all():
            return "prototype vectors hold values that are not finite"
        longest = float(prototypes.vectors.norm(dim=1).max())
        if longest > self._max_prototype_norm:
            return f"a prototype has norm {longest:.3g}; at most {self._max_prototype_norm:g}"
        if int(prototypes.labels.min()) < 0 or int(prototypes.labels.max()) >= self._num_classes:
            return f"prototype labels must lie in 0..{self._num_classes - 1}"
        # Under a privacy budget, clients do not disclose their numbers of samples.
        most = self._max_images if self._is_private else update.num_samples
        if int(prototypes.counts.min()) < 1 or int(prototypes.counts.double().sum()) > most:
            return f"prototype counts must be at least 1 and sum to at most {most}"
        found = int(prototypes.labels.bincount().max())
        if self._most_prototypes is not None and found > self._most_prototypes:
            return f"a class has {found} prototypes; at most {self._most_prototypes}"
        return self._check_announced(update)

    def _check_announced(self, update: Update) -> str | None:
        """Compare prototypes with the label counts that a client has announced."""
        announced = (self._label_counts or {}).get(update.client)
        # Under a privacy budget, clients do not announce their label counts.
        if announced is None or self._is_private:
            return None
        counts = torch.zeros(self._num_classes, dtype=torch.float64)
        labels = update.prototypes.labels.cpu()
        counts.index_add_(0, labels, update.prototypes.counts.cpu().double())
        for label, (sent, held) in enumerate(zip(counts.tolist(), announced, strict=True)):
            if sent > held:
                return (
                    f"prototypes of class {label} stand for {sent:.0f} samples; this client has "
                    f"announced {held}"
                )
        return None


def _check_tensors(tensors: Mapping[str, Tensor], template: Tensors) -> str | None:
    if tensors.keys() != template.keys():
        odd = sorted(tensors.keys() ^ template.keys())
        return f"tensors {odd[:3]} are missing or unknown"
    for name, value in tensors.items():
        wanted = template[name]
        if problem := _check_tensor(f"tensor {name}", value, wanted.shape, wanted.dtype):
            return problem
    return None


def _check_tensor(name: str, value: Tensor, shape: torch.Size, dtype: torch.dtype) -> str | None:
    if value.shape != shape:
        return f"{name} has shape {list(value.shape)}; expected {list(shape)}"
    if value.dtype != dtype:
        return f"{name} has type {value.dtype}; expected {dtype}"
    return None


FEWEST_HOLDERS = 5
"""Clients that must hold a class before their means of it, or norms, are compared."""
_FEWEST_WITNESSES = 2
"""Of one other client without a classifier it is unknown which of the two is malicious."""
_MOST_WITNESSES = 30
"""Other clients that a client is compared with, evenly spread."""
_DEVIATIONS, _LEAST_SPREAD = 3.0, 0.05
"""Standard deviations by which a misplaced prototype agrees less than usual, and the least one."""
_LEAST_PART = 1 / 3
"""Part of the usual agreement that is enough for a prototype."""


@dataclass(frozen=True)
class ClassCenters:
    """The center of each class, from the M class means of all clients."""

    vectors: Tensor
    """[C, d] float64: the geometric median of the holders' means; zeros if not checked."""
    num_holders: Tensor
    """[C] clients that hold a class."""
    owners: Tensor
    """[M] the client of each mean, by its place in the order of names."""
    labels: Tensor
    means: Tensor
    """[M, d] float64, weighted by counts."""
    counts: Tensor

    @property
    def checked(self) -> Tensor:
        """The classes [C] with enough holders."""
        return self.num_holders >= FEWEST_HOLDERS


def find_centers(prototypes: Mapping[str, Prototypes], num_classes: int) -> ClassCenters:
    """Return the class means of one or more clients, and the centers of the classes.

    A center is the geometric median of the holders' means, which fewer than half of them cannot
    move far.
    """
    whole, owners = _join(prototypes)
    vectors = whole.vectors.double()
    held, place = torch.unique(owners * num_classes + whole.labels, return_inverse=True)
    counts = vectors.new_zeros(len(held)).index_add_(0, place, whole.counts.double())
    sums = vectors.new_zeros(len(held), vectors.shape[1])
    sums.index_add_(0, place, whole.counts.unsqueeze(1) * vectors)
    means, labels = sums / counts.unsqueeze(1), held % num_classes
    num_holders = labels.bincount(minlength=num_classes)
    centers = vectors.new_zeros(num_classes, vectors.shape[1])
    for label in (num_holders >= FEWEST_HOLDERS).nonzero().squeeze(1).tolist():
        points = means[labels == label]
        centers[label] = weiszfeld(torch.cdist(points, points).square()) @ points
    return ClassCenters(centers, num_holders, held // num_classes, labels, means, counts)


def _join(prototypes: Mapping[str, Prototypes]) -> tuple[Prototypes, Tensor]:
    """Return the prototypes of one or more clients in order of name, and their owners' places."""
    rows = [each for _, each in sorted(prototypes.items())]
    columns = zip(*((each.vectors, each.labels, each.counts) for each in rows), strict=True)
    whole = Prototypes(*map(torch.cat, columns))
    sizes = torch.tensor([len(each) for each in rows], device=whole.labels.device)
    return whole, torch.arange(len(rows), device=sizes.device).repeat_interleave(sizes)


@dataclass(frozen=True)
class KeptPrototypes:
    """The prototypes that are kept, and those that are dropped."""

    prototypes: dict[str, Prototypes]
    dropped: dict[str, list[int]] = field(default_factory=dict)
    """By client: the classes of dropped prototypes."""
    unchecked: list[int] = field(default_factory=list)
    """Classes of prototypes that cannot be compared."""


def drop_misplaced(
    prototypes: Mapping[str, Prototypes],
    num_classes: int,
    factor: float,
    classifier: Tensor | None = None,
) -> KeptPrototypes:
    """Drop prototypes whose labels contradict how the other clients tell the classes apart.

    A prototype's agreement with a witness is the cosine of two directions: from the mean of all
    classes that both hold to the prototype, and to the witness's mean of its class. Witnesses are
    the other clients, and the rows of the global model's `classifier` [C, d], which know every
    class. Directions from each one's own mean do not show that clients have different images, but
    exchanged labels. A client whose classes agree no better than by chance (0 on average) loses all
    its prototypes. Another loses those that agree less than a third as much as those of the median
    client, and less by `_DEVIATIONS` too: while a model has trained little, honest ones vary.

    A prototype is also dropped if its norm is `factor` times the largest norm of the median client.
    """
    present = {name: each for name, each in sorted(prototypes.items()) if len(each)}
    if not present:
        return KeptPrototypes(dict(prototypes))
    found = _find_agreements(present, num_classes, classifier)
    typical = torch.stack([each.nanmedian() for each in found.values()])
    middle = typical.nanmedian()
    spread = torch.stack([(each - middle).abs().nanmedian() for each in found.values()]).nanmedian()
    odd_from = middle - _DEVIATIONS * (1.4826 * spread + _LEAST_SPREAD)
    least = torch.minimum(odd_from, _LEAST_PART * middle)
    norms = {name: each.vectors.double().norm(dim=1) for name, each in present.items()}
    longest = torch.stack([each.max() for each in norms.values()])
    most = factor * longest.quantile(0.5) if len(longest) >= FEWEST_HOLDERS else torch.inf
    kept, dropped = dict(prototypes), {}
    unchecked: set[int] = set()
    for name, each in present.items():
        agreement = found[name]
        classes = sorted(set(each.labels.tolist()))
        by_class = [agreement[each.labels == label].mean() for label in classes]
        odd = agreement < least
        if bool(torch.stack(by_class).nanmean() <= 0):
            odd = torch.ones_like(odd)
        odd |= norms[name] > most
        if bool(odd.any()):
            kept[name] = Prototypes(each.vectors[~odd], each.labels[~odd], each.counts[~odd])
            dropped[name] = sorted(set(each.labels[odd].tolist()))
        unchecked |= set(each.labels[agreement.isnan()].tolist())
    return KeptPrototypes(kept, dropped, sorted(unchecked))


def _find_agreements(
    prototypes: Mapping[str, Prototypes], num_classes: int, classifier: Tensor | None
) -> dict[str, Tensor]:
    """Return the mean agreement of each prototype [M_i] with its witnesses; NaN without any."""
    means, held = [], []
    for each in prototypes.values():
        vectors, counts = each.vectors.double(), each.counts.double()
        weights = vectors.new_zeros(num_classes).index_add_(0, each.labels, counts)
        sums = vectors.new_zeros(num_classes, each.dimension)
        sums.index_add_(0, each.labels, counts.unsqueeze(1) * vectors)
        means.append(sums / weights.clamp(min=1).unsqueeze(1))
        held.append(weights > 0)
    found = {}
    count = len(means)
    gaps = range(1, count, max(1, (count - 1) // _MOST_WITNESSES))[:_MOST_WITNESSES]
    for place, (name, each) in enumerate(prototypes.items()):
        others = [(place + gap) % count for gap in gaps]
        witnesses = [(means[other], held[place] & held[other]) for other in others]
        witnesses = [(rows, common) for rows, common in witnesses if int(common.sum()) > 1]
        if classifier is not None and int(held[place].sum()) > 1:
            witnesses.append((classifier.double(), held[place]))
        elif len(witnesses) < _FEWEST_WITNESSES:
            witnesses = []
        cosines = [_compare(each, means[place], rows, common) for rows, common in witnesses] or [
            each.vectors.new_full((len(each),), torch.nan, dtype=torch.float64)
        ]
        found[name] = torch.stack(cosines).nanmean(0)
    return found


def _compare(own: Prototypes, means: Tensor, rows: Tensor, common: Tensor) -> Tensor:
    """Return the agreement [M] of prototypes with one witness; NaN in classes not in common."""
    directions = rows - rows[common].mean(0)
    away = own.vectors.double() - means[common].mean(0)
    cosines = torch.nn.functional.cosine_similarity(away, directions[own.labels])
    return cosines.masked_fill(~common[own.labels], torch.nan)


def find_odd_clients(
    prototypes: Mapping[str, Prototypes], num_classes: int, factor: float
) -> dict[str, float]:
    """Return the clients whose class means differ by more than chance, and their ratios.

    Features have norm 1, so samples of a class with mean m have the variance b = 1 - |m|² around
    it, and the mean of n samples has b/n, plus the variance a between clients, estimated by the
    median over all holders. A client's ratio is Σ_c n_c d_c² / Σ_c n_c (a + b/n_c) over the checked
    classes: about 1 for an honest client of any size.
    """
    present = {name: each for name, each in sorted(prototypes.items()) if len(each)}
    centers = find_centers(present, num_classes) if present else None
    if centers is None or not bool(centers.checked.any()):
        return {}
    labels, counts = centers.labels, centers.counts
    squares = (centers.means - centers.vectors[labels]).square().sum(1)
    spread = (1 - centers.vectors.square().sum(1)).clamp(min=0)
    # The center is estimated from samples too.
    total = torch.zeros_like(spread).index_add_(0, labels, counts)
    expected = spread[labels] * (1 / counts + 1 / total[labels])
    seen = centers.checked[labels]
    expected += (squares - expected)[seen].quantile(0.5).clamp(min=0)
    found, by_chance = (
        counts.new_zeros(len(present)).index_add_(0, centers.owners[seen], (counts * each)[seen])
        for each in (squares, expected)
    )
    ratios = dict(zip(present, (found / by_chance).tolist(), strict=True))
    # If all clients are equal the ratio is 0/0, which is not above the factor.
    return {name: ratio for name, ratio in ratios.items() if ratio > factor}
