"""PoD: layers of a block share the keys of distant tokens and have their own keys for near ones."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Bool, Float

from kvjax.base.ranges import Whole
from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes
from kvjax.models.mixer import GroupState, Layer, Left, Memory, RecurrentState, Take
from kvjax.models.mixers.kept_tokens import KeptTokens, kept_of, rotated, state_of
from kvjax.ops.attention import token_cache as cache
from kvjax.ops.attention.proximal import Proximal, proximal_attention


@dataclasses.dataclass(frozen=True)
class SharedKeys(KeptTokens):
    """PoD's layer (Ma et al., 2024, arXiv:2412.02252): own keys near, the keys of layer `source` far away.

    Without a source it is the lowest layer of a block, ordinary attention that publishes its rotated keys.
    The others attend to the first `sinks` and newest `recent` tokens with their own keys, and to all tokens
    between with those of the lowest layer, in one softmax, to which the paper's parameter-free gate is
    equivalent. Queries and values are always their own: they keep values, and sinks + recent keys.
    Deviations: blocks consist of whole layers, while the paper groups heads of layers; and nothing is skipped
    if near tokens have most of the weight.
    """

    sinks: Whole = 16
    recent: int = 4080
    source: Whole | None = None
    in_segments = True

    @property
    def grows(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A layer with a source has a constant number of own keys, however long the row is."""
        return frozenset({"k", "v"} if self.source is None else {"v"})

    @property
    def takes(self) -> dict[str, Take]:
        return {} if self.source is None else {"keys": Take("keys", self.source)}

    def offers(self, config: Config) -> frozenset[str]:
        return frozenset({"keys"}) if self.source is None else frozenset()

    def check_takes(self, config: Config, layer: int) -> None:
        super().check_takes(config, layer)
        if self.source is None:
            return
        lowest = config.mixers[self.source]
        widths = [(m.key_heads, m.key_dim) for m in (self, lowest) if isinstance(m, SharedKeys)]
        if self.source >= layer or widths[0] != widths[-1]:
            raise ValueError(
                f"layer {layer} takes the keys of layer {self.source}, expected one below it with as many "
                f"key heads of as many channels: {widths[0]} and {widths[-1]}"
            )

    def state(self, config: Config) -> Shapes:
        state = super().state(config)
        if self.source is None:
            return state
        return state | {"k": (self.sinks + self.recent, self.key_heads, self.key_dim)}

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        q, k, v = self.projected(p, x)
        q, k = (rotated(layer.config, y, memory.pos) for y in (q, k))

        def lowest(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            held = kept_of(past, ("k", "v"))
            before, capacity = held.get("initial_state"), held.get("capacity")
            slots, at = cache.append({"k": k, "v": v}, before, memory.segments, mask, capacity)
            published.append(slots.kept["k"])

            def body(q: Array, at: cache.Places) -> Array:
                seen = cache.seen(at, cache.stored(slots))
                return cache.attend(q, slots.kept["k"], slots.kept["v"], seen, scale=self.key_dim**-0.5)[0]

            out = cache.over_queries(body, q, at, cache.QUERIES)
            out = cache.checked(out, at.slot[..., None], slots.capacity)
            return out, state_of(slots, {"k": x.dtype, "v": x.dtype})

        def upper(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            start = None if past is None else Proximal(past["k"], past["v"], past["count"])
            out, new = proximal_attention(
                q, k, v, layer.taken["keys"], sinks=self.sinks, recent=self.recent,
                initial_state=start, mask=mask, segments=memory.segments,
            )  # fmt: skip
            return out, {"k": new.k.astype(x.dtype), "v": new.v.astype(x.dtype), "count": new.count}

        published: list[Array] = []
        out, state, left = memory.recur(layer, lowest if self.source is None else upper, state)
        if "keys" in layer.publishes:
            left = left | {"keys": published[0]}
        return self.out(p, out, x), state, left
