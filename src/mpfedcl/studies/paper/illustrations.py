"""The figures that show data and embeddings."""

from mpfedcl.studies.paper.item import Item, Picture
from mpfedcl.studies.paper.protocol import METHODS, experiment
from mpfedcl.studies.paper.sets import Sets


def partitions(sets: Sets) -> Item:
    """Return pictures of who holds what."""
    by_label = {sets.title(ours): experiment(ours, "local") for ours in sets.all.values()}
    by_domain = {
        sets.title(ours): experiment(ours, "local", partition__kind="feature")
        for ours in sets.by_domain.values()
    }
    return Item(
        "partitions",
        "Who holds what",
        "Training images by client and class, of the first seed.",
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


def embeddings(sets: Sets) -> Item:
    """Return pictures of clients' embeddings."""
    runs = {
        METHODS[method]: experiment(ours, method, partition__alpha=0.1).replace(
            personal_models=True
        )
        for ours in sets.pick("mnist")
        for method in ("local", "fedavg", "mp-fedcl")
    }
    return Item(
        "embeddings",
        "What clients' embeddings look like",
        "Test digits embedded by the models of two clients after training alone and in a "
        "federation, Dir(0.1), laid out by t-SNE; colours are classes, crosses the client's own "
        "prototypes.",
        {},
        {},
        pictures=(Picture("embeddings", "embeddings", "Embeddings of two clients", runs),),
    )
