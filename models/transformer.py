"""One functional decoder: embedding, layers of mixer and feed-forward, logits.

The file knows nothing of caches or methods: every layer's mixer accesses its past through a `Memory` that the
caller supplies, together with a state that only that memory understands. This file moves what layers take
from each other; `kvjax.models.exchange` says which layer takes what.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.mesh.on_mesh import OnMesh
from kvjax.models.attending import attend_new, new_keys, published_by, rotated
from kvjax.models.config import Config
from kvjax.models.exchange import published, takes_of
from kvjax.models.feed_forward import FeedForward, fed, mlp_of
from kvjax.models.fewer_tokens import ends_early, last_only, narrowed
from kvjax.models.layer_embeddings import LAYER_EMBEDDINGS, layer_embeddings
from kvjax.models.layers import Params, stream_norm
from kvjax.models.mixer import (
    GroupState,
    Layer,
    LayerSlots,
    LayerValues,
    Left,
    Memory,
    Mixer,
    Projected,
    Step,
    Take,
)
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.recomputed import recomputed
from kvjax.models.stacking import Group, entries, groups_in, layers_of_groups, members, span
from kvjax.models.streams import STREAMS, joined, split
from kvjax.models.traced_once import TracedOnce
from kvjax.ops.attention.union import Keys
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.packed_sequences import segment_numbers, segment_offsets
from kvjax.state.axes import pinned_to
from kvjax.state.cache import NOTHING

# Token ids, or vectors given to a decoder instead.
IdsOrVectors = Int[Array, "B T"] | Float[Array, "B T D"]
# New keys and values of a layer, as in `LayerSlots`.
NewSlots = tuple[Array | None, Array | None]


class Positions(NamedTuple):
    """The positions of new tokens: pos [B, T] (-1 on padding), length [B] tokens so far, these included."""

    pos: Int[Array, "B T"]
    length: Int[Array, "B"]


class LayerOutputs(NamedTuple):
    """The layers' results for new tokens, and what they published for each other.

    x: the hidden state of every new token, of only each row's last one if a prefill `ends_early`, or of those
    that went on if the prompt was narrowed. pos: the positions of these. states, collected: one per group,
    the latter on a leading axis of its layers.
    """

    x: Float[Array, "B _ D"]
    states: tuple[GroupState, ...]
    collected: tuple[Any, ...]
    published: dict[Take, Any]
    pos: Int[Array, "B _"]


def block(
    p: Params, x: Float[Array, "B T D"], layer: Layer, mlp: FeedForward, memory: Memory, state: GroupState
) -> tuple[Float[Array, "B T D"], GroupState, Left]:
    """One decoder layer: x + mixer, then x + feed-forward, with the family's norms around them.

    A layer may have a "perturbation" [B, T, D] among its parameters, zeros that are added after the mixer:
    the gradient with respect to it equals that with respect to the hidden states there.
    """
    config = layer.config

    def norm(name: str, y: Array) -> Array:
        return stream_norm(y, p, name, config) if name in p else y

    def scaled(y: Array) -> Array:
        return y if config.residual_scale == 1 else y * jnp.asarray(config.residual_scale, y.dtype)

    left: Left = {}
    read = added = given = predicted = None
    if config.streams > 1:
        predicted = STREAMS.predicted(p, x, config)
        x = predicted[:, :, 0]
    if not layer.mixer.absent:
        with jax.named_scope("attention"):
            mixed = layer.taken.get("input", x)
            read = norm("attn_norm", mixed)
            if memory.on_mesh is not None and layer.mixer.state(config):
                # Mixing between tokens needs all tokens of a row, on every device.
                read = pinned_to(read, memory.on_mesh, "batch", None, None)
            out, state, left = layer.mixer(p, read, layer, memory, state)
            added = scaled(norm("attn_post_norm", out))
            x = x + added
            if "perturbation" in p:
                x = x + p["perturbation"]
            if config.laurel:
                x = STREAMS.beside(p, x, read, config)
    if not mlp.absent:
        with jax.named_scope("mlp"):
            normed = norm("mlp_norm", x) if read is None or config.norms != "parallel" else read
            given = x if mlp.normalises else normed
            on = memory.on_mesh
            y = mlp(p, given, config) if on is None else fed(mlp, p, given, config, on)
            x = x + scaled(norm("mlp_post_norm", y))
    if predicted is not None:
        x = STREAMS.corrected(p, predicted, x, layer.embedded, config)
    elif layer.embedded is not None or config.layer_scales:
        x = LAYER_EMBEDDINGS(p, x, layer.embedded, config)
    if "mixer input" in layer.publishes:
        left = left | {"mixer input": read}
    if memory.look is not None:
        left = left | {"collected": memory.look(LayerValues(layer.mixer, mlp, p, read, added, given, x))}
    return x, state, left


def stack(
    params: Params,
    tokens: IdsOrVectors,
    config: Config,
    memory: Memory,
    states: tuple[GroupState, ...],
    above: Mapping[Take, LayerSlots] | None = None,
) -> LayerOutputs:
    """Return all layers, one group after the other; groups that are members of a pattern take turns.

    A group's state is carried whole through its layers (never as scan inputs and outputs, which would make a
    second cache). above: the slots of layers that lower layers read, given before those layers run.
    """
    x = tokens
    if x.ndim == 2:
        x = params["embed"][tokens] * jnp.asarray(config.embed_scale, params["embed"].dtype)
    if config.embed_norm:
        x = stream_norm(x, params, "embed_norm", config)
    embedded = layer_embeddings(params, tokens, x, config) if config.layer_embeddings else None
    x = split(params, x, config) if config.streams > 1 else x
    traced = TracedOnce(params, states, memory)
    things: dict[Take, Any] = {Take("tokens", None): tokens, Take("embedding", None): params.get("embed")}
    things |= above or {}
    publishes = published(config, memory.takes)
    collected: list[Any] = []
    held, ahead = list(states), memory.ahead
    for each, entry in zip(map(members, params["layers"]), entries(groups_in(params)), strict=True):
        g, first = len(collected), entry[0].first
        after = g + len(entry)
        if ahead is not None and after < len(held):
            # The next iteration uses it.
            held[after] = ahead(x, held[after])
        names = publishes.get(first, frozenset())
        if "input" in names:
            things[Take("input", first)] = x
        if memory.last is not None and ends_early(config, first):
            (x, embedded), memory = last_only((x, embedded), memory)
        layers = [_layer(group, g + i, config, memory, publishes, things) for i, group in enumerate(entry)]
        turns = [(kind, _turn(kind, memory, embedded)) for kind in layers]

        def body(carry, inputs, turns=turns):
            # As many groups as are here are the stride of each.
            (x, mine), (each, index), new, lefts = carry, inputs, [], []
            for (kind, turn), p, state in zip(turns, each, mine, strict=True):
                (x, state), left = turn((x, state), (p, index, kind.number + len(turns) * index))
                new.append(state)
                lefts.append(left)
            return (x, tuple(new)), lefts

        if entry[0].size == 1:
            ((kind, turn),), (p,) = turns, each
            mine, mlp = jax.tree.map(lambda w: w[0], p), mlp_of(config, first)
            (x, held[g]), left = traced(kind, mlp, memory, turn, (x, held[g]), mine)
            things |= {Take(name, first): left[name] for name in names - {"input"}}
            collected.append(jax.tree.map(lambda y: y[None], left.get("collected")))
        else:
            # A layer that publishes is alone in its group, so these leave only what the memory collects.
            index = jnp.arange(entry[0].size, dtype=jnp.int32)
            (x, held[g:after]), lefts = jax.lax.scan(body, (x, tuple(held[g:after])), (each, index))
            collected += [left.get("collected") for left in lefts]
        if memory.narrow is not None and (end := span(entry).stop) > memory.narrow.after:
            (x, embedded), memory, collected = narrowed((x, embedded), memory, collected, end)
    x = joined(params, x, config) if config.streams > 1 else x
    return LayerOutputs(x, tuple(held), tuple(collected), things, memory.pos)


def _layer(
    group: Group, number: int, config: Config, memory: Memory, publishes: Mapping[int, frozenset[str]],
    things: Mapping[Take, Any],
) -> Layer:  # fmt: skip
    """Return the first layer of a group, whose constants are those of all its layers."""
    first = group.first
    mixer, takes = mixer_of(config, first), takes_of(config, first) | {**memory.takes.get(first, {})}
    return Layer(
        number, 0, first, config.window(first), mixer.rope(config, first), mixer, config, memory.pos,
        publishes.get(first, frozenset()), {key: things[take] for key, take in takes.items()},
    )  # fmt: skip


def _turn(kind: Layer, memory: Memory, embedded: Float[Array, "B T L P"] | None) -> Callable[..., Any]:
    """Make a function of a carry (x, state) and (parameters, index, number) that runs a group's layer."""
    mlp = mlp_of(kind.config, kind.number)  # type: ignore[arg-type]

    def turn(carry, inputs):
        (x, state), (p, index, number) = carry, inputs
        x = pinned_to(x, memory.on_mesh, "batch", "tokens", None)
        mine = None if embedded is None else jax.lax.dynamic_index_in_dim(embedded, number, 2, False)
        layer = kind._replace(index=index, number=number, embedded=mine)
        x, state, left = block(p, x, layer, mlp, memory, state)
        return (x, state), left

    return recomputed(turn) if memory.remat else turn


def decode_layers(
    params: Params, tokens: IdsOrVectors, config: Config, memory: Memory, states: tuple[GroupState, ...]
) -> LayerOutputs:
    """`stack`, also for layers that read slots from above (LCKV, arXiv:2405.10637).

    There a token sees only the keys of earlier tokens, so they are a fixed point of the stack: T - 1 passes
    reach it from any start, since every pass settles one token more. A single token sees only its past.
    `Memory.passes` are the paper's approximation for training: some passes without a gradient, then the rest.
    """
    state_of = {group.first: state for group, state in zip(groups_in(params), states, strict=True)}
    reads = {i: mixer_of(config, i).source_of("slots") for i in range(config.layers)}
    read_above = {source for i, source in reads.items() if source is not None and source > i}
    if not read_above:
        return stack(params, tokens, config, memory, states)

    def above(new: Mapping[int, NewSlots]) -> dict[Take, LayerSlots]:
        return {Take("slots", s): LayerSlots(state_of[s], *new[s], above=True) for s in read_above}

    def once(new: Mapping[int, NewSlots]) -> dict[int, NewSlots]:
        things = stack(params, tokens, config, memory, states, above(new)).published
        return {s: (things[Take("slots", s)].k, things[Take("slots", s)].v) for s in read_above}

    new: dict[int, NewSlots] = {s: (None, None) for s in read_above}
    if tokens.shape[1] > 1:
        b, t = tokens.shape[:2]
        start: dict[int, NewSlots] = {}
        for s in read_above:
            slots = mixer_of(config, s).slots_of(config)
            dtype = params["norm"].dtype
            k, v = (jnp.zeros((b, slots.heads, t, width), dtype) for width in (slots.key, slots.value))
            start[s] = (k, None if slots.shared else v)
        still, learned = memory.passes or (0, t)
        new = jax.lax.scan(lambda x, _: (once(x), None), start, None, length=still)[0]
        new = jax.lax.stop_gradient(new) if memory.passes else new
        # The last pass runs after the loop.
        new = jax.lax.scan(lambda x, _: (once(x), None), new, None, length=learned - 1)[0]
    return stack(params, tokens, config, memory, states, above(new))


def unembed(params: Params, x: Float[Array, "*b D"], config: Config) -> Float[Array, "*b V"]:
    """Logits in promote(float32, x), after the last norm."""
    x = stream_norm(x, params, "norm", config)
    w = params["embed"].T if config.tied else params["unembed"]
    y = jnp.matmul(x, w, preferred_element_type=wide(x))
    y = y if config.logit_scale == 1 else y * config.logit_scale
    cap = config.logit_softcap
    return y if cap is None else cap * jnp.tanh(y / cap)


def positions(tokens: IdsOrVectors, lengths: Int[Array, "B"], start: Int[Array, "B"]) -> Positions:
    """Positions of right-padded tokens whose rows continue at `start`."""
    t = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    pos = jnp.where(t < lengths[:, None], start[:, None] + t, -1)
    return Positions(pos, start + lengths)


def forward(
    params: Params,
    tokens: IdsOrVectors,
    config: Config,
    lengths: Int[Array, "B"] | None = None,
    context: Keys | None = None,
    *,
    segments: Int[Array, "B T"] | None = None,
    remat: bool = False,
) -> Float[Array, "B T V"]:
    """Logits of every token without a cache; all arguments are those of `hidden`.

    >>> import jax
    >>> from kvjax.models.params import init
    >>> config = Config(vocab=32, d_model=16, layers=2, heads=2, kv_heads=1, head_dim=8, d_ff=32)
    >>> params = init(config, jax.random.key(0))
    >>> forward(params, jax.numpy.zeros((1, 5), "int32"), config).shape
    (1, 5, 32)
    """
    x = hidden(params, tokens, config, lengths, context, segments=segments, remat=remat)
    return unembed(params, x, config)


def hidden(
    params: Params,
    tokens: IdsOrVectors,
    config: Config,
    lengths: Int[Array, "B"] | None = None,
    context: Keys | None = None,
    *,
    segments: Int[Array, "B T"] | None = None,
    remat: bool = False,
) -> Float[Array, "B T D"]:
    """Compute the last layer's output for every token, before the last norm, without a cache.

    context: the result of `kvjax.models.encoder.encode`. segments: a row holds several texts, numbered from
    left to right; tokens see only their own text, and its positions start at 0. remat: as in `Memory`. Raises
    ValueError if a layer would carry something from one segment to the next (`carrying`).
    """
    return run_layers(params, tokens, config, lengths, context, segments=segments, remat=remat).x


def run_layers(
    params: Params,
    tokens: IdsOrVectors,
    config: Config,
    lengths: Int[Array, "B"] | None = None,
    context: Keys | None = None,
    *,
    segments: Int[Array, "B T"] | None = None,
    remat: bool = False,
    on_mesh: OnMesh | None = None,
    passes: tuple[int, int] | None = None,
    look: Callable[[LayerValues], Any] | None = None,
) -> LayerOutputs:
    """Run all layers as `hidden` does, and also return what the layers collected.

    on_mesh, passes and look: as in `Memory`.
    """
    b, t = tokens.shape[:2]
    # Every device attends to whole texts here.
    on_mesh = None if on_mesh is None else on_mesh.with_whole_tokens()
    lengths = jnp.full((b,), t, jnp.int32) if lengths is None else lengths
    at = positions(tokens, lengths, jnp.zeros_like(lengths))
    turn, seen = (at.pos, at.pos) if segments is None else _in_segments(config, segments, at.pos)

    def attend(layer: Layer, x: Projected, state: GroupState) -> tuple[Array, GroupState, Left]:
        if segments is not None:
            layer = layer._replace(window=min(t, layer.window or t))
        q = rotated(layer.rope, x.q, turn, at.length)
        k = None if x.k is None else rotated(layer.rope, x.k, turn, at.length)
        new = new_keys(layer, k, x.v, seen)
        out, _, scores = attend_new(layer, x, q, new, (), seen, in_places=segments is None, on=on_mesh)
        return out, state, published_by(layer, state, k, x.v, scores)

    def recur(layer: Layer, step: Step, state: GroupState) -> tuple[Array, GroupState, Left]:
        return step(None, at.pos >= 0)[0], state, {}

    def held(layer: Layer, state: GroupState) -> list[Keys]:
        return [] if context is None else [context]

    nothing = (NOTHING,) * len(layers_of_groups(params))
    memory = Memory(
        seen, attend, recur, held, remat=remat, on_mesh=on_mesh, segments=segments, passes=passes, look=look,
        alike=(0,) * len(nothing),
    )  # fmt: skip
    return decode_layers(params, tokens, config, memory, nothing)


def carrying(config: Config) -> list[int]:
    """Find the layers that would carry information from one text of a row to the next."""

    def apart(mixer: Mixer) -> bool:
        return not mixer.state(config) if mixer.in_segments is None else mixer.in_segments

    return [i for i in range(config.layers) if not apart(mixer_of(config, i))]


def _in_segments(
    config: Config, segments: Int[Array, "B T"], pos: Int[Array, "B T"]
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Rotation positions, from 0 in every segment, and positions that hide segments from each other.

    Segments are two rows' lengths apart, so a window of one row's length hides all others.
    """
    if layers := carrying(config):
        raise ValueError(
            f"layers {layers} carry something from token to token, which texts of one row would share: give "
            "each text a row of its own, or join them as one text"
        )
    t = segments.shape[1]
    offset = segment_offsets(segments)
    number = segment_numbers(segments, segments.shape)
    return offset, jnp.where(pos >= 0, 2 * t * number + offset, -1)
