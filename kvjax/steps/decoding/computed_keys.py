"""Attention of one query over slots from which keys and values are computed, such as latents.

It takes a strip of slots at a time, so that the computed keys and values of a whole cache never exist at
once. If a layer defines its products with them, not even those of a strip exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from kvjax.models.mixer import Layer, Projected
from kvjax.ops.attention.union import Keys, logits, merge, weigh
from kvjax.ops.base.dispatch import platform
from kvjax.steps.shared.run import Run

# Slots per strip. On a CPU the computed keys and values of one strip fit in its cache, and products with
# narrow matrices are fastest in short strips; other devices take more at once, and all slots if no key is
# computed.
COMPUTED: dict[str, int | None] = {"cpu": 512, "other": 4096}
PRODUCTS: dict[str, int | None] = {"cpu": 128, "other": None}
# (out, lse) of one part.
Part = tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]


def in_strips(run: Run, layer: Layer, x: Projected) -> bool:
    """Whether a layer's computed keys can be attended to in strips, each with a softmax to merge."""
    shares = "logits" in layer.publishes or "logits" in layer.taken
    whole = shares or layer.mixer.clip is not None or run.on_mesh is not None
    return x.expand is not None and x.expand.outputs is None and x.expand.rows is None and not whole


def attend_computed(layer: Layer, x: Projected, sets: Sequence[Keys], pos: Int[Array, "B 1"]) -> list[Part]:
    """Return (out, lse) of one query over each set of stored keys and values."""
    expand = x.expand
    assert expand is not None
    q, products = expand.queries(x.q), expand.products
    options: dict[str, Any] = dict(scale=layer.scale, window=layer.window, products=products)
    options |= dict(softcap=layer.config.attention_softcap)

    def one(keys: Keys) -> Part:
        met = keys if products is not None else expand.sets([keys])[0]
        return weigh([logits(q, met, pos, **options)], [met], products=products)[:2]

    sizes = PRODUCTS if products is not None else COMPUTED
    size = sizes["cpu" if platform() == "cpu" else "other"]
    parts = [by_strips(one, keys, size) for keys in sets]
    return [(out.astype(q.dtype), lse) for out, lse in parts]


def by_strips(one: Callable[[Keys], Part], keys: Keys, size: int | None) -> Part:
    """Apply `one` to every `size` slots of a set in a loop, then to the rest, and merge the results.

    size: None takes all slots at once.
    """
    slots = keys.k.shape[2]
    if size is None or slots < 2 * size:
        return one(keys)

    def cut(start: Int[Array, ""] | int, size: int) -> Keys:
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis=2), keys)

    def and_next(i: Int[Array, ""], part: Part) -> Part:
        return merge([part, one(cut(i * size, size))])

    strips, left = divmod(slots, size)
    part = jax.lax.fori_loop(1, strips, and_next, one(cut(0, size)))
    return merge([part, one(cut(strips * size, left))]) if left else part
