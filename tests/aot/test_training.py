"""A training step on several TPUs: attention runs in kernels on every device, forward and backward."""

import os
import subprocess
import sys

import pytest

from kvjax.aot.probe import ENVIRONMENT, available
from tests.sweep import sweep

pytestmark = pytest.mark.skipif(bool(available("tpu")), reason=available("tpu"))


@pytest.mark.parametrize("rules", sweep(("fsdp", "tensor"), "tensor"))
def test_devices_of_a_mesh_train_with_the_kernels_of_one(rules):
    command = [sys.executable, "-m", "tests.aot.training", rules]
    done = subprocess.run(
        command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # Forward, forward again behind the layer's input, and backward.
    assert int(done.stdout.split()[-1]) == 3
