"""The domains of a data set: what they may be called, and which of them are read."""

from pathlib import Path

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment.settings import DatasetSettings

_LONGEST_NAME = 200


def list_visible_entries(folder: Path) -> list[Path]:
    """Return the entries of a folder in order of name, without hidden ones."""
    found = (entry for entry in folder.iterdir() if not entry.name.startswith("."))
    return sorted(found, key=lambda entry: entry.name)


def check_domain_name(name: str, root: Path) -> None:
    """Refuse names that cannot become a client's, which names files and travels as text."""
    is_plain = name.isprintable() and "/" not in name and not name.startswith(".")
    if len(name.encode("utf-8", "surrogateescape")) > _LONGEST_NAME or not is_plain:
        raise InvalidInput(
            f"{str(root)!r} has the domain {name!r}; a domain's name must be printable text of at "
            f"most {_LONGEST_NAME} bytes, without slashes and without a dot at its beginning."
        )


def choose_domains(available: list[str], dataset: DatasetSettings, place: str) -> list[str]:
    """Return the domains to read, in order of name."""
    for name in dataset.domains:
        if name not in available:
            raise InvalidInput(
                f"dataset.domains has {name!r}; {place} has the domains {', '.join(available)}."
            )
    return sorted(set(dataset.domains)) or available
