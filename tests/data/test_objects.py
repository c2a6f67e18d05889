"""Data from Python: each form gives the run that the same samples give as files."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import polars
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import mpfedcl
from mpfedcl import Experiment
from mpfedcl.core.errors import InvalidInput, RunWarning
from mpfedcl.core.tensors import load_tensors
from mpfedcl.data.loading import load_data_and_model, load_federated_data
from mpfedcl.data.objects import give, use_objects
from mpfedcl.inference.predictor import Predictor
from mpfedcl.runs.observer import Observer
from mpfedcl.runs.plan import resolve

Pair = tuple[NDArray[Any], NDArray[Any]]
BASE = Experiment(method="fedavg", rounds=2, evaluate_every=1).replace(model__hidden=(6,))


def draw(seed: int, count: int = 30, shape: tuple[int, ...] = (5,), dtype: str = "float32") -> Pair:
    random = numpy.random.default_rng(seed)
    labels = numpy.arange(count) % 3
    if dtype == "uint8":
        return random.integers(0, 256, (count, *shape), numpy.uint8), labels
    return (random.normal(size=(count, *shape)) + labels.reshape(-1, *[1] * len(shape))).astype(
        dtype
    ), labels


class Pairs(Dataset[Any]):
    """A Dataset without `targets`: anything that gives pairs."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y, self.reads = x, y, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        self.reads += 1
        return self.x[row], self.y[row]


class Pictures(Pairs):
    """A Dataset like torchvision's."""

    @property
    def targets(self) -> list[int]:
        return [int(label) for label in self.y]

    @property
    def classes(self) -> list[str]:
        return ["cat", "dog", "eel"]


def save(folder: Path, parts: dict[str, tuple[Pair, Pair | None]]) -> Experiment:
    folder.mkdir()
    for name, (train, test) in parts.items():
        arrays: dict[str, Any] = {"x_train": train[0], "y_train": train[1]}
        if test is not None:
            arrays |= {"x_test": test[0], "y_test": test[1]}
        numpy.savez(folder / f"{name}.npz", **arrays)
    return BASE.replace(dataset__name="folder", dataset__root=folder, encoder__name="none")


def weights(run: Any) -> bytes:
    content: bytes = (run.path / "model.safetensors").read_bytes()
    return content


def refusal(data: Any, experiment: Experiment = BASE, **keywords: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        load_federated_data(resolve(give(experiment, data, **keywords)))
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("shape", "dtype"), [((5,), "float32"), ((2, 3), "float16"), ((6, 6), "uint8")]
)
@pytest.mark.parametrize("has_test", [True, False])
def test_run_by_client_equals_the_run_on_files(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, has_test: bool
) -> None:
    parts: dict[str, tuple[Pair, Pair | None]] = {
        name: (draw(seed, 30, shape, dtype), draw(seed + 9, 12, shape, dtype) if has_test else None)
        for seed, name in enumerate(("south", "north"))
    }
    by_file = save(tmp_path / "files", parts).replace(partition__kind="natural")
    wanted = mpfedcl.run(by_file, tmp_path / "a")
    data = {name: part if has_test else part[0] for name, part in parts.items()}
    found = mpfedcl.run(BASE, tmp_path / "b", data=data)
    assert weights(found) == weights(wanted)
    assert found.summary is not None
    assert wanted.summary is not None
    assert found.summary["accuracy_per_client"] == wanted.summary["accuracy_per_client"]
    x = parts["north"][0][0]
    assert Predictor.load(found.path).predict(x) == Predictor.load(wanted.path).predict(x)


def as_tensors(pair: Pair) -> Any:
    return torch.from_numpy(pair[0]), torch.from_numpy(pair[1])


def as_bfloat16(pair: Pair) -> Any:
    return list(zip(torch.from_numpy(pair[0]).bfloat16(), pair[1].tolist(), strict=True))


def as_subset(pair: Pair) -> Any:
    x, y = pair
    return Subset(Pictures(x[::-1], y[::-1].copy()), list(range(len(x)))[::-1])


@pytest.mark.parametrize(
    "form",
    [
        as_tensors,
        as_subset,
        as_bfloat16,
        lambda pair: TensorDataset(*as_tensors(pair)),
        lambda pair: DataLoader(TensorDataset(*as_tensors(pair)), batch_size=4),
        lambda pair: Pairs(*pair),
        lambda pair: Pairs(torch.from_numpy(pair[0]), torch.from_numpy(pair[1]).reshape(-1, 1)),
        lambda pair: list(zip(*pair, strict=True)),
    ],
)
def test_forms_of_the_same_samples_give_the_same_inputs(form: Any) -> None:
    """Values that every precision has exactly."""
    pairs = {
        name: (numpy.rint(pair[0]), pair[1]) for name, pair in (("a", draw(0)), ("b", draw(1)))
    }
    wanted = load_federated_data(resolve(give(BASE, pairs)))
    found = load_federated_data(resolve(give(BASE, {n: form(pair) for n, pair in pairs.items()})))
    assert torch.equal(found.table.inputs, wanted.table.inputs)
    assert torch.equal(found.table.labels, wanted.table.labels)
    assert torch.equal(found.test_inputs, wanted.test_inputs)


def test_loaders_give_what_they_read_once() -> None:
    def collate(samples: Any) -> Any:
        x, y = zip(*samples, strict=True)
        length = max(map(len, x))
        padded = [numpy.pad(each, (0, length - len(each))) for each in x]
        return torch.from_numpy(numpy.stack(padded)), torch.tensor(y)

    x, y = draw(0)
    other = draw(1)
    series = [(x[n][: 2 + n % 4], int(y[n])) for n in range(len(x))]
    halves: list[Any] = [series[:20], series[20:]]
    padded = [tuple(numpy.asarray(each) for each in collate(some)) for some in halves]
    wanted = load_federated_data(resolve(give(BASE, {"north": tuple(padded), "south": other})))
    loaders: list[Any] = [
        DataLoader(half, batch_size=4, shuffle=True, collate_fn=collate) for half in halves
    ]
    found = load_federated_data(resolve(give(BASE, {"north": tuple(loaders), "south": other})))
    assert torch.equal(found.table.inputs, wanted.table.inputs)
    assert torch.equal(found.test_inputs, wanted.test_inputs)
    chosen = DataLoader(Pairs(x, y), sampler=SubsetRandomSampler([7, 3, 5, 4, 0, 1, 2]))
    rows = [0, 1, 2, 3, 4, 5, 7]
    wanted = load_federated_data(resolve(give(BASE, {"north": (x[rows], y[rows]), "south": other})))
    found = load_federated_data(resolve(give(BASE, {"north": chosen, "south": other})))
    assert torch.equal(found.table.inputs, wanted.table.inputs)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield numpy.zeros(5, "float32"), 0


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda _: DataLoader(Endless()), "is a DataLoader of an IterableDataset; its Dataset mus"),
        (
            lambda d: DataLoader(d, sampler=WeightedRandomSampler([1.0] * len(d), len(d))),
            "is a DataLoader with a WeightedRandomSampler, which does not read each sample once;",
        ),
        (
            lambda d: DataLoader(d, sampler=RandomSampler(d, replacement=True)),
            "is a DataLoader with a RandomSampler, which",
        ),
        (
            lambda d: DataLoader(d, batch_sampler=[[0, 1], [1, 2]]),
            "is a DataLoader with a list, which does not read",
        ),
        (
            lambda d: DataLoader(d, collate_fn=lambda samples: samples[0][1] / "x"),
            "whose collate function fails on all 30 samples at once (TypeError: ",
        ),
        (
            lambda d: DataLoader(d, collate_fn=lambda _: {"x": 1}),
            "whose collate function returns {'x': 1}; it must return a pair (inputs, labels)",
        ),
    ],
)
def test_loaders_that_do_not_read_each_sample_once_are_refused(make: Any, complaint: str) -> None:
    sentence = refusal({"north": make(Pairs(*draw(0))), "south": draw(1)})
    assert sentence.startswith("data['north'] ")
    assert complaint in sentence


def test_labels_from_one_are_noticed(tmp_path: Path) -> None:
    (x, y), (z, w) = draw(0), draw(1)
    from_one = {"a": (x, y + 1), "b": (z, w + 1)}
    told = "The labels are 1 to 3 and never 0, so class 0 is empty: labels count from 0. Subtract 1"
    found = load_federated_data(resolve(give(BASE, from_one)))
    assert found.class_names == ("0", "1", "2", "3")
    assert [each for each in found.notices if each.startswith(told)]
    by_file = save(tmp_path / "files", {"a": ((x, y + 1), (x, y + 1)), "b": ((z, w + 1), None)})
    with pytest.warns(RunWarning, match=told):
        mpfedcl.run(by_file, tmp_path / "run")
    gap = [2 * (each // 2) + 1 for each in (y, w)]
    for data in ({"a": (x, y), "b": (z, w + 1)}, {"a": (x, gap[0]), "b": (z, gap[1])}):
        assert not load_federated_data(resolve(give(BASE, data))).notices
    named = BASE.replace(dataset__classes=("none", "cat", "dog", "eel"))
    assert not load_federated_data(resolve(give(named, from_one))).notices


def test_pictures_of_a_dataset_become_the_images_of_a_file(tmp_path: Path) -> None:
    x, y = draw(0, 30, (6, 6, 3), "uint8")
    wanted = load_federated_data(
        resolve(save(tmp_path / "files", {"data": ((x, y), None)}).replace(clients=2))
    )
    forms: list[Any] = [
        Pictures([Image.fromarray(each) for each in x], y),
        (torch.from_numpy(x).permute(0, 3, 1, 2), y),
        [
            (torch.from_numpy(each).permute(2, 0, 1), int(label))
            for each, label in zip(x, y, strict=True)
        ],
    ]
    for data in forms:
        found = load_federated_data(resolve(give(BASE.replace(clients=2), data)))
        assert torch.equal(found.table.inputs, wanted.table.inputs)
        assert found.partition["input_shape"] == [6, 6, 3]
    first = load_federated_data(resolve(give(BASE.replace(clients=2), forms[0])))
    assert first.class_names == ("cat", "dog", "eel")


def test_pictures_of_a_dataset_pass_an_encoder_like_those_of_an_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPFEDCL_CACHE", str(tmp_path))
    x, y = draw(0, 30, (6, 6), "uint8")
    base = BASE.replace(clients=2, encoder__name="random-filters")
    wanted, found = (
        load_data_and_model(resolve(give(base, data)), torch.device("cpu"))[0]
        for data in ((x, y), Pictures([Image.fromarray(each) for each in x], y))
    )
    assert wanted.table.inputs.shape[1] == 1024
    assert torch.equal(found.table.inputs, wanted.table.inputs)


def test_images_of_several_sizes_need_a_size() -> None:
    images = [Image.new("L", (side, 8), side) for side in range(6, 36)]
    data = Pictures(images, numpy.arange(30) % 3)
    sentence = refusal(data)
    assert "it must have that of the first, [8, 6], or images a size (dataset.im" in sentence
    resized = load_federated_data(
        resolve(give(BASE.replace(clients=2, dataset__image_size=4), data))
    )
    assert resized.partition["input_shape"] == [4, 4]
    images[7] = Image.new("RGB", (6, 8))
    assert "sample 7 has the shape [8, 6, 3]" in refusal(
        data, BASE.replace(clients=2, dataset__image_size=4)
    )


@pytest.mark.parametrize("test", ["shared", "matched"])
def test_one_data_set_is_partitioned_like_a_file(tmp_path: Path, test: str) -> None:
    pair, held_out = draw(0, 60), draw(1, 20)
    settings = {"partition__alpha": 0.5, "partition__test": test, "clients": 3}
    by_file = save(tmp_path / "files", {"data": (pair, held_out)}).replace(**settings)
    wanted = mpfedcl.run(by_file, tmp_path / "a")
    found = mpfedcl.run(BASE.replace(**settings), tmp_path / "b", data=(pair, held_out))
    assert weights(found) == weights(wanted)


def test_given_test_set_is_used_by_default() -> None:
    data = load_federated_data(resolve(give(BASE, (draw(0, 60), draw(1, 20)))))
    assert torch.equal(data.test_inputs, torch.from_numpy(draw(1, 20)[0]))
    assert len(data.table.inputs) == 60


def test_groups_are_natural_clients(tmp_path: Path) -> None:
    (x, y), (x_test, y_test) = draw(0, 40), draw(1, 12)
    groups = numpy.array([f"site {row % 3}" for row in range(40)])
    (tmp_path / "files").mkdir()
    numpy.savez(tmp_path / "files" / "a.npz", x_train=x, y_train=y, clients_train=groups)
    by_file = BASE.replace(
        dataset__name="folder", dataset__root=tmp_path / "files", partition__kind="natural"
    )
    wanted = mpfedcl.run(by_file, tmp_path / "a")
    found = mpfedcl.run(BASE, tmp_path / "b", data=Pairs(x, y), groups=groups.tolist())
    assert weights(found) == weights(wanted)
    # A test set of nobody is everyone's.
    data = load_federated_data(resolve(give(BASE, ((x, y), (x_test, y_test)), groups)))
    assert data.names == ("site 0", "site 1", "site 2")
    assert torch.equal(data.test_inputs, torch.from_numpy(x_test))
    assert [len(client.test) for client in data.clients] == [12, 12, 12]
    assert len(data.table.inputs) == 40


def frame(seed: int) -> polars.DataFrame:
    x, y = draw(seed)
    columns = {f"x{n}": column.tolist() for n, column in enumerate(x.T)}
    columns["word"] = ["low", "high", None] * 10
    return polars.DataFrame({**columns, "kind": [("yes", "no", "yes")[n] for n in y]})


def test_frames_give_the_run_on_the_same_tables(tmp_path: Path) -> None:
    frames = {"north": frame(0), "south": frame(1)}
    (tmp_path / "files").mkdir()
    for name, each in frames.items():
        each.write_parquet(tmp_path / "files" / f"{name}.parquet")
    by_label = BASE.replace(dataset__label="kind")
    by_file = by_label.replace(
        dataset__name="table", dataset__root=tmp_path / "files", partition__kind="natural"
    )
    wanted = mpfedcl.run(by_file, tmp_path / "a")
    found = mpfedcl.run(by_label, tmp_path / "b", data=frames)
    assert weights(found) == weights(wanted)
    by_site = polars.concat(
        each.with_columns(polars.lit(name).alias("site")) for name, each in frames.items()
    )
    column = mpfedcl.run(by_label.replace(dataset__client="site"), tmp_path / "c", data=by_site)
    assert weights(column) == weights(wanted)
    tested = load_federated_data(
        resolve(give(by_label, {n: (each, frame(5)) for n, each in frames.items()}))
    )
    assert [len(client.test) for client in tested.clients] == [30, 30]


def test_partitioner_gives_a_client_for_each_partition() -> None:
    class Partitioner:
        num_partitions = 11

        def load_partition(self, number: int) -> Pair:
            return draw(number, 6)

    data = load_federated_data(resolve(give(BASE, Partitioner())))
    assert data.names == tuple(f"client-{number:02}" for number in range(11))
    assert {len(client.labels) for client in data.clients} == {3}


def test_partitioner_without_data_is_refused_in_one_line() -> None:
    class Partitioner:
        @property
        def num_partitions(self) -> int:
            raise AttributeError("the dataset is not set")

        def load_partition(self, number: int) -> Pair:
            return draw(number, 6)

    assert "data cannot be read (the dataset is not set); it must be a partitioner" in refusal(
        Partitioner()
    )


def test_columns_of_lists_are_refused_unless_they_are_dropped() -> None:
    table = frame(0).with_columns(history=polars.Series([[1, 2]] * frame(0).height))
    experiment = BASE.replace(dataset__label="kind")
    assert "it must be frames with columns of numbers or text" in refusal(table, experiment)
    dropped = experiment.replace(dataset__drop=("history",))
    wanted = load_federated_data(resolve(give(experiment, frame(0))))
    found = load_federated_data(resolve(give(dropped, table)))
    assert torch.equal(found.table.inputs, wanted.table.inputs)


def test_dataset_with_targets_is_not_read_before_inputs_are_made() -> None:
    data = Pictures(*draw(0, 500))
    experiment = resolve(give(BASE, data))
    assert data.reads == 4
    load_federated_data(experiment)
    assert data.reads == 504


def test_run_resumes_with_the_same_objects_only(tmp_path: Path) -> None:
    pairs = {"a": Pairs(*draw(0)), "b": Pairs(*draw(1))}
    whole = mpfedcl.run(BASE.replace(rounds=3), tmp_path / "whole", data=pairs)
    mpfedcl.run(BASE, tmp_path / "part", data=pairs)
    other = {"a": Pairs(*draw(0)), "b": Pairs(*draw(2))}
    with pytest.raises(InvalidInput, match=r"data has the fingerprint .* the same objects"):
        mpfedcl.resume(tmp_path / "part", 3, data=other)
    for seed in range(3):
        give(BASE, {"a": draw(seed), "b": draw(9)})
    with pytest.raises(InvalidInput, match=r"given again: mpfedcl\.resume\(path, data=\.\.\.\)"):
        mpfedcl.resume(tmp_path / "part", 3)
    again = {name: Pairs(each.x, each.y) for name, each in pairs.items()}
    assert weights(mpfedcl.resume(tmp_path / "part", 3, data=again)) == weights(whole)


def test_samples_that_change_with_each_reading_are_announced(tmp_path: Path) -> None:
    class Noisy(Pictures):
        def __getitem__(self, row: int) -> tuple[Any, Any]:
            return self.x[row] + numpy.random.default_rng().normal(size=5), self.y[row]

    told: list[str] = []
    observer = Observer(on_warning=told.append)
    mpfedcl.run(BASE, tmp_path / "run", observer, data=Noisy(*draw(0, 60)))
    assert any("gives other values each time that a sample is read" in each for each in told)


def test_comparison_runs_on_objects_in_this_process(tmp_path: Path) -> None:
    data = {"a": draw(0), "b": draw(1)}
    found = mpfedcl.compare(BASE, ["fedavg", "local"], tmp_path / "both", seeds=[0], data=data)
    assert found.methods == ["fedavg", "local"]
    with pytest.raises(InvalidInput, match="jobs is 2; it must be 1"):
        mpfedcl.compare(BASE, ["fedavg"], tmp_path / "two", seeds=[0], jobs=2, data=data)
    with pytest.raises(InvalidInput, match="workers is 2; it must be 1 or auto"):
        mpfedcl.run(BASE.replace(workers=2), tmp_path / "workers", data=data)


MODULE = """
import numpy

def load():
    random = numpy.random.default_rng(0)
    labels = numpy.arange(40) % 2
    sites = {f"site-{n}": random.normal(size=(40, 2, 3)) + labels[:, None, None] for n in range(4)}
    return {name: (x.astype("float32"), labels) for name, x in sites.items()}

def fail():
    raise KeyError("no such site")

number = 3
"""


@pytest.mark.whole
def test_command_line_takes_a_function_in_any_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    (tmp_path / "own_sites.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(filter(None, sys.path))}")
    flags = [
        "--method",
        "fedavg",
        "--rounds",
        "2",
        "--model.hidden",
        "6",
        "--dataset.name",
        "own_sites:load",
    ]
    for count in ("1", "2"):
        code, _, error = said("run", *flags, "--workers", count, "--out", f"run-{count}")
        assert code == 0, error
    one, two = (load_tensors(Path(f"run-{count}", "model.safetensors")) for count in ("1", "2"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value)
    experiment = Experiment.from_toml(Path("run-2", "experiment.toml"))
    assert (experiment.workers, experiment.partition.kind) == (2, "natural")
    for name, complaint in (
        ("own_sites:fail", f"which fails (KeyError: 'no such site' at {tmp_path}/own_sites.py:11)"),
        ("own_sites:number", "dataset.name is 'own_sites:number'; it must name a function"),
        ("own_sites:absent", "it must name an importable package.module:function"),
    ):
        code, _, error = said("run", "--dataset.name", name, "--out", "other")
        assert (code, error.count("\n")) == (2, 1)
        assert complaint in error


def test_run_on_a_function_resumes_with_the_same_data_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "drawn_sites.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    named = BASE.replace(dataset__name="drawn_sites:load")
    whole = mpfedcl.run(named.replace(rounds=3), tmp_path / "whole")
    part = mpfedcl.run(named, tmp_path / "part")
    assert weights(mpfedcl.resume(part.path, 3)) == weights(whole)
    module = sys.modules["drawn_sites"]
    first = module.load()

    def load() -> Any:
        first["site-1"][0][0, 0, 0] += 1e-6
        return first

    monkeypatch.setattr(module, "load", load)
    with pytest.raises(InvalidInput, match="was started with other data"):
        mpfedcl.resume(part.path, 4)


def test_search_tunes_on_objects(tmp_path: Path) -> None:
    data = {"a": draw(0), "b": draw(1)}
    found = mpfedcl.tune(BASE, "fedavg", tmp_path / "tuned", budget=2, data=data)
    assert found is not None
    assert found.best.dataset.name.startswith("given:")


def test_shown_data_are_those_of_the_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    (tmp_path / "shown_sites.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, out, _ = said("data", "show", "shown_sites:load")
    assert code == 0
    assert "site-3" in out
    assert "samples: arrays of 2 x 3 numbers" in out


def without(pair: Pair, row: int, value: Any) -> Pair:
    x, y = pair[0].copy(), pair[1].copy()
    x[row] = value
    return x, y


@pytest.mark.parametrize(
    ("south", "complaint"),
    [
        (Pairs([], []), "data['south'] has 0 samples; it must have at least 1"),
        (draw(0, 0), "data['south'] has 0 samples and 0 labels; they must be equally many"),
        ((draw(0)[0], [0, 1]), "data['south'] has 30 samples and 2 labels; they must be equally"),
        ((draw(0)[0], numpy.full(30, 0.5)), "data['south'] has labels float64 [30]; they must be"),
        ((draw(0)[0], ["yes"] * 30), "data['south']: labels is ['yes', "),
        ((draw(0)[0], numpy.arange(30) - 3), "data['south'] has the label -3 at 0; labels must be"),
        (without(draw(0), 4, numpy.nan), "data['south'] has nan at [4, 0]; vectors must be finite"),
        (
            Pairs(*without(draw(0), 4, numpy.inf)),
            "data['south'] has inf at [4, 0]; vectors must",
        ),
        (draw(0, shape=(4,)), "data['south'] has vectors of 4 numbers, and data['north'] has vec"),
        (draw(0, 30, (6, 6), "uint8"), "data['south'] has images, and data['north'] has vectors"),
        (
            Pairs([numpy.zeros(5)] * 9 + [numpy.zeros(4)], [0, 1] * 5),
            "data['south'], sample 9 has the shape [4]; it must have that of the first, [5]",
        ),
        (Pairs(["a"] * 5, [0] * 5), "data['south'], sample 0 is 'a'; it must be an array of num"),
        (Pairs(draw(0)[0], [0.5] * 30), "sample 0 has the label 0.5; it must be a whole number"),
        (
            Pairs(draw(0)[0], ["cat"] * 30),
            "sample 0 has the label 'cat'; it must be a whole number",
        ),
        (Pairs(draw(0)[0], [True] * 30), "sample 0 has the label True; it must be a whole number"),
        ([numpy.zeros(5)] * 4, "data['south'], sample 0 is array([0., 0., 0., 0., 0.]); it must"),
        (Pairs(draw(0)[0], [0] * 7), "data['south'] fails when samples 0 to 29 are read (IndexErr"),
        (3, "data['south'] is 3; data must be (x, y) arrays, a torch Dataset"),
        ((draw(0)[0] > 0, draw(0)[1]), "data['south'] has samples bool [5]; they must be float16"),
        ((torch.eye(5).to_sparse(), [0] * 5), "it must be an array of numbers"),
        ((draw(0), draw(0, 30, (4,))), "the test set of data['south'] has vectors of 4 numbers"),
    ],
)
def test_faults_name_the_client_and_the_place(south: Any, complaint: str) -> None:
    assert complaint in refusal({"north": draw(1), "south": south})


def test_labels_outside_the_named_classes_are_located() -> None:
    data = {"a": Pictures(*draw(0)), "b": (draw(1)[0], numpy.arange(30) % 4)}
    assert "data['b'] has the label 3 at 3; labels must be whole numbers from 0 to 2." in refusal(
        data
    )
    named = BASE.replace(dataset__classes=("x", "y"))
    assert "data['a'] has the label 2 at 2; labels must be" in refusal({"a": draw(0)}, named)


def test_dataset_that_changes_after_it_was_opened_is_refused() -> None:
    data = Pictures(list(draw(0)[0]), list(draw(0)[1]))
    experiment = resolve(give(BASE, data))
    data.x = data.x[:20]
    with pytest.raises(InvalidInput, match="data has 20 samples now and had 30; its length"):
        load_federated_data(experiment)
    swapped = Pairs(*draw(0))
    experiment = resolve(give(BASE, swapped))
    swapped.y = (swapped.y + 1) % 3
    with pytest.raises(InvalidInput, match=r"has the label \d, and \d in its targets or before"):
        load_federated_data(experiment)


def test_settings_that_contradict_objects_are_refused() -> None:
    by_client, pair = {"a": draw(0), "b": draw(1)}, draw(0)
    for data, changes, complaint in (
        (by_client, {"partition__kind": "iid"}, "partition.kind is 'iid'; it must be left out"),
        (by_client, {"dataset__name": "mnist"}, "dataset.name is 'mnist'; it must be left out"),
        (by_client, {"dataset__label": "y"}, "dataset.label is 'y'; it must be left out, because"),
        (by_client, {"dataset__client": "y"}, "groups names the client of each sample"),
        ({}, {}, "data is an empty dictionary; it must have at least one client"),
        ({"a/b": pair}, {}, "has the domain 'a/b'; a domain's name must be"),
        ({1: pair, "1": pair}, {}, "data has two clients '1'; each must have a name of its own"),
        (
            frame(0),
            {},
            "dataset.label is not set; tables need it, one of the columns of data: x0, x1",
        ),
    ):
        assert complaint in refusal(data, BASE.replace(**changes))
    assert "groups has 3 names; it must have one for each of the 30" in refusal(
        pair, groups=["a", "b", "c"]
    )
    assert "groups is given; it must be left out" in refusal(by_client, groups=["a"])
    assert "groups is given without data" in refusal(None, groups=["a"])
    matched = BASE.replace(partition__test="matched")
    assert "partition.test is 'matched'; it must be shared" in refusal(
        (pair, pair), matched, groups=["a", "b"] * 15
    )
    assert use_objects(BASE) is BASE


def test_hugging_face_data_sets_are_read_by_the_types_of_their_columns() -> None:
    datasets = pytest.importorskip("datasets")
    x, y = draw(0)
    features = datasets.Features(
        {
            "id": datasets.Value("string"),
            "kind": datasets.ClassLabel(names=["cat", "dog", "eel"]),
            "x": datasets.Sequence(datasets.Value("float32")),
        }
    )
    columns = {"id": [str(n) for n in range(30)], "kind": y.tolist(), "x": x.tolist()}
    found = datasets.Dataset.from_dict(columns, features=features)
    data = load_federated_data(resolve(give(BASE, {"a": found, "b": found})))
    wanted = load_federated_data(resolve(give(BASE, {"a": (x, y), "b": (x, y)})))
    assert torch.equal(data.table.inputs, wanted.table.inputs)
    assert data.class_names == ("cat", "dog", "eel")
    both = datasets.DatasetDict({"train": found, "test": found})
    assert len(load_federated_data(resolve(give(BASE, both))).test_inputs) == 30
    assert "data has the columns id, kind; it must have one of images or" in refusal(
        found.remove_columns("x")
    )
    tokens = {"label": [0, 1] * 5, "input_ids": [[5, 7, 0]] * 10}
    data = load_federated_data(resolve(give(BASE, datasets.Dataset.from_dict(tokens))))
    assert data.table.inputs.dtype == torch.int64
    pictures = [Image.fromarray(each) for each in draw(0, 30, (6, 6), "uint8")[0]]
    drawn = datasets.Dataset.from_dict({"image": pictures, "label": y.tolist()}).cast_column(
        "image", datasets.Image()
    )
    assert load_federated_data(resolve(give(BASE, drawn))).partition["input_shape"] == [6, 6]


def test_pandas_frames_equal_those_of_polars() -> None:
    pandas = pytest.importorskip("pandas")
    experiment = BASE.replace(dataset__label="kind")
    table = frame(0).to_dict(as_series=False)
    wanted = load_federated_data(resolve(give(experiment, frame(0))))
    found = load_federated_data(resolve(give(experiment, pandas.DataFrame(table))))
    assert torch.equal(found.table.inputs, wanted.table.inputs)
    assert found.class_names == ("no", "yes")
    twice = pandas.DataFrame([[1.0, 2.0, "no"]] * 4, columns=["x", "x", "kind"])
    assert "data has two columns 'x'; each must have a name of its own" in refusal(
        twice, experiment
    )
