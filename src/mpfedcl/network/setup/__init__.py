"""The output of `mpfedcl federation init`: folders, keys, and instructions for each machine."""
