"""SP-FedCL: the single-prototype sibling."""

from mpfedcl.methods.mp_fedcl import CONTRAST_KNOBS, MpFedCL


class SpFedCL(MpFedCL):
    """MP-FedCL with one prototype per class, its mean; no clustering."""

    name = "sp-fedcl"
    summary = "as MP-FedCL with one prototype per class, its mean"
    sends = "its model, its class means"
    clustering = "mean"
    search_space = CONTRAST_KNOBS
