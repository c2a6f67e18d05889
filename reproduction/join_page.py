"""The tables and the figure of docs/join.md, from docs/results/join.json."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy

from reproduction.tables import (
    BEST,
    COLORS,
    MARKERS,
    figure_file,
    fill_page,
    markdown,
    mean_std,
    paired_difference,
)

TITLES = {"digit5": "Digit-5", "office10": "Office-10", "sixdomain": "sixdomain"}
Pick = Callable[[Any], float | None]
"""Takes one number out of a case."""
LINES: dict[str, dict[str, tuple[str, str]]] = {
    "prototype": {"joined": ("joined", "both"), "alone": ("alone", "own")},
    "classifier": {"joined": ("joined", "classifier"), "alone": ("alone", "classifier")},
}
MEMBER = {"prototype": "both", "classifier": "classifier"}


class Study:
    """All cases, and means of them."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._cases = content["cases"]
        self.epochs: list[int] = list(content["epochs"])
        self.seeds: list[int] = list(content["seeds"])
        self.rates = sorted({case["rate"] for case in self._cases})
        self.sets = [name for name in TITLES if any(c["dataset"] == name for c in self._cases)]

    def domains(self, dataset: str) -> list[str]:
        """Return the domains of a set."""
        return sorted({case["domain"] for case in self._cases if case["dataset"] == dataset})

    def values(self, rate: float, dataset: str, domain: str, pick: Pick) -> list[float | None]:
        """Return a number per seed, of one domain."""
        found = {
            case["seed"]: pick(case)
            for case in self._cases
            if (case["rate"], case["dataset"], case["domain"]) == (rate, dataset, domain)
        }
        return [found[seed] for seed in self.seeds]

    def means(self, rate: float, dataset: str, pick: Pick) -> list[float | None]:
        """Return the mean over the set's domains, a number per seed."""
        rows = [self.values(rate, dataset, domain, pick) for domain in self.domains(dataset)]
        known = numpy.array(rows, dtype=float).mean(axis=0)
        return [None if numpy.isnan(value) else float(value) for value in known]

    def pair(self, rate: float, dataset: str, left: Pick, right: Pick) -> tuple[str, str]:
        """Return mean(std) of two things over a set; the clearly better one is marked."""
        a, b = self.means(rate, dataset, left), self.means(rate, dataset, right)
        found = paired_difference(a, b)
        verdict = found.verdict if found else ""
        marks = {"better": (BEST, ""), "worse": ("", BEST)}.get(verdict, ("", ""))
        return marks[0] + mean_std(a), marks[1] + mean_std(b)

    def cell(self, rate: float, dataset: str, domain: str, pick: Pick) -> str:
        """Return mean(std) over seeds, of a domain or of the mean over all."""
        if domain == "mean":
            return mean_std(self.means(rate, dataset, pick))
        return mean_std(self.values(rate, dataset, domain, pick))


def at(kind: str, epochs: int, predictor: str) -> Pick:
    """Return the predictor of a client after a number of epochs."""
    return lambda case: case[kind][str(epochs)][predictor]


def member(predictor: str) -> Pick:
    """Take the personal reading of a client that was there from the start."""
    return lambda case: case["federation"]["personal"][predictor]


def last_rate(predictor: str) -> Pick:
    """Take the predictor of a client that trained at the rate its run had come down to."""
    return lambda case: case["last rate"][predictor]


def tabulate_sets(study: Study, rate: float, predictor: str) -> str:
    """Return the means over each set's domains, joined next to local training, by epochs."""
    (joined, name), (alone, other) = LINES[predictor].values()
    blind = "pool" if predictor == "prototype" else name

    def single(words: str, pick: Pick) -> list[str]:
        cells = [(study.cell(rate, each, "mean", pick), "-") for each in study.sets]
        return [words, *(cell for pair in cells for cell in pair)]

    rows = [single("no image of its own", at("joined", 0, blind))]
    for epochs in study.epochs:
        picks = at(joined, epochs, name), at(alone, epochs, other)
        pairs = [study.pair(rate, each, *picks) for each in study.sets]
        words = f"{epochs} epoch{'' if epochs == 1 else 's'}"
        rows.append([words, *(cell for pair in pairs for cell in pair)])
    rows.append(single("in the federation, 60 rounds", member(MEMBER[predictor])))
    titles = [f"{TITLES[each]} {kind}" for each in study.sets for kind in LINES[predictor]]
    return markdown([f"{predictor}, lr {rate:g}", *titles], rows)


def tabulate_domains(study: Study, rate: float, predictor: str) -> str:
    """Return every domain, joined and alone by epochs."""
    picks: dict[str, Pick] = {}
    for kind, (source, name) in LINES[predictor].items():
        picks |= {f"{kind} {epochs}": at(source, epochs, name) for epochs in study.epochs}
    if predictor == "prototype":
        picks["federation"] = member(MEMBER[predictor])
    rows = [
        [TITLES[s], domain, *(study.cell(rate, s, domain, pick) for pick in picks.values())]
        for s in study.sets
        for domain in [*study.domains(s), "mean"]
    ]
    return markdown(["set", "held out", *picks], rows)


def tabulate_few(study: Study, rate: float) -> str:
    """Return what is right at once with few images, and with some classes missing."""
    names = list(study._cases[0]["few"])

    def pick(name: str, kind: str, predictor: str) -> Pick:
        return lambda case: case["few"][name][kind][predictor]

    columns: dict[str, tuple[str, str]] = {
        "pool alone": ("joined", "pool"),
        "pool + own": ("joined", "both"),
        "own, the run's model": ("joined", "own"),
        "own, untrained model": ("alone", "own"),
    }
    rows = [
        [
            TITLES[s],
            name.replace(" a class", " per class"),
            *(study.cell(rate, s, "mean", pick(name, *c)) for c in columns.values()),
        ]
        for s in study.sets
        for name in names
    ]
    return markdown(["set", "it has", *columns], rows)


def tabulate_others(study: Study) -> str:
    """Return what a newcomer's prototypes change for the others."""
    moments = ("before", "after")

    def pick(moment: str) -> Pick:
        return lambda case: case["others"][moment]

    rows = [
        [f"{rate:g}", TITLES[s], *(study.cell(rate, s, "mean", pick(each)) for each in moments)]
        for rate in study.rates
        for s in study.sets
    ]
    return markdown(["lr", "set", "pool before", "with the newcomer"], rows)


def tabulate_rates(study: Study) -> str:
    """Return the run's first and last learning rates."""
    columns: dict[str, Pick] = {}
    for predictor in LINES:
        name = LINES[predictor]["joined"][1]
        columns[f"{predictor}, first rate"] = at("joined", study.epochs[-1], name)
        columns[f"{predictor}, last rate"] = last_rate(name)
    rows = [
        [f"{rate:g}", TITLES[s], *(study.cell(rate, s, "mean", pick) for pick in columns.values())]
        for rate in study.rates
        for s in study.sets
    ]
    return markdown(["lr", "set", *columns], rows)


def render_page(content: dict[str, Any], page: Path) -> None:
    """Write the tables between their marks; the words around them are kept."""
    study = Study(content)
    parts = {"few": tabulate_few(study, study.rates[0]), "others": tabulate_others(study)}
    parts["rates"] = tabulate_rates(study)
    for rate in study.rates:
        for predictor in LINES:
            parts[f"sets {predictor} {rate:g}"] = tabulate_sets(study, rate, predictor)
            parts[f"domains {predictor} {rate:g}"] = tabulate_domains(study, rate, predictor)
    fill_page(page, parts)


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw accuracy by epochs, mean over each set's domains; bands are deviations over seeds."""
    study = Study(content)
    rate = study.rates[0]
    shape = len(LINES), len(study.sets)
    layout: dict[str, Any] = {"figsize": (9.6, 6.2), "sharex": True, "sharey": "col"}
    with figure_file(path, *shape, squeeze=False, **layout) as (figure, grid):
        for axes_row, (predictor, lines) in zip(grid, LINES.items(), strict=True):
            for axes, dataset in zip(axes_row, study.sets, strict=True):
                for index, (kind, (source, name)) in enumerate(lines.items()):
                    picks = [at(source, epochs, name) for epochs in study.epochs]
                    curves = [study.means(rate, dataset, pick) for pick in picks]
                    _plot(axes, study.epochs, curves, index, kind)
                blind = "pool" if predictor == "prototype" else "classifier"
                for words, pick, style, color in (
                    ("in the federation, 60 rounds", member(MEMBER[predictor]), "--", COLORS[2]),
                    ("no image of its own", at("joined", 0, blind), ":", COLORS[6]),
                ):
                    level = numpy.array(study.means(rate, dataset, pick), dtype=float).mean()
                    axes.axhline(level, color=color, ls=style, label=words)
                axes.set(title=f"{TITLES[dataset]}, {predictor}", xticks=study.epochs)
        for axes in grid[-1]:
            axes.set_xlabel("local epochs")
        for axes in grid[:, 0]:
            axes.set_ylabel("accuracy (%)")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)


def _plot(
    axes: Any,
    epochs: Sequence[int],
    curves: Sequence[Sequence[float | None]],
    index: int,
    kind: str,
) -> None:
    values = numpy.array(curves, dtype=float)
    mean, deviation = values.mean(axis=1), values.std(axis=1, ddof=1)
    color = COLORS[index]
    axes.plot(epochs, mean, color=color, marker=MARKERS[index], ms=4, label=kind)
    axes.fill_between(epochs, mean - deviation, mean + deviation, color=color, alpha=0.15, lw=0)
