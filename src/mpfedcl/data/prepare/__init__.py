"""Originals as their publishers offer them, turned into the layout that the reader knows."""

from mpfedcl.data.prepare.recipes import Preparation, prepare_set, set_domains

__all__ = ["Preparation", "prepare_set", "set_domains"]
