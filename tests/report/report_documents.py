"""The document of some folders, and the words in its tables."""

from pathlib import Path

from mpfedcl.report.document import build_document
from mpfedcl.report.result_folders import find_result_folders
from small_experiments import Json


def document_of(*folders: Path) -> Json:
    return build_document(find_result_folders(folders))


def groups_in(document: Json) -> list[Json]:
    """Return the groups of the first section."""
    return list(document["sections"][0]["groups"])


def details_in(document: Json) -> list[Json]:
    """Return what the first section shows of single runs."""
    return list(document["sections"][0]["details"])


def cell_texts(table: Json) -> list[list[str]]:
    return [[cell["text"] for cell in row] for row in table["rows"]]
