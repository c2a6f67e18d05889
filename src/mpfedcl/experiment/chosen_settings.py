"""Settings that a run chooses itself unless told: `auto` until it begins, a number on record."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from mpfedcl.experiment.setting_groups import CHOSEN_BY_A_RUN

if TYPE_CHECKING:
    from mpfedcl.experiment.experiment import Experiment


def _number_or_auto(most: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        """Say all that is allowed at once; a union would name its first kind alone."""
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        is_count = type(value) is int and 1 <= value <= most
        if value != "auto" and not is_count:
            allowed = f"a whole number from 1 to {most:,}, or auto"
            raise PydanticCustomError("chosen", "Input should be {allowed}", {"allowed": allowed})
        return value

    return check


def take_choices(asked: "Experiment", run: "Experiment") -> "Experiment":
    """Return an experiment with what it leaves to a run as that run has chosen it."""
    left_open = [n for n, value in CHOSEN_BY_A_RUN.items() if asked.setting(n) == value]
    return asked.replace(**{name: run.setting(name) for name in left_open})


Workers = Annotated[int | Literal["auto"], BeforeValidator(_number_or_auto(4096))]
EvaluateEvery = Annotated[int | Literal["auto"], BeforeValidator(_number_or_auto(10**9))]
