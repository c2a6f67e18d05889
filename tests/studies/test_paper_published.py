"""The numbers of the paper, held to each other: a slip of the pen shows in an average."""

import pytest

from mpfedcl.studies.paper import published


@pytest.mark.parametrize("method", published.FEATURE_SKEW_DIGITS)
def test_the_average_of_the_domains_is_the_printed_average(method: str) -> None:
    numbers = dict(published.FEATURE_SKEW_DIGITS[method])
    mean, deviation = numbers.pop("average")
    assert mean == pytest.approx(sum(each[0] for each in numbers.values()) / 5, abs=0.011)
    # The printed deviation of the average is the mean of the domains' deviations.
    assert deviation == pytest.approx(sum(each[1] for each in numbers.values()) / 5, abs=0.011)


def test_what_is_sent_is_what_the_models_have() -> None:
    mnist = 784 * 512 + 512 + 512 * 512 + 512 + 512 * 256 + 256 + 256 * 10 + 10
    head = 512 * 256 + 256 + 256 * 10 + 10
    per_class = {"mnist": 2, "digit5": 4, "office10": 4, "domainnet": 3}
    for name, (parameters, floats) in published.SENT.items():
        assert parameters == (mnist if name == "mnist" else head)
        assert floats == per_class[name] * 10 * 256


def test_every_table_has_the_paper_s_best_where_its_text_says() -> None:
    for name in ("mnist", "digit5", "office10", "domainnet"):
        best = max(published.LABEL_SKEW, key=lambda each: published.LABEL_SKEW[each][name][0])
        assert best == "mp-fedcl"
