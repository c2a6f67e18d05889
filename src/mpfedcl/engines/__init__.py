"""Engines: where clients run. Each gives the same result; they differ in how."""

from mpfedcl.engines.base import Engine
from mpfedcl.engines.in_process import InProcessEngine

__all__ = ["Engine", "InProcessEngine"]
