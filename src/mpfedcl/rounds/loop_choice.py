"""Which loop an experiment's method is run by."""

from mpfedcl.methods import Asynchronous
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.engine import Engine
from mpfedcl.rounds.real_arrivals import RealArrivals
from mpfedcl.rounds.round_loop import RoundLoop
from mpfedcl.rounds.systems import SystemModel
from mpfedcl.rounds.timing_checks import check_clock
from mpfedcl.rounds.virtual_arrivals import VirtualArrivals


def make_loop(assembly: Assembly, engine: Engine, pace: SystemModel | None = None) -> RoundLoop:
    """Return the loop of rounds, or one of arrivals: by a virtual clock, or as they really come."""
    if not isinstance(assembly.method, Asynchronous):
        return RoundLoop(assembly, engine, pace)
    if pace is not None:
        return VirtualArrivals(assembly, engine, pace)
    if engine.label_counts is None:
        # Clients of this process come at no time of their own.
        check_clock(type(assembly.method), assembly.experiment)
    return RealArrivals(assembly, engine)
