"""CMFL, communication-mitigated federated learning (Luping Wang et al., ICDCS 2019)."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mpfedcl.experiment.method_settings import CmflSettings
from mpfedcl.methods import Broadcast, Context, FedAvg, Server, Tally, Tensors


class Cmfl(FedAvg):
    """A client uploads its update u only if its signs agree with the last global update g.

    The relevance e(u, g) is the share of parameters j with sgn(u_j) = sgn(g_j); two zeros agree. A
    client with e(u, g) below the threshold, constant or v / sqrt(t) in round t, uploads nothing and
    discards its update: it starts the next round from the global model.
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
    search_space = {**FedAvg.search_space, "cmfl__threshold": (0.5, 0.6, 0.7, 0.8)}

    def prepare(self, broadcast: Broadcast) -> tuple[Tensors, float]:
        """Return the last global update and the threshold of this round."""
        return broadcast.extra, self._threshold(broadcast.round)

    def finish(
        self, params: Tensors, context: Context, num_steps: int
    ) -> tuple[Tensors | None, Tensors]:
        """Withhold an update of low relevance; all clients upload until the model has changed."""
        last, threshold = context.received
        changes = {name: params[name] - context.start[name] for name in last}
        if last and agreement(changes, last) < threshold:
            return None, context.state
        return super().finish(params, context, num_steps)

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        """Average, and keep the change of the model; without a change, keep the last one."""
        change = {
            name: _without_rounding(mean - server.params[name], mean, len(tally.names))
            for name, mean in means.items()
        }
        has_changed = any(bool(value.any()) for value in change.values())
        return replace(
            super().reduce(server, means, tally), extra=change if has_changed else server.extra
        )

    def remarks(self, broadcast: Broadcast) -> dict[str, Any]:
        """Return the round's threshold, and the share of zeros in the last global update."""
        zeros = sum(int((value == 0).sum()) for value in broadcast.extra.values())
        size = sum(value.numel() for value in broadcast.extra.values())
        threshold = self._threshold(broadcast.round)
        return {"cmfl": {"threshold": threshold, "zeros": zeros / size if size else None}}

    def _threshold(self, round_number: int) -> float:
        is_constant = self.settings.schedule == "constant"
        return self.settings.threshold / (1 if is_constant else math.sqrt(round_number))


def _without_rounding(change: Tensor, mean: Tensor, num_clients: int) -> Tensor:
    """Set changes to 0 that are within the rounding error of a mean over clients.

    The mean of equal values may differ from them in the last bit, by an error that depends on the
    order of summation. A parameter that no client has changed would then have a random sign.
    """
    tolerance = 2 * math.sqrt(num_clients) * torch.finfo(mean.dtype).eps
    return change.masked_fill(change.abs() <= tolerance * mean.abs(), 0)


def agreement(changes: Tensors, last: Tensors) -> float:
    """Return the share of parameters whose signs agree; two zeros agree."""
    same = sum(int((changes[name].sign() == value.sign()).sum()) for name, value in last.items())
    return same / sum(value.numel() for value in last.values())
