"""Randomness from keys, never from the order of calls.

Every random draw names its purpose: `generator(seed, round, client, "batches")`. All engines,
resumed runs, and clients that answer in another order therefore draw the same numbers.
"""

import hashlib
import json

import numpy
import torch

Part = int | str


def seed_for(seed: int, *parts: Part) -> int:
    """Return a 63-bit seed for the key (seed, *parts); different keys give unrelated seeds."""
    # JSON keeps 1 and "1" apart and never runs two parts together.
    key = json.dumps([seed, *parts]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def generator(seed: int, *parts: Part) -> torch.Generator:
    """Return a torch generator (on the CPU, so that every device draws alike) for the key."""
    return torch.Generator().manual_seed(seed_for(seed, *parts))


def numpy_generator(seed: int, *parts: Part) -> numpy.random.Generator:
    """Return a numpy generator for the key."""
    return numpy.random.default_rng(seed_for(seed, *parts))
