"""The part of a method that is about sums over clients: what is collected, and what it comes to."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods.messages import Update
from mpfedcl.prototypes import Prototypes


class SumHooks:
    """Hooks of `Method` about sums. The defaults collect nothing."""

    totals_suffice: ClassVar[bool] = False
    """Whether the server needs nothing but sums over clients, so that `--secure-aggregation` is possible.
    Then `weigh` must stay as it is, and `reduce` finds in the tally no single client."""
    lost_by_totals: ClassVar[str] = ""
    """What the method does less well then, as a sentence."""
    keeps_sums: ClassVar[bool] = False
    """Whether the clients' sums outlive the run: clients may join and leave it at any time."""

    # On the client

    def collect(self, inputs: Tensor, labels: Tensor) -> Tensors:
        """Return statistics of a client's training samples, to be added up over the clients.

        Of no samples at all they must be zeros of the same shapes and types.
        """
        return {}

    def collect_many(
        self, inputs: Sequence[Tensor], labels: Sequence[Tensor]
    ) -> Sequence[Mapping[str, Tensor]]:
        """Return the same of several clients of one process, which may be cheaper together."""
        return [self.collect(*each) for each in zip(inputs, labels, strict=True)]

    def personalize(self, received: Any, inputs: Tensor, labels: Tensor) -> Tensors | None:
        """Return the own model of a client that does not train, from its training samples.

        `received` is what `prepare` makes of the broadcast after the round. None: it has no own.
        """
        return None

    # On the server

    def judge_sums(self, update: Update, *, announced: Sequence[int] | None) -> str | None:
        """Return why a client's sums cannot be true, or None; names, shapes and types are right.

        `announced`: what a client on another machine has said that it holds of each class; its sums
        may be looked at closely. None: they are this program's own.
        """
        return None

    def own_statistics(self, summed: Mapping[str, Tensor]) -> Tensors:
        """Return a client's sums in the form in which they are kept, in float64."""
        return {}

    def pool_of_one(self, own: Tensors) -> Tensors:
        """Return what a client with these statistics adds to those of all clients."""
        return {}

    def totals_of(self, summed: Mapping[str, Tensor]) -> Tensors:
        """Return what one client adds where only totals are ever known, given what it collected.

        Whole numbers are of type int64. Of no samples all must be zeros of the same shapes.
        """
        return dict(summed)

    def judge_totals(self, totals: Tensors) -> str | None:
        """Return why such totals cannot be true, or None."""
        return None

    def statistics_of(self, totals: Tensors) -> Tensors:
        """Return the pooled statistics of totals, where sums outlive the run."""
        return {}

    def prototypes_of(self, update: Update) -> Prototypes:
        """Return what an accepted update adds to the pool; a method may find it in the sums."""
        return update.prototypes
