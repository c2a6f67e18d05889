"""K that clients choose: who chooses, and what the record says."""

from collections import Counter
from pathlib import Path

import pytest
from tiny_method_inputs import make_method

from mpfedcl.methods import prototype_rule
from mpfedcl.prototypes import MOST_PROTOTYPES
from small_experiments import build_federation, small


@pytest.mark.parametrize(
    ("method", "slots", "most"),
    [
        ("mp-fedcl", None, MOST_PROTOTYPES),
        ("fedavg", None, MOST_PROTOTYPES),
        ("dp-fedcl", None, None),
        ("sp-fedcl", 1, 1),
        ("fedproto", 1, 1),
    ],
)
def test_methods_that_cluster_choose_the_number_of_prototypes(
    method: str, slots: int | None, most: int | None
) -> None:
    chooses = prototype_rule(make_method(method, prototypes__per_class="auto"))
    assert (chooses.num_prototypes, chooses.max_prototypes) == (slots, most)
    fixed = prototype_rule(make_method("mp-fedcl", prototypes__per_class=3))
    assert (fixed.num_prototypes, fixed.max_prototypes) == (3, 3)


@pytest.mark.parametrize("method", ["mp-fedcl", "dp-fedcl"])
def test_record_counts_the_prototypes_at_the_start_of_the_round(images: Path, method: str) -> None:
    experiment = small(images, method, prototypes__per_class="auto", train__lr=0.1)
    federation = build_federation(experiment)
    assert "prototypes_per_class" not in federation.run_round(evaluate=False).remarks
    pool = federation.pool
    pairs = Counter(zip(pool.owners.tolist(), pool.labels.tolist(), strict=True))
    told = federation.run_round(evaluate=False).remarks["prototypes_per_class"]
    expected = Counter(str(number) for number in pairs.values())
    assert told["histogram"] == dict(expected)
    assert told["most"] == max(pairs.values())
    assert told["mean"] == pytest.approx(len(pool) / len(pairs), abs=1e-3)
