"""The feature cache: each image is encoded once, and never taken for another."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from mpfedcl.cli.arguments.experiments import DataCache
from mpfedcl.cli.commands.listings import data_cache_command
from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.images import Images
from mpfedcl.models.encoders.encoder import Features, OnProgress
from mpfedcl.models.encoders.feature_cache import FeatureCache, cache_limit, cache_path
from mpfedcl.models.encoders.preprocessing import Preprocessing

SIZE = 5


class CountingEncoder:
    """Sums pixels; knows how many images it was given."""

    name = "counting"
    feature_size = SIZE
    preprocessing = Preprocessing()

    def __init__(self, fingerprint: str = "ab" * 32) -> None:
        self.fingerprint = fingerprint
        self.encoded = 0

    def encode(self, images: Images, on_progress: OnProgress | None = None) -> Features:
        self.encoded += len(images)
        if on_progress is not None:
            on_progress(len(images))
        sums = images.reshape(len(images), -1).sum(axis=1, dtype=numpy.float64)
        features: Features = (sums[:, None] / (1 + numpy.arange(SIZE))).astype(numpy.float32)
        return features


class CountingLoader:
    def __init__(self, images: Images) -> None:
        self.images = images
        self.calls = 0

    def __call__(self) -> Images:
        self.calls += 1
        return self.images


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "features.sqlite"


def draw_images(count: int, *shape: int, seed: int = 0) -> Images:
    return numpy.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=numpy.uint8)


def open_cache(path: Path, limit: int = 10**9) -> FeatureCache:
    def fail(sentence: str) -> None:
        raise AssertionError(sentence)

    return FeatureCache(path, limit, warn=fail)


@pytest.mark.parametrize("count", [1, 3, 256, 700])
def test_a_second_time_neither_loads_nor_encodes(path: Path, count: int) -> None:
    encoder, load = CountingEncoder(), CountingLoader(draw_images(count, 4, 4))
    first = open_cache(path).encode_source(encoder, "source", load)
    assert numpy.array_equal(first, encoder.encode(load.images))
    encoder.encoded = load.calls = 0
    for _ in range(2):
        # As in a new process: nothing is remembered but the file.
        again = open_cache(path).encode_source(encoder, "source", load)
        assert again.dtype == numpy.float32
        assert again.flags.writeable
        assert numpy.array_equal(again, first)
    assert load.calls == encoder.encoded == 0


def test_another_source_with_the_same_images_loads_but_does_not_encode(path: Path) -> None:
    encoder, load = CountingEncoder(), CountingLoader(draw_images(300, 4, 4))
    cache = open_cache(path)
    first = cache.encode_source(encoder, "source", load)
    turned = CountingLoader(load.images[::-1])
    other = cache.encode_source(encoder, "turned source", turned)
    assert (turned.calls, encoder.encoded) == (1, 300)
    assert numpy.array_equal(other, first[::-1])
    assert numpy.array_equal(cache.encode_images(encoder, load.images[7:9]), first[7:9])
    assert encoder.encoded == 300


def test_only_new_images_are_encoded_and_equal_ones_once(path: Path) -> None:
    encoder, cache = CountingEncoder(), open_cache(path)
    images = draw_images(6, 4, 4)
    cache.encode_images(encoder, images[:4])
    repeated = images[[5, 0, 5, 4, 1, 5]]
    features = cache.encode_images(encoder, repeated)
    assert encoder.encoded == 4 + 2
    assert numpy.array_equal(features, encoder.encode(repeated))


def test_changed_weights_pixels_or_shapes_are_never_mistaken(path: Path) -> None:
    encoder, cache = CountingEncoder(), open_cache(path)
    images = draw_images(2, 4, 4)
    cache.encode_images(encoder, images)
    changed = images.copy()
    changed[0, 3, 3] ^= 1
    cache.encode_images(encoder, changed)
    assert encoder.encoded == 3
    cache.encode_images(encoder, images.reshape(2, 2, 8))
    assert encoder.encoded == 5
    other = CountingEncoder("cd" * 32)
    cache.encode_source(other, "source", lambda: images)
    assert other.encoded == 2
    load = CountingLoader(images)
    cache.encode_source(encoder, "source", load)
    assert load.calls == 1


def test_no_images_are_no_trouble(path: Path) -> None:
    none = draw_images(0, 4, 4)
    for _ in range(2):
        found = open_cache(path).encode_source(CountingEncoder(), "nothing", lambda: none)
        assert found.shape == (0, SIZE)


def test_without_a_size_there_is_no_cache(path: Path) -> None:
    encoder, load = CountingEncoder(), CountingLoader(draw_images(3, 4, 4))
    for _ in range(2):
        open_cache(path, limit=0).encode_source(encoder, "source", load)
    assert (load.calls, encoder.encoded) == (2, 6)
    assert not path.exists()


def test_the_place_is_the_variable_then_the_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MPFEDCL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_path() == tmp_path / ".cache" / "mpfedcl" / "features.sqlite"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_path() == tmp_path / "xdg" / "mpfedcl" / "features.sqlite"
    monkeypatch.setenv("MPFEDCL_CACHE", "~/mine")
    assert cache_path() == tmp_path / "mine" / "features.sqlite"


@pytest.mark.parametrize(
    ("told", "limit"),
    [
        (None, 2 * 1024**3),
        ("", 2 * 1024**3),
        ("0", 0),
        ("1234", 1234),
        ("500M", 500 * 1024**2),
        ("1.5 GiB", 3 * 1024**3 // 2),
        ("2gb", 2 * 1024**3),
    ],
)
def test_the_size_is_read_from_the_variable(
    monkeypatch: pytest.MonkeyPatch, told: str | None, limit: int
) -> None:
    monkeypatch.delenv("MPFEDCL_CACHE_SIZE", raising=False)
    if told is not None:
        monkeypatch.setenv("MPFEDCL_CACHE_SIZE", told)
    assert cache_limit() == limit


@pytest.mark.parametrize("told", ["lots", "-1", "2X", "1,5G"])
def test_a_size_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    monkeypatch.setenv("MPFEDCL_CACHE_SIZE", told)
    with pytest.raises(InvalidInput, match=r"MPFEDCL_CACHE_SIZE is .*500M"):
        FeatureCache()


def test_describe_counts_by_encoder_and_clear_empties(path: Path) -> None:
    cache = open_cache(path)
    assert cache.describe().rows == 0
    assert not path.exists()
    first, second = CountingEncoder(), CountingEncoder("cd" * 32)
    cache.encode_images(first, draw_images(5, 4, 4))
    cache.encode_images(second, draw_images(900, 4, 4))
    content = cache.describe()
    assert content.rows == 905
    assert content.encoders == {"counting abababababab": 5, "counting cdcdcdcdcdcd": 900}
    assert 905 * SIZE * 4 < content.bytes < 10**6
    cache.clear()
    assert cache.describe().rows == 0
    assert cache.describe().encoders == {}
    assert cache.describe().bytes < content.bytes
    cache.encode_images(first, draw_images(5, 4, 4))
    assert first.encoded == 10


def test_the_command_shows_and_clears(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPFEDCL_CACHE", str(path.parent))
    monkeypatch.setenv("MPFEDCL_CACHE_SIZE", "100M")
    assert data_cache_command(DataCache()) == 0
    assert "none" in capsys.readouterr().out
    with_rows = FeatureCache()
    with_rows.encode_images(CountingEncoder(), draw_images(1200, 4, 4))
    with_rows.close()
    assert data_cache_command(DataCache()) == 0
    shown = capsys.readouterr().out
    assert "counting abababababab" in shown
    assert "1,200" in shown
    assert data_cache_command(DataCache(json=True)) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["rows"] == 1200
    assert content["limit"] == 100 * 1024**2
    assert content["path"] == str(path)
    assert data_cache_command(DataCache(clear=True, json=True)) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 0


class Clock:
    """Stands in for the time module; every look is an hour later."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        self.now += 3601
        return self.now


def test_the_size_is_bounded_and_the_longest_unused_go_first(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpfedcl.models.encoders.feature_store.time", Clock())
    limit = 1_000_000
    encoder, cache = CountingEncoder(), open_cache(path, limit)
    loaders = [CountingLoader(draw_images(1000, 4, 4, seed=number)) for number in range(8)]
    for number, load in enumerate(loaders):
        cache.encode_source(encoder, f"source {number}", load)
        # The first source is in use all the time.
        cache.encode_source(encoder, "source 0", loaders[0])
        assert cache.describe().bytes <= limit
    assert loaders[0].calls == 1
    cache.encode_source(encoder, "source 7", loaders[7])
    assert loaders[7].calls == 1
    cache.encode_source(encoder, "source 1", loaders[1])
    assert loaders[1].calls == 2
    cache.close()
    assert path.stat().st_size <= 1.1 * limit


def test_a_source_larger_than_the_cache_is_encoded_whole_and_said_so(path: Path) -> None:
    sentences: list[str] = []
    cache = FeatureCache(path, limit=60_000, warn=sentences.append)
    encoder, images = CountingEncoder(), draw_images(4000, 4, 4)
    features = cache.encode_source(encoder, "source", lambda: images)
    assert numpy.array_equal(features, CountingEncoder().encode(images))
    assert len(sentences) == 1
    assert "$MPFEDCL_CACHE_SIZE" in sentences[0]
    assert numpy.array_equal(cache.encode_source(encoder, "source", lambda: images), features)


def test_reading_writes_nothing_within_the_hour(path: Path) -> None:
    encoder, load = CountingEncoder(), CountingLoader(draw_images(10, 4, 4))
    cache = open_cache(path)
    cache.encode_source(encoder, "source", load)
    cache.close()
    before = path.read_bytes()
    again = open_cache(path)
    again.encode_source(encoder, "source", load)
    again.close()
    assert path.read_bytes() == before


def test_reading_ten_thousand_rows_is_quick(path: Path) -> None:
    class Wide(CountingEncoder):
        feature_size = 512

        def encode(self, images: Images, on_progress: OnProgress | None = None) -> Features:
            return numpy.repeat(super().encode(images)[:, :1], 512, axis=1)

    images = draw_images(10_000, 3, 3)
    encoder: Callable[[], Wide] = Wide
    open_cache(path).encode_source(encoder(), "source", lambda: images)
    begin = time.process_time()
    open_cache(path).encode_source(encoder(), "source", lambda: images[:0])
    # Measured at about 0.1 s; processor time, so that a busy machine does not matter.
    assert time.process_time() - begin < 0.3
