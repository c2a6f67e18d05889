"""The client's side of a federation."""

from mpfedcl.core.errors import InvalidInput


class ClientRefusal(InvalidInput):
    """An error that is sent to the server; it contains no file names of this machine."""
