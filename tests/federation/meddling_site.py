"""A client's process that answers what it likes: another thing in each round.

python meddling_site.py NODE.TOML SOCKET
"""

import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from mpfedcl.network.client.client import Site, SiteSettings
from mpfedcl.network.client.service import serve_site
from mpfedcl.network.message import Kind, Parcel

Array = NDArray[Any]
Trick = Callable[[Parcel], Parcel]


def _change(parcel: Parcel, change: Callable[[Array], Array]) -> Parcel:
    name = next(each for each in sorted(parcel.arrays) if each.startswith("sums/"))
    return replace(parcel, arrays={**parcel.arrays, name: change(parcel.arrays[name])})


def _count(parcel: Parcel, number: int) -> Parcel:
    return replace(parcel, values={**parcel.values, "num_samples": number})


def _rename(parcel: Parcel) -> Parcel:
    arrays = dict(parcel.arrays)
    name = next(each for each in sorted(arrays) if each.startswith("sums/"))
    arrays["sums/other"] = arrays.pop(name)
    return replace(parcel, arrays=arrays)


def _raise(_: Parcel) -> Parcel:
    raise RuntimeError("this is broken")


TRICKS: dict[str, Trick] = {
    "an honest update": lambda parcel: parcel,
    "one NaN among the weights": lambda parcel: _change(parcel, lambda each: each * numpy.nan),
    "a million times as many images": lambda parcel: _count(parcel, 10**15),
    "fewer images than none": lambda parcel: _count(parcel, -5),
    "a weight of another shape": lambda parcel: _change(parcel, lambda each: each.ravel()[:1]),
    "a weight under another name": _rename,
    "no weights": lambda parcel: replace(parcel, arrays={}),
    "an exception": _raise,
    "an honest update again": lambda parcel: parcel,
}
"""By round, from 1."""


def main() -> None:
    """Serve as the real process does, and change what it says."""
    site = Site(SiteSettings.parse(tomllib.loads(Path(sys.argv[1]).read_text())))

    def answer(kind: Kind, parcel: Parcel) -> Parcel:
        reply = site.answer(kind, parcel)
        if kind != "round":
            return reply
        number: int = parcel.value("round", int)
        return list(TRICKS.values())[number - 1](reply)

    serve_site(Path(sys.argv[2]), answer)


if __name__ == "__main__":
    main()
