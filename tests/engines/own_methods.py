"""Custom methods that use different hooks: `own_methods:Name`."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods import Batch, Context, Method, SharesPrototypes
from mpfedcl.methods.messages import Broadcast


class FirstLayerAtHome(SharesPrototypes):
    """Keeps the first layer on the client and shares prototypes."""

    primary_predictor = "personal_prototype"

    def shared(self, parameter: str) -> bool:
        return not parameter.startswith("hidden.0")


class Decay(Method):
    """Uses the weights directly, outside any layer."""

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        size = torch.stack([value.square().sum() for value in params.values()]).sum()
        return super().loss(params, batch, context) + 0.01 * size


class TwoViews(Method):
    """Applies the model twice and penalizes different embeddings."""

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        embeddings, logits = context.apply(params, batch.inputs)
        others, _ = context.apply(params, 0.5 * batch.inputs)
        return batch.cross_entropy(logits) + batch.mean((embeddings - others).square().mean(1))


class Anchored(Method):
    """Applies the initial model of the round next to the trained one."""

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        embeddings, logits = context.apply(params, batch.inputs)
        anchors, _ = context.apply(context.start, batch.inputs)
        return batch.cross_entropy(logits) + batch.mean((embeddings - anchors).square().mean(1))


class Clipped(Method):
    """Changes gradients only; it has no state."""

    def adjust(
        self, gradients: Tensors, params: Tensors, context: Context
    ) -> tuple[Tensors, Tensors]:
        squares = torch.stack([value.square().sum() for value in gradients.values()])
        scale = (0.05 / squares.sum().sqrt()).clamp(max=1)
        return {name: value * scale for name, value in gradients.items()}, context.memory


class Counts(Method):
    """Has a state only after the first round: how often the client has trained."""

    def finish(
        self, params: Tensors, context: Context, num_steps: int
    ) -> tuple[Tensors | None, Tensors]:
        sums, state = super().finish(params, context, num_steps)
        return sums, {"times": state.get("times", torch.zeros(1)) + 1}


class Warming(Method):
    """Pulls embeddings together, more in each step."""

    def prepare(self, broadcast: Broadcast) -> float:
        return 0.01 * broadcast.round

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        embeddings, logits = context.apply(params, batch.inputs)
        pull = batch.mean(embeddings.square().sum(1))
        weight: float = context.received * (context.step + 1)
        return batch.cross_entropy(logits) + weight * pull


# Losses that average over all rows of a batch, without its mask


class PlainCrossEntropy(Method):
    """Calls torch's cross-entropy."""

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        _, logits = context.apply(params, batch.inputs)
        loss: Tensor = cross_entropy(logits, batch.labels)
        return loss


class MeanNorm(Method):
    """Adds the mean norm of the embeddings, whose slope at a padding row of zeros is NaN."""

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        embeddings, logits = context.apply(params, batch.inputs)
        loss: Tensor = cross_entropy(logits, batch.labels) + 0.1 * embeddings.norm(dim=1).mean()
        return loss


class ClippedMeanNorm(MeanNorm, Clipped):
    """Changes the gradients too, so that it is stacked."""


# Losses that one sample in round 1 does not represent


class ProximalLater(Method):
    """Adds a proximal term from round 2 on."""

    def prepare(self, broadcast: Broadcast) -> bool:
        return broadcast.round > 1

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        loss = super().loss(params, batch, context)
        if not self.is_pulled(context):
            return loss
        distances = [(params[name] - context.start[name]).square().sum() for name in params]
        return loss + 0.05 * torch.stack(distances).sum()

    def is_pulled(self, context: Context) -> bool:
        pulled: bool = context.received
        return pulled


class ProximalAfterTheFirstStep(ProximalLater):
    """Adds a proximal term in all steps but the first, in which it is 0 anyway."""

    def is_pulled(self, context: Context) -> bool:
        return context.step > 0


class SideBySide(Method):
    """Sends two views through the model as one batch of twice the size."""

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        inputs = torch.cat([batch.inputs, 0.5 * batch.inputs])
        embeddings, logits = context.apply(params, inputs)
        size = len(batch.labels)
        agree = (embeddings[:size] - embeddings[size:]).square().mean(1)
        return batch.cross_entropy(logits[:size]) + batch.mean(agree)


class MeanInput(Method):
    """Trains only on the mean of a batch's inputs: one row for any batch size."""

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        weights = batch.mask / batch.mask.sum()
        _, logits = context.apply(params, (weights.to(batch.inputs) @ batch.inputs).unsqueeze(0))
        return batch.cross_entropy(logits.sum(0).expand(len(batch.labels), -1))


class NeedsTwo(Method):
    """Needs at least two samples, which every batch here has."""

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        embeddings, logits = context.apply(params, batch.inputs)
        spread = embeddings.topk(2, dim=0).values.diff(dim=0).square().mean()
        return batch.cross_entropy(logits) + 0.1 * spread


class Smooth(Method):
    """Penalizes the gradient of the logits by the inputs with `torch.func.grad`."""

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        def total(inputs: Tensor) -> tuple[Tensor, Tensor]:
            _, logits = context.apply(params, inputs)
            return logits.square().sum(), logits

        slopes, logits = torch.func.grad(total, has_aux=True)(batch.inputs)
        return batch.cross_entropy(logits) + 0.01 * batch.mean(slopes.square().sum(1))


class ViewLater(Method):
    """Uses the inputs unchanged in round 1, and a view of them from round 2 on."""

    def prepare(self, broadcast: Broadcast) -> bool:
        return broadcast.round > 1

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        inputs = 0.5 * batch.inputs if context.received else batch.inputs
        return batch.cross_entropy(context.apply(params, inputs)[1])


class ViewFirst(ViewLater):
    """Uses a view of the inputs in round 1 only."""

    def prepare(self, broadcast: Broadcast) -> bool:
        return broadcast.round == 1


class TwoViewsLater(TwoViews):
    """Uses one view in round 1, and two from round 2 on."""

    def prepare(self, broadcast: Broadcast) -> bool:
        return broadcast.round > 1

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        if context.received:
            return super().loss(params, batch, context)
        _, logits = context.apply(params, batch.inputs)
        return batch.cross_entropy(logits)
