"""Originals as their publishers offer them, turned into the layout that the reader knows."""

from mpfedcl.data.public.prepare.preparation import Preparation, preparable_domains, prepare_set

__all__ = ["Preparation", "preparable_domains", "prepare_set"]
