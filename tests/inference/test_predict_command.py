"""`mpfedcl predict`: all kinds of image arguments, and unreadable images among others."""

import csv
import io
import json
from pathlib import Path

import numpy
import pytest
from PIL import Image

from command_processes import call
from mpfedcl import InvalidInput, Predictor, run
from small_experiments import Json, Say, small

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("own_places")]


@pytest.fixture(scope="module")
def trained_run(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(small(images, rounds=3), tmp_path_factory.mktemp("runs") / "run").path


@pytest.fixture
def files(images: Path, tmp_path: Path) -> Path:
    """A folder with some test images as files, two of them deeper."""
    folder = tmp_path / "files"
    (folder / "deeper").mkdir(parents=True)
    for number, image in enumerate(numpy.load(images / "stripes.npz")["x_test"][:5]):
        place = folder / "deeper" if number > 2 else folder
        Image.fromarray(image).save(place / f"{number}.png")
    return folder


def lines_of(output: str) -> list[Json]:
    return [json.loads(line) for line in output.splitlines()]


def test_predict_folders_files_and_archives(
    said: Say, trained_run: Path, files: Path, images: Path
) -> None:
    words = [files, files / "1.png", files / "deeper", images / "stripes.npz", "--json"]
    code, output, errors = said("predict", trained_run, *words)
    found = lines_of(output)
    assert code == 0
    assert errors.startswith(
        "No class probabilities: in this run of mp-fedcl the nearest prototype"
    )
    assert errors.count("\n") == 1
    names = [str(Path(each["image"]).name) for each in found]
    assert names[:8] == ["0.png", "1.png", "2.png", "3.png", "4.png", "1.png", "3.png", "4.png"]
    assert names[8:] == [f"stripes.npz[{number}]" for number in range(30)]
    expected = Predictor.load(trained_run).predict(numpy.load(images / "stripes.npz")["x_test"])
    for each, prediction in zip(found[8:], expected, strict=True):
        assert {**each, "image": ""} == {"image": "", **prediction.to_json()}
    for number in range(5):
        assert found[number]["label"] == expected[number].label


def test_predict_paths_on_standard_input(
    said: Say, trained_run: Path, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{files / '2.png'}\n\n{files / 'deeper'}\r\n"))
    code, output, _ = said("predict", trained_run, "-", "--json")
    assert code == 0
    assert [Path(each["image"]).stem for each in lines_of(output)] == ["2", "3", "4"]


def test_table_fits_and_has_a_summary(said: Say, trained_run: Path, files: Path) -> None:
    long = files / ("a-very-long-name-" * 5)
    long.mkdir()
    (files / "0.png").rename(long / "0.png")
    code, output, _ = said("predict", trained_run, files, "--client", "client-1")
    assert code == 0
    assert max(len(line) for line in output.splitlines()) <= 100
    assert "client-1's personalized model" in output
    assert "-name-/0.png" in output
    assert "5 images: " in output
    assert "as for 5.0% of 30 held-out images" in output


def test_unreadable_images_are_named_and_others_predicted(
    said: Say, trained_run: Path, files: Path, tmp_path: Path
) -> None:
    (files / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n cut off")
    (tmp_path / "empty").mkdir()
    numpy.savez(tmp_path / "other.npz", y=numpy.zeros(3))
    numpy.savez(tmp_path / "floats.npz", x=numpy.zeros((3, 6, 6)))
    wrong = [tmp_path / n for n in ("empty", "missing.png", "other.npz", "floats.npz")]
    code, output, errors = said("predict", trained_run, *wrong, files, "--json")
    found = lines_of(output)
    assert code == 3
    assert sum("label" in each for each in found) == 5
    assert sum("error" in each for each in found) == 5
    remark, *sentences = errors.splitlines()
    assert remark.startswith("No class probabilities")
    assert len(sentences) == 5
    for name in ("empty", "missing.png", "other.npz", "floats.npz", "broken.png"):
        assert sum(name in sentence for sentence in sentences) == 1, name
    code, output, errors = said("predict", trained_run, *wrong)
    assert (code, output) == (2, "")
    assert len(errors.splitlines()) == 4


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "IMAGES is missing"),
        (("x.png", "--client", "nobody"), "client is 'nobody'; it must be one of client-0"),
        (("x.png", "--false-alarms", "0.5"), "false_alarms is 0.5; it must be one of 0.001"),
    ],
)
def test_bad_input_is_rejected_in_one_line(
    said: Say, trained_run: Path, words: tuple[str, ...], sentence: str
) -> None:
    code, output, errors = said("predict", trained_run, *words)
    assert (code, output) == (2, "")
    assert sentence in errors
    assert len(errors.splitlines()) == 1


def test_empty_archive_is_accepted(said: Say, trained_run: Path, tmp_path: Path) -> None:
    numpy.savez(tmp_path / "none.npz", x=numpy.zeros((0, 6, 6), numpy.uint8))
    assert said("predict", trained_run, tmp_path / "none.npz")[0] == 0


def test_methods_without_prototypes_print_probabilities(
    said: Say, images: Path, tmp_path: Path, files: Path
) -> None:
    path = run(small(images, "fedavg"), tmp_path / "run").path
    code, output, errors = said("predict", path, files)
    assert code == 0
    assert "probability" in output
    assert "no prototypes" in errors


def test_predict_exit_code_reports_missing_images(trained_run: Path, files: Path) -> None:
    ended = call("predict", trained_run, "0.png", "gone.png", cwd=files)
    assert ended.returncode == 3
    assert "1 images: " in ended.stdout
    assert ended.stderr.count("\n") == 1


def test_csv_file_has_a_row_per_sample_in_order(
    said: Say, trained_run: Path, files: Path, tmp_path: Path
) -> None:
    """Images that cannot be read have an error instead of a label."""
    (files / "1.png").write_bytes(b"no image")
    code, output, _ = said("predict", trained_run, files, "--csv", tmp_path / "out.csv")
    assert code == 3
    assert "out.csv (5 rows)" in output
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    predictor = Predictor.load(trained_run)
    for number, row in enumerate(rows):
        assert Path(row["sample"]).name == f"{number}.png"
        if number == 1:
            assert not row["predicted"]
            assert "cannot be read as an image" in row["error"]
        else:
            (alone,) = predictor.predict(row["sample"])
            assert row["predicted"] == alone.label
            assert float(row["distance"]) == pytest.approx(alone.distance)


def test_table_is_refused_by_a_run_on_images(trained_run: Path) -> None:
    with pytest.raises(InvalidInput, match=r"^samples is a table; only a run on a table takes one"):
        Predictor.load(trained_run).predict([{"a": 1}])
