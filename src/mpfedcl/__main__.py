"""`python -m mpfedcl` is `mpfedcl`."""

import sys

if __name__ == "__main__":
    # Python puts the current folder first on the path, and a run directory from elsewhere must not
    # choose what is run of the folder that its reader happens to be in.
    if not sys.flags.safe_path:
        del sys.path[0]
    from mpfedcl.cli.main import start

    start()
