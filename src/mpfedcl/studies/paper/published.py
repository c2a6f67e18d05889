"""The numbers that the paper prints: accuracy in %, mean and deviation over three runs."""

Number = tuple[float, float]

LABEL_SKEW: dict[str, dict[str, Number]] = {
    "fedavg": {
        "mnist": (66.40, 2.89),
        "digit5": (29.66, 1.57),
        "office10": (24.00, 1.55),
        "domainnet": (23.61, 4.35),
    },
    "fedprox": {
        "mnist": (64.85, 1.88),
        "digit5": (28.51, 2.13),
        "office10": (21.74, 1.13),
        "domainnet": (22.78, 5.66),
    },
    "fedproto": {
        "mnist": (33.27, 1.74),
        "digit5": (60.84, 1.79),
        "office10": (39.79, 3.15),
        "domainnet": (36.02, 5.23),
    },
    "dp-fedcl": {
        "mnist": (78.49, 3.09),
        "digit5": (53.94, 3.38),
        "office10": (37.22, 1.75),
        "domainnet": (47.62, 1.78),
    },
    "sp-fedcl": {
        "mnist": (79.44, 3.48),
        "digit5": (57.91, 3.17),
        "office10": (43.11, 4.30),
        "domainnet": (35.44, 4.25),
    },
    "mp-fedcl": {
        "mnist": (79.95, 3.76),
        "digit5": (67.15, 2.33),
        "office10": (59.07, 3.41),
        "domainnet": (52.12, 5.02),
    },
}
"""Dir(0.05), by method and data set."""

FEATURE_SKEW_DIGITS: dict[str, dict[str, Number]] = {
    "local": {
        "mnist": (47.33, 8.96),
        "svhn": (16.67, 2.05),
        "usps": (60.33, 1.25),
        "synth": (26.33, 6.13),
        "mnist_m": (20.33, 3.30),
        "average": (34.20, 4.34),
    },
    "fedavg": {
        "mnist": (53.00, 4.32),
        "svhn": (18.67, 1.25),
        "usps": (54.67, 4.99),
        "synth": (36.00, 2.94),
        "mnist_m": (32.00, 4.55),
        "average": (38.87, 3.61),
    },
    "fedprox": {
        "mnist": (72.00, 5.89),
        "svhn": (22.33, 3.30),
        "usps": (71.67, 5.73),
        "synth": (49.33, 4.71),
        "mnist_m": (43.67, 4.11),
        "average": (51.80, 4.75),
    },
    "fedproto": {
        "mnist": (88.00, 2.83),
        "svhn": (25.00, 1.41),
        "usps": (91.67, 1.25),
        "synth": (56.67, 1.25),
        "mnist_m": (48.67, 3.68),
        "average": (62.00, 2.08),
    },
    "mp-fedcl": {
        "mnist": (91.37, 0.39),
        "svhn": (26.80, 2.65),
        "usps": (93.93, 0.65),
        "synth": (61.00, 0.49),
        "mnist_m": (51.20, 1.77),
        "average": (64.86, 1.19),
    },
}
"""Digit-5, a domain a client, by method and domain."""

EFFICIENCY: dict[str, dict[str, dict[str, Number]]] = {
    "digit5": {
        "local": {"label": (27.60, 3.33), "feature": (33.60, 3.25)},
        "fedavg": {"label": (40.80, 3.71), "feature": (43.13, 3.67)},
        "fedproto": {"label": (49.71, 2.98), "feature": (63.99, 0.38)},
        "dp-fedcl": {"label": (50.37, 2.51), "feature": (63.49, 2.02)},
        "sp-fedcl": {"label": (51.86, 2.92), "feature": (65.49, 1.14)},
        "mp-fedcl": {"label": (53.87, 1.62), "feature": (65.08, 0.91)},
    },
    "office10": {
        "local": {"label": (30.89, 3.50), "feature": (21.47, 3.72)},
        "fedavg": {"label": (22.51, 7.50), "feature": (30.17, 2.15)},
        "fedproto": {"label": (36.75, 3.50), "feature": (46.58, 2.82)},
        "dp-fedcl": {"label": (35.74, 5.33), "feature": (42.77, 1.03)},
        "sp-fedcl": {"label": (38.44, 6.15), "feature": (48.88, 3.59)},
        "mp-fedcl": {"label": (42.98, 3.79), "feature": (49.70, 1.49)},
    },
}
"""Label skew Dir(0.5) and feature skew, by data set and method."""

SAME_TIME: dict[str, dict[str, dict[str, Number]]] = {
    "digit5": {
        "fedavg": {"label": (38.17, 1.26), "feature": (43.00, 3.49)},
        "fedproto": {"label": (52.67, 1.03), "feature": (62.00, 2.69)},
        "dp-fedcl": {"label": (52.42, 1.83), "feature": (64.07, 2.07)},
        "sp-fedcl": {"label": (52.46, 1.58), "feature": (65.07, 1.89)},
        "mp-fedcl": {"label": (52.94, 1.68), "feature": (65.00, 1.47)},
    },
    "office10": {
        "fedavg": {"label": (23.59, 5.69), "feature": (24.04, 2.61)},
        "fedproto": {"label": (39.11, 6.99), "feature": (45.34, 2.72)},
        "dp-fedcl": {"label": (35.98, 5.95), "feature": (41.83, 2.14)},
        "sp-fedcl": {"label": (39.60, 5.89), "feature": (45.20, 3.56)},
        "mp-fedcl": {"label": (43.59, 5.54), "feature": (47.38, 1.48)},
    },
}
"""The same at about the same training time for all."""

SENT: dict[str, tuple[int, int]] = {
    "mnist": (798_474, 5_120),
    "digit5": (133_898, 10_240),
    "office10": (133_898, 10_240),
    "domainnet": (133_898, 7_680),
}
"""Parameters and prototype floats that a client sends in a round."""
