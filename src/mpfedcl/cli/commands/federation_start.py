"""`mpfedcl federation start`: hand a run to the server and watch it."""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from rich.progress import Progress, TaskID

from mpfedcl.cli.arguments.federation import FederationStart
from mpfedcl.cli.commands.run import describe_round, draw_figures, show_result
from mpfedcl.cli.progress import progress_bar, stderr_console, stop_after_round
from mpfedcl.core.errors import InvalidInput, RunCutShort
from mpfedcl.core.files import unused_folder
from mpfedcl.network.flower.programs import is_server_running, require_flower
from mpfedcl.network.server.serve import check_experiment
from mpfedcl.network.server.status import read_status, stop_file
from mpfedcl.network.setup.folders import ServerFolder
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.observer import RunResult

_POLL_SECONDS = 0.3
_SERVER_CHECK_SECONDS, _SERVER_CHECK_TRIES = 5.0, 5
"""How often the server is checked, and how many failed tries mean that it has gone."""
_SILENT_SECONDS = 60.0
"""A run's process touches its status every second; one silent for this long has gone."""
_ENDS = ("done", "stopped", "failed")
_BEGIN_SECONDS = 120.0
"""Until the server's process has written its first status."""


def federation_start_command(arguments: FederationStart) -> int:
    """Run or resume an experiment with the clients of a federation."""
    folder = ServerFolder.open(arguments.directory)
    path = _choose_path(arguments)
    require_flower("mpfedcl.network.flower.control")
    if arguments.resume is None:
        # Now: whoever starts a run is still watching, and the server may be far away.
        check_experiment(arguments.settings)
    again = f"mpfedcl federation start {folder.root} --resume {path}"
    follower = follow_run(folder, path, _run_config(arguments, folder, path), again)
    return _report_end(arguments, follower, path)


def follow_run(
    folder: ServerFolder, path: Path, run_config: dict[str, str], again: str
) -> "RunFollower":
    """Hand something to the server and show where it is until it has ended.

    `path` is the run directory, `again` the command that goes on where this one was cut off.
    """
    under_way = read_status(folder.status)
    if under_way.get("what", "done") not in _ENDS and _is_alive(int(under_way["pid"])):
        raise InvalidInput(f"a run is under way on {folder.root}; it must end first.")
    # Only now: Flower takes a second to load.
    from mpfedcl.network.flower.control import stop_run, submit

    console = stderr_console()
    with stop_after_round(console) as stop, progress_bar(console, "rounds") as bar:
        task = bar.add_task("starting", total=None, note="")
        folder.status.unlink(missing_ok=True)
        stop_file(folder.status).unlink(missing_ok=True)
        number = submit(folder, run_config)
        follower = RunFollower(folder, path, bar, task, again)
        try:
            while follower.is_running():
                if stop():
                    stop_file(folder.status).touch()
                time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            with contextlib.suppress(InvalidInput):
                stop_run(folder, number)
            raise
        finally:
            stop_file(folder.status).unlink(missing_ok=True)
    return follower


def _choose_path(arguments: FederationStart) -> Path:
    if arguments.resume is not None:
        if arguments.out is not None or arguments.file is not None:
            raise InvalidInput(
                "resume allows only --rounds beside it; a file or --out must not be given."
            )
        return arguments.resume
    method = arguments.settings.method.rpartition(":")[2]
    path = arguments.out or unused_folder(Path("runs") / f"{method}-{arguments.directory.name}")
    if path.exists() and any(path.iterdir()):
        raise InvalidInput(
            f"out is {str(path)!r}; it must be a new or an empty folder, or be given as --resume."
        )
    return path


def _run_config(arguments: FederationStart, folder: ServerFolder, path: Path) -> dict[str, str]:
    """Return the run configuration: one document, and places on this machine."""
    places = {"status": str(folder.status.resolve())}
    if arguments.resume is not None:
        rounds = arguments.settings.rounds
        kept = RunDirectory(path).read_experiment().rounds
        more = {"settings": f"rounds={rounds}"} if rounds != kept else {}
        return {**places, **more, "resume": str(path.resolve())}
    experiment = arguments.settings
    if experiment.clients is None:
        # Those of this federation, not as many as a benchmark has.
        experiment = experiment.replace(clients=len(folder.clients))
    return {**places, "experiment": experiment.to_toml(), "out": str(path.resolve())}


class RunFollower:
    """Reads the status that the server's process writes, and shows it."""

    def __init__(
        self, folder: ServerFolder, path: Path, bar: Progress, task: TaskID, again: str
    ) -> None:
        self.status: dict[str, Any] = {}
        self.round = 0
        """The last round that was seen to begin."""
        self._folder, self._directory = folder, RunDirectory(path)
        self._bar, self._task, self._again = bar, task, again
        self._began = time.monotonic()
        self._reached = self._moved = self._began
        self._modified = 0.0
        self._refusals: dict[str, str] = {}
        """Who may not take part, and why, as far as it was shown."""

    def is_running(self) -> bool:
        """Show where the run is; tell whether it is still under way."""
        self.status = read_status(self._folder.status) or self.status
        if not self.status:
            if time.monotonic() - self._began > _BEGIN_SECONDS:
                raise RunCutShort(
                    f"the server has not begun within {_BEGIN_SECONDS:g} s; "
                    f"{self._folder.server / 'superlink.log'} says why."
                )
            self._check_server()
            return True
        if self.status["what"] in _ENDS:
            return False
        if not self._is_moving() or not _is_alive(int(self.status["pid"])):
            # It may have written its last status between the two checks.
            self.status = read_status(self._folder.status)
            if self.status.get("what") not in _ENDS:
                raise RunCutShort(
                    "the server's process has gone; what was done is kept. Resume with: "
                    f"{self._again}"
                )
            return False
        self._check_server()
        self._show()
        return True

    def _is_moving(self) -> bool:
        """Tell whether the run's process has touched its status of late."""
        with contextlib.suppress(OSError):
            modified = self._folder.status.stat().st_mtime
            if modified != self._modified:
                self._modified, self._moved = modified, time.monotonic()
        return time.monotonic() - self._moved < _SILENT_SECONDS

    def _check_server(self) -> None:
        """Refuse to wait without a server: a run does not outlive it, but its process may hang."""
        now = time.monotonic()
        if now - self._reached < _SERVER_CHECK_SECONDS:
            return
        if any(is_server_running(self._folder) for _ in range(_SERVER_CHECK_TRIES)):
            self._reached = now
            return
        raise RunCutShort(
            "the server has gone; what was done is kept. Start it again, then resume with: "
            f"{self._again}"
        )

    def _show(self) -> None:
        status = self.status
        if "wanted" in status:
            note = f"{len(status['here'])} of {status['wanted']} clients are here"
            self._bar.update(self._task, description=status["what"], note=note)
            self._show_refusals(status.get("refused", {}))
            return
        self.round = status["round"]
        records = self._directory.read_records()
        accuracy = f"{describe_round(records[-1])}  " if records else ""
        waiting = ", ".join(status["waiting"][:4]) + (" ..." if len(status["waiting"]) > 4 else "")
        missing = f"  missing: {', '.join(status['missing'][:4])}" if status["missing"] else ""
        round_now = f"round {status['round']} of {status['rounds']}"
        self._bar.update(
            self._task,
            description=round_now if status["what"] == "training" else status["what"],
            total=status["rounds"],
            completed=min(status["round"] - 1, status["rounds"]),
            note=f"{accuracy}{status['answered']} answered, waiting for: {waiting}{missing}",
        )

    def _show_refusals(self, refusals: Mapping[str, str]) -> None:
        """Say at once who cannot take part: the wait is long, and may be in vain."""
        for name, why in sorted(refusals.items()):
            if self._refusals.get(name) != why:
                self._bar.console.print(f"{name} does not take part: {why}")
        self._refusals = dict(refusals)


def _report_end(arguments: FederationStart, follower: RunFollower, path: Path) -> int:
    what = follower.status["what"]
    if what == "failed":
        raise RunCutShort(str(follower.status.get("error", "the server's log says why")))
    directory = RunDirectory(path)
    records, experiment = directory.read_records(), directory.read_experiment()
    if what == "stopped":
        # The record of the last round waits for its evaluation by clients with the next one.
        done = max(len(records), follower.round)
        stderr_console().print(
            f"Stopped after round {done} of {experiment.rounds}. Resume with: mpfedcl "
            f"federation start {arguments.directory} --resume {path}"
        )
        return 130
    summary = directory.read_summary()
    assert summary is not None
    result = RunResult(path, experiment, summary["accuracy"], records, None, summary)
    show_result(result, draw_figures(result), arguments.predictors, as_json=arguments.json)
    return 0


def _is_alive(number: int) -> bool:
    try:
        # One that was killed and whose parent has not noticed yet is not alive.
        return bool(psutil.Process(number).status() != psutil.STATUS_ZOMBIE)
    except psutil.AccessDenied:
        return True
    except psutil.NoSuchProcess:
        return False
