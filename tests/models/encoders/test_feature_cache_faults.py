"""The feature cache when its file is damaged, or cannot be written."""

import sqlite3
import time
from pathlib import Path

import numpy
import pytest
from stored_features import LIMIT, SumEncoder, draw_images, key, vector

from mpfedcl.core.images import Images
from mpfedcl.models.encoders.encoder import Features, OnProgress
from mpfedcl.models.encoders.feature_cache import FeatureCache
from mpfedcl.models.encoders.feature_store import FeatureStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "features.sqlite"


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
    from mpfedcl.models.encoders.feature_store import move_damaged_database

    store = FeatureStore(path, LIMIT)
    store.write("ab", "test", {key(1): vector(1)})
    move_damaged_database(path)
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

        def encode(self, images: Images, on_progress: OnProgress | None = None) -> Features:
            return numpy.repeat(super().encode(images)[:, :1], 6, axis=1)

    images = draw_images(5)
    cache = FeatureCache(path, LIMIT, warn=pytest.fail)
    cache.encode_images(SumEncoder(), images)
    assert cache.encode_images(WiderEncoder(), images).shape == (5, 6)


def test_a_file_of_another_layout_is_emptied(path: Path) -> None:
    store = FeatureStore(path, LIMIT)
    store.write("ab", "test", {key(1): vector(1)})
    store.connection.execute("PRAGMA user_version = 99")
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
    monkeypatch.setattr("mpfedcl.models.encoders.feature_store.time.time", lambda: later)
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
