"""Freed host memory goes back to the system, also what lies between arrays that live."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, numpy as np
from kvjax.base.host_memory import trim

def held():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

many = [np.ones(2**20 // 8 - 512) for _ in range(400)]  # each below the size that is mapped on its own
before = held()
del many[:-1]
between = held()
trim()
print(before, between, held())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems return it by themselves")
def test_what_lies_before_a_living_array_is_returned():
    env = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env, check=True)
    before, between, after = map(float, done.stdout.split())
    assert between > before - 100 > after + 200
