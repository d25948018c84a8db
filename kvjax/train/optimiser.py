"""Optimisers: optax transformations built from a run's settings."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from kvjax.train.settings import Loop, Optimiser


def learning_rate(settings: Optimiser, steps: int) -> optax.Schedule:
    """Return the learning rate of every step, warm-up included.

    >>> rate = learning_rate(Optimiser(peak=1.0, warmup=10, schedule="wsd", decay=0.5, floor=0.0), 100)
    >>> [round(float(rate(step)), 2) for step in (0, 5, 10, 49, 75, 100)]
    [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
    """
    peak, low, warmup = settings.peak, settings.peak * settings.floor, min(settings.warmup, steps)
    if settings.schedule == "cosine":
        after_warmup = optax.cosine_decay_schedule(peak, max(1, steps - warmup), settings.floor)
    elif settings.schedule == "wsd":
        falling = max(1, round(settings.decay * steps))
        start = max(0, steps - warmup - falling)
        after_warmup = optax.linear_schedule(peak, low, falling, transition_begin=start)
    else:
        after_warmup = optax.constant_schedule(peak)
    if not warmup:
        return after_warmup
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after_warmup], [warmup])


def rate_of(settings: Optimiser, loop: Loop) -> optax.Schedule:
    """`learning_rate` of a run with stages: after the warm-up a step counts by its tokens.

    >>> loop = Loop(stages=((50, 128, 4), (50, 128, 12)))
    >>> rate = rate_of(Optimiser(peak=1.0, warmup=0, schedule="wsd", decay=0.5, floor=0.0), loop)
    >>> [round(float(rate(step)), 2) for step in (0, 50, 66, 100)]
    [1.0, 1.0, 1.0, 0.0]
    """
    rate = learning_rate(settings, loop.steps)
    if not loop.stages:
        return rate
    ends = jnp.asarray((0, *loop.ends), jnp.float32)
    share = jnp.asarray([loop.tokens(step) / loop.tokens(loop.steps) for step in (0, *loop.ends)])

    def by_tokens(step: Any) -> Any:
        step = jnp.asarray(step, jnp.float32)
        counted = jnp.interp(step, ends, share) * loop.steps
        warmup = float(min(settings.warmup, loop.steps))
        return rate(jnp.where(step < warmup, step, jnp.maximum(counted, warmup)))

    return by_tokens


def optimiser(settings: Optimiser, loop: Loop) -> optax.GradientTransformation:
    """AdamW (arXiv:1711.05101), or Muon (Jordan et al., 2024) for layers' matrices, after clipping."""
    rate = rate_of(settings, loop)
    if settings.name == "muon":
        # Embeddings and the last matrix are tables of vectors, which AdamW serves better.
        steps_of = optax.contrib.muon(
            rate, weight_decay=settings.weight_decay, adam_weight_decay=0.0, adam_b1=settings.b1,
            adam_b2=settings.b2, muon_weight_dimension_numbers=_matrices, consistent_rms=0.2,
        )  # fmt: skip
    else:
        steps_of = optax.adamw(
            rate, settings.b1, settings.b2, settings.eps, weight_decay=settings.weight_decay, mask=_decayed
        )
    return optax.chain(optax.clip_by_global_norm(settings.clip), steps_of)


def _decayed(params: Any) -> Any:
    """Matrices: layers are stacked, so a vector of theirs has two axes."""

    def kind(path: Any, x: Any) -> bool:
        return x.ndim > (2 if _in_layers(path) else 1)

    return jax.tree.map_with_path(kind, params)


def _matrices(params: Any) -> Any:
    """Which axes of a layer's matrices Muon makes orthogonal: the last two; None for all other parameters."""

    def axes(path: Any, x: Any) -> Any:
        stacked = _in_layers(path) and x.ndim >= 3
        return optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1) if stacked else None

    return jax.tree.map_with_path(axes, params)


def _in_layers(path: Any) -> bool:
    return any(getattr(key, "key", None) == "layers" for key in path)
