"""Local training without federation (no paper)."""

from mpfedcl.methods import Method


class Local(Method):
    """Each client minimizes its own loss f_i(w_i); nothing is sent. The baseline for federation."""

    name = "local"
    summary = "every client trains alone; nothing is shared"
    family = "alone"
    paper = "no paper: the baseline that federation has to beat"
    sends = "nothing"
    keeps = "its model"
    primary_predictor = "personal_classifier"
    shares_model = False
    totals_suffice = True
