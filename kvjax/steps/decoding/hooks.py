"""Hooks: what single mechanisms add to a layer's decode step before and after attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.compress.below import over_below
from kvjax.grammar.fitted import of_layer
from kvjax.models.attending import published_by, rotated
from kvjax.models.stacking import layers_of_groups
from kvjax.state.axes import lie_apart, pinned_to
from kvjax.state.code_forms import completed
from kvjax.state.write import after
from kvjax.steps.decoding.at_layer import AtLayer
from kvjax.steps.decoding.attend import attend_other_rotation, met_by
from kvjax.steps.decoding.evict_now import EvictionInputs, evict_hidden, evict_one
from kvjax.steps.decoding.past import past_of_others
from kvjax.steps.decoding.prefetch import arrived, next_one
from kvjax.steps.decoding.update_traces import LayerRecords, carried
from kvjax.steps.shared.rotate import rotated_queries, rotations_over
from kvjax.steps.shared.run import answered

# --- before attention ----------------------------------------------------------------------------------


def evict_what_token_hides(here: AtLayer) -> AtLayer:
    """Evict the slots that the token hides, from itself too."""
    token = here.token
    return here.holding(
        evict_hidden(
            here.token.run, here.gm, here.layer, here.state, here.inputs(), token.append, token.cache.pools
        )
    )


def read_other_layers(here: AtLayer) -> AtLayer:
    """Attend to the slots, or to the values, of another layer."""
    return here._replace(past=past_of_others(here.token.gms, here.gm, here.layer, here.state))


def complete_pair(here: AtLayer) -> AtLayer:
    """Read the directions of merged keys and values, which are stored with the layer below."""
    whole = completed(here.token.cache.groups, here.layer.group, here.state)
    return here._replace(past=here.past._replace(parts=whole.parts))


def decode_over_below(here: AtLayer) -> AtLayer:
    """Decode the body relative to that of the layer below, and pass the result to the layer above."""
    state, rows = over_below(here.gm, here.state, here.layer.taken.get("below"))
    here = here._replace(past=here.past._replace(parts=state.parts))
    return here.leaving(decoded=rows) if "decoded" in here.layer.publishes else here


def bring_layers(here: AtLayer) -> AtLayer:
    """Take this layer's slots as they arrive from host memory, and start the copy of the next layer's."""
    past, pools = arrived(here.past, here.pools)
    state = next_one(here.state, here.layer.index, here.token.cache.pools)
    return here._replace(past=past, pools=pools, state=state)


def rotate_queries(here: AtLayer) -> AtLayer:
    """Rotate the queries by their positions; keys are stored rotated."""
    token = here.token
    return here._replace(q=rotated(here.layer.rope, here.x.q, token.at[:, None], token.length))


def rotate_queries_and_keys(here: AtLayer) -> AtLayer:
    """Rotate the queries and the keys they attend to, which are stored unrotated, as the phase says."""
    token, past = here.token, here.past
    rotation, *others = rotations_over(
        here.token.run, token.at, past.parts, past.index, here.pools, here.state.rows
    )
    q = rotated_queries(here.layer, here.x.q, rotation, token.length)
    return here._replace(q=q, past=past._replace(rotation=rotation), others=tuple(others))


def send_queries(here: AtLayer) -> AtLayer:
    """Shard the queries like the slots: a device with slots of all heads gets all queries.

    Otherwise the compiler might move slots to the queries of their heads.
    """
    on = here.token.run.on_mesh
    if on is None or not any(lie_apart(part, on) for part in here.past.parts):
        return here
    heads = {*on.rules.mesh_axes("heads")} & {*on.rules.mesh_axes("slots")}
    return here._replace(q=pinned_to(here.q, on, "batch", None if heads else "heads", None, None))


def answer_for_evicted(here: AtLayer) -> AtLayer:
    """Add attention over evicted slots, as the merge estimates it."""
    found = answered(here.gm, here.layer, here.state, here.q, here.token.params)
    return here._replace(parts=(*here.parts, *found))


def attend_in_other_rotations(here: AtLayer) -> AtLayer:
    """Attend to the slots in the further rotations of its phase."""
    found = [attend_other_rotation(here, rotation) for rotation in here.others]
    return here._replace(parts=(*here.parts, *found))


# --- after attention -----------------------------------------------------------------------------------


def compare_slots_with_query(here: AtLayer) -> AtLayer:
    """Add the numbers that traces compute from slots and the query to what slots received."""
    token = here.token
    received = met_by(here.gm, here.past, here.q, token.at, here.pools, here.received, here.layer)
    return here._replace(received=received)


def count_stored_tokens_only(here: AtLayer) -> AtLayer:
    """Ignore the attention of tokens that are not stored."""
    stored = here.token.append[:, None, None]
    return here._replace(received=jax.tree.map(lambda m: jnp.where(stored, m, 0.0), here.received))


def publish(here: AtLayer) -> AtLayer:
    """Publish what other layers take from this one."""
    return here.leaving(**published_by(here.layer, here.state, None, None, here.logits))


def leave_all_received(here: AtLayer) -> AtLayer:
    """Pass what slots received to the end of the step, when all layers that read them have run."""
    return here.leaving(collected=LayerRecords(here.received, here.q, {}))


def carry_rows(here: AtLayer) -> AtLayer:
    """Record what rows carry to the next step."""
    return here._replace(rows=carried(here.gm, here.layer, here.state, here.inputs()))


def evict(here: AtLayer) -> AtLayer:
    """Evict the slot with the lowest score from KV heads beyond their budget."""
    token, gm, layer, out, weights = here.token, here.gm, here.layer, here.out, None
    assert out is not None and gm.keep is not None and gm.keep.score is not None
    if gm.keep.score.weights:
        mine = layers_of_groups(token.params)[layer.group]
        weights = jax.tree.map(lambda w: w[layer.index], mine)
    # A slot moved to the second tier is written where this layer's attention has been read already.
    length = token.length if gm.keep.lower is None else after(token.length, out)
    fitted = of_layer(token.params, layer.number)
    now = EvictionInputs(
        here.received, here.q, here.rows, length, token.append, token.cache.pools, weights, fitted
    )
    state, rows, lost = evict_one(here.token.run, gm, layer, here.state, now)
    return here._replace(state=state, rows=here.rows | rows, out=broken(out, lost))


def leave_to_end(here: AtLayer) -> AtLayer:
    """Pass what the end of the step needs of this layer."""
    received = () if here.gm.at_once else here.received
    return here.leaving(collected=LayerRecords(received, None, here.rows))


def broken(x: Float[Array, "B *_"], lost: Bool[Array, "B"]) -> Float[Array, "B *_"]:
    """x, with NaN in rows without an empty slot or with unrankable slots, since a step cannot raise."""
    return jnp.where(lost.reshape(-1, *(1,) * (x.ndim - 1)), jnp.asarray(jnp.nan, x.dtype), x)
