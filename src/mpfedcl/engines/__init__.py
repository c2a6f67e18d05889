"""Engines: where clients run. Each gives the same result; they differ in how."""

from mpfedcl.engines.dispatching import DispatchingEngine
from mpfedcl.engines.distributed import DistributedEngine, assign_clients
from mpfedcl.engines.in_process import InProcessEngine
from mpfedcl.rounds.engine import Engine

__all__ = ["DispatchingEngine", "DistributedEngine", "Engine", "InProcessEngine", "assign_clients"]
