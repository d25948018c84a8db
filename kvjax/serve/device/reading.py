"""A prompt read alone by its own method, in shapes that do not depend on how long it is."""

from __future__ import annotations

import numpy as np
from jaxtyping import Array, Float

from kvjax.api.prefill import bare_cache, read_prompt
from kvjax.compat.max_length import last_position
from kvjax.serve.device.jobs import Job
from kvjax.state.cache import Cache

# Prompts and outputs up to so many tokens share programs.
SIZES = (64, 512, 4096, 32768, 262144, 2097152)


def size_of(job: Job) -> int:
    """Tokens of the prompt, and of what follows it, that the programs of a job are made for.

    It is one of a few, so that jobs share programs, and no more than the model has positions.
    """
    need = max(len(job.tokens), job.most)
    size = next((size for size in SIZES if size >= need), need)
    return max(need, min(size, int(min(last_position(job.method, job.model.config), SIZES[-1]))))


def read_alone(job: Job, room: int) -> tuple[Float[Array, "1 V"], Cache]:
    """Logits after a job's prompt, and the cache compressed by its method, with room for its output."""
    tokens = np.zeros((1, max(room, len(job.tokens))), np.int32)
    tokens[0, : len(job.tokens)] = job.tokens
    logits, cache = read_prompt(
        job.model, tokens, method=job.method, cache=None, lengths=[len(job.tokens)], room=room, cut=False
    )
    return logits, bare_cache(cache)
