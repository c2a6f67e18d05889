"""Tables in LaTeX: read back by a strict reader that knows no more than the table needs."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_documents import cell_texts, document_of

from handwritten_runs import HOSTILE, write_run, write_tuning
from mpfedcl.report.export import escape_latex, latex_table, name_for_file
from small_experiments import Json, Say

PRINTED = {
    r"\textbackslash{}": "\\",
    r"\textasciitilde{}": "~",
    r"\textasciicircum{}": "^",
    r"\textless{}": "<",
    r"\textgreater{}": ">",
    r"\textbar{}": "|",
    r"\symbol{34}": '"',
    r"\dots{}": "…",
    r"$\approx$": "≈",
    r"$\pm$": "±",
    r"$\times$": "\N{MULTIPLICATION SIGN}",
    r"$\cdot$": "·",
    r"$\leq$": "≤",
    r"$\geq$": "≥",
    r"$\rightarrow$": "→",
    "$-$": "\N{MINUS SIGN}",
    "---": "—",
    "--": "\N{EN DASH}",
    "{[}": "[",
    "{*}": "*",
    "{}": "",
    **{f"\\{sign}": sign for sign in "&%$#_{}"},
}
"""What LaTeX prints for each command; everything else must stand for itself."""
TOKEN = re.compile("|".join(map(re.escape, PRINTED)) + r"|[^\\{}$&#^_%~]")


def printed(source: str) -> str:
    """Read text as LaTeX prints it; a sign that LaTeX would take for a command is an error."""
    place, found = 0, []
    while place < len(source):
        token = TOKEN.match(source, place)
        assert token, f"LaTeX stumbles over {source[place:]!r}"
        found.append(PRINTED.get(token[0], token[0]))
        place = token.end()
    return "".join(found)


def read_table(source: str) -> Json:
    """Read a table back: caption, sides, heads and cells; whatever else is there is an error."""
    body = "\n".join(line for line in source.splitlines() if not line.startswith("%"))
    whole = re.fullmatch(
        r"\\begin\{table\}\n  \\centering\n  \\caption\{(?P<caption>.*)\}\n"
        r"  \\label\{tab:[a-z0-9-]+\}\n  \\begin\{tabular\}\{(?P<sides>[lr]+)\}\n"
        r"    \\toprule\n(?P<head>.*)\\\\\n    \\midrule\n"
        r"(?P<rows>(?:.*\\\\\n)*)    \\bottomrule\n  \\end\{tabular\}\n"
        r"(?:  \\par\\medskip\n  \\parbox\{\\linewidth\}\{\\footnotesize (?P<notes>.*)\}\n)?"
        r"\\end\{table\}",
        body,
    )
    assert whole, body
    rows = [line.removesuffix(r"\\") for line in whole["rows"].splitlines()]
    cells = [[_cell(cell) for cell in re.split(r"(?<!\\)&", row)] for row in [whole["head"], *rows]]
    assert {len(row) for row in cells} == {len(whole["sides"])}
    return {
        "caption": printed(whole["caption"]),
        "sides": whole["sides"],
        "cells": cells,
        "notes": printed(whole["notes"] or ""),
    }


def _cell(source: str) -> str:
    text = source.strip()
    if bold := re.fullmatch(r"\\textbf\{(.*)\}", text):
        return f"<{printed(bold[1])}>"
    text = text.removeprefix(r"\footnotesize ")
    return printed(text.replace(r"$\approx$\,", r"$\approx$"))


@given(
    st.text(
        st.characters(exclude_categories=["C", "Z"]) | st.sampled_from("-'`,&\\{}[]* "), max_size=30
    )
)
def test_every_text_is_printed_as_it_stands(text: str) -> None:
    source = escape_latex(text)
    assert printed(source) == " ".join(text.split())
    assert not source.startswith(("[", "*"))
    assert not re.search(r"''|``|,,", source)
    if not {"\N{EN DASH}", "—"} & {*text}:
        assert "--" not in source


def test_what_is_nothing_to_print_is_left_out() -> None:
    assert escape_latex("a\x00b\u202ec\n d\ud800") == "abc d"


TABLE = {
    "caption": "Accuracy in %, a_b",
    "columns": ["method", "own, test"],
    "rows": [
        [{"text": "[mine]", "note": "50 % & more"}, {"text": "-2.5(0.1)", "mark": "best"}],
        [{"text": "*", "note": None}, {"text": "1,000.0", "mark": "within"}],
    ],
    "notes": ["▲ best mean; ≈ near it.", "*: the primary metric."],
}


def test_a_table_by_hand() -> None:
    found = read_table(latex_table(TABLE, label="t"))
    assert found["caption"] == "Accuracy in %, a_b."
    assert found["sides"] == "llr"
    assert found["cells"] == [
        ["method", "", "own, test"],
        ["[mine]", "50 % & more", "<\N{MINUS SIGN}2.5(0.1)>"],
        ["*", "", "≈1,000.0"],
    ]
    assert found["notes"] == "Bold: best mean; ≈ near it. Bold: the primary metric."


def test_letters_that_pdflatex_does_not_know_are_named() -> None:
    assert "lualatex" not in latex_table(TABLE, label="t")
    assert "lualatex" in latex_table(TABLE | {"caption": "класс"}, label="t")


def test_names_of_files() -> None:
    assert name_for_file("Who is left behind") == "who-is-left-behind"
    assert name_for_file("名前") == "table"


# All that a report can hold


def write_results(folder: Path, clients: Sequence[str] = HOSTILE) -> list[Path]:
    for method in ("mp-fedcl", "fedavg"):
        for seed in (0, 1):
            write_run(
                folder / "all" / f"{method}-{seed}", method=method, seed=seed, clients=clients
            )
    write_run(folder / "one", classes=HOSTILE)
    write_tuning(folder / "tuning", "fedavg")
    return [folder / name for name in ("all", "one", "tuning")]


@pytest.mark.whole
def test_the_command_writes_every_table(tmp_path: Path, said: Say) -> None:
    folders = write_results(tmp_path)
    code, out, err = said("report", *folders, "--latex")
    assert (code, err) == (0, "")
    document = document_of(*folders)
    for section in document["sections"]:
        folder = Path(section.get("folder", folders[0]))
        files = [path for path in folder.glob("*.tex")
                 if path.name.startswith("together-") == ("folder" not in section)]  # fmt: skip
        tables = [*section["tables"], *(each["table"] for each in section.get("searches", ()))]
        assert len(files) == len(tables)
        assert all(path.name in out for path in files)
        read = {found["caption"]: found for found in map(read_table, map(Path.read_text, files))}
        for table in tables:
            (found,) = [each for caption, each in read.items() if table["caption"] in caption]
            for row, wanted in zip(found["cells"][1:], cell_texts(table), strict=True):
                shown = [re.sub("[<>≈]", "", cell.replace("\N{MINUS SIGN}", "-")) for cell in row]
                assert {re.sub("[<>≈]", "", " ".join(each.split())) for each in wanted} <= {*shown}


@pytest.mark.whole
def test_the_caption_names_data_and_seeds(tmp_path: Path, said: Say) -> None:
    folder, *_ = write_results(tmp_path)
    said("report", folder, "--latex")
    found = read_table((folder / "accuracy-of-the-last-round.tex").read_text())
    assert "mean(std) over 2 seeds" in found["caption"]
    assert found["caption"].endswith(
        "mnist-sample, label skew Dir(0.05); 4 clients; 3 rounds; learning rate 0.01; seeds 0, 1."
    )
    label = re.search(r"\\label\{(.*)\}", (folder / "accuracy-of-the-last-round.tex").read_text())
    assert label is not None
    assert label[1] == "tab:all-accuracy-of-the-last-round"


@pytest.mark.whole
def test_caption_names_the_methods_of_each_learning_rate(tmp_path: Path, said: Say) -> None:
    for method, rate in {"mp-fedcl": 0.3, "fedavg": 0.1, "fedprox": 0.1}.items():
        write_run(tmp_path / "all" / method, method=method, train__lr=rate)
    said("report", tmp_path / "all", "--latex")
    found = read_table((tmp_path / "all" / "accuracy-of-the-last-round.tex").read_text())
    caption = found["caption"]
    assert "; 3 rounds; " in caption
    assert "learning rate 0.1 (fedavg, fedprox) and 0.3 (mp-fedcl);" in caption


@pytest.mark.whole
@pytest.mark.usefixtures("rendered_figures")
def test_csv_and_pdf(tmp_path: Path, said: Say) -> None:
    # No font has all letters.
    folders = write_results(tmp_path, clients=("north_1", "50 % $5", "été"))
    code, out, _ = said("report", folders[0], folders[2], "--csv", "--pdf")
    assert code == 0
    names = {
        folder.name: {path.name for path in folder.iterdir() if path.is_file()}
        for folder in folders
    }
    of_runs = {
        f"{name}.csv"
        for name in ("accuracy", "clients", "metrics", "rounds", "runs", "differences")
    }
    figures = ("accuracy", "differences", "clients", "costs", "partition")
    drawn = {f"{name}.pdf" for name in figures}
    assert names["all"] == of_runs | drawn | {"report.html"}
    assert names["tuning"] >= {"scores.csv", "scores.pdf"}
    assert f"in {folders[0]}: accuracy.csv" in out
    for path in (folders[0] / "accuracy.pdf", folders[2] / "scores.pdf"):
        pdf = path.read_bytes()
        assert pdf.startswith(b"%PDF")
        assert b"/Type3" not in pdf
        assert b"/FontFile2" in pdf
