"""Transformer-VQ's layer: keys are quantised, so that old tokens are counts and mean values per code."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes, l2_norm, linear
from kvjax.models.mixer import GroupState, Layer, Left, Memory, RecurrentState
from kvjax.models.mixers.recurrent import Recurrent
from kvjax.ops.recurrent.convolution import answered
from kvjax.ops.recurrent.transformer_vq import VQState, quantise, transformer_vq


@dataclasses.dataclass(frozen=True)
class VectorQuantised(Recurrent):
    """Transformer-VQ's layer (Lingle, 2023, arXiv:2309.16354): softmax over `codes` codes and two blocks.

    q and k have length sqrt(key_dim), so logits are sqrt(key_dim) times their cosine; the output is gated by
    silu(x W_g). Attention gives no gradient to the codebook [heads, key_dim, codes] (`without_gradient`), and
    gradients to codes pass straight through to the keys; the loss `apart` draws keys and codes together in
    training. Deviations: no relative position bias, queries and keys are normalised without the paper's
    temperature, and codes move by the gradient of `apart`, as in VQ-VAE (arXiv:1711.00937, equation 3), where
    the paper moves each to a running mean of the keys that are nearest to it.
    """

    codes: int = 512
    block: int = 512
    without_gradient = frozenset({"codebook"})
    in_segments = True

    def check(self, config: Config) -> None:
        if self.groups not in (None, self.heads) or self.block < 1 or self.codes < 1:
            raise ValueError(
                "every head has codes of its own, at least one, and blocks at least one token: got "
                f"groups={self.groups}, codes={self.codes}, block={self.block}"
            )

    axes = Recurrent.axes | {"codebook": ("heads", None, None), "out_gate": ("embed", "heads")}

    def shapes(self, config: Config) -> Shapes:
        shapes = {name: shape for name, shape in super().shapes(config).items() if name != "out_norm"}
        shapes |= {"codebook": (self.heads, self.key_dim, self.codes)}
        return shapes | {"out_gate": (config.d_model, self.heads * self.value_dim)}

    state_axes = {
        "counts": (),
        "means": ("heads",),
        "near_codes": (),
        "near_values": (),
        "length": (),
        "answer": (),
    }

    def state(self, config: Config) -> Shapes:
        return {
            "counts": (self.heads, self.codes),
            "means": (self.heads, self.codes, self.value_dim),
            "near_codes": (2 * self.block, self.heads),
            "near_values": (2 * self.block, self.heads, self.value_dim),
            "length": (),
            "answer": (config.d_model,),
        }

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        q, k, v = self.split(*(linear(p, name, x) for name in "qkv"))
        q, k, book = self._sized(q), self._sized(k), self._book(p)
        gate = jax.nn.silu(x @ p["out_gate"])

        def step(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            names = ("counts", "means", "near_codes", "near_values", "length")
            start = None if past is None else VQState(*(past[n] for n in names))
            out, new = transformer_vq(
                q, k, v, book, block=self.block, initial_state=start, mask=mask, segments=memory.segments
            )
            y = linear(p, "o", out.astype(x.dtype).reshape(*x.shape[:2], -1) * gate)
            # A full block has become counts, so its last token cannot be read again.
            y, answer = answered(y, jnp.zeros_like(x[:, 0]) if past is None else past["answer"], mask)
            new = new._replace(values=new.values.astype(x.dtype))
            return y, dict(zip(names, new, strict=True)) | {"answer": answer}

        return memory.recur(layer, step, state)

    def apart(self, p: Params, x: Float[Array, "B T D"]) -> Float[Array, ""]:
        """How far keys are from their codes: the mean of |k - c|^2 / key_dim, from 0 to 4.

        Its gradient draws codes to their keys and keys to their codes. x: the layer's input.
        """
        k = self._sized(linear(p, "k", x).reshape(*x.shape[:2], self.heads, self.key_dim))
        book = self._book(p)
        codes, _ = quantise(k, book)
        nearest = jax.vmap(lambda of_head, code: of_head[code], (0, 2), 2)(book, codes)
        return jnp.square(k - nearest).mean()

    def _sized(self, x: Float[Array, "*s K"]) -> Float[Array, "*s K"]:
        return l2_norm(x.astype(jnp.float32)) * self.key_dim**0.5

    def _book(self, p: Params) -> Float[Array, "H C K"]:
        return self._sized(jnp.swapaxes(p["codebook"], 1, 2))
