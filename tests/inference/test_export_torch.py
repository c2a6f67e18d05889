"""Files of torch.export predict as their runs do, in a process without mpfedcl."""

import json
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from exported_answers import ask, operators_are_listed_once  # noqa: F401  -- a fixture
from numpy.typing import NDArray

import mpfedcl
from command_processes import environment
from mpfedcl import InvalidInput, RunResult
from mpfedcl.models.networks import ResNet
from own_models import Series
from small_experiments import Say

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("drawn_once", "own_places")]

LOAD_ALL = """
import json, sys
from pathlib import Path

import numpy, torch

class Forbid:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("mpfedcl", "own_models"):
            raise ImportError(name)

sys.meta_path.insert(0, Forbid())
for file in sorted(Path(sys.argv[1]).glob("*.pt2")):
    extra = {"mpfedcl": ""}
    program = torch.export.load(file, extra_files=extra).module()
    samples = torch.from_numpy(numpy.load(file.with_suffix(".npy")))
    found = [program(samples), program(samples[:1])]
    assert torch.equal(found[0][0][:1], found[1][0])
    torch.testing.assert_close(found[0][-1][:1], found[1][-1])
    names = list(json.loads(extra["mpfedcl"])["outputs"])
    arrays = {name: each.numpy() for name, each in zip(names, found[0], strict=True)}
    numpy.savez(file.with_suffix(".npz"), **arrays)
"""


def pixels(*shape: int) -> NDArray[numpy.uint8]:
    return numpy.random.default_rng(3).integers(0, 256, (48, *shape), dtype=numpy.uint8)


def train(path: Path, method: str, samples: NDArray[Any], **settings: Any) -> RunResult:
    data = (samples, numpy.arange(len(samples)) % 3)
    own: dict[str, Any] = {"clients": 2, "partition": {"kind": "iid"}, **settings}
    return mpfedcl.run(method, path, data=data, rounds=1, progress=False, **own)


CASES: dict[str, tuple[str, NDArray[Any], dict[str, Any]]] = {
    "mlp": ("fedavg", pixels(6, 6), {"model": {"hidden": (5,)}}),
    "cnn": ("fedavg", pixels(8, 8, 3), {"model": {"name": "cnn", "hidden": (5,)}}),
    "resnet": ("fedavg", pixels(8, 8, 3), {"model": partial(ResNet, widths=(4, 8), blocks=1)}),
    "series": ("fedavg", pixels(3, 7).astype("float32"), {"model": Series}),
    "prototypes": ("mp-fedcl", pixels(6, 6), {"model": {"hidden": (5,)}}),
    "gauss": ("fedgauss", pixels(8, 8, 3), {"encoder": {"name": "random-filters"}}),
}


@pytest.mark.thorough
def test_files_predict_without_mpfedcl(tmp_path: Path) -> None:
    runs = {}
    for name, (method, samples, settings) in CASES.items():
        runs[name] = run = train(tmp_path / "runs" / name, method, samples, **settings)
        made = mpfedcl.export(run, tmp_path / f"{name}.pt2")
        assert made.note["checked"]["labels_differ"] == 0
        assert made.note["input"]["shape"] == ["batch", *samples.shape[1:]]
        numpy.save(tmp_path / f"{name}.npy", samples)
        with zipfile.ZipFile(made.path) as archive:
            parts = {each: archive.read(each) for each in archive.namelist()}
        # Nothing that torch reads by pickle, and no paths of code.
        assert not parts["archive/data/sample_inputs/model.pt"]
        texts = b"".join(part for each, part in parts.items() if each.endswith(".json"))
        assert b'"use_pickle": true' not in texts
        for place in (str(Path(torch.__file__).parent), str(Path.cwd()), "own_models"):
            assert place.encode() not in texts
    ended = subprocess.run(
        [sys.executable, "-c", LOAD_ALL, str(tmp_path)],
        capture_output=True, text=True, env=environment(), cwd=tmp_path, check=False, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    for name, run in runs.items():
        found = numpy.load(tmp_path / f"{name}.npz")
        predictor, samples = run.predictor(), CASES[name][1]
        said = predictor.predict(samples)
        if predictor.has_prototypes:
            assert name == "prototypes"
            assert found["distance"] == pytest.approx([each.distance for each in said], abs=1e-5)
            sure = [n for n, each in enumerate(said) if (each.margin or 1) > 1e-5]
        else:
            wanted = predictor.probabilities(samples).numpy()
            assert found["scores"] == pytest.approx(wanted, abs=1e-5)
            best = numpy.sort(wanted, axis=1)
            sure = numpy.flatnonzero(best[:, -1] - best[:, -2] > 1e-5).tolist()
        assert len(sure) > len(samples) / 2
        labels = [predictor.class_names[n] for n in found["label"]]
        assert [labels[n] for n in sure] == [said[n].label for n in sure]


def test_onnx_files_take_series_in_their_shape(tmp_path: Path) -> None:
    method, samples, settings = CASES["series"]
    run = train(tmp_path / "run", method, samples, **settings)
    answers, note = ask(mpfedcl.export(run).path, samples)
    assert note["input"]["shape"] == ["batch", 3, 7]
    wanted = run.predictor().probabilities(samples).numpy()
    assert answers["scores"] == pytest.approx(wanted, abs=1e-5)


def test_suffix_of_the_file_chooses_the_format(tmp_path: Path, said: Say) -> None:
    method, samples, settings = CASES["mlp"]
    run = train(tmp_path / "run", method, samples, **settings)
    code, output, _ = said("export", run.path, "--out", tmp_path / "m.pt2", "--json")
    assert code == 0
    extra = {"mpfedcl": ""}
    torch.export.load(tmp_path / "m.pt2", extra_files=extra)
    told = json.loads(output)
    assert json.loads(extra["mpfedcl"]).items() <= told.items()
    with pytest.raises(InvalidInput, match=r"m\.pt'; its name must end in \.onnx, or in \.pt2"):
        mpfedcl.export(run, tmp_path / "m.pt")
    assert not (tmp_path / "m.pt").exists()
