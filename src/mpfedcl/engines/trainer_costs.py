"""What each way to train a client costs, beyond the products that all of them need.

A client with n rows in t steps multiplies as much whichever way it goes. What else there is to do
differs: single operations, which take nearly as long for one client as for many side by side;
passes over the weights; and products of rows with rows. The constants are nanoseconds, fitted to
`benchmarks/choice.py` on one processor (docs/performance.md); only how they compare decides.
"""

from dataclasses import dataclass

from mpfedcl.core.tensors import Tensors
from mpfedcl.engines.hardware import largest_cache
from mpfedcl.methods import Method

PLAIN_LOSS, OWN_LOSS = 25, 57
"""Operations of a step with the classifier's loss alone, and with terms of a method's own."""
OPERATION = 15_300.0
"""An operation of a step on one client's linear layers, its derivative included."""
LOOP_OPERATION = 10_000.0
"""The same of a method that is more than linear layers, in the loop."""
OPERATION_OF_ALL, SHARE_OF_OPERATION = 26_900.0, 1_600.0
"""The same for clients side by side: once for all, and for each of them."""
ROUND_OF_ALL = 1_300_000.0
"""What is laid out side by side, once a round."""
NEAR, FAR = 0.07, 0.5
"""A byte of weights in a step, beside its velocity in the processor's cache or beyond it."""
STACKED, STACKED_AND_USED = 0.9, 1.5
"""The same side by side; and where a method uses weights beyond linear layers."""
STACK_MADE = 0.52
"""A byte of weights that are laid side by side, once a round."""
KEPT = 0.37
"""A byte of weights that are made and sent."""
ROWS = 0.035
"""A row with each row before it, for each unit of a layer."""
ROWS_SENT = 0.037
"""The same once more, where what is sent stays rows."""
PADDING = 0.0128
"""A row that fills the last step up, side by side, with each byte of the weights."""


@dataclass(frozen=True)
class Training:
    """A client's training in a round, as far as costs depend on it."""

    num_clients: int
    """Clients that can be trained side by side, this one included."""
    num_rows: int
    """Samples times epochs."""
    num_steps: int
    step_rows: int
    """Rows of a full step."""
    operations: int
    weight_bytes: int
    num_units: int
    """What goes into and comes out of all layers."""

    def with_layers(self) -> dict[str, float]:
        """Return nanoseconds by trainer, where weights are used in linear layers alone."""
        return {
            "direct": self._one_by_one(OPERATION),
            "factored": min(self._as_rows(), self._written_out()),
            "stacked": self._stacked(STACKED),
        }

    def with_anything(self) -> dict[str, float]:
        """Return the same for any other method."""
        return {
            "loop": self._one_by_one(LOOP_OPERATION),
            "stacked": self._stacked(STACKED_AND_USED),
        }

    @property
    def is_written_out(self) -> bool:
        """Whether rows become weights again before they are sent."""
        return self._written_out() < self._as_rows()

    def _one_by_one(self, operation: float) -> float:
        is_near = 2 * self.weight_bytes <= largest_cache()
        each_step = operation * self.operations + (NEAR if is_near else FAR) * self.weight_bytes
        return self.num_steps * each_step + KEPT * self.weight_bytes

    def _stacked(self, a_pass: float) -> float:
        passes = self.num_steps * a_pass + STACK_MADE + KEPT
        return self._side_by_side() + passes * self.weight_bytes

    def _as_rows(self) -> float:
        return self._side_by_side() + (ROWS + ROWS_SENT) * self._row_pairs

    def _written_out(self) -> float:
        return self._side_by_side() + ROWS * self._row_pairs + KEPT * self.weight_bytes

    def _side_by_side(self) -> float:
        operations = self.num_steps * self.operations
        of_all = OPERATION_OF_ALL * operations + ROUND_OF_ALL
        padding = PADDING * (self._filled_rows - self.num_rows) * self.weight_bytes
        return SHARE_OF_OPERATION * operations + of_all / self.num_clients + padding

    @property
    def _filled_rows(self) -> int:
        """Rows with the padding of each epoch's last step."""
        return self.num_steps * self.step_rows

    @property
    def _row_pairs(self) -> int:
        return self._filled_rows**2 * self.num_units


def describe_training(
    method: Method, start: Tensors, num_samples: int, num_clients: int
) -> Training:
    """Return what a client's costs depend on, among so many clients of its process."""
    train = method.experiment.train
    weights = [value for value in start.values() if value.dim() > 1]
    has_own_loss = any("loss" in vars(each) for each in type(method).__mro__ if each is not Method)
    has_own_loss = has_own_loss and method.experiment.contrast.weight > 0
    is_plain = method.plain_steps and not has_own_loss
    return Training(
        num_clients,
        train.epochs * num_samples,
        train.epochs * -(-num_samples // train.batch_size),
        min(num_samples, train.batch_size),
        PLAIN_LOSS if is_plain else OWN_LOSS,
        sum(value.numel() * value.element_size() for value in weights),
        sum(sum(value.shape) for value in weights),
    )
