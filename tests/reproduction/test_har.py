"""The study of UCI HAR on a made file, and what is known of the real one."""

import os
from pathlib import Path
from typing import Any

import numpy
import pytest

from mpfedcl import InvalidInput
from reproduction import har
from reproduction.runs import Runs

CHANNELS = 12
"""Nine, and the norm of each of the three sensors."""


def save_windows(root: Path, *, mixed: bool = False) -> Any:
    """Write windows of three subjects and return those of training."""
    drawn = numpy.random.default_rng(0)
    labels = numpy.tile(numpy.arange(6), 15)
    windows = drawn.normal(0, 0.2, (len(labels), 9, 128)) + 0.1 * labels[:, None, None]
    windows[:, 6] += 0.8
    windows = windows.astype(numpy.float16)
    owner = numpy.repeat(["subject-01", "subject-02", "subject-03"], 30)
    x = windows.transpose(0, 2, 1).reshape(windows.shape) if mixed else windows
    parts: dict[str, Any] = {
        f"{name}_{part}": value
        for part in ("train", "test")
        for name, value in (("x", x), ("y", labels), ("clients", owner))
    }
    (root / "har").mkdir()
    numpy.savez(root / "har" / "har.npz", **parts)
    return windows


@pytest.mark.parametrize("mixed", [False, True])
def test_windows_have_their_channels_in_both_versions_of_the_file(
    tmp_path: Path, mixed: bool
) -> None:
    windows = save_windows(tmp_path, mixed=mixed)
    data = har.read_windows(tmp_path / "har" / "har.npz")
    assert list(data) == ["subject-01", "subject-02", "subject-03"]
    assert numpy.array_equal(data["subject-02"][0][0], windows[30:60].astype(numpy.float32))
    assert data["subject-03"][1][1].tolist() == list(range(6)) * 5


def test_features_of_a_wave() -> None:
    """A wave of 3 Hz and norm 5: of 8 waves of 128 points."""
    windows = numpy.zeros((1, 9, 128), dtype=numpy.float32)
    windows[0, 0] = 3 + numpy.sin(2 * numpy.pi * 8 * numpy.arange(128) / 128)
    windows[0, 3:5] = [[3], [4]]
    features = har.make_features(windows).reshape(16, CHANNELS)
    mean, deviation, low, high, _, median = features[:6, 0]
    assert (mean, deviation) == (pytest.approx(3), pytest.approx(0.5**0.5))
    assert (low, high, median) == (pytest.approx(2), pytest.approx(4), pytest.approx(3, abs=1e-6))
    # Step 8 is in the band from 6 to 9; its power is (128 / 2)².
    powers = numpy.exp(features[8:, 0])
    assert powers.argmax() == 4
    assert powers[4] == pytest.approx(64**2, rel=1e-4)
    assert features[:2, CHANNELS - 2].tolist() == [5, 0]


@pytest.mark.whole
def test_study_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_windows(tmp_path)
    monkeypatch.setenv("MPFEDCL_DATA", str(tmp_path))
    for read in (har.read_series, har.read_features):
        read.cache_clear()
    monkeypatch.setattr(har, "RATES", (0.03, 0.1))
    har.main(Runs(tmp_path / "runs", quick=True))
    table = capsys.readouterr().out.partition("| method |")[2]
    assert [line.split(" | ")[0] for line in table.splitlines()[2:4]] == ["| fedgauss", "| fedavg"]
    # Two learning rates, the best again with its seed, and FedGauss; then nothing is left to do.
    begun = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/summary.json")}
    assert len(begun) == 4
    har.main(Runs(tmp_path / "runs", quick=True))
    assert {path: path.stat().st_mtime_ns for path in begun} == begun


def test_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPFEDCL_DATA", str(tmp_path))
    har.read_series.cache_clear()
    with pytest.raises(InvalidInput, match=r"har\.npz is missing; MPFEDCL_DATA must name"):
        har.read_series()


def test_real_windows() -> None:
    beside = Path(__file__).parents[3] / "shared" / "data"
    file = Path(os.environ.get("MPFEDCL_DATA") or beside) / "har" / "har.npz"
    if not file.is_file():
        pytest.skip("har.npz is neither in $MPFEDCL_DATA nor in ../shared/data")
    data = har.read_windows(file)
    assert len(data) == 30
    windows = numpy.concatenate([train for (train, _), _ in data.values()])
    assert windows.shape == (7715, 9, 128)
    # Gravity acts on the total acceleration along the first axis, and only there.
    assert windows.mean((0, 2)).round(1).tolist() == pytest.approx([0] * 6 + [0.8, 0, 0.1])
    # Movements are smooth: neighbors in time are alike.
    steps = numpy.diff(windows).std((0, 2)) / windows.std((0, 2))
    assert steps.max() < 0.6
    assert numpy.isfinite(har.make_features(windows[::50])).all()
