"""The command in a report gives the same experiment."""

import math
import shlex
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfedcl.cli.main import parse
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.datasets import SPECIFICATIONS
from mpfedcl.experiment.method_settings import built_in_sections
from mpfedcl.experiment.settings import Settings
from mpfedcl.methods import built_in_methods, find_method
from mpfedcl.report.reproduction import compare_command, file_command, run_command

pytestmark = pytest.mark.whole

PARTITIONS = ("label", "feature", "iid", "classes", "quantity")
ODD_TEXTS = ("", "-", "--rounds", "-1", "None", "a\nb", "\0", "\x1b[1m", "\udcff")
ONNX_ALONE = ("output", "tokens", "mean", "deviation", "image_size")
UNUSUAL = (
    "model__name",
    "model__norm",
    "prototypes__per_class",
    "workers",
    "evaluate_every",
    *(f"encoder__{name}" for name in ONNX_ALONE),
)
"""Settings whose values depend on others, or are of two kinds."""
quick = settings(max_examples=25, deadline=None)


def values_of(annotation: Any, limits: Any, texts: st.SearchStrategy[str]) -> Any:
    """Return what a setting may be; None, which is the default, is left out."""
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if NoneType in get_args(annotation):
        (annotation,) = (each for each in get_args(annotation) if each is not NoneType)
        return values_of(annotation, limits, texts)
    if get_origin(annotation) is Annotated:
        annotation, field = get_args(annotation)
        return values_of(annotation, field.metadata, texts)
    if annotation is str:
        return texts
    if annotation is Path:
        return texts.map(Path)
    if get_origin(annotation) is tuple:
        return st.lists(values_of(get_args(annotation)[0], (), texts), max_size=3).map(tuple)
    if get_origin(annotation) is dict:
        return st.dictionaries(texts, texts, max_size=2)
    limited: Any = Annotated[annotation, *limits] if limits else annotation
    # A minus would be a flag: zero has none here.
    return (
        st.from_type(limited).filter(math.isfinite).map(abs if annotation is float else annotation)
    )


def all_settings(kind: type[Settings], texts: st.SearchStrategy[str], prefix: str = "") -> Any:
    found: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            found |= all_settings(field.annotation, texts, f"{name}__")
        elif prefix + name not in UNUSUAL:
            limits = [each for each in field.metadata if "annotated_types" in type(each).__module__]
            found[prefix + name] = values_of(field.annotation, limits, texts)
    return found


def experiments(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Experiment]:
    """Return whole experiments in which up to eight settings are not the defaults."""
    values = all_settings(Experiment, texts)
    for section, kind in built_in_sections().items():
        values |= all_settings(kind, texts, f"{section}__")
    for name in ("prototypes__per_class", "workers", "evaluate_every"):
        values[name] = st.integers(1, 100) | st.just("auto")
    stated = st.builds("client {}:{}".format, st.integers(0, 9), st.integers(1, 10**11))
    values["validation__sizes"] = st.lists(stated, max_size=2).map(tuple)
    first = {
        "method": st.sampled_from(list(built_in_methods())),
        "dataset__name": st.sampled_from(list(SPECIFICATIONS)),
        "partition__kind": st.sampled_from(PARTITIONS),
    }
    names = st.lists(
        st.sampled_from([each for each in values if each not in first]), max_size=8, unique=True
    )
    chosen = names.flatmap(lambda some: st.fixed_dictionaries(first | {n: values[n] for n in some}))
    return chosen.map(lambda changes: resolved(Experiment().replace(**changes)))


plain_texts = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Zs")), min_size=1)
plain_texts = plain_texts.filter(
    lambda text: text.isprintable() and not text.startswith("-") and text != "None"
)
any_texts = plain_texts | st.sampled_from(ODD_TEXTS) | st.text()


def resolved(experiment: Experiment) -> Experiment:
    return experiment.resolved(find_method(experiment.method).defaults)


def parsed(command: str) -> Any:
    words = shlex.split(command)
    assert words[0] == "mpfedcl"
    return parse(words[1:])


@quick
@given(experiments(plain_texts))
def test_the_command_gives_the_experiment(experiment: Experiment) -> None:
    command = run_command(experiment)
    assert command is not None
    assert resolved(parsed(command).settings) == experiment


@quick
@given(experiments(any_texts))
def test_no_text_gives_another_experiment(experiment: Experiment) -> None:
    command = run_command(experiment)
    assert command is None or resolved(parsed(command).settings) == experiment


@settings(max_examples=10, deadline=None)
@given(
    experiments(plain_texts),
    st.lists(st.sampled_from([*built_in_methods()]), min_size=1, max_size=3, unique=True),
    st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=3, unique=True),
)
def test_the_command_gives_the_comparison(
    base: Experiment, methods: list[str], seeds: list[int]
) -> None:
    runs = [resolved(base.replace(method=each, seed=seed)) for each in methods for seed in seeds]
    command = compare_command(runs)
    assert command is not None
    found = parsed(command)
    assert runs == [
        resolved(found.settings.replace(method=each, seed=seed))
        for each in found.methods
        for seed in found.seeds
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"dataset__name": "mnist", "dataset__train_size": None},
        {"dataset__name": "office10", "encoder__name": None},
        {"device": "-1"},
        {"encoder__weights": Path("None")},
        {"options": {"": "\0"}},
        {"method": "somebody.elses:Method"},
        {"dataset__name": "nowhere"},
    ],
)
def test_what_flags_cannot_say_has_no_command(changes: dict[str, Any]) -> None:
    assert run_command(resolved(Experiment()).replace(**changes)) is None


def test_defaults_need_no_flags() -> None:
    assert run_command(resolved(Experiment())) == "mpfedcl run"


def test_what_follows_from_other_settings_is_not_said() -> None:
    # FedProc's schedule follows from the rounds, padding from the number of prototypes.
    schedule = resolved(Experiment(method="fedproc", rounds=9))
    assert run_command(schedule) == "mpfedcl run --method fedproc --rounds 9"
    padded = resolved(Experiment(rounds=9).replace(prototypes__per_class="auto"))
    assert run_command(padded) == "mpfedcl run --rounds 9 --prototypes.per-class auto"
    unlike = padded.replace(prototypes__padding="all")
    assert run_command(unlike) == f"{run_command(padded)} --prototypes.padding all"


def test_a_comparison_needs_one_command() -> None:
    runs = [
        resolved(Experiment(method=method, seed=seed, rounds=9))
        for method in ("dp-fedcl", "local")
        for seed in (4, 5)
    ]
    command = compare_command(runs)
    assert command == "mpfedcl compare --methods dp-fedcl local --seeds 4 5 --rounds 9"
    assert compare_command([runs[0], runs[0], runs[3], runs[3]]) is None


def test_runs_that_differ_in_more_have_no_common_command() -> None:
    one = resolved(Experiment(method="local"))
    other = resolved(Experiment(method="fedavg", rounds=3))
    assert compare_command([one, other]) is None
    assert compare_command([]) is None


def test_a_path_is_quoted() -> None:
    assert file_command(Path("my runs")) == "mpfedcl run 'my runs/experiment.toml'"
