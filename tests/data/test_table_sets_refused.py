"""Tables that are refused, and the sentence for each fault."""

import datetime
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars
import pytest

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.sample_index import open_data_set
from mpfedcl.experiment.settings import DatasetSettings
from table_files import open_table, save_table

REFUSED: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "no label": (
        "a,b\n1,2\n",
        {"label": None},
        "dataset.label is not set; tables need it, one of the columns of {path}: a",
    ),
    "misspelt": (
        "a,class\n1,2\n",
        {"label": "klass"},
        "dataset.label is 'klass'; it must be a column of {path} (did you mean class?).",
    ),
    "unknown": (
        "a,b\n1,2\n",
        {"label": "zzz"},
        "dataset.label is 'zzz'; it must be a column of {path} (a, b).",
    ),
    "client": (
        "a,y\n1,2\n",
        {"client": "who"},
        "dataset.client is 'who'; it must be a column of {path} (a, y).",
    ),
    "both": ("a,y\n1,2\n", {"client": "y"}, "dataset.client is 'y', and so is dataset.label"),
    "nobody's": ("a,y,who\n1,2,x\n1,2,\n", {"client": "who"}, "column 'who' is empty in row 2"),
    "path": ("a,y,who\n1,2,../x\n", {"client": "who"}, "has the domain '../x'"),
    "domain": ("a,y\n1,2\n", {"domains": ("x",)}, "dataset.domains has 'x'"),
    "long line": ("a,y\n1,2\n1,2,3\n", {}, "{path} has 3 cells in line 3 and 2 in its header"),
    "short line": ("a,b,y\n1,2,3\n1,2\n", {}, "{path} has 2 cells in line 3 and 3 in its header"),
    "twice": ("a,a,y\n1,2,3\n", {}, "{path} has two columns 'a'"),
    "nameless": ("a,,y\n1,2,3\n", {}, "{path} has the name '' in column 2 of its header"),
    "semicolons": ("a;y\n1;2\n", {}, "{path} has 1 columns; a table must have at least two"),
    "empty": ("", {}, "{path} has 0 columns"),
    "no rows": ("a,y\n", {}, "{path} has no rows"),
    "no features": ("who,y\n1,2\n", {"client": "who"}, "has no column but 'y'"),
    "infinite": (
        "a,y\n1,0\n-inf,1\n",
        {},
        "{path}: column 'a' has -inf in row 2; numbers must be finite",
    ),
    "too large": ("a,y\n1e39,0\n", {}, "{path}: column 'a' has 1e+39 in row 1"),
    "measured": (
        "a,y\n1,0\n1,2.5\n",
        {},
        "is 'y', a column with the number 2.5; it must be a class, and no measurement",
    ),
    "many": (
        "a,y\n" + "".join(f"1,{n}\n" for n in range(1001)),
        {},
        "a column of 1,001 different values; a label must have at most 1,000",
    ),
    "whole measurements": (
        "a,y\n" + "".join(f"1,{100 + n % 21}.0\n" for n in range(189)),
        {},
        "a column of 21 different numbers, 21 of them in under 10 rows; it must be a class",
    ),
    "free text": (
        "a,y\n" + "".join(f"w{n % 1001},0\n" for n in range(1002)),
        {},
        "column 'a' has 1,001 different words, more than 1,000",
    ),
    "names": (
        "a,y\n" + "".join(f"w{n},0\n" for n in range(21)),
        {},
        "column 'a' has another word in each row, as ids do",
    ),
    "ids": (
        "patientID,y,site\n" + "".join(f"{n % 30},0,{n // 30}\n" for n in range(90)),
        {"client": "site"},
        "column 'patientID' has another whole number in most rows, as ids do; columns must "
        "hold numbers, or words that repeat. --dataset.drop patientID leaves it out.",
    ),
    "row numbers": ("row_id,y\n" + "".join(f"{n},0\n" for n in range(40)), {}, "as ids do; colu"),
    "numbered visits": ("Visitid,y\n" + "".join(f"{n},0\n" for n in range(40)), {}, "as ids do;"),
    "dates": (
        "seen on,y\n2020-01-01,0\n,1\n2020-01-02 10:30,1\n",
        {},
        "column 'seen on' has dates, such as 2020-01-01; columns must hold numbers, or words that "
        "repeat. --dataset.drop 'seen on' leaves it out.",
    ),
    "local dates": ("day,y\n1.2.2020,0\n31/12/1999,1\n", {}, "has dates, such as 1.2.2020"),
    "sentences": (
        "said,y\n" + "".join(f"my card {n % 22} is lost,0\n" for n in range(80)),
        {},
        "column 'said' has sentences; columns must hold numbers, or words that repeat. "
        "--dataset.drop said leaves it out; `mpfedcl data encode {path} OUT --encoder "
        "sentence:PATH --text said --label y` makes features of sentences.",
    ),
    "several": (
        "day,n,name,y\n" + "".join(f"2020-01-{1 + n % 28:02},1,w{n},0\n" for n in range(30)),
        {},
        "{path}: column 'day' has dates, such as 2020-01-01, column 'name' has another word in "
        "each row, as ids do; columns must hold numbers, or words that repeat. --dataset.drop day "
        "name leaves them out.",
    ),
    "unknown column": (
        "a,bmi,y\n1,2,0\n",
        {"columns": ("a", "bni=x|y")},
        "dataset.columns is 'bni'; it must be a column of {path} (did you mean bmi?).",
    ),
    "column twice": (
        "a,y\n1,0\n",
        {"columns": ("a", "a=x")},
        "dataset.columns has 'a=x'; each column must be named once, and not the label.",
    ),
    "label as column": ("a,y\n1,0\n", {"columns": ("y",)}, "dataset.columns has 'y'; each column"),
    "word in a named column": (
        "a,y\n1,0\nx,1\n",
        {"columns": ("a",)},
        "column 'a' has 'x' in row 2; it must be a number",
    ),
    "drop": ("a,b,y\n1,2,0\n", {"drop": ("aa",)}, "dataset.drop is 'aa'; it must be a column of"),
    "drop label": (
        "a,y\n1,0\n",
        {"drop": ("y",)},
        "dataset.drop has 'y', the column of dataset.label",
    ),
    "drop all": ("a,y\n1,0\n", {"drop": ("a",)}, "has no column but 'y'"),
    "no labels": ("a,y\n1,\n2,NA\n", {}, "a column without a value"),
    "quote": ('a,y\n"1,2\n', {}, "{path} cannot be read (unexpected end of data)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_tables_give_a_one_line_error(tmp_path: Path, case: str) -> None:
    text, settings, complaint = REFUSED[case]
    path = save_table(tmp_path / "t.csv", text)
    with pytest.raises(InvalidInput) as caught:
        open_table(path, **settings)
    sentence = str(caught.value)
    assert complaint.format(path=path) in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


@pytest.mark.parametrize("name", ["fluid", "Acid", "thyroid", "COVID", "grid", "Lipid"])
def test_words_that_end_like_an_id_are_measurements(tmp_path: Path, name: str) -> None:
    rows = "".join(f"{n},{n % 2}\n" for n in range(60))
    found = open_table(save_table(tmp_path / "t.csv", f"{name},y\n{rows}"))
    assert found.class_names == ("0", "1")


@pytest.mark.parametrize("name", ["t.csv", "t.parquet", "t.xlsx"])
def test_file_that_is_not_a_table_is_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x89PNG\r\n\x1a\n\0\xff,\0")
    with pytest.raises(InvalidInput, match=r"cannot be read|is no table"):
        open_table(tmp_path / name)


def test_inconsistent_tables_and_settings_are_rejected(tmp_path: Path) -> None:
    def refusal(**settings: Any) -> str:
        with pytest.raises(InvalidInput) as caught:
            open_data_set(DatasetSettings(**settings))
        return str(caught.value)

    polars.DataFrame({"a": [1.0], "y": [0]}).write_parquet(tmp_path / "typed.parquet")
    save_table(tmp_path / "words.csv", "a,y\nx,0\n")
    root = {"name": "table", "root": tmp_path, "label": "y"}
    assert "column 'a' is text in" in refusal(**root)
    save_table(tmp_path / "words.csv", "b,y\n1,0\n")
    assert "lacks the column 'a'" in refusal(**root)
    save_table(tmp_path / "words.csv", "a,b,y\n1,1,0\n")
    assert "lacks the column 'b'" in refusal(**root)
    save_table(tmp_path / "typed.csv", "a,y\n1,0\n")
    assert "has two tables 'typed'" in refusal(**root)
    day = polars.DataFrame({"a": [datetime.date(2020, 1, 1)], "y": [0]})
    day.write_parquet(tmp_path / "day.parquet")
    assert "column 'a' holds Date" in refusal(**{**root, "root": tmp_path / "day.parquet"})
    assert "dataset.root is not set" in refusal(name="table", label="y")
    assert "does not exist" in refusal(**{**root, "root": tmp_path / "none.csv"})
    (tmp_path / "void").mkdir()
    assert "has no table" in refusal(**{**root, "root": tmp_path / "void"})
    assert "dataset.label is 'y'; it must be left out" in refusal(label="y")
    assert "dataset.client is 'y'; it must be left out" in refusal(client="y")
    assert "dataset.drop is ('y',); it must be left out" in refusal(drop=("y",))


def test_missing_polars_names_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(InvalidInput, match=r"pip install 'mpfedcl\[table\]'\.$"):
        open_table(save_table(tmp_path / "t.csv", "a,y\n1,0\n"))
