"""Settings as flags: classes that are known to nobody beforehand, and settings that stay open."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest
import tyro
from pydantic import Field

from mpfedcl.cli.main import settings_rules
from mpfedcl.experiment.settings import Settings


class Section(Settings):
    """A section that is added."""

    section: ClassVar[str] = "section"
    share: Annotated[float | None, Field(gt=0)] = None
    """Share, of whatever
    it may be."""
    kind: Literal["wide", "narrow"] | None = None
    place: Path | None = None
    count: int = 3


class Whole(Settings):
    """Settings with a section."""

    name: str | None = None
    section_of_it: Section = Section()


def parse(*words: str, default: Whole | None = None) -> Whole:
    return tyro.cli(Whole, args=words, default=default or Whole(), registry=settings_rules({}))


def test_parsed_settings_are_instances_of_their_classes() -> None:
    assert parse() == Whole()
    words = ("--section-of-it.share", "0.5", "--section-of-it.kind", "wide", "--name", "a")
    found = parse(*words)
    assert found == Whole(name="a", section_of_it=Section(share=0.5, kind="wide"))
    assert type(found.section_of_it) is Section


def test_given_settings_are_defaults_of_flags() -> None:
    given = Whole(section_of_it=Section(share=0.5, count=4))
    found = parse("--section-of-it.place", "x", default=given)
    assert found.section_of_it == Section(share=0.5, count=4, place=Path("x"))


def test_help_of_settings_without_a_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "A section that is added." in text
    assert "--section-of-it.share FLOAT Share, of whatever it may be. --" in text
    assert "--section-of-it.kind {wide,narrow} --" in text
    assert "--section-of-it.place PATH --" in text
    assert "--name NAME " in text
    assert "--section-of-it.count INT (default: 3)" in text
    assert "None" not in text
