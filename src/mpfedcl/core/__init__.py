"""Errors, tensors, random numbers and files: the parts that every package uses."""
