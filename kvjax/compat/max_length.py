"""How long texts may get: a model's positions, or more if the integers of the rotation stay within them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from kvjax.base.errors import InputError
from kvjax.grammar import Keep, Method
from kvjax.models.block_transformer import BlockConfig
from kvjax.models.config import Config
from kvjax.models.mixers.attention import Attention, mixer_of
from kvjax.models.mixers.latent import Latent
from kvjax.ops.base.long_rope import LongRope

# Up to here float32 represents positions exactly, by which scores may rank slots.
_EXACT = 2**24


@lru_cache(maxsize=1024)
def last_position(method: Method | None, config: Config | BlockConfig) -> int:
    """How many tokens a row may have: the model's positions, or more if the phase stays within them.

    Ranks stay below the budget, so the text may grow until a budget in percent reaches the model's positions.
    (If slots are evicted at the end of prompts alone, generated tokens come on top: `positions_left`.)
    Contexts that share positions let the text be longer by as many tokens. None of this holds if any layer
    uses positions after all: one that keeps everything, one that is not plain attention, or frequencies that
    depend on the length of the text.
    """
    most, keep = config.max_positions, None if method is None else method.keep
    if method is not None and method.restore is not None:
        # Restore tokens take positions after the prompt.
        most -= method.restore.tokens
    if method is None or keep is None or not isinstance(config, Config):
        return most
    shared, leaves = method.shared_positions, _leaves(keep) and keep.skip_layers == 0
    if not shared and not (keep.phase.bounded(most) and leaves):
        return most
    for layer in range(config.layers):
        mixer, window = mixer_of(config, layer), config.window(layer)
        turns_by_rank = type(mixer) in (Attention, Latent) and not mixer.rope(config, layer).by_length
        # Queries that are scaled by position need positions.
        turns_by_rank &= not (isinstance(mixer, Attention) and mixer.query_growth is not None)
        if not turns_by_rank or (window is not None and window >= most):
            return most
    return most + shared if shared else max(most, min(keep.budget.reach(most - 1), _EXACT))


def _leaves(keep: Keep) -> bool:
    """Whether KV heads are back at their budgets after every token or every prompt."""
    return keep.score is not None and (keep.when.at_once or not keep.when.in_steps)


def check_chunks(config: Config | BlockConfig, tokens: int) -> None:
    """InputError if a rotation that depends on length makes reading in chunks differ from reading at once.

    The keys of an earlier chunk would be rotated as those of a shorter text.
    """
    if not isinstance(config, Config):
        return
    ropes = [mixer_of(config, layer).rope(config, layer) for layer in range(config.layers)]
    ends = [rope.original_max for rope in ropes if rope.by_length]
    if ends and tokens > min(ends):
        raise InputError(
            f"chunk= cannot read {tokens} tokens: beyond {min(ends)} tokens this model's rotation depends "
            "on the length of the whole text, and earlier chunks would be rotated by shorter ones: leave "
            "chunk= out"
        )


@lru_cache(maxsize=1024)
def switch_at(config: Config | BlockConfig) -> int | None:
    """Return the length up to which a row is rotated as a short one, if long rows have other frequencies."""
    if not isinstance(config, Config):
        return None
    ropes = [mixer_of(config, layer).rope(config, layer) for layer in range(config.layers)]
    return min((rope.original_max for rope in ropes if isinstance(rope, LongRope)), default=None)


def check_switch(config: Config | BlockConfig, seen: np.ndarray, added: np.ndarray | int) -> None:
    """InputError if rows of `seen` tokens in a cache grow beyond the length at which frequencies change.

    Their keys are rotated as for a short text; transformers would read the whole text again.
    """
    if (end := switch_at(config)) is None:
        return
    rows, more = np.broadcast_arrays(seen, added)
    crossing = np.flatnonzero((rows > 0) & (rows <= end) & (rows + more > end))
    if len(crossing):
        have = int(rows[crossing].max())
        raise InputError(
            f"a row of {have} tokens would grow beyond {end}, where this model's rotation (longrope) changes "
            f"for the whole text: add at most {end - have} tokens, or read the whole text as one prompt"
        )
