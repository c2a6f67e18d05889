"""The model card: what it says is true, and whatever names are, it stays one page of Markdown."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from safetensors.torch import load_file

from mpfedcl import Experiment, resume, run
from mpfedcl.cli.main import parse
from mpfedcl.methods import PREDICTORS, find_method
from mpfedcl.report.wording import PREDICTOR_TITLES, percent, printable_name
from mpfedcl.runs.failure import describe_failure
from mpfedcl.runs.observer import Observer
from small_experiments import Warnings, read_summary, save_pictures, small

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("small_models")]

HOSTILE = (
    "</td></table><script>alert(1)</script>",
    "[click](javascript:alert(1))",
    "![x](http://evil.example/x.png) | more | cells |",
    "`code` **bold** _it_ ~~gone~~ $x$",
    "# title\n---\n```\n- item",
    "www.evil.example a@evil.example &lt;",
    "класс-名前-🦓\u202e",
)


class Card:
    """A card as a reader of Markdown sees it."""

    def __init__(self, path: Path) -> None:
        self.text = (path / "CARD.md").read_text(encoding="utf-8")
        _, front, self.body = re.split(r"^---$", self.text, maxsplit=2, flags=re.MULTILINE)
        self.front: dict[str, Any] = yaml.safe_load(front)
        self.tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(self.body)

    @property
    def headings(self) -> list[str]:
        return [text_of(self.tokens[i + 1]) for i in self._find("heading_open")]

    def table(self, number: int) -> list[list[str]]:
        """Return the cells of a table, titles included."""
        begin, end = self._find("table_open")[number], self._find("table_close")[number]
        rows: list[list[str]] = []
        for i in range(begin, end):
            if self.tokens[i].type == "tr_open":
                rows.append([])
            elif self.tokens[i].type in ("th_open", "td_open"):
                rows[-1].append(text_of(self.tokens[i + 1]))
        return rows

    def blocks(self, language: str) -> list[str]:
        return [
            each.content for each in self.tokens if each.type == "fence" and each.info == language
        ]

    def kinds(self) -> set[str]:
        """Return all that a reader makes of the text, within lines too."""
        inner = {child.type for each in self.tokens for child in each.children or []}
        return inner | {each.type for each in self.tokens}

    def _find(self, kind: str) -> list[int]:
        return [i for i, each in enumerate(self.tokens) if each.type == kind]


def text_of(token: Token) -> str:
    return "".join(child.content for child in token.children or [])


SECTIONS = [
    "Data",
    "Predictors",
    "Messages",
    "Privacy",
    "Use",
    "Reproduction",
]


def test_the_card_of_a_run_on_the_embedded_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpfedcl.models.mlp.HIDDEN_ON_PIXELS", (512, 512, 256))
    path = tmp_path / "run"
    run(Experiment(rounds=2, partition={"test": "matched"}), path)
    card, summary = Card(path), read_summary(path)
    assert card.headings == ["mp-fedcl on mnist-sample", *SECTIONS]
    # All predictors on both tests, and by which of them the method is judged on each.
    judged = {"local_test": "personal_prototype", "global_test": "global_prototype"}
    titles, *rows = card.table(0)
    assert titles == ["predictor", "local test set", "global test set"]
    assert [name for name, *_ in rows] == [PREDICTOR_TITLES[predictor] for predictor in PREDICTORS]
    for predictor, (_, *cells) in zip(PREDICTORS, rows, strict=True):
        for test, cell in zip(judged, cells, strict=True):
            star = "*" if predictor == judged[test] else ""
            assert cell == percent(summary["predictors"][test][predictor]) + star
    for accuracy, test in (("accuracy", "local_test"), ("accuracy_global", "global_test")):
        assert summary[accuracy] == summary["predictors"][test][judged[test]]
        assert f"**{percent(summary[accuracy])} %**" in card.text
    # Clients.
    accuracies = summary["accuracy_per_client"]
    middle = sum(accuracies.values()) / 5
    spread = math.sqrt(sum((value - middle) ** 2 for value in accuracies.values()) / 4)
    assert f"is {middle:.1f} % with a standard deviation of {spread:.1f} (ddof 1)." in card.text
    worst = min(accuracies, key=lambda name: accuracies[name])
    assert f"Worst client: {worst} with {accuracies[worst]:.1f} %." in card.text
    # What was shared, and what it may give away.
    assert "at most 798,474 parameters" in card.text
    assert f"{summary['prototype_floats_sent']:,} values of prototypes" in card.text
    assert f"{summary['bytes']['up'] / 1e6:.1f} MB to the server" in card.text
    counts = load_file(path / "pool.safetensors")["counts"]
    assert f"The pool has {len(counts)};" in card.text
    assert f"is the mean of {int(counts.min())} images." in card.text
    assert "no privacy guarantee" in card.text
    assert "CC BY-SA 3.0" in card.text
    assert all(f"{name} {each}" in card.text for name, each in summary["versions"].items())


def test_its_front_matter_is_what_model_hubs_read(tmp_path: Path) -> None:
    run(Experiment(rounds=1, method="fedavg"), tmp_path / "run")
    front, summary = Card(tmp_path / "run").front, read_summary(tmp_path / "run")
    assert front["library_name"] == "mpfedcl"
    assert front["pipeline_tag"] == "image-classification"
    assert front["datasets"] == ["mnist-sample"]
    assert "fedavg" in front["tags"]
    (model,) = front["model-index"]
    (result,) = model["results"]
    assert [metric["value"] for metric in result["metrics"]] == [
        pytest.approx(summary["predictors"][test]["global_classifier"], abs=1e-4)
        for test in ("local_test", "global_test")
    ]


def test_it_has_the_primary_metric_and_all_metrics(images: Path, tmp_path: Path) -> None:
    run(small(images, "fedavg", metric="macro_f1"), tmp_path / "run")
    card, summary = Card(tmp_path / "run"), read_summary(tmp_path / "run")
    tests = [summary["metrics"][test] for test in ("local_test", "global_test")]
    value = f"{tests[0]['macro_f1']:.1f}"
    assert f"Primary metric: **macro F1 {value} %** over the samples of all local" in card.text
    assert f"accuracy **{percent(summary['accuracy'])} %** on the local test sets" in card.text
    assert "evaluated clients the accuracy is" in card.text
    (result,) = card.front["model-index"][0]["results"]
    assert card.front["metrics"] == ["macro_f1", "accuracy"]
    assert [metric["value"] for metric in result["metrics"][:2]] == [
        pytest.approx(each["macro_f1"], abs=1e-4) for each in tests
    ]
    heads, *rows = card.table(1)
    # All clients share one test set.
    assert heads == ["metric", "test set"]
    assert tests[0] == tests[1]
    assert rows[0][0] == "accuracy in %"
    assert rows[2] == ["macro F1 in %", f"{value}*"]
    assert rows[4] == ["NLL", f"{tests[0]['nll']:.3f}"]


@pytest.mark.parametrize("method", ["mp-fedcl", "fedproto", "local", "fedavg"])
def test_its_commands_mean_the_run(method: str, tmp_path: Path) -> None:
    experiment = Experiment(method=method, rounds=1, seed=7, partition={"alpha": 0.5})
    result = run(experiment, tmp_path / "run")
    use, again = Card(tmp_path / "run").blocks("sh")
    found = parse(again.replace("RUN", str(tmp_path / "run")).split()[1:]).settings
    assert found.resolved(find_method(method).defaults) == result.experiment
    assert "mpfedcl predict RUN" in use
    # The Python runs as it stands, in the folder of the run.
    (python,) = Card(tmp_path / "run").blocks("python")
    names: dict[str, Any] = {}
    exec(python.replace("load_file('", f"load_file('{tmp_path}/run/"), names)
    assert ("averaged" in names) == (method in ("mp-fedcl", "fedavg"))
    assert ("pool" in names) == (method in ("mp-fedcl", "fedproto"))
    assert names["personal"]


@pytest.mark.parametrize(
    ("method", "said", "unsaid"),
    [
        ("mp-fedcl", ["Prototypes are means", "Parameters were sent", "a global model"], []),
        ("fedproto", ["Prototypes are means", "at most 0 parameters"], ["Parameters were sent"]),
        ("fedavg", ["Parameters were sent", "0 values of prototypes"], ["Prototypes are means"]),
        (
            "local",
            ["Nothing: each client trained alone."],
            ["Parameters were sent", "MB to the server"],
        ),
    ],
)
def test_it_says_what_a_method_shares(
    method: str, said: list[str], unsaid: list[str], images: Path, tmp_path: Path
) -> None:
    run(small(images, method), tmp_path / "run")
    card = Card(tmp_path / "run")
    assert [words for words in said if words not in card.text] == []
    assert [words for words in unsaid if words in card.text] == []
    assert len(card.table(0)) == 1 + len(PREDICTORS)


def test_sampled_clients_and_clients_that_were_not_read(images: Path, tmp_path: Path) -> None:
    experiment = small(images, clients=6, fraction=0.34, evaluate_clients=1, track=("mlflow",))
    run(experiment.replace(personal_models=False, partition__test="matched"), tmp_path / "run")
    card, summary = Card(tmp_path / "run"), read_summary(tmp_path / "run")
    read = {name: each for name, each in summary["accuracy_per_client"].items() if each is not None}
    assert f"Over the {len(read)} evaluated clients" in card.text
    assert "models/" not in card.text
    assert "--track" not in card.text


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    classes = [name.replace("/", "\N{FRACTION SLASH}") for name in HOSTILE]
    domains = [name for name in classes if name.isprintable()]
    root = save_pictures(tmp_path / "images", classes, domains)
    kind: dict[str, Any] = {
        "partition__kind": "feature",
        "clients": None,
        "partition__test": "matched",
    }
    warnings = Warnings()
    run(small(root, **kind, dataset__domains=tuple(domains)), tmp_path / "run", warnings.observer())
    assert warnings in ([], [describe_failure(tmp_path / "run")])
    card = Card(tmp_path / "run")
    assert card.headings == ["mp-fedcl on folder", *SECTIONS]
    assert {"html_block", "html_inline", "link_open", "image"} & card.kinds() == set()
    assert {"s_open", "code_block", "hr"} & card.kinds() == set()
    listed = next(text_of(each) for each in card.tokens if "7 classes: " in each.content)
    assert all(printable_name(name).strip() in listed for name in classes)


def test_it_gives_away_no_folder(images: Path, tmp_path: Path) -> None:
    secret = tmp_path / "home-of-somebody"
    experiment = small(images, track=("tensorboard",), track_to=secret / "tracks")
    run(experiment, secret / "runs" / "run")
    card = Card(secret / "runs" / "run")
    assert "home-of-somebody" not in card.text
    assert str(images) not in card.text


def test_a_method_of_ones_own_has_a_card(
    example_methods: None, images: Path, tmp_path: Path
) -> None:
    run(small(images, "custom_method:Scaffold"), tmp_path / "run")
    card = Card(tmp_path / "run")
    assert card.headings[0] == "my-scaffold on folder"
    assert card.blocks("sh")[-1] == "mpfedcl run RUN/experiment.toml\n"


def test_equal_runs_have_equal_cards_and_an_unfinished_one_has_none(
    images: Path, tmp_path: Path
) -> None:
    run(small(images, rounds=3), tmp_path / "whole")
    run(small(images, rounds=2), tmp_path / "cut")
    assert "2 rounds" in (tmp_path / "cut" / "CARD.md").read_text()
    resume(tmp_path / "cut", 3, Observer(should_stop=lambda: True))
    assert not (tmp_path / "cut" / "CARD.md").exists()
    resume(tmp_path / "cut")
    cards = [(tmp_path / name / "CARD.md").read_bytes() for name in ("whole", "cut")]
    assert cards[0] == cards[1]


def test_a_card_that_cannot_be_written_costs_no_run(images: Path, tmp_path: Path) -> None:
    path, warnings = tmp_path / "run", Warnings()

    def block(_: Any) -> None:
        (path / "CARD.md" / "in the way").mkdir(parents=True, exist_ok=True)

    result = run(small(images), path, Observer(on_round=block, on_warning=warnings.append))
    assert result.summary == read_summary(path)
    assert [each[:29] for each in warnings] == ["CARD.md could not be written "]
    assert list(path.glob(".CARD*")) == []
