"""Flower, which carries the messages: the only part of mpfedcl that knows it."""
