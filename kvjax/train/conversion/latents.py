"""Compresses attention by singular values: latents of all heads (MLA), fewer heads (ECKVH).

RoPE rotates pairs of channels, written here as complex numbers z_f = x_f + i x_(f + H/2), one per frequency.
Mixing heads at one frequency by complex coefficients commutes with this rotation. So keys of several heads
are compressed frequency by frequency: with the eigenvectors u of E[z_a conj(z_b)] over heads a, b, each key
is z_a = sum_j u_aj k_j with k_j = sum_a conj(u_aj) z_a, and a query q of head a attends to k_j with
conj(u_aj) q.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex, Float, Int

from kvjax.models.config import Config
from kvjax.models.layers import Params, stream_norm
from kvjax.models.mixers.attention import ATTENTION, mixer_of
from kvjax.models.mixers.latent import Latent
from kvjax.models.model import Model
from kvjax.models.params import plan, regroup
from kvjax.models.transformer import run_layers

# The mean over tokens of u u' for the input u of a layer's mixer; the identity for weights alone.
Moments = Float[np.ndarray, "L D D"]


def input_moments(model: Model, texts: Sequence[Sequence[int]]) -> Moments:
    """Compute the second moments of every layer's mixer inputs, over the tokens of some texts.

    >>> import kvjax
    >>> input_moments(kvjax.load("recall-tiny"), [[1, 2, 3]]).shape
    (4, 128, 128)
    """
    params, config = regroup(model.params, plan(model.config, stacked=False)), model.config
    total = sum(_moments(params, jnp.asarray([list(text)], jnp.int32), config) for text in texts)
    return np.asarray(total, np.float64) / sum(map(len, texts))


@partial(jax.jit, static_argnames="config")
def _moments(params: Params, tokens: Int[Array, "1 T"], config: Config) -> Float[Array, "L D D"]:
    scale = jnp.asarray(config.embed_scale, params["embed"].dtype)
    outs = run_layers(params, tokens, config, look=lambda passed: passed.out).collected
    found = []
    for x, p in zip(
        [params["embed"][tokens] * scale, *(y[0] for y in outs[:-1])], params["layers"], strict=True
    ):
        if "attn_norm" in p:
            x = stream_norm(x, {n: w[0] for n, w in p.items()}, "attn_norm", config)
        u = x[0].astype(jnp.float32)
        found.append(jnp.matmul(u.T, u, precision="highest"))
    return jnp.stack(found)


def to_latents(
    params: Params, config: Config, rank: int, rotary: int = 1, moments: Moments | None = None
) -> tuple[Params, Config]:
    """MLA of grouped-query attention: `rank` latents for all heads, and `rotary` heads of rotated keys.

    Of the keys' components across heads, the first `rotary` are rotated and stored uncompressed. The rest is
    not rotated, and is compressed together with the values, by an SVD of both side by side (the joint SVD of
    MHA2MLA, arXiv:2502.14837, with the rotary keys gathered across heads as in TransMLA, arXiv:2502.07864).
    With `rotary` = KV heads and `rank` = their channels or those of the model, whichever are fewer, nothing
    is lost; 2 K H numbers per token become rank + rotary H. Deviation: the maps across heads are complex
    while TransMLA's are real, and keys and values are not balanced before the SVD; `moments`, if given,
    weight both by the texts' statistics.

    Raises ValueError for layers that are not plain attention, biases, QK norms, partial or dynamic rotations,
    and sizes that do not fit.

    >>> from kvjax.models.params import init
    >>> config = Config(vocab=32, d_model=16, layers=1, heads=4, kv_heads=2, head_dim=4, d_ff=32)
    >>> made, smaller = to_latents(init(config, jax.random.key(0)), config, rank=4)
    >>> smaller.mixers[0].rank, made["layers"][0]["kv_down"].shape
    (4, (1, 16, 8))
    """
    _check(config, "latents")
    k, h = config.kv_heads, config.head_dim
    if config.qkv_bias or config.o_bias:
        raise ValueError("latents have no biases: they are defined for models without qkv_bias and o_bias")
    most = min(config.d_model, 2 * k * h)
    if not 1 <= rotary <= k or not 1 <= rank <= most:
        raise ValueError(f"rotary={rotary} and rank={rank} do not fit: expected 1 to {k} and 1 to {most}")
    mixer = Latent(
        rank, rotary * h, h, h, scale=config.scale, normed=False, rope_heads=rotary,
        turns=config.rope.kind != "none",
    )  # fmt: skip
    smaller = dataclasses.replace(config, mixers=(mixer,) * config.layers)
    old = regroup(params, plan(config, stacked=False))["layers"]
    made = tuple(_latent_layer(p, config, mixer, _of(moments, i, config)) for i, p in enumerate(old))
    return regroup({**params, "layers": made}, plan(smaller)), smaller


def _latent_layer(p: Params, config: Config, mixer: Latent, moment: Float[np.ndarray, "D D"]) -> Params:
    n, h, each = config.heads, config.head_dim, config.heads // config.kv_heads
    q, k, v = (_heads(p[name][0], h) for name in "qkv")
    basis = _across_heads(k, moment)[:, :, : mixer.rope_heads]
    kept = np.einsum("fkr,dkf->drf", basis.conj(), _complex(k))
    rest = k - _real(np.einsum("fkr,drf->dkf", basis, kept))
    both = np.concatenate([rest, v], 1).reshape(len(k), -1)
    _, vectors = np.linalg.eigh(both.T @ moment @ both)
    down, up = both @ vectors[:, : -mixer.rank - 1 : -1], vectors[:, : -mixer.rank - 1 : -1].T
    up = np.repeat(up.reshape(mixer.rank, 2, config.kv_heads, h), each, 2)
    own = np.repeat(basis, each, 1)  # the KV head of every query head
    asked = np.einsum("fnr,dnf->dnrf", own.conj(), _complex(q)).reshape(len(q), n, -1)
    new = {
        "kv_down": np.concatenate([down, _side_by_side(kept.reshape(len(k), -1))], 1),
        "kv_up": np.transpose(up, (2, 0, 1, 3)).reshape(n, mixer.rank, 2 * h),
        "q": np.concatenate([q, _side_by_side(asked)], -1).reshape(len(q), -1),
    }
    return {name: w for name, w in p.items() if name not in "qkv"} | _as(new, p["o"])


def pool_by_values(
    params: Params, config: Config, kv_heads: int, moments: Moments | None = None
) -> tuple[Params, Config]:
    """Fewer KV heads by singular values: ECKVH (Effectively Compress KV Heads for LLM, arXiv:2406.07056).

    The heads of a group share the first head_dim components of their values, and at every frequency the first
    of their keys; the inverse maps are folded into the output and query matrices, so the result is plain
    grouped-query attention. Heads whose keys differ by a complex factor at every frequency, and whose values
    span no more channels than one head has, lose nothing. `moments` align the components with the texts, as
    the paper does with caches. Deviation: the paper compresses unrotated keys, like values, and expands them
    before rotation; here they stay rotated.

    Raises ValueError for layers that are not plain attention, QK norms, partial or dynamic rotations, and
    heads that do not divide.

    >>> from kvjax.models.params import init
    >>> config = Config(vocab=32, d_model=16, layers=1, heads=4, kv_heads=4, head_dim=4, d_ff=32)
    >>> pool_by_values(init(config, jax.random.key(0)), config, 2)[0]["layers"][0]["k"].shape
    (1, 16, 8)
    """
    _check(config, "pooling heads by singular values")
    if kv_heads < 1 or config.kv_heads % kv_heads:
        raise ValueError(f"{config.kv_heads} KV heads cannot become {kv_heads} equal groups")
    smaller = dataclasses.replace(config, kv_heads=kv_heads)
    old = regroup(params, plan(config, stacked=False))["layers"]
    made = tuple(_pooled_layer(p, config, kv_heads, _of(moments, i, config)) for i, p in enumerate(old))
    return regroup({**params, "layers": made}, plan(smaller)), smaller


def _pooled_layer(p: Params, config: Config, kv_heads: int, moment: Float[np.ndarray, "D D"]) -> Params:
    h, size, each = config.head_dim, config.kv_heads // kv_heads, config.heads // config.kv_heads
    w = {name: _heads(p[name][0], h) for name in ("q", "k", "v", "q_bias", "k_bias", "v_bias") if name in p}
    out = np.asarray(p["o"][0], np.float64).reshape(config.heads, h, -1)
    new: dict[str, list[np.ndarray]] = {name: [] for name in (*w, "o")}
    for g in range(kv_heads):
        heads = slice(g * size, (g + 1) * size)
        asking = slice(g * size * each, (g + 1) * size * each)
        first = _across_heads(w["k"][:, heads], moment)[:, :, 0]
        values = w["v"][:, heads].reshape(config.d_model, -1)
        _, vectors = np.linalg.eigh(values.T @ moment @ values)
        vectors = vectors[:, : -h - 1 : -1]
        for name, x in w.items():
            mine = x[..., asking if name[0] == "q" else heads, :]
            if name[0] == "v":
                new[name].append(mine.reshape(*mine.shape[:-2], -1) @ vectors)
                continue
            shares = np.repeat(first, each, 1) if name[0] == "q" else first
            met = shares.conj().T * _complex(mine)
            new[name].append(_real(met if name[0] == "q" else met.sum(-2)).reshape(*mine.shape[:-2], -1))
        back = np.repeat(vectors.reshape(size, h, h), each, 0)
        new["o"].append(np.einsum("nhr,nhd->nrd", back, out[asking]).reshape(-1, config.d_model))
    joined = {name: np.concatenate(parts, 0 if name == "o" else -1) for name, parts in new.items()}
    return {**p, **_as(joined, p["o"])}


def _across_heads(
    k: Float[np.ndarray, "D K H"], moment: Float[np.ndarray, "D D"]
) -> Complex[np.ndarray, "F K K"]:
    """At every frequency the eigenvectors of E[z_a conj(z_b)] over heads, as columns, the largest first."""
    z = _complex(k)
    gram = np.einsum("dkf,de,elf->fkl", z, moment, z.conj(), optimize=True)
    return np.linalg.eigh(gram)[1][:, :, ::-1]


def _complex(x: Float[np.ndarray, "*a H"]) -> Complex[np.ndarray, "*a F"]:
    half = x.shape[-1] // 2
    return x[..., :half] + 1j * x[..., half:]


def _real(z: Complex[np.ndarray, "*a F"]) -> Float[np.ndarray, "*a H"]:
    return np.concatenate([np.real(z), np.imag(z)], -1)


# Concatenated heads rotate as one: all first halves, then all second halves.
_side_by_side = _real


def _heads(w: Array, head_dim: int) -> Float[np.ndarray, "*a K H"]:
    whole = np.asarray(w.astype(jnp.float32), np.float64)
    return whole.reshape(*whole.shape[:-1], -1, head_dim)


def _as(made: dict[str, np.ndarray], like: Array) -> Params:
    return {name: jnp.asarray(x[None], like.dtype) for name, x in made.items()}


def _of(moments: Moments | None, layer: int, config: Config) -> Float[np.ndarray, "D D"]:
    return np.eye(config.d_model) if moments is None else moments[layer]


def _check(config: Config, what: str) -> None:
    if any(mixer_of(config, i) != ATTENTION for i in range(config.layers)):
        raise ValueError(f"{what} are defined for models whose layers are all plain attention")
    ropes = {config.layer_rope(i) for i in range(config.layers)}
    if config.qk_norm or any(r.rotary_dim is not None or r.by_length for r in ropes):
        raise ValueError(
            f"{what} are defined for keys that turn whole, by fixed frequencies, and without norms of their "
            "own"
        )
