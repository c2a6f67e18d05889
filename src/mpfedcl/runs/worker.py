"""`python -m mpfedcl.runs.worker`: a process that works for the one that started it (--workers)."""

import sys

from mpfedcl.core.errors import InvalidInput, LostWorker
from mpfedcl.engines.local_group import LOST_ANOTHER, end_with_parent
from mpfedcl.runs.simulation import follow


def main() -> int:
    """Work until the leader has finished; it does the talking."""
    end_with_parent()
    try:
        follow()
    except InvalidInput as error:
        print(f"mpfedcl: a worker cannot continue: {error}", file=sys.stderr)
        return 2
    except LostWorker:
        return LOST_ANOTHER
    return 0


if __name__ == "__main__":
    sys.exit(main())
