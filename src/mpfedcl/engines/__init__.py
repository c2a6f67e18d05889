"""Engines run the clients of a simulation: in one process, in several, or one by one."""

from mpfedcl.engines.asynchronous import DispatchingEngine
from mpfedcl.engines.distributed import DistributedEngine
from mpfedcl.engines.in_process import InProcessEngine
from mpfedcl.rounds.engine import Engine

__all__ = [
    "DispatchingEngine",
    "DistributedEngine",
    "Engine",
    "InProcessEngine",
]
