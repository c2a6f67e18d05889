"""The notebooks among the examples: every cell is run, and what GitHub shows is of a real run.

To make the outputs anew: `pip install nbclient ipykernel`, then in a copy of examples/
`jupyter execute --inplace results.ipynb`.
"""

import ast
import base64
import json
from pathlib import Path

import pytest
from matplotlib import pyplot

from mpfedcl.report.figures import DrawnFigure
from small_experiments import EXAMPLES, Json

pytestmark = pytest.mark.whole

NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
SLOW = "own_model_and_data"
"""`tests/test_examples.py` runs the script with the same content."""


def code_cells(path: Path) -> list[Json]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def run_cell(cell: Json, names: Json) -> object:
    """Run a cell as a notebook does; return the value of its last line, if it has one."""
    source = "".join(cell["source"])
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    value: object = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return None if source.endswith(";") else value


@pytest.mark.usefixtures("rendered_figures")
@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[pytest.mark.thorough] * (p.stem == SLOW)) for p in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_every_cell_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: Json = {"__name__": "__main__"}
    values = [run_cell(cell, names) for cell in code_cells(path)]
    pyplot.close("all")
    assert any(isinstance(value, DrawnFigure) for value in values)
    for cell, value in zip(code_cells(path), values, strict=True):
        shown = [output.get("data", {}) for output in cell["outputs"]]
        assert (value is None) or any("text/plain" in data for data in shown)
        if isinstance(value, DrawnFigure):
            assert value._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_kept_and_whole(path: Path) -> None:
    outputs = [output for cell in code_cells(path) for output in cell["outputs"]]
    assert all(output["output_type"] in ("execute_result", "display_data") for output in outputs)
    pictures = [o["data"]["image/png"] for o in outputs if "image/png" in o["data"]]
    assert len(pictures) >= 3
    assert all(base64.b64decode(each).startswith(b"\x89PNG") for each in pictures)
    assert [cell["execution_count"] for cell in code_cells(path)] == [
        *range(1, len(code_cells(path)) + 1)
    ]
    # Nothing of the machine that it was run on.
    assert "/tmp" not in path.read_text()
    assert "/home" not in path.read_text()
