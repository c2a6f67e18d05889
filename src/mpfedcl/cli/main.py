"""The command line: parse, hand over, and turn what goes wrong into one sentence."""

import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any, NoReturn

import tyro

from mpfedcl.cli.arguments import deployment, experiments, federation, privacy
from mpfedcl.cli.arguments.settings_flags import list_flags, settings_rules
from mpfedcl.cli.name_checks import check_names
from mpfedcl.cli.own_methods import import_own_methods
from mpfedcl.core.errors import InvalidInput, LostWorker
from mpfedcl.experiment import RESULT_NEUTRAL_SETTINGS, Experiment
from mpfedcl.experiment.names import did_you_mean, did_you_mean_setting
from mpfedcl.experiment.settings import Settings

_HELP = """\
mpfedcl: federated learning on non-IID client data

  mpfedcl run      [experiment.toml] [settings] [--out DIR]    one run, or --resume DIR
  mpfedcl compare  --methods A B ... --seeds 0 1 2 [settings]  a table of mean(std)
  mpfedcl report   DIR [DIR ...] [--latex] [--csv] [--pdf]     one HTML page of what was run
  mpfedcl watch    [RUNS_FOLDER] [--port 8700]                 a local web page of runs, live
  mpfedcl join     RUN --data FOLDER --name NAME [--add]       a new client of a finished run
  mpfedcl leave    RUN --name NAME                             a client taken out of it again
  mpfedcl advise   RUN --data FOLDER                           should this client join?
  mpfedcl contribution    RUN                                         what each client is worth to others
  mpfedcl tune     --methods A B ... [--budget 12] [settings]  settings chosen on validation images
  mpfedcl predict  RUN IMAGES... [--client NAME] [--json]      predict images with a trained run
  mpfedcl export   RUN [--format onnx] [--quantize int8]       its model as one file
  mpfedcl methods                                              the methods, one line each
  mpfedcl data     list | show NAME                            data sets, and who holds what
  mpfedcl data     fetch NAME | prepare NAME --source DIR      public data into your data folder
  mpfedcl data     encode ROOT --encoder E --out DIR           pictures into features, once
  mpfedcl data     cache                                       encoded images that are kept
  mpfedcl federation init DIR --clients N | server DIR         the same over a network, on Flower
  mpfedcl federation client DIR --data FOLDER | start DIR      its clients, and a run with them
  mpfedcl federation update DIR --run RUN --client NAME        one client joins or leaves it later
  mpfedcl privacy  plan | receipt RUN_OR_FILE --data FOLDER    what a budget costs; what is sent

Each takes --help. A first look, on the data inside the package: mpfedcl run --rounds 10
"""


_COMMANDS: dict[str, tuple[type[Any], str]] = {
    "run": (experiments.Run, "run"),
    "compare": (experiments.Compare, "comparison"),
    "report": (experiments.Report, "report"),
    "watch": (experiments.Watch, "watch"),
    "join": (deployment.Join, "join"),
    "leave": (deployment.Leave, "leave"),
    "advise": (deployment.Advise, "advise"),
    "contribution": (deployment.Contributions, "contribution"),
    "tune": (experiments.Tune, "tune"),
    "predict": (deployment.Predict, "predict"),
    "export": (deployment.Export, "export"),
    "methods": (experiments.Methods, "listings"),
    "data list": (experiments.DataList, "listings"),
    "data show": (experiments.DataShow, "listings"),
    "data fetch": (experiments.DataFetch, "data_sets"),
    "data prepare": (experiments.DataPrepare, "data_sets"),
    "data encode": (experiments.DataEncode, "data_sets"),
    "data cache": (experiments.DataCache, "listings"),
    "privacy plan": (privacy.PrivacyPlan, "privacy"),
    "privacy receipt": (privacy.PrivacyReceipt, "privacy"),
    "federation init": (federation.FederationInit, "federation"),
    "federation server": (federation.FederationServer, "federation"),
    "federation client": (federation.FederationClient, "federation_client"),
    "federation start": (federation.FederationStart, "federation_start"),
    "federation update": (federation.FederationUpdate, "federation_update"),
}
"""What each command takes, and the module of `cli.commands` that does it: `data list` is done by
its `data_list_command`."""

_WITH_FILE = experiments.Run | experiments.Compare | experiments.Tune | federation.FederationStart
"""Commands that take a file of settings."""

_GROUPS = {name.split()[0] for name in _COMMANDS if " " in name}
"""First words of commands that have two."""

_PLAIN_ERRORS = {
    r"Error parsing --(\S+): no type matching .*INT\|\{(\w+)\} could be .* from \[('.*?')\].*": (
        r"--\1 is \3; it must be a whole number or \2"
    ),
    r"Error parsing --(\S+): no type matching .*FLOAT FLOAT FLOAT\} could be .* from \[(.*?)\].*": (
        r"--\1 is \2; it must be three numbers"
    ),
    r"Error parsing --(\S+): no type matching .*INT could be .* from \[('.*?')\].*": (
        r"--\1 is \2; it must be a whole number"
    ),
    r"Error parsing --(\S+): no type matching .*FLOAT could be .* from \[('.*?')\].*": (
        r"--\1 is \2; it must be a number"
    ),
    r"Error parsing --(\S+): invalid literal for int\(\) with base 10: ('.*')": (
        r"--\1 is \2; it must be a whole number"
    ),
    r"Error parsing --(\S+): could not convert string to float: ('.*')": (
        r"--\1 is \2; it must be a number"
    ),
    r"Error parsing --(\S+): Could not find valid parse for arguments: \[(.*)\]": (
        r"--\1 is \2; it must be numbers"
    ),
    r"invalid choice ('.*') for argument '--(\S+)'. Expected one of \((.*)\)": (
        r"--\2 is \1; it must be one of \3"
    ),
}
"""What Python and tyro say of bad values, in the words of the other errors."""

_UNKNOWN_FLAG = r"Unrecognized options: .*?--([\w.-]+)"

_OUT_OF_MEMORY = (
    "there is not enough memory; clients, model and samples must be fewer or smaller "
    "(fewer --workers or --engine loop need less). What was done is kept."
)

_RESUME_ALLOWS = (
    "resume allows only --rounds, --engine, --workers, --worker-timeout, --track and "
    "--track-to beside it"
)


def start() -> NoReturn:
    """Be the program: run the command line, and end as it says."""
    try:
        main()
    finally:
        # All is written. A second Ctrl-C while Python ends would end it by the signal instead.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process.

    0 done, 1 another process was lost, 2 bad input, 3 some images could not be read, 130
    interrupted.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        sys.exit(_dispatch(given))
    except InvalidInput as error:
        print(f"mpfedcl: {error}", file=sys.stderr)
        sys.exit(2)
    except LostWorker as error:
        # One process of a run speaks for all.
        from mpfedcl.engines.workers import is_worker

        if not is_worker():
            print(f"mpfedcl: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        # The reader has gone (`| head`). Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        # Disk full, no permission, a read-only folder: the system's own words name the trouble.
        where = f" {error.filename}" if error.filename else ""
        why = error.strerror or error
        print(f"mpfedcl: cannot use{where or ' a file'}: {why}.", file=sys.stderr)
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        print(f"mpfedcl: {_OUT_OF_MEMORY}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("mpfedcl: stopped at once; what was done is kept.", file=sys.stderr)
        sys.exit(130)


def _is_out_of_memory(error: Exception) -> bool:
    """Tell whether memory was wanting; torch says so in words of several kinds."""
    words = ("allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError) or any(each in str(error) for each in words)


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help") or _is_bare_group(argv):
        print(_HELP, end="")
        return 0
    if argv[0] == "--version":
        print(version("mpfedcl"))
        return 0
    arguments = parse(argv)
    check_names(arguments)
    name, _ = _find_command(argv)
    # Only now: what a command needs, torch above all, takes seconds to load.
    module = import_module(f"mpfedcl.cli.commands.{_COMMANDS[name][1]}")
    code: int = getattr(module, f"{name.replace(' ', '_')}_command")(arguments)
    return code


def _is_bare_group(argv: list[str]) -> bool:
    return argv[0] in _GROUPS and argv[1:] in ([], ["-h"], ["--help"])


def _find_command(argv: list[str]) -> tuple[str, list[str]]:
    """Return the command's name, of one word or two, and the arguments after it."""
    length = 2 if argv[0] in _GROUPS else 1
    name = " ".join(argv[:length])
    if name not in _COMMANDS:
        raise InvalidInput(
            f"{name!r} is not a command; it must be one of {', '.join(_COMMANDS)}"
            f"{did_you_mean(name, _COMMANDS)}."
        )
    return name, argv[length:]


def parse(argv: list[str]) -> Any:
    """Return a command's arguments: defaults, then the file's, then the flags'."""
    name, rest = _find_command(argv)
    command = _COMMANDS[name][0]
    sections: Mapping[str, type[Settings]] = {}
    if "settings" in command.__dataclass_fields__:
        many = "methods" in command.__dataclass_fields__
        sections = import_own_methods(rest, from_files=not many)
    program = _Program(f"mpfedcl {name}", rest, sections)
    parsed = program.parse(command)
    is_run, is_start = (
        isinstance(parsed, each) for each in (experiments.Run, federation.FederationStart)
    )
    is_resumed = (is_run or is_start) and parsed.resume is not None
    if is_resumed:
        if is_run and (parsed.file is not None or parsed.out is not None):
            raise InvalidInput(f"{_RESUME_ALLOWS}; a file or --out must not be given.")
        path = parsed.resume / "experiment.toml"
        if not path.is_file():
            raise InvalidInput(
                f"resume is {str(parsed.resume)!r}; it must be a folder holding a run."
            )
        kept = Experiment.from_toml(path, complete=True)
    elif isinstance(parsed, _WITH_FILE) and parsed.file is not None:
        kept = Experiment.from_toml(parsed.file)
    else:
        return parsed
    # Flags must win over the file, and only a parse tells which flags there are: parse anew with
    # the file's settings as the defaults.
    given = {"directory": parsed.directory} if is_start else {}
    anew = program.parse(command, command(**given, settings=kept))
    if is_resumed:
        free = ("rounds", *RESULT_NEUTRAL_SETTINGS) if is_run else ("rounds",)
        rule = _RESUME_ALLOWS if is_run else "resume allows only --rounds beside it"
        if anew.settings.replace(**{name: kept.setting(name) for name in free}) != kept:
            raise InvalidInput(f"{rule}; other settings stay as they were.")
    return anew


@dataclass(frozen=True)
class _Program:
    """A command's name as it is said in help, its words, and the sections that methods bring."""

    name: str
    words: list[str]
    sections: Mapping[str, type[Settings]]

    def parse(self, command: type[Any], default: Any = None) -> Any:
        """Return the command's arguments; what is not given is as in `default`."""
        said, rules = io.StringIO(), settings_rules(self.sections)
        try:
            with contextlib.redirect_stderr(said):
                given = {} if default is None else {"default": default}
                return tyro.cli(command, prog=self.name, args=self.words, registry=rules, **given)
        except SystemExit as end:
            if end.code in (0, None):
                raise
            sentence = _first_paragraph(said.getvalue())
            if unknown := re.match(_UNKNOWN_FLAG, sentence):
                raise InvalidInput(self._say_unknown(command, unknown[1])) from None
            raise InvalidInput(f"{sentence} (see {self.name} --help).") from None

    def _say_unknown(self, command: type[Any], flag: str) -> str:
        question = did_you_mean_setting(flag, list_flags(command, self.sections), "--")
        return f"--{flag} is not an option{question}; {self.name} --help lists them all."


def _first_paragraph(box: str) -> str:
    """Return what tyro says in the first part of its framed message, as one sentence."""
    lines = box.splitlines()
    texts = [line.strip("│ ") for line in lines]
    # Where the locale has no frames, hyphens stand below the title.
    rules = [
        at
        for at, text in enumerate(texts)
        if text.startswith(("╭", "╰")) or (text and set(text) <= {"─", "-"})
    ]
    first, second = (*rules, len(lines), len(lines))[:2]
    sentence = " ".join(" ".join(texts[first + 1 : second]).split()).rstrip(".")
    for python, plain in _PLAIN_ERRORS.items():
        sentence = re.sub(python, plain, sentence)
    return sentence
