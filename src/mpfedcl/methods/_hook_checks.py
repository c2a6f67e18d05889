"""Checks of the hooks of a user's method: their names when it is loaded, their results in a run."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from numbers import Real
from typing import Any

from torch import Tensor

from mpfedcl.core.errors import InvalidInput, enumerate_names
from mpfedcl.methods.base import LocalTraining, Method, Server

_PACKAGE, _INTERFACE = "mpfedcl.", ("mpfedcl.methods.base", "mpfedcl.methods._")
_LIKENESS = 0.8
_MOST_NAMES = 2


def check_hook_names(method: type[Method]) -> None:
    """Reject a method of a class whose name is nearly that of a hook, which is never called."""
    known = {name for base in method.__mro__ if _is_ours(base) for name in vars(base)}
    hooks = {
        name.replace("_", ""): name
        for base in method.__mro__
        if base.__module__.startswith(_INTERFACE)
        for name, value in vars(base).items()
        if not name.startswith("_") and callable(value)
    }
    for base in method.__mro__:
        own = () if _is_ours(base) else vars(base).items()
        for name, value in own:
            if name.startswith("_") or name in known or not callable(value):
                continue
            if close := get_close_matches(name.replace("_", "").lower(), hooks, 1, _LIKENESS):
                raise InvalidInput(
                    f"method is {_name(method)!r}, whose {name} is not a hook; did you mean "
                    f"{hooks[close[0]]}? The name of a function of your own must begin with _."
                )


def check_hook_results(method: Method) -> None:
    """Let each hook that a user's class overrides raise if it returns something else."""
    for hook, (is_right, wanted) in _RESULTS.items():
        owner = next(base for base in type(method).__mro__ if hook in vars(base))
        if not _is_ours(owner):
            setattr(method, hook, _checked(method, hook, is_right, wanted))


def _checked(
    method: Method, hook: str, is_right: Callable[..., bool], wanted: str
) -> Callable[..., Any]:
    function = getattr(method, hook)

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        found = function(*arguments, **keywords)
        if not is_right(found, *arguments):
            raise InvalidInput(
                f"method is {_name(type(method))!r}, whose {hook} returned {_describe(found)}; it "
                f"must return {wanted}."
            )
        return found

    return call


def _is_ours(base: type) -> bool:
    return base is object or base.__module__.startswith(_PACKAGE)


def _name(method: type[Method]) -> str:
    return f"{method.__module__}:{method.__qualname__}"


def _describe(value: Any) -> str:
    """Return what a hook returned, in a few words."""
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple ({', '.join(_describe(each) for each in value)})"
    if isinstance(value, Mapping):
        for name, each in value.items():
            if not isinstance(each, Tensor):
                return f"a dictionary in which {name} is {_describe(each)}"
        names = enumerate_names([str(each) for each in value], _MOST_NAMES)
        return f"a dictionary of {names}" if names else "an empty dictionary"
    if isinstance(value, Server):
        parts = {name: getattr(value, name) for name in ("private", "extra", "params")}
        wrong = next((each for each in parts if not _is_tensors(parts[each])), "params")
        return f"a Server whose {wrong} is {_describe(parts[wrong])}"
    return f"a value of type {type(value).__name__}"


# What each hook must return, given the result and the arguments


def _is_tensors(found: Any, *_: Any) -> bool:
    return isinstance(found, Mapping) and all(isinstance(v, Tensor) for v in found.values())


def _is_pair(found: Any, *_: Any) -> bool:
    return isinstance(found, tuple) and len(found) == 2 and all(map(_is_tensors, found))


def _is_begun(found: Any, context: Any) -> bool:
    return _is_pair(found) and found[0].keys() == context.start.keys()


def _is_changed(found: Any, given: Any, *_: Any) -> bool:
    return _is_pair(found) and found[0].keys() == given.keys()


def _is_finished(found: Any, *_: Any) -> bool:
    is_withheld = isinstance(found, tuple) and found[:1] == (None,)
    return _is_pair(({}, *found[1:]) if is_withheld else found)


def _is_scalar(found: Any, *_: Any) -> bool:
    return isinstance(found, Tensor) and found.dim() == 0 and found.is_floating_point()


def _is_server(found: Any, *_: Any) -> bool:
    parts = (found.params, found.extra, found.private) if isinstance(found, Server) else (None,)
    return all(map(_is_tensors, parts))


def _is_next_server(found: Any, server: Server, *_: Any) -> bool:
    return _is_server(found) and found.params.keys() == server.params.keys()


def _is_number(found: Any, *_: Any) -> bool:
    return isinstance(found, Real) or (isinstance(found, Tensor) and found.dim() == 0)


_TENSORS = "a dictionary of tensors"
_RESULTS: dict[str, tuple[Callable[..., bool], str]] = {
    "init_server": (_is_server, "a Server of dictionaries of tensors"),
    "init_client": (_is_tensors, _TENSORS),
    "describe": (_is_tensors, _TENSORS),
    "shared": (lambda found, *_: isinstance(found, bool), "True or False"),
    "local_training": (lambda found, *_: isinstance(found, LocalTraining), "a LocalTraining"),
    "begin": (_is_begun, "two dictionaries of tensors: all parameters, and the memory"),
    "loss": (_is_scalar, "the loss of the batch, a tensor []"),
    "adjust": (_is_changed, "two dictionaries of tensors: all gradients, and the memory"),
    "after_step": (_is_changed, "two dictionaries of tensors: all parameters, and the memory"),
    "finish": (
        _is_finished,
        "two dictionaries of tensors: what the server averages (or None), and the client's state",
    ),
    "weigh": (_is_number, "a number"),
    "reduce": (_is_next_server, "a Server with all parameters"),
    "remarks": (lambda found, *_: isinstance(found, dict), "a dictionary"),
}
