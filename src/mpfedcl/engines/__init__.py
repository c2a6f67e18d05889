"""Engines: where clients run. Each gives the same result; they differ in how."""

from mpfedcl.engines.base import Engine
from mpfedcl.engines.loop import LoopEngine

__all__ = ["Engine", "LoopEngine"]
