"""`python -m mpfedcl` is `mpfedcl`."""

from mpfedcl.cli.main import main

if __name__ == "__main__":
    main()
