"""The feature cache when things go wrong: kills, races, damage, no room."""

import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy
import pytest

from mpfedcl.data.feature_store import FeatureStore
from mpfedcl.data.features import FeatureCache
from mpfedcl.data.preprocessing import Preprocessing
from mpfedcl.data.resize import Images
from mpfedcl.models.encoder import Advance, Features

LIMIT = 10**9


class SumEncoder:
    name = "sum"
    fingerprint = "ef" * 32
    feature_size = 4
    preprocessing = Preprocessing()

    def __init__(self) -> None:
        self.encoded = 0

    def encode(self, images: Images, on_progress: Advance | None = None) -> Features:
        self.encoded += len(images)
        sums = images.reshape(len(images), -1).sum(axis=1)
        return numpy.repeat(sums[:, None], 4, axis=1).astype(numpy.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "features.sqlite"


def draw_images(count: int, seed: int = 0) -> Images:
    return numpy.random.default_rng(seed).integers(0, 256, (count, 4, 4), dtype=numpy.uint8)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def vector(number: int, size: int = 2048) -> bytes:
    return bytes([number % 251]) * size


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    """Run a program in a process of its own, with the store's helpers at hand."""
    begin = """
        import sys, time
        from pathlib import Path
        from mpfedcl.data.feature_store import FeatureStore
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
        connection = store._connection
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
        assert store._connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
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
        said, _ = process.communicate(timeout=60)
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
            cache.features(encoder, images[first : first + 200])
    assert encoders[0].encoded == 600
    assert encoders[1].encoded == 0


@pytest.mark.parametrize("damage", ["text", "zeros", "cut", "middle"])
def test_a_damaged_file_is_set_aside_and_rebuilt(path: Path, damage: str) -> None:
    images, encoder = draw_images(3000), SumEncoder()
    cache = FeatureCache(path, LIMIT, warn=pytest.fail)
    expected = cache.encode_source(encoder, "source", lambda: images)
    cache.close()
    content = path.read_bytes()
    harm = {
        "text": b"this is no database, but somebody's notes " * 100,
        "zeros": bytes(len(content)),
        "cut": content[: len(content) // 2],
        "middle": content[:16384] + b"\xff" * (len(content) - 16384),
    }
    path.write_bytes(harm[damage])
    sentences: list[str] = []
    for _ in range(2):
        cache = FeatureCache(path, LIMIT, warn=sentences.append)
        found = cache.encode_source(encoder, "source", lambda: images)
        assert numpy.array_equal(found, expected)
        cache.close()
    assert len(sentences) == 1
    assert "was damaged" in sentences[0]
    assert path.with_name("features.sqlite.damaged").exists()
    # Encoded at first and once more, and the new cache then works.
    assert encoder.encoded == 6000
    FeatureCache(path, LIMIT, warn=pytest.fail).encode_source(encoder, "source", lambda: images[:0])


def test_what_another_process_has_rebuilt_is_not_set_aside_again(path: Path) -> None:
    from mpfedcl.data.feature_store import set_aside

    store = FeatureStore(path, LIMIT)
    store.write("ab", "test", {key(1): vector(1)})
    set_aside(path)
    assert path.exists()
    assert not path.with_name("features.sqlite.damaged").exists()
    assert store.read([key(1)])[0] == {key(1): vector(1)}
    store.close()


@pytest.mark.parametrize("harm", ["flipped", "short", "long", "empty"])
def test_a_rotten_vector_is_encoded_again(path: Path, harm: str) -> None:
    images, encoder = draw_images(5), SumEncoder()
    cache = FeatureCache(path, LIMIT, warn=pytest.fail)
    expected = cache.encode_source(encoder, "source", lambda: images)
    cache.close()
    connection = sqlite3.connect(path)
    (row, blob) = connection.execute("SELECT id, vector FROM features LIMIT 1").fetchone()
    rotten = {
        "flipped": bytes([blob[0] ^ 1]) + blob[1:],
        "short": blob[4:],
        "long": blob + bytes(4),
        "empty": b"",
    }
    connection.execute("UPDATE features SET vector = ? WHERE id = ?", (rotten[harm], row))
    connection.commit()
    connection.close()
    for _ in range(2):
        cache = FeatureCache(path, LIMIT, warn=pytest.fail)
        assert numpy.array_equal(cache.encode_source(encoder, "source", lambda: images), expected)
        cache.close()
    assert encoder.encoded == 6


def test_sound_vectors_of_another_length_are_not_believed(path: Path) -> None:
    class WiderEncoder(SumEncoder):
        feature_size = 6

        def encode(self, images: Images, on_progress: Advance | None = None) -> Features:
            return numpy.repeat(super().encode(images)[:, :1], 6, axis=1)

    images = draw_images(5)
    cache = FeatureCache(path, LIMIT, warn=pytest.fail)
    cache.features(SumEncoder(), images)
    assert cache.features(WiderEncoder(), images).shape == (5, 6)


def test_a_file_of_another_layout_is_emptied(path: Path) -> None:
    store = FeatureStore(path, LIMIT)
    store.write("ab", "test", {key(1): vector(1)})
    store._connection.execute("PRAGMA user_version = 99")
    store.close()
    store = FeatureStore(path, LIMIT)
    assert store.describe().rows == 0
    store.write("ab", "test", {key(1): vector(1)})
    assert store.describe().rows == 1
    store.close()


def goes_on_without(path: Path, cache: FeatureCache, sentences: list[str]) -> None:
    images, encoder = draw_images(600), SumEncoder()
    for _ in range(2):
        found = cache.encode_source(encoder, "source", lambda: images)
        assert numpy.array_equal(found, SumEncoder().encode(images))
    assert len(sentences) == 1
    assert f"{path} cannot be used" in sentences[0]
    assert "$MPFEDCL_CACHE" in sentences[0]


def test_a_place_that_cannot_be_made_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    path, sentences = tmp_path / "file" / "features.sqlite", list[str]()
    goes_on_without(path, FeatureCache(path, LIMIT, sentences.append), sentences)


def test_a_folder_in_the_place_of_the_file_costs_a_warning(path: Path) -> None:
    path.mkdir()
    sentences: list[str] = []
    goes_on_without(path, FeatureCache(path, LIMIT, sentences.append), sentences)


def test_a_full_disk_costs_a_warning(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = FeatureStore._open

    def open_small(store: FeatureStore) -> sqlite3.Connection:
        connection = opened(store)
        # SQLite's own words for a full disk, without filling one.
        connection.execute("PRAGMA max_page_count = 8")
        return connection

    monkeypatch.setattr(FeatureStore, "_open", open_small)
    sentences: list[str] = []
    goes_on_without(path, FeatureCache(path, LIMIT, sentences.append), sentences)
    assert "full" in sentences[0]


def test_a_read_only_database_costs_a_warning(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = FeatureStore._open

    def open_read_only(store: FeatureStore) -> sqlite3.Connection:
        connection = opened(store)
        connection.execute("PRAGMA query_only = ON")
        return connection

    monkeypatch.setattr(FeatureStore, "_open", open_read_only)
    sentences: list[str] = []
    goes_on_without(path, FeatureCache(path, LIMIT, sentences.append), sentences)
    assert "readonly" in sentences[0]


def test_a_read_only_cache_still_serves_what_it_has(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = draw_images(20)
    FeatureCache(path, LIMIT, warn=pytest.fail).encode_source(
        SumEncoder(), "source", lambda: images
    )
    # A day later, so that the use would be noted.
    later = time.time() + 86_400
    monkeypatch.setattr("mpfedcl.data.feature_store.time.time", lambda: later)
    opened = FeatureStore._open

    def open_read_only(store: FeatureStore) -> sqlite3.Connection:
        connection = opened(store)
        connection.execute("PRAGMA query_only = ON")
        return connection

    monkeypatch.setattr(FeatureStore, "_open", open_read_only)
    sentences: list[str] = []
    encoder = SumEncoder()
    FeatureCache(path, LIMIT, sentences.append).encode_source(encoder, "source", lambda: images)
    assert encoder.encoded == 0
    assert len(sentences) == 1
