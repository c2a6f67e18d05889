"""Secure aggregation with real processes, keys and TLS; a client is killed during a round."""

import contextlib
import json
import time

import pytest

from process_federation import CLIENT_EXECUTOR, FaultLog, FederationRun, ProcessFederation
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

    def begin(attempt: int) -> FederationRun | None:
        """Return a run in which client-1 has shared; None if the run ended before that was seen."""
        run = federation.begin(f"secure-{attempt}", *SETTINGS, "--min-clients", 4)
        while run.program.is_running:
            if has_shared():
                return run
            time.sleep(0.02)
        return None

    run = next(found for attempt in range(10) if (found := begin(attempt)))
    process = federation.find_one(CLIENT_EXECUTOR, "client-1")
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
