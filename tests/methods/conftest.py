"""What tests of methods share."""

import pytest


@pytest.fixture(params=["loop", "stacked"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The engines that must agree; both with whole models, so that the same sums are taken.

    As rows of linear layers, FedAvg's clients would take them in another order.
    """
    monkeypatch.setattr("mpfedcl.engines.trainer_choice.MOST_ROWS", 0)
    return str(request.param)
