"""Texts encoded into files of features: each row's vector, class, client and part."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from numpy.typing import NDArray

from command_results import Refused
from mpfedcl.data.sample_index import open_data_set
from mpfedcl.experiment.settings import DatasetSettings
from mpfedcl.models.encoders.sentence_encoder import SentenceEncoder
from sentence_folders import save_transformer, save_unloaded
from small_experiments import Say
from table_files import save_table

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("own_places")]

ROWS = """\
id,question,intent,bank,part
1,"book a flight, to rome",travel,north,train
2,play some jazz,music,north,train
3,what is my balance,money,north,test
4,book a flight,travel,south,train
5,,money,south,train
6,pay the bill,,south,train
7,play jazz,music,south,test
8,play a flight to some balance,music,south,test
"""
COLUMNS = ("--text", "question", "--label", "intent")


def read(path: Path) -> dict[str, NDArray[Any]]:
    with numpy.load(path, allow_pickle=False) as content:
        return dict(content)


def encode(say: Say, data: Path, out: Path, model: Path, *words: str) -> str:
    code, shown, err = say("data", "encode", data, out, "--encoder", f"sentence:{model}", *words)
    assert code == 0, err
    return shown


def test_rows_become_their_clients_labeled_vectors(tmp_path: Path, said: Say) -> None:
    save_transformer(tmp_path / "model", sentence_bert_config={"max_seq_length": 7})
    out = tmp_path / "out"
    columns = (*COLUMNS, "--client", "bank", "--split", "part")
    data = save_table(tmp_path / "rows.csv", ROWS)
    shown = encode(said, data, out, tmp_path / "model", *columns)
    for line in ("north.npz: 3 vectors", "south.npz: 4 vectors", f"--dataset.root {out}"):
        assert line in shown
    for notice in ("without a label, left out: 1", "empty texts: 1", "cut after 7 tokens: 2"):
        assert notice in shown
    encoder = SentenceEncoder(tmp_path / "model")
    wanted = {
        "north": (
            ["book a flight, to rome", "play some jazz"],
            [2, 1],
            ["what is my balance"],
            [0],
        ),
        "south": (["book a flight", ""], [2, 0], ["play jazz", "play a flight to some"], [1, 1]),
    }
    for client, (train, labels, test, test_labels) in wanted.items():
        found = read(out / f"{client}.npz")
        assert found.keys() == {"classes", "x_train", "y_train", "x_test", "y_test"}
        assert found["classes"].tolist() == ["money", "music", "travel"]
        assert (found["y_train"].tolist(), found["y_test"].tolist()) == (labels, test_labels)
        numpy.testing.assert_allclose(found["x_train"], encoder.encode(train), atol=1e-5)
        numpy.testing.assert_allclose(found["x_test"], encoder.encode(test), atol=1e-5)


def test_run_and_prediction_on_encoded_texts(tmp_path: Path, said: Say) -> None:
    """Each file of a folder is a client; files without labels are for predictions."""
    save_transformer(tmp_path / "model")
    texts = {"travel": "book a flight to rome", "music": "play some jazz"}
    lines = [f"{text} {word},{name}" for name, text in texts.items() for word in ("a", "to", "my")]
    for site in ("east", "west"):
        save_table(tmp_path / "rows" / f"{site}.csv", "\n".join(["question,intent", *lines * 2]))
    encode(said, tmp_path / "rows", tmp_path / "out", tmp_path / "model", *COLUMNS)
    words = ("--dataset.name", "folder", "--dataset.root", tmp_path / "out", "--method", "fedgauss")
    run = tmp_path / "run"
    assert said("run", *words, "--partition.kind", "feature", "--out", run)[0] == 0
    assert json.loads((run / "summary.json").read_text())["accuracy"] == 100.0
    new = save_table(
        tmp_path / "new.csv", "n,question\n1,play some jazz to\n2,book a flight to rome my\n"
    )
    shown = encode(said, new, tmp_path / "new", tmp_path / "model", "--text", "question")
    assert f"mpfedcl predict RUN {tmp_path / 'new'}" in shown
    assert read(tmp_path / "new" / "new.npz").keys() == {"x"}
    code, shown, _ = said("predict", run, tmp_path / "new" / "new.npz", "--json")
    assert code == 0
    assert [json.loads(line)["label"] for line in shown.splitlines()] == ["music", "travel"]


def test_json_list_equals_table_and_whole_numbers_are_ordered(tmp_path: Path, said: Say) -> None:
    polars = pytest.importorskip("polars", reason="polars is not installed (mpfedcl[table])")
    save_transformer(tmp_path / "model")
    rows = [["play some jazz", 10], ["pay the bill", 9], ["play jazz", 10], ["book a flight", -1]]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    # A missing label makes the others floats, as pandas writes them.
    frame = polars.DataFrame(
        {"t": [*(text for text, _ in rows), "a"], "y": [10.0, 9, 10, -1, None]}
    )
    frame.write_parquet(tmp_path / "rows.parquet")
    encode(said, tmp_path / "rows.json", tmp_path / "j", tmp_path / "model")
    columns = ("--text", "t", "--label", "y")
    encode(said, tmp_path / "rows.parquet", tmp_path / "p", tmp_path / "model", *columns)
    first, second = read(tmp_path / "j" / "rows.npz"), read(tmp_path / "p" / "rows.npz")
    assert first.keys() == second.keys() == {"classes", "x_train", "y_train"}
    assert all((first[key] == second[key]).all() for key in first)
    assert first["classes"].tolist() == ["-1", "9", "10"]
    assert first["y_train"].tolist() == [2, 1, 2, 0]
    opened = open_data_set(DatasetSettings(name="folder", root=tmp_path / "j"))
    assert opened.class_names == ("-1", "9", "10")


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("", "text is not set; it must name the column of the texts in"),
        ("--text query --label intent", "lacks the column 'query'; it has id, question, intent"),
        ("--text question --label question", "text is 'question', and so is label; they must be"),
        ("--text question --label intent --client part", "no row to train on"),
        ("--text question --label intent --client intent", "label is 'intent', and so is"),
        ("--text question --label id --client intent", "column 'intent' is empty in row 6"),
        ("--text question --label intent --split bank", "has 'north' in row 1; it must be train"),
        ("--text question --weights w.pth", "has its own; leave it out"),
        ("--text question --out other", "and OUT is "),
    ],
)
def test_columns_that_do_not_fit_are_refused(
    tmp_path: Path, refused: Refused, words: str, fault: str
) -> None:
    data = save_table(tmp_path / "rows.csv", ROWS)
    model = save_unloaded(tmp_path / "model")
    if "part" in words:
        words += " --split part"
        words = words.replace("--client part", "--client id")
    encoder = ("--encoder", f"sentence:{model}")
    assert fault in refused("data", "encode", data, tmp_path / "out", *encoder, *words.split())


@pytest.mark.parametrize(
    ("labels", "fault"),
    [
        ([0.5, 1], "the labels have the number 0.5; they must be text or whole numbers"),
        (["a", "b\n"], r"the labels have 'b\n'; each must be printable text"),
        (list(range(1001)), "the labels have 1,001 different values; there must be at most 1,000"),
        ([["a"], "b"], "has ['text', ['a']] as item 1; it must be a list of [text, label]"),
        (["a", {}], "has ['text', {}] as item 2; it must be"),
    ],
)
def test_labels_that_are_no_classes_are_refused(
    tmp_path: Path, refused: Refused, labels: list[Any], fault: str
) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([["text", label] for label in labels]))
    words = ("--encoder", f"sentence:{save_unloaded(tmp_path / 'model')}")
    assert fault in refused("data", "encode", tmp_path / "rows.json", tmp_path / "out", *words)


@pytest.mark.parametrize(
    "content",
    ["[", "3", "[]", '{"train": [["a", "b"]]}', '["ab"]', '[["a", "b", "c"]]', '[["a", null]]'],
)
def test_json_of_another_form_is_refused(tmp_path: Path, refused: Refused, content: str) -> None:
    (tmp_path / "rows.json").write_text(content)
    words = ("--encoder", f"sentence:{save_unloaded(tmp_path / 'model')}")
    sentence = refused("data", "encode", tmp_path / "rows.json", tmp_path / "out", *words)
    assert "rows.json" in sentence


def test_data_that_hold_no_texts_are_refused(tmp_path: Path, refused: Refused) -> None:
    encoder = ("--encoder", f"sentence:{save_unloaded(tmp_path / 'model')}")
    out = tmp_path / "out"
    (tmp_path / "images").mkdir()
    assert "or a folder of these" in refused("data", "encode", tmp_path / "no.csv", out, *encoder)
    assert "or a folder of these" in refused("data", "encode", tmp_path / "images", out, *encoder)
    data = save_table(tmp_path / "set" / "a.csv", ROWS)
    (tmp_path / "set" / "a.json").write_text('[["a", "b"]]')
    assert "two files 'a'" in refused("data", "encode", tmp_path / "set", out, *encoder, *COLUMNS)
    (tmp_path / "set" / "a.json").rename(tmp_path / "set" / "b.json")
    fault = "it must be left out, because"
    assert fault in refused("data", "encode", tmp_path / "set", out, *encoder, *COLUMNS)
    sentence = refused("data", "encode", tmp_path / "set", out, "--text", "question")
    assert "text is 'question', but encoder 'resnet18' takes images" in sentence
    sentence = refused("data", "encode", data, tmp_path, *encoder, *COLUMNS)
    assert "it must be a new or an empty folder" in sentence


def test_run_leads_from_sentence_encoder_to_encode(tmp_path: Path, refused: Refused) -> None:
    sentence = refused("run", "--encoder.name", "sentence:model", "--clients", "2")
    assert "mpfedcl data encode DATA OUT --encoder sentence:model --text COLUMN" in sentence
