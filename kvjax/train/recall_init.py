"""The initial weights of `recall-tiny`: random, with an induction circuit in the first two layers.

From a random initialisation a small model needs millions of tokens before it learns to look up "what came
after this word before?" (the induction plateau: Olsson et al., 2022, arXiv:2209.11895). Here the heads of
that circuit are present from the beginning, so minutes on a CPU are enough. Nothing is frozen and the
architecture is a plain decoder: training may keep, change or drop the circuit. `model.init = 'circuit'` of
`kvjax train` selects it, as in configs/train/recall-tiny.gin.

A random rotation divides the residual stream into orthogonal subspaces:

    constant   1 channel   the same for every token, so that a head can attend by position instead of by word
    word       H channels  the part of the embedding that heads compare
    before     H channels  empty in the embedding; layer 0 writes there the `word` of the token 1 back
    before2    H channels  the same for the token 2 back
    rest       the remaining channels (embedding)
"""

import math
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array, Key

from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.params import plan, regroup
from kvjax.ops.base.rope import Rope

CONSTANT = 0.5
"""The constant channel of every embedding; the other channels have norm 1 together."""

_SHARP_PAIRS = 8
_WRITE = 0.3
_COPY = 0.36


CONFIG = Config(
    vocab=220,
    d_model=128,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=32,
    d_ff=384,
    rope=Rope(theta=1e6),
    norm_eps=1e-6,
    tied=True,
    max_positions=2048,
)
"""The shape of `recall-tiny`: a plain Llama-style decoder with tied embeddings."""


def check_circuit(config: Config) -> None:
    """Raise ValueError if a decoder has no room for the circuit."""
    need = 3 * config.head_dim + 2
    if config.layers < 2 or config.heads < 2 or config.d_model < need:
        raise ValueError(
            f"the recall circuit needs 2 layers, 2 heads and a width of at least "
            f"3 * head_dim + 2 = {need}, got {config}"
        )
    if config.head_dim % 4:
        raise ValueError(
            f"the recall circuit halves a head's RoPE pairs: head_dim {config.head_dim} % 4 is not 0"
        )
    if config.mixers or config.mlps or config.norms != "pre" or not config.tied:
        raise ValueError(
            "the recall circuit lies in plain attention and gated MLPs with tied embeddings: leave "
            "model.mixers, model.mlps and model.norms out, and set model.tied"
        )


@dataclass(frozen=True)
class _Directions:
    """Orthonormal columns [D, n] of the residual stream, by their content."""

    word: np.ndarray
    before: np.ndarray
    before2: np.ndarray
    rest: np.ndarray


def _random_params(rng: np.random.Generator, config: Config) -> Params:
    """Plain initialisation, float64: inputs keep their scale, outputs to the residual are small by depth."""
    d, f, n, k = (
        config.d_model,
        config.d_ff,
        config.heads * config.head_dim,
        config.kv_heads * config.head_dim,
    )
    depth = math.sqrt(2 * config.layers)

    def matrix(rows: int, columns: int, shrink: float = 1.0) -> np.ndarray:
        return rng.normal(size=(rows, columns)) / (math.sqrt(rows) * shrink)

    layers = [
        {
            "attn_norm": np.ones(d),
            "q": matrix(d, n),
            "k": matrix(d, k),
            "v": matrix(d, k),
            "o": matrix(n, d, depth),
            "mlp_norm": np.ones(d),
            "gate": matrix(d, f),
            "up": matrix(d, f),
            "down": matrix(f, d, depth),
        }
        for _ in range(config.layers)
    ]
    return {"embed": rng.normal(size=(config.vocab, d)), "norm": np.ones(d), "layers": layers}


def _directions(rng: np.random.Generator, config: Config) -> _Directions:
    """Draw a random orthonormal basis of all channels but the constant one, cut into parts."""
    h, d = config.head_dim, config.d_model
    basis = np.zeros((d, d - 1))
    basis[1:] = np.linalg.qr(rng.normal(size=(d - 1, d - 1)))[0]
    word, before, before2, rest = np.split(basis, [h, 2 * h, 3 * h], axis=1)
    return _Directions(word, before, before2, rest)


def _head(matrix: np.ndarray, head: int, head_dim: int) -> np.ndarray:
    """Return the columns of one head, as a view to write into."""
    return matrix[:, head * head_dim : (head + 1) * head_dim]


def _write_embedding(params: Params, parts: _Directions) -> None:
    """Embeddings leave the two `before` subspaces empty, have norm 1 and one channel in common."""
    embed = params["embed"]
    for empty in (parts.before, parts.before2):
        embed -= embed @ empty @ empty.T
    embed[:, 0] = 0
    embed /= np.linalg.norm(embed, axis=1, keepdims=True)
    embed[:, 0] = CONSTANT


def _write_look_back(params: Params, parts: _Directions, config: Config, look_back: float) -> None:
    """Write layer 0: head j attends j + 1 tokens back, and heads 0 and 1 copy the word there.

    Queries and keys see the constant channel only, so scores depend on the distance alone: rotated to their
    positions, their product is sum_i cos((distance - j - 1) * frequency_i), which peaks at that distance.
    """
    layer, h, half = params["layers"][0], config.head_dim, config.head_dim // 2
    frequency = config.rope.theta ** (-np.arange(half) / half)
    used = np.arange(half) < min(_SHARP_PAIRS, half)
    constant = CONSTANT / math.sqrt((1 + CONSTANT**2) / config.d_model)
    amplitude = math.sqrt(look_back * math.sqrt(h)) / constant
    layer["q"] *= 0.1
    layer["k"] *= 0.1
    for j in range(config.heads):
        turn = -(j + 1) * frequency
        _head(layer["q"], j, h)[0] = amplitude * np.concatenate([used * np.cos(turn), used * np.sin(turn)])
    for j in range(config.kv_heads):
        _head(layer["k"], j, h)[0] = amplitude * np.concatenate([used, np.zeros(half)])
        _head(layer["v"], j, h)[:] = parts.word
    layer["o"] *= 0.2
    layer["o"][:h] = _WRITE * parts.before.T
    layer["o"][h : 2 * h] = _WRITE * parts.before2.T
    layer["down"] *= 0.1


def _feature_sizes(config: Config) -> tuple[float, float]:
    """Compute the typical size of one channel of `word` and of `before` after the norm of layer 1."""
    spread = 1 / math.sqrt(config.d_model - 2 * config.head_dim)
    power = 1 + CONSTANT**2
    written = _WRITE * spread / math.sqrt(power / config.d_model)
    rms = math.sqrt((power + 2 * config.head_dim * written**2) / config.d_model)
    return spread / rms, written / rms


def _write_match(params: Params, parts: _Directions, config: Config, match: float) -> None:
    """Write layer 1: heads attend to the token after an earlier occurrence of the current one, and copy it.

    Groups of query heads alternate between two conditions on a key: (even) its previous word is the current
    word; (odd) the same, and the words before these agree too, each on half of the channels. Only slow RoPE
    pairs take part: the fast ones rotate several times within a context and would disturb the comparison.
    """
    layer, h, group = params["layers"][1], config.head_dim, config.heads // config.kv_heads
    half = h // 2
    slow = np.concatenate([np.arange(half // 2, half), half + np.arange(half // 2, half)])
    now, earlier = _feature_sizes(config)
    layer["q"] *= 0.1
    layer["k"] *= 0.1
    layer["down"] *= 0.1
    for j in range(config.kv_heads):
        n = len(slow)
        first = n if j % 2 == 0 else n // 2
        asks = np.concatenate([parts.word[:, :first], parts.before[:, first:n]], axis=1)
        offers = np.concatenate([parts.before[:, :first], parts.before2[:, first:n]], axis=1)
        expected = first * now * earlier + (n - first) * earlier * earlier
        gain = math.sqrt(match * math.sqrt(h) / expected)
        _head(layer["k"], j, h)[:, slow] = gain * offers
        copied = parts.word if j == 0 else parts.rest[:, :h]
        _head(layer["v"], j, h)[:, : copied.shape[1]] = copied
        for q in range(j * group, (j + 1) * group):
            _head(layer["q"], q, h)[:, slow] = gain * asks
            layer["o"][q * h : q * h + copied.shape[1]] = _COPY / group * copied.T


def circuit_init(
    key: Key[Array, ""], config: Config = CONFIG, *, look_back: float = 8.0, match: float = 9.0
) -> Params:
    """Parameters of a decoder with an induction circuit over pairs of words; a function of `key`.

    look_back: logits that each of the used RoPE pairs adds at the right distance, in nats.
    match: attention logit of a full match in layer 1, in nats.

    Returns float32 parameters of `kvjax.models.transformer`. Raises ValueError if `config` has no room for
    the circuit.

    >>> params = circuit_init(jax.random.key(0))
    >>> params["embed"].shape, CONFIG.layers
    ((220, 128), 4)
    """
    check_circuit(config)
    rng = np.random.default_rng(np.asarray(jax.random.bits(key, (4,), "uint32")))
    params = _random_params(rng, config)
    parts = _directions(rng, config)
    _write_embedding(params, parts)
    _write_look_back(params, parts, config, look_back)
    _write_match(params, parts, config, match)
    params = jax.tree.map(lambda x: jax.numpy.asarray(x, "float32"), params)
    one_by_one = tuple(jax.tree.map(lambda w: w[None], layer) for layer in params["layers"])
    return regroup({**params, "layers": one_by_one}, plan(config))
