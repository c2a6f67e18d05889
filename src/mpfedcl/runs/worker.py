"""`python -m mpfedcl.runs.worker`: a process that works for the one that started it (--workers)."""

import sys

from mpfedcl.errors import InvalidInput, LostWorker


def main() -> int:
    """Work until the leader has finished; it does the talking."""
    from mpfedcl.runs.simulation import follow
    from mpfedcl.engines.process_group import end_with_parent

    end_with_parent()
    try:
        follow()
    except InvalidInput as error:
        print(f"mpfedcl: a worker cannot go on: {error}", file=sys.stderr)
        return 2
    except LostWorker:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
