"""Results in folders: runs, comparisons and searches."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import FileContent, read_json_file
from mpfedcl.runs.directory import RunDirectory


@dataclass(frozen=True)
class ResultFolder:
    """One section of a report: the runs of a folder, or a search."""

    path: Path
    kind: Literal["run", "comparison", "tuning"]
    runs: tuple[Path, ...] = ()
    left_out: tuple[str, ...] = ()
    """Runs that have no round yet."""


class _ComparedMethod(FileContent):
    runs: list[str]


class _ComparisonFile(FileContent):
    """The part of comparison.json that a report needs: the folders of the runs."""

    seeds: list[int]
    methods: dict[str, _ComparedMethod]


def find_result_folders(folders: Sequence[Path], named: str = "DIR") -> list[ResultFolder]:
    """Return the results in folders, each once; a folder may hold several.

    `named` is the name of the argument in error messages.
    """
    found = [result for folder in folders for result in _inspect_folder(folder, named)]
    return list({(result.path.resolve(), result.kind): result for result in found}.values())


def find_tuning_files(folder: Path) -> list[Path]:
    """Return the files of a search, or of a folder of searches."""
    if (folder / "tuning.json").is_file():
        return [folder / "tuning.json"]
    return sorted(folder.glob("*/tuning.json"))


def _inspect_folder(folder: Path, named: str) -> list[ResultFolder]:
    if (folder / "tuning.json").is_file():
        return [ResultFolder(folder, "tuning")]
    if (folder / "comparison.json").is_file() and (compared := _read_compared_runs(folder)):
        return [_select_started_runs(folder, compared, named)]
    if (folder / "experiment.toml").is_file():
        return [ResultFolder(folder, "run", (folder,))]
    found = [ResultFolder(folder, "tuning")] if find_tuning_files(folder) else []
    inside = sorted(each.parent for each in folder.glob("*/experiment.toml"))
    if inside:
        found.append(_select_started_runs(folder, inside, named))
    if found:
        return found
    if any(folder.glob("*/trial-*")):
        raise InvalidInput(
            f"{named} is {str(folder)!r}; the search in it has not ended: the same tune command "
            "resumes it."
        )
    raise InvalidInput(
        f"{named} is {str(folder)!r}; it must be a folder that holds a run, a comparison or a "
        "search."
    )


def _read_compared_runs(folder: Path) -> list[Path]:
    """Return the runs that a comparison names."""
    content = read_json_file(folder / "comparison.json", _ComparisonFile)
    names = [name for method in content.methods.values() for name in method.runs]
    for name in names:
        # A name from a file must not lead out of the folder.
        if Path(name).name != name or not (folder / name / "experiment.toml").is_file():
            raise InvalidInput(
                f"{folder / 'comparison.json'} names the run {name!r}; it must be a folder "
                "next to it that holds a run."
            )
    if len(set(names)) < len(names):
        raise InvalidInput(
            f"{folder / 'comparison.json'} names a run twice; each must be named once."
        )
    return [folder / name for name in names]


def _select_started_runs(folder: Path, paths: Sequence[Path], named: str) -> ResultFolder:
    begun = [path for path in paths if RunDirectory(path).count_records()]
    if not begun:
        raise InvalidInput(
            f"{named} is {str(folder)!r}; no run in it has a round yet, and a report needs one."
        )
    waiting = tuple(path.name for path in paths if path not in begun)
    return ResultFolder(folder, "comparison", tuple(begun), waiting)
