"""Readings: which model answers, by what, and on whose test."""

from typing import Literal, get_args

PredictorName = Literal[
    "personal_classifier",
    "personal_prototype",
    "global_classifier",
    "global_prototype",
    "personal_classifier_prior",
    "global_classifier_prior",
    "global_prototype_prior",
    "global_classifier_estimated",
]
PREDICTORS: tuple[PredictorName, ...] = get_args(PredictorName)
"""Which model answers, and by what. `prior`: the client's shares of labels are added to the scores;
`estimated`: they are found from unlabeled test samples instead."""
Test = Literal["local_test", "global_test"]
TESTS: tuple[Test, ...] = get_args(Test)
"""own: each client on its local test set samples; union: on all clients' test samples together."""
