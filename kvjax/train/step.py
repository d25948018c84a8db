"""One optimiser step: gradients in parts, in the dtype of computing, onto weights in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from kvjax.models.config import Config
from kvjax.models.feed_forward import MoE
from kvjax.models.layers import Params
from kvjax.models.mixer import Passed
from kvjax.models.transformer import run_layers, unembed
from kvjax.train.losses import distilled, next_token
from kvjax.train.settings import Loop


class TrainState(NamedTuple):
    """Everything that a step changes."""

    params: Params
    optimiser: Any
    step: Int[Array, ""]


class Parts(NamedTuple):
    """One batch in A parts; each is as `kvjax.train.rows.Rows` has it, with S = T + 1."""

    tokens: Int[Array, "A B S"]
    weights: Float[Array, "A B S"]
    segments: Int[Array, "A B S"] | None


class Found(NamedTuple):
    """Mean loss in nats per token, the norm of the unclipped gradient, and whether both are numbers."""

    loss: Float[Array, ""]
    norm: Float[Array, ""]
    finite: Bool[Array, ""]


def computed(params: Params, loop: Loop) -> Params:
    """Weights in the dtype that layers compute in."""
    return jax.tree.map(lambda x: x.astype(loop.compute), params)


class Teacher(NamedTuple):
    """A model whose predictions are learned."""

    params: Params
    config: Config


def total_loss(params: Params, part: Parts, config: Config, loop: Loop) -> Float[Array, ""]:
    """The summed loss of the rows [B, T + 1] of one part, in nats."""
    return next_token(_logits(params, part, config, loop)[0], part.tokens, part.weights)


def learned_loss(
    params: Params, part: Parts, config: Config, loop: Loop, teacher: Teacher | None = None
) -> Float[Array, ""]:
    """What is made small: `total_loss`, in part the divergence from a teacher, and unequal use of experts.

    The last counts `loop.balance` for every target and layer.
    """
    logits, unequal = _logits(params, part, config, loop)
    loss = next_token(logits, part.tokens, part.weights)
    if teacher is not None:
        theirs = _logits(teacher.params, part, teacher.config, loop)[0]
        loss = (1 - loop.distil) * loss + loop.distil * distilled(logits, theirs, part.weights)
    return loss + loop.balance * part.weights[:, 1:].sum() * unequal


def _logits(
    params: Params, part: Parts, config: Config, loop: Loop
) -> tuple[Float[Array, "B T V"], Float[Array, ""]]:
    """The logits of a part, and the sum over layers of how unequally their experts are used."""

    def imbalance(passed: Passed) -> Float[Array, ""]:
        if not isinstance(passed.mlp, MoE) or passed.fed is None:
            return jnp.zeros((), jnp.float32)
        return passed.mlp.balance(passed.p, passed.fed)

    segments, params = None if part.segments is None else part.segments[:, :-1], computed(params, loop)
    ran = run_layers(params, part.tokens[:, :-1], config, segments=segments, remat=loop.remat, look=imbalance)
    unequal = jnp.concatenate([of_group.reshape(-1) for of_group in ran.collected]).sum()
    return unembed(params, ran.x, config), unequal


def make_step(
    config: Config, loop: Loop, optimiser: optax.GradientTransformation, taught_by: Config | None = None
) -> Callable[..., tuple[TrainState, Found]]:
    """The jitted step (state, parts, teacher's parameters or None), which donates its state.

    A loss or gradient of NaN or inf changes no weight.
    """

    def step(state: TrainState, parts: Parts, theirs: Params | None = None) -> tuple[TrainState, Found]:
        count = jnp.maximum(parts.weights[:, :, 1:].sum(), 1.0)
        teacher = None if theirs is None or taught_by is None else Teacher(theirs, taught_by)

        def add(carry: Any, part: Parts) -> tuple[Any, None]:
            found = jax.value_and_grad(learned_loss)(state.params, part, config, loop, teacher)
            return jax.tree.map(jnp.add, carry, found), None

        zeros = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, state.params)
        loss, gradient = jax.tree.map(lambda x: x / count, jax.lax.scan(add, zeros, parts)[0])
        norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of an integer step
            change, kept = optimiser.update(gradient, state.optimiser, state.params)
            params = jax.tree.map(jnp.add, state.params, change)
        new = TrainState(params, kept, state.step + 1)
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state), Found(loss, norm, finite)

    return jax.jit(step, donate_argnums=0)


def fault(params: Params, parts: Parts, config: Config, loop: Loop) -> str:
    """What is no number first, in words: the output of a layer, the logits, or a gradient."""
    for a in range(parts.tokens.shape[0]):
        part = jax.tree.map(lambda x, a=a: x[a], parts)
        tokens, low = part.tokens[:, :-1], computed(params, loop)
        segments = None if part.segments is None else part.segments[:, :-1]
        ran = run_layers(low, tokens, config, segments=segments, look=lambda x: jnp.isfinite(x.out).all())
        layers = [bool(ok) for group in ran.collected for ok in group]
        if not all(layers):
            return f"the output of layer {layers.index(False)}"
        if not bool(jnp.isfinite(unembed(low, ran.x, config)).all()):
            return "the logits"
        gradient = jax.grad(learned_loss)(params, part, config, loop)
        names = [
            jax.tree_util.keystr(path, simple=True, separator=".")
            for path, x in jax.tree.leaves_with_path(gradient)
            if not bool(jnp.isfinite(x).all())
        ]
        if names:
            return f"the gradient of {', '.join(names[:4])}"
    return "the sum over the batch"
