"""Public data sets: where they are, and downloads that are checked and resumed."""
