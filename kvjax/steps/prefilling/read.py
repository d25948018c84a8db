"""Runs many new tokens through a model, over what a cache holds, and records observations."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.compress.below import over_below
from kvjax.compress.group import GroupMethod
from kvjax.compress.select import ComputedTokens
from kvjax.grammar.calls import met, observations
from kvjax.grammar.fitted import of_layer
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Carried, Hiding, Inputs, Observation, SlotObservation, Trace
from kvjax.grammar.phase import PairRotation
from kvjax.keep.observations.observe import Mass, UnrotatedKeys
from kvjax.mesh.on_mesh import OnMesh
from kvjax.models.attending import attend_new, new_keys, published_by, rotated
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer, Memory, Projected, Step
from kvjax.models.transformer import (
    IdsOrVectors,
    LayerOutputs,
    Positions,
    decode_layers,
    positions,
    unembed,
)
from kvjax.ops.attention.in_common import for_rows
from kvjax.ops.attention.union import Keys
from kvjax.state.axes import lie_apart, pinned_to
from kvjax.state.cache import NOTHING, Cache, GroupState, Pages
from kvjax.state.code_forms import completed
from kvjax.steps.decoding.each_token import Shared, attend_each, picks
from kvjax.steps.prefilling.blocks import LEFT, attend_to_blocks, left_taken, reads_blocks
from kvjax.steps.prefilling.collect import by_owner, carried_after, decoded, past_sets, surprisals
from kvjax.steps.prefilling.drop_masks import hidden, remembered
from kvjax.steps.prefilling.lora import Marks, marked, marked_output, standing
from kvjax.steps.prefilling.narrowing import narrow_of, narrowing
from kvjax.steps.shared.fitted_arrays import attach_arrays, groups_with_arrays
from kvjax.steps.shared.rotate import (
    attend_rotated,
    met_keys,
    rope_of_keys,
    rotated_keys,
    rotated_queries,
    rotations_of,
)
from kvjax.steps.shared.run import Run, alike, answered, held, taken_by


class PrefillOutputs(NamedTuple):
    """Everything that a prefill computed, before anything is compressed.

    fresh: per group of layers a `ComputedTokens`, or the new recurrent states by name, or None if its layers
    add nothing. positions, tokens: of the tokens that were read. narrowed: the positions of those that the
    topmost layers read, if the method narrows prompts (`Keep.narrow`). source: for every token that was read
    its index among the given ones, or -1 if it is padding or not one of them, if the method has a `reread`.
    logits: of each row's last token, or of every token. question: the last tokens of the whole text, for rows
    that do not end in this chunk, and their number. hidden: the last layer's outputs before the final
    norm, if gradients need them.
    """

    fresh: tuple[ComputedTokens | dict[str, Array] | None, ...]
    positions: Positions
    tokens: IdsOrVectors
    logits: Float[Array, "B *_ V"]
    narrowed: Int[Array, "B M"] | None = None
    source: Int[Array, "B M"] | None = None
    question: tuple[Int[Array, "B W"], Int[Array, "B"]] | None = None
    hidden: Float[Array, "B _ D"] | None = None


class _Recorded(NamedTuple):
    """The observations to record for new tokens. slot_observations: those computed from queries and keys."""

    masses: tuple[Mass, ...]
    slot_observations: tuple[SlotObservation, ...]
    others: tuple[Observation, ...]
    traces: tuple[Trace, ...]


def _asked(needs: frozenset) -> _Recorded:
    return _Recorded(
        masses=tuple(sorted((o for o in needs if isinstance(o, Mass)), key=key_of)),
        slot_observations=tuple(sorted((o for o in needs if isinstance(o, SlotObservation)), key=key_of)),
        others=tuple(o for o in needs if not isinstance(o, Mass | Trace | SlotObservation | Hiding)),
        traces=tuple(o for o in needs if isinstance(o, Trace)),
    )


class _Reading(NamedTuple):
    """What reading a layer needs.

    narrows: whether upper layers read fewer tokens. as_steps, marks: as in `read_tokens`. on: the mesh over
    which tokens may be split. first: whether the tokens are a first prompt, of which a method may read
    blocks alone. picking: what layers share, if every token attends to what it picks.
    """

    run: Run
    params: Params
    tokens: IdsOrVectors
    at: Positions
    gms: tuple[GroupMethod, ...]
    states: tuple[GroupState, ...]
    pools: tuple[Pages, ...]
    asked: _Recorded
    narrows: bool
    as_steps: bool
    on: OnMesh | None
    marks: Marks | None
    first: bool
    picking: Shared | None

    def attend(self, layer: Layer, x: Projected, state: GroupState):
        run, at, gm = self.run, self.at, self.gms[layer.group]
        x = x if self.marks is None else marked(layer, x, self.marks, self.params)
        held, rows = state, None
        if gm.sees_below or "decoded" in layer.publishes:
            held, rows = over_below(gm, state, layer.taken.get("below"))
        held = completed(self.states, layer.group, held)
        past = past_sets(layer, held, self.pools)
        # A prefill that ends early has only the queries of the last tokens, over the keys of all.
        pos = layer.pos if self.narrows else at.pos
        stands, meets = (layer.pos, layer) if self.marks is None else standing(layer, self.marks)
        by = pos if stands is layer.pos else stands
        k = stored = x.k if run.unrotated or x.k is None else rotated(layer.rope, x.k, by, at.length)
        v = x.v
        if self.as_steps and k is not None:
            k, v = decoded(gm, layer, pos, (k, v))
        if run.unrotated or self.asked.slot_observations or gm.hiding is not None:
            past = [for_rows(keys, pos.shape[0]) for keys in past]
        new = new_keys(layer, k, v, pos)
        rotations: tuple[PairRotation, ...] = ()
        if run.unrotated:
            stood = [*(s.pos for s in past if s.pos is not None), pos[:, None]]
            rotations = rotations_of(run, stands, stood, gm.first if self.narrows else None, state.rows)
            q = rotated_queries(layer, x.q, rotations[0], at.length)
        else:
            q = rotated(layer.rope, x.q, stands, at.length)
        fitted = of_layer(self.params, layer.number)
        raw, met = (new.k if y is None else y for y in (x.k, stored))
        met = rotated(layer.rope, met, pos, at.length) if run.unrotated else met
        inputs = Inputs(q, x.q, raw, x.hidden, pos, at.length, fitted, self._ids(pos), met, x.v)
        mesh, since = None if self.on is None else self._mesh(self.on, x.q.shape[2]), []
        if gm.hiding is not None:
            # No kernel hides slots from some queries alone, nor do devices that attend to each other's slots.
            (*past, new), since = hidden(gm, inputs, [*past, new], remembered(layer, state, self.pools))
            mesh = None
        gone = [] if gm.answering is None else answered(gm, layer, state, q, self.params)
        in_places = self.marks is None and gm.hiding is None and not self.narrows
        mass, picked = tuple(o.reduction for o in self.asked.masses), {}
        if self.first and gm.read_prompt is not None and reads_blocks(gm, q.shape[2]):
            q, (keys,) = met_keys(layer, x, [new], rotations[0], at.length) if rotations else (q, [new])
            out, found, left = attend_to_blocks(gm, layer, x, q, keys, inputs, mass, run.implementation)
            scores, picked = None, {LEFT: left} if LEFT in layer.publishes else {}
        elif self.picking is not None and picks(self.gms, layer):
            out, found, scores = attend_each(self.picking, layer, x, (k, v), held, at), (), None
        else:
            how: dict[str, Any] = dict(in_order=meets is layer, in_places=in_places, mass=mass, on=mesh)
            how |= dict(implementation=run.without_gpu)
            if rotations:
                out, found, scores = attend_rotated(meets, x, new, past, rotations, at.length, gone, **how)
            else:
                out, found, scores = attend_new(meets, x, q, new, past, meets.pos, gone, **how)
        out = out if self.marks is None else marked_output(layer, out, self.marks, self.params)
        sets = [*past, new]
        if rotations and self.asked.slot_observations:
            sets = [
                rotated_keys(rope_of_keys(layer), s, rotations[0], i, at.length) for i, s in enumerate(sets)
            ]
        fresh = self._observed(layer, state, inputs, found, sets, since)._replace(k=stored, v=x.v)
        left = picked | ({"decoded": rows} if "decoded" in layer.publishes else {})
        return out, state, left | published_by(layer, state, k, v, scores) | {"collected": fresh}

    def _ids(self, pos: Int[Array, "B _"]) -> Int[Array, "B _"] | None:
        """Return the ids of the tokens at these positions; None if vectors were given."""
        if self.tokens.ndim == 3 or not self.narrows:
            return None if self.tokens.ndim == 3 else self.tokens
        return jnp.take_along_axis(self.tokens, jnp.maximum(pos - self.at.pos[:, :1], 0), axis=1)

    def _mesh(self, on: OnMesh, tokens: int) -> OnMesh | None:
        """Return the mesh, if this many tokens are split over it or devices hold whole KV heads."""
        parts = (part for state in self.states for part in state.parts)
        if on.token_axes(tokens):
            return on
        return None if any(lie_apart(part, on) for part in parts) else on

    def _observed(
        self, layer: Layer, state: GroupState, inputs: Inputs, found: tuple, sets: list[Keys], since: list
    ) -> ComputedTokens:
        """Compute a layer's observations. found: every set's masses; since: from where sets are hidden."""
        asked, q, pos = self.asked, inputs.q, inputs.pos
        copies = self.gms[layer.group].copies
        # Lists of slots: KV heads, or query heads if the method selects for each of them.
        k = sets[-1].k if copies == 1 else jnp.repeat(sets[-1].k, copies, axis=1)
        received = tuple(
            {key_of(o): m for o, m in zip(asked.masses, of_set, strict=True)} for of_set in found
        )
        if asked.slot_observations:
            received = received or ({},) * len(sets)
            compared = [
                {
                    key_of(o): met(o, q, pos, k, at, layer.number)
                    for o in asked.slot_observations
                    if at is not None
                }
                for k, at in [*((s.k, s.pos) for s in sets[:-1]), (k, sets[-1].pos)]
            ]
            received = tuple(a | b for a, b in zip(received, compared, strict=True))
        if since:
            received = tuple(a | b for a, b in zip(received or ({},) * len(sets), since, strict=True))
        rows = {
            key_of(o): carried_after(o, inputs, layer, state) for o in asked.others if isinstance(o, Carried)
        }
        observed = {
            key_of(o): o.read(rows[key_of(o)]) if isinstance(o, Carried) else o(inputs) for o in asked.others
        }
        traces = {key_of(t): t.start(inputs, k.shape[1]) for t in asked.traces}
        return ComputedTokens(None, None, observed, received, traces, rows=rows)

    def recur(self, layer: Layer, step: Step, state: GroupState):
        past = state.state
        out, new = step(None if past is None else past.layer(layer.index), self.at.pos >= 0)
        return out, state, {"collected": new}


def read_tokens(
    run: Run,
    params: Params,
    tokens: IdsOrVectors,
    lengths: Int[Array, "B"],
    cache: Cache | None,
    needs: frozenset,
    as_steps: bool = False,
    marks: Marks | None = None,
    at: Positions | None = None,
    for_gradients: bool = False,
    picking: bool = False,
) -> PrefillOutputs:
    """Run new tokens through all layers, over what the cache holds, without storing anything.

    as_steps: computes what single steps would: tokens see each other as they will be stored, in the method's
    codes, and the logits are those of all tokens. marks: which tokens are projected with additional weights.
    at: positions of the tokens, increasing along a row, if they do not follow what the cache holds.
    for_gradients: returns the last layer's outputs, too, and computes every layer again in a gradient.
    picking: every token attends to the slots that the method's read picks for it.
    """
    on = run.on_mesh.with_whole_tokens() if as_steps and run.on_mesh is not None else run.on_mesh
    tokens = pinned_to(tokens, on, *("batch", "tokens", None)[: tokens.ndim])
    lengths = pinned_to(lengths, on, "batch")
    if at is None:
        at = positions(tokens, lengths, jnp.zeros_like(lengths) if cache is None else cache.next)
    gms, asked = groups_with_arrays(run.groups(params), params, cache), _asked(needs)
    narrow = narrowing(run, params, at, cache is None)
    states = (NOTHING,) * len(gms) if cache is None else attach_arrays(cache.groups, gms)
    pools = () if cache is None else cache.pools
    first = cache is None and not as_steps and marks is None
    sparse = first and any(gm.read_prompt is not None for gm in gms)
    sparse = sparse and any(reads_blocks(gm, at.pos.shape[1]) for gm in gms)
    reading = _Reading(
        run, params, tokens, at, gms, states, pools, asked, narrow is not None, as_steps, on, marks, first,
        Shared(run, cache, gms) if picking and cache is not None else None,
    )  # fmt: skip

    last = jnp.maximum(lengths - 1, 0)
    # What a segment attends to depends on all of its queries.
    early = None if needs or as_steps or narrow is not None or sparse else last
    memory = Memory(
        at.pos,
        reading.attend,
        reading.recur,
        held,
        early,
        run.without_gpu,
        narrow,
        takes=taken_by(gms, left_taken(gms, at.pos.shape[1]) if sparse else {}),
        on_mesh=on,
        remat=for_gradients,
        alike=alike(gms),
    )
    outputs = _outputs(reading, decode_layers(params, tokens, run.config, memory, states), last)
    return outputs if for_gradients else outputs._replace(hidden=None)


def _outputs(reading: _Reading, ran: LayerOutputs, last: Int[Array, "B"]) -> PrefillOutputs:
    """Return what the layers leave of new tokens, and logits: of all tokens that are read as steps are.

    last: the place of every row's last token, if all layers read all tokens.
    """
    params, config, asked, on = reading.params, reading.run.config, reading.asked, reading.on
    x, narrowed = ran.x, ran.pos if reading.narrows else None
    late = [t for t in asked.traces if t.after_layers]
    surprise = None
    if late and narrowed is None:
        surprise = surprisals(params, x, reading.tokens, reading.at.pos, config)
    if narrowed is not None:
        last = jnp.maximum((narrowed >= 0).sum(-1, dtype=jnp.int32) - 1, 0)
    said = x
    if not reading.as_steps:
        said = x[:, 0] if x.shape[1] == 1 else jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
    logits = unembed(params, said, config)
    logits = pinned_to(logits, on, "batch", *(None,) * (logits.ndim - 2), "vocab")
    fresh = by_owner(reading.gms, config, ran.collected, asked.masses)
    fresh = fresh if on is None else _pinned(fresh, on)
    if surprise is not None:
        fresh = tuple(_told(f, late, surprise) if isinstance(f, ComputedTokens) else f for f in fresh)
    return PrefillOutputs(fresh, reading.at, reading.tokens, logits, narrowed, hidden=x)


def _told(fresh: ComputedTokens, late: list[Trace], surprise: Float[Array, "B T"]) -> ComputedTokens:
    """Add to what a group computed the traces of new tokens that are known only after all layers have run."""
    told = {
        key_of(t): jnp.broadcast_to(surprise[None, :, None], fresh.traces[key_of(t)].shape)
        for t in late
        if key_of(t) in fresh.traces
    }
    return fresh._replace(traces=fresh.traces | told)


def _pinned(fresh: tuple, on: OnMesh) -> tuple:
    """Shard keys and values that a prompt computed, as large as a cache, as the cache will be."""

    def pin(x: Array | None) -> Array | None:
        return None if x is None else pinned_to(x, on, "layers", "batch", "kv_heads", "tokens", None)

    return tuple(f._replace(k=pin(f.k), v=pin(f.v)) if isinstance(f, ComputedTokens) else f for f in fresh)


def needs_of(run: Run, params: Params, compress: bool = True) -> frozenset:
    """Collect what settling a prompt needs: the keeps' observations and traces, and unrotated keys to store.

    Traces are updated whether or not slots are evicted now.
    """
    out = frozenset({UnrotatedKeys()}) if run.unrotated else frozenset()
    narrow = narrow_of(run)
    out |= narrow.needs if narrow is not None and compress else frozenset()
    for gm in run.groups(params):
        out |= {*gm.traces, *(o for trace in gm.traces for o in trace.needs)}
        out |= set() if gm.asks is None else {gm.asks}
        # What codecs learn cannot be undone, unlike tokens that were stored without a selection.
        out |= {*gm.learns} if compress else set()
        if gm.keep is not None and gm.keep.score is not None and (compress or gm.evicting):
            out |= {*observations(gm.keep)}
    return out
