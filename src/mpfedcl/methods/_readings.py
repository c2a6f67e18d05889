"""Readings: which model answers, by what, and on whose test."""

from typing import Literal, get_args

Reading = Literal[
    "personal_classifier",
    "personal_prototype",
    "averaged_classifier",
    "averaged_prototype",
    "personal_classifier_prior",
    "averaged_classifier_prior",
    "averaged_prototype_prior",
    "averaged_classifier_estimated",
]
READINGS: tuple[Reading, ...] = get_args(Reading)
"""Which model answers, and by what. `prior`: the client's shares of labels are added to the scores;
`estimated`: they are found from unlabelled test samples instead."""
Test = Literal["own", "union"]
TESTS: tuple[Test, ...] = get_args(Test)
"""own: each client on its own test samples; union: on all clients' test samples together."""
