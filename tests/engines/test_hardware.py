import os

import pytest

from mpfedcl.engines.hardware import usable_cores


def test_usable_cores_follow_the_affinity() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("only Linux confines a process to cores")
    before = os.sched_getaffinity(0)
    assert 1 <= usable_cores() <= len(before)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
