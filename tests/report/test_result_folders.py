"""What the folders given to a report hold."""

from pathlib import Path

import pytest

from handwritten_runs import write_run, write_tuning
from mpfedcl.core.errors import InvalidInput
from mpfedcl.report.document import build_document
from mpfedcl.report.result_folders import find_result_folders


def kinds(*folders: Path) -> list[tuple[str, str]]:
    return [(source.kind, source.path.name) for source in find_result_folders(folders)]


def test_a_result_given_twice_is_shown_once(tmp_path: Path) -> None:
    for method in ("fedavg", "local"):
        write_tuning(tmp_path / "tuning" / method, method)
    assert kinds(tmp_path / "tuning", tmp_path / "tuning") == [("tuning", "tuning")]
    document = build_document(find_result_folders([tmp_path / "tuning"]))
    assert len(document["sections"][0]["searches"]) == 2


def test_runs_without_a_round_are_left_out_and_named(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / f"fedavg-seed{seed}", method="fedavg", seed=seed)
    (tmp_path / "fedavg-seed1" / "rounds.jsonl").unlink()
    (tmp_path / "fedavg-seed2" / "rounds.jsonl").write_text('{"round": 1, "lo')
    (section,) = build_document(find_result_folders([tmp_path]))["sections"]
    said = "Left out, because no round is done yet: fedavg-seed1, fedavg-seed2."
    assert section["about"][-1] == said
    (tmp_path / "fedavg-seed0" / "rounds.jsonl").write_text("")
    with pytest.raises(InvalidInput, match="no run in it has a round yet"):
        find_result_folders([tmp_path])


def test_a_run_given_by_name_must_have_a_round(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "rounds.jsonl").unlink()
    with pytest.raises(InvalidInput, match="holds no round"):
        build_document(find_result_folders([path]))


def test_runs_and_a_search_kept_together(tmp_path: Path) -> None:
    write_run(tmp_path / "mine")
    write_tuning(tmp_path / "tuning", "fedavg")
    assert [kind for kind, _ in kinds(tmp_path)] == ["tuning", "comparison"]


def test_a_search_that_has_not_ended(tmp_path: Path) -> None:
    write_run(tmp_path / "fedavg" / "trial-0-seed0")
    with pytest.raises(InvalidInput, match="has not ended"):
        find_result_folders([tmp_path])
