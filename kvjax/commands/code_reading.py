"""How the codes of a method are read: in place by a kernel, or decoded by plain jnp."""

from __future__ import annotations

from kvjax.grammar import Method
from kvjax.grammar.fitted import sees_below
from kvjax.state.code_forms import ROWS, Form, span_of
from kvjax.state.codes import Codec, at_layer
from kvjax.store.layer_bits import LayerBits

IN_PLACE = "Kernels for TPUs and GPUs read its codes in place."
DECODED = "No kernel reads its codes: plain jnp decodes them before attention."
# Channels of a head. Their number only decides whether groups divide them.
WIDTH = 128


def read_by(method: Method) -> str:
    """Say in a sentence how a method's codes are read; empty for a method without codes.

    >>> import kvjax
    >>> read_by(kvjax.method("kivi")) == IN_PLACE, read_by(kvjax.method("int4")) == DECODED
    (True, True)
    >>> read_by(kvjax.method("streamingllm", budget=0.5))
    ''
    """
    lower = None if method.keep is None else method.keep.lower
    stores = [store for store in (method.store, lower) if store and (store.keys or store.values)]
    if not stores:
        return ""
    made = method.make is not None or method.stack is not None
    apart = made or any(store.unrotated or sees_below((store.keys, store.values)) for store in stores)
    pairs = [[_form(codec) for codec in (store.keys, store.values)] for store in stores]
    return IN_PLACE if not apart and all(_in_place(*pair) for pair in pairs) else DECODED


def _form(codec: Codec | None) -> Form | None:
    """Return the layout of codes for a kernel; plain arrays are rows."""
    if codec is None:
        return ROWS
    if isinstance(codec, LayerBits):
        # Which bits a layer has is found by a fit, and kernels read 8 bits of a token alone.
        return None
    return span_of(at_layer(codec, 0), WIDTH).codec.form(WIDTH)  # type: ignore[arg-type]


def _in_place(keys: Form | None, values: Form | None) -> bool:
    if keys is None or values is None:
        return False
    return (keys == values == ROWS) or (
        keys.kind == "key groups" and values == keys._replace(kind="value groups")
    )
