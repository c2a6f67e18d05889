"""The one error that is the user's to mend."""


class InvalidInput(Exception):  # noqa: N818  -- it names the input, not the program, as being wrong
    """Something given to mpfedcl cannot be used.

    The message is one sentence that names the field, the value and what is allowed. The command
    line prints it and ends with exit code 2. It is deliberately no `ValueError`: nothing on the
    way from a settings field to the command line may swallow or reword it.
    """
