"""What a process holds while it loads a model: `python -m tests.models.loading_memory MODEL SMALL [MESH]`.

Prints the bytes of its devices' weights, then the peaks of all pages and of those that are no file's, beyond
what it held before. SMALL is loaded first, for what the first load of any model takes.
"""

import os
import sys
import threading

import jax
import jax.numpy as jnp

import kvjax


def held():
    """(all pages, those that are no file's) of this process, in bytes."""
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return [int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon")]


def main() -> None:
    model, small, *mesh = sys.argv[1:]
    if "KVJAX_HOSTS" in os.environ:
        kvjax.start_hosts(wait_seconds=60)
    options = dict(dtype="bfloat16", progress=False, mesh=mesh[0], rules="tensor") if mesh else {}
    jnp.zeros(8).block_until_ready()
    kvjax.load(small, **options)
    before, seen, ends = held(), [], threading.Event()

    def watch():
        while not ends.wait(0.002):
            seen.append(held())

    watcher = threading.Thread(target=watch)
    watcher.start()
    loaded = kvjax.load(model, **options | dict(dtype="bfloat16", progress=False))
    jax.block_until_ready(loaded.params)
    ends.set(), watcher.join()
    weights = sum(s.data.nbytes for x in jax.tree.leaves(loaded.params) for s in x.addressable_shards)
    print(weights, *(max(peak) - start for peak, start in zip(zip(*seen, strict=True), before, strict=True)))


if __name__ == "__main__":
    main()
