"""Linear attentions as calls of one recurrence, with each paper's decays, erasures and writes.

Every function returns (o [B, T, H, V], final state [B, H, K, V]) in promote(float32, input). All take

* scale: the factor on o, K^-0.5 unless given (or unless the paper has none);
* mask: tokens that it leaves out (padding) change no state;

and, by keyword, what `run` takes: initial_state, segments, recurrent, implementation and on. One token with
recurrent=True is a decode step. H is a multiple of N: query and key heads serve groups of value heads.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.mesh.on_mesh import OnMesh
from kvjax.ops.base.dtypes import wide
from kvjax.ops.recurrent.features import normalised
from kvjax.ops.recurrent.gated_delta import gated_delta, gated_delta_step
from kvjax.ops.recurrent.recurrence import RecurrenceInputs, StackedState, scan, tokens_of, zero_state

QK = Float[Array, "B T N K"]
Values = Float[Array, "B T H V"]
PerHead = Float[Array, "B T H"]
PerChannel = Float[Array, "B T H K"]
Mask = Bool[Array, "B T"] | None
MatrixState = Float[Array, "B H K V"]
Output = tuple[Values, MatrixState | StackedState]


def run(
    tokens: RecurrenceInputs,
    initial_state: MatrixState | StackedState | None = None,
    segments: Int[Array, "B T"] | None = None,
    recurrent: bool = False,
    implementation: str | None = None,
    on: OnMesh | None = None,
    least: float | None = None,
) -> Output:
    """Run the recurrence in chunks of matrix products, or token by token if `recurrent` or for one token.

    It starts from initial_state (zeros if None), and from zeros again wherever `segments` changes. For one
    token it may be a `StackedState`, which is returned as one. implementation and on: as in `gated_delta`,
    for chunks and for single tokens. least: as there. Raises NotImplementedError if a forced one cannot run.
    """
    count = tokens.k.shape[1]
    if count == 1 and segments is None:
        state = zero_state(tokens) if initial_state is None else initial_state
        if not isinstance(state, StackedState):
            state = state.astype(tokens.v.dtype)
        token = jax.tree.map(lambda x: x[:, 0], tokens)
        out, state = gated_delta_step(state, token, implementation=implementation, on=on)
        return out[:, None], state
    if isinstance(initial_state, StackedState):
        raise ValueError(f"a stacked state takes one token without segments, got {count} tokens")
    if not recurrent:
        return gated_delta(tokens, initial_state, segments, implementation=implementation, on=on, least=least)
    if implementation not in (None, "reference"):
        raise NotImplementedError(
            f"{implementation!r} has no recurrent form for {count} tokens: give one, or leave recurrent out"
        )
    return scan(tokens, initial_state, segments)


def linear_attention(
    q: QK, k: QK, v: Values, *, scale: float | None = None, mask: Mask = None, **how: Any
) -> Output:
    """S = S + k v', o = scale S' q, without a normaliser.

    Transformers are RNNs (Katharopoulos et al., 2020, arXiv:2006.16236, eq. 18-20) with the identity as the
    feature map; a norm after it replaces the normaliser, as in RetNet.

    >>> x = jax.random.normal(jax.random.key(0), (1, 5, 2, 4))
    >>> whole, _ = linear_attention(x, x, x)
    >>> first, state = linear_attention(x[:, :3], x[:, :3], x[:, :3])
    >>> rest, _ = linear_attention(x[:, 3:], x[:, 3:], x[:, 3:], initial_state=state, recurrent=True)
    >>> bool(jnp.allclose(jnp.concatenate([first, rest], 1), whole, atol=1e-5))
    True
    """
    return run(tokens_of(q, k, v, scale=scale, mask=mask), **how)


def normalised_linear_attention(
    q: QK, k: QK, v: Values, *, initial_state: Array | None = None, mask: Mask = None, **how: Any
) -> tuple[Values, Float[Array, "B H K W"]]:
    """phi(q)' S / phi(q)' z with S = S + phi(k) v', z = z + phi(k) and phi = elu + 1.

    Transformers are RNNs (Katharopoulos et al., 2020, arXiv:2006.16236, eq. 16-20). z is one more value
    channel of ones, so states are [B, H, K, V + 1]; 1e-10 keeps 0 / 0 finite. o has no scale.

    >>> x = jax.random.normal(jax.random.key(0), (1, 5, 2, 4))
    >>> out, state = normalised_linear_attention(x, x, x)
    >>> bool(jnp.allclose(out[:, 0], x[:, 0], atol=1e-5)), state.shape
    (True, (1, 2, 4, 5))
    """
    q, k, v = (x.astype(wide(v)) for x in (q, k, v))
    phi_q, phi_k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    return normalised(phi_q, phi_k, v, epsilon=1e-10, initial_state=initial_state, mask=mask, **how)


def retention(
    q: QK, k: QK, v: Values, *, scale: float | None = None, mask: Mask = None, **how: Any
) -> Output:
    """S = gamma_h S + k v' with the constant gamma_h = 1 - 2^(-5 - h).

    RetNet (Sun et al., 2023, arXiv:2307.08621). q and k are given rotated. The paper's row normalisers are
    positive factors that the following norm removes; they are left out.

    >>> x = jnp.ones((1, 2, 1, 1))
    >>> float(retention(x, x, x)[1][0, 0, 0, 0])
    1.96875
    """
    h = jnp.arange(v.shape[2], dtype=wide(v))
    g = jnp.broadcast_to(jnp.log1p(-jnp.exp2(-5 - h)), v.shape[:3])
    return run(tokens_of(q, k, v, g, scale=scale, mask=mask), **how)


def gla(
    q: QK,
    k: QK,
    v: Values,
    g: PerHead | PerChannel,
    *,
    scale: float | None = None,
    mask: Mask = None,
    **how: Any,
) -> Output:
    """S = Diag(e^g) S + k v' with log decays g <= 0 per head or per key channel.

    Per channel it is gated linear attention (GLA, Yang et al., 2023, arXiv:2312.06635, eq. 3); per head it is
    the gated retention of YOCO (arXiv:2405.05254) and the core of Mamba-2.

    >>> x = jnp.ones((1, 2, 1, 1))
    >>> float(gla(x, x, x, jnp.log(0.5) * x)[1][0, 0, 0, 0])
    1.5
    """
    return run(tokens_of(q, k, v, g, scale=scale, mask=mask), **how)


def hgrn2(
    q: PerChannel,
    f: PerChannel,
    v: Values,
    lower_bound: Float[Array, "H K"],
    *,
    scale: float | None = None,
    mask: Mask = None,
    **how: Any,
) -> Output:
    """GLA with decay a = e^`hgrn2_gate`(f), key 1 - a and query silu(q).

    HGRN2 (Qin et al., 2024, arXiv:2404.07904).

    >>> x = jnp.zeros((1, 3, 1, 2))
    >>> hgrn2(x, x, x, jnp.full((1, 2), 0.5))[0].shape
    (1, 3, 1, 2)
    """
    g = hgrn2_gate(f, lower_bound)
    return gla(jax.nn.silu(q), -jnp.expm1(g), v, g, scale=scale, mask=mask, **how)


def hgrn2_gate(f: PerChannel, lower_bound: Float[Array, "H K"]) -> PerChannel:
    """Log decay log(lb + (1 - lb) sigmoid(f)), lb in [0, 1] (arXiv:2404.07904).

    >>> hgrn2_gate(jnp.zeros((1, 1, 1, 1)), jnp.full((1, 1), 0.5)).item() == jnp.log(0.75).item()
    True
    """
    low = lower_bound[None, None]
    decay = low + (1 - low) * jax.nn.sigmoid(f)
    # If float32 cannot represent the decay, it is sigmoid(f) alone, whose logarithm it can represent.
    some = decay > 1e-30
    return jnp.where(some, jnp.log(jnp.where(some, decay, 1.0)), jax.nn.log_sigmoid(f))


def ssd(
    x: Float[Array, "B T H P"],
    dt_raw: PerHead,
    b: Float[Array, "B T groups N"],
    c: Float[Array, "B T groups N"],
    a_log: Float[Array, "H"],
    d: Float[Array, "H"],
    dt_bias: Float[Array, "H"],
    *,
    initial_state: Float[Array, "B H P N"] | None = None,
    mask: Mask = None,
    **how: Any,
) -> tuple[Float[Array, "B T H P"], Float[Array, "B H P N"]]:
    """S = e^(-e^a_log dt) S + dt x b', o = S c + d x with dt = softplus(dt_raw + dt_bias).

    Mamba-2's state-space dual (Dao & Gu, 2024, arXiv:2405.21060, sections 5 and 6). States have the values'
    axis first.

    >>> x, one = jnp.ones((1, 4, 2, 3)), jnp.ones((1, 4, 1, 5))
    >>> out, state = ssd(x, x[..., 0], one, one, jnp.zeros(2), jnp.ones(2), jnp.zeros(2))
    >>> out.shape, state.shape
    ((1, 4, 2, 3), (1, 2, 3, 5))
    """
    x, dt_raw, a_log, d, dt_bias = (y.astype(wide(x)) for y in (x, dt_raw, a_log, d, dt_bias))
    dt = jax.nn.softplus(dt_raw + dt_bias[None, None])
    state = None if initial_state is None else jnp.swapaxes(initial_state, 2, 3)
    t = tokens_of(c, b, x, -jnp.exp(a_log)[None, None] * dt, write=dt, scale=1.0, mask=mask)
    out, state = run(t, state, **how)
    assert not isinstance(state, StackedState)
    return out + (d[None, None, :, None] * x).astype(out.dtype), jnp.swapaxes(state, 2, 3)


def delta_rule(
    q: QK,
    k: QK,
    v: Values,
    beta: PerHead,
    *,
    scale: float | None = None,
    mask: Mask = None,
    **how: Any,
) -> Output:
    """S = S + beta k (v - S' k)': DeltaNet (Yang et al., 2024, arXiv:2406.06484, section 2.2).

    Keys have unit length, beta lies in (0, 1).

    >>> k = jnp.ones((1, 2, 1, 1))
    >>> float(delta_rule(k, k, jnp.asarray([[[[5.0]], [[7.0]]]]), k[..., 0])[1][0, 0, 0, 0])  # replaced
    7.0
    """
    return gated_delta_rule(q, k, v, None, beta, scale=scale, mask=mask, **how)


def gated_delta_rule(
    q: QK,
    k: QK,
    v: Values,
    g: PerHead | PerChannel | None,
    beta: PerHead,
    *,
    scale: float | None = None,
    mask: Mask = None,
    **how: Any,
) -> Output:
    """S~ = Diag(e^g) S, S = S~ + beta k (v - S~' k)', with log decays g <= 0.

    Per head it is Gated DeltaNet (Yang et al., 2024, arXiv:2412.06464, eq. 10), per key channel Kimi Delta
    Attention (KDA, arXiv:2510.26692, eq. 1). Keys have unit length; with beta up to 2 there are negative
    eigenvalues.

    >>> k = jnp.ones((1, 3, 1, 2)) * 0.5**0.5
    >>> gated_delta_rule(k, k, k, -k, k[..., 0])[0].shape
    (1, 3, 1, 2)
    """
    return comba(q, k, v, k, g, beta, scale=scale, mask=mask, **how)


def kda_gate(
    x: PerChannel,
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "HK"],
    *,
    lower_bound: float | None = None,
) -> PerChannel:
    """KDA's log decay: -e^a_log softplus(x + dt_bias), or lower_bound sigmoid(e^a_log (x + dt_bias)).

    The first as in Mamba-2, per channel (arXiv:2510.26692); the bounded form is that of the authors' code.
    dt_bias holds H * K numbers.

    >>> x, zero = jnp.full((1, 1, 1, 1), 100.0), jnp.zeros(1)
    >>> kda_gate(x, zero, zero).item(), kda_gate(x, zero, zero, lower_bound=-5.0).item()
    (-100.0, -5.0)
    """
    rate = jnp.exp(a_log)[None, None, :, None]
    y = x + dt_bias.reshape(1, 1, *x.shape[2:])
    return -rate * jax.nn.softplus(y) if lower_bound is None else lower_bound * jax.nn.sigmoid(rate * y)


def comba(
    q: QK,
    k: QK,
    v: Values,
    p: QK,
    g: PerHead | PerChannel | None,
    beta: PerHead,
    *,
    scale: float | None = None,
    mask: Mask = None,
    **how: Any,
) -> Output:
    """S~ = Diag(e^g) S, S = S~ + beta k (v - S~' p)': erases along p, writes along k.

    Comba (2025, arXiv:2506.02475), where p is a scaled key; with p = k it is the gated delta rule. The
    paper's correction of the query by the key is left to the layer.

    >>> k = jnp.ones((1, 3, 1, 2)) * 0.5**0.5
    >>> comba(k, k, k, 0.5 * k, None, k[..., 0])[1].shape
    (1, 1, 2, 2)
    """
    b = beta.astype(wide(v))[..., None]
    per_value_head = jnp.repeat(p.astype(wide(v)), beta.shape[2] // p.shape[2], axis=2)
    return run(tokens_of(q, k, v, g, erase=b * per_value_head, write=beta, scale=scale, mask=mask), **how)


def gdn2(
    q: PerChannel,
    k: PerChannel,
    v: Values,
    g: PerHead | PerChannel | None,
    b: PerChannel,
    w: Values,
    *,
    scale: float | None = None,
    mask: Mask = None,
    **how: Any,
) -> Output:
    """S~ = Diag(e^g) S, S = S~ + k (w * v - S~' (b * k))', with gates b over key and w over value channels.

    Gated DeltaNet-2 (Hatamizadeh et al., 2026, arXiv:2605.22791).

    >>> k = jnp.ones((1, 3, 1, 2)) * 0.5**0.5
    >>> gdn2(k, k, k, None, k, k)[1].shape
    (1, 1, 2, 2)
    """
    return run(
        tokens_of(q, k, v, g, erase=b.astype(wide(v)) * k.astype(wide(v)), write=w, scale=scale, mask=mask),
        **how,
    )
