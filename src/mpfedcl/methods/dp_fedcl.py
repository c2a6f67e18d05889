"""DP-FedCL: as many prototypes as density suggests."""

from types import MappingProxyType

from mpfedcl.methods.mp_fedcl import CONTRAST_KNOBS, MpFedCL


class DpFedCL(MpFedCL):
    """MP-FedCL with the means of DBSCAN's clusters, as many as each class turns out to have.

    The clients' numbers of prototypes differ, so only missing slots are filled with class means.
    """

    name = "dp-fedcl"
    summary = "as MP-FedCL, prototypes from DBSCAN's clusters"
    clustering = "dbscan"
    defaults = MappingProxyType({"prototypes__padding": "fill"})
    knobs = MappingProxyType({**CONTRAST_KNOBS, "dbscan__eps": (None, 0.1, 0.2, 0.4)})
