"""systemd and nginx accept the files that `init` writes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpfedcl.network.setup.folders import make_federation


@pytest.fixture
def federation(tmp_path: Path) -> Path:
    make_federation(tmp_path / "lab", ["hospital-a"], "127.0.0.1", 19_800)
    return tmp_path / "lab"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize(
    "place", ["server/mpfedcl-server.service", "clients/hospital-a/mpfedcl-client.service"]
)
def test_systemd_accepts_the_units(federation: Path, place: str) -> None:
    unit = federation / place
    # It looks for the program and the user.
    text = unit.read_text().replace("/opt/mpfedcl/bin/mpfedcl", sys.executable)
    unit.write_text(text.replace("User=mpfedcl", "User=daemon"))
    words = ["systemd-analyze", "verify", str(unit)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("nginx") is None, reason="no nginx here")
def test_nginx_accepts_its_example(federation: Path) -> None:
    main = federation / "main.conf"
    main.write_text(
        f"pid {federation}/pid;\nevents {{}}\nhttp {{\n"
        f"include {federation}/server/nginx.conf;\n}}\n"
    )
    words = ["nginx", "-t", "-c", str(main), "-e", str(federation / "error.log")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
