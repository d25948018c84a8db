"""Which stores fit which model: codecs, merged layers and unrotated keys against what layers keep."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.base.errors import InputError
from kvjax.compat.model_facts import LayerFacts, refuse
from kvjax.grammar import Method
from kvjax.grammar.calls import shaped
from kvjax.grammar.fitted import fitted_words, learns, sees_below
from kvjax.grammar.read_kinds import Copying
from kvjax.models.config import Config
from kvjax.models.mixers.attention import mixer_of
from kvjax.place.layer_pairs import pairs_of
from kvjax.state.codes import BELOW, at_layer, bind


def check_store(method: Method, config: Config, facts: LayerFacts) -> None:
    """Raise InputError if codecs, merged layers or unrotated keys do not fit what layers store."""
    _check_codecs(method, config)
    if method.stack is not None and not pairs_of(method.stack, config):
        refuse(
            method,
            "it merges neighbouring layers that keep keys and values of all tokens, each for itself, and "
            f"from layer {method.stack.first(config.layers)} of {config.layers} up there are no two of them",
            "a lower start or int4",
        )
    if (
        method.store is not None
        and method.store.unrotated
        and any(s.factors or s.ids for s in facts.all_slots)
    ):
        refuse(method, "it stores keys before their rotation, and the model stores other things", "int8")
    keep = method.keep
    apart = keep is not None and keep.per_query_head and config.heads != config.kv_heads
    learnt = learns(method.store)
    if learnt and any(s.factors or s.ids or s.shared for s in facts.all_slots):
        refuse(
            method, "its codes learn from queries that meet keys, and the model stores other things", "kivi"
        )
    store = method.store
    below = store is not None and sees_below((store.keys, store.values))
    kinds = [mixer_of(config, i).slots(config) for i in range(config.layers)]
    # One array per token in all layers is enough if no map was fitted to keys and values.
    one = bool(facts.slots) and all(s == facts.slots[0] and s.shared for s in facts.slots)
    plain = all(s is not None and not (s.factors or s.ids or s.shared or s.fixed) for s in kinds)
    plain |= one and len(facts.slots) == config.layers and not [*fitted_words(store)]
    if below and (not plain or any(config.window(i) for i in range(config.layers)) or facts.shared_slots):
        why = "it encodes a token relative to the layer below, and layers keep other things"
        refuse(method, why, "kivi")
    if apart and learnt:
        refuse(
            method,
            "its codes learn what the queries of a KV head ask for, and it keeps other slots for each of "
            "their query heads",
            'variant="grouped" of such a keep',
        )
    if apart and any(True for _ in fitted_words(method.store)):
        refuse(
            method,
            "its codes were fitted to KV heads, and it keeps other slots for each of their query heads",
            'variant="grouped" of such a keep',
        )


def _check_codecs(method: Method, config: Config) -> None:
    stores = (method.store, None if method.keep is None else method.keep.lower)
    each = [(name, getattr(store, name)) for store in stores if store for name in ("keys", "values")]
    if isinstance(method.read, Copying):
        each += [(name, method.read.copies) for name in ("keys", "values")]
    layers = range(config.layers)
    each = dict.fromkeys((name, at_layer(codec, i)) for name, codec in each if codec for i in layers)
    for name, codec in each:
        if codec is None:
            continue
        words = [*fitted_words(codec)]
        known = [w.fitted for w in words if w.fitted is not None]
        arrays: dict[Any, Any] = {
            f.digest: {n: jnp.asarray(x[0]) for n, x in f.arrays.items()} for f in known
        }
        codec = bind(codec, arrays)
        words += learns(codec)
        for width in _stored_widths(config, name, states=not words):
            # Fitted arrays have an axis of KV heads, so the rows that are tried need that axis, too.
            lists = (1, config.kv_heads) if words else ()
            one = jax.ShapeDtypeStruct((*lists, codec.granule, width), jnp.float32)
            try:
                if sees_below(codec):
                    below: dict[str, Any] = dict.fromkeys(("key", "value", "own key"), jnp.zeros(one.shape))
                    codec = bind(codec, arrays | {BELOW: below})
                data = jax.eval_shape(codec.encode, one)
                back = jax.eval_shape(partial(codec.decode, width=width, dtype=one.dtype), data)
                shaped(codec, "decoded rows", back, "[granule, width]", one.shape)
            except ValueError as error:
                raise InputError(
                    f"{method.id} cannot store {name} of {width} channels: {error}: "
                    "choose other hyper-parameters"
                ) from error


def _stored_widths(config: Config, name: str, states: bool) -> set[int]:
    """Channels of every kind of key or value; with `states`, also of the matrices of states."""
    out = set()
    for layer in range(config.layers):
        mixer = mixer_of(config, layer)
        slots = mixer.slots(config)
        if slots is not None and not ((slots.shared or slots.ids) and name == "values"):
            out.add(slots.key if name == "keys" else slots.value)
        elif slots is None and name == "keys" and states:
            constant = {n: shape for n, shape in mixer.state(config).items() if n not in mixer.grows}
            out |= {shape[-1] for shape in constant.values() if len(shape) >= 3}
    return out
