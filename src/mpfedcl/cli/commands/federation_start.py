"""`mpfedcl federation start`: hand a run to the server and watch it."""

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from rich.progress import Progress, TaskID

from mpfedcl.cli.arguments.federation import FederationStart
from mpfedcl.cli.commands.run import draw_figures, note_round, show_result
from mpfedcl.cli.progress import gentle_interrupt, messages, progress_bar
from mpfedcl.errors import InvalidInput, RunCutShort
from mpfedcl.files import free_folder
from mpfedcl.network.flower.programs import is_running, stop_run, submit
from mpfedcl.network.server.serve import check_experiment
from mpfedcl.network.server.status import read_status, stop_file
from mpfedcl.network.setup.folders import ServerFolder
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.run_loop import RunResult

_LOOK_SECONDS = 0.3
_REACH_SECONDS, _REACH_TRIES = 5.0, 5
"""How often the server is looked for, and how often in vain before it counts as gone."""
_STILL_SECONDS = 60.0
"""A run's process shows every second that it lives; this long in vain, and it does not."""
_ENDS = ("done", "stopped", "failed")
_BEGIN_SECONDS = 120.0
"""Until the server's process has said its first word; then it is asked whether it lives."""


def federation_start_command(arguments: FederationStart) -> int:
    """Run or resume an experiment with the clients of a federation."""
    folder = ServerFolder.open(arguments.directory)
    path = _choose_path(arguments)
    if arguments.resume is None:
        # Now: whoever starts a run is still looking, and the server may be far away.
        check_experiment(arguments.settings)
    under_way = read_status(folder.status)
    if under_way.get("what", "done") not in _ENDS and _is_alive(int(under_way["pid"])):
        raise InvalidInput(f"a run is under way on {folder.root}; it must end first.")
    console = messages()
    with gentle_interrupt(console) as stop, progress_bar(console) as bar:
        task = bar.add_task("starting", total=None, note="")
        folder.status.unlink(missing_ok=True)
        stop_file(folder.status).unlink(missing_ok=True)
        number = submit(folder, _order(arguments, folder, path))
        follower = _Follower(folder, path, bar, task)
        try:
            while follower.goes_on():
                if stop():
                    stop_file(folder.status).touch()
                time.sleep(_LOOK_SECONDS)
        except KeyboardInterrupt:
            with contextlib.suppress(InvalidInput):
                stop_run(folder, number)
            raise
        finally:
            stop_file(folder.status).unlink(missing_ok=True)
    return _conclude(arguments, follower, path)


def _choose_path(arguments: FederationStart) -> Path:
    if arguments.resume is not None:
        if arguments.out is not None or arguments.file is not None:
            raise InvalidInput(
                "resume goes with --rounds alone; a file or --out must not be given."
            )
        if not RunDirectory(arguments.resume).holds_run():
            raise InvalidInput(
                f"resume is {str(arguments.resume)!r}; it must be a folder holding a run."
            )
        return arguments.resume
    method = arguments.settings.method.rpartition(":")[2]
    path = arguments.out or free_folder(Path("runs") / f"{method}-{arguments.directory.name}")
    if path.exists() and any(path.iterdir()):
        raise InvalidInput(
            f"out is {str(path)!r}; it must be a new or an empty folder, or be given as --resume."
        )
    return path


def _order(arguments: FederationStart, folder: ServerFolder, path: Path) -> dict[str, str]:
    """Return the run configuration: one document, and places on this machine."""
    places = {"status": str(folder.status.resolve())}
    if arguments.resume is not None:
        rounds = arguments.settings.rounds
        kept = RunDirectory(path).read_experiment().rounds
        more = {"rounds": str(rounds)} if rounds != kept else {}
        return {**places, **more, "resume": str(path.resolve())}
    experiment = arguments.settings
    if experiment.clients is None:
        # Those of this federation, not as many as a benchmark has.
        experiment = experiment.replace(clients=len(folder.clients))
    return {**places, "experiment": experiment.to_toml(), "out": str(path.resolve())}


class _Follower:
    """Looks at what the server's process writes, and shows it."""

    def __init__(self, folder: ServerFolder, path: Path, bar: Progress, task: TaskID) -> None:
        self.status: dict[str, Any] = {}
        self.round = 0
        """The last that was seen to begin."""
        self._folder, self._directory = folder, RunDirectory(path)
        self._bar, self._task = bar, task
        self._began = time.monotonic()
        self._reached = self._moved = self._began
        self._modified = 0.0

    def goes_on(self) -> bool:
        """Show where the run is; tell whether it is still going on."""
        self.status = read_status(self._folder.status) or self.status
        if not self.status:
            if time.monotonic() - self._began > _BEGIN_SECONDS:
                raise RunCutShort(
                    f"the server has not begun within {_BEGIN_SECONDS:g} s; "
                    f"{self._folder.server / 'superlink.log'} says why."
                )
            self._look_for_server()
            return True
        if self.status["what"] in _ENDS:
            return False
        if not self._is_moving() or not _is_alive(int(self.status["pid"])):
            # It may have said its last word between the two looks.
            self.status = read_status(self._folder.status)
            if self.status.get("what") not in _ENDS:
                raise RunCutShort(
                    "the server's process has gone; what was done is kept. Go on with: mpfedcl "
                    f"federation start {self._folder.root} --resume {self._directory.path}"
                )
            return False
        self._look_for_server()
        self._show()
        return True

    def _is_moving(self) -> bool:
        """Tell whether the run's process has touched its status of late."""
        with contextlib.suppress(OSError):
            modified = self._folder.status.stat().st_mtime
            if modified != self._modified:
                self._modified, self._moved = modified, time.monotonic()
        return time.monotonic() - self._moved < _STILL_SECONDS

    def _look_for_server(self) -> None:
        """A run does not outlive its server, but its process may hang on."""
        now = time.monotonic()
        if now - self._reached < _REACH_SECONDS:
            return
        if any(is_running(self._folder) for _ in range(_REACH_TRIES)):
            self._reached = now
            return
        raise RunCutShort(
            "the server has gone; what was done is kept. Start it again, then go on with: mpfedcl "
            f"federation start {self._folder.root} --resume {self._directory.path}"
        )

    def _show(self) -> None:
        said = self.status
        if "wanted" in said:
            note = f"{len(said['here'])} of {said['wanted']} clients are here"
            self._bar.update(self._task, description=said["what"], note=note)
            return
        self.round = said["round"]
        records = self._directory.read_records()
        accuracy = note_round(records[-1]) if records else ""
        waiting = ", ".join(said["waiting"][:4]) + (" ..." if len(said["waiting"]) > 4 else "")
        missing = f"  missing: {', '.join(said['missing'][:4])}" if said["missing"] else ""
        self._bar.update(
            self._task,
            description=said["what"],
            total=said["rounds"],
            completed=min(said["round"] - 1, said["rounds"]),
            note=f"{accuracy}  {said['answered']} answered, waiting for: {waiting}{missing}",
        )


def _conclude(arguments: FederationStart, follower: _Follower, path: Path) -> int:
    what = follower.status["what"]
    if what == "failed":
        raise RunCutShort(str(follower.status.get("error", "the server's log says why")))
    directory = RunDirectory(path)
    records, experiment = directory.read_records(), directory.read_experiment()
    if what == "stopped":
        # The record of the last round waits for what clients will read of it with the next one.
        done = max(len(records), follower.round)
        messages().print(
            f"Stopped after round {done} of {experiment.rounds}. Go on with: mpfedcl "
            f"federation start {arguments.directory} --resume {path}"
        )
        return 130
    summary = directory.read_summary()
    assert summary is not None
    result = RunResult(path, experiment, summary["accuracy"], records, None, summary)
    show_result(result, draw_figures(result), arguments.readings, as_json=arguments.json)
    return 0


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):
        # Where there is /proc: one that was killed and that nobody has looked after is not alive.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True
