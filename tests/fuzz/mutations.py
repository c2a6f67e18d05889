"""Honest values, texts, arrays and bytes, changed in the ways that break programs."""

import io
import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy
from safetensors.numpy import load, save

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 255, 2**31, -(2**31), 2**40, 2**53, 2**63, 2**64, 10**400),
    *(0.0, -0.0, 0.5, 1e-320, 1e12, 1.1e12, 1.7e308, -1.7e308, float("nan"), float("inf")),
    *(
        "",
        "a",
        "0",
        "-1",
        "1e999",
        "NaN",
        "..",
        "../x",
        "/",
        ".hidden",
        "a\x00b",
        "a\nb",
        "\x1b[2J",
    ),
    *(
        "\ud800",
        "é",
        "e\u0301",
        "\u202e",
        "\u200b",
        "💥",
        "'",
        '"',
        "\\",
        "[x]",
        "#",
        "=",
        "٣",
        "²",
    ),
    *("x" * 200, "x" * 201, "é" * 101, "<script>", "__proto__", "CON", "client-1", "mp-fedcl"),
    *([], {}, [[]], [None], {"": None}, [0] * 50, {"a": {"a": {"a": {}}}}, ["x"] * 50),
)
ODD_TEXTS = (
    "NaN",
    "-Infinity",
    "1e999",
    "1" + "0" * 400,
    '"\\ud800"',
    "null",
    "{}",
    "[]",
    '"',
    "}",
)
DTYPES = (
    "<f8",
    "<f4",
    "<f2",
    ">f8",
    "<i8",
    "<i4",
    "|i1",
    "|u1",
    "<u8",
    "|b1",
    "<c16",
    "<U3",
    "|S3",
)
ODD_NUMBERS = (0, -1, 1, 3, 1e6, 2e6, 1e38, 1e100, 1.7e308, -1.7e308, 2.0**62, -(2.0**63))


class WireArrays(NamedTuple):
    """A message's arrays as they travel: what the file is said to be, and its bytes."""

    kind: str
    data: bytes


def change_value(random: Random, value: Any) -> Any:
    """Return plain values with one place changed."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        name = random.choice(list(value))
        kept = {key: each for key, each in value.items() if key != name}
        chance = random.random()
        if chance < 0.08:
            return kept
        if chance < 0.12:
            return {**kept, str(random.choice(ODD_VALUES))[:300]: value[name]}
        return {**value, name: change_value(random, value[name])}
    if isinstance(value, list) and value and random.random() < 0.8:
        place = random.randrange(len(value))
        chance = random.random()
        if chance < 0.1:
            return value[:place] + value[place + 1 :]
        if chance < 0.2:
            return [*value, value[place]]
        return [*value[:place], change_value(random, value[place]), *value[place + 1 :]]
    if isinstance(value, int | float) and abs(value) < 2**64 and random.random() < 0.3:
        return random.choice([value + 1, -value, value * 2, float(value), str(value), [value]])
    if random.random() < 0.02:
        return nest(random.randrange(1, 900))
    return random.choice(ODD_VALUES)


def nest(depth: int) -> Any:
    """Return a list in a list, and so on."""
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def to_text(random: Random, value: Any) -> str:
    """Return values as JSON, sometimes with a fault in the text itself."""
    text = json.dumps(value)
    return change_text(random, text) if random.random() < 0.1 else text


def change_text(random: Random, text: str) -> str:
    """Return a text that is cut, doubled or has something odd in it."""
    begin = random.randrange(len(text) + 1)
    end = min(len(text), begin + random.randrange(12))
    middle = random.choice(
        ["", text[begin:end] * 2, random.choice(ODD_TEXTS), "[" * random.choice((2, 2000)), "\x00"]
    )
    return text[:begin] + middle + (text[end:] if random.random() < 0.9 else "")


def change_bytes(random: Random, content: bytes) -> bytes:
    """Return bytes that are flipped, cut, moved or overwritten in a few places."""
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 8))):
        if not changed:
            return b"\x00"
        place, chance = random.randrange(len(changed)), random.random()
        if chance < 0.5:
            changed[place] ^= 1 << random.randrange(8)
        elif chance < 0.7:
            number = random.choice((0, 1, 127, 2**15, 2**31 - 1, 2**32 - 1))
            changed[place : place + 4] = number.to_bytes(4, "little")
        elif chance < 0.8:
            del changed[place:]
        elif chance < 0.9:
            del changed[place : place + random.randrange(1, 32)]
        else:
            other = random.randrange(len(changed))
            changed[place:place] = changed[other : other + random.randrange(1, 64)]
    return bytes(changed)


def to_wire(arrays: Mapping[str, Any]) -> WireArrays:
    """Return arrays as an honest program sends them."""
    # The library takes the memory as it lies.
    data = save({name: numpy.asarray(each, order="C") for name, each in arrays.items()})
    return WireArrays("safetensors", data)


def change_arrays(random: Random, wired: WireArrays) -> WireArrays:
    """Return other arrays, or bytes that are none."""
    chance = random.random()
    if chance < 0.2:
        return wired._replace(data=change_bytes(random, wired.data))
    if chance < 0.3:
        return random.choice(
            [
                wired._replace(kind=random.choice(("", "torch.Tensor", "numpy.ndarray"))),
                wired._replace(data=claim(random)),
                wired._replace(data=archive()),
                wired._replace(data=b""),
            ]
        )
    try:
        arrays = load(wired.data)
        name = random.choice(list(arrays))
        array = arrays.pop(name)
        if chance < 0.35:
            return to_wire(arrays)
        if chance < 0.4:
            other = random.choice(("x", "averaged/x", "summed/x", "/", name + "x"))
            return to_wire({**arrays, other: array})
        return to_wire({**arrays, name: change_numbers(random, array)})
    # It was changed before and is none any more, or now has a type that the format has not.
    except Exception:
        return wired._replace(data=change_bytes(random, wired.data))


def change_numbers(random: Random, array: Any) -> Any:
    """Return an array of other numbers, another shape or another type."""
    try:
        with numpy.errstate(all="ignore"):
            return _change_numbers(random, array)
    # Not every type holds every number.
    except (ValueError, TypeError, OverflowError):
        return array[..., None]


def _change_numbers(random: Random, array: Any) -> Any:
    chance = random.random()
    if chance < 0.25:
        return array.astype(random.choice(DTYPES))
    if chance < 0.5 and array.ndim:
        return random.choice([array[:1], array[:0], array[None], array.ravel(), array.T])
    if chance < 0.6 and array.ndim:
        return numpy.repeat(array, 3, axis=0)
    changed = numpy.array(array)
    if changed.size:
        odd = random.choice((*ODD_NUMBERS, float("nan"), float("inf")))
        is_whole = changed.dtype.kind in "iu" and numpy.isfinite(odd)
        changed.flat[random.randrange(changed.size)] = int(odd) if is_whole else odd
    return changed


def claim(random: Random) -> bytes:
    """Return the list of a file that says it has a huge array, and nothing after it."""
    shape = random.choice([[2**33], [2**20, 2**20], [0, 2**62], [2**62, 0], [1] * 40, [], [-1]])
    dtype = random.choice(("F32", "F64", "I64", "BF16", "F8_E4M3", "BOOL", "object"))
    places = random.choice([[0, 0], [0, 2**40], [8, 0], [-1, 3], [0]])
    entry = {"dtype": dtype, "shape": shape, "data_offsets": places}
    listed = json.dumps({"params/classifier.bias": entry}).encode()
    length = random.choice((len(listed), 0, 2**20, 2**63))
    return length.to_bytes(8, "little") + listed


def archive() -> bytes:
    """Return an npz archive, which numpy opens where it expects an array."""
    file = io.BytesIO()
    numpy.savez(file, a=numpy.zeros(3))
    return file.getvalue()


def choose(random: Random, seeds: Sequence[Any]) -> Any:
    """Return one of several honest inputs."""
    return seeds[random.randrange(len(seeds))]
