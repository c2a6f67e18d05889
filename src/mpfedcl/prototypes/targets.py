"""A pool laid out for the contrastive loss: what every batch of a round looks up, made once."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from mpfedcl.prototypes.pool import Padding, PrototypePool

LARGEST_TABLE = 2**19
"""Entries up to which a table of slices is the fastest way to sum them; lists from there on."""


class ContrastTargets(NamedTuple):
    """A pool as the loss wants it: tensors only, made once per round and used for every batch.

    Most slices (client, slot) of a skewed pool are padding throughout and hence the same. Each
    distinct slice is kept once, with its share of all N·K as its weight.
    """

    vectors: Tensor
    """[V, d] the M real prototypes, then the C class means."""
    classes: Tensor
    """[V] int64, the class of each real prototype; -1 for the class means."""
    slices: Tensor
    """[S, C] int64, the vector that each class has in each distinct slice."""
    weights: Tensor
    """[S] how much of the N·K slices each stands for; they sum to 1."""
    present: Tensor
    """[C] bool, the classes that somebody holds."""
    mean_targets: Tensor
    """[C, d] Σ_s weight_s U[s, c]: where each class stands on average over the slices."""
    members: "MemberTable | MemberLists"
    """Which vectors stand in which slice, absent classes aside."""


class MemberTable(NamedTuple):
    """Members as a matrix: few slices are summed by one product."""

    counts: Tensor
    """[V, S] how often each vector stands in each slice."""


class MemberLists(NamedTuple):
    """Members as lists, both ways: with many slices a matrix would be nearly all zeros.

    Only the class means, which stand in many slices, keep theirs.
    """

    means: Tensor
    """[last of V, S] how often each class mean stands in each slice."""
    vectors: Tensor
    """The real prototypes of slice 0, then of slice 1, and so on."""
    slice_starts: Tensor
    """[S] where each slice's list begins."""
    slices: Tensor
    """The slices that prototype 0 stands in, then prototype 1, and so on."""
    vector_starts: Tensor
    """[M] where each prototype's list begins."""


class PoolGrid(NamedTuple):
    """A pool padded to a vector for every client, slot and class."""

    vectors: Tensor
    """[V, d] the M real prototypes, then the C class means; constants from here on."""
    classes: Tensor
    """[V] int64, the class of each real prototype; -1 for the class means."""
    slots: Tensor
    """[N, K, C] int64, the vector in each slot."""
    present: Tensor
    """[C] bool, the classes that somebody holds."""

    @classmethod
    def pad(cls, pool: PrototypePool, padding: Padding = "all") -> Self:
        """Put the class mean wherever a client has no prototype."""
        slots = pool.slots(padding)
        means = torch.arange(pool.num_classes, device=slots.device) + len(pool)
        return cls(
            vectors=torch.cat([pool.vectors, pool.class_means()]).detach(),
            classes=torch.cat([pool.labels, torch.full_like(means, -1)]),
            slots=torch.where(slots < 0, means, slots),
            present=pool.present,
        )

    def targets(self, clients: Tensor | None = None) -> ContrastTargets:
        """Return what `contrastive_loss` works with.

        With `clients`, indices into the pool's names, only their slices count; class means stay
        those of the whole pool.
        """
        slots = self.slots if clients is None else self.slots[clients]
        vectors, classes, present = self.vectors, self.classes, self.present
        if len(slots):
            slices, repeats = torch.unique(slots.flatten(0, 1), dim=0, return_counts=True)
        else:
            # One slice of absent classes: the arithmetic of the loss goes through and yields 0.
            slices = torch.arange(len(vectors), device=present.device)[-len(present) :].unsqueeze(0)
            repeats = torch.ones_like(slices[:, 0])
        counted = present if len(slots) else ~present
        if clients is not None:
            # What the drawn clients do not use costs nothing.
            used, places = torch.unique(slices, return_inverse=True)
            vectors, classes, slices = vectors[used], classes[used], places.view_as(slices)
        weights = repeats.to(vectors.dtype) / repeats.sum()
        return ContrastTargets(
            vectors=vectors,
            classes=classes,
            slices=slices,
            weights=weights,
            present=present,
            mean_targets=_average_slices(vectors, slices, weights),
            members=_find_members(slices, counted, vectors, int((classes >= 0).sum())),
        )


def prepare_contrast(pool: PrototypePool, padding: Padding = "all") -> ContrastTargets:
    """Lay a whole pool out for `contrastive_loss`."""
    return PoolGrid.pad(pool, padding).targets()


def _average_slices(vectors: Tensor, slices: Tensor, weights: Tensor) -> Tensor:
    """Return [C, d]: the mean over slices of the vector that each class has in them."""
    num_classes = slices.shape[1]
    shares = vectors.new_zeros(num_classes, len(vectors))
    for row, column in zip(shares, slices.unbind(1), strict=True):
        row.index_add_(0, column, weights)
    return shares @ vectors


def _find_members(
    slices: Tensor, counted: Tensor, vectors: Tensor, num_real: int
) -> "MemberTable | MemberLists":
    """Note down which vectors stand in which slice, in the classes that are counted.

    The first `num_real` vectors are prototypes, the others class means.
    """
    if len(slices) * len(vectors) <= LARGEST_TABLE:
        return MemberTable(_count_members(slices, counted, vectors))
    num_slices = len(slices)
    real = (slices < num_real) & counted
    places, members = real.nonzero()[:, 0], slices[real]
    in_slice = torch.bincount(places, minlength=num_slices)
    in_vector = torch.bincount(members, minlength=num_real)
    # A slice's own row of the table counts means alone: prototypes are put aside.
    aside = torch.where(real, num_real, slices) - num_real
    means = _count_members(aside.clamp(min=0), counted & ~real, vectors[num_real:])
    return MemberLists(
        means,
        members,
        in_slice.cumsum(0) - in_slice,
        places[members.argsort(stable=True)],
        in_vector.cumsum(0) - in_vector,
    )


def _count_members(slices: Tensor, counted: Tensor, vectors: Tensor) -> Tensor:
    """Return [V, S]: how often each vector stands in each slice, where it counts."""
    table = vectors.new_zeros(len(slices), len(vectors))
    table.scatter_add_(1, slices, counted.to(vectors.dtype).expand(slices.shape))
    return table.T.contiguous()
