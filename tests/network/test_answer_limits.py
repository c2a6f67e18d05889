"""How large an answer may be follows from what was asked for."""

import pytest
import torch

from mpfedcl.experiment import Experiment
from mpfedcl.methods import SharesPrototypes, find_method, prototype_rule
from mpfedcl.methods.messages import Update
from mpfedcl.models import make_mlp
from mpfedcl.network.packing import pack_update
from mpfedcl.network.server.answer_limits import limit_answer
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.assembly import Assembly, assemble


def assembled(name: str) -> Assembly:
    experiment = Experiment(method=name).replace(model__hidden=(300,))
    experiment = experiment.resolved(find_method(name).defaults)
    model = make_mlp(400, 5, (300,), is_encoded=False)
    return assemble(experiment, model, num_classes=5, input_size=400)


@pytest.mark.parametrize("method", ["fedavg", "mp-fedcl", "dp-fedcl", "fedproto", "fedgauss"])
def test_the_largest_honest_answer_fits_and_little_more(method: str) -> None:
    assembly = assembled(method)
    rows = 50 if isinstance(assembly.method, SharesPrototypes) else 0
    size = assembly.model.embedding_size
    most = prototype_rule(assembly.method).max_prototypes
    rows = rows if most is None else min(rows, 5 * most)
    vectors = torch.zeros(rows, size)
    labels = torch.zeros(rows, dtype=torch.int64)
    sent = pack_update(
        Update(
            "x",
            50,
            assembly.template,
            Prototypes(vectors, labels, labels + 1),
            0.0,
            assembly.sums,
        )
    )
    limit = limit_answer(assembly, 50)
    num_bytes = sum(each.nbytes for each in sent.arrays.values())
    assert num_bytes <= limit.array_bytes <= 3 * num_bytes + 2**24
    assert len(sent.arrays) <= limit.num_arrays <= 2 * len(sent.arrays) + 64
    assert limit.text_bytes < 2**23


def test_who_says_that_it_has_many_samples_may_send_so_many_prototypes() -> None:
    """Only where a method sets no number; two gigabytes are the most in any case."""
    few, many = (limit_answer(assembled("dp-fedcl"), n).array_bytes for n in (50, 50_000))
    assert many > few + 50_000 * 300 * 4
    assert limit_answer(assembled("dp-fedcl"), 10**9).array_bytes == 2**31
    same = {limit_answer(assembled("mp-fedcl"), n).array_bytes for n in (500, 10**9)}
    assert len(same) == 1
