"""`make verify` runs all suites, even if one of them fails."""

import contextlib
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
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

STAGES = tuple((number, 1.0) for number, _ in verify.STAGES)


def is_running(process: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        # Nothing may wait for an orphan that has ended.
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    return False


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


def test_suite_that_leaves_a_process_is_reported_and_the_process_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(verify, "STAGES", STAGES)
    (tmp_path / "Makefile").write_text("fuzz:\n\t@setsid sleep 300 & echo $$! > left\n")
    assert verify.main(["--only", "fuzz"], root=tmp_path) == 0
    assert "passed, 1 left running and ended" in capsys.readouterr().out
    assert not is_running(int((tmp_path / "left").read_text()))


def test_suite_that_hangs_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "GRACE_SECONDS", 0.2)
    (tmp_path / "Makefile").write_text("fuzz:\n\t@sleep 300\n")
    assert verify.main(["--only", "fuzz", "--minutes", "0.01"], root=tmp_path) == 1
    assert "failed after 0.01 min" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_everything_that_suites_have_started(tmp_path: Path, number: int) -> None:
    """One of the processes is in a session of its own, one ignores all but SIGKILL."""
    (tmp_path / "Makefile").write_text(
        "fuzz:\n\t@setsid sleep 300 & echo $$! > first; sleep 300\n"
        "soak:\n\t@trap '' INT TERM; echo $$$$ > second; while :; do sleep 1; done\n"
    )
    program = (
        f"import sys; sys.path.append({str(ROOT / 'scripts')!r}); import verify\n"
        "from pathlib import Path; verify.STAGES = tuple((n, 1.0) for n, _ in verify.STAGES)\n"
        "sys.exit(verify.main(['--only', 'fuzz', 'soak'], root=Path.cwd()))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    pids = [tmp_path / "first", tmp_path / "second"]
    deadline = time.monotonic() + 60
    while not all(each.exists() and each.read_text().strip() for each in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; ending the suites" in out
    assert not [each for each in pids if is_running(int(each.read_text()))]


def test_federation_at_scale_is_short_unless_asked_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Makefile").write_text(
        "test-federation-scale:\n\t@echo $$MPFEDCL_NODES $$MPFEDCL_RUNS\n"
    )
    words, log = ["--only", "test-federation-scale"], "build/verify/test-federation-scale.log"
    assert verify.main(words, root=tmp_path) == 0
    assert (tmp_path / log).read_text() == "12 2\n"
    monkeypatch.setenv("MPFEDCL_NODES", "50")
    assert verify.main(words, root=tmp_path) == 0
    assert (tmp_path / log).read_text() == "50 2\n"


def test_nothing_to_run_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text("other:\n")
    assert verify.main([], root=tmp_path) == 1


def test_suites_are_targets_of_the_makefile() -> None:
    for name in verify.SUITES:
        asked = ["make", "-n", name]
        assert subprocess.run(asked, cwd=ROOT, capture_output=True, check=False).returncode == 0
