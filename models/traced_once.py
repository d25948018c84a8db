"""Single layers that do the same are traced once, and the trace is repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from kvjax.models.feed_forward import FeedForward
from kvjax.models.layers import Params
from kvjax.models.mixer import GroupState, Layer, Memory


class TracedOnce:
    """Traces single layers once that do the same with their own parameters and state, and repeats the trace.

    The compiler gets what it would get if every layer were traced. Layers do the same if `Memory.alike` and
    their kinds are equal, they exchange nothing with other layers, and the trace reads no layer's parameters
    or state but those that it is given. That can be seen of traced arrays alone, so with others every layer
    is traced.
    """

    def __init__(self, params: Params, states: tuple[GroupState, ...], memory: Memory):
        owned = jax.tree.leaves((params["layers"], states, memory.of_layers))
        self.alike = memory.alike if all(isinstance(x, Tracer) for x in owned) else None
        self.owned = {id(x) for x in owned}
        self.programs: dict[Any, Callable[..., Any] | None] = {}

    def __call__(
        self, kind: Layer, mlp: FeedForward, memory: Memory, run: Callable[..., Any], carry: Any, p: Params
    ) -> Any:
        """`run` of this layer on its carry and parameters."""
        same, number = None if self.alike is None else self.alike[kind.group], kind.number
        if same is None or kind.publishes or kind.taken or memory.look or memory.narrow:
            return run(carry, (p, 0, number))
        leaves, form = jax.tree.flatten((carry, p))
        key = same, kind._replace(group=0, number=0, pos=0, taken=None), mlp, id(memory), form
        key = *key, *((x.shape, x.dtype) for x in leaves)
        if key not in self.programs:
            program = jax.jit(lambda carry, p, number: run(carry, (p, 0, number)), inline=True)
            # The arrays from outside that it reads.
            read = jax.make_jaxpr(program)(carry, p, np.int32(number)).consts
            self.programs[key] = None if self.owned & {id(x) for x in read} else program
        program = self.programs[key]
        return run(carry, (p, 0, number)) if program is None else program(carry, p, np.int32(number))
