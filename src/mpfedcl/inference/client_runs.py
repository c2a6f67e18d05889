"""A client's own folder in a federation stands for the last run that it has kept."""

from pathlib import Path

from mpfedcl.core.errors import InvalidInput
from mpfedcl.network.client.final_models import FOLDER
from mpfedcl.network.setup.folders import ClientFolder
from mpfedcl.runs.directory import RunDirectory


def find_run(path: Path, client: str | None) -> tuple[Path, str | None]:
    """Return the run directory that a path stands for, and whose model to use.

    A run directory stands for itself. The folder of a client, as `mpfedcl federation init` makes
    it, stands for what the client has kept of the newest run that has ended; the model is then the
    one that the method is judged by at its clients: mostly their own.
    """
    if not (path / "client.toml").is_file():
        return path, client
    folder = ClientFolder.open(path, None)
    ended = [each.parent for each in folder.memory.glob(f"*/{FOLDER}/summary.json")]
    if not ended:
        raise InvalidInput(
            f"RUN is {str(path)!r}, the folder of {folder.name}, which has kept no run; one must "
            "have ended while this client took part."
        )
    run = max(ended, key=lambda each: each.stat().st_mtime_ns)
    summary = RunDirectory(run).read_summary() or {}
    has_own = (run / "models" / f"{folder.name}.safetensors").is_file()
    is_judged = not str(summary.get("predictor")).startswith("global")
    return run, client or (folder.name if has_own and is_judged else None)
