"""Losses of training: small pure functions of logits, hidden states and targets."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int


def next_token(
    logits: Float[Array, "B T V"], tokens: Int[Array, "B T+1"], weights: Float[Array, "B T+1"]
) -> Float[Array, ""]:
    """Compute the sum of -log p of every next token times its weight, in nats."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:])
    return jnp.sum(losses * weights[:, 1:])


def distilled(
    logits: Float[Array, "B T V"],
    teacher: Float[Array, "B T V"],
    weights: Float[Array, "B T+1"],
    temperature: float = 1.0,
) -> Float[Array, ""]:
    """Compute the sum of weight * t^2 * KL(teacher || student), temperature t, in nats (arXiv:1503.02531)."""
    of_student = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature)
    of_teacher = jax.nn.log_softmax(teacher.astype(jnp.float32) / temperature)
    each = jnp.sum(jnp.exp(of_teacher) * (of_teacher - of_student), -1)
    return temperature**2 * jnp.sum(each * weights[:, 1:])


def squared(
    student: Float[Array, "B T D"], teacher: Float[Array, "B T D"], weights: Float[Array, "B T+1"]
) -> Float[Array, ""]:
    """Compute the sum of weight * mean over channels of (student - teacher)^2, over tokens with a target.

    Of hidden states or attention outputs, as in TinyBERT (arXiv:1909.10351, equation 8) without its map.
    """
    apart = student.astype(jnp.float32) - teacher.astype(jnp.float32)
    return jnp.sum(jnp.square(apart).mean(-1) * weights[:, 1:])
