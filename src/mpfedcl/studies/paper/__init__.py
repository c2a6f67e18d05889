"""Every table and figure of the paper as data: settings, cells, and the numbers it prints."""

from mpfedcl.studies.paper.item import Cell, PaperItem, Published
from mpfedcl.studies.paper.items import ITEM_IDS, find_items

__all__ = ["ITEM_IDS", "Cell", "PaperItem", "Published", "find_items"]
