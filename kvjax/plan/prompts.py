"""Communication between devices that split a prompt's tokens, layer by layer: from shapes alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.mesh.on_mesh import OnMesh
from kvjax.models.attending import new_keys, published_by
from kvjax.models.config import Config
from kvjax.models.mixer import Layer, Memory, Projected, Step
from kvjax.models.params import plan, shapes
from kvjax.models.transformer import decode_layers
from kvjax.ops.attention.union import Keys
from kvjax.ops.attention.ways import GATHER, HELPED, KEYS, QUERIES, WHOLE, Way, bytes_asked, ways_of
from kvjax.state.cache import NOTHING, GroupState

_WORDS = {
    GATHER: "keys and values of all devices are put together on each",
    KEYS: "keys and values go from device to device",
    HELPED: "keys, values and queries go from device to device, half of the way",
    QUERIES: "queries go from device to device, over slots that stay",
    WHOLE: "every device has all of them",
}


class LayerTraffic(NamedTuple):
    """How new tokens of some layers attend to each other and to earlier tokens.

    nbytes: bytes that a device receives in each of these layers: hidden states, keys, values, queries,
    outputs.
    """

    layers: tuple[int, ...]
    new: str
    past: str
    nbytes: int


def traffic(
    config: Config, on: OnMesh, rows: int, tokens: int, past: int = 0, dtype: Any = jnp.float32
) -> list[LayerTraffic]:
    """Return what layers exchange in a prefill of `tokens` tokens after `past` slots; nothing if not split.

    >>> from kvjax.mesh.on_mesh import as_mesh
    >>> from kvjax.mesh.rules import as_rules
    >>> on = OnMesh(as_mesh("seq=1"), as_rules("sequence", ("seq",)))
    >>> traffic(Config(vocab=8, d_model=4, layers=2, heads=1, kv_heads=1, head_dim=4, d_ff=4), on, 1, 16)
    []
    """
    if not on.token_axes(tokens):
        return []
    found: dict[int, tuple[str, str, int]] = {}
    heard = _Listening(on, past, jnp.dtype(dtype).itemsize, found)
    tree = shapes(config, plan(config, stacked=False))
    is_shape = lambda x: isinstance(x, tuple) and all(isinstance(n, int) for n in x)  # noqa: E731
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.dtype(dtype)), tree, is_leaf=is_shape)
    ids = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)

    def run(params: Any, ids: Array) -> Array:
        pos = jnp.broadcast_to(past + jnp.arange(tokens, dtype=jnp.int32), ids.shape)
        memory = Memory(pos, heard.attend, heard.recur, lambda layer, state: [])
        return decode_layers(params, ids, config, memory, (NOTHING,) * config.layers).x

    jax.eval_shape(run, params, ids)
    alike: dict[tuple[str, str, int], list[int]] = {}
    for layer, said in sorted(found.items()):
        alike.setdefault(said, []).append(layer)
    return [LayerTraffic(tuple(layers), *said) for said, layers in alike.items()]


class _Listening(NamedTuple):
    """A memory that records how each layer's tokens would attend.

    item: bytes of a number of a hidden state. found: by layer.
    """

    on: OnMesh
    past: int
    item: int
    found: dict[int, tuple[str, str, int]]

    def attend(self, layer: Layer, x: Projected, state: GroupState) -> Any:
        new = new_keys(layer, x.k, x.v, layer.pos)
        b, n, t, _ = x.q.shape
        q = x.q if x.expand is None else x.expand.queries(x.q)
        held = min(self.past, layer.window or self.past)

        def slots(y: Array) -> Array:
            return jnp.zeros((*y.shape[:2], held, *y.shape[3:]), y.dtype)

        sets = [new] if not held else [Keys(slots(new.k), slots(new.v), jnp.zeros((b, 1, held), int)), new]
        expand = None if x.expand is None else x.expand.sets
        made = sets if expand is None else expand(sets)
        sets = made if x.expand is not None and x.expand.rows is not None else sets
        self.found[int(layer.number)] = self._said(layer, q, sets, made)
        out = jnp.zeros((b, n, t, made[-1].v.shape[-1]), x.q.dtype)
        shares = "logits" in layer.publishes or "logits" in layer.taken
        logits = tuple(jnp.zeros((b, n, t, s.k.shape[2])) for s in sets) if shares else None
        return out, state, published_by(layer, state, new.k, x.v, logits)

    def _said(self, layer: Layer, q: Array, sets: list[Keys], made: list[Keys]) -> tuple[str, str, int]:
        if "logits" in layer.publishes or "logits" in layer.taken:
            return "whole maps of weights, which layers share", "", 0
        *past, new = ways_of(self.on, q, sets, made, layer.window, layer.mixer.clip, layer.slots.shared)
        on, parts = self.on, self.on.devices("tokens")
        each = [_bytes(layer, keys) // on.parts("kv_heads", keys.k.shape[1]) for keys in sets]
        asked = q.size // q.shape[3] * bytes_asked(q, made[-1])
        asked //= on.parts("heads", q.shape[1])
        sent = sum(_sent(way, keys, asked, parts) for way, keys in zip([*past, new], each, strict=True))
        words = _WORDS[new.kind] if new.kind != KEYS or new.hops else "nothing is sent: windows are short"
        if 0 < new.hops < parts - 1:
            words += f", {new.hops} times, as far as a window reaches"
        return words, _WORDS[past[0].kind] if past else "", sent // on.parts("batch", q.shape[0])

    def recur(self, layer: Layer, step: Step, state: GroupState) -> Any:
        out = step(None, layer.pos >= 0)[0]
        rows, parts = self.on.parts("batch", layer.pos.shape[0]), self.on.devices("tokens")
        width = layer.config.d_model * self.item * layer.pos.size // rows
        self.found[int(layer.number)] = "every device reads all tokens", "", width - width // parts
        return out, state, {}


def _bytes(layer: Layer, keys: Keys) -> int:
    """Bytes of a set as it is sent."""
    return (keys.k.size + (0 if layer.slots.shared else keys.v.size)) * keys.k.dtype.itemsize


def _sent(way: Way, held: int, asked: int, parts: int) -> int:
    """Bytes that a device receives for a set of `held` bytes in all. asked: of queries and outputs."""
    of = {WHOLE: 0, GATHER: held * (parts - 1) // parts, KEYS: held * way.hops // parts, QUERIES: asked}
    # Outputs go half of the ring, and then directly home.
    return of.get(way.kind, (held + asked) * (parts // 2) // parts)


def in_words(config: Config, on: OnMesh, rows: int, tokens: int, past: int, dtype: Any) -> Iterator[str]:
    """Yield a line per group of layers: how queries and slots come together on the mesh, and bytes sent."""
    for one in traffic(config, on, rows, tokens, past, dtype):
        before = f"; of what was read before, {one.past}" if one.past else ""
        first, *rest = one.layers
        layers = f"layer {first}" if not rest else f"{len(one.layers)} layers from {first}"
        yield f"{layers}: {one.new}{before}; {one.nbytes / 2**20:.2f} MiB to each device"
