"""A rounds.jsonl that grows while it is read: only what is new is read, and only whole lines."""

import os
from pathlib import Path

from pydantic import ValidationError

from mpfedcl.report.watch.regular_files import file_signature, open_regular_file
from mpfedcl.rounds.record import RoundRecord

MOST_LINE_BYTES = 16 * 2**20
"""A longer line is nobody's record: ten thousand clients' takes two million bytes."""
_PIECE_BYTES = 2**20
_MOST_BYTES_AT_ONCE = 64 * 2**20
"""Bytes read before others get their turn; the rest comes next time."""


class IncrementalRecords:
    """Reads records as they are added; a line that cannot be read is counted and left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reset()

    def _reset(self) -> None:
        self._inode: int | None = None
        self._offset = 0
        self._rest = b""
        self._is_skipping = False
        self._last = 0
        self.damaged = 0

    def read_new(self) -> tuple[bool, list[RoundRecord]]:
        """Return the rounds that are new, and whether they start again from the first."""
        signature = file_signature(self._path)
        inode, size = signature[:2] if signature else (None, 0)
        # A resumed run replaces the file; one that is cut short makes it smaller.
        is_new = inode != self._inode or size < self._offset
        began = is_new and self._inode is not None
        if is_new:
            self._reset()
        if inode is None or size == self._offset:
            return began, []
        found: list[RoundRecord] = []
        try:
            with open_regular_file(self._path) as handle:
                self._inode = os.fstat(handle).st_ino
                os.lseek(handle, self._offset, os.SEEK_SET)
                begun_at = self._offset
                while self._offset - begun_at < _MOST_BYTES_AT_ONCE:
                    piece = os.read(handle, _PIECE_BYTES)
                    if not piece:
                        break
                    self._offset += len(piece)
                    found += self._parse_lines(piece)
        except OSError:
            # Gone or replaced since: the next read starts again.
            self._inode = None
        return began, found

    def _parse_lines(self, piece: bytes) -> list[RoundRecord]:
        *whole, rest = piece.split(b"\n")
        found = []
        for line in whole:
            if self._is_skipping:
                self._is_skipping = False
            elif (record := self._parse(self._rest + line)) is not None:
                found.append(record)
            self._rest = b""
        if not self._is_skipping:
            self._rest += rest
        if len(self._rest) > MOST_LINE_BYTES:
            self._rest, self._is_skipping = b"", True
            self.damaged += 1
        return found

    def _parse(self, line: bytes) -> RoundRecord | None:
        if not line.strip():
            return None
        try:
            record = RoundRecord.model_validate_json(line)
        except ValidationError:
            self.damaged += 1
            return None
        if record.round <= self._last:
            self.damaged += 1
            return None
        self._last = record.round
        return record
