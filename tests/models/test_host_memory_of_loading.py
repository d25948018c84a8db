"""Loading several shards takes the memory of the model, and of less than one shard beside it."""

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvjax.models.hf_config import config_from_hf
from kvjax.models.hf_tensors import hf_name, tensors

SIZES = dict(
    model_type="llama", vocab_size=16384, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8,
    num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=False,
)  # fmt: skip
SHARDS = 5
# Peaks of what a process holds: all pages, and those that are no file's.
SCRIPT = """
import sys, threading, jax, jax.numpy as jnp
from kvjax.models.hf import load_hf

def held():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return [int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon")]

jnp.zeros(8).block_until_ready()
load_hf(sys.argv[2])  # a small one: what the first load of any model takes
before, seen, ends = held(), [], threading.Event()

def watch():
    while not ends.wait(0.002):
        seen.append(held())

watcher = threading.Thread(target=watch)
watcher.start()
model = load_hf(sys.argv[1], dtype="bfloat16", progress=False)
jax.block_until_ready(model.params)
ends.set(), watcher.join()
weights = sum(x.nbytes for x in jax.tree.leaves(model.params))
print(weights, *(max(peak) - start for peak, start in zip(zip(*seen), before)))
"""


def written(folder, sizes, shards):
    """A checkpoint of random bits with the given sizes; the bytes of its largest shard."""
    folder.mkdir()
    config = config_from_hf(sizes)
    (folder / "config.json").write_text(json.dumps(sizes))
    shapes = {hf_name(name, config): tensor.shape for name, tensor in tensors(config).items()}
    rng, each = np.random.default_rng(0), -(-len(shapes) // shards)
    names, index, largest = [*shapes], {}, 0
    for i in range(0, len(names), each):
        file = f"model-{i // each + 1:05d}-of-{shards:05d}.safetensors"
        part = {n: rng.normal(size=shapes[n]).astype(ml_dtypes.bfloat16) for n in names[i : i + each]}
        save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
        largest = max(largest, sum(x.nbytes for x in part.values()))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return largest


@pytest.mark.rotating
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_loading_takes_the_model_and_less_than_a_shard(tmp_path):
    shard = written(tmp_path / "model", SIZES, SHARDS)
    small = SIZES | dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    written(tmp_path / "small", small, 1)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "model", tmp_path / "small"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    weights, everything, own = map(int, done.stdout.split())
    assert weights > 3 * 10**8 > 4 * 10**7 < shard
    # What it allocates; pages of files, which the system takes back when it needs them, are beside that.
    assert 0.9 * weights < own < weights + shard / 2
    assert everything < 2 * weights + shard
