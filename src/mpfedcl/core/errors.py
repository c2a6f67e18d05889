"""Errors that end a command with a one-line message."""

import errno
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class InvalidInput(Exception):  # noqa: N818  -- it names the input, not the program, as being wrong
    """Something given to mpfedcl cannot be used.

    The message is one sentence that names the field, the value and what is allowed. The command
    line prints it and ends with exit code 2. This is deliberately no `ValueError`: nothing between
    a settings field and the command line may swallow or reword it.
    """


class RunWarning(UserWarning):
    """Something about a run that its user should know, as the command line prints it."""


class LostWorker(Exception):  # noqa: N818  -- it names what happened
    """Another process that runs the same experiment has ended or does not answer."""


class RunCutShort(LostWorker):
    """A worker was lost during a run; the message tells how to resume it."""


def explain(error: BaseException) -> str:
    """Return the reason of an error in one line, without a period, for use inside a message."""
    text = getattr(error, "strerror", None) or str(error)
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".:")


_NOT_OF_A_USER = {"mpfedcl", "torch", "numpy", *sys.stdlib_module_names}


def explain_user_code(error: BaseException) -> str:
    """Return the type, the reason and the place of an error of a user's code, for a message.

    The place is the innermost line outside this package, torch, numpy and Python's own modules.
    """
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _NOT_OF_A_USER:
            place = f" at {frame.f_code.co_filename}:{line}"
    return f"{type(error).__name__}: {explain(error)}{place}"


@contextmanager
def explain_faults(shown: object, wanted: str) -> Iterator[None]:
    """Turn any error of a decoder on a damaged file into one sentence.

    Args:
        shown: How the message names the file.
        wanted: The end of "it must be ...".
    """
    try:
        yield
    except InvalidInput:
        raise
    except MemoryError:
        raise InvalidInput(f"{shown} does not fit into memory; it must be smaller.") from None
    # Decoders raise anything from zlib.error to NotImplementedError.
    except Exception as error:
        if getattr(error, "errno", None) in _DISK_FAULTS:
            # A full or read-only disk is no fault of the file.
            raise
        reason = explain(error)
        if "pickle" in reason.lower():
            reason = "it holds pickled Python objects, and pickles are never read"
        raise InvalidInput(f"{shown} cannot be read ({reason}); it must be {wanted}.") from None


def enumerate_names(names: Sequence[str], most: int = 5) -> str:
    """Return at most `most` names, separated by commas, and the number of the others."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
