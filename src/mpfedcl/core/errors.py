"""Errors that end a command with a one-line message."""


class InvalidInput(Exception):  # noqa: N818  -- it names the input, not the program, as being wrong
    """Something given to mpfedcl cannot be used.

    The message is one sentence that names the field, the value and what is allowed. The command
    line prints it and ends with exit code 2. This is deliberately no `ValueError`: nothing between
    a settings field and the command line may swallow or reword it.
    """


class LostWorker(Exception):  # noqa: N818  -- it names what happened
    """Another process that runs the same experiment has ended or does not answer."""


class RunCutShort(LostWorker):
    """A worker was lost during a run; the message tells how to resume it."""


def explain(error: BaseException) -> str:
    """Return the reason of an error in one line, without a period, for use inside a message."""
    text = getattr(error, "strerror", None) or str(error)
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".:")
