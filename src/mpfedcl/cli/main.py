"""Parse the command line, call the command, and report errors in one line."""

import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from mpfedcl.cli.arguments import (
    COMMANDS,
    Compare,
    FederationStart,
    flag_type,
)
from mpfedcl.core.errors import InvalidInput, LostWorker
from mpfedcl.core.files import read_bounded
from mpfedcl.core.plugins import allow_current_folder, import_from_current_folder
from mpfedcl.experiment import RESULT_NEUTRAL_SETTINGS, TUNED_RULE, Experiment
from mpfedcl.experiment.experiment import LONGEST_DOCUMENT, parse_document
from mpfedcl.experiment.method_settings import is_declared, sections_of
from mpfedcl.experiment.names import (
    did_you_mean,
    did_you_mean_setting,
    is_built_in,
)
from mpfedcl.experiment.settings import Settings

_HEADINGS = {
    "run": "Experiments",
    "report": "Results",
    "data": "Data",
    "finished_runs": "Finished runs",
    "federation": "Federations over a network",
    "federation_operations": "Operation of a federation",
    "privacy": "Privacy",
}
"""Headings of the overview, by the module that implements the commands."""

_GROUPS = {name.split()[0] for name in COMMANDS if " " in name}
"""First words of commands that have two."""

_UNION, _FROM = r"Error parsing --(\S+): no type matching .*", r" could be .* from \[(.*?)\].*"
_PLAIN_ERRORS = {
    r"Missing from .*?: (--\S+) (\S+) .*": r"\1 is missing; it must be given: \1 \2",
    rf"{_UNION}INT\|\{{(\w+)\}}{_FROM}": r"--\1 is \3; it must be a whole number or \2",
    rf"{_UNION}FLOAT FLOAT FLOAT\}}{_FROM}": r"--\1 is \2; it must be three numbers",
    rf"{_UNION}INT{_FROM}": r"--\1 is \2; it must be a whole number",
    rf"{_UNION}FLOAT{_FROM}": r"--\1 is \2; it must be a number",
    r"Error parsing (\S+): invalid literal for .* ('.*')": r"\1 is \2; it must be a whole number",
    r"Error parsing (\S+): could not convert .* ('.*')": r"\1 is \2; it must be a number",
    r"Error parsing (\S+): Could not find .*: \[(.*)\]": r"\1 is \2; it must be numbers",
    r"invalid choice ('.*') for argument '(\S+)'. Expected one of \((.*)\)": (
        r"\2 is \1; it must be one of \3"
    ),
}
"""Errors of Python and tyro about invalid values, and our wording."""

_UNKNOWN_FLAG = r"Unrecognized options: .*?--([\w.-]+)"

_OUT_OF_MEMORY = (
    "there is not enough memory; clients, model and samples must be fewer or smaller "
    "(fewer --workers or --engine loop need less). Completed rounds are kept."
)


def start() -> NoReturn:
    """Run the program."""
    try:
        main()
    finally:
        # All files are written. Another Ctrl-C while Python exits would change the exit code.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Exit codes: 0 success, 1 a lost process, 2 invalid input, 3 unreadable images among others, 130
    interrupted.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        sys.exit(_dispatch(given) or 0)
    except InvalidInput as error:
        _end(2, str(error))
    except LostWorker as error:
        # Only one process of a run reports the error.
        from mpfedcl.engines.worker_group import is_worker

        _end(1, "" if is_worker() else str(error))
    except BrokenPipeError:
        # The reader has exited (`| head`). Python would fail again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _end(141)
    except OSError as error:
        # Disk full, no permission, a read-only folder: the system's message names the problem.
        _end(2, f"cannot use {error.filename or 'a file'}: {error.strerror or error}.")
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        _end(2, _OUT_OF_MEMORY)
    except KeyboardInterrupt:
        _end(130, "stopped at once; what was done is kept.")


def _end(code: int, message: str = "") -> NoReturn:
    if message:
        print(f"mpfedcl: {message}", file=sys.stderr)
    sys.exit(code)


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out, which torch reports in several ways."""
    words = ("allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError) or any(each in str(error) for each in words)


def _dispatch(argv: list[str]) -> int | None:
    """Run a command; return its exit code, or None for success."""
    if argv == ["--version"]:
        print(version("mpfedcl"))
        return None
    group = argv[1:] if argv and argv[0] in _GROUPS else argv
    if group[:1] in ([], ["-h"], ["--help"], ["help"]):
        print(_overview())
        return None
    arguments = parse(argv)
    name, _ = _find_command(argv)
    # Imported late: torch takes seconds to load.
    module = import_module(f"mpfedcl.cli.{COMMANDS[name].module}")
    code: int | None = getattr(module, f"{name.replace(' ', '_')}_command")(arguments)
    return code


def _overview() -> str:
    """Return the help text that lists all commands."""
    lines = ["mpfedcl: federated learning on non-IID client data", ""]
    width = max(map(len, COMMANDS))
    for module, heading in _HEADINGS.items():
        lines.append(heading)
        commands = [(name, each) for name, each in COMMANDS.items() if each.module == module]
        lines += [f"  mpfedcl {name:{width}}  {each.summary}" for name, each in commands]
    lines += ["", "`mpfedcl COMMAND --help` explains a command. To start: mpfedcl run --rounds 10"]
    return "\n".join(lines)


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
    """Return the arguments of a command: defaults, overridden by the file, then by the flags."""
    name, words = _find_command(argv)
    command = COMMANDS[name].arguments
    names = command.__dataclass_fields__
    sections: Mapping[str, type[Settings]] = {}
    if "settings" in names:
        sections = _import_own_methods(words, from_files="methods" not in names)
    rules = settings_rules(sections)
    parse_words = partial(_parse_words, command, f"mpfedcl {name}", words, rules)
    parsed = parse_words()
    if "own_models" in names:
        for field, own in (
            ("method", parsed.method),
            *(("model.name", n) for n in parsed.own_models),
        ):
            if own is not None and ":" in own:
                import_from_current_folder(field, own)
    file: Path | None = getattr(parsed, "file", None)
    resumed: Path | None = getattr(parsed, "resume", None)
    if getattr(parsed, "tuned", None) is not None:
        parsed = _check_tuned(parsed, words)
    over_network = isinstance(parsed, FederationStart)
    free = ("rounds",) if over_network else ("rounds", *RESULT_NEUTRAL_SETTINGS)
    rule = f"resume allows only {', '.join(f'--{each}' for each in free).replace('_', '-')} with it"
    if resumed is not None:
        if file is not None or parsed.out is not None:
            raise InvalidInput(f"{rule}; a file or --out must not be given.")
        file = resumed / "experiment.toml"
        if not file.is_file():
            raise InvalidInput(f"resume is {str(resumed)!r}; it must be a folder that holds a run.")
    if file is None:
        return parsed
    kept = Experiment.from_toml(file, complete=resumed is not None)
    # Flags override the file, and only parsing shows which flags are given: parse again, with the
    # settings of the file as the defaults.
    given = {"directory": parsed.directory} if over_network else {}
    parsed = parse_words(default=command(**given, settings=kept))
    if resumed is not None:
        unchanged = parsed.settings.replace(**{name: kept.setting(name) for name in free})
        if unchanged != kept:
            raise InvalidInput(f"{rule}; other settings stay as they were.")
    return parsed


def _check_tuned(parsed: Compare, words: Sequence[str]) -> Compare:
    """Reject settings next to tuned ones; without --methods, all tuned methods are compared."""
    free = {*Compare.__dataclass_fields__, *RESULT_NEUTRAL_SETTINGS} - {"file", "settings"}
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    if parsed.file is not None or flags - {f"--{name.replace('_', '-')}" for name in free}:
        raise InvalidInput(TUNED_RULE)
    return parsed if "--methods" in flags else replace(parsed, methods=())


def _parse_words(
    command: type[Any], program: str, words: list[str], rules: ConstructorRegistry, **default: Any
) -> Any:
    """Return the arguments of a command; those that are not given are as in `default`."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(command, prog=program, args=words, registry=rules, **default)
    except SystemExit as end:
        if end.code in (0, None):
            raise
        message = _first_paragraph(said.getvalue())
        if not (unknown := re.match(_UNKNOWN_FLAG, message)):
            raise InvalidInput(f"{message} (see {program} --help).") from None
        question = did_you_mean_setting(unknown[1], _list_flags(command, rules), "--")
        raise InvalidInput(
            f"--{unknown[1]} is not an option{question}; {program} --help lists them all."
        ) from None


def _list_flags(command: type[Any], rules: ConstructorRegistry) -> list[str]:
    """Return the names of a command's flags, without the hyphens before them."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        tyro.cli(command, args=["--help"], registry=rules)
    return re.findall(r"^\W*--([\w.-]+)", said.getvalue(), re.MULTILINE)


def _first_paragraph(box: str) -> str:
    """Return the first part of tyro's framed message on one line, in our words."""
    # If the locale has no frames, hyphens underline the title.
    lines = [re.sub(r"^([╭╰].*|[─-]+)$", "\0", line.strip("│ ")) for line in box.splitlines()]
    texts = "\n".join(lines).split("\0")
    sentence = " ".join(texts[min(1, len(texts) - 1)].split()).rstrip(".")
    for python, plain in _PLAIN_ERRORS.items():
        sentence = re.sub(python, plain, sentence)
    return sentence


def _import_own_methods(words: Sequence[str], *, from_files: bool) -> dict[str, type[Settings]]:
    """Import custom methods that a command names; return the sections of their settings.

    Their settings are flags, which must be known before parsing. With `from_files`, a method that
    no flag names is looked up in the file of settings or in the run to resume.
    """
    # The word after the value of --method may be a file.
    said = [*_values_of("--method", words)[:1], *_values_of("--methods", words)]
    flags = ("--track", "--metric", "--dataset.name", "--model.name", "--models", "--model.clients")
    imports = any(":" in name for flag in flags for name in _values_of(flag, words))
    if imports or not all(map(is_built_in, said)):
        allow_current_folder()
    sections = sections_of("")
    for name in said or (_methods_in_files(words) if from_files else ()):
        if not is_built_in(name):
            # Imported late: torch takes seconds to load.
            import_module("mpfedcl.methods").find_method(name)
            sections |= sections_of(name)
    return sections


def _values_of(flag: str, words: Sequence[str]) -> list[str]:
    """Return the values of a flag, `--flag a b` or `--flag=a`; some may be positional arguments."""
    values, is_value = [], False
    for word in words:
        if word.startswith("-"):
            name, _, value = word.partition("=")
            is_value = word == flag
            values += [value] if value and name == flag else []
        elif is_value:
            values.append(word)
    return values


def _methods_in_files(words: Sequence[str]) -> Iterator[str]:
    """Yield the methods named by files of settings; parsing reports invalid files."""
    resumed = [Path(word) / "experiment.toml" for word in _values_of("--resume", words)[:1]]
    for path in [*resumed, *(Path(word) for word in words if word.endswith(".toml"))]:
        with contextlib.suppress(OSError, ValueError, RecursionError, InvalidInput):
            document = read_bounded(path, LONGEST_DOCUMENT).decode()
            method = parse_document(document, path).get("method")
            if isinstance(method, str):
                yield method


# Flags of settings: a new section of an experiment needs no change here


def settings_rules(method_sections: Mapping[str, type[Settings]]) -> ConstructorRegistry:
    """Return the registry with which `tyro.cli` parses settings and these sections of methods."""
    rules = ConstructorRegistry()

    @rules.struct_rule
    def settings_flags(info: StructTypeInfo) -> StructConstructorSpec | None:
        """Return the flags of a class of settings, in the order of its fields."""
        if not (isinstance(info.type, type) and issubclass(info.type, Settings)):
            return None
        values = info.default if isinstance(info.default, Settings) else info.type()
        fields = []
        for name, field in info.type.model_fields.items():
            kind: Any = field.annotation
            # A data set or a method sets a default of None, and the help text names it.
            kind = flag_type(kind) if field.default is None else kind
            # On one line; without a description, help shows the docstring of a section.
            words = " ".join((field.description or "").split()) or None
            fields.append(StructFieldSpec(name, kind, getattr(values, name), words))
        if not isinstance(values, Experiment):
            return StructConstructorSpec(instantiate=info.type, fields=tuple(fields))
        fields += [
            StructFieldSpec(name, kind, getattr(values, name, kind()), None)
            for name, kind in method_sections.items()
        ]
        unknown = {n: v for n, v in (values.model_extra or {}).items() if n not in method_sections}

        def instantiate(method: str, **given: Any) -> Experiment:
            # The table of a class that is not imported yet has no flags and is kept unchanged.
            kept = {} if is_declared(method) else unknown
            return Experiment(method=method, **given, **kept)

        return StructConstructorSpec(instantiate=instantiate, fields=tuple(fields))

    return rules
