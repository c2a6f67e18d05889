"""CMFL (Wang et al., 2019)."""

import math
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment.method_settings import CmflSettings
from mpfedcl.methods.base import Context, Server, Tally
from mpfedcl.methods.fedavg import FedAvg
from mpfedcl.methods.messages import Broadcast


class LastUpdate(NamedTuple):
    """How the model moved in the last round that moved it, and this round's threshold."""

    change: Tensors
    threshold: float


class Cmfl(FedAvg):
    """A client uploads only if enough signs of its update agree with the last global update.

    e(u) = share of all parameters j with sgn(u_j) = sgn(last_j); two zeros agree. The work of a client
    that does not upload is lost; it begins the next round at the global model again.
    """

    name = "cmfl"
    summary = "uploads only updates that agree with the last global one"
    paper = "Luping Wang et al., ICDCS 2019"
    interpretation = "Two zeros agree, and uploaders count by their samples."
    sends = "its model, or nothing"
    keeps = "nothing; the server: the last global update"
    totals_suffice = False
    may_withhold = True
    settings: CmflSettings
    search_space = MappingProxyType(
        {**FedAvg.search_space, "cmfl__threshold": (0.5, 0.6, 0.7, 0.8)}
    )

    def prepare(self, broadcast: Broadcast) -> LastUpdate:
        """Return the last global update and the threshold of this round."""
        return LastUpdate(broadcast.extra, self._threshold(broadcast.round))

    def finish(
        self, params: Tensors, context: Context, num_steps: int
    ) -> tuple[Tensors | None, Tensors]:
        """Withhold an update that agrees too little; all clients upload until the model has moved."""
        last: LastUpdate = context.received
        changes = {name: params[name] - context.start[name] for name in last.change}
        if last.change and agreement(changes, last.change) < last.threshold:
            return None, context.state
        return super().finish(params, context, num_steps)

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        """Average, and keep the change of the model; without a change, keep the last one."""
        change = {name: mean - server.params[name] for name, mean in means.items()}
        moved = any(bool(value.any()) for value in change.values())
        return replace(
            super().reduce(server, means, tally), extra=change if moved else server.extra
        )

    def remarks(self, broadcast: Broadcast) -> dict[str, Any]:
        """Return the round's threshold, and the share of zeros in what is compared with."""
        zeros = sum(int((value == 0).sum()) for value in broadcast.extra.values())
        size = sum(value.numel() for value in broadcast.extra.values())
        threshold = self._threshold(broadcast.round)
        return {"cmfl": {"threshold": threshold, "zeros": zeros / size if size else None}}

    def _threshold(self, round_number: int) -> float:
        is_constant = self.settings.schedule == "constant"
        return self.settings.threshold / (1 if is_constant else math.sqrt(round_number))


def agreement(changes: Tensors, last: Tensors) -> float:
    """Return the share of parameters whose signs agree; two zeros agree."""
    same = sum(int((changes[name].sign() == value.sign()).sum()) for name, value in last.items())
    return same / sum(value.numel() for value in last.values())
