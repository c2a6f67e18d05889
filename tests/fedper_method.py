"""A method that keeps a part of the model with each client, as a user would bring it."""

from mpfedcl.methods import Context, Method
from mpfedcl.tensors import Tensors


class FedPer(Method):
    """FedAvg for all but the classifier, which stays with each client."""

    name = "fedper"
    reading = "personal_classifier"
    steps: list[tuple[Tensors, Tensors]] = []  # noqa: RUF012  -- where each training began and ended

    def shared(self, parameter: str) -> bool:
        return not parameter.startswith("classifier")

    def finish(
        self, params: Tensors, context: Context, num_steps: int
    ) -> tuple[Tensors | None, Tensors]:
        self.steps.append((context.start, params))
        return super().finish(params, context, num_steps)
