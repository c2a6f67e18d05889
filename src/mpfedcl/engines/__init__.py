"""Engines: where clients run. Each gives the same result; they differ in how."""

from mpfedcl.engines.dispatching import DispatchingEngine
from mpfedcl.engines.distributed import DistributedEngine
from mpfedcl.engines.in_process import InProcessEngine
from mpfedcl.engines.shares import assign_clients, movable_work
from mpfedcl.rounds.engine import Engine

__all__ = [
    "DispatchingEngine",
    "DistributedEngine",
    "Engine",
    "InProcessEngine",
    "assign_clients",
    "movable_work",
]
