"""Which methods a study runs: those it names, or all that fit its experiment."""

from collections.abc import Sequence

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.methods import built_in_methods
from mpfedcl.rounds.timing_checks import check_clock, check_timing

ALL = "all"
"""In the place of a method's name: every built-in method."""
_ANY_CLASSES = 2


def choose_methods(base: Experiment, named: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the methods of a study, and the reasons why others do not fit, where it names all.

    Methods named beside `all` come first, and must fit.
    """
    if ALL not in named:
        return list(named), {}
    chosen = [name for name in named if name != ALL]
    left_out: dict[str, str] = {}
    for name, method in built_in_methods().items():
        if name in chosen:
            continue
        try:
            experiment = base.replace(method=name).resolved(method.defaults)
            check_timing(method, experiment)
            check_clock(method, experiment)
            method(experiment, _ANY_CLASSES)
        except InvalidInput as refusal:
            left_out[name] = str(refusal)
        else:
            chosen.append(name)
    return chosen, left_out
