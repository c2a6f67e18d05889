"""The points of the projector: a run's prototypes, and some embedded test images beside them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpfedcl.report.markdown import plain
from mpfedcl.report.prototype_map import embed_samples
from mpfedcl.runs.directory import RunDirectory

if TYPE_CHECKING:
    from mpfedcl.runs.run_loop import RunResult

_COLUMNS = ["kind", "class", "client", "count"]


def list_points(result: "RunResult") -> tuple[list[Sequence[float]], list[list[str]]]:
    """Return vectors, and the rows of a table about them under a row of titles."""
    pool, partition = result.pool, RunDirectory(result.path).read_json("partition.json")
    assert pool is not None
    assert partition is not None
    pool, classes = pool.to("cpu"), [plain(name) for name in partition["classes"]]
    columns = zip(pool.labels.tolist(), pool.owners.tolist(), pool.counts.tolist(), strict=True)
    rows = [
        ["prototype", classes[label], plain(pool.names[owner]), str(count)]
        for label, owner, count in columns
    ]
    vectors: list[Sequence[float]] = pool.vectors.tolist()
    samples, _ = embed_samples(result.path, result.experiment, partition)
    if samples is not None:
        vectors += samples.vectors.tolist()
        rows += [
            ["test image", classes[label], plain(owner or "several"), "1"]
            for label, owner in zip(samples.labels, samples.owners, strict=True)
        ]
    return vectors, [_COLUMNS, *rows]
