"""Linear attentions as calls of one recurrence: what each paper decays, erases and writes.

Every function takes q, k [B, T, N, K] and v [B, T, H, V] (H a multiple of N) and returns (o [B, T, H, V], the
final state [B, H, K, V]); `initial_state`, `segments`, `mask` and `recurrent` are those of `run`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.ops.recurrence import Tokens, chunked, scan, tokens_of

Output = tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]


def run(tokens: Tokens, initial_state: Any = None, segments: Any = None, recurrent: bool = False) -> Output:
    """The recurrence in chunks, or token by token."""
    return (scan if recurrent else chunked)(tokens, initial_state, segments)


def linear_attention(q, k, v, *, scale=None, mask=None, **how: Any) -> Output:
    """S += k v' (Katharopoulos et al., 2020, arXiv:2006.16236), without a normaliser."""
    return run(tokens_of(q, k, v, scale=scale, mask=mask), **how)


def normalised_linear_attention(q, k, v, *, initial_state=None, mask=None, **how: Any):
    """phi(q)' S / phi(q)' z with S += phi(k) v', z += phi(k), phi = elu + 1 (arXiv:2006.16236, eq. 16-20).

    z is carried as one more value channel of ones, so states are [B, H, K, V + 1]; 1e-10 keeps 0 / 0 finite.
    """
    phi = lambda x: jax.nn.elu(x) + 1  # noqa: E731
    ones = jnp.ones((*v.shape[:-1], 1), v.dtype)
    t = tokens_of(phi(q), phi(k), jnp.concatenate([v, ones], -1), scale=1.0, mask=mask)
    out, state = run(t, initial_state, **how)
    return out[..., :-1] / (out[..., -1:] + 1e-10), state


def retention(q, k, v, *, scale=None, mask=None, **how: Any) -> Output:
    """RetNet (Sun et al., 2023, arXiv:2307.08621): S = gamma_h S + k v', gamma_h = 1 - 2^(-5 - h)."""
    h = jnp.arange(v.shape[2], dtype=jnp.promote_types(jnp.float32, v.dtype))
    g = jnp.broadcast_to(jnp.log1p(-jnp.exp2(-5 - h)), v.shape[:3])
    return run(tokens_of(q, k, v, g, scale=scale, mask=mask), **how)


def gla(q, k, v, g, *, scale=None, mask=None, **how: Any) -> Output:
    """GLA (Yang et al., 2023, arXiv:2312.06635): S = e^g S + k v', log decays g [B, T, H] or [B, T, H, K]."""
    return run(tokens_of(q, k, v, g, scale=scale, mask=mask), **how)


def hgrn2(q, f, v, lower_bound, *, scale=None, mask=None, **how: Any) -> Output:
    """HGRN2 (Qin et al., 2024, arXiv:2404.07904): a = lb + (1 - lb) sigmoid(f), k = 1 - a, q = silu(q)."""
    g = hgrn2_gate(f, lower_bound)
    return gla(jax.nn.silu(q), -jnp.expm1(g), v, g, scale=scale, mask=mask, **how)


def hgrn2_gate(f, lower_bound):
    """Log decay log(lb + (1 - lb) sigmoid(f)) of f [B, T, H, K] with lower bounds [H, K]."""
    low = lower_bound[None, None]
    return jnp.log(low + (1 - low) * jax.nn.sigmoid(f))


def ssd(x, dt_raw, b, c, a_log, d, dt_bias, *, initial_state=None, mask=None, **how: Any):
    """Mamba-2 (Dao & Gu, 2024, arXiv:2405.21060): S = e^(-e^A_log dt) S + dt x B', y = S C + D x.

    dt = softplus(dt_raw + bias). x [B, T, H, P]; b, c [B, T, groups, N]; states [B, H, P, N], values first.
    """
    dt = jax.nn.softplus(dt_raw + dt_bias[None, None])
    state = None if initial_state is None else jnp.swapaxes(initial_state, 2, 3)
    t = tokens_of(c, b, x, -jnp.exp(a_log)[None, None] * dt, write=dt, scale=1.0, mask=mask)
    out, state = run(t, state, **how)
    return out + d[None, None, :, None] * x, jnp.swapaxes(state, 2, 3)


def delta_rule(q, k, v, beta, *, scale=None, mask=None, **how: Any) -> Output:
    """DeltaNet (Yang et al., 2024, arXiv:2406.06484): S = (I - beta k k') S + beta k v', with |k| = 1."""
    return gated_delta_rule(q, k, v, None, beta, scale=scale, mask=mask, **how)


def gated_delta_rule(q, k, v, g, beta, *, scale=None, mask=None, **how: Any) -> Output:
    """Gated DeltaNet (arXiv:2412.06464; g [B, T, H]) and KDA (arXiv:2510.26692; g [B, T, H, K]).

    S~ = e^g S, S = S~ + beta k (v - S~' k)'. beta in (0, 2) gives negative eigenvalues.
    """
    return comba(q, k, v, k, g, beta, scale=scale, mask=mask, **how)


def kda_gate(x, a_log, dt_bias, *, lower_bound: float | None = None):
    """KDA's log decay of x [B, T, H, K]: -e^A_h softplus(x + b), or bounded: lb sigmoid(e^A_h (x + b))."""
    rate = jnp.exp(a_log)[None, None, :, None]
    y = x + dt_bias.reshape(1, 1, *x.shape[2:])
    return -rate * jax.nn.softplus(y) if lower_bound is None else lower_bound * jax.nn.sigmoid(rate * y)


def comba(q, k, v, p, g, beta, *, scale=None, mask=None, **how: Any) -> Output:
    """Comba (arXiv:2506.02475): S = S~ + beta k (v - S~' p)', erasing along p and writing along k."""
    b = beta[..., None]
    per_value_head = jnp.repeat(p, beta.shape[2] // p.shape[2], axis=2)
    return run(tokens_of(q, k, v, g, erase=b * per_value_head, write=beta, scale=scale, mask=mask), **how)


def gdn2(q, k, v, g, b, w, *, scale=None, mask=None, **how: Any) -> Output:
    """GDN-2: S~ = Diag(e^g) S, S = S~ + k (w v - S~' (b k))', with gates b over keys and w over values."""
    return run(tokens_of(q, k, v, g, erase=b * k, write=w, scale=scale, mask=mask), **how)
