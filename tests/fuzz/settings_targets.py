"""Settings as files, as words of a command and as Flower's run configuration."""

import json
import tomllib
from pathlib import Path
from random import Random
from typing import Any

import tomli_w
from fuzz_target import Target
from mutations import ODD_VALUES, change_bytes, change_text, change_value

from mpfedcl.cli.main import parse
from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment

HONEST = tomllib.loads(Experiment(clients=5).resolved().to_toml())
NAMES = [
    *(name for name, value in HONEST.items() if not isinstance(value, dict)),
    *(f"{s}.{name}" for s, each in HONEST.items() if isinstance(each, dict) for name in each),
]
WORDS = ("", "0", "-1", "1e999", "nan", "auto", "none", "a b", "mean", "median", "x" * 300, "[1,2]")


class SettingsTarget(Target):
    """A TOML file: what is read is written and read again as it was."""

    name = "settings"
    refusals = (InvalidInput,)

    def make(self, random: Random) -> Any:
        """Return a changed document."""
        values: Any = HONEST
        for _ in range(random.choice((1, 1, 2, 5))):
            values = change_value(random, values)
        try:
            text = tomli_w.dumps(values)
        # What TOML cannot say at all.
        except (TypeError, AttributeError, ValueError, RecursionError):
            text = tomli_w.dumps(HONEST)
        if random.random() < 0.3:
            text = change_text(random, text)
        content = text.encode("utf-8", "surrogatepass")
        return change_bytes(random, content) if random.random() < 0.1 else content

    def check(self, made: Any) -> None:
        """Read it from a text, as files are read."""
        try:
            text = made.decode()
        except UnicodeDecodeError:
            return
        experiment = Experiment.parse_toml(text, Path("a.toml"))
        assert Experiment.parse_toml(experiment.to_toml(), Path("a.toml")) == experiment


class FlagsTarget(Target):
    """The words of a command."""

    name = "flags"
    refusals = (InvalidInput,)

    def make(self, random: Random) -> Any:
        """Return words, as JSON."""
        words = ["run", "--rounds", "3"]
        for _ in range(random.randrange(3)):
            name = random.choice(NAMES).replace("_", "-")
            value = random.choice([*WORDS, *map(str, ODD_VALUES)] + ["1", "2", "0.5"] * 20)
            words += random.choice([[f"--{name}", value], [f"--{name}={value}"], [f"--{name}"]])
        return json.dumps(words).encode()

    def check(self, made: Any) -> None:
        """Parse them as the command does."""
        parse(json.loads(made))


TARGETS = (SettingsTarget, FlagsTarget)
