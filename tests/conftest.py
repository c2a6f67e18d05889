"""What all tests share."""

import gc
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
import torch

import comparison_command
import tuning_command
from browser_fixtures import browser, live, live_server  # noqa: F401  -- fixtures
from command_processes import FORKED_WORKERS, FORKS, CommandProcess, start_server
from command_results import Cli, Refused, Said, assert_one_sentence
from download_server import BrokenServer, run_server
from encoder_experiments import save_pictures
from federation_fixtures import fault_log, federation, shared_federation  # noqa: F401  -- fixtures
from mpfedcl.cli.main import main
from mpfedcl.core.tensors import Tensors
from mpfedcl.models.resnet import ResNet18
from one_shot_fixtures import clients, four, three  # noqa: F401  -- fixtures
from sampled_cases import pytest_collection_modifyitems  # noqa: F401  -- a hook
from small_experiments import EXAMPLES, HIDDEN, Say, VirtualTime, save_images, save_vectors
from unrendered_figures import render, rendered

REPOSITORY = Path(__file__).parents[1]
# Time belongs in benchmarks: an example that takes long on a busy machine is no failure.
# `make soak` tries many more examples.
hypothesis.settings.register_profile("mpfedcl", deadline=None, max_examples=30)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=500)
hypothesis.settings.load_profile(os.environ.get("MPFEDCL_EXAMPLES", "mpfedcl"))
WHOLE = re.compile(r"^pytestmark = .*\bpytest\.mark\.whole\b", re.MULTILINE)
# What is imported and collected stays until the end: to look for garbage in it takes seconds.
gc.disable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without whole runs, import no files of nothing else: half of all, and slow ones."""
    if "not whole" in config.option.markexpr and collection_path.name.startswith("test_"):
        return bool(WHOLE.search(collection_path.read_text())) or None
    return None


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def quick_files() -> Iterator[None]:
    """Nobody pulls the plug here, and waiting for the disk is most of what small runs do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_figures() -> Iterator[None]:
    """Figures are drawn, but not made into pixels: nobody looks at them."""
    render(pixels=False)
    yield
    render(pixels=True)


@pytest.fixture
def rendered_figures() -> Iterator[None]:
    """Somebody looks at them here."""
    with rendered():
        yield


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a tiny image set: one domain, three classes, 60 training and 30 test images."""
    root = tmp_path_factory.mktemp("images")
    save_images(root / "stripes.npz")
    return root


@pytest.fixture(scope="session")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a tiny set of vectors of five numbers: two domains, one in each precision."""
    root = tmp_path_factory.mktemp("vectors")
    save_vectors(root / "north.npz")
    save_vectors(root / "south.npz", dtype="float64")
    return root


@pytest.fixture(scope="session")
def many_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a tiny image set that is enough for fifty clients."""
    root = tmp_path_factory.mktemp("many-images")
    save_images(root / "stripes.npz", num_train=160, num_test=40)
    return root


@pytest.fixture
def example_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods of the examples can be imported, as a user's own."""
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """For whole runs, some hundred of them: a model of a thousand weights unless one is named."""
    monkeypatch.setattr("mpfedcl.models.mlp.HIDDEN_ON_PIXELS", HIDDEN)


@pytest.fixture(scope="module")
def small_models() -> Iterator[None]:
    """The same for all tests of a module and for the runs that they share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpfedcl.models.mlp.HIDDEN_ON_PIXELS", HIDDEN)
        yield


@pytest.fixture
def forked_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs at the same time, in processes that have torch loaded; others start from nothing."""
    # Here, not by the first job: that is started with an interrupt held back, and so would all be.
    start_server()
    forks = SimpleNamespace(get_context=lambda _: FORKS)
    monkeypatch.setattr("mpfedcl.studies.jobs.multiprocessing", forks)


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of a run in this process: forked likewise, where their start is not the point."""
    start_server()
    monkeypatch.setattr("mpfedcl.engines.worker_group.subprocess", FORKED_WORKERS)


@pytest.fixture
def quick_network(example_methods: None, monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """The same for runs over a network, where a round's time passes only while it waits."""
    virtual = VirtualTime()
    monkeypatch.setattr("mpfedcl.network.server.engine.time", virtual)
    monkeypatch.setattr("mpfedcl.network.server.engine.POLL_SECONDS", 1.0)
    monkeypatch.setattr("mpfedcl.network.server.asynchronous.time", virtual)
    monkeypatch.setattr("mpfedcl.rounds.arrivals.time", virtual)
    monkeypatch.setattr("mpfedcl.network.server.registry.POLL_SECONDS", 0.01)
    return virtual


@pytest.fixture(scope="module")
def drawn_once() -> Iterator[None]:
    """For many runs behind a random ResNet-18: its eleven million numbers are drawn once."""
    init, drawn = ResNet18.init, dict[tuple[object, ...], tuple[Tensors, torch.Tensor]]()

    def draw(model: ResNet18, generator: torch.Generator, dtype: torch.dtype) -> Tensors:
        key = (generator.get_state().numpy().tobytes(), dtype, model.feature_size)
        if key not in drawn:
            drawn[key] = init(model, generator, dtype), generator.get_state()
        params, state = drawn[key]
        generator.set_state(state)
        return {name: value.clone() for name, value in params.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResNet18, "init", draw)
        yield


@pytest.fixture
def narrow_resnet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the encoder's size is not the point: ResNet-18 with all its layers, few channels."""
    widths = (4, 6, 8, 10)
    monkeypatch.setattr("mpfedcl.models.resnet._WIDTHS", widths)
    monkeypatch.setattr(ResNet18, "feature_size", widths[-1])


@pytest.fixture
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data and weights but those that a test names, and a cache of its own."""
    monkeypatch.setenv("MPFEDCL_CACHE", str(tmp_path / "cache"))
    for name in ("MPFEDCL_DATA", "MPFEDCL_WEIGHTS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """The root of a tiny set of pictures: three domains, four classes, mixed sizes and colors."""
    root = tmp_path / "pictures"
    save_pictures(root)
    return root


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be in a folder of its own, without a data folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("MPFEDCL_DATA", str(tmp_path / "no data"))


# The command line


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Call the command line in this process."""

    def run_words(*words: object) -> Said:
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        assert isinstance(end.value.code, int)
        return Said(end.value.code, *capsys.readouterr())

    return run_words


@pytest.fixture
def said(cli: Cli) -> Say:
    """The same; return its exit code and what it said."""
    return cli


@pytest.fixture
def refused(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Call the command line, hold it to one sentence and to leaving nothing behind."""

    def run_words(*words: object) -> str:
        if Path.cwd() == REPOSITORY:
            # Others write there meanwhile, and it takes long to list.
            (tmp_path / "nothing").mkdir()
            monkeypatch.chdir(tmp_path / "nothing")
        before = sorted(Path.cwd().rglob("*"))
        sentence = assert_one_sentence(cli(*words))
        assert sorted(Path.cwd().rglob("*")) == before
        return sentence

    return run_words


# Several runs by one command


@pytest.fixture(scope="module")
def compared(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of three methods over two seeds."""
    path = tmp_path_factory.mktemp("comparisons") / "whole"
    with rendered():
        _call(comparison_command.words(images, path))
    return path


@pytest.fixture(scope="module")
def tuned(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search for two methods, five settings each, over four rounds."""
    path = tmp_path_factory.mktemp("searches") / "whole"
    _call(tuning_command.words(images, path))
    return path


def _call(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0


# One run in several processes


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Collects processes; ends those that a failed test leaves behind."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def commands() -> Iterator[list[CommandProcess]]:
    """Collects processes that run commands; ends those that a failed test leaves behind."""
    started: list[CommandProcess] = []
    yield started
    for process in started:
        process.kill()


# Downloads, and sets prepared from them


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses of this machine are reached directly, whatever is set here."""
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def server() -> Iterator[BrokenServer]:
    """A server that has files, or answers as badly as it is told to."""
    with run_server() as running:
        yield running


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The folder of downloads that a set is prepared from."""
    folder = tmp_path / "downloads"
    folder.mkdir()
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The data folder that it is written to."""
    return tmp_path / "data"
