"""Golden runs: record what runs give, and compare other code with it.

    python tests/golden/golden.py record FOLDER        # tensors of each case, and digests
    python tests/golden/golden.py record FILE.json     # digests only
    python tests/golden/golden.py compare FOLDER|FILE.json [--cases GLOB] [--small]

Models are float64 and compared to 1e-10. Differences that are meant belong into `explained.toml`:

    [[explained]]
    cases = "variant/rule-*"          # by name
    reason = "..."
    tensors = "pool/*"                # optional: what may differ
    within = 1e-6                     # optional: by how much
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "helpers"), str(HERE.parent / "network")]

import numpy
import torch
from golden_cases import SMALL, Case, choose
from numpy.typing import NDArray
from PIL import Image
from safetensors.numpy import load_file, save_file

import mpfedcl
from command_processes import FORKED_WORKERS, CommandProcess, start_server
from small_experiments import VirtualTime
from unrendered_figures import render

Array = NDArray[numpy.float64]
Numbers = dict[str, float | None]

# --- Adapter: all that depends on names in the package. A renaming is followed here only. ---

SETTING_NAMES: dict[str, str] = {}
"""Settings and sections as the cases name them, if `Experiment` has other names."""
SETTING_VALUES: dict[tuple[str, Any], Any] = {}
TEST_SETS = {"local_test": "local_test", "global_test": "global_test"}
"""Test sets as they are stored, and as `summary.json` names them."""
PREDICTORS = "predictors"
"""The key of accuracies by predictor in `summary.json`."""
WIDTHS = (4, 6, 8, 10)
CLOCK = VirtualTime()
PATCHES: dict[str, Any] = {
    # Rounds over a network take no time, as with the fixture `quick_network`.
    "mpfedcl.network.server.engine:time": CLOCK,
    "mpfedcl.network.server.engine:POLL_SECONDS": 1.0,
    "mpfedcl.network.server.asynchronous:time": CLOCK,
    "mpfedcl.rounds.arrivals:time": CLOCK,
    "mpfedcl.network.server.registry:POLL_SECONDS": 0.01,
    # Workers are forked from a process that has torch loaded.
    "mpfedcl.engines.worker_group:subprocess": FORKED_WORKERS,
    # A ResNet-18 with few channels.
    "mpfedcl.models.resnet:_WIDTHS": WIDTHS,
    "mpfedcl.models.resnet:ResNet18.feature_size": WIDTHS[-1],
    "mpfedcl.models.encoders.torch_encoders:ResNetEncoder.feature_size": WIDTHS[-1],
}
"""What makes runs quick, by module and attribute. None of it changes a result but the widths."""


def neutral_predictor(name: str) -> str:
    return name.replace("averaged", "global")


def neutral_tensor(name: str) -> str:
    """Return the name under which a tensor of the package's files is stored."""
    return name


def make_experiment(method: str, settings: Mapping[str, Any]) -> mpfedcl.Experiment:
    found = {}
    for name, value in settings.items():
        section, separator, _ = name.partition("__")
        known = SETTING_NAMES.get(name) or name.replace(
            section + separator, SETTING_NAMES.get(section + separator, section + separator), 1
        )
        found[known] = SETTING_VALUES.get((name, value), value)
    return mpfedcl.Experiment(method=method).replace(**found)


def run_over_network(experiment: mpfedcl.Experiment, folder: Path, count: int) -> Path:
    """Run a federation over the loopback grid; return the server's run directory."""
    from federations import LoopbackFederation

    # The recorded run has a larger budget than clients allow by default.
    policy = {"budget": {"max_epsilon_per_run": 10.0}}
    federation = LoopbackFederation(experiment, folder, count=count, policy=policy)
    return federation.serve().path


def read_client_models(folder: Path, count: int) -> dict[str, dict[str, Array]]:
    """Return what the first and the last client of a federation keep, by client."""
    found = {}
    for number in (0, count - 1):
        files = sorted((folder / f"memory-{number}").glob("*/round-*.safetensors"))
        kept = load_file(files[-1]) if files else {}
        prefix = "personal/"
        model = {k.removeprefix(prefix): v for k, v in kept.items() if k.startswith(prefix)}
        found[f"client-{number}"] = model
    return found


def read_run(path: Path) -> tuple[dict[str, dict[str, Array]], Numbers]:
    """Return the tensors of a run directory by kind, and its accuracies and loss."""
    models = sorted((path / "models").glob("*.safetensors"))
    files = {
        "global_model": path / "model.safetensors",
        "pool": path / "pool.safetensors",
        "statistics": path / "statistics.safetensors",
        **{f"personalized_model/{each.stem}": each for each in {*models[:1], *models[-1:]}},
    }
    tensors = {kind: load_file(file) for kind, file in files.items() if file.exists()}
    summary = json.loads((path / "summary.json").read_bytes())
    numbers: Numbers = {
        f"accuracy/{test}/{neutral_predictor(name)}": value
        for test, key in TEST_SETS.items()
        for name, value in summary[PREDICTORS][key].items()
    }
    numbers["loss"] = summary["loss"]
    numbers["epsilon_spent"] = (summary["privacy"] or {}).get("spent")
    return tensors, numbers


# --- Data: the same on every machine ---

NUM_CLASSES, SIDE = 3, 6
COMMON: dict[str, Any] = {
    "rounds": 3,
    "clients": 4,
    "dtype": "float64",
    "dataset__name": "folder",
    "encoder__name": "none",
    "partition__alpha": 0.5,
    "partition__test": "matched",
    "prototypes__per_class": 2,
    "train__batch_size": 8,
    "train__lr": 0.1,
    "model__hidden": (24, 12),
    "validation__bounds": "off",
    "workers": 1,
    "evaluate_every": 1,
    "evaluate_predictors": "all",
}
NETWORK = {"network__round_timeout": 30.0, "network__patience": 5.0}
MOST_SECONDS = 120


def write_data(kind: str, folder: Path) -> Path:
    """Write a data set into a new folder; return what `dataset.root` is for it."""
    folder.mkdir()
    draw = random.Random(7)
    if kind == "images":
        _write_domain(folder / "stripes.npz", draw, 96, 48)
    elif kind == "vectors":
        for domain in ("east", "north", "south"):
            _write_vectors(folder / f"{domain}.npz", draw)
    elif kind == "table":
        rows = ["age,weight,group,clinic,diagnosis"]
        for number in range(120):
            label = draw.randrange(NUM_CLASSES)
            age, weight = 30 + 9 * label + 12 * draw.random(), 60 + 20 * draw.random()
            group = draw.choice("abc"[: 1 + label])
            rows.append(f"{age:.3f},{weight:.3f},{group},clinic-{number % 3},kind-{label}")
        file = folder / "clinics.csv"
        file.write_text("\n".join(rows) + "\n")
        return file
    else:
        for domain in ("ink", "paint"):
            for label in range(NUM_CLASSES):
                (folder / domain / f"class-{label}").mkdir(parents=True)
                for number in range(6):
                    pixels = _draw_pixels(draw, 24)
                    pixels[label * 6 : label * 6 + 6] += 100
                    file = folder / domain / f"class-{label}" / f"{number}.png"
                    Image.fromarray(pixels).save(file)
    return folder


def _draw_pixels(draw: random.Random, side: int) -> NDArray[numpy.uint8]:
    values = [draw.randrange(120) for _ in range(side * side)]
    return numpy.array(values, dtype=numpy.uint8).reshape(side, side)


def _write_domain(path: Path, draw: random.Random, num_train: int, num_test: int) -> None:
    labels = numpy.arange(num_train + num_test) % NUM_CLASSES
    images = numpy.stack([_draw_pixels(draw, SIDE) for _ in labels])
    images[numpy.arange(len(labels)), labels] += 70
    _save(path, images, labels, num_train)


def _write_vectors(path: Path, draw: random.Random) -> None:
    labels = numpy.arange(60) % NUM_CLASSES
    shift = [draw.uniform(-1, 1) for _ in range(5)]
    vectors = numpy.array([[draw.uniform(-1, 1) + each for each in shift] for _ in labels])
    vectors[numpy.arange(len(labels)), labels] += 1
    _save(path, vectors, labels, 42)


def _save(path: Path, samples: NDArray[Any], labels: NDArray[Any], num_train: int) -> None:
    train, test = slice(num_train), slice(num_train, None)
    numpy.savez(
        path,
        x_train=samples[train],
        y_train=labels[train],
        x_test=samples[test],
        y_test=labels[test],
    )


# --- Runs ---


@dataclass(frozen=True)
class Outcome:
    """What a run has left, in float64."""

    tensors: dict[str, Array]
    numbers: Numbers

    def sha256(self) -> str:
        """Return one hash of all tensors."""
        told = "".join(f"{name} {hash_of(self.tensors[name])}\n" for name in sorted(self.tensors))
        return hashlib.sha256(told.encode()).hexdigest()


class CannotRunError(Exception):
    """A case that ends with an error, in one line."""


class Runner:
    """Runs cases one after another in this process; use it as a context manager."""

    def __init__(self) -> None:
        self._exits = contextlib.ExitStack()
        self._roots: dict[str, Path] = {}

    def __enter__(self) -> "Runner":
        enter = self._exits.enter_context
        self._folder = Path(enter(tempfile.TemporaryDirectory(prefix="golden-")))
        environment = {"MPFEDCL_CACHE": str(self._folder / "cache"), "OMP_NUM_THREADS": "1"}
        enter(mock.patch.dict(os.environ, environment))
        os.environ.pop("MPFEDCL_DATA", None)
        enter(mock.patch("os.fsync"))
        enter(_known_noise())
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._exits.callback(torch.set_num_threads, threads)
        with _silence():
            start_server()
        for target, value in PATCHES.items():
            module, _, attribute = target.partition(":")
            *outer, name = attribute.split(".")
            # What is gone after a change of the package made runs quick, no more.
            with contextlib.suppress(ImportError, AttributeError):
                owner: Any = importlib.import_module(module)
                for each in outer:
                    owner = getattr(owner, each)
                getattr(owner, name)
                enter(mock.patch.object(owner, name, value))
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def run(self, case: Case) -> Outcome:
        """Run a case; raise `CannotRunError` if it ends with an error."""
        folder = self._folder / "case"
        folder.mkdir()
        try:
            with _time_limit(MOST_SECONDS):
                return self._run(case, folder)
        except Exception as error:
            told = " ".join(str(error).split())
            raise CannotRunError(f"{type(error).__name__}: {told}"[:300]) from error
        finally:
            shutil.rmtree(folder)

    def _run(self, case: Case, folder: Path) -> Outcome:
        if case.data not in self._roots:
            self._roots[case.data] = write_data(case.data, self._folder / case.data)
        settings = COMMON | {"dataset__root": self._roots[case.data]} | dict(case.settings)
        count = settings["clients"]
        if case.kind == "loopback":
            experiment = make_experiment(case.method, settings | NETWORK)
            found, numbers = read_run(run_over_network(experiment, folder, count))
            for name, model in read_client_models(folder, count).items():
                found[f"personalized_model/{name}"] = model
            return _flatten(found, numbers)
        experiment = make_experiment(case.method, settings)
        whole = _flatten(*read_run(mpfedcl.run(experiment, folder / "run").path))
        if case.kind == "simulation":
            return whole
        resumed = _flatten(*read_run(_kill_and_resume(experiment, folder)))
        if resumed.sha256() != whole.sha256() or resumed.numbers != whole.numbers:
            raise AssertionError("the resumed run differs from the uninterrupted one")
        return resumed


def _flatten(found: Mapping[str, Mapping[str, NDArray[Any]]], numbers: Numbers) -> Outcome:
    tensors = {
        f"{kind}/{neutral_tensor(name)}": numpy.asarray(value, dtype=numpy.float64)
        for kind, held in found.items()
        for name, value in held.items()
    }
    return Outcome(tensors, numbers)


def _kill_and_resume(experiment: mpfedcl.Experiment, folder: Path) -> Path:
    """Kill a process that runs an experiment once it has recorded a round, and resume the run."""
    (folder / "settings.toml").write_text(experiment.to_toml())
    for attempt in range(10):
        path = folder / f"killed-{attempt}"
        records = path / "rounds.jsonl"
        process = CommandProcess(["run", folder / "settings.toml", "--out", path], folder)
        while process.poll() is None and not (records.exists() and b"\n" in records.read_bytes()):
            time.sleep(0.0005)
        process.kill()
        _, errors = process.communicate()
        if process.returncode == -signal.SIGKILL:
            return mpfedcl.resume(path).path
        if process.returncode:
            raise AssertionError(errors.strip())
    raise AssertionError("ten runs ended before they could be killed")


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Let processes that are started meanwhile print nothing."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    kept = {stream: os.dup(stream) for stream in (1, 2)}
    for stream in kept:
        os.dup2(nothing, stream)
    try:
        yield
    finally:
        os.close(nothing)
        for stream, copy in kept.items():
            os.dup2(copy, stream)
            os.close(copy)


@contextlib.contextmanager
def _known_noise() -> Iterator[None]:
    """Draw privacy's noise, which no seed fixes, from known generators: by deviation and size."""
    import opendp.prelude

    make_generator = numpy.random.default_rng

    def known_generator(*seed: Any) -> numpy.random.Generator:
        return make_generator(*(seed or (7,)))

    def known_gaussian(*_: Any, scale: float) -> Callable[[list[float]], list[float]]:
        def add(values: list[float]) -> list[float]:
            draw = random.Random(len(values))
            return [each + scale * draw.gauss(0.0, 1.0) for each in values]

        return add

    with (
        mock.patch.object(numpy.random, "default_rng", known_generator),
        mock.patch.object(opendp.prelude.m, "make_gaussian", known_gaussian),
    ):
        yield


@contextlib.contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    def end(_: int, __: FrameType | None) -> None:
        raise TimeoutError(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# --- What is stored ---

TOLERANCE = 1e-10
FIRST_VALUES = 4
WHOLE = "/*"
"""Ends the name of a digest of all tensors of a kind, one after the other."""


def hash_of(tensor: Array) -> str:
    return hashlib.sha256(f"{tensor.shape}".encode() + tensor.tobytes()).hexdigest()


def digest(tensor: Array) -> str:
    """Return shape, sum, sum of squares, a projection and the first values, in 13 digits."""
    flat = tensor.ravel().tolist()
    projection = math.fsum(each * math.sin(1 + n) for n, each in enumerate(flat))
    sums = (math.fsum(flat), math.fsum(each * each for each in flat), projection)
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return " ".join([shape, *(f"{each:.13g}" for each in (*sums, *flat[:FIRST_VALUES]))])


def relative_difference(found: Array, wanted: Array | str) -> float:
    """Return the norm of the difference divided by the norm; of a digest, the largest estimate."""
    if isinstance(wanted, str):
        return _digest_difference(digest(found), wanted)
    if found.shape != wanted.shape:
        return math.inf
    if numpy.array_equal(found, wanted, equal_nan=True):
        return 0.0
    return _ratio(float(numpy.linalg.norm(found - wanted)), float(numpy.linalg.norm(wanted)))


def _digest_difference(found: str, wanted: str) -> float:
    if found == wanted:
        return 0.0
    ours, theirs = found.split(), wanted.split()
    if ours[0] != theirs[0]:
        return math.inf
    left, right = ([float(each) for each in words[1:]] for words in (ours, theirs))
    norm = math.sqrt(right[1])
    apart = [abs(a - b) for a, b in zip(left, right, strict=True)]
    squares = _ratio(apart.pop(1) / 2, right[1])
    return max(squares, *(_ratio(each, norm) for each in apart))


def _ratio(difference: float, scale: float) -> float:
    if math.isnan(difference):
        return math.inf
    return difference / scale if scale else difference


@dataclass(frozen=True)
class Golden:
    """A recorded result: whole tensors, or digests of them."""

    tensors: Mapping[str, Array | str]
    numbers: Numbers
    sha256: str

    def differences(self, found: Outcome) -> dict[str, float]:
        """Return relative differences by name of tensor or number; infinite if one is missing."""
        result: dict[str, float] = {}
        ours = join_tensors(found.tensors, [n for n in self.tensors if n.endswith(WHOLE)])
        for name in {*self.tensors, *ours}:
            both = name in self.tensors and name in ours
            result[name] = relative_difference(ours[name], self.tensors[name]) if both else math.inf
        for name in {*self.numbers, *found.numbers}:
            wanted, value = self.numbers.get(name), found.numbers.get(name)
            if wanted is None or value is None:
                result[name] = 0.0 if wanted is value else math.inf
            else:
                result[name] = _ratio(abs(value - wanted), abs(wanted))
        return result


def join_tensors(tensors: Mapping[str, Array], wholes: Iterable[str]) -> dict[str, Array]:
    """Return the tensors, those of the given kinds flat and one after the other."""
    result = dict(tensors)
    for whole in wholes:
        parts = [name for name in sorted(result) if name.startswith(whole.removesuffix("*"))]
        if parts:
            result[whole] = numpy.concatenate([result.pop(name).ravel() for name in parts])
    return result


def write_folder(folder: Path, case: Case, outcome: Outcome) -> None:
    file = folder / f"{case.name}.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: each.copy() for name, each in outcome.tensors.items()}, file)
    hashes = {name: hash_of(each) for name, each in sorted(outcome.tensors.items())}
    told = {"numbers": outcome.numbers, "sha256": hashes}
    file.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")


def write_digests(file: Path, outcomes: Mapping[Case, Outcome]) -> None:
    """Write the digests of all cases; of those like another, only what differs from it."""
    by_name = {case.name: outcome for case, outcome in outcomes.items()}
    cases = {}
    for case, outcome in outcomes.items():
        base = by_name.get(case.like or "")
        # Models of clients, and all but the cases of `make test`, are told by file.
        wholes = {
            f"{name.rpartition('/')[0]}{WHOLE}"
            for name in {*outcome.tensors, *(base.tensors if base else ())}
            if (case.like or case.name) not in SMALL or name.startswith("personalized_model/")
        }
        told: dict[str, Any] = {"sha256": outcome.sha256()}
        tensors = join_tensors(outcome.tensors, wholes)
        numbers = {name: each for name, each in outcome.numbers.items() if each is not None}
        if base is not None:
            told["like"] = case.like
            theirs = join_tensors(base.tensors, wholes)
            same = Golden(theirs, base.numbers, "").differences(Outcome(tensors, outcome.numbers))
            apart = {name for name, each in same.items() if each > TOLERANCE / 10}
            told["without"] = sorted(apart - tensors.keys() - numbers.keys())
            tensors = {name: each for name, each in tensors.items() if name in apart}
            numbers = {name: each for name, each in numbers.items() if name in apart}
        told["tensors"] = {name: digest(each) for name, each in sorted(tensors.items())}
        cases[case.name] = told | {"numbers": {n: float(f"{v:.12g}") for n, v in numbers.items()}}
    file.parent.mkdir(parents=True, exist_ok=True)
    versions = {"torch": torch.__version__, "numpy": numpy.__version__}
    document = {"format": 1, "versions": versions, "cases": cases}
    file.write_text(json.dumps(document, indent=0) + "\n")


def read_golden(path: Path) -> Callable[[Case], Golden | None]:
    """Return what gives the recorded result of a case from a folder or a file of digests."""
    if path.is_dir():
        return lambda case: _read_case(path / f"{case.name}.safetensors")
    cases = json.loads(path.read_bytes())["cases"]

    def find(case: Case) -> Golden | None:
        told = cases.get(case.name)
        if told is None:
            return None
        base = cases.get(told.get("like"), {"tensors": {}, "numbers": {}})
        gone = told.get("without", [])
        tensors, numbers = (
            {name: each for name, each in base[kind].items() if name not in gone} | told[kind]
            for kind in ("tensors", "numbers")
        )
        return Golden(tensors, numbers, told["sha256"])

    return find


def _read_case(file: Path) -> Golden | None:
    if not file.exists():
        return None
    numbers = json.loads(file.with_suffix(".json").read_bytes())["numbers"]
    tensors = load_file(file)
    return Golden(tensors, numbers, Outcome(tensors, numbers).sha256())


# --- Comparison ---


@dataclass(frozen=True)
class Explanation:
    """A difference that is meant."""

    cases: str
    reason: str
    within: float = math.inf
    """The largest relative difference that is explained."""
    tensors: str = "*"
    """Which tensors and numbers may differ; others must be equal."""


def read_explanations(file: Path) -> list[Explanation]:
    """Return the entries `[[explained]]` of a TOML file, if there is one."""
    if not file.exists():
        return []
    return [Explanation(**entry) for entry in tomllib.loads(file.read_text())["explained"]]


@dataclass
class Verdict:
    """What the comparison of one case gave."""

    status: str
    case: str
    remark: str = ""

    FAILURES = ("DIFFERS", "cannot run")

    @property
    def is_failure(self) -> bool:
        return self.status in self.FAILURES

    def __str__(self) -> str:
        return f"{self.status:15} {self.case:32} {self.remark}".rstrip()


@dataclass
class Comparison:
    """Compares cases with what was recorded."""

    find: Callable[[Case], Golden | None]
    explanations: Sequence[Explanation] = ()
    used: set[Explanation] = field(default_factory=set)

    def compare(self, case: Case, runner: Runner) -> Verdict:
        golden = self.find(case)
        if golden is None:
            return Verdict("not recorded", case.name)
        try:
            found = runner.run(case)
        except CannotRunError as error:
            return self._explained(
                case, {"": math.inf}, Verdict("cannot run", case.name, f"{error}")
            )
        differences = golden.differences(found)
        worst, size = max(differences.items(), key=lambda each: each[1])
        remark = f"{size:.1e} at {worst}"
        if found.sha256() == golden.sha256 and size <= TOLERANCE:
            return Verdict("equal bits", case.name)
        if size <= TOLERANCE:
            return Verdict("equal to 1e-10", case.name, remark)
        apart = {name: each for name, each in differences.items() if each > TOLERANCE}
        remark += f" (and {len(apart) - 1} more)" if len(apart) > 1 else ""
        return self._explained(case, apart, Verdict("DIFFERS", case.name, remark))

    def _explained(self, case: Case, apart: Mapping[str, float], verdict: Verdict) -> Verdict:
        reasons: dict[Explanation, None] = {}
        for name, size in apart.items():
            found = next((e for e in self.explanations if _explains(e, case, name, size)), None)
            if found is None:
                return verdict
            reasons[found] = None
        if reasons:
            self.used.update(reasons)
            why = "; ".join(each.reason for each in reasons)
            return Verdict("explained", case.name, f"{verdict.remark}; {why}")
        return verdict


def _explains(each: Explanation, case: Case, name: str, size: float) -> bool:
    is_named = not name or fnmatchcase(name, each.tensors)
    return fnmatchcase(case.name, each.cases) and size <= each.within and is_named


def summarize(verdicts: Iterable[Verdict]) -> str:
    counts: dict[str, int] = {}
    for verdict in verdicts:
        counts[verdict.status] = counts.get(verdict.status, 0) + 1
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def record(cases: Sequence[Case], path: Path) -> int:
    outcomes: dict[Case, Outcome] = {}
    failed = 0
    with Runner() as runner:
        for case in cases:
            try:
                outcomes[case] = runner.run(case)
            except CannotRunError as error:
                failed += 1
                print(f"{'cannot run':15} {case.name:32} {error}", flush=True)
                continue
            if path.suffix != ".json":
                write_folder(path, case, outcomes[case])
    write_digests(path if path.suffix == ".json" else path / "golden.json", outcomes)
    print(f"{len(outcomes)} recorded, {failed} cannot run")
    return int(failed > 0)


def compare(cases: Sequence[Case], path: Path) -> int:
    comparison = Comparison(read_golden(path), read_explanations(HERE / "explained.toml"))
    verdicts = []
    with Runner() as runner:
        for case in cases:
            verdicts.append(comparison.compare(case, runner))
            print(verdicts[-1], flush=True)
    for each in comparison.explanations:
        if each not in comparison.used:
            print(f"nothing to explain: {each.cases} ({each.reason})")
    print(summarize(verdicts))
    return int(any(each.is_failure for each in verdicts))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("path", type=Path, help="a folder, or a .json file of digests only")
    parser.add_argument("--cases", default="*", help="only cases whose names match this glob")
    parser.add_argument("--small", action="store_true", help="only the cases of make test")
    given = parser.parse_args()
    render(pixels=False)
    cases = choose(given.cases, small=given.small)
    return {"record": record, "compare": compare}[given.command](cases, given.path)


if __name__ == "__main__":
    sys.exit(main())
