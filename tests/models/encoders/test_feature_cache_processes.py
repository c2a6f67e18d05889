"""The feature cache and several processes: kills and races."""

import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from stored_features import LIMIT, SumEncoder, draw_images, key, vector

from mpfedcl.models.encoders.feature_cache import FeatureCache
from mpfedcl.models.encoders.feature_store import FeatureStore

pytestmark = pytest.mark.whole


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "features.sqlite"


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    """Run a program in a process of its own, with the store's helpers at hand."""
    begin = """
        import sys, time
        from pathlib import Path
        from mpfedcl.models.encoders.feature_store import FeatureStore
        def key(number): return number.to_bytes(32, "big")
        def vector(number, size=2048): return bytes([number % 251]) * size
        path = Path(sys.argv[1])
    """
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(begin) + textwrap.dedent(program),
            *map(str, arguments),
        ],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


def wait_for_word(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_a_kill_in_the_midst_of_a_transaction_leaves_all_or_nothing(path: Path) -> None:
    process = start(
        """
        store = FeatureStore(path, 10**9)
        store.write("ab", "test", {key(n): vector(n) for n in range(100)})
        connection = store.connection
        connection.execute("PRAGMA cache_spill = 1")
        connection.execute("BEGIN IMMEDIATE")
        # Far more than fits the page cache, so that half-done pages are on disk.
        for n in range(100, 6000):
            connection.execute(
                "INSERT INTO features (key, vector) VALUES (?, ?)", (key(n), vector(n))
            )
        print("midway", flush=True)
        time.sleep(60)
        """,
        path,
    )
    assert wait_for_word(process) == "midway"
    assert path.with_name(f"{path.name}-wal").stat().st_size > 1_000_000
    kill(process)
    store = FeatureStore(path, LIMIT)
    found, _ = store.read(key(n) for n in range(6000))
    assert found == {key(n): vector(n) for n in range(100)}
    store.write("ab", "test", {key(n): vector(n) for n in range(100, 200)})
    assert store.describe().rows == 200
    store.close()


def test_kills_at_random_moments_never_damage_the_file(path: Path) -> None:
    program = """
        store = FeatureStore(path, 10**9)
        print("go", flush=True)
        first = int(sys.argv[2])
        for begin in range(first, 10**6, 64):
            store.write("ab", "test", {key(n): vector(n) for n in range(begin, begin + 64)})
            print(begin + 64, flush=True)
    """
    moments = random.Random(0)
    done = 0
    for _ in range(6):
        with start(program, path, done) as process:
            assert process.stdout is not None
            assert wait_for_word(process) == "go"
            first = int(wait_for_word(process))
            time.sleep(moments.uniform(0.002, 0.08))
            process.send_signal(signal.SIGKILL)
            # The last line may have been cut by the kill.
            whole = [first, *map(int, process.stdout.read().split("\n")[:-1])]
        store = FeatureStore(path, LIMIT)
        assert store.connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        rows = store.describe().rows
        # What was reported as written is there, and never a part of a chunk.
        assert rows >= max(whole) > done
        assert rows % 64 == 0
        found, _ = store.read(key(n) for n in range(rows))
        assert found == {key(n): vector(n) for n in range(rows)}
        store.close()
        done = rows


def test_processes_that_start_together_share_one_row_an_image(path: Path) -> None:
    program = """
        print("ready", flush=True)
        sys.stdin.readline()
        store = FeatureStore(path, 10**9)
        for begin in range(0, 2000, 100):
            store.write("ab", "test", {key(n): vector(n) for n in range(begin, begin + 100)})
            found, _ = store.read(key(n) for n in range(begin + 100))
            assert len(found) == begin + 100
        store.write_listing(key(0), [key(n) for n in range(2000)])
        print("done", flush=True)
    """
    processes = [start(program, path) for _ in range(3)]
    for process in processes:
        assert wait_for_word(process) == "ready"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        said, _ = process.communicate(timeout=300)
        assert (process.returncode, said) == (0, "done\n")
    store = FeatureStore(path, LIMIT)
    assert store.describe().rows == 2000
    assert store.read_listing(key(0)) == [key(n) for n in range(2000)]
    store.close()


def test_two_caches_at_once_give_the_same(path: Path) -> None:
    images = draw_images(600)
    caches = [FeatureCache(path, LIMIT, warn=pytest.fail) for _ in range(2)]
    encoders = [SumEncoder(), SumEncoder()]
    for first in range(0, 600, 200):
        for cache, encoder in zip(caches, encoders, strict=True):
            cache.encode_images(encoder, images[first : first + 200])
    assert encoders[0].encoded == 600
    assert encoders[1].encoded == 0
