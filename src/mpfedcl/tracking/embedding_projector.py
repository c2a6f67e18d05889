"""The points of the projector: a run's prototypes, and some embedded test images beside them."""

from collections.abc import Sequence

from mpfedcl.report.markdown import printable_name
from mpfedcl.report.prototype_map import embed_test_images
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.observer import RunResult

_COLUMNS = ["kind", "class", "client", "count"]


def list_projector_points(result: RunResult) -> tuple[list[Sequence[float]], list[list[str]]]:
    """Return vectors, and the rows of a table about them under a row of titles."""
    pool, partition = result.pool, RunDirectory(result.path).read_json("partition.json")
    assert pool is not None
    assert partition is not None
    pool, classes = pool.to("cpu"), [printable_name(name) for name in partition["classes"]]
    columns = zip(pool.labels.tolist(), pool.owners.tolist(), pool.counts.tolist(), strict=True)
    rows = [
        ["prototype", classes[label], printable_name(pool.names[owner]), str(count)]
        for label, owner, count in columns
    ]
    vectors: list[Sequence[float]] = pool.vectors.tolist()
    samples, _ = embed_test_images(result.path, result.experiment, partition)
    if samples is not None:
        vectors += samples.vectors.tolist()
        rows += [
            ["test image", classes[label], printable_name(owner or "several"), "1"]
            for label, owner in zip(samples.labels, samples.owners, strict=True)
        ]
    return vectors, [_COLUMNS, *rows]
