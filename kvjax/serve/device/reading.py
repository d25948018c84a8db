"""Reads one prompt under its own method, padded to a few sizes so that jobs share programs."""

from __future__ import annotations

import numpy as np
from jaxtyping import Array, Float

from kvjax.api.prefill import bare_cache, read_prompt
from kvjax.compat.max_length import last_position
from kvjax.serve.device.jobs import Job
from kvjax.state.cache import Cache

# The static sizes of prompts and outputs; all that fit into a size share its programs.
SIZES = (64, 512, 4096, 32768, 262144, 2097152)


def size_of(job: Job) -> int:
    """Return the static size that prompt and output each fit into, for which programs are compiled.

    There are few sizes, so that jobs share programs; none exceeds the model's positions.
    """
    need = max(len(job.tokens), job.most)
    size = next((size for size in SIZES if size >= need), need)
    return max(need, min(size, int(min(last_position(job.method, job.model.config), SIZES[-1]))))


def read_alone(job: Job, room: int) -> tuple[Float[Array, "1 V"], Cache]:
    """Read a job's prompt; return the logits, and its compressed cache with free slots for the output."""
    tokens = np.zeros((1, max(room, len(job.tokens))), np.int32)
    tokens[0, : len(job.tokens)] = job.tokens
    logits, cache = read_prompt(
        job.model, tokens, method=job.method, cache=None, lengths=[len(job.tokens)], room=room, cut=False
    )
    return logits, bare_cache(cache)
