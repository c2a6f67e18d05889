"""Methods with sums, private state and withheld updates."""

import torch
from torch import Tensor

from mpfedcl.methods import CollectsStatistics, Context, Method, Server, Tally, Tensors, Update


class ClassSums(CollectsStatistics):
    """Does not train: clients only send the sums of their samples by class."""

    name = "class-sums"
    trains = False
    shares_model = False

    def init_server(self, params: Tensors) -> Server:
        return Server(params, private={"rounds": torch.zeros(1)})

    def collect(self, inputs: Tensor, labels: Tensor) -> Tensors:
        chosen = torch.nn.functional.one_hot(labels, self.num_classes).to(torch.float64)
        return {"counts": chosen.sum(0), "sums": chosen.T @ inputs.double()}

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        assert means == {}
        extra = {name: value.clone() for name, value in tally.sums.items()}
        extra["clients"] = torch.tensor([float(len(tally.names)), tally.share])
        return Server(server.params, extra, {"rounds": server.private["rounds"] + 1})


class Closed(ClassSums):
    """Like `ClassSums`, with a shared classifier that the server makes of the sums."""

    name = "closed"
    shares_model = True

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        bias = tally.sums["counts"].to(server.params["classifier.bias"])
        return Server({**server.params, "classifier.bias": bias}, {}, server.private)


class Withholds(Method):
    """Withholds models of few samples and weights the others by their squared sample counts."""

    name = "withholds"
    may_withhold = True

    def finish(
        self, params: Tensors, context: Context, num_steps: int
    ) -> tuple[Tensors | None, Tensors]:
        sent, state = super().finish(params, context, num_steps)
        return (None if num_steps < 2 else sent), state

    def weigh(self, update: Update, server: Server) -> float:
        return float(update.num_samples) ** 2
