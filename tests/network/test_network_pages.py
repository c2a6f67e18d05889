"""systemd and nginx accept the files that `init` writes; compose files are closed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mpfedcl.cli.main import parse
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


@pytest.mark.parametrize("place", ["server", "clients/hospital-a"])
def test_containers_have_no_privileges_and_take_the_flags_that_exist(
    federation: Path, place: str
) -> None:
    content = yaml.safe_load((federation / place / "compose.yaml").read_text())
    (service,) = content["services"].values()
    assert service["user"].split(":")[0] not in ("", "0", "root")
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    # Only this machine reaches the server and its metrics.
    assert all(each.startswith("127.0.0.1:") for each in service.get("ports", []))
    assert "privileged" not in service
    image = (federation / place / "Containerfile").read_text().splitlines()
    assert any(line.startswith("USER 10001") for line in image)
    # Keys are in this folder: nothing is copied into the image.
    assert not any(line.startswith(("COPY", "ADD")) for line in image)
    assert (federation / place / ".dockerignore").read_text().splitlines()[0] == "*"
    arguments = parse(["federation", *service["command"]])
    assert arguments.directory == Path("/srv/federation")
    assert arguments.log_json
    (federation / place / "compose.yaml").write_text("changed by its operator")
    make_federation(federation, ["hospital-a"], None, 19_800)
    assert (federation / place / "compose.yaml").read_text() == "changed by its operator"
