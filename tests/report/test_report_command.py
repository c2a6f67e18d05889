"""`mpfedcl report`: from a folder to a file, or one sentence."""

import json
from pathlib import Path

import pytest
from report_documents import document_of

from handwritten_runs import write_run
from mpfedcl import run
from small_experiments import Say, flags, read_records, small

pytestmark = pytest.mark.whole


def test_a_real_run(images: Path, tmp_path: Path, said: Say) -> None:
    run(small(images), tmp_path / "run")
    code, out, err = said("report", tmp_path / "run")
    assert (code, err) == (0, "")
    assert out == f"report: {tmp_path / 'run' / 'report.html'}\n"
    assert "mp-fedcl on folder" in (tmp_path / "run" / "report.html").read_text()
    document = document_of(tmp_path / "run")
    records = read_records(tmp_path / "run")
    curves = document["sections"][0]["groups"][0]["curves"]["accuracy"]
    for test in ("local_test", "global_test"):
        for predictor, curve in curves[test].items():
            expected = [record["accuracy"][test][predictor] for record in records]
            assert curve["mean"] == pytest.approx(expected, abs=0.005)
    clients = {
        each["name"]: each["accuracy"] for each in document["sections"][0]["details"][0]["clients"]
    }
    assert clients == pytest.approx(records[-1]["accuracy_per_client"], abs=0.005)
    total = sum(record["bytes"]["up"] for record in records)
    assert document["sections"][0]["groups"][0]["bytes"]["up"] == total
    assert document["sections"][0]["details"][0]["map"]["count"]


def test_a_real_comparison(images: Path, tmp_path: Path, said: Say) -> None:
    words = ["--methods", "mp-fedcl", "local", "--seeds", "0", "1", *flags(images)]
    code, *_ = said("compare", *words, "--jobs", "1", "--out", tmp_path / "both")
    assert code == 0
    code, *_ = said("report", tmp_path / "both", "--out", tmp_path / "deep" / "page.html")
    assert code == 0
    assert (tmp_path / "deep" / "page.html").is_file()
    document = document_of(tmp_path / "both")
    content = json.loads((tmp_path / "both" / "comparison.json").read_text())
    headline = document["sections"][0]["tables"][0]
    for row in headline["rows"]:
        values = content["methods"][row[0]["text"]]["accuracy"]
        assert row[1]["text"].startswith(f"{sum(values) / 2:.1f}(")


def test_the_same_folder_gives_the_same_page(images: Path, tmp_path: Path, said: Say) -> None:
    run(small(images), tmp_path / "run")
    pages = []
    for name in ("one.html", "two.html"):
        assert said("report", tmp_path / "run", "--out", tmp_path / name)[0] == 0
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]


def test_nothing_to_report_is_one_sentence(tmp_path: Path, said: Say) -> None:
    code, out, err = said("report", tmp_path)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert str(tmp_path) in err
    assert not (tmp_path / "report.html").exists()


def test_a_folder_is_needed(said: Say) -> None:
    code, _, err = said("report")
    assert code == 2
    assert err.count("\n") == 1


def test_out_must_be_a_file(tmp_path: Path, said: Say) -> None:
    path = write_run(tmp_path / "run")
    code, _, err = said("report", path, "--out", tmp_path)
    assert code == 2
    assert "must be a file" in err


def test_help_is_fast_and_there(said: Say) -> None:
    code, out, _ = said("report", "--help")
    assert code == 0
    assert "--out" in out
