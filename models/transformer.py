"""One functional decoder: embedding, layers of mixer and feed-forward, logits.

The file knows nothing of caches or methods: every layer's mixer meets its past through a `Memory` that the
caller supplies, together with a state that only that memory understands.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.models.attending import attend_new, new_keys, rotary
from kvjax.models.config import Config
from kvjax.models.feed_forward import mlp_of
from kvjax.models.layers import Params, rms_norm
from kvjax.models.mixer import AttentionLogits, Given, Layer, Memory, Projected, Step
from kvjax.models.mixers.attention import lending, mixer_of
from kvjax.ops.attention.union import Keys
from kvjax.ops.base.dtypes import wide

# Ids, or the vectors that a decoder is given in their place.
IdsOrVectors = Int[Array, "B T"] | Float[Array, "B T D"]


class Positions(NamedTuple):
    """Where the new tokens stand: pos [B, T] (-1 on padding), length [B] tokens so far, these included."""

    pos: Int[Array, "B T"]
    length: Int[Array, "B"]


class Lent(NamedTuple):
    """What a layer that others read leaves: its rotated keys, its values where it stores them, its logits."""

    k: Float[Array, "B K T F"]
    v: Float[Array, "B K T V"] | None
    scores: AttentionLogits | None = None


def block(
    p: Params, x: Float[Array, "B T D"], layer: Layer, mlp: Any, memory: Memory, state: Any
) -> tuple[Float[Array, "B T D"], Any, Any]:
    """One decoder layer: x + mixer, then x + feed-forward, with the family's norms around them."""
    config = layer.config

    def norm(name: str, y: Array) -> Array:
        return rms_norm(y, p[name], config.norm_eps, config.norm_offset) if name in p else y

    collected = None
    if layer.mixer.shapes(config):
        with jax.named_scope("attention"):
            mixed = x if layer.input is None else layer.input
            out, state, collected = layer.mixer(p, norm("attn_norm", mixed), layer, memory, state)
            x = x + norm("attn_post_norm", out)
    if not mlp.shapes(config):
        return x, state, collected
    with jax.named_scope("mlp"):
        x = x + norm("mlp_post_norm", mlp(p, norm("mlp_norm", x), config))
    return x, state, collected


def stack(
    params: Params,
    tokens: IdsOrVectors,
    config: Config,
    memory: Memory,
    states: tuple[Any, ...],
    above: dict[int, Given] | None = None,
) -> tuple[Float[Array, "B _ D"], tuple[Any, ...], tuple[Any, ...]]:
    """All layers: returns (hidden, new states, what the memory collected), the last two one per group.

    hidden is that of every new token, or of each row's last one where all that is left needs no other.

    A group's state is carried whole through its layers (never as scan inputs and outputs, which would make a
    second cache); what is collected is stacked on a leading layer axis. above: what layers that are read from
    below have to give.
    """
    x = tokens
    if x.ndim == 2:
        x = params["embed"][tokens] * jnp.asarray(config.embed_scale, params["embed"].dtype)
    first_values = _first_values(params, x, config, memory, states[0])
    lends, passed, hidden = lending(config), dict(above or {}), {}
    shows = {mixer_of(config, i).weights_source for i in range(config.layers)}
    new_states, collected, first = [], [], 0
    for g, (p, state) in enumerate(zip(params["layers"], states, strict=True)):
        size = next(iter(p.values())).shape[0]
        mixer, mlp = mixer_of(config, first), mlp_of(config, first)
        hidden[first] = x
        if memory.last is not None and ends_early(config, first):
            x, memory = _last_only(x, memory)
        reads = mixer.value_source if mixer.source is None else mixer.source
        kind = Layer(g, 0, first, config.window(first), mixer.rope(config, first), mixer, config)
        kind = kind._replace(
            lends=first in lends,
            shows=first in shows,
            given=None if reads is None else passed[reads],
            shown=None if mixer.weights_source is None else passed[mixer.weights_source].scores,
            first_values=first_values if mixer.value_mix is not None else None,
            kv_hidden=None if mixer.kv_input is None else hidden[mixer.kv_input],
            input=hidden[config.inputs[first]] if beside(config, first) else None,
            pos=memory.pos,
            tokens=tokens,
            embed=params.get("embed"),
        )

        def body(carry, inputs, kind=kind, mlp=mlp, memory=memory):
            x, state = carry
            p, index = inputs
            layer = kind._replace(index=index, number=kind.number + index)
            x, state, out = block(p, x, layer, mlp, memory, state)
            return (x, state), out

        if size == 1:
            (x, state), out = body((x, state), (jax.tree.map(lambda w: w[0], p), 0))
            out = jax.tree.map(lambda y: y[None], out)
        else:
            (x, state), out = jax.lax.scan(body, (x, state), (p, jnp.arange(size, dtype=jnp.int32)))
        new_states.append(state)
        collected.append(out)
        if first in lends:
            passed[first] = _given(state, out)
        first += size
    return x, tuple(new_states), tuple(collected)


def beside(config: Config, layer: int) -> bool:
    """Whether a layer's mixer takes the input of a layer below."""
    return bool(config.inputs) and config.inputs[layer] is not None


def ends_early(config: Config, first: int) -> bool:
    """Whether layers `first` and above need no hidden state but the last token's to answer it.

    They keep nothing of their own inputs: they read slots from below, or project theirs from a hidden state
    that was there before (YOCO, arXiv:2405.05254; SwiftKV, arXiv:2410.03960).
    """
    mixers = [mixer_of(config, i) for i in range(first, config.layers)]
    below = ((m.source, m.kv_input) for m in mixers)
    return all(any(at is not None and at <= first for at in pair) for pair in below)


def _last_only(x: Float[Array, "B T D"], memory: Memory) -> tuple[Float[Array, "B 1 D"], Memory]:
    last = memory.last
    assert last is not None
    pos = jnp.take_along_axis(memory.pos, last[:, None], axis=1)
    return jnp.take_along_axis(x, last[:, None, None], axis=1), memory._replace(pos=pos, last=None)


def _given(state: Any, collected: Any, above: bool = False) -> Given:
    """What a lending layer, alone in its group, gives to those that read it."""
    k, v, scores = (
        jax.tree.map(lambda x: x[0], getattr(collected, name, None)) for name in ("k", "v", "scores")
    )
    return Given(state, 0, k, v, above, scores)


def _first_values(
    params: Params, x: Float[Array, "B T D"], config: Config, memory: Memory, state: Any
) -> Array | None:
    """The values of layer 0, where some layer adds them to its own; the state stays as it was."""
    mixers = [mixer_of(config, i) for i in range(config.layers)]
    if all(m.value_mix is None for m in mixers):
        return None
    p = jax.tree.map(lambda w: w[0], params["layers"][0])
    if "attn_norm" in p:
        x = rms_norm(x, p["attn_norm"], config.norm_eps, config.norm_offset)
    layer = Layer(0, 0, 0, config.window(0), mixers[0].rope(config, 0), mixers[0], config, pos=memory.pos)
    return mixers[0].first_values(p, x, layer, memory, state)


def decode_layers(
    params: Params, tokens: IdsOrVectors, config: Config, memory: Memory, states: tuple[Any, ...]
) -> tuple[Float[Array, "B _ D"], tuple[Any, ...], tuple[Any, ...]]:
    """`stack`, also where layers read from above (LCKV, arXiv:2405.10637).

    There a token sees the keys of earlier tokens only, so they are a fixed point of the stack: T - 1 passes
    reach it from any start, since every pass settles one token more. A single token sees its past alone.
    """
    first, sources = 0, {}
    for g, p in enumerate(params["layers"]):
        sources |= {first: g} if first in lending(config) else {}
        first += next(iter(p.values())).shape[0]
    reads = {i: mixer_of(config, i).source for i in range(config.layers)}
    read_above = {source for i, source in reads.items() if source is not None and source > i}
    if not read_above:
        return stack(params, tokens, config, memory, states)

    def handed(lent: dict[int, tuple[Array | None, Array | None]]) -> dict[int, Given]:
        return {s: Given(states[sources[s]], 0, *lent[s], above=True) for s in read_above}

    def once(lent: dict[int, Any]) -> dict[int, Any]:
        _, _, collected = stack(params, tokens, config, memory, states, handed(lent))
        given = {s: _given(None, collected[sources[s]]) for s in read_above}
        return {s: (g.k, g.v) for s, g in given.items()}

    lent: dict[int, Any] = {s: (None, None) for s in read_above}
    if tokens.shape[1] > 1:
        b, t = tokens.shape[:2]
        start = {}
        for s in read_above:
            slots = mixer_of(config, s).slots(config)
            dtype = params["norm"].dtype
            k, v = (jnp.zeros((b, slots.heads, t, width), dtype) for width in (slots.key, slots.value))
            start[s] = (k, None if slots.shared else v)
        lent = jax.lax.scan(lambda x, _: (once(x), None), start, None, length=t - 1)[0]
    return stack(params, tokens, config, memory, states, handed(lent))


def unembed(params: Params, x: Float[Array, "*b D"], config: Config) -> Float[Array, "*b V"]:
    """Logits in promote(float32, x), behind the last norm."""
    x = rms_norm(x, params["norm"], config.norm_eps, config.norm_offset)
    w = params["embed"].T if config.tied else params["unembed"]
    y = jnp.matmul(x, w, preferred_element_type=wide(x))
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
) -> Float[Array, "B T V"]:
    """Logits of every token without a cache; context: what `kvjax.models.encoder.encode` made of one.

    >>> import jax
    >>> from kvjax.models.params import init
    >>> config = Config(vocab=32, d_model=16, layers=2, heads=2, kv_heads=1, head_dim=8, d_ff=32)
    >>> params = init(config, jax.random.key(0))
    >>> forward(params, jax.numpy.zeros((1, 5), "int32"), config).shape
    (1, 5, 32)
    """
    return unembed(params, hidden(params, tokens, config, lengths, context), config)


def hidden(
    params: Params,
    tokens: IdsOrVectors,
    config: Config,
    lengths: Int[Array, "B"] | None = None,
    context: Keys | None = None,
) -> Float[Array, "B T D"]:
    """What the last layer leaves of every token, before the last norm, without a cache."""
    b, t = tokens.shape[:2]
    lengths = jnp.full((b,), t, jnp.int32) if lengths is None else lengths
    at = positions(tokens, lengths, jnp.zeros_like(lengths))

    def attend(layer: Layer, x: Projected, state: None):
        q = rotary(layer, x.q, layer.pos, at.length)
        k = None if x.k is None else rotary(layer, x.k, at.pos, at.length)
        new = new_keys(layer, k, x.v, at.pos)
        out, _, scores = attend_new(layer, x, q, new, (), layer.pos)
        return out, None, Lent(new.k, x.v, scores if layer.shows else None) if layer.lends else None

    def recur(layer: Layer, step: Step, state: None):
        return step(None, at.pos >= 0)[0], None, None

    def held(layer: Layer, state: None) -> list[Keys]:
        return [] if context is None else [context]

    nothing = (None,) * len(params["layers"])
    return decode_layers(params, tokens, config, Memory(at.pos, attend, recur, held), nothing)[0]
