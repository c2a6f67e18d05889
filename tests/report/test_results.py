"""Results in Python: what is loaded, its frames and figures, and what is refused."""

import csv
import io
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import polars
import pytest

import mpfedcl
from handwritten_runs import HOSTILE, accuracy_of, write_run, write_tuning
from mpfedcl import InvalidInput, LoadedComparison, LoadedRun, LoadedSearch, load
from mpfedcl.methods import PREDICTORS
from mpfedcl.report.results import LongTable

METHODS = ("mp-fedcl", "fedavg")
SEEDS = (0, 1)


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    folder = tmp_path / "comparison"
    for method in METHODS:
        for seed in SEEDS:
            write_run(folder / f"{method}-seed{seed}", method=method, seed=seed)
    return folder


def loaded_comparison(path: Path) -> LoadedComparison:
    found = load(path)
    assert isinstance(found, LoadedComparison)
    return found


# The names


def test_every_public_name_is_there_and_completes() -> None:
    assert {*mpfedcl.__all__} <= {*dir(mpfedcl)}
    assert all(hasattr(mpfedcl, name) for name in mpfedcl.__all__)
    assert not {"Any", "import_module"} & {*dir(mpfedcl)}
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        mpfedcl.lode  # noqa: B018


def test_the_import_is_light_and_knows_its_version() -> None:
    code = (
        "import sys, mpfedcl; names = dir(mpfedcl); version = mpfedcl.__version__; "
        "heavy = {'torch', 'numpy', 'matplotlib', 'pydantic'} & sys.modules.keys(); "
        "print(version, 'load' in names, 'compare' in names, sorted(heavy))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split()[1:] == ["True", "True", "[]"]
    assert said.stdout.split()[0] == mpfedcl.__version__


# Frames


def test_the_accuracies_of_a_run(tmp_path: Path) -> None:
    found = load(write_run(tmp_path / "run", rounds=3))
    assert isinstance(found, LoadedRun)
    columns = found.frame(library="columns")
    assert len(columns["accuracy"]) == 3 * 2 * len(PREDICTORS)
    by_key = dict(
        zip(
            zip(columns["round"], columns["test"], columns["predictor"], strict=True),
            columns["accuracy"],
            strict=True,
        )
    )
    for number in (1, 2, 3):
        mean = sum(accuracy_of(number, client) for client in range(3)) / 3
        for i, test in enumerate(("local_test", "global_test")):
            for j, predictor in enumerate(PREDICTORS):
                assert by_key[number, test, predictor] == pytest.approx(mean - 10 * i - j)
    judged = {
        r for r, is_judged in zip(columns["predictor"], columns["judged"], strict=True) if is_judged
    }
    assert judged == {"personal_prototype"}
    assert found.accuracy == by_key[3, "local_test", "personal_prototype"]
    assert found.accuracy_global == by_key[3, "global_test", "personal_prototype"]
    assert [record["round"] for record in found.history] == [1, 2, 3]


def test_clients_rounds_and_runs(comparison: Path) -> None:
    found = loaded_comparison(comparison)
    clients = found.frame("clients")
    assert isinstance(clients, polars.DataFrame)
    assert clients.height == len(METHODS) * len(SEEDS) * 3 * 3
    for row in clients.iter_rows(named=True):
        assert row["accuracy"] == accuracy_of(row["round"], int(row["client"][-1]))
    rounds = found.frame("rounds")
    assert rounds["seconds"].unique().to_list() == [0.75]
    assert rounds["virtual_seconds"].dtype == polars.Float64
    assert rounds["bytes_up"].sum() == len(METHODS) * len(SEEDS) * 3 * 1000
    runs = found.frame("runs")
    assert runs["method"].to_list() == ["fedavg", "fedavg", "mp-fedcl", "mp-fedcl"]
    assert runs["megabytes"].to_list() == pytest.approx([0.0045] * 4)
    assert runs["accuracy"].to_list() == [each.accuracy for each in found.runs]
    assert (found.methods, found.seeds) == (["fedavg", "mp-fedcl"], [0, 1])


def test_one_library_holds_what_another_does(comparison: Path) -> None:
    found = loaded_comparison(comparison)
    assert repr(found.long_tables).startswith("[accuracy, ")
    for name in found.long_tables:
        columns = found.frame(name, "columns")
        assert found.frame(name, "polars").to_dict(as_series=False) == columns
    assert isinstance(found.frame(), polars.DataFrame)


def test_pandas_where_it_is_installed(comparison: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = load(comparison).frame("rounds", "pandas")
    assert isinstance(frame, pandas.DataFrame)
    assert frame["virtual_seconds"].isna().all()
    assert frame["bytes_up"].sum() == 12_000


def test_without_either_library_there_are_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    table = LongTable({"name": str, "score": float}, [("a", 1.0), ("b", None)])
    monkeypatch.setattr("mpfedcl.report.results.find_spec", lambda _: None)
    assert table.frame() == {"name": ["a", "b"], "score": [1.0, None]}
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InvalidInput, match="library is 'pandas', which is not installed"):
        table.frame("pandas")
    with pytest.raises(InvalidInput, match="library is 'arrow'; it must be one of polars, pandas"):
        table.frame("arrow")  # type: ignore[arg-type]


def test_csv_is_read_back(comparison: Path) -> None:
    odd = LongTable({"name": str, "is": bool, "score": float}, [('a,"b"\nc', True, None)])
    assert list(csv.reader(io.StringIO(odd.csv()))) == [
        ["name", "is", "score"],
        ['a,"b"\nc', "true", ""],
    ]
    table = loaded_comparison(comparison).long_tables["accuracy"]()
    read = polars.read_csv(io.StringIO(table.csv()))
    assert read.equals(table.frame("polars"))


def test_a_search(tmp_path: Path) -> None:
    write_tuning(tmp_path / "tuning", "fedavg")
    found = load(tmp_path / "tuning")
    assert isinstance(found, LoadedSearch)
    scores = found.frame()
    assert scores.filter(polars.col("chosen"))["score"].to_list() == [44.0, 55.0, 66.0]
    assert scores.filter(trial=3)["score"].to_list() == [None]
    assert found.best["fedavg"].train.lr == 0.1
    (axes,) = found.plot().axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}  # type: ignore[arg-type]
    assert drawn["defaults"] == [40.0, 50.0, 60.0]
    assert drawn["chosen: train.lr 0.1, contrast.weight 3.0"] == [44.0, 55.0, 66.0]
    assert "66.0" in repr(found)


# Figures and tables


def test_the_figure_of_a_comparison(comparison: Path) -> None:
    found = loaded_comparison(comparison)
    axes, other = found.plot().axes
    assert other.get_title() == "global test set"
    means = [[sum(accuracy_of(n, c) for c in range(3)) / 3 - 1 for n in (1, 2, 3)]] * len(METHODS)
    assert [list(line.get_ydata()) for line in axes.lines][: len(METHODS)] == [  # type: ignore[arg-type]
        pytest.approx(each) for each in means
    ]
    assert axes.get_xlabel().startswith("round")
    assert found.plot("partition").axes[0].get_ylabel() == "client"
    assert sorted(comparison.iterdir()) == sorted(each.path for each in found.runs)


@pytest.mark.whole
@pytest.mark.usefixtures("rendered_figures")
def test_a_notebook_shows_a_figure_and_pyplot_is_left_alone(tmp_path: Path) -> None:
    figure = load(write_run(tmp_path / "run")).plot()
    assert figure._repr_png_().startswith(b"\x89PNG")
    figure.savefig(tmp_path / "figure.pdf")
    assert_fonts_of_a_journal((tmp_path / "figure.pdf").read_bytes())
    assert (
        "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    )


def assert_fonts_of_a_journal(pdf: bytes) -> None:
    """Hold a PDF to TrueType fonts that it contains."""
    assert b"/Type3" not in pdf
    assert pdf.count(b"/FontFile2") == pdf.count(b"/Type /FontDescriptor") > 0


class _Texts(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_tables_in_a_notebook(comparison: Path, tmp_path: Path) -> None:
    found = loaded_comparison(comparison)
    text, parser = repr(found), _Texts()
    parser.feed(found._repr_html_())
    mean = sum(accuracy_of(3, c) for c in range(3)) / 3 - 1
    for shown in (text.split(), parser.texts):
        assert any(each.endswith(f"{mean:.1f}(0.0)") for each in shown)
    assert "2 methods on mnist-sample, label skew Dir(0.05); seeds 0, 1" in text
    assert max(map(len, text.splitlines()[1:])) <= 100
    layout = {"div", "b", "p", "span", "small"}
    assert {*parser.tags} <= layout | {"table", "thead", "tbody", "tr", "th", "td"}
    hostile = load(write_run(tmp_path / HOSTILE[2], method="fedavg"))
    assert HOSTILE[2] in repr(hostile)
    assert HOSTILE[2] not in hostile._repr_html_()


# What is refused


@pytest.mark.parametrize(
    ("field", "value", "offered"),
    [
        ("table", "accuracies", "accuracy, clients, metrics, rounds, runs"),
        ("figure", "bars", "accuracy, partition"),
    ],
)
def test_names_that_are_not_offered(tmp_path: Path, field: str, value: str, offered: str) -> None:
    found = load(write_run(tmp_path / "run"))
    with pytest.raises(InvalidInput) as refusal:
        (found.frame if field == "table" else found.plot)(value)
    assert str(refusal.value) == f"{field} is {value!r}; it must be one of {offered}."


def test_what_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name, wanted in (
        ("nowhere", "there is none there"),
        ("file", "there is none there"),
        ("empty", "it must be a folder that holds a run, a comparison or a search"),
    ):
        with pytest.raises(InvalidInput, match=f"^path is '.*{name}'.*{wanted}"):
            load(tmp_path / name)


def test_a_run_that_has_not_ended(tmp_path: Path) -> None:
    path = write_run(tmp_path / "all" / "mp-fedcl-seed0", rounds=5, finished=False)
    with pytest.raises(InvalidInput, match=r"has not ended: .*--resume"):
        load(path)
    assert "not finished: round 5 of 5" in repr(load(path, unfinished=True))
    write_run(tmp_path / "all" / "mp-fedcl-seed1", rounds=2, seed=1)
    with pytest.raises(InvalidInput, match="has not ended: mp-fedcl-seed0"):
        load(tmp_path / "all")
    both = load(tmp_path / "all", unfinished=True)
    assert both.frame("runs")["finished"].to_list() == [False, True]
    both.plot()
    (path / "rounds.jsonl").write_text("")
    with pytest.raises(InvalidInput, match="holds no round"):
        load(path, unfinished=True)
    with pytest.raises(InvalidInput, match="has not ended: mp-fedcl-seed0"):
        load(tmp_path / "all")


def test_several_results_in_a_folder_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one")
    write_tuning(tmp_path / "runs" / "search", "fedavg")
    with pytest.raises(InvalidInput, match=r"holds several results .*load them one by one"):
        load(tmp_path / "runs")


def test_methods_of_different_settings_are_told_apart(tmp_path: Path) -> None:
    for name, lr in (("low", 0.01), ("high", 0.1)):
        write_run(tmp_path / "both" / name, train__lr=lr, partition__alpha=10 * lr)
    found = loaded_comparison(tmp_path / "both")
    assert found.methods == ["mp-fedcl (high)", "mp-fedcl (low)"]
    # Splits differ, so that nothing is paired.
    assert "differences" not in found.long_tables
