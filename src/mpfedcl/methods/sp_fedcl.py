"""SP-FedCL: MP-FedCL with a single prototype per class (Qiao et al., 2023)."""

from mpfedcl.methods.mp_fedcl import CONTRAST_SEARCH_SPACE, MpFedCL


class SpFedCL(MpFedCL):
    """MP-FedCL with one prototype per class, the mean [d] of its embeddings; no clustering."""

    name = "sp-fedcl"
    summary = "as MP-FedCL with one prototype per class, its mean"
    sends = "its model, its class means"
    clustering = "mean"
    search_space = CONTRAST_SEARCH_SPACE
