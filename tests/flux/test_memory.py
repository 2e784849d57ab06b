"""Freed memory is kept up to a bound; seen in the size of a process of its own, because the allocator has no other face."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flux.shell import process as memory

MIB = 1 << 20
PROGRAM = """
import sys
import numpy as np
import psutil
from flux.shell import process

def kept():
    before = psutil.Process().memory_info().rss
    pieces = [np.ones({each}, np.uint8) for _ in range({count})]
    del pieces
    return psutil.Process().memory_info().rss - before

plain = kept()
assert process.keep(int(sys.argv[1])) == (int(sys.argv[1]) > 0)
after = kept()
process.give_back()
print(plain, after)
"""


def kept_of_96_mib(bound: int) -> tuple[int, int]:
    """Return the bytes that a process keeps of 96 MiB, without and with the bound."""
    program = PROGRAM.format(each=32 * MIB, count=3)
    done = subprocess.run([sys.executable, "-c", program, str(bound)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    plain, after = map(int, done.stdout.split())
    return plain, after


pytestmark = pytest.mark.skipif(memory._glibc() is None, reason="only glibc can be told")


def test_what_is_freed_is_kept_up_to_the_bound() -> None:
    plain, after = kept_of_96_mib(256 * MIB)
    assert plain < 16 * MIB
    assert after > 90 * MIB


def test_beyond_the_bound_it_is_returned() -> None:
    assert kept_of_96_mib(64 * MIB)[1] < 70 * MIB


def test_with_0_the_allocator_is_left_alone() -> None:
    assert kept_of_96_mib(0)[1] < 16 * MIB
