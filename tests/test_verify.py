"""`make verify` runs all suites, even if one of them fails."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))

import verify  # noqa: E402

MAKEFILE = """\
attacks:
	@echo all is well
fuzz:
	@echo something broke; exit 3
soak:
	@test -z "$$VERIFIED" && echo calm
"""


def test_suite_that_fails_is_named_and_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    assert verify.main(["--jobs", "1"], root=tmp_path) == 1
    missing, soak, attacks, fuzz, summary = capsys.readouterr().out.splitlines()
    assert missing.startswith("not in the Makefile: test-browser, test-all, ")
    assert re.fullmatch(r"attacks +\d+ s  passed  build/verify/attacks.log", attacks)
    assert re.fullmatch(r"fuzz +\d+ s  failed  build/verify/fuzz.log", fuzz)
    assert re.fullmatch(r"soak +\d+ s  passed  build/verify/soak.log", soak)
    assert summary == "3 suites: 2 passed, 1 failed (fuzz), 0 min"
    assert "something broke" in (tmp_path / "build/verify/fuzz.log").read_text()


def test_only_some_suites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    assert verify.main(["--only", "soak", "attacks"], root=tmp_path) == 0
    *lines, summary = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[0] for line in lines) == ["attacks", "soak"]
    assert summary == "2 suites: 2 passed, 0 min"
    with pytest.raises(SystemExit) as end:
        verify.main(["--only", "nothing"], root=tmp_path)
    assert end.value.code == 2


def test_two_suites_run_at_the_same_time_and_browser_tests_alone(tmp_path: Path) -> None:
    """Each of the two suites waits for a file that the other one writes."""
    (tmp_path / "Makefile").write_text(
        "test-browser:\n\ttest ! -e soak -a ! -e fuzz\n"
        "soak:\n\ttouch soak; until test -e fuzz; do sleep 0.05; done\n"
        "fuzz:\n\ttouch fuzz; until test -e soak; do sleep 0.05; done\n"
        ".PHONY: soak fuzz\n"
    )
    assert verify.main(["--only", "soak", "fuzz", "test-browser"], root=tmp_path) == 0


def test_nothing_to_run_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text("other:\n")
    assert verify.main([], root=tmp_path) == 1


def test_suites_are_targets_of_the_makefile() -> None:
    for name in verify.SUITES:
        asked = ["make", "-n", name]
        assert subprocess.run(asked, cwd=ROOT, capture_output=True, check=False).returncode == 0
