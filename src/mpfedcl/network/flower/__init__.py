"""Flower, which carries the messages; no other part of mpfedcl uses it."""
