"""Secure aggregation with real processes, keys and TLS; a client is killed during a round."""

import contextlib
import json
import time

import pytest

from process_federation import CLIENT_EXECUTOR, FaultLog, ProcessFederation, wait_until
from small_experiments import read_records, read_summary

pytestmark = pytest.mark.federation

SETTINGS = ("--method", "fedgauss", "--secure-aggregation", "--partition.alpha", 10)


def test_client_killed_between_share_and_mask_stages(
    federation: ProcessFederation, fault_log: FaultLog
) -> None:
    """The other three clients open the sum of their updates, and nothing else."""
    federation.repair()
    # With three clients, all of them would be needed.
    federation.start_clients({"spare": ("--share", 2)})
    memory = federation.folder / "clients" / "client-1" / "memory"
    before = {file: file.read_bytes() for file in memory.glob("*/secure-sum.json")}

    def has_shared() -> bool:
        for file in memory.glob("*/secure-sum.json"):
            with contextlib.suppress(OSError, ValueError):
                content = file.read_bytes()
                is_new = content != before.get(file)
                if is_new and json.loads(content)["client"]["next"] in ("mask", "confirm"):
                    return True
        return False

    run = federation.begin("secure", *SETTINGS, "--min-clients", 4)
    process = federation.find_one(CLIENT_EXECUTOR, "client-1")
    wait_until(has_shared, "client-1 shares its secrets")
    began = time.monotonic()
    process.kill()
    run.finish()
    seconds = time.monotonic() - began
    record = read_records(run.path)[0]
    # The client may have sent its masked values just before the kill.
    federation.clients.pop("spare").interrupt()
    assert {"client-0", "client-2", "spare"} <= set(record["clients"]["answered"])
    assert read_summary(run.path)["accuracy"] > 80
    fault_log.write("killed within a secure sum", "the others opened theirs", seconds, "its update")


def test_clients_know_each_others_keys(federation: ProcessFederation) -> None:
    """Each client's folder has all keys from the start: none is trusted at first sight."""
    file = federation.folder / "clients" / "client-0" / "known-clients.pub"
    public = federation.folder / "server" / "clients" / "client-2.pub"
    assert f"{public.read_text().strip()} client-2" in file.read_text().splitlines()
