"""A validator for a tiny model, a broadcast, and an honest update."""

from typing import Any

from mpfedcl.experiment import Experiment
from mpfedcl.methods import Method, find_method
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.models import Mlp
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.rounds.assembly import Assembly, assemble
from mpfedcl.rounds.validation import UpdateValidator

SIZES = {"a": 10, "b": 7}
Usual = tuple[UpdateValidator, Broadcast, Update]


def prepare(method: str | type[Method] = "mp-fedcl", **changes: Any) -> Assembly:
    found = find_method(method) if isinstance(method, str) else method
    settings = {"prototypes__per_class": 2, **changes}
    experiment = Experiment(method=method if isinstance(method, str) else "fedavg")
    resolved = experiment.replace(**settings).resolved(found.defaults)
    model = Mlp((4, 5), 3)
    return assemble(resolved, model, num_classes=3, input_size=4, method_class=found)


def make_validator(assembly: Assembly, **options: Any) -> Usual:
    """Return a validator, a broadcast and an honest update without any prototype."""
    like = next(iter(assembly.initial.values()))
    params = {n: v for n, v in assembly.initial.items() if assembly.method.shared(n)}
    pool = PrototypePool.empty(3, assembly.model.embedding_size, 2, dtype=like.dtype)
    validator = UpdateValidator(assembly, SIZES, **options)
    none = Prototypes.empty(assembly.model.embedding_size, like.dtype)
    loss = 0.5 if assembly.method.trains else None
    averaged = {name: value.clone() for name, value in validator.template.items()}
    update = Update("a", 10, averaged, none, loss, dict(validator.sums))
    return validator, Broadcast(1, params, {}, pool), update
