"""A local web page of runs, live. Everything here only reads."""
