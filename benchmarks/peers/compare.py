"""Run the peers and mpfedcl on the same work, one after the other, and print how long each takes.

    python benchmarks/peers/compare.py [--work few many] [--peers flower pfl] [--repeats 3]

Peers are looked for in benchmarks/.venvs (install.sh builds them); one that is missing or fails
gets a row that says so.
"""

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from contestants import HERE, IMAGES, METHODS, PEERS, WORKS
from entries import Entry, plan
from programs import adopt_orphans

RESULTS = HERE.parent / "results" / "peers.json"


def describe_machine() -> dict[str, Any]:
    """Tell what the numbers were measured on."""
    cpu = Path("/proc/cpuinfo").read_text()
    names = [line.partition(":")[2].strip() for line in cpu.splitlines() if "model name" in line]
    memory = Path("/proc/meminfo").read_text().split()
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "caches": dict(_caches()),
        "memory_gb": round(int(memory[memory.index("MemTotal:") + 1]) * 1024 / 1e9, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
    }


def _caches() -> Iterator[tuple[str, str]]:
    for cache in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (
            (cache / name).read_text().strip() for name in ("level", "type", "size")
        )
        yield f"L{level} {kind.lower()}", size


def table(entries: Sequence[Entry]) -> str:
    """Return the markdown, a section for each work: all settings of mpfedcl, the best of a peer."""
    lines = []
    for work in dict.fromkeys(entry.work for entry in entries):
        lines += [
            f"### {work.name}: {work.clients} clients with {IMAGES // work.clients} images each\n",
            "| peer | version | method | setting | ms per round, median [min..max] "
            "| times mpfedcl's best | start-up s | peak MB | accuracy % |",
            "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        verdicts = []
        for method in METHODS:
            rivals = [entry for entry in entries if (entry.work, entry.method) == (work, method)]
            ours = [entry for entry in rivals if entry.peer is None]
            best = min(ours, key=lambda entry: entry.median_ms)
            peers = dict.fromkeys(entry.name for entry in rivals if entry.peer)
            fastest = [
                min((each for each in rivals if each.name == name), key=lambda each: each.median_ms)
                for name in peers
            ]
            lines += [_row(entry, best.median_ms) for entry in ours + fastest]
            verdicts += _verdict(best, [entry for entry in fastest if entry.reports])
        lines += ["", *verdicts, ""]
    return "\n".join(lines)


def _row(entry: Entry, best: float) -> str:
    start = f"| {entry.name} | "
    setting = f"`{' '.join(entry.setting)}`"
    if not entry.reports:
        return f"{start}- | {entry.method} | {setting} | {entry.failure} | - | - | - | - |"
    known = entry.as_json()
    last = entry.reports[-1]
    failed = f"; then {entry.failure}" if entry.failure else ""
    ratio = "-" if best == float("inf") else f"{entry.median_ms / best:.2f}"
    return (
        f"{start}{last['version']} | {entry.method} | {setting}{failed} "
        f"| {entry.median_ms:.0f} [{known['min_ms']:.0f}..{known['max_ms']:.0f}] | {ratio} "
        f"| {known['startup_seconds']:.1f} | {known['peak_memory_mb']:.0f} "
        f"| {last['accuracy']:.1f} |"
    )


def _verdict(best: Entry, peers: Sequence[Entry]) -> list[str]:
    """Return the ratios in words."""
    if not best.reports or not peers:
        return []
    said = []
    for peer in peers:
        ratio = peer.median_ms / best.median_ms
        words = f"{ratio:.1f} times faster" if ratio >= 1 else f"{1 / ratio:.1f} times slower"
        said.append(f"{words} than {peer.name}")
    return [f"- {best.method}: mpfedcl (`{' '.join(best.setting)}`) is {', '.join(said)}."]


def main() -> None:
    """Measure, write the results, print the table."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [peer.name for peer in PEERS]
    works = [work.name for work in WORKS]
    flags.add_argument("--work", nargs="+", choices=works, default=works)
    flags.add_argument("--peers", nargs="*", choices=names, default=names)
    flags.add_argument("--rounds", type=int, help="counted, after one warm-up [few 20, many 12]")
    flags.add_argument("--repeats", type=int, default=1, help="times the whole list is run")
    flags.add_argument("--timeout", type=float, default=300, help="seconds that a run may take")
    flags.add_argument("--out", type=Path, default=RESULTS, help="and the table beside it, as .md")
    options = flags.parse_args()
    chosen = [work for work in WORKS if work.name in options.work]
    for work in chosen:
        work.export()
    adopt_orphans()
    # Ended from outside, it still ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    machine = describe_machine()
    entries = plan(chosen, [peer for peer in PEERS if peer.name in options.peers])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for number in range(options.repeats):
        # The whole list again and again, so that a machine that slows down does so for all.
        for entry in entries:
            entry.run(options.rounds or entry.work.rounds, options.timeout)
            said = entry.failure or f"{entry.median_ms:.1f} ms a round"
            label = f"{entry.work.name} {entry.name} {entry.method} {' '.join(entry.setting)}"
            print(f"{number + 1}/{options.repeats} {label}: {said}", file=sys.stderr, flush=True)
        known = [entry.as_json() for entry in entries]
        asked = {"repeats": number + 1, "timeout_seconds": options.timeout}
        results = {"machine": machine, **asked, "entries": known}
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(table(entries))
    print(table(entries))


if __name__ == "__main__":
    main()
