"""Hooks with a wrong name or a wrong result: one sentence, before or in the first round."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mpfedcl import InvalidInput, run
from mpfedcl.methods import (
    Method,
    SharesPrototypes,
    built_in_methods,
    check_hook_names,
    check_method,
    find_method,
)
from small_experiments import small


class Adjusts(Method):
    name, summary = "adjusts", "a hook with a wrong name"

    def adjusts(self, gradients: Any, params: Any, context: Any) -> Any:
        return gradients, {}


class SharesPrototypesToo(SharesPrototypes):
    name, summary = "shares", "a hook of a capability with a wrong name"

    @staticmethod
    def summarise(*_: Any) -> None: ...


class Helpers(Method):
    """Names of its own that are no hooks."""

    name, summary, rate = "helpers", "FedAvg with functions of its own", 0.1

    def distance(self) -> float:
        return 0.0

    def _adjusts(self) -> None: ...

    loss_weight = 2.0


def test_misspelled_hook_is_refused_when_the_class_is_loaded() -> None:
    sentence = r"whose adjusts is not a hook; did you mean adjust\? The name of a function"
    with pytest.raises(InvalidInput, match=rf"^method is 'test_hook_checks:Adjusts', {sentence}"):
        find_method("test_hook_checks:Adjusts")
    with pytest.raises(InvalidInput, match=f"the check 'identity': .*{sentence}"):
        check_method(Adjusts)
    with pytest.raises(InvalidInput, match=r"whose summarise is not a hook; did you mean summar"):
        check_hook_names(SharesPrototypesToo)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("init_sever", "init_server"),
        ("afterstep", "after_step"),
        ("Loss", "loss"),
        ("losss", "loss"),
        ("finished", "finish"),
        ("weight", "weigh"),
        ("reduces", "reduce"),
    ],
)
def test_close_names_of_hooks_are_found(given: str, meant: str) -> None:
    with pytest.raises(InvalidInput, match=rf"whose {given} is not a hook; did you mean {meant}\?"):
        check_hook_names(type("Mine", (Method,), {given: print, "__module__": "mine"}))


def test_helpers_with_other_names_are_accepted() -> None:
    check_hook_names(Helpers)


@pytest.mark.parametrize("name", sorted(built_in_methods()))
def test_functions_of_built_in_methods_are_no_misspelled_hooks(name: str) -> None:
    """Held to the rule as if they were a user's."""
    built_in = built_in_methods()[name]
    own = {each: value for each, value in vars(built_in).items() if not each.startswith("__")}
    check_hook_names(type("Mine", built_in.__bases__, {**own, "__module__": "mine"}))


def returns(hook: str, value: Any) -> type[Method]:
    """Return a method of which a hook returns this value, as a class of this module."""
    cls = type(
        f"Wrong{len(WRONG)}",
        (Method,),
        {
            "name": "wrong",
            "summary": "a wrong result",
            "__module__": __name__,
            hook: lambda *given: value(*given[1:]) if callable(value) else value,
        },
    )
    globals()[cls.__name__] = cls
    return cls


RESULTS: list[tuple[str, Any, str]] = [
    ("reduce", lambda *given: given[1], "reduce returned a dictionary of hidden.0.weight, hid"),
    ("reduce", None, "reduce returned None; it must return a Server with all parameters."),
    ("finish", lambda params, *_: params, "finish returned a dictionary of hidden.0"),
    ("finish", lambda params, *_: (params,), "finish returned a tuple (a dictionary of hidde"),
    ("loss", 1.0, "loss returned a value of type float; it must return the loss of the batch"),
    ("loss", lambda params, *_: params["classifier.bias"], "loss returned a tensor [3]; it must"),
    ("begin", lambda context: context.start, "begin returned a dictionary of hidden.0"),
    ("begin", lambda *_: ({}, {}), "begin returned a tuple (an empty dictionary, an empty"),
    ("adjust", lambda gradients, *_: gradients, "adjust returned a dictionary of"),
    ("after_step", None, "after_step returned None; it must return two dictionaries of tensors"),
    ("init_server", lambda params: params, "init_server returned a dictionary of"),
    ("init_client", {"a": 1}, "init_client returned a dictionary in which a is a value of type"),
    ("init_client", None, "init_client returned None; it must return a dictionary of tensors."),
    ("describe", torch.ones(3), "describe returned a tensor [3]; it must return a dictionary"),
    ("shared", None, "shared returned None; it must return True or False."),
    ("weigh", "much", "weigh returned a value of type str; it must return a number."),
    ("remarks", None, "remarks returned None; it must return a dictionary."),
    ("local_training", None, "local_training returned None; it must return a LocalTraining."),
]
WRONG: list[tuple[type[Method], str]] = []
for _hook, _value, _sentence in RESULTS:
    WRONG.append((returns(_hook, _value), _sentence))


@pytest.mark.whole
@pytest.mark.parametrize("engine", ["loop", "auto"])
@pytest.mark.parametrize(
    ("method", "sentence"), WRONG, ids=[sentence.partition(";")[0] for _, sentence in WRONG]
)
def test_wrong_result_of_a_hook_is_refused_in_one_sentence(
    images: Path, tmp_path: Path, method: type[Method], sentence: str, engine: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        run(small(images, rounds=1, engine=engine).replace(method=method), tmp_path / "run")
    told = str(refused.value)
    assert told.startswith(f"method is 'test_hook_checks:{method.__name__}', whose {sentence}")
    assert "; it must return " in told
    assert told.endswith(".")
    assert "\n" not in told


def test_checked_hooks_return_what_the_class_returns(images: Path, tmp_path: Path) -> None:
    class_run = run(small(images, method="test_hook_checks:Plain"), tmp_path / "mine")
    built_in = run(small(images, method="fedavg"), tmp_path / "fedavg")
    assert class_run.accuracy == built_in.accuracy
    assert class_run.history[-1]["loss"] == pytest.approx(built_in.history[-1]["loss"])


class Plain(Method):
    """FedAvg whose hooks are all overridden."""

    name, summary = "plain", "FedAvg again"

    def loss(self, params: Any, batch: Any, context: Any) -> Tensor:
        return super().loss(params, batch, context)

    def finish(self, params: Any, context: Any, num_steps: int) -> Any:
        return super().finish(params, context, num_steps)

    def reduce(self, server: Any, means: Any, tally: Any) -> Any:
        return super().reduce(server, means, tally)
