"""Trigonometric scores: logits of a head's mean query for each key, at future distances (TriAttention)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.grammar.kinds import IN_PREFILL, IN_STEP, Inputs, Observation, Observed, View
from kvjax.keep.algebra import Word
from kvjax.ops.base.rope import Rope, angles, rotate


def pair_sizes(x: Float[Array, "*b H"], rope: Rope) -> Float[Array, "*b F"]:
    """Compute the lengths of the F pairs of channels that RoPE rotates together.

    >>> pair_sizes(jnp.asarray([3.0, 0.0, 4.0, 2.0]), Rope()).tolist()
    [5.0, 2.0]
    """
    half = rope.turning(x.shape[-1]) // 2
    a, b = x[..., rope.start : rope.start + half], x[..., rope.start + half : rope.start + 2 * half]
    # sqrt has no finite gradient at 0.
    return jnp.sqrt(jnp.maximum(a * a + b * b, 1e-24))


@dataclasses.dataclass(frozen=True)
class QueryCentres(Observation, FittedWord):
    """The mean of a head's queries before rotation, and the mean length of each of their channel pairs.

    fitted: "mean" [L, N, H] and "size" [L, N, F], as `kvjax fit triattention` writes them.
    """

    fitted: Fitted | None = None
    by = "triattention"
    phases = (IN_PREFILL, IN_STEP)

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        sizes = (model.layers, model.heads, model.head_dim)
        check_sizes(self, "centres", "layers, heads, channels", "mean", sizes)

    def __call__(self, inputs: Inputs) -> tuple[Float[Array, "B N H"], Float[Array, "B N F"]]:
        return self._of(inputs.fitted, inputs.pos.shape[0])

    def at_hand(self, seen: Observed, rows: int) -> tuple[Float[Array, "B N H"], Float[Array, "B N F"]]:
        """Return the same when a score needs them: observed at a prompt's end, carried in decode steps."""
        assert self.fitted is not None
        return self._of(seen.fitted, rows) if self.fitted.digest in seen.fitted else seen.of(self)

    def _of(
        self, fitted: dict[str, dict[str, Array]], rows: int
    ) -> tuple[Float[Array, "B N H"], Float[Array, "B N F"]]:
        assert self.fitted is not None
        mean, size = (
            jnp.repeat(fitted[self.fitted.digest][name][None], rows, 0) for name in ("mean", "size")
        )
        return mean, size


@dataclasses.dataclass(frozen=True)
class Trigonometric(Word):
    """score[j] = max_n z_j(mean_d <turn(c_n, t + d), k_j> + sum_f (s_nf - |c_nf|) |k_jf|) (arXiv:2604.04921).

    c is a query head's mean query, rotated to the positions t + d after a row's t tokens with d = 1, 2, 4 and
    so on up to `farthest`; this is sum_f |c_f| |k_f| cos(w_f D + phi_f) at the future distances D. The second
    term accounts for queries off their mean: s_f is the mean length of their pair f. z standardises over a
    head's slots (mean 0, variance 1); the maximum over a group's heads n counts.
    """

    centres: QueryCentres
    farthest: int = 65536

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({self.centres})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        b, heads, _, h = view.k.shape
        mean, size = self.centres.at_hand(seen, b)
        rope, k = seen.attention.rope, view.k.astype(jnp.float32)
        ahead = 2 ** jnp.arange(self.farthest.bit_length(), dtype=jnp.int32)
        cos, sin = angles(rope, seen.length[:, None] + ahead[None], h, seen.length[:, None])
        turned = rotate(mean.astype(jnp.float32), cos.mean(1)[:, None], sin.mean(1)[:, None], rope.start)
        beside = size - pair_sizes(mean.astype(jnp.float32), rope)
        # In the order of a group's heads.
        turned, beside = (x.reshape(b, heads, -1, x.shape[-1]) for x in (turned, beside))
        score = jnp.einsum("bkgh,bksh->bkgs", turned, k)
        score = score + jnp.einsum("bkgf,bksf->bkgs", beside, pair_sizes(k, rope))
        live = (view.pos >= 0)[:, :, None]
        count = jnp.maximum(live.sum(-1, keepdims=True), 1).astype(score.dtype)
        apart = jnp.where(live, score - jnp.where(live, score, 0.0).sum(-1, keepdims=True) / count, 0.0)
        spread = jnp.sqrt(jnp.maximum((apart * apart).sum(-1, keepdims=True) / count, 1e-12))
        return (apart / spread).max(2)
