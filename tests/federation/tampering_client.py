"""A client that tampers with its answers in a different way in each round.

python tampering_client.py FOLDER
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from mpfedcl.network.client.client import NetworkClient
from mpfedcl.network.flower.client import take_part
from mpfedcl.network.logs import log_to_file
from mpfedcl.network.setup.folders import ClientFolder, ClientSettings
from mpfedcl.network.transport import Kind, Message

Array = NDArray[Any]
Trick = Callable[[Message], Message]


def _change(message: Message, change: Callable[[Array], Array]) -> Message:
    name = next(each for each in sorted(message.arrays) if each.startswith("averaged/"))
    return replace(message, arrays={**message.arrays, name: change(message.arrays[name])})


def _count(message: Message, number: int) -> Message:
    return replace(message, values={**message.values, "num_samples": number})


def _rename(message: Message) -> Message:
    arrays = dict(message.arrays)
    name = next(each for each in sorted(arrays) if each.startswith("averaged/"))
    arrays["averaged/other"] = arrays.pop(name)
    return replace(message, arrays=arrays)


def _raise(_: Message) -> Message:
    raise RuntimeError("this is broken")


TRICKS: dict[str, Trick] = {
    "an honest update": lambda message: message,
    "one NaN among the weights": lambda message: _change(message, lambda each: each * numpy.nan),
    "a million times as many images": lambda message: _count(message, 10**15),
    "fewer images than none": lambda message: _count(message, -5),
    "a weight of another shape": lambda message: _change(message, lambda each: each.ravel()[:1]),
    "a weight under another name": _rename,
    "no weights": lambda message: replace(message, arrays={}),
    "an exception": _raise,
    "an honest update again": lambda message: message,
}
"""By round, from 1."""


def main() -> None:
    """Take part like the real client, and change its answers."""
    folder = ClientFolder.open(Path(sys.argv[1]), None)
    settings = ClientSettings.read(folder.settings)
    client = NetworkClient(settings)

    def answer(kind: Kind, message: Message) -> Message:
        reply = client.answer(kind, message)
        if kind != "round":
            return reply
        number: int = message.value("round", int)
        return list(TRICKS.values())[number - 1](reply)

    log_to_file()
    take_part(folder, settings.server, answer, print)


if __name__ == "__main__":
    main()
