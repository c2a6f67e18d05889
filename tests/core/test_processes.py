"""Processes end with the one that started them, even if that is killed."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from worker_processes import is_gone

CHILD = """\
import sys, time
sys.platform = sys.argv[1]
from mpfedcl.core.processes import end_with_parent
end_with_parent()
print("begun", flush=True)
time.sleep(600)
"""
PARENT = """\
import os, sys, time
from pathlib import Path
from mpfedcl.network.flower.programs import start

words = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
child = start(words, os.environ, Path("log"), reads=True)
assert child.stdout.readline() == b"begun\\n"
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_program_ends_with_the_command_that_started_it(tmp_path: Path, platform: str) -> None:
    """On macOS, where no signal comes from the kernel, it sees that its parent has changed."""
    words = [sys.executable, "-c", PARENT, CHILD, platform]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    try:
        assert is_gone(child)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_program_started_otherwise_runs_on(tmp_path: Path) -> None:
    """A service manager does not name itself."""
    program = "from mpfedcl.core.processes import end_with_parent; end_with_parent(); print(1)"
    words = [sys.executable, "-c", program]
    assert subprocess.run(words, cwd=tmp_path, check=True, capture_output=True).stdout
