"""LESS's residue: evicted slots are summed into a small state, and later queries read it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.grammar.kinds import Answering, Observed, View
from kvjax.keep.merges.merge import pick

# Evicted slots with less total weight than this count as none, since the output is divided by it.
LEAST = 1e-20


@dataclasses.dataclass(frozen=True)
class Residue(Answering, FittedWord):
    """LESS (arXiv:2402.09398, section 3): a recurrent state of evicted slots, read through feature maps.

    A slot evicted from a head adds psi(k) v' to H [R, V] and psi(k) to z [R]. A query q then attends to all
    evicted slots with the total weight phi(q) z and the output phi(q) H / phi(q) z, beside the kept slots,
    whose weights are exp(q k scale). Kept slots are not changed.

    phi(q) = |gelu(gelu(q Q1) Q2)| and psi(k) = |u + D2 (u C)| with u = |D1| gelu(gelu(k K1) K2), of rotated
    queries and keys. fitted: "q1" [L, N, H, X], "q2" [L, N, X, R], "k1" [L, K, H, X], "k2" [L, K, X, R],
    "mix" [L, K, R, R], which is C, and "scale", "scale_mix" [L, K, R], which are D1 and D2; N query heads, K
    KV heads, hidden width X, rank R.
    """

    fitted: Fitted | None = None
    by = "less"
    writes = ()

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        for name, heads in (("q1", model.heads), ("k1", model.kv_heads)):
            sizes = (model.layers, heads, model.head_dim)
            check_sizes(self, "kernels", "layers, heads, channels", name, sizes)

    def start(self, view: View) -> dict[str, Array]:
        """H and z of every row before any eviction."""
        assert self.fitted is not None
        rank, lists = self.fitted.arrays["mix"].shape[-1], view.pos.shape[:2]
        return {
            "h": jnp.zeros((*lists, rank, view.v.shape[-1]), jnp.float32),
            "z": jnp.zeros((*lists, rank), jnp.float32),
        }

    def carry(
        self,
        carried: dict[str, Array],
        view: View,
        kept: Bool[Array, "B K S"],
        leaving: Int[Array, "B K E"],
        seen: Observed,
    ) -> dict[str, Array]:
        """Return H and z after the slots `leaving` are added; index S means no slot."""
        assert self.fitted is not None
        index = jnp.minimum(leaving, view.pos.shape[-1] - 1)
        k, v = pick(view.k, index), pick(view.v, index)
        more = summed(seen.fitted[self.fitted.digest], k, v, leaving < view.pos.shape[-1])
        return jax.tree.map(jnp.add, carried, more)

    def __call__(
        self, view: View, kept: Bool[Array, "B K S"], leaving: Int[Array, "B K E"], seen: Observed
    ) -> View:
        """Return the view unchanged: evicted slots are not merged into kept ones."""
        return view

    def answer(
        self, carried: dict[str, Array], q: Float[Array, "B N T H"], fitted: dict[str, dict[str, Array]]
    ) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:
        """Return (out, lse) of rotated queries over all evicted slots; lse is -inf if there are none."""
        assert self.fitted is not None
        return asked(fitted[self.fitted.digest], carried, q)


def summed(
    arrays: dict[str, Array],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S V"],
    leaves: Bool[Array, "B K S"],
) -> dict[str, Array]:
    """Compute what the evicted slots add to H and z, with the feature maps of one layer."""
    weight = jnp.where(leaves[..., None], key_features(arrays, k.astype(jnp.float32)), 0.0)
    v = jnp.where(leaves[..., None], v.astype(jnp.float32), 0.0)
    return {"h": jnp.einsum("bksr,bksv->bkrv", weight, v), "z": weight.sum(2)}


def asked(
    arrays: dict[str, Array], state: dict[str, Array], q: Float[Array, "B N T H"]
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:
    """Return (out, lse) of rotated queries over H and z, with the feature maps of one layer."""
    weight = query_features(arrays, q.astype(jnp.float32))
    b, n, t, r = weight.shape
    weight = weight.reshape(b, state["z"].shape[1], -1, t, r)
    total = jnp.einsum("bkgtr,bkr->bkgt", weight, state["z"])
    some = total > LEAST
    safe = jnp.where(some, total, 1.0)
    out = jnp.einsum("bkgtr,bkrv->bkgtv", weight, state["h"]) / safe[..., None]
    out = jnp.where(some[..., None], out, 0.0).reshape(b, n, t, -1)
    return out, jnp.where(some, jnp.log(safe), -jnp.inf).reshape(b, n, t)


def query_features(arrays: dict[str, Array], q: Float[Array, "B N T H"]) -> Float[Array, "B N T R"]:
    """Compute phi of rotated queries, in one layer."""
    return jnp.abs(_network(q, arrays["q1"], arrays["q2"]))


def key_features(arrays: dict[str, Array], k: Float[Array, "B K S H"]) -> Float[Array, "B K S R"]:
    """Compute psi of rotated keys, in one layer."""
    scale, scale_mix = (arrays[name][None, :, None] for name in ("scale", "scale_mix"))
    u = jnp.abs(scale) * _network(k, arrays["k1"], arrays["k2"])
    return jnp.abs(u + scale_mix * jnp.einsum("bksr,krp->bksp", u, arrays["mix"]))


def _network(
    x: Float[Array, "B K S H"], first: Float[Array, "K H X"], second: Float[Array, "K X R"]
) -> Float[Array, "B K S R"]:
    inner = jax.nn.gelu(jnp.einsum("bksh,khx->bksx", x, first), approximate=False)
    return jax.nn.gelu(jnp.einsum("bksx,kxr->bksr", inner, second), approximate=False)
