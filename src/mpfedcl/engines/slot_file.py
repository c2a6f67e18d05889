"""One file of records that are all of one size at most: each has a slot, and is found by number.

The file begins with one line of JSON that says how large a slot is. A record begins with a checksum
over itself, its owner's number and its length, so that one that is torn, or another's, is noticed.
"""

import json
import os
import stat
import struct
import zlib
from pathlib import Path

from filelock import FileLock

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically

_FORMAT = 1
_PAGE = 4096
"""Slots begin at multiples of it, so that processes that write to different ones share no page."""
_START = struct.Struct("<IxxxxQQ")
"""Checksum, owner, length."""
_LARGEST_SLOT = 2**40


class SlotFile:
    """Reads and writes single records. It knows nothing of which slots are free."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            # A run may come from a stranger, whose link would lead what is written elsewhere.
            self._handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidInput(f"{path} cannot be read: {error.strerror or error}.") from None
        try:
            self._slot_bytes = self._read_header()
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, path: Path, most_bytes: int) -> "SlotFile":
        """Make a file for records of so many bytes, or open the one that another has made."""
        path.parent.mkdir(exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock"), fallback_to_soft=False):
            if not path.exists():
                size = _PAGE * -(-(_START.size + most_bytes) // _PAGE)
                header = json.dumps({"format": _FORMAT, "slot_bytes": size})
                write_atomically(path, header.encode().ljust(_PAGE - 1) + b"\n")
        return cls(path)

    @property
    def capacity(self) -> int:
        """The bytes that a record may have."""
        return self._slot_bytes - _START.size

    @property
    def num_slots(self) -> int:
        """As many as the file reaches to; the last may be cut off."""
        return -(-(os.fstat(self._handle).st_size - _PAGE) // self._slot_bytes)

    def write(self, slot: int, owner: int, content: bytes) -> None:
        """Write a record to a slot that nobody needs any more."""
        assert len(content) <= self.capacity
        record = _START.pack(_checksum(owner, content), owner, len(content)) + content
        place, left = self._place(slot), memoryview(record)
        try:
            while left:
                written = os.pwrite(self._handle, left, place)
                place, left = place + written, left[written:]
        except OSError as error:
            # The system names no file where a write fails.
            error.filename = str(self._path)
            raise

    def read(self, slot: int, owner: int) -> bytes:
        """Return an owner's record."""
        place = self._place(slot)
        # No more than there is: a stranger's file may say that slots are huge.
        rest = max(0, os.fstat(self._handle).st_size - place)
        found = os.pread(self._handle, min(self._slot_bytes, rest), place)
        if len(found) >= _START.size:
            checksum, whose, length = _START.unpack_from(found)
            content = found[_START.size : _START.size + length]
            if (whose, len(content)) == (owner, length) and checksum == _checksum(owner, content):
                return content
        raise InvalidInput(
            f"{self._path} is damaged at record {slot}; it must be as the run wrote it, or the run "
            "must be started again in a new folder."
        )

    def sync(self) -> None:
        """Wait until all that was written is on disk."""
        try:
            os.fsync(self._handle)
        except OSError as error:
            error.filename = str(self._path)
            raise

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._handle)

    def _place(self, slot: int) -> int:
        return _PAGE + slot * self._slot_bytes

    def _read_header(self) -> int:
        """Return how large slots are; refuse a file that is none of ours."""
        size = None
        if stat.S_ISREG(os.fstat(self._handle).st_mode):
            try:
                header = json.loads(os.pread(self._handle, _PAGE, 0))
                size = header["slot_bytes"] if header["format"] == _FORMAT else None
            except (ValueError, KeyError, TypeError, RecursionError):
                pass
        if type(size) is int and _PAGE <= size <= _LARGEST_SLOT and size % _PAGE == 0:
            return size
        raise InvalidInput(
            f"{self._path} is no file of clients' states; it must be as the run wrote it, or the "
            "run must be started again in a new folder."
        )


def _checksum(owner: int, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(owner.to_bytes(8, "little")))
