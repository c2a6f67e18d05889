"""What cannot be reported is told in one sentence."""

from pathlib import Path

import pytest
from report_documents import document_of

from handwritten_runs import write_json, write_run
from mpfedcl.core.errors import InvalidInput


def test_a_folder_with_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="must be a folder that holds a run"):
        document_of(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("rounds.jsonl", "", "holds no round"),
        ("rounds.jsonl", '{"round": 1}\n', "holds no round"),
        ("rounds.jsonl", "3\n", "holds no round"),
        ("experiment.toml", "rounds = 'x'", "rounds"),
        ("partition.json", "{", "partition.json is not valid JSON"),
        ("partition.json", '{"classes": ["a"], "clients": {"c": {"train": [1, 2], "test": 1}}}',
         "one number per class"),
        ("confusion.json", '{"round": 3, "predictor": "personal_prototype", "classes": ["a", "b"],'
         ' "clients": {"c": [[1, 2]]}}', "one row and one column per class"),
        ("confusion.json", '{"format": 1}', "format 1"),
        ("summary.json", "[]", "summary.json is not as mpfedcl writes it"),
        ("pool.safetensors", "not a pool", "pool.safetensors cannot be read"),
    ],
)  # fmt: skip
def test_damaged_files_are_told_in_one_sentence(
    tmp_path: Path, file: str, content: str, says: str
) -> None:
    path = write_run(tmp_path / "run")
    (path / file).write_text(content)
    with pytest.raises(InvalidInput, match=says) as refusal:
        document_of(path)
    assert "\n" not in str(refusal.value)


def test_comparison_that_names_a_run_twice_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "both"
    write_run(path / "a")
    content = {"rounds": 3, "seeds": [0], "methods": {"fedavg": {"runs": ["a", "a"]}}}
    write_json(path / "comparison.json", content)
    with pytest.raises(InvalidInput, match="names a run twice"):
        document_of(path)


@pytest.mark.parametrize("name", ["gone", "../outside", ""])
def test_a_comparison_must_have_the_runs_it_names(tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "outside")
    path = tmp_path / "both"
    path.mkdir()
    content = {"rounds": 3, "seeds": [0], "methods": {"fedavg": {"runs": [name]}}}
    write_json(path / "comparison.json", content)
    with pytest.raises(InvalidInput, match="names the run"):
        document_of(path)
