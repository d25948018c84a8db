"""A server's decode step writes its pool in place, by the compilers' record."""

import json
import os
import subprocess
import sys

import pytest

from kvjax.aot.probe import ENVIRONMENT, available, reason


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param("v5e:2x2", marks=pytest.mark.skipif(bool(available("tpu")), reason=available("tpu"))),
        pytest.param("h100", marks=pytest.mark.skipif(bool(available("gpu")), reason=available("gpu"))),
    ],
)
def test_the_pool_is_aliased_and_copied_nowhere(topology):
    done = subprocess.run(
        [sys.executable, "-m", "tests.aot.serving", topology],
        env=os.environ | ENVIRONMENT | {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("AOT ")]
    if not lines:
        pytest.fail(reason(done.stderr))
    found = json.loads(lines[0][4:])
    # Beside the pool, tables and lengths are donated.
    assert found["pool"] <= found["aliases"] < 1.001 * found["pool"]
    assert found["copies"] == 0 and found["temporaries"] < 0.05 * found["pool"]
