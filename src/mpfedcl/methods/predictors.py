"""The predictors: which model predicts, by which rule, with which label prior."""

from dataclasses import dataclass
from typing import Literal, Self, get_args

PredictorName = Literal[
    "personal_classifier",
    "personal_prototype",
    "global_classifier",
    "global_prototype",
    "personal_classifier_prior",
    "personal_prototype_prior",
    "global_classifier_prior",
    "global_prototype_prior",
    "global_classifier_estimated",
]
PREDICTORS: tuple[PredictorName, ...] = get_args(PredictorName)
"""The model that predicts, and the rule it predicts by. `prior`: the client's label shares are
added to the scores; `estimated`: label shares are estimated from unlabeled test samples instead."""
Test = Literal["local_test", "global_test"]
TESTS: tuple[Test, ...] = get_args(Test)
"""local_test: each client on its own test samples; global_test: on the test samples of all."""


@dataclass(frozen=True)
class PredictorKind:
    """A predictor: the model, the rule and the label prior that predict.

    Example:
        >>> PredictorKind("global", "prototype", "labels").name
        'global_prototype_prior'
        >>> PredictorKind.of("personal_classifier").model
        'personal'
    """

    model: Literal["personal", "global"]
    rule: Literal["classifier", "prototype"]
    """Largest score of the classifier, or nearest prototype."""
    prior: Literal["none", "labels", "estimated"] = "none"
    """Added to the scores: none, from training labels, or estimated from unlabeled test samples."""

    @property
    def name(self) -> str:
        """The name in settings, files and tables."""
        endings = {"none": "", "labels": "_prior", "estimated": "_estimated"}
        return f"{self.model}_{self.rule}{endings[self.prior]}"

    @classmethod
    def of(cls, name: str) -> Self:
        """Return the parts of a predictor, given its name."""
        return cls(*_PARTS[name])


_PARTS = {
    PredictorKind(model, rule, prior).name: (model, rule, prior)
    for model in get_args(Literal["personal", "global"])
    for rule in get_args(Literal["classifier", "prototype"])
    for prior in get_args(Literal["none", "labels", "estimated"])
}
