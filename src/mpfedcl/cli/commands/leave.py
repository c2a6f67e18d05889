"""`mpfedcl leave`."""

import json

from mpfedcl.cli.arguments.deployment import Leave
from mpfedcl.cli.progress import stdout_console
from mpfedcl.core.errors import InvalidInput
from mpfedcl.inference.membership import leave


def leave_command(arguments: Leave) -> int:
    """Take a client out of a run."""
    if arguments.name is None:
        raise InvalidInput("name is missing; it must name the client that leaves: --name clinic-7.")
    pool = leave(arguments.run, arguments.name)
    if arguments.json:
        told = {"left": arguments.name, "pool": list(pool.names), "prototypes": len(pool)}
        print(json.dumps(told))
    else:
        stdout_console().print(
            f"{arguments.name} has left; the pool holds {len(pool)} prototypes of "
            f"{pool.num_clients} clients"
        )
    return 0
