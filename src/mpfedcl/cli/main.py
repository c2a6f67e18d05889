"""Parse the command line, call the command, and report errors in one sentence."""

import contextlib
import io
import os
import re
import signal
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import tyro

from mpfedcl.cli.arguments import (
    COMMANDS,
    Compare,
    DataFetch,
    DataShow,
    FederationStart,
    Run,
    Tune,
)
from mpfedcl.cli.flags import list_flags, settings_rules
from mpfedcl.core.errors import InvalidInput, LostWorker
from mpfedcl.core.plugins import allow_current_folder
from mpfedcl.data.folders import find_set_folder
from mpfedcl.data.public.sources import fetch_plan
from mpfedcl.experiment import RESULT_NEUTRAL_SETTINGS, Experiment
from mpfedcl.experiment.datasets import find_specification
from mpfedcl.experiment.method_settings import sections_of
from mpfedcl.experiment.names import (
    check_encoder_name,
    check_method_name,
    did_you_mean,
    did_you_mean_setting,
    is_built_in,
)
from mpfedcl.experiment.settings import Settings

_FOOTER = """
Each takes --help. A first look, on the data inside the package: mpfedcl run --rounds 10
"""

_NAME_WIDTH = 12
"""Columns that the overview gives to names; longer ones push their usage to the right."""

_WITH_FILE = Run | Compare | Tune | FederationStart
"""Commands that take a file of settings."""

_GROUPS = {name.split()[0] for name in COMMANDS if " " in name}
"""First words of commands that have two."""

_ALL = "all"
"""Stands for all methods that fit the data, in place of a method's name."""

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
"""Errors of Python and tyro about bad values, and how we word them."""

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
    """Run the program."""
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
    """Tell whether memory ran out; torch has several words for it."""
    words = ("allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError) or any(each in str(error) for each in words)


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help") or _is_bare_group(argv):
        print(_overview(), end="")
        return 0
    if argv[0] == "--version":
        print(version("mpfedcl"))
        return 0
    arguments = parse(argv)
    _check_names(arguments)
    name, _ = _find_command(argv)
    # Only now: what a command needs, torch above all, takes seconds to load.
    module = import_module(f"mpfedcl.cli.{COMMANDS[name].module}")
    code: int = getattr(module, COMMANDS[name].function)(arguments)
    return code


def _overview() -> str:
    """Return the help text that lists all commands."""
    usages = {
        f"  mpfedcl {each.name:{_NAME_WIDTH}} {each.usage}": each.help for each in COMMANDS.values()
    }
    width = max(map(len, usages))
    lines = [f"{usage:{width}}  {words}" for usage, words in usages.items()]
    return "\n".join(["mpfedcl: federated learning on non-IID client data", "", *lines, _FOOTER])


def _is_bare_group(argv: list[str]) -> bool:
    return argv[0] in _GROUPS and argv[1:] in ([], ["-h"], ["--help"])


def _find_command(argv: list[str]) -> tuple[str, list[str]]:
    """Return the command's name, of one word or two, and the arguments after it."""
    length = 2 if argv[0] in _GROUPS else 1
    name = " ".join(argv[:length])
    if name not in COMMANDS:
        raise InvalidInput(
            f"{name!r} is not a command; it must be one of {', '.join(COMMANDS)}"
            f"{did_you_mean(name, COMMANDS)}."
        )
    return name, argv[length:]


def parse(argv: list[str]) -> Any:
    """Return a command's arguments: defaults, then the file's, then the flags'."""
    name, rest = _find_command(argv)
    command = COMMANDS[name].arguments
    sections: Mapping[str, type[Settings]] = {}
    if "settings" in command.__dataclass_fields__:
        many = "methods" in command.__dataclass_fields__
        sections = _import_own_methods(rest, from_files=not many)
    program = _Program(f"mpfedcl {name}", rest, sections)
    parsed = program.parse(command)
    is_run, is_start = (isinstance(parsed, each) for each in (Run, FederationStart))
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
    # Flags override the file, and only parsing tells which flags are given: parse again, with the
    # file's settings as the defaults.
    given = {"directory": parsed.directory} if is_start else {}
    parsed = program.parse(command, command(**given, settings=kept))
    if is_resumed:
        free = ("rounds", *RESULT_NEUTRAL_SETTINGS) if is_run else ("rounds",)
        rule = _RESUME_ALLOWS if is_run else "resume allows only --rounds beside it"
        if parsed.settings.replace(**{name: kept.setting(name) for name in free}) != kept:
            raise InvalidInput(f"{rule}; other settings stay as they were.")
    return parsed


def _check_names(arguments: Any) -> None:
    """Refuse unknown methods, data sets and encoders, and missing data, before torch is loaded."""
    for method in getattr(arguments, "methods", ()):
        if method != _ALL:
            check_method_name(method)
    if isinstance(arguments, DataFetch):
        fetch_plan(arguments.name)
    settings = getattr(arguments, "settings", None)
    if not isinstance(settings, Experiment):
        return
    dataset = settings.dataset
    if isinstance(arguments, DataShow):
        dataset = dataset.model_copy(update={"name": arguments.name})
    spec = find_specification(dataset.name)
    if settings.encoder.name is not None:
        check_encoder_name(settings.encoder.name)
    # Over a network the data are with the clients; a process that torchrun has started must first
    # join the others, or they would wait for it.
    is_read_here = isinstance(arguments, Run | Compare | Tune | DataShow)
    if is_read_here and "RANK" not in os.environ and not spec.embedded and dataset.name != "table":
        find_set_folder(dataset)


def _import_own_methods(words: Sequence[str], *, from_files: bool) -> dict[str, type[Settings]]:
    """Import methods of the user that a command names; return the sections of settings.

    Their settings are flags, so they must be known before parsing. With `from_files`, a method that
    no flag names is looked up in the file of settings or the run to resume.
    """
    # What follows the one value of --method may be a file.
    said = [*_values_of("--method", words)[:1], *_values_of("--methods", words)]
    tracked = any(":" in name for name in _values_of("--track", words))
    if tracked or not all(map(is_built_in, said)):
        allow_current_folder()
    if not said and from_files:
        said = list(_methods_in_files(words))
    sections = sections_of("")
    for name in said:
        if not is_built_in(name):
            # Only now: it takes torch, which takes seconds to load.
            import_module("mpfedcl.methods").find_method(name)
            sections |= sections_of(name)
    return sections


def _values_of(flag: str, words: Sequence[str]) -> list[str]:
    """Return the values of a flag, `--flag a b` or `--flag=a`; some may be positional arguments."""
    values, is_value = [], False
    for word in words:
        if word.startswith("-"):
            is_value = word == flag
            values += [word.removeprefix(f"{flag}=")] if word.startswith(f"{flag}=") else []
        elif is_value:
            values.append(word)
    return values


def _methods_in_files(words: Sequence[str]) -> Iterator[str]:
    """Yield the methods named by files of settings among the words; parsing reports bad files."""
    resumed = [Path(word) / "experiment.toml" for word in _values_of("--resume", words)[:1]]
    for path in [*resumed, *(Path(word) for word in words if word.endswith(".toml"))]:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            method = tomllib.loads(path.read_text(encoding="utf-8")).get("method")
            if isinstance(method, str):
                yield method


@dataclass(frozen=True)
class _Program:
    """A command's name as help shows it, its words, and the sections of settings of methods."""

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
    """Return the first part of tyro's framed message as one sentence."""
    lines = box.splitlines()
    texts = [line.strip("│ ") for line in lines]
    # If the locale has no frames, hyphens stand below the title.
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
