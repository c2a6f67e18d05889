"""Which methods a study of all of them runs."""

from mpfedcl.experiment import Experiment
from mpfedcl.studies.method_choice import choose_methods


def test_asynchronous_methods_are_left_out_where_they_cannot_be_run() -> None:
    chosen, left_out = choose_methods(Experiment(workers=2), ["all"])
    assert {"fedasync", "fedat", "sageflow"} <= set(left_out)
    assert left_out["fedasync"].startswith("workers is 2; with fedasync, which is asynchronous")
    assert "fedavg" in chosen
    assert "fedasync" in choose_methods(Experiment(), ["all"])[0]
