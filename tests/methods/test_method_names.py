"""What methods are called in tables, figures and reports."""

from pathlib import Path

import pytest

from mpfedcl import Method, run
from mpfedcl.methods import find_method, name_method, name_methods
from mpfedcl.report.run import RunRecords
from small_experiments import Say, flags, small


class Named(Method):
    name, summary = "my-method", "FedAvg by another name"


class Nameless(Method):
    summary = "FedAvg without a name"


class Impostor(Method):
    name = "fedavg"


class Inherits(Named):
    summary = "has the name of another class"


class Strange(Method):
    name = "a\nb"


class Twin(Method):
    name = "my-method"


HERE = __name__


@pytest.mark.parametrize(
    ("given", "called"),
    [
        ("fedavg", "fedavg"),
        (f"{HERE}:Named", "my-method"),
        (f"{HERE}:Nameless", "Nameless"),
        (f"{HERE}:Impostor", "Impostor"),
        (f"{HERE}:Inherits", "Inherits"),
        (f"{HERE}:Strange", "Strange"),
    ],
)
def test_display_name_is_the_name_of_the_class(given: str, called: str) -> None:
    assert name_method(given, find_method(given)) == called


def test_methods_with_the_same_name_are_listed_by_import_path() -> None:
    named, twin = f"{HERE}:Named", f"{HERE}:Twin"
    assert name_methods([named, "fedavg"]) == {named: "my-method", "fedavg": "fedavg"}
    assert name_methods([named, twin]) == {named: named, twin: twin}


@pytest.mark.whole
def test_run_card_and_report_use_the_display_name(images: Path, tmp_path: Path) -> None:
    result = run(small(images, f"{HERE}:Named", model__hidden=(4,)), tmp_path / "run")
    assert result.summary is not None
    told = result.summary["method"], result.summary["method_name"]
    assert told == (f"{HERE}:Named", "my-method")
    assert "# my-method on folder" in (tmp_path / "run" / "CARD.md").read_text()
    # A report runs nobody's code: it must have been written down, and was not before the end.
    assert RunRecords.read(tmp_path / "run").method_name == "my-method"
    (tmp_path / "run" / "summary.json").unlink()
    assert RunRecords.read(tmp_path / "run").method_name == "Named"


@pytest.mark.whole
@pytest.mark.usefixtures("elsewhere", "small_models")
def test_comparison_tables_use_the_display_name(images: Path, said: Say) -> None:
    words = ["--methods", f"{HERE}:Named", "fedavg", "--seeds", "0", "--jobs", "1"]
    code, out, _ = said("compare", *words, *flags(images), "--predictors", "all", "--out", "both")
    assert code == 0
    assert "my-method" in out
    assert HERE not in out
    table = Path("both/table.md").read_text()
    assert "| my-method |" in table
    assert HERE not in table
