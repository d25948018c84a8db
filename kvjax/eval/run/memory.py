"""Memory: how many rows fit, estimated beforehand, and the peak use at the end."""

from __future__ import annotations

import resource

import jax

from kvjax.api.memory import free_bytes
from kvjax.base.errors import InputError
from kvjax.hosts.messages import gathered
from kvjax.models.config import Config
from kvjax.models.mixers.attention import mixer_of

# More rows at once are no faster on a CPU, whose cores are already busy.
CPU_BYTES = 2**31
# Share of the free memory a comparison may plan to use; the rest is for compilation and the system.
SHARE = 0.6


def row_bytes(config: Config, tokens: int, itemsize: int) -> int:
    """Estimated peak of one row: keys and values as read, selected and stored, and logits of one strip."""
    slots = [mixer_of(config, i).slots(config) for i in range(config.layers)]
    kv = sum(s.heads * (s.key + s.value) for s in slots if s is not None) * tokens * itemsize
    group = max((config.heads // s.heads for s in slots if s is not None and not s.shared), default=1)
    strip = config.heads * min(tokens, 256) * tokens * 4 * 3
    return kv * (2 + group) + strip + tokens * config.d_model * itemsize * 8 + config.vocab * 4


def fitting_rows(config: Config, tokens: int, itemsize: int, wanted: int) -> int:
    """Find the largest batch up to `wanted` that fits on every host; InputError if not even one row fits."""
    free, one = min(gathered(free_bytes())), row_bytes(config, tokens, itemsize)
    rows = min(wanted, int(free * SHARE) // one)
    if rows < 1:
        raise InputError(
            f"a prompt of {tokens} tokens needs about {one / 2**30:.1f} GiB, {free / 2**30:.1f} are free: "
            "shorten --length, or use a smaller model or a larger machine"
        )
    return rows if jax.default_backend() != "cpu" else max(1, min(rows, CPU_BYTES // one))


def peak_bytes() -> int:
    """Return the peak memory use: of the accelerator if it reports it, else the process's resident memory."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
