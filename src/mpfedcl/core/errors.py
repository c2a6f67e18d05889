"""What can go wrong in ways that are told in one sentence."""


class InvalidInput(Exception):  # noqa: N818  -- it names the input, not the program, as being wrong
    """Something given to mpfedcl cannot be used.

    The message is one sentence that names the field, the value and what is allowed. The command
    line prints it and ends with exit code 2. It is deliberately no `ValueError`: nothing on the
    way from a settings field to the command line may swallow or reword it.
    """


class LostWorker(Exception):  # noqa: N818  -- it names what happened
    """Another process that runs the same experiment has ended or does not answer."""


class RunCutShort(LostWorker):
    """The same during a run: the message says how to resume it."""
