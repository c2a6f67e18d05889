"""The database behind the feature cache: SQLite, shared by processes, safe to kill."""

import contextlib
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

Key = bytes
"""SHA-256 of what a row stands for."""

_LAYOUT = 1
"""Raised whenever the tables change; a file of another layout is emptied."""
_SECONDS_TO_WAIT = 30.0
_KEYS_AT_ONCE = 500
_SECONDS_BETWEEN_NOTES = 3600
"""How exactly the last use is known: a run that only reads then writes next to nothing."""
_SHARE_KEPT = 0.9
"""What is left of the largest size after old rows were dropped, so that it is not done daily."""
_PAGE_BYTES = 16_384
"""In pages of SQLite's usual 4 KiB, half of the room beside a vector of 512 numbers is lost."""
_FEWEST_DROPPED = 64
_CHECK_BYTES = 4

_TABLES = """
CREATE TABLE IF NOT EXISTS encoders (
    id INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL UNIQUE, name TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS features (
    id INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL UNIQUE, vector BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS uses (
    id INTEGER PRIMARY KEY, encoder INTEGER NOT NULL, used INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS listings (
    key BLOB PRIMARY KEY, keys BLOB NOT NULL, used INTEGER NOT NULL);
"""


@dataclass(frozen=True)
class StoreDescription:
    """What a store holds."""

    rows: int
    bytes: int
    encoders: dict[str, int]
    """Images encoded, by the encoder's name and the begin of its fingerprint."""


class FeatureStore:
    """Vectors by key, and lists of keys by key. Every method may raise sqlite3.Error."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self._limit = limit
        path.parent.mkdir(parents=True, exist_ok=True)
        self.connection = self._open()

    def _open(self) -> sqlite3.Connection:
        # Two processes that begin together must not both make the tables, or set WAL.
        with _lock(self.path):
            connection = sqlite3.connect(self.path, _SECONDS_TO_WAIT, isolation_level=None)
            try:
                connection.execute("PRAGMA synchronous = NORMAL")
                (layout,) = connection.execute("PRAGMA user_version").fetchone()
                if layout != _LAYOUT:
                    _create_tables(connection)
            except BaseException:
                connection.close()
                raise
        return connection

    def close(self) -> None:
        """Let go of the file."""
        self.connection.close()

    def __del__(self) -> None:
        # Newer Pythons warn of a connection that is forgotten; nothing is lost by forgetting one.
        with contextlib.suppress(AttributeError):
            self.connection.close()

    def read_listing(self, key: Key) -> list[Key] | None:
        """Return the keys of a source in order, or None."""
        row = self.connection.execute("SELECT keys FROM listings WHERE key = ?", (key,)).fetchone()
        if row is None or len(row[0]) % 32:
            return None
        return [row[0][first : first + 32] for first in range(0, len(row[0]), 32)]

    def write_listing(self, key: Key, keys: Sequence[Key]) -> None:
        """Keep the keys of a source."""
        self.connection.execute(
            "INSERT OR REPLACE INTO listings VALUES (?, ?, ?)",
            (key, b"".join(keys), int(time.time())),
        )
        self._enforce_limit()

    def read(self, keys: Iterable[Key]) -> tuple[dict[Key, bytes], list[int]]:
        """Return the sound vectors by key, and the rows whose use is to be noted again."""
        old = int(time.time()) - _SECONDS_BETWEEN_NOTES
        found: dict[Key, bytes] = {}
        stale: list[int] = []
        wanted = list(dict.fromkeys(keys))
        for first in range(0, len(wanted), _KEYS_AT_ONCE):
            some = wanted[first : first + _KEYS_AT_ONCE]
            marks = ",".join("?" * len(some))
            for key, blob, row, used in self.connection.execute(
                "SELECT key, vector, id, used FROM features JOIN uses USING (id) "
                f"WHERE key IN ({marks})",
                some,
            ):
                vector = blob[:-_CHECK_BYTES]
                # SQLite keeps no checksums: a rotten byte would else go unnoticed for ever.
                if _check_bytes(vector) == blob[-_CHECK_BYTES:]:
                    found[key] = vector
                if used <= old:
                    stale.append(row)
        return found, stale

    def note_use(self, rows: Sequence[int], listing: Key) -> None:
        """Note that rows and a listing are in use now."""
        now = int(time.time())
        with self._transaction():
            self.connection.executemany(
                "UPDATE uses SET used = ? WHERE id = ?", [(now, row) for row in rows]
            )
            self.connection.execute("UPDATE listings SET used = ? WHERE key = ?", (now, listing))

    def write(self, fingerprint: str, name: str, vectors: dict[Key, bytes]) -> None:
        """Keep vectors, all or none of them; what another process wrote meanwhile stays."""
        now = int(time.time())
        with self._transaction():
            self.connection.execute(
                "INSERT OR IGNORE INTO encoders (fingerprint, name) VALUES (?, ?)",
                (fingerprint, name),
            )
            (encoder,) = self.connection.execute(
                "SELECT id FROM encoders WHERE fingerprint = ?", (fingerprint,)
            ).fetchone()
            for key, vector in vectors.items():
                blob = vector + _check_bytes(vector)
                # An unsound row is replaced, a sound one is the same anyway.
                (row,) = self.connection.execute(
                    "INSERT INTO features (key, vector) VALUES (?, ?) "
                    "ON CONFLICT (key) DO UPDATE SET vector = excluded.vector RETURNING id",
                    (key, blob),
                ).fetchone()
                self.connection.execute(
                    "INSERT OR REPLACE INTO uses VALUES (?, ?, ?)", (row, encoder, now)
                )
        self._enforce_limit()

    def describe(self) -> StoreDescription:
        """Return how much of which encoder is here."""
        (rows,) = self.connection.execute("SELECT COUNT(*) FROM uses").fetchone()
        encoders = self.connection.execute(
            "SELECT name, fingerprint, COUNT(*) FROM uses JOIN encoders ON encoder = encoders.id "
            "GROUP BY encoder ORDER BY name, fingerprint"
        )
        return StoreDescription(
            rows,
            self._bytes_used(),
            {f"{name} {fingerprint[:12]}": count for name, fingerprint, count in encoders},
        )

    def clear(self) -> None:
        """Drop everything and give the room back."""
        with self._transaction():
            for table in ("features", "uses", "listings", "encoders"):
                self.connection.execute(f"DELETE FROM {table}")
        self._release_space()

    def _bytes_used(self) -> int:
        size, pages, free = (
            self.connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_size", "page_count", "freelist_count")
        )
        return int(size * (pages - free))

    def _enforce_limit(self) -> None:
        """Drop the rows and listings that were not used for the longest time, if need be."""
        if self._bytes_used() <= self._limit:
            return
        aim = self._limit * _SHARE_KEPT
        last_used = 0
        with self._transaction():
            while (now_used := self._bytes_used()) > aim:
                (rows,) = self.connection.execute("SELECT COUNT(*) FROM uses").fetchone()
                number = max(_FEWEST_DROPPED, int(rows * (1 - aim / now_used)))
                oldest = self.connection.execute(
                    "SELECT id, used FROM uses ORDER BY used, id LIMIT ?", (number,)
                ).fetchall()
                if not oldest:
                    break
                last_used = oldest[-1][1]
                for table in ("features", "uses"):
                    self.connection.executemany(
                        f"DELETE FROM {table} WHERE id = ?", [(row,) for row, _ in oldest]
                    )
            # Without its rows a listing is of no use.
            self.connection.execute("DELETE FROM listings WHERE used <= ?", (last_used,))
        self._release_space()

    def _release_space(self) -> None:
        # Others may be reading; the room is then given back another time.
        with contextlib.suppress(sqlite3.OperationalError):
            self.connection.execute("PRAGMA incremental_vacuum").fetchall()
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        # IMMEDIATE waits for its turn; a lock that is only asked for midway cannot be waited for.
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            # Some errors, such as a full disk, have rolled it back already.
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")


def _create_tables(connection: sqlite3.Connection) -> None:
    """Make the tables, in place of those of another layout."""
    # The first two must precede the first table; later they change nothing.
    connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    for table in ("encoders", "features", "uses", "listings"):
        connection.execute(f"DROP TABLE IF EXISTS {table}")
    connection.executescript(_TABLES)
    connection.execute(f"PRAGMA user_version = {_LAYOUT}")


def is_damaged(error: sqlite3.Error) -> bool:
    """Tell whether an error means that the file's bytes are wrong, not that its place is."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
    )


def move_damaged_database(path: Path) -> Path:
    """Move a damaged database out of the way, unless another process just did; return where to."""
    aside = path.with_name(f"{path.name}.damaged")
    with _lock(path):
        if path.exists() and not _is_sound(path):
            # One such file is kept, for whoever wonders; more would only fill the disk.
            path.replace(aside)
            for suffix in ("-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
    return aside


def _is_sound(path: Path) -> bool:
    try:
        with contextlib.closing(sqlite3.connect(path, _SECONDS_TO_WAIT)) as connection:
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
    except sqlite3.DatabaseError as error:
        return not is_damaged(error)


def _check_bytes(vector: bytes) -> bytes:
    return zlib.crc32(vector).to_bytes(_CHECK_BYTES, "big")


def _lock(path: Path) -> FileLock:
    """Return the right to make or replace the database; ends with the process, however it ends."""
    return FileLock(path.with_name(f"{path.name}.lock"), thread_local=False, fallback_to_soft=False)
