"""The command line: parse, hand over, and turn what goes wrong into one sentence.

Nothing here imports torch, so that help and bad input answer at once.
"""

import contextlib
import io
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import tyro

from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import Experiment

_Settings = Annotated[Experiment, tyro.conf.arg(name="")]
_File = Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[EXPERIMENT.TOML]")]
_Folder = Annotated[Path | None, tyro.conf.arg(metavar="DIR")]


@dataclass(frozen=True)
class Run:
    """Run one experiment, or go on with one.

    Settings come from the file if one is given, and flags win over it. Examples:
    `mpfedcl run`, `mpfedcl run --method fedavg --partition.alpha 0.5 --out runs/mine`,
    `mpfedcl run --resume runs/mine --rounds 120`.
    """

    file: _File = None
    """A TOML file of settings, such as the experiment.toml of another run."""
    out: _Folder = None
    """Folder for the run [default: a new one below runs/]."""
    resume: _Folder = None
    """Go on with the run in this folder; only --rounds may be given too."""
    readings: Literal["headline", "all"] = "headline"
    """all: personal and averaged model, by classifier and by nearest prototype, on both tests."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the summary as JSON and nothing else."""
    settings: _Settings = field(default_factory=Experiment)


@dataclass(frozen=True)
class Compare:
    """Run several methods over several seeds and print mean(std) of the last round.

    What is already there is not run again: the same command goes on after an interruption. Example:
    `mpfedcl compare --methods mp-fedcl fedavg local --seeds 0 1 2 --out runs/comparison`.
    """

    file: _File = None
    """A TOML file of settings that all runs have in common."""
    methods: tuple[str, ...] = ("mp-fedcl", "sp-fedcl", "fedavg", "fedproto", "local")
    """The methods, by name."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The seeds; each fixes data split, initial weights, batches and clustering."""
    out: _Folder = None
    """Folder for the comparison [default: a new one below runs/]."""
    jobs: Annotated[int, tyro.conf.arg(metavar="INT")] = 0
    """Runs at the same time, a process each [default: 0, one a core]."""
    readings: Literal["headline", "all"] = "headline"
    """all: every method by all four readings on both tests."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the comparison as JSON and nothing else."""
    settings: _Settings = field(default_factory=Experiment)


@dataclass(frozen=True)
class Methods:
    """List the methods, one line each."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON."""


@dataclass(frozen=True)
class DataList:
    """List the data sets and tell which are here."""

    root: _Folder = None
    """Data folder to look in [default: $MPFEDCL_DATA, else the user's cache folder]."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON."""


@dataclass(frozen=True)
class DataShow:
    """Show how a data set is dealt out to clients, and draw it.

    Example: `mpfedcl data show mnist-sample --partition.alpha 0.5 --clients 10`.
    """

    name: Annotated[str, tyro.conf.Positional] = "mnist-sample"
    """Data set."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE.png")] = Path("partition.png")
    """Where the picture goes."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON."""
    settings: _Settings = field(default_factory=Experiment)


_PLAIN_WORDS = {
    r"Error parsing --(\S+): invalid literal for int\(\) with base 10: ('.*')": (
        r"--\1 is \2; it must be a whole number"
    ),
    r"Error parsing --(\S+): could not convert string to float: ('.*')": (
        r"--\1 is \2; it must be a number"
    ),
    r"invalid choice ('.*') for argument '--(\S+)'. Expected one of \((.*)\)": (
        r"--\2 is \1; it must be one of \3"
    ),
}
"""What Python and tyro say of bad values, in the words of the other errors."""

Arguments = Run | Compare | Methods | DataList | DataShow

_COMMANDS: dict[str, type[Any]] = {"run": Run, "compare": Compare, "methods": Methods}
_DATA_COMMANDS: dict[str, type[Any]] = {"list": DataList, "show": DataShow}

_HELP = """\
mpfedcl: federated learning for clients whose data differ

  mpfedcl run      [experiment.toml] [settings] [--out DIR]    one run, or --resume DIR
  mpfedcl compare  --methods A B ... --seeds 0 1 2 [settings]  a table of mean(std)
  mpfedcl methods                                              the methods, one line each
  mpfedcl data     list | show NAME                            data sets, and who holds what

Each takes --help. A first look, on the data inside the package: mpfedcl run --rounds 10
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process: 0 done, 2 bad input, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.exit(_dispatch(words))
    except InvalidInput as error:
        print(f"mpfedcl: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # The reader has gone (`| head`). Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        # Disk full, no permission, a read-only folder: the system's own words name the trouble.
        where = f" {error.filename}" if error.filename else ""
        print(f"mpfedcl: cannot use{where or ' a file'}: {error.strerror}.", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("mpfedcl: stopped at once; what was done is kept.", file=sys.stderr)
        sys.exit(130)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0
    if words[0] == "--version":
        from importlib.metadata import version

        print(version("mpfedcl"))
        return 0
    arguments = parse(words)
    if isinstance(arguments, Run):
        from mpfedcl.commands.run import run_command

        return run_command(arguments)
    if isinstance(arguments, Compare):
        from mpfedcl.commands.compare import compare_command

        return compare_command(arguments)
    if isinstance(arguments, Methods):
        from mpfedcl.commands.catalogues import methods_command

        return methods_command(arguments)
    from mpfedcl.commands.catalogues import data_list_command, data_show_command

    if isinstance(arguments, DataList):
        return data_list_command(arguments)
    return data_show_command(arguments)


def parse(words: list[str]) -> Arguments:
    """Return the command with its settings: defaults, then the file's, then the flags'."""
    command, rest, program = _find_command(words)
    parsed: Arguments = _parse(command, rest, program, command())
    if isinstance(parsed, Run) and parsed.resume is not None:
        return _parse_resume(parsed, rest, program)
    file = parsed.file if isinstance(parsed, Run | Compare) else None
    if file is not None:
        # Flags must win over the file, and only a parse tells which flags there are: parse anew
        # with the file's settings as the defaults.
        parsed = _parse(command, rest, program, command(settings=Experiment.from_toml(file)))
    return parsed


def _parse_resume(first: Run, rest: list[str], program: str) -> Run:
    if first.file is not None or first.out is not None:
        raise InvalidInput("resume goes with --rounds alone; a file or --out must not be given.")
    assert first.resume is not None
    path = first.resume / "experiment.toml"
    if not path.is_file():
        raise InvalidInput(f"resume is {str(first.resume)!r}; it must be a folder holding a run.")
    kept = Experiment.from_toml(path)
    parsed: Run = _parse(Run, rest, program, Run(settings=kept))
    if parsed.settings.replace(rounds=kept.rounds) != kept:
        raise InvalidInput("resume goes with --rounds alone; other settings stay as they were.")
    return parsed


def _find_command(words: list[str]) -> tuple[type[Any], list[str], str]:
    name, rest = words[0], words[1:]
    if name == "data":
        if not rest or rest[0] in ("-h", "--help"):
            print("mpfedcl data list          which data sets there are, and which are here")
            print("mpfedcl data show NAME     who holds what under a partition, with a picture")
            sys.exit(0)
        return (
            _look_up("data " + rest[0], rest[0], _DATA_COMMANDS),
            rest[1:],
            f"mpfedcl data {rest[0]}",
        )
    return _look_up(name, name, _COMMANDS), rest, f"mpfedcl {name}"


def _look_up(shown: str, name: str, commands: dict[str, type[Any]]) -> type[Any]:
    if name not in commands:
        allowed = ", ".join([*commands, "data"] if commands is _COMMANDS else commands)
        raise InvalidInput(f"{shown!r} is not a command; it must be one of {allowed}.")
    return commands[name]


def _parse(command: type[Any], words: list[str], program: str, default: Any) -> Any:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(command, prog=program, args=words, default=default)
    except SystemExit as end:
        if end.code in (0, None):
            raise
        sentence = _first_paragraph(said.getvalue())
        raise InvalidInput(f"{sentence} (see {program} --help).") from None


def _first_paragraph(box: str) -> str:
    """Return what tyro says in the first part of its framed message, as one sentence."""
    lines = []
    for line in box.splitlines():
        text = line.strip("│╭╮╰╯ ")
        if line.startswith("╭"):
            continue
        if text.startswith("──") or line.startswith("╰"):
            break
        lines.append(text)
    sentence = " ".join(" ".join(lines).split()).rstrip(".")
    for python, plain in _PLAIN_WORDS.items():
        sentence = re.sub(python, plain, sentence)
    return sentence
