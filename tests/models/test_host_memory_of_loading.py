"""Loading several shards takes the memory of the model, and of less than one shard beside it.

By hand at the full size of Llama 3.1 8B (`random_checkpoint.py` writes it: 16.06 GB of weights, files
of at most 5.00 GB): what a process allocates peaks at 16.21 GB on one device, at 16.55 GB split over eight
devices, and at 8.32 GB in each of two processes.
"""

import os
import subprocess
import sys

import pytest

from tests.hosts.processes import ROOT, Processes, well
from tests.models.random_checkpoint import written

SIZES = dict(
    model_type="llama", vocab_size=16384, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8,
    num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=False,
)  # fmt: skip
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(directory, a small one, bytes of the largest shard of the first)."""
    folder = tmp_path_factory.mktemp("loaded")
    shard = written(folder / "model", SIZES, 8e7)
    small = SIZES | dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    written(folder / "small", small, 1e9)
    return folder / "model", folder / "small", shard


def check(said, shard):
    """Check that a process allocates the weights of its devices and less than half a shard.

    Pages of files, which the system takes back when it needs them, are beside that.
    """
    weights, everything, own = map(int, said.split())
    assert 0.9 * weights < own < weights + shard / 2
    assert everything < 2 * weights + shard
    return weights


@pytest.mark.rotating
@LINUX
@pytest.mark.parametrize("devices", [1, 8])
def test_loading_takes_the_model_and_less_than_a_shard(devices, checkpoints):
    model, small, shard = checkpoints
    count = f"--xla_force_host_platform_device_count={devices}"
    mesh = ["model=8"] if devices == 8 else []
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.loading_memory", model, small, *mesh],
        capture_output=True, text=True, check=True, cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {count}"},
    )  # fmt: skip
    assert check(done.stdout, shard) > 3 * 10**8 > 4 * 10**7 < shard


@pytest.mark.slow
@LINUX
def test_each_of_two_processes_takes_the_weights_of_its_devices_and_less_than_a_shard(checkpoints, tmp_path):
    model, small, shard = checkpoints
    words = ["-m", "tests.models.loading_memory", str(model), str(small), "model=8"]
    ran = well(Processes(tmp_path, words))
    whole = 3 * 10**8
    assert all(whole / 2 < check(ran.out(i), shard) < 0.75 * whole for i in range(2))
