"""Tensor product attention: the cache holds the factors of keys and values, not keys and values."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.models.config import Config
from kvjax.models.expand import Expand
from kvjax.models.layers import Params, Shapes, linear
from kvjax.models.mixer import GroupState, Layer, Left, Memory, Mixer, Projected, SlotShape
from kvjax.ops.attention.factored import dot_factors, of_factors, sum_factors
from kvjax.ops.attention.union import Products
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.rope import angles, rotate


@dataclasses.dataclass(frozen=True)
class TensorProduct(Mixer):
    """TPA (Zhang et al., 2025, arXiv:2501.06425): q, k and v of all heads are sums of outer products.

        k = 1/R sum_r a_r(x) (x) b_r(x), a_r over heads, b_r over channels, linear in x; likewise q and v

    The rotation acts on the b factors of queries and keys, so they are stored rotated: per token, (key_rank +
    value_rank) * (heads + head_dim) numbers. A prefill computes keys and values from the factors; a step
    multiplies the query with the b factors and weights the products by the a factors instead. Methods that
    score stored keys against queries, or rotate them by rank, do not fit factors.
    """

    q_rank: int
    key_rank: int
    value_rank: int

    def check(self, config: Config) -> None:
        if self.key_rank > config.head_dim or self.value_rank > config.head_dim:
            raise ValueError(
                f"ranks {self.key_rank} and {self.value_rank} must not exceed head_dim {config.head_dim}: "
                "more factors than channels store more than keys and values do"
            )

    axes = {
        **dict.fromkeys(("q_factors", "k_factors", "v_factors"), ("embed", None)),
        "o": ("heads", "embed"),
    }

    def shapes(self, config: Config) -> Shapes:
        d, n, h = config.d_model, config.heads, config.head_dim
        ranks = {"q": self.q_rank, "k": self.key_rank, "v": self.value_rank}
        factors = {f"{name}_factors": (d, rank * (n + h)) for name, rank in ranks.items()}
        return factors | {"o": (n * h, d)}

    def slots(self, config: Config) -> SlotShape:
        width = config.heads + config.head_dim
        return SlotShape(1, self.key_rank * width, self.value_rank * width, config.scale, factors=True)

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        config = layer.config
        b, t, _ = x.shape
        cos, sin = angles(config.rope, memory.pos[..., None], config.head_dim, dtype=wide(x))
        q_a, q_b = self._factors(linear(p, "q_factors", x), self.q_rank, config)
        q = jnp.einsum("btrn,btrh->bnth", q_a, rotate(q_b, cos, sin)) / self.q_rank
        k_a, k_b = self._factors(linear(p, "k_factors", x), self.key_rank, config)
        k = jnp.concatenate([k_a.reshape(b, t, -1), rotate(k_b, cos, sin).reshape(b, t, -1)], -1)

        def keys(k: Array, v: Array) -> tuple[Array, Array]:
            ranks = (k, self.key_rank), (v, self.value_rank)
            k, v = (of_factors(*self._factors(x[:, 0], rank, config)) for x, rank in ranks)
            return k, v

        products = Products(
            lambda q, k: dot_factors(q, *self._factors(k[:, 0], self.key_rank, config)),
            lambda p, v: sum_factors(p, *self._factors(v[:, 0], self.value_rank, config)),
        )
        expand = Expand(lambda turned: turned, keys, None, products=products)
        projected = Projected(q, k[:, None], linear(p, "v_factors", x)[:, None], x, expand=expand)
        out, state, left = memory.attend(layer, projected, state)
        return linear(p, "o", jnp.swapaxes(out, 1, 2).reshape(b, t, -1)), state, left

    def _factors(self, x: Float[Array, "B S F"], rank: int, config: Config) -> tuple[Array, Array]:
        """Read (a [B, S, R, N], b [B, S, R, H]) from a row of stored numbers."""
        heads = rank * config.heads
        a = x[..., :heads].reshape(*x.shape[:2], rank, config.heads)
        return a, x[..., heads:].reshape(*x.shape[:2], rank, config.head_dim)
