"""Logs: their format, and the rotation of a file to which a process appends."""

import json
import logging
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mpfedcl.network.logs import JSON_VARIABLE, JsonFormatter, rotate_log

LOGGING = """
from mpfedcl.network.logs import log_to_file, logger
log_to_file()
logger.info("Connected\\nas %s", "a")
try:
    raise ValueError("no")
except ValueError:
    logger.exception("A request failed.")
"""


def logged(variables: dict[str, str]) -> list[str]:
    """Return the lines that a process logs."""
    words = [sys.executable, "-c", LOGGING]
    done = subprocess.run(words, capture_output=True, text=True, env=variables, check=True)
    return done.stderr.splitlines()


def test_processes_log_json_lines_if_asked() -> None:
    lines = [json.loads(line) for line in logged({JSON_VARIABLE: "1"})]
    assert [each["level"] for each in lines] == ["INFO", "ERROR"]
    assert [each["message"] for each in lines] == ["Connected\nas a", "A request failed."]
    assert lines[1]["traceback"].endswith("ValueError: no")
    age = datetime.now(UTC) - datetime.fromisoformat(lines[0]["time"])
    assert 0 <= age.total_seconds() < 600


def test_log_files_have_time_and_level() -> None:
    lines = logged({})
    assert lines[0].split()[2:] == ["INFO", "Connected"]
    datetime.fromisoformat(" ".join(lines[0].split()[:2]).replace(",", "."))
    assert lines[-1] == "ValueError: no"


def test_json_holds_any_message() -> None:
    record = logging.LogRecord("x", logging.WARNING, "", 0, "a %s", ('"\x1b[31m\udc80',), None)
    assert json.loads(JsonFormatter().format(record))["message"] == 'a "\x1b[31m\udc80'


def test_log_is_rotated_while_a_process_appends(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    rotate_log(path, most=10)
    assert not path.exists()
    with path.open("ab", buffering=0) as writer:
        for number in range(6):
            writer.write(b"%d" % number * 20)
            rotate_log(path, most=10)
            assert path.stat().st_size == 0
        writer.write(b"end")
        rotate_log(path, most=10)
    found = {each.name: each.read_bytes()[:3] for each in tmp_path.iterdir()}
    assert found == {"x.log": b"end", "x.log.1": b"555", "x.log.2": b"444", "x.log.3": b"333"}


def test_rotation_that_fails_keeps_the_log(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"x" * 100)
    (tmp_path / "x.log.3").mkdir()
    (tmp_path / "x.log.2").write_text("")
    rotate_log(path, most=10)
    assert path.read_bytes() == b"x" * 100


@pytest.mark.parametrize("size", [0, 9])
def test_small_log_stays(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"x" * size)
    rotate_log(path, most=10)
    assert [each.name for each in tmp_path.iterdir()] == ["x.log"]
