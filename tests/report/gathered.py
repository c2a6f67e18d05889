"""The document of some folders, and the words in its tables."""

from pathlib import Path

from mpfedcl.report.document import gather_document
from mpfedcl.report.sources import find_sources
from small_runs import Json


def gather(*folders: Path) -> Json:
    return gather_document(find_sources(folders))


def texts(table: Json) -> list[list[str]]:
    return [[cell["text"] for cell in row] for row in table["rows"]]
