"""`mpfedcl.load`: from a folder to what it holds."""

from pathlib import Path

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import read_json_file
from mpfedcl.report.file_schemas import TuningFile
from mpfedcl.report.result_folders import ResultFolder, find_result_folders, find_tuning_files
from mpfedcl.report.results.loaded import Loaded, LoadedComparison, LoadedRun, LoadedSearch
from mpfedcl.report.run_description import RunRecords
from mpfedcl.runs.directory import RunDirectory


def load(
    path: Path | str, *, unfinished: bool = False
) -> LoadedRun | LoadedComparison | LoadedSearch:
    """Read a run, a comparison or a search from its folder. Nothing is run, and nothing written.

    Args:
        path: What `run`, `compare` or `tune` has written, from Python or the command line; a
            folder of runs is read as a comparison.
        unfinished: Whether runs that have not ended may be read as far as they are.

    Returns:
        An object with `.frame()`, measurements in long form, and `.plot()`, a figure.

    Example:
        >>> from mpfedcl import Experiment, run
        >>> made = run(Experiment(method="fedavg", rounds=1, clients=2), out=folder / "run")
        >>> load(made.path).accuracy == made.accuracy
        True
        >>> load(made.path).frame("runs", library="columns")["method"]
        ['fedavg']
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise InvalidInput(f"path is {str(path)!r}; it must be a folder, and there is none there.")
    found = find_result_folders([folder], named="path")
    if len(found) > 1:
        inside = ", ".join(dict.fromkeys(f"{each.kind} in {each.path}" for each in found[:5]))
        raise InvalidInput(
            f"path is {str(path)!r}, which holds several results ({inside}); it must hold one: "
            "load them one by one."
        )
    (result,) = found
    if result.kind == "run" and not RunDirectory(result.path).count_records():
        raise InvalidInput(f"path is {str(path)!r}, a run that has no round yet.")
    loaded = read_result(result)
    if not unfinished:
        _refuse_unfinished(result, loaded)
    return loaded


def read_result(result: ResultFolder) -> LoadedRun | LoadedComparison | LoadedSearch:
    """Read what a folder was found to hold: runs, or a search."""
    if result.kind == "tuning":
        files = find_tuning_files(result.path)
        read = [read_json_file(file, TuningFile).methods.values() for file in files]
        return LoadedSearch(result.path, files, [each for several in read for each in several])
    records = [RunRecords.read(each) for each in result.runs]
    if result.kind == "run":
        return LoadedRun(records[0])
    return LoadedComparison(result.path, records)


def _refuse_unfinished(result: ResultFolder, loaded: Loaded) -> None:
    runs = loaded.runs if isinstance(loaded, LoadedComparison) else [loaded]
    waiting = [each for each in runs if isinstance(each, LoadedRun) and each.summary is None]
    names = [each.path.name for each in waiting] + list(result.left_out)
    if not names:
        return
    if isinstance(loaded, LoadedRun):
        rounds = f"round {loaded.history[-1]['round']} of {loaded.experiment.rounds}"
        raise InvalidInput(
            f"path is {str(loaded.path)!r}, a run that has not ended ({rounds}); resume it by "
            f"mpfedcl run --resume {loaded.path}, or read it as it is: unfinished=True."
        )
    more = f" and {len(names) - 3} others" if len(names) > 3 else ""
    raise InvalidInput(
        f"path is {str(result.path)!r}; runs in it have not ended ({', '.join(names[:3])}{more}): "
        "let the same command or call finish them, or read them as they are: unfinished=True."
    )
