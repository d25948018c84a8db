"""Sensitivity: the gradient of the last hidden states with respect to each layer's attention output."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.models.layers import Params
from kvjax.models.stacking import groups_in, layers_of_groups, with_layers
from kvjax.models.transformer import IdsOrVectors
from kvjax.state.cache import Cache
from kvjax.steps.prefilling.read import PrefillOutputs, read_tokens
from kvjax.steps.shared.run import Run


def read_with_sensitivity(
    run: Run,
    params: Params,
    tokens: IdsOrVectors,
    lengths: Int[Array, "B"],
    cache: Cache,
    needs: frozenset,
) -> tuple[PrefillOutputs, tuple[Float[Array, "Lg B T"], ...]]:
    """`read_tokens`, and for each group of layers |d phi / d a_i| of every token i; 0 on padding.

    a_i is the hidden state after a layer's attention, and phi = sum_i |h_i|^2 over the outputs h of the last
    layer (KVgrad). What the cache holds is a constant. needs must not be empty, so that all layers read all
    tokens.
    """
    b, t = tokens.shape[:2]
    width, dtype = run.config.d_model, params["norm"].dtype
    zeros = tuple(jnp.zeros((group.size, b, t, width), dtype) for group in groups_in(params))

    def phi(perturbations: tuple[Array, ...]) -> tuple[Array, PrefillOutputs]:
        pairs = zip(layers_of_groups(params), perturbations, strict=True)
        moved = with_layers(params, [{**group, "perturbation": x} for group, x in pairs])
        # One layer's intermediate results at a time, or all of them would fill memory.
        read = read_tokens(run, moved, tokens, lengths, cache, needs, for_gradients=True)
        assert read.hidden is not None
        square = jnp.square(read.hidden.astype(jnp.float32)).sum(-1)
        return jnp.where(read.positions.pos >= 0, square, 0.0).sum(), read._replace(hidden=None)

    gradients, read = jax.grad(phi, has_aux=True)(zeros)
    return read, tuple(jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(-1)) for x in gradients)
