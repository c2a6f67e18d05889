"""FedRoD (Chen and Chao, ICLR 2022)."""

import torch
from torch import Tensor, zeros_like

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods import Batch, Context
from mpfedcl.methods._two_models import _OTHER
from mpfedcl.methods.fedavg_ft import FedAvgFT

_OUT_OF_REACH = 1e6
"""Subtracted from the logit of a class that a client lacks: its probability is 0."""


class FedRoD(FedAvgFT):
    """A model trained for all classes alike, and a personal classifier added to its logits.

    The sent model minimizes cross-entropy(f(x) + log n_c), the balanced softmax, with n_c the
    client's number of samples of class c. The personal classifier P minimizes cross-entropy(f(x) +
    P z) for the embedding z of the sent model, which this loss does not change. f + P z predicts.
    """

    name = "fedrod"
    summary = "balanced softmax for the sent model, plus a personal classifier"
    paper = "Chen and Chao, ICLR 2022"
    interpretation = "The personal classifier is linear (not a hypernetwork) and starts at 0."
    keeps = "its personal classifier"

    def init_client(self, params: Tensors) -> Tensors:
        """Start the personal classifier P at 0."""
        return {n: zeros_like(params[n]) for n in params if n in self.layers.classifier}

    def describe(self, labels: Tensor) -> Tensors:
        """Return log n_c of all classes."""
        counts = torch.bincount(labels, minlength=self.num_classes).double()
        return {"log_counts": counts.clamp(min=1).log() - _OUT_OF_REACH * (counts == 0)}

    def begin_personal(self, context: Context) -> Tensors:
        """Return the received model with P added to its classifier."""
        return context.start | {n: context.start[n] + p for n, p in context.state.items()}

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        """Return cross-entropy for the personal model, and balanced softmax for the sent one."""
        _, logits = context.apply(params, batch.inputs)
        if not self.is_personal(context):
            logits = logits + context.own["log_counts"].to(logits.dtype)
        return batch.cross_entropy(logits)

    def after_step(self, params: Tensors, context: Context) -> tuple[Tensors, Tensors]:
        """Swap the two models; the personal one follows the sent one, plus P.

        Between its own step and that of the sent model, only P stands in for the personal model's
        classifier.
        """
        other, memory = super().after_step(params, context)
        if self.is_personal(context):
            kept = {_OTHER + n: params[n] - other[n] for n in context.state}
            return other, memory | kept
        return params | {n: params[n] + other[n] for n in context.state}, memory

    def finish(self, params: Tensors, context: Context, num_steps: int) -> tuple[Tensors, Tensors]:
        """Send the other model; keep P."""
        sent, _ = super().finish(params, context, num_steps)
        return sent, {n: params[n] - sent[n] for n in context.state}
