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
    # The compiler pads small arrays, such as counts.
    assert 0 <= found["aliases"] - found["cache"] < 0.01 * found["cache"]
    assert found["temporaries"] < 0.25 * found["cache"]
