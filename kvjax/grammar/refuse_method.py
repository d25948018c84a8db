"""Parts of a method that cannot be combined, for other reasons than facts (`facts`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvjax.grammar.read_kinds import Placing, Prefetching, Recycling, Sampling, Tracing
from kvjax.grammar.refuse_keep import Refusals
from kvjax.state.codes import at_layer

if TYPE_CHECKING:
    from kvjax.grammar import Method


def refused_parts(method: Method) -> Refusals:
    """Return (wrong, why) for what the parts of a method cannot do together."""
    host, read = method.host, method.read
    brought = _brought_together(method)
    page = 0 if read is None else read.granule
    return [
        *_in_layers(method),
        (
            isinstance(read, Placing) and not (method.store is not None and method.store.unrotated),
            f"{read!r} compares keys before rotation, and they are stored rotated: chain it with "
            "Method(store=Store(unrotated=True))",
        ),
        (
            isinstance(read, Tracing) and method.keep is not None and method.keep.narrow is not None,
            f"{read!r} learns from all tokens of a prompt, and the keep leaves some out of the upper layers: "
            "use a keep that lets all layers read them, such as snapkv",
        ),
        (
            host is not None and host.values_alone and isinstance(read, Recycling | Prefetching | Sampling),
            f"{host!r} brings the values that every layer picks in every step, and {read!r} picks otherwise: "
            "use a read such as kcache, or leave it out",
        ),
        (
            None not in (read, host) and method.keep is not None and method.keep.when.in_steps,
            f"{host!r} holds copies of pages on the device, and the keep evicts slots of these pages while "
            "decoding: use a keep that acts at the end of prompts, such as snapkv, or leave one out",
        ),
        (
            None not in (read, host) and method.keep is not None and not method.keep.allocate.uniform,
            f"{host!r} holds copies of pages of equally many slots on the device, and the keep gives heads "
            "unequal numbers: use a keep that gives all the same, such as snapkv, or leave one out",
        ),
        (
            host is not None and page % brought != 0,
            f"{host!r} brings pages of {page} tokens to the device, which must be a "
            f"multiple of the {brought} tokens that are encoded together: give both the same number",
        ),
    ]


def _brought_together(method: Method) -> int:
    """How many tokens are encoded together of what a host brings to the layers that read a part."""
    if method.store is None:
        return 1
    first = 0 if method.read is None else method.read.skip_layers
    alone = method.host is not None and method.host.values_alone
    each = [method.store.values] if alone else [method.store.keys, method.store.values]
    return max((codec.granule for one in each if (codec := at_layer(one, first)) is not None), default=1)


def _in_layers(method: Method) -> Refusals:
    """Return (wrong, why) for methods that cannot be given layer by layer."""
    if not method.layers:
        return []
    others = (method.reread, method.make, method.stack, method.host, method.read_prompt)
    alone = (method.keep, method.store, method.read, *others) == (None,) * 8
    parts = [
        one for one in method.sentences if any(part is not None for part in (one.reread, one.make, one.stack))
    ]
    stores = [one.store for one in method.sentences if one.store is not None and one.store.unrotated]
    keeps = [one.keep for one in method.sentences if one.keep is not None]
    whole = [k for k in keeps if not k.phase.steady or k.per_query_head or k.probe or k.narrow or k.restore]
    return [
        (not alone or any(one.layers for one in method.sentences), "its layers already say all that it does"),
        (
            bool(parts or whole or stores),
            "phases, per_query_head, unrotated keys, probes, rewritten weights, selections of a prompt's "
            "tokens and merges of layers concern all layers together: give layers methods without them",
        ),
        (
            len({k for k in keeps if not k.allocate.uniform}) > 1,
            "heads of unequal budgets share the pages of one keep, and its layers have several: give those "
            "that have unequal heads the same keep",
        ),
    ]
