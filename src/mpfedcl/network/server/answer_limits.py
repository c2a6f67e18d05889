"""How large an honest answer can be: by what was asked for, with room to spare."""

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods import SharesPrototypes
from mpfedcl.network.message import MOST_BYTES
from mpfedcl.network.transport import AnswerLimit
from mpfedcl.rounds.assembly import Assembly

_SPARE = 3
"""Times what is expected: masked numbers take eight bytes where a model's take four."""
_ALLOWANCE = 2**24
"""Bytes beside, of headers and small things."""
_ARRAYS_BESIDE = 64
_TEXT = 2**22
_LONGEST_TEXT = 2**26
_COUNT = 16
"""Bytes of a count in a confusion matrix."""
_LABEL_AND_COUNT = 16
"""Bytes that a prototype has beside its vector."""


def limit_answer(assembly: Assembly, num_samples: int) -> AnswerLimit:
    """Return what a client with so many samples may send in a round."""
    method = assembly.method
    template = assembly.template
    expected = _num_bytes(template) + _num_bytes(assembly.sums)
    if isinstance(method, SharesPrototypes):
        itemsize = max(each.element_size() for each in assembly.initial.values())
        row = assembly.model.embedding_size * itemsize + _LABEL_AND_COUNT
        most = method.max_prototypes
        rows = num_samples if most is None else min(num_samples, most * method.num_classes)
        expected += rows * row
    names = len(template) + len(assembly.sums)
    return AnswerLimit(
        num_arrays=2 * names + _ARRAYS_BESIDE,
        array_bytes=min(MOST_BYTES, _SPARE * expected + _ALLOWANCE),
        text_bytes=min(_LONGEST_TEXT, _TEXT + _COUNT * method.num_classes**2),
    )


def _num_bytes(tensors: Tensors) -> int:
    return sum(each.numel() * each.element_size() for each in tensors.values())
