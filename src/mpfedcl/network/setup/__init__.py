"""What `mpfedcl federation init` makes: folders, keys, and instructions for each machine."""
