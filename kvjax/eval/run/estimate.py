"""Estimates a comparison's time before it begins: reading prompts, running cells, compiling."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp

from kvjax.eval.run.plan import ComparisonPlan, ContextBatch, distinct
from kvjax.eval.run.runner import reads_apart
from kvjax.models.model import Model

# A cell's share of the cost of prefill: scoring, eviction and fed answers, or one step per token.
FED, STEPS = 0.1, 0.4
# Seconds per layer to compile one of a cell's two programs; two programs compile at a time.
COMPILE = 0.12
LEAST = 60.0


def estimate(plan: ComparisonPlan, batches: list[ContextBatch]) -> str:
    """How long a run takes, in words; "" for less than a minute. Right within a factor of about two.

    The rate of this device is measured by one product of matrices.
    """
    read = sum(map(distinct, batches)) * operations(plan.model, plan.tokens) / rate()
    alone = sum(reads_apart(entry.method) for entry in plan.entries)
    keeps = (entry.method.keep for entry in plan.entries)
    probes = {keep.probe for keep in keeps if keep is not None and keep.probe is not None}
    own = len(plan.entries) * (FED if plan.gold else STEPS)
    compiling = len(plan.entries) * len(plan.protocols) * plan.model.config.layers * COMPILE
    seconds = read * (1 + alone + len(probes) + own) + compiling
    if seconds < LEAST:
        return ""
    prompts, minutes = sum(map(distinct, batches)), seconds / 60
    about = f"{max(2, round(minutes))} minutes" if minutes < 120 else f"{minutes / 60:.0f} hours"
    return (
        f"{prompts} prompts of up to {plan.tokens} tokens, {len(plan.entries)} cells each: about {about}; "
        "fewer --samples, --methods or --budgets take less, and --resume goes on where a run was cut"
    )


def operations(model: Model, tokens: int) -> float:
    """Floating-point operations of reading a prompt: two per weight and token, and those of attention."""
    config = model.config
    weights = sum(x.size for x in jax.tree.leaves(model.params)) - config.vocab * config.d_model
    return 2.0 * weights * tokens + 4.0 * config.layers * config.heads * config.head_dim * tokens**2


def rate(rows: int = 1024, width: int = 1024) -> float:
    """Floating-point operations per second of a product of matrices on this device."""
    many = jax.jit(lambda a, b: (a @ b) @ b)
    a, b = jnp.ones((rows, width)), jnp.full((width, width), 1 / width)
    many(a, b).block_until_ready()
    start = time.perf_counter()
    many(a, b).block_until_ready()
    return 4.0 * rows * width**2 / (time.perf_counter() - start)
