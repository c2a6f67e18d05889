"""The paper's data sets, and which stand in for those that are not here."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mpfedcl.data.reader import open_data_set
from mpfedcl.data.set_folder import is_available
from mpfedcl.experiment.settings import DatasetSettings

_PAPER = ("mnist", "digit5", "office10", "domainnet")
_STAND_INS = {"mnist": "mnist-sample", "domainnet": "sixdomain"}
"""Shown under their own names, never beside the paper's numbers."""
_DOMAINS = {"digit5": 5, "office10": 4, "domainnet": 6, "sixdomain": 6}
_TITLES = {
    "mnist": "MNIST",
    "mnist-sample": "MNIST sample",
    "digit5": "Digit-5",
    "office10": "Office-10",
    "domainnet": "DomainNet",
    "sixdomain": "sixdomain",
}


@dataclass(frozen=True)
class PaperDatasets:
    """The data sets at hand."""

    root: Path | None = None

    @cached_property
    def chosen(self) -> Mapping[str, str]:
        """The paper's data sets that can be run, and the set that each is run on."""
        chosen: dict[str, str] = {}
        for name in _PAPER:
            for each in dict.fromkeys((name, _STAND_INS.get(name, name))):
                # With all its domains: the paper's averages are over all.
                wanted = _DOMAINS.get(each, 1)
                if is_available(each, self.root) and len(self.domains(each)) >= wanted:
                    chosen.setdefault(name, each)
        return chosen

    @property
    def missing(self) -> list[str]:
        """The paper's data sets that are not run themselves, with what is done instead."""
        return [
            f"{_TITLES[name]} is not in the data folder as a whole; "
            + (
                f"{self.title(self.chosen[name])} stands in."
                if name in self.chosen
                else "it is left out."
            )
            for name in _PAPER
            if self.chosen.get(name) != name
        ]

    @property
    def by_domain(self) -> Mapping[str, str]:
        """Those that have domains."""
        return {name: dataset for name, dataset in self.chosen.items() if name != "mnist"}

    @property
    def titles(self) -> dict[str, str]:
        """Titles of the sets that are run."""
        return {dataset: _TITLES[dataset] for dataset in self.chosen.values()}

    def title(self, dataset: str) -> str:
        """Return how a set is called in tables."""
        return _TITLES[dataset]

    def select(self, *names: str) -> list[str]:
        """Return what some of the paper's sets are run on, as far as they can be."""
        return [self.chosen[name] for name in names if name in self.chosen]

    def domains(self, dataset: str) -> list[str]:
        """Return a set's domains, which are its clients under feature skew."""
        sample_index = open_data_set(DatasetSettings(name=dataset, root=self.root))
        return [domain.name for domain in sample_index.domains]
