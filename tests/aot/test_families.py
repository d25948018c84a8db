"""A decode step of families with layers of their own, as it is compiled for a TPU.

It compiles, and updates its cache in place, without a second one.
"""

import json
import os
import subprocess
import sys

import pytest

from kvjax.aot.probe import ENVIRONMENT, available, reason
from tests.aot.families import FEW
from tests.sweep import sweep

# Of 64 rows in 2 layers of 40 heads: a state's 64 columns take 128 lanes.
PADDED = {"rwkv-7-2.9b": 2 * 64 * 40 * 64 * 64 * 4}
# Bytes that one layer takes beside the cache, however many there are: in Gemma 4, keys that a step makes of
# the values that are stored, before and after their rotation; in Llama 4, experts in another layout.
ONE_LAYER = {"gemma-4-31b": 2 * 2 * 4 * 8192 * 512 * 2, "llama-4-scout": 2 * 5120 * 8192 * 2}

pytestmark = pytest.mark.skipif(bool(available("tpu")), reason=available("tpu"))


@pytest.mark.parametrize("name", sweep(list(FEW), "falcon-h1-7b"))
def test_a_step_compiles_and_updates_its_cache_in_place(name):
    done = subprocess.run(
        [sys.executable, "-m", "tests.aot.families", "v5e:2x2", name],
        env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    lines = [line[4:] for line in done.stdout.splitlines() if line.startswith("AOT ")]
    assert lines, reason(done.stderr)
    found = json.loads(lines[0])
    held = found["cache"] + PADDED.get(name, 0)
    # The compiler pads small arrays, such as counts.
    assert 0 <= found["aliases"] - held < 0.01 * held
    assert found["temporaries"] - ONE_LAYER.get(name, 0) < 0.25 * found["cache"]
