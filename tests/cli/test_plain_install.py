"""Without any extra, as `pip install mpfedcl` leaves it: what runs, and what names its extra."""

import json
import os
import subprocess
import sys

import pytest

from command_results import Said, assert_one_sentence
from plain_install import hide_extras

pytestmark = pytest.mark.whole

SMALL = "--rounds 1 --clients 3 --dataset.train-size 60 --model.hidden 8"
WORKING = (
    f"run {SMALL} --method mp-fedcl --out run",
    f"run {SMALL} --method fedgauss --out one-shot",
    f"compare {SMALL} --methods fedavg local --seeds 0 --out both",
    f"tune {SMALL} --methods fedavg --budget 2 --out search",
    "privacy plan --epsilon 1",
    "privacy receipt run --share 0",
    "report both",
    "methods",
)
REFUSED = {
    f"run {SMALL} --method fedavg --secure-aggregation": "flower",
    f"run {SMALL} --method fedgauss --privacy.epsilon 1": "privacy",
    f"run {SMALL} --track tensorboard": "tensorboard",
    f"run {SMALL} --track mlflow": "mlflow",
    "federation init lab --clients 2": "flower",
    "export run": "onnx",
    "watch run": "watch",
}
PROGRAM = """\
import contextlib, io, json, sys, traceback
from mpfedcl.cli.main import main

for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if words == "mpfedcl.run":
                import mpfedcl
                base = mpfedcl.Experiment(rounds=1, clients=2, model={"hidden": [8]})
                print(mpfedcl.run(base, out="from-python").accuracy)
                sys.exit()
            main(words.split())
        except SystemExit as end:
            code = end.code or 0
        except Exception:
            code = 1
            traceback.print_exc()
    print(json.dumps([words, code, out.getvalue(), err.getvalue()]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    """What each command says, all of them in one process that finds no module of an extra."""
    folder = tmp_path_factory.mktemp("plain")
    hidden = hide_extras(folder / "hidden")
    # Otherwise the test would pass because it hides nothing, or nothing more.
    assert {"Crypto", "cryptography", "flwr", "onnx", "onnxruntime", "opendp"} <= {*hidden}
    assert {"dp_accounting", "starlette", "tensorboard", "mlflow", "polars"} <= {*hidden}
    assert not {"torch", "numpy", "scipy", "sklearn", "httpx", "mpfedcl"} & {*hidden}
    words = json.dumps([*WORKING, "mpfedcl.run", *REFUSED])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "hidden"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {command: Said(*said) for command, *said in lines}


@pytest.mark.parametrize("command", [*WORKING, "mpfedcl.run"])
def test_command_works_without_extras(answers: dict[str, Said], command: str) -> None:
    assert answers[command].code == 0, answers[command].err
    assert answers[command].out


@pytest.mark.parametrize("command", REFUSED)
def test_command_that_needs_an_extra_names_it(answers: dict[str, Said], command: str) -> None:
    assert f"mpfedcl[{REFUSED[command]}]" in assert_one_sentence(answers[command])
