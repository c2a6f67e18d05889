"""`FederatedClassifier`: any method as an estimator of scikit-learn, with `groups` as clients."""

from numbers import Integral
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils import check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from mpfedcl.api import run
from mpfedcl.core.errors import InvalidInput, enumerate_names
from mpfedcl.experiment import Experiment
from mpfedcl.inference.predictor import Predictor
from mpfedcl.inference.trained_run import model_file
from mpfedcl.methods import PredictorKind, find_method

_DTYPES = (numpy.float64, numpy.float32)


class FederatedClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier that is trained by federated learning, simulated on this machine.

    Args:
        method: The method by name or class, see `mpfedcl methods`; FedGauss trains in one round.
        rounds: The number of rounds; one-shot methods have one.
        clients: Without `groups`: the number of clients among which samples are split at random.
        model: Your own model, as for `mpfedcl.run`, or the name of one.
        random_state: The seed, a RandomState, or None for another seed in each fit.
        settings: Further settings, as for `mpfedcl.run`, such as `{"train": {"lr": 0.1}}`; a grid
            search takes a list of such dictionaries.

    Attributes:
        classes_: The labels, in order.
        clients_: The clients, in order: the values of `groups`; without, numbers from 0.
        n_features_in_, feature_names_in_: The features, as scikit-learn defines them.

    Samples are vectors of numbers, or arrays [n, ...] for a model that takes them. They are used as
    they are: scale them by a pipeline. All samples are trained on. One-shot methods see only the
    direction of a sample: if there are few features, expand them first, as by a Nystroem map.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> from mpfedcl.sklearn import FederatedClassifier
        >>> x, y = load_iris(return_X_y=True)
        >>> fitted = FederatedClassifier().fit(x, y, groups=["north", "south", "west"] * 50)
        >>> fitted.predict(x[:1]), fitted.predict(x[:1], groups="north")
        (array([0]), array([0]))
        >>> round(fitted.score(x, y), 1)
        1.0
    """

    def __init__(
        self,
        method: Any = "fedgauss",
        *,
        rounds: int = 60,
        clients: int = 5,
        model: Any = None,
        random_state: Any = 0,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.method = method
        self.rounds = rounds
        self.clients = clients
        self.model = model
        self.random_state = random_state
        self.settings = settings

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:  # noqa: N803
        """Train on samples X [n, ...] with labels y [n]; `groups` [n] is the client of each."""
        X, y = validate_data(self, X, y, dtype=_DTYPES, allow_nd=True)  # noqa: N806
        check_classification_targets(y)
        self.classes_, labels = numpy.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("y has one class; a classifier needs at least two.")
        settings, seed = self.settings or {}, self.random_state
        if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
            raise InvalidInput(
                f"settings is {settings!r:.60}; it must be a dictionary of settings by name, such "
                "as {'train': {'lr': 0.1}}."
            )
        if not isinstance(seed, Integral):
            seed = check_random_state(seed).randint(2**31 - 1)
        split = {"clients": self.clients, "partition__kind": "iid"}
        owners = None
        if groups is not None:
            groups = _check_groups(groups, X)
            self.clients_, places = numpy.unique(groups, return_inverse=True)
            split["clients"] = 1
            if len(self.clients_) > 1:
                owners, split = [self._name(place) for place in places], {}
        experiment = Experiment(
            method=self.method, rounds=self.rounds, seed=int(seed), dtype=X.dtype.name, **split
        )
        with TemporaryDirectory() as folder:
            result = run(
                experiment.replace(**settings),
                Path(folder) / "run",
                model=self.model,
                # Without a test set, a run would hold out samples. This sample trains as well.
                data=((X, labels), (X[:1], labels[:1])),
                groups=owners,
                progress=False,
            )
            # As bytes, so that the estimator can be copied, pickled and moved.
            self._files = {
                str(file.relative_to(result.path)): file.read_bytes()
                for pattern in ("*.toml", "*.json", "*.safetensors", "models/*")
                for file in result.path.glob(pattern)
            }
        # The samples of a client are like those that it trained with, as in matched test sets.
        experiment = result.experiment.replace(partition__test="matched")
        self._files["experiment.toml"] = experiment.to_toml().encode()
        method = find_method(experiment.method)(experiment, len(self.classes_))
        kind = PredictorKind.of(method.predictor_on("local_test"))
        self._is_personal = kind.model == "personal"
        if groups is None:
            self.clients_ = numpy.arange(result.experiment.clients or 1)
        return self

    def predict(self, X: Any, groups: Any = None) -> Any:  # noqa: N803
        """Return the most likely labels [n]; the arguments are those of `predict_proba`."""
        places = self.predict_proba(X, groups).argmax(axis=1)
        return self.classes_[places]

    def predict_proba(self, X: Any, groups: Any = None) -> Any:  # noqa: N803
        """Return the probability of each class [n, C].

        Args:
            X: Samples [n, ...].
            groups: The client of each sample, or of all. Methods with personalized models, such as
                FedGauss, then predict with these; others with the global model, as by default.
        """
        check_is_fitted(self, "_files")
        X = validate_data(self, X, reset=False, dtype=_DTYPES, allow_nd=True)  # noqa: N806
        with TemporaryDirectory() as folder:
            for name, content in self._files.items():
                (Path(folder) / name).parent.mkdir(exist_ok=True)
                (Path(folder) / name).write_bytes(content)

            def predict(client: str | None, samples: Any) -> Any:
                model = None if isinstance(self.model, str) else self.model
                predictor = Predictor.load(folder, client, model=model)
                return predictor.probabilities(samples).numpy()

            if groups is None:
                if "model.safetensors" not in self._files:
                    raise InvalidInput(
                        f"groups is not given, and {self.method} has no global model; it must name "
                        "the client of each sample, or of all."
                    )
                return predict(None, X)
            groups = _check_groups([groups] * len(X) if numpy.ndim(groups) == 0 else groups, X)
            # None is the global model.
            names = {
                client: self._name(place) if self._is_personal else None
                for place, client in enumerate(self.clients_)
            }
            kept = {c: n for c, n in names.items() if n is None or model_file(n) in self._files}
            found = numpy.empty((len(X), len(self.classes_)))
            for client in numpy.unique(groups):
                if client not in kept:
                    known = enumerate_names(sorted(map(str, kept)), 12)
                    raise InvalidInput(
                        f"groups has {client!s}, for which fit kept no model; it must be left out"
                        f"{f' or have {known}' if kept else ''}."
                    )
                rows = groups == client
                found[rows] = predict(kept[client], X[rows])
            return found

    def score(
        self,
        X: Any,  # noqa: N803
        y: Any,
        sample_weight: Any = None,
        groups: Any = None,
    ) -> float:
        """Return the accuracy, between 0 and 1."""
        return float(accuracy_score(y, self.predict(X, groups), sample_weight=sample_weight))

    def _name(self, place: int) -> str:
        """Return the name of a client in the run, where not every value of `groups` is a name."""
        return f"client-{place:0{len(str(len(self.clients_) - 1))}}"


def _check_groups(groups: Any, samples: Any) -> Any:
    """Return the client of each sample as an array [n]."""
    groups = column_or_1d(groups)
    check_consistent_length(samples, groups)
    # Missing values are not equal to themselves, or None.
    if any(each is None or each != each for each in groups.tolist()):
        raise InvalidInput("groups has a missing value; it must name the client of each sample.")
    return groups
