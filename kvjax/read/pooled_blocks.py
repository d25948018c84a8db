"""Blocks of keys as weighted means, whose weights can be fitted, and NSA's selection by them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.base.errors import InputError
from kvjax.grammar import Budget
from kvjax.grammar.fitted import Fitted, ModelSizes
from kvjax.grammar.read_kinds import FittedBlocks
from kvjax.ops.base.dtypes import wide
from kvjax.read.blocks import BlocksAndSinks
from kvjax.state.cache import Slots


def weighted_means(
    k: Float[Array, "*b P L H"], logits: Float[Array, "*b P L"] | None
) -> Float[Array, "*b P H"]:
    """sum_i softmax(logits)_i k_i over the tokens of every block, in the dtype of the keys; None: the mean.

    >>> k = jnp.asarray([[[0.0], [4.0]]])
    >>> weighted_means(k, None).tolist(), weighted_means(k, jnp.asarray([[0.0, 99.0]])).tolist()
    ([[2.0]], [[4.0]])
    """
    x = k.astype(wide(k))
    if logits is None:
        return x.mean(-2).astype(k.dtype)
    return jnp.einsum("...ph,...phd->...pd", jax.nn.softmax(logits, -1), x).astype(k.dtype)


def along(
    k: Float[Array, "l B K P *n L H"], direction: Float[Array, "l K H"]
) -> Float[Array, "l B K P *n L"]:
    """Compute the products of keys in blocks with a direction of their head, in promote(float32, k)."""
    by = direction.reshape(
        direction.shape[0], 1, direction.shape[1], *(1,) * (k.ndim - 4), direction.shape[2]
    )
    return (k.astype(wide(k)) * by.astype(wide(k))).sum(-1)


@dataclasses.dataclass(frozen=True)
class CompressedBlocks(BlocksAndSinks, FittedBlocks):
    """NSA's selection (arXiv:2502.11089, eq. 7-10): blocks whose compressed keys get the most attention.

        c_j = sum_i w_i k_(j+i), i < compress, j every `stride` tokens of a block
        share of a block = the sum of softmax(q c / sqrt(H)) over its c and over the heads of a group

    The softmax is over the compressed keys of all blocks of the body. w = 1 / compress; with a fit,
    w = softmax_i(<u, k_(j+i)> + e_i) for a direction u of every KV head and a bias e of every place. The
    budget is a share of the body; the blocks of the first `sinks` tokens are read beside it, as are the
    `newest` tokens.

    Args:
        fitted: "direction" [L, K, H] and "place" [L, K, compress], as `kvjax fit nsa` writes them.

    >>> word = CompressedBlocks(Budget(4), page=8, newest=8, sinks=8, compress=4, stride=2)
    >>> word.pages_visited(64), word.begins
    (2, (0, 2, 4))
    """

    budget: Budget
    page: int = 64
    newest: int = 512
    sinks: int = 64
    compress: int = 32
    stride: int = 16
    skip_layers: int = 0
    fitted: Fitted | None = None
    by_list = True
    by = "nsa"

    def __post_init__(self):
        if self.page < self.compress or self.page % self.stride or self.compress % self.stride:
            raise ValueError(
                f"a block of page={self.page} tokens has parts of compress={self.compress} every "
                f"stride={self.stride}: expected page of at least compress, and both multiples of stride"
            )

    @property
    def begins(self) -> tuple[int, ...]:
        """Where in a block its compressed blocks begin."""
        return tuple(range(0, self.page - self.compress + 1, self.stride))

    def sizes(self, model: ModelSizes) -> dict[str, tuple[str, tuple[int, ...]]]:
        heads = model.layers, model.kv_heads
        return {
            "direction": ("layers, KV heads, channels", (*heads, model.head_dim)),
            "place": ("layers, KV heads, tokens", (*heads, self.compress)),
        }

    def check(self, model: ModelSizes) -> None:
        """Raise InputError as in `FittedBlocks`, and for arrays fitted with another `compress`."""
        place = None if self.fitted is None else self.fitted.arrays.get("place")
        if place is not None and place.shape[-1] != self.compress:
            raise InputError(
                f"it was fitted with compress={place.shape[-1]}, and has compress={self.compress}: give both "
                "the same, or run `kvjax fit nsa` with this one"
            )
        super().check(model)

    def summarise(
        self, k: Float[Array, "*b S H"], fitted: dict[str, Array] | None = None
    ) -> dict[str, Float[Array, "*b P N H"]]:
        pages = k.reshape(*k.shape[:-2], -1, self.page, k.shape[-1])
        at = np.asarray(self.begins)[:, None] + np.arange(self.compress)
        blocks, logits = pages[..., at, :], None
        if fitted is not None:
            logits = along(blocks, fitted["direction"])
            logits = logits + fitted["place"][:, None, :, None, None].astype(logits.dtype)
        return {"compressed": weighted_means(blocks, logits)}

    def shares(
        self, q: Float[Array, "*b K G T H"], summary: dict[str, Any], live: Bool[Array, "*b #K #T P"],
        scale: float,
    ) -> Float[Array, "*b K T P"]:  # fmt: skip
        s = jnp.einsum("...gth,...pnh->...gtpn", q, summary["compressed"].astype(q.dtype)) * scale
        s = jnp.where(live[..., None, :, :, None], s, -1e30)
        s = jax.nn.logsumexp(s, -1) - jax.nn.logsumexp(s, (-2, -1))[..., None]
        return jax.nn.logsumexp(s, -3) - np.log(q.shape[-3])

    def select(
        self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array, length: Int[Array, "B"],
        implementation: str | None = None,
    ) -> tuple[Int[Array, "B K M"], Int[Array, "B K"]]:  # fmt: skip
        """Choose the blocks of the first tokens and those with the largest shares, and say how many count."""
        held = body.pos[layer] >= 0
        live = held.reshape(*held.shape[:2], -1, self.page).any(-1)
        groups = q.reshape(q.shape[0], held.shape[1], -1, *q.shape[2:]).astype(wide(q))
        summary = {"compressed": body.summary["compressed"][layer]}
        share = self.shares(groups, summary, live[:, :, None], q.shape[-1] ** -0.5)
        share = jax.lax.stop_gradient(jax.nn.logsumexp(share, -2))
        return self.best(share, body.pos[layer])
