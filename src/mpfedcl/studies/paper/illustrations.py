"""The figures that show data and embeddings."""

from mpfedcl.studies.paper.datasets import PaperDatasets
from mpfedcl.studies.paper.item import PaperItem, Picture
from mpfedcl.studies.paper.protocol import METHODS, paper_experiment


def partition_pictures(datasets: PaperDatasets) -> PaperItem:
    """Return pictures of who holds what."""
    by_label = {
        datasets.title(dataset): paper_experiment(dataset, "local")
        for dataset in datasets.chosen.values()
    }
    by_domain = {
        datasets.title(dataset): paper_experiment(dataset, "local", partition__kind="feature")
        for dataset in datasets.by_domain.values()
    }
    return PaperItem(
        "partitions",
        "Who holds what",
        "Training images per client and class, first seed.",
        {},
        {},
        pictures=tuple(
            Picture(name, "partitions", title, several)
            for name, title, several in (
                ("partitions-label", "Label skew, Dir(0.05)", by_label),
                ("partitions-feature", "Feature skew", by_domain),
            )
            if several
        ),
    )


def embedding_pictures(datasets: PaperDatasets) -> PaperItem:
    """Return pictures of clients' embeddings."""
    runs = {
        METHODS[method]: paper_experiment(dataset, method, partition__alpha=0.1).replace(
            personal_models=True
        )
        for dataset in datasets.select("mnist")
        for method in ("local", "fedavg", "mp-fedcl")
    }
    return PaperItem(
        "embeddings",
        "What clients' embeddings look like",
        "Test digits embedded by the models of two clients after training alone and in a "
        "federation, Dir(0.1), laid out by t-SNE; colors are classes, crosses the client's own "
        "prototypes.",
        {},
        {},
        pictures=(Picture("embeddings", "embeddings", "Embeddings of two clients", runs),),
    )
