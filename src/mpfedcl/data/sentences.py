"""Texts in CSV, Parquet or JSON files, encoded into npz files of feature vectors."""

import hashlib
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from mpfedcl.core.errors import InvalidInput, explain_faults
from mpfedcl.core.files import write_atomically
from mpfedcl.data.samples import Indices
from mpfedcl.data.set_folders import check_domain_name, list_visible_entries
from mpfedcl.data.table_files import EXTENSIONS, convert_columns, is_table_file, read_table
from mpfedcl.models.encoders.sentence_encoder import SentenceEncoder
from mpfedcl.models.feature_cache import FeatureCache

_MOST_CLASSES = 1000
"""More indicate a measurement, a name, or the column of the texts."""
_PARTS = ("train", "test")

_Rows = list[dict[str, str | None]]
"""Rows with a text, a client and perhaps a label and a split."""


@dataclass(frozen=True)
class TextColumns:
    """Names of columns; JSON files have none."""

    text: str | None = None
    label: str | None = None
    client: str | None = None
    """The owner of each row; without it, each file is a client."""
    split: str | None = None
    """The part of each row: train or test."""

    def __post_init__(self) -> None:
        roles = {name: role for role, name in self.named.items()}
        for role, name in self.named.items():
            if roles[name] != role:
                raise InvalidInput(
                    f"{role} is {name!r}, and so is {roles[name]}; they must be two columns."
                )

    @property
    def named(self) -> dict[str, str]:
        """The columns by what they hold, without those that are left out."""
        return {role: name for role, name in asdict(self).items() if name is not None}


def write_text_features(
    data: Path, out: Path, encoder: SentenceEncoder, columns: TextColumns
) -> tuple[dict[Path, int], list[str]]:
    """Encode texts into `OUT/<client>.npz` files; return their numbers of samples, and notices.

    Args:
        data: A file, or a folder of files: tables, or JSON lists of [text, label]. Without a
            column of labels the npz files can only be used for predictions.
        out: A new or empty folder.
        encoder: Makes vectors of texts.
        columns: The columns of tables.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidInput(f"out is {str(out)!r}; it must be a new or an empty folder.")
    rows = [row for path in _list_files(data) for row in _read_rows(path, columns)]
    is_labeled = any(row.get("label") is not None for row in rows)
    if columns.label and not is_labeled:
        raise InvalidInput(f"label is {columns.label!r}, which is empty; some rows must have one.")
    kept = [row for row in rows if not is_labeled or row.get("label") is not None]
    arrays: dict[str, Any] = {}
    if is_labeled:
        arrays["classes"], labels = _number_classes([str(row["label"]) for row in kept], data)
    names, clients = numpy.unique([str(row["client"]) for row in kept], return_inverse=True)
    parts = numpy.array([row.get("split") or _PARTS[0] for row in kept])
    for place, name in enumerate(names):
        check_domain_name(name, data)
        if is_labeled and _PARTS[0] not in parts[clients == place]:
            raise InvalidInput(
                f"split is {columns.split!r}, which gives the client {str(name)!r} no row to train "
                "on; each client must have one."
            )
    texts = [row["text"] or "" for row in kept]
    content = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    features = FeatureCache().find_or_make(
        encoder.name, f"{encoder.fingerprint} {content}", lambda: encoder.encode(texts)
    )
    out.mkdir(parents=True, exist_ok=True)
    written = {}
    for place, name in enumerate(names):
        own = clients == place
        if not is_labeled and not columns.split:
            arrays["x"] = features[own]
        else:
            for part in _PARTS if columns.split else _PARTS[:1]:
                arrays[f"x_{part}"] = features[own & (parts == part)]
                if is_labeled:
                    arrays[f"y_{part}"] = labels[own & (parts == part)]
        buffer = io.BytesIO()
        numpy.savez(buffer, **arrays)
        path = out / f"{name}.npz"
        write_atomically(path, buffer.getvalue())
        written[path] = int(own.sum())
    counts = {
        "rows without a label, left out": len(rows) - len(kept),
        "empty texts": texts.count(""),
        f"texts cut after {encoder.most_tokens} tokens": encoder.count_cut(texts),
    }
    return written, [f"{what}: {count:,}" for what, count in counts.items() if count]


def _list_files(data: Path) -> list[Path]:
    entries = list_visible_entries(data) if data.is_dir() else [data]
    found = [path for path in entries if is_table_file(path) or _is_json(path)]
    if not found:
        raise InvalidInput(
            f"DATA is {str(data)!r}; with encoder sentence:PATH it must be a file "
            f"{' or '.join(f'*{each}' for each in (*EXTENSIONS, '.json'))}, or a folder of these."
        )
    stems = [path.stem for path in found]
    if twice := [stem for stem in stems if stems.count(stem) > 1]:
        raise InvalidInput(
            f"{data} has two files {twice[0]!r}; each must have a name of its own, its client's."
        )
    return found


def _is_json(path: Path) -> bool:
    return path.suffix.lower() == ".json" and path.is_file()


def _read_rows(path: Path, columns: TextColumns) -> _Rows:
    named = columns.named
    if _is_json(path):
        if named:
            role, name = next(iter(named.items()))
            raise InvalidInput(
                f"{role} is {name!r}; it must be left out, because {path} has no columns."
            )
        return _read_json(path)
    frame = read_table(path)
    if "text" not in named:
        raise InvalidInput(
            f"text is not set; it must name the column of the texts in {path}: "
            f"{', '.join(frame.columns)}."
        )
    frame = convert_columns(frame, dict.fromkeys(named.values(), "text"), path)
    rows: _Rows = [
        {"client": path.stem, **dict(zip(named, cells, strict=True))}
        for cells in frame.select(list(named.values())).iter_rows()
    ]
    for number, row in enumerate(rows, start=1):
        if row["client"] is None:
            raise InvalidInput(
                f"{path}: column {columns.client!r} is empty in row {number}; each row must name "
                "its owner."
            )
        if columns.split and row["split"] not in _PARTS:
            raise InvalidInput(
                f"{path}: column {columns.split!r} has {row['split']!r} in row {number}; it must "
                f"be {' or '.join(_PARTS)}."
            )
    return rows


def _read_json(path: Path) -> _Rows:
    rows: _Rows = []
    wanted = "a list of [text, label]"
    with explain_faults(path, wanted):
        items = json.loads(path.read_bytes())
    for item in items if isinstance(items, list) else [items]:
        match item:
            case [str() as text, str() | int() | float() as label]:
                rows.append({"text": text, "label": str(label), "client": path.stem})
            case _:
                raise InvalidInput(
                    f"{path} has {item!r:.80} as item {len(rows) + 1}; it must be {wanted}."
                )
    if not rows:
        raise InvalidInput(f"{path} has no texts; it must have at least one.")
    return rows


def _number_classes(words: list[str], data: Path) -> tuple[NDArray[numpy.str_], Indices]:
    """Return the names of the classes and the labels; whole numbers are classes in their order."""
    about = f"{data}: the labels"
    if (count := len(set(words))) > _MOST_CLASSES:
        raise InvalidInput(
            f"{about} have {count:,} different values; there must be at most {_MOST_CLASSES:,}."
        )
    if odd := [word for word in words if not word or not word.isprintable()]:
        raise InvalidInput(f"{about} have {odd[0]!r}; each must be printable text.")
    try:
        numbers = numpy.array(words, dtype=numpy.float64)
    except ValueError:
        names, labels = numpy.unique(words, return_inverse=True)
        return names, labels
    with numpy.errstate(invalid="ignore"):
        measured = numbers[numbers % 1 != 0]
    if measured.size:
        raise InvalidInput(
            f"{about} have the number {measured[0]:g}; they must be text or whole numbers: "
            "classes, and no measurements."
        )
    values, labels = numpy.unique(numbers, return_inverse=True)
    return numpy.array([str(int(value)) for value in values]), labels
