"""Local: every client trains alone."""

from mpfedcl.methods.base import Method


class Local(Method):
    """No exchange at all: the baseline that federation has to beat."""

    name = "local"
    summary = "every client trains alone; nothing is shared"
    family = "alone"
    paper = "no paper: the baseline that federation has to beat"
    sends = "nothing"
    keeps = "its model"
    primary_predictor = "personal_classifier"
    shares_model = False
    totals_suffice = True
