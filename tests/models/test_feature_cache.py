"""The feature cache: an array is computed once, bounded in size, and never taken for another."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from mpfedcl.cli.arguments import DataCache
from mpfedcl.cli.data import data_cache_command
from mpfedcl.core.errors import InvalidInput
from mpfedcl.models import feature_cache
from mpfedcl.models.feature_cache import (
    Array,
    CachedArrays,
    FeatureCache,
    cache_folder,
    cache_limit,
)

LIMIT = 10**9


class Maker:
    """Computes an array and counts how often."""

    def __init__(self, rows: int = 6, value: float = 1.0) -> None:
        self.calls = 0
        self._array = numpy.full((rows, 5), value, dtype=numpy.float32)

    def __call__(self) -> Array:
        self.calls += 1
        return self._array.copy()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "arrays"


def open_cache(folder: Path, limit: int = LIMIT) -> FeatureCache:
    return FeatureCache(folder, limit, warn=pytest.fail)


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


@pytest.mark.parametrize("rows", [1, 700])
def test_second_call_maps_the_file_and_computes_nothing(folder: Path, rows: int) -> None:
    make = Maker(rows, 2.5)
    first = open_cache(folder).find_or_make("encoder", "images", make)
    second = open_cache(folder).find_or_make("encoder", "images", make)
    assert make.calls == 1
    assert second.dtype == numpy.float32
    assert numpy.array_equal(first, second)
    # Copy-on-write: a write is not seen by others.
    second[:] = 0
    assert first.min() == open_cache(folder).find_or_make("encoder", "images", make).min() == 2.5
    assert only_file(folder).suffix == ".npy"


def test_file_is_readable_by_numpy(folder: Path) -> None:
    open_cache(folder).find_or_make("encoder", "images", Maker(value=3))
    assert numpy.array_equal(numpy.load(only_file(folder)), Maker(value=3)())


def test_different_signatures_give_different_arrays(folder: Path) -> None:
    cache = open_cache(folder)
    found = [cache.find_or_make("e", str(n), Maker(value=n)) for n in range(3)]
    assert [each[0, 0] for each in found] == [0, 1, 2]


def test_empty_arrays_are_not_stored(folder: Path) -> None:
    for _ in range(2):
        assert open_cache(folder).find_or_make("e", "nothing", Maker(0)).shape == (0, 5)
    assert not list(folder.iterdir())


def test_size_limit_of_zero_disables_storage(folder: Path) -> None:
    make = Maker()
    for _ in range(2):
        open_cache(folder, limit=0).find_or_make("e", "images", make)
    assert make.calls == 2
    assert not folder.exists()


def test_names_of_encoders_cannot_leave_the_folder(folder: Path) -> None:
    open_cache(folder).find_or_make("../../onnx /etc/x.onnx" + "y" * 300, "images", Maker())
    assert only_file(folder).name.startswith("..-..-onnx-etc-x.onnx")


def test_folder_is_the_variable_or_the_user_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MPFEDCL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "mpfedcl" / "arrays"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "mpfedcl" / "arrays"
    monkeypatch.setenv("MPFEDCL_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine" / "arrays"


@pytest.mark.parametrize(
    ("text", "limit"),
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
def test_limit_is_read_from_the_variable(
    monkeypatch: pytest.MonkeyPatch, text: str | None, limit: int
) -> None:
    monkeypatch.delenv("MPFEDCL_CACHE_SIZE", raising=False)
    if text is not None:
        monkeypatch.setenv("MPFEDCL_CACHE_SIZE", text)
    assert cache_limit() == limit


@pytest.mark.parametrize("text", ["lots", "-1", "2X", "1,5G"])
def test_invalid_limit_is_rejected(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MPFEDCL_CACHE_SIZE", text)
    with pytest.raises(InvalidInput, match=r"MPFEDCL_CACHE_SIZE is .*500M"):
        FeatureCache()


def test_describe_groups_by_name_and_clear_removes_all(folder: Path) -> None:
    cache = open_cache(folder)
    assert cache.describe() == {}
    for rows in (4, 6):
        cache.find_or_make("resnet18 a.pth", f"{rows} images", Maker(rows))
    cache.find_or_make("other", "images", Maker(900))
    content = cache.describe()
    assert {name: each.samples for name, each in content.items()} == {
        "other": 900,
        "resnet18-a.pth": 10,
    }
    assert content["resnet18-a.pth"].files == 2
    assert sum(each.bytes for each in content.values()) == sum(
        file.stat().st_size for file in folder.iterdir()
    )
    cache.clear()
    assert cache.describe() == {}


def test_command_lists_and_clears(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPFEDCL_CACHE", str(folder.parent))
    monkeypatch.setenv("MPFEDCL_CACHE_SIZE", "100M")
    data_cache_command(DataCache())
    assert "none" in capsys.readouterr().out
    FeatureCache().find_or_make("counting", "images", Maker(1200))
    data_cache_command(DataCache())
    shown = capsys.readouterr().out
    assert "counting" in shown
    assert "1,200" in shown
    data_cache_command(DataCache(json=True))
    content = json.loads(capsys.readouterr().out)
    assert content["arrays"]["counting"]["samples"] == 1200
    assert content["limit"] == 100 * 1024**2
    assert content["path"] == str(folder)
    data_cache_command(DataCache(clear=True, json=True))
    assert json.loads(capsys.readouterr().out)["arrays"] == {}


def test_least_recently_used_files_are_evicted_first(folder: Path) -> None:
    makers = [Maker(200, value) for value in range(8)]
    size = makers[0]().nbytes + 200
    cache = open_cache(folder, limit=3 * size)
    for number, make in enumerate(makers):
        cache.find_or_make("e", str(number), make)
        # The first array is always in use.
        cache.find_or_make("e", "0", makers[0])
        for file in folder.glob("*.npy"):
            os.utime(file, (0, file.stat().st_mtime - 10))
        assert sum(file.stat().st_size for file in folder.iterdir()) <= cache.limit
    makers[0].calls = makers[7].calls = makers[1].calls = 0
    for number in (0, 7, 1):
        cache.find_or_make("e", str(number), makers[number])
    assert [makers[number].calls for number in (0, 7, 1)] == [0, 0, 1]


def test_array_above_the_limit_is_returned_with_a_warning(folder: Path) -> None:
    sentences: list[str] = []
    cache = FeatureCache(folder, limit=1000, warn=sentences.append)
    assert len(cache.find_or_make("e", "images", Maker(4000))) == 4000
    assert len(sentences) == 1
    assert "$MPFEDCL_CACHE_SIZE" in sentences[0]
    assert not list(folder.iterdir())


def test_leftovers_of_killed_processes_are_removed_after_a_day(folder: Path) -> None:
    folder.mkdir(parents=True)
    old, new = folder / ".a.npy.00000000.tmp", folder / ".b.npy.00000000.tmp"
    for path in (old, new):
        path.touch()
    os.utime(old, (0, time.time() - 90_000))
    open_cache(folder).find_or_make("e", "images", Maker())
    assert not old.exists()
    assert new.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda _: b"not an array",
        lambda content: bytes(len(content)),
        lambda content: content[: len(content) // 2],
        lambda content: content[:-4],
        lambda content: content + b"more",
        lambda content: content[:8] + b"\xff" * (len(content) - 8),
        lambda content: content[:20] + b"((((" + content[24:],
        lambda content: b"PK\x03\x04" + content,
    ],
)
def test_damaged_files_are_computed_again(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    make = Maker(30)
    expected = open_cache(folder).find_or_make("e", "images", make).copy()
    file = only_file(folder)
    file.write_bytes(damage(file.read_bytes()))
    open_cache(folder).describe()
    for _ in range(2):
        found = open_cache(folder).find_or_make("e", "images", make)
        assert numpy.array_equal(found, expected)
    assert make.calls == 2


def assert_works_without_storing(folder: Path, reason: str) -> None:
    sentences: list[str] = []
    cache, make = FeatureCache(folder, LIMIT, sentences.append), Maker(3, 7)
    assert numpy.array_equal(cache.find_or_make("e", "images", make), Maker(3, 7)())
    assert len(sentences) == 1
    assert f"{folder} cannot be used" in sentences[0]
    assert reason in sentences[0]
    assert "$MPFEDCL_CACHE" in sentences[0]


def test_folder_that_cannot_be_created_gives_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert_works_without_storing(tmp_path / "file" / "arrays", "Not a directory")


def test_full_disk_gives_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numpy.lib.format.write_array", fail)
    assert_works_without_storing(folder, "No space left")
    assert not list(folder.iterdir())


def test_read_only_cache_serves_its_content(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_cache(folder).find_or_make("e", "images", Maker())

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(feature_cache, "open_atomically", refuse)
    make = Maker()
    open_cache(folder).find_or_make("e", "images", make)
    assert make.calls == 0


def test_concurrent_threads_compute_once(folder: Path) -> None:
    make, found = Maker(), list[Array]()

    def slow() -> Array:
        time.sleep(0.1)
        return make()

    threads = [
        threading.Thread(
            target=lambda: found.append(open_cache(folder).find_or_make("e", "images", slow))
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert make.calls == 1
    assert len(found) == 3


def start(program: str, folder: Path) -> subprocess.Popen[str]:
    begin = """
        import sys, time
        from pathlib import Path
        import numpy
        from mpfedcl.models.feature_cache import FeatureCache
        cache = FeatureCache(Path(sys.argv[1]), 10**9)
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(begin) + textwrap.dedent(program), str(folder)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


@pytest.mark.thorough
@pytest.mark.whole
def test_concurrent_processes_compute_each_array_once(folder: Path) -> None:
    program = """
        print("ready", flush=True)
        sys.stdin.readline()
        made = 0
        for number in range(30):
            def make():
                global made
                made += 1
                return numpy.full((2000, 8), number, dtype=numpy.float32)
            found = cache.find_or_make("e", str(number), make)
            assert found.shape == (2000, 8) and (found == number).all()
        print(made, flush=True)
    """
    processes = [start(program, folder) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    made = [int(process.communicate(timeout=60)[0]) for process in processes]
    # A lock file is removed after use, so a late process may rarely compute an array again.
    assert 30 <= sum(made) <= 33
    assert open_cache(folder).describe() == {
        "e": CachedArrays(30, 60_000, 30 * (2000 * 8 * 4 + 128))
    }


@pytest.mark.thorough
@pytest.mark.whole
def test_kill_during_a_write_leaves_no_damaged_file(folder: Path) -> None:
    program = """
        for number in range(10**6):
            cache.find_or_make("e", str(number), lambda: numpy.ones((40_000, 16)))
            print(number, flush=True)
    """
    for moment in (0.001, 0.01, 0.03):
        with start(program, folder) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(moment)
            process.send_signal(signal.SIGKILL)
        for number, file in enumerate(sorted(folder.glob("*.npy"))):
            assert feature_cache._map(file) is not None, number
        # The lock of the killed process does not block others.
        make = Maker()
        open_cache(folder).find_or_make("e", f"after {moment}", make)
        assert make.calls == 1
