"""Prototypes, and the pool of all clients' prototypes that the server sends back."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

import torch
from torch import Tensor

from mpfedcl.prototypes.kmeans import check_range, group_samples, mean_by, run_kmeans

Padding = Literal["all", "fill"]

_CHUNK = 2**22
"""Distances held at once: the memory stays small however many queries there are."""


@dataclass(frozen=True, eq=False)
class Prototypes:
    """One client's prototypes, sorted by class.

    Within a class the prototype that stands for most samples comes first; equal counts are ordered
    by the lowest index among the samples they stand for.
    """

    vectors: Tensor
    """[M, d] the prototypes."""
    labels: Tensor
    """[M] int64, the class of each."""
    counts: Tensor
    """[M] int64, how many samples each stands for."""

    def __post_init__(self) -> None:
        if self.vectors.dim() != 2:
            raise ValueError(
                f"prototype vectors have shape {tuple(self.vectors.shape)}; they must be [M, d]."
            )
        for name, column in (("labels", self.labels), ("counts", self.counts)):
            if column.shape != self.vectors.shape[:1] or column.dtype != torch.int64:
                raise ValueError(
                    f"prototype {name} are {column.dtype} of shape {tuple(column.shape)}; "
                    f"{len(self.vectors)} vectors need int64 of shape [{len(self.vectors)}]."
                )

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def dimension(self) -> int:
        """d, the dimension of a vector."""
        return self.vectors.shape[1]

    def to(self, device: torch.device | str) -> Self:
        """Return the prototypes on another device."""
        return type(self)(self.vectors.to(device), self.labels.to(device), self.counts.to(device))

    @classmethod
    def empty(
        cls,
        dimension: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Return no prototypes, of a known dimension."""
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(torch.zeros(0, dimension, dtype=dtype, device=device), none, none.clone())


@dataclass(frozen=True, eq=False)
class PrototypePool:
    """The prototypes of all clients, each with its class, its count and its owner.

    Make one with `gather`. It never changes: `with_client` and `without` return new pools.

    Example:
        >>> import torch
        >>> from mpfedcl import PrototypePool, cluster_prototypes
        >>> embeddings = torch.tensor([[0.0, 0.0], [0.0, 0.2], [4.0, 0.0], [4.0, 0.2]])
        >>> labels = torch.tensor([0, 0, 1, 1])
        >>> mine = cluster_prototypes(embeddings, labels, num_classes=2, num_prototypes=1)
        >>> pool = PrototypePool.gather({"client-a": mine}, num_classes=2, num_prototypes=1)
        >>> predicted, distance = pool.nearest(torch.tensor([[3.0, 0.1]]))
        >>> predicted.tolist(), distance.tolist()
        ([1], [1.0])
    """

    vectors: Tensor
    """[M, d] prototypes as they are; none is scaled or padded."""
    labels: Tensor
    """[M] int64 classes."""
    counts: Tensor
    """[M] int64, the samples each stands for."""
    owners: Tensor
    """[M] int64 indices into `names`."""
    names: tuple[str, ...]
    """Clients that have prototypes, sorted."""
    num_classes: int
    """C, whether or not a class has prototypes."""
    num_prototypes: int | None = None
    """K, the most that a client may have of a class; None for any number."""

    def __post_init__(self) -> None:
        size = len(self.vectors)
        columns = (self.labels, self.counts, self.owners)
        if self.vectors.dim() != 2 or any(
            column.shape != (size,) or column.dtype != torch.int64 for column in columns
        ):
            raise ValueError(
                f"a pool of vectors {tuple(self.vectors.shape)} needs int64 labels, counts and "
                f"owners of shape [{size}], not {', '.join(str(tuple(c.shape)) for c in columns)}."
            )
        if self.num_classes < 1:
            raise ValueError(f"num_classes is {self.num_classes}; it must be at least 1.")
        if self.num_prototypes is not None and self.num_prototypes < 1:
            raise ValueError(f"num_prototypes is {self.num_prototypes}; it must be at least 1.")
        if not size:
            return
        check_range("label", self.labels, self.num_classes)
        check_range("owner", self.owners, len(self.names))
        # aminmax passes NaN on.
        if not all(math.isfinite(float(value)) for value in self.vectors.detach().aminmax()):
            raise ValueError("prototype vectors hold NaN or infinity; every number must be finite.")
        most, place = (int(value) for value in self.held.flatten().max(dim=0))
        if self.num_prototypes is not None and most > self.num_prototypes:
            raise ValueError(
                f"client {self.names[place // self.num_classes]} has {most} prototypes of class "
                f"{place % self.num_classes}; at most {self.num_prototypes} are allowed."
            )

    @classmethod
    def gather(
        cls,
        prototypes: Mapping[str, Prototypes],
        *,
        num_classes: int,
        num_prototypes: int | None = None,
        dimension: int | None = None,
    ) -> Self:
        """Join clients' prototypes, ordered by client name whatever the order of the mapping.

        A client without prototypes is left out. `dimension` is needed only without any client.
        """
        dimensions = {shared.dimension for shared in prototypes.values()}
        dimensions |= set() if dimension is None else {dimension}
        if len(dimensions) > 1:
            found = ", ".join(str(size) for size in sorted(dimensions))
            raise ValueError(f"prototypes have dimensions {found}; they must agree.")
        if not dimensions:
            raise ValueError("there are no prototypes; an empty pool needs its dimension.")
        names = tuple(sorted(name for name, shared in prototypes.items() if len(shared)))
        if not names:
            like = next((shared.vectors for shared in prototypes.values()), torch.zeros(0))
            return cls.empty(
                num_classes, dimensions.pop(), num_prototypes, dtype=like.dtype, device=like.device
            )
        chosen = [prototypes[name] for name in names]
        sizes = torch.tensor([len(shared) for shared in chosen])
        vectors = torch.cat([shared.vectors.detach() for shared in chosen])
        return cls(
            vectors=vectors,
            labels=torch.cat([shared.labels for shared in chosen]),
            counts=torch.cat([shared.counts for shared in chosen]),
            owners=torch.arange(len(names)).repeat_interleave(sizes).to(vectors.device),
            names=names,
            num_classes=num_classes,
            num_prototypes=num_prototypes,
        )

    @classmethod
    def empty(
        cls,
        num_classes: int,
        dimension: int,
        num_prototypes: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Return a pool without prototypes, as before the first round."""
        none = torch.zeros(0, dtype=torch.int64, device=device)
        vectors = torch.zeros(0, dimension, dtype=dtype, device=device)
        return cls(vectors, none, none.clone(), none.clone(), (), num_classes, num_prototypes)

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def num_clients(self) -> int:
        """N, the clients that have prototypes."""
        return len(self.names)

    @property
    def dimension(self) -> int:
        """d, the dimension of a vector."""
        return self.vectors.shape[1]

    @property
    def present(self) -> Tensor:
        """[C] bool, the classes that any client holds."""
        return torch.bincount(self.labels, minlength=self.num_classes) > 0

    @property
    def held(self) -> Tensor:
        """[N, C] int64, how many prototypes each client has of each class."""
        key = self.owners * self.num_classes + self.labels
        held = torch.bincount(key, minlength=self.num_clients * self.num_classes)
        return held.view(self.num_clients, self.num_classes)

    def of(self, name: str) -> Prototypes:
        """Return one client's prototypes; none for a name that is not in the pool."""
        owner = self.names.index(name) if name in self.names else -1
        rows = self.owners == owner
        return Prototypes(self.vectors[rows], self.labels[rows], self.counts[rows])

    def only(self, name: str) -> Self:
        """Return the pool with one client's prototypes alone."""
        return self._gather_alike({name: self.of(name)})

    def with_client(self, name: str, prototypes: Prototypes) -> Self:
        """Return the pool with one more client, in its place by name."""
        others = {each: self.of(each) for each in self.names}
        return self._gather_alike({**others, name: prototypes})

    def _gather_alike(self, prototypes: Mapping[str, Prototypes]) -> Self:
        return self.gather(
            prototypes, num_classes=self.num_classes, num_prototypes=self.num_prototypes
        )

    def without(self, name: str) -> Self:
        """Return the pool without a client; as it is for a name that is not in it."""
        if name not in self.names:
            return self
        owner = self.names.index(name)
        kept = self.owners != owner
        owners = self.owners[kept]
        return replace(
            self,
            vectors=self.vectors[kept],
            labels=self.labels[kept],
            counts=self.counts[kept],
            owners=owners - (owners > owner).long(),
            names=tuple(each for each in self.names if each != name),
        )

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Return the pool on another device, or with vectors of another precision."""
        return replace(
            self,
            vectors=self.vectors.to(device=device, dtype=dtype),
            labels=self.labels.to(device=device),
            counts=self.counts.to(device=device),
            owners=self.owners.to(device=device),
        )

    def class_means(self) -> Tensor:
        """Return [C, d]: ū_j = mean of all real prototypes of class j, zeros where it is absent."""
        return mean_by(self.vectors, self.labels, self.num_classes)

    def slots(self, padding: Padding = "all") -> Tensor:
        """Return [N, K, C] int64: the row of `vectors` in each place of the grid, -1 for padding.

        "all": a client that has fewer than K prototypes of a class is padded in all K slots;
        "fill": only in the slots that are missing.
        """
        if padding not in get_args(Padding):
            raise ValueError(f"padding is {padding!r}; it must be one of all, fill.")
        key = self.owners * self.num_classes + self.labels
        held = self.held.flatten()
        num_slots = self.num_prototypes
        if num_slots is None:
            num_slots = int(held.max()) if len(held) else 0
        order = key.argsort(stable=True)
        slot = torch.arange(len(key), device=key.device) - (held.cumsum(0) - held)[key[order]]
        if padding == "all":
            full = held[key[order]] == num_slots
            order, slot = order[full], slot[full]
        grid = torch.full(
            (self.num_clients, num_slots, self.num_classes), -1, device=self.labels.device
        )
        grid[self.owners[order], slot, self.labels[order]] = order
        return grid

    def padded(self, padding: Padding = "all") -> tuple[Tensor, Tensor]:
        """Return the grid U [N, K, C, d] of the contrastive loss, and the classes present [C].

        U[i, k, j] is client i's k-th prototype of class j, or where `slots` pads, the class mean
        ū_j; zeros if no client holds the class.
        """
        slots = self.slots(padding)
        means = torch.arange(self.num_classes, device=slots.device) + len(self)
        rows = torch.where(slots < 0, means, slots)
        return torch.cat([self.vectors, self.class_means()])[rows], self.present

    @torch.no_grad()
    def nearest(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each row of z [B, d] the class of the nearest real prototype, and how far.

        argmin_j min_m |z - u_m|, u_m of class j; ties go to the lowest class. An empty pool gives
        label -1 and distance infinity; a query that is not finite, label -1 and distance NaN.
        """
        rows, distance = self.nearest_rows(z)
        labels = torch.cat([self.labels, self.labels.new_full((1,), -1)]).to(z.device)
        return labels[rows], distance

    @torch.no_grad()
    def nearest_rows(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each row of z [B, d] which prototype is nearest, -1 for none, and how far."""
        if z.dim() != 2 or z.shape[1] != self.dimension or not z.is_floating_point():
            raise ValueError(
                f"queries are {z.dtype} of shape {tuple(z.shape)}; "
                f"they must be floating point of shape [B, {self.dimension}]."
            )
        if not len(self):
            distance = torch.full((len(z),), torch.inf, dtype=z.dtype, device=z.device)
            return torch.full((len(z),), -1, device=z.device), distance
        # By class, so that the first of equal distances is the lowest class.
        labels, order = self.labels.to(z.device).sort(stable=True)
        vectors = self.vectors.to(z)[order]
        pieces = torch.split(z, max(1, _CHUNK // len(vectors)))
        rows = torch.cat([_find_nearest(piece, vectors, labels) for piece in pieces])
        distance = (z - vectors[rows]).norm(dim=1)
        usable = z.isfinite().all(dim=1)
        return order[rows].where(usable, -1), distance.where(usable, torch.nan)

    @torch.no_grad()
    def distances_by_class(self, z: Tensor) -> Tensor:
        """Return [B, C]: min_m |z - u_m| over the u_m of each class; infinity where it has none."""
        every = torch.cdist(z, self.vectors.to(z), compute_mode="donot_use_mm_for_euclid_dist")
        return self._largest_by_class(every.neg()).neg()

    @torch.no_grad()
    def similarities_by_class(self, z: Tensor) -> Tensor:
        """Return [B, C]: max_m z.u_m over the u_m of each class; -infinity where it has none."""
        return self._largest_by_class(z @ self.vectors.to(z).T)

    @torch.no_grad()
    def closeness_by_class(self, z: Tensor) -> Tensor:
        """Return [B, C]: |z|²/2 - min_m |z - u_m|²/2 over u_m of each class; -infinity for none.

        The class of the nearest prototype has the largest; one matrix product, unlike distances.
        """
        vectors = self.vectors.to(z)
        offsets = -vectors.square().sum(dim=1) / 2
        pieces = torch.split(z, max(1, _CHUNK // max(1, len(vectors))))
        found = [self._largest_by_class(torch.addmm(offsets, p, vectors.T)) for p in pieces]
        return torch.cat(found)

    def _largest_by_class(self, values: Tensor) -> Tensor:
        """Return [B, C] for one value [B, M] per prototype; -infinity where a class has none."""
        found = values.new_full((len(values), self.num_classes), -torch.inf)
        places = self.labels.to(values.device).expand(len(values), -1)
        return found.scatter_reduce_(1, places, values, "amax")

    def averaged_over_owners(self) -> Self:
        """Return FedProto's global prototypes: a pool with one per class, owned by "global".

        u_j = mean over the owners of class j of (the mean of that owner's prototypes of class j).
        """
        if not len(self):
            return replace(self, num_prototypes=1)
        key, place = torch.unique(self.owners * self.num_classes + self.labels, return_inverse=True)
        owner_means = mean_by(self.vectors, place, len(key))
        means = mean_by(owner_means, key % self.num_classes, self.num_classes)
        return self._one_per_class(means)

    def class_centers(self) -> Self:
        """Return a pool with one prototype per class, the mean by counts, owned by "global"."""
        if not len(self):
            return replace(self, num_prototypes=1)
        counts = self.counts.to(self.vectors.dtype)
        return self._one_per_class(mean_by(self.vectors, self.labels, self.num_classes, counts))

    def _one_per_class(self, vectors: Tensor) -> Self:
        """Return a pool of the vectors [C, d] of the classes that are present."""
        labels = self.present.nonzero().squeeze(1)
        counts = torch.zeros(self.num_classes, dtype=torch.int64, device=labels.device)
        counts.index_add_(0, self.labels, self.counts)
        return replace(self.merged_into(vectors[labels], labels, counts[labels]), num_prototypes=1)

    def merged_into(self, vectors: Tensor, labels: Tensor, counts: Tensor) -> Self:
        """Return the pool with these prototypes instead, owned by "global"."""
        names, owners = ("global",) if len(labels) else (), torch.zeros_like(labels)
        return replace(
            self, vectors=vectors, labels=labels, counts=counts, owners=owners, names=names
        )


# Merging a pool that would grow with the number of clients


def merge_prototypes(pool: PrototypePool, most: int, generator: torch.Generator) -> PrototypePool:
    """Return a pool with at most `most` prototypes per class; the pool itself if it fits.

    k-means in each class, a prototype counting as its samples: u = Σ n_m u_m / Σ n_m over those
    that become one, and n = Σ n_m. So a class's mean over samples stays what it was, and its second
    moment loses the scatter within what is merged. The clients that sent prototypes are not known
    any more: the K largest of each class belong to a first group, the next K to a second.
    """
    if most < 1:
        raise ValueError(f"most is {most}; it must be at least 1.")
    if not len(pool) or int(torch.bincount(pool.labels).max()) <= most:
        return pool
    # One group per class, classes in order.
    groups = group_samples([pool.vectors], [pool.labels], pool.num_classes)
    num_clusters = min(most, int(groups.sizes.max()))
    draws = torch.rand(len(groups), num_clusters, generator=generator)
    weights = pool.counts.to(pool.vectors.dtype)
    clusters = run_kmeans(groups, draws, spread=True, weights=weights)
    key, place = torch.unique(groups.group * num_clusters + clusters, return_inverse=True)
    # In double precision: thousands of prototypes may become one.
    means = mean_by(pool.vectors.double(), place, len(key), pool.counts.double())
    counts = torch.zeros_like(key).index_add_(0, place, pool.counts)
    labels = groups.labels[key // num_clusters]
    return split_among_groups(pool, means.to(pool.vectors.dtype), labels, counts)


def split_among_groups(
    pool: PrototypePool, vectors: Tensor, labels: Tensor, counts: Tensor
) -> PrototypePool:
    """Return a pool of other prototypes, whose owners are groups instead of clients.

    The K largest prototypes of each class belong to the first group, the next K to the second.
    """
    most = pool.num_prototypes or int(pool.held.max())
    largest_first = (labels * (int(counts.max()) + 1) - counts).argsort(stable=True)
    labels = labels[largest_first]
    held = torch.bincount(labels, minlength=pool.num_classes)
    rank = torch.arange(len(labels), device=labels.device) - (held.cumsum(0) - held)[labels]
    owners = rank // most
    by_owner = owners.argsort(stable=True)
    chosen = largest_first[by_owner]
    num_owners = int(owners.max()) + 1
    digits = len(str(num_owners))
    return replace(
        pool,
        vectors=vectors[chosen],
        labels=labels[by_owner],
        counts=counts[chosen],
        owners=owners[by_owner],
        names=tuple(f"group-{number + 1:0{digits}}" for number in range(num_owners)),
    )


def _find_nearest(z: Tensor, vectors: Tensor, labels: Tensor) -> Tensor:
    """Return [B]: the row of `vectors` [M, d] nearest to each row of z.

    argmin_m |z - u_m|; M must be at least 1. The label of that row is the nearest one's to the last
    bit, the first of a tie; among rows of one label rounding may decide.

    |z - u|² / 2 less |z|² / 2 is |u|² / 2 - z·u: one product. Where rounding could have decided
    between two labels, those queries alone are measured again by differences.
    """
    half_square = vectors.square().sum(1) / 2
    cost = torch.addmm(half_square, z, vectors.T, alpha=-1)
    best = cost.min(dim=1)
    # A sum of d products is off by at most about d times the rounding of its terms' size.
    largest = vectors.norm(dim=1).max()
    rounding = 2 * vectors.shape[1] * torch.finfo(z.dtype).eps
    margin = rounding * largest * (largest + z.norm(dim=1))
    close = cost <= (best.values + margin).unsqueeze(1)
    others = labels != labels[best.indices].unsqueeze(1)
    doubtful = (close & others).any(1).nonzero().squeeze(1)
    exact = torch.cdist(z[doubtful], vectors, compute_mode="donot_use_mm_for_euclid_dist")
    return best.indices.index_copy(0, doubtful, exact.argmin(1))
