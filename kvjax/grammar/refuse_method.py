"""Which parts of a sentence cannot stand beside each other, each told in one sentence when it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvjax.grammar.fitted import fitted_words, lacks_fit
from kvjax.grammar.read_protocols import Remembering, Resting, Reusing, Sampling
from kvjax.grammar.refuse_keep import Refusals

if TYPE_CHECKING:
    from kvjax.grammar import Method


def refused_parts(method: Method) -> Refusals:
    """(wrong, why) for what the parts of a sentence cannot do together."""
    asked = (_in_layers, _in_store, _in_reading, _in_host, _in_read)
    return [one for part in asked for one in part(method)]


def _in_reading(method: Method) -> Refusals:
    """(wrong, why) for what cannot be where tokens of a prompt are marked."""
    word, store = method.restore or method.reread, method.store
    if not hasattr(word, "fitted"):
        return []
    return [
        (
            method.make is not None,
            "its weights are beside those of the model that is given, and this method rewrites them: leave "
            "one out",
        ),
        (
            isinstance(method.read, Remembering),
            f"{method.read!r} remembers what tokens of a prompt are asked for, and what stays of this one is "
            "not what was read: use a read by keys alone, such as quest",
        ),
        (
            store is not None and store.unrotated and getattr(word, "turns", False),
            "memory tokens are turned to where they are stored, and this store holds keys unrotated: use "
            "int8",
        ),
    ]


def _in_host(method: Method) -> Refusals:
    """(wrong, why) for what cannot be where slots lie in host memory."""
    host, read = method.host, method.read
    if host is None:
        return []
    return [
        *_by_layer(method),
        (
            isinstance(read, Resting | Sampling | Reusing) or hasattr(read, "looks_at"),
            f"{host!r} brings what is read to the device, and {read!r} chooses by looking at all keys: use a "
            "read by summaries, such as quest",
        ),
    ]


def _by_layer(method: Method) -> Refusals:
    """(wrong, why) for what cannot be where layers come from host memory whole."""
    host, keep = method.host, method.keep
    if method.read is not None:
        return []
    return [
        (
            bool(getattr(host, "resident", 0)),
            f"{host!r} holds pages that a step reads on the device, and without a read method it reads all: "
            "chain it with one, such as quest, or write Host()",
        ),
        (
            keep is not None and not keep.allocate.uniform,
            f"{host!r} brings lists of equal length layer by layer, and this keep's unequal lists lie in "
            "pages, which would stay on the device: use a keep of equal heads, such as snapkv or h2o",
        ),
        (
            keep is not None and (keep.lower is not None or (keep.when.in_steps and keep.merge is not None)),
            f"{host!r} brings what a step reads, and sends the new token back alone, and this keep writes "
            "other slots, too, where it merges them while decoding or has a second tier: use one that frees "
            "slots, such as h2o, or acts at the end of prompts, such as snapkv",
        ),
        (
            method.stack is not None,
            f"{host!r} brings one layer after the other, and this method stores two as one: leave one out",
        ),
    ]


def _in_read(method: Method) -> Refusals:
    """(wrong, why) for what cannot be where a read remembers what slots are asked, or layers share picks."""
    score = None if method.keep is None else method.keep.score
    grown = [o for trace in (() if score is None else score.traces) for o in trace.needs]
    return [
        (
            method.read is not None and any(hasattr(o, "reduction") for o in grown),
            f"{method.read!r} leaves slots out of a step's attention, and the score of its keep remembers "
            "what every slot receives: use one that remembers nothing, such as WindowAttention(64)",
        ),
        (
            isinstance(method.read, Reusing) and method.keep is not None,
            f"{method.read!r} reads in one layer the slots that another one picked, and a keep would leave "
            "them other tokens: leave one out",
        ),
    ]


def _in_layers(method: Method) -> Refusals:
    """(wrong, why) for what cannot be where every layer has a sentence of its own."""
    if not method.layers:
        return []
    others = (method.reread, method.make, method.stack, method.host)
    alone = (method.keep, method.store, method.read, *others) == (None,) * 7
    parts = [
        one for one in method.sentences if any(part is not None for part in (one.reread, one.make, one.stack))
    ]
    stores = [one.store for one in method.sentences if one.store is not None and one.store.unrotated]
    keeps = [one.keep for one in method.sentences if one.keep is not None]
    whole = [k for k in keeps if not k.phase.steady or k.per_query_head or k.probe or k.narrow or k.restore]
    return [
        (not alone or any(one.layers for one in method.sentences), "its layers say all that it does"),
        (
            bool(parts or whole or stores),
            "phases, per_query_head, unrotated keys, probes, rewritten weights, what leaves tokens of a "
            "prompt out, and what merges layers, "
            "concern all layers together: give layers sentences without them",
        ),
        (
            len({k for k in keeps if not k.allocate.uniform}) > 1,
            "heads of unequal budgets lie in pages of one keep, and its layers have several: give those that "
            "have unequal heads the same keep",
        ),
    ]


def _in_store(method: Method) -> Refusals:
    """(wrong, why) for what a store cannot do with the other parts of its sentence."""
    keep, store, read = method.keep, method.store, method.read
    if store is None:
        return []
    paged = keep is not None and not keep.allocate.uniform
    tiers = keep is not None and keep.lower is not None
    learned = any(word.fitted is not None or lacks_fit(word) for word in fitted_words(store))
    return [
        (
            store.sinks > 0 and tiers,
            f"the first {store.sinks} tokens lie apart from the others, and a second tier would take them "
            "with what leaves the first one: give sinks=0, or use a keep without a second tier",
        ),
        (
            store.unrotated and read is not None,
            "a read method ranks keys as they are stored, and this store holds them unrotated",
        ),
        (
            store.unrotated and keep is not None and keep.merge is not None,
            f"{keep and keep.merge!r} merges keys at their positions, and this store holds them unrotated",
        ),
        (
            method.stack is not None and (learned or store.unrotated or store.sinks > 0),
            "it merges layers by their numbers at their positions, and this store holds them unrotated, by "
            "what was fitted to each layer, or first tokens apart: use int8, int4 or fp8",
        ),
        (
            learned and (paged or read is not None),
            "its codes are read by what was fitted to each layer, which pages and read methods do not know: "
            "use a keep of equal heads",
        ),
    ]
