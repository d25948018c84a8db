"""Models that words are fitted to: every layer keeps all tokens, and its attention can be replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from jaxtyping import Array, Float, Int

from kvjax.base.errors import InputError
from kvjax.grammar import Method
from kvjax.grammar.kinds import Inputs
from kvjax.models.attending import new_keys, published_by, rotated
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer, Memory, Projected
from kvjax.models.model import Model
from kvjax.models.stacking import groups_in, layers_of_groups
from kvjax.models.transformer import LayerOutputs, Positions, decode_layers
from kvjax.ops.attention.union import Keys, logits
from kvjax.state.cache import NOTHING
from kvjax.steps import Run
from kvjax.steps.shared.run import held

# (the layer, its inputs, keys and values, logits [B, K, G, T, S]) -> (out [B, N, T, V], values collected from
# the layer).
Attention = Callable[[Layer, Inputs, Keys, Float[Array, "B K G T S"]], tuple[Float[Array, "B N T V"], Any]]


def check_whole(model: Model, what: str) -> None:
    """Raise InputError if a layer of the model does not keep all tokens in slots of its own.

    Also if layers are stacked as a pattern, since arrays are fitted in the order of the groups.
    """
    if any(group.stride > 1 for group in groups_in(model.params)):
        raise InputError(f"{what} are fitted where layers are stacked in their order: give model.in_runs()")
    kinds = {gm.kind for gm in Run(model.config, Method()).groups(model.params)}
    if kinds != {"slots"} or model.config.windows:
        raise InputError(
            f"{what} are fitted where every layer keeps all tokens, and this model has windows, states or "
            "shared slots: use another method"
        )


def read_whole(
    config: Config, params: Params, tokens: Int[Array, "B T"], at: Positions, attention: Attention, what: str
) -> LayerOutputs:
    """Run a model over texts with `attention` in every layer; `collected` is per group of layers.

    what: the name of the fit, for the InputError if a layer is not plain attention.
    """

    def attend(layer: Layer, x: Projected, state: Any) -> Any:
        if x.k is None or x.expand is not None or x.extra is not None or layer.mixer.clip is not None:
            raise InputError(
                f"{what} are fitted where every layer is plain attention, and this model has another kind: "
                "use another method"
            )
        q, k = (rotated(layer.rope, y, at.pos, at.length) for y in (x.q, x.k))
        keys = new_keys(layer, k, x.v, at.pos)
        s = logits(q, keys, at.pos, scale=layer.scale, softcap=config.attention_softcap)
        inputs = Inputs(q, x.q, x.k, x.hidden, at.pos, at.length, k=k, v=x.v)
        out, found = attention(layer, inputs, keys, s)
        left = published_by(layer, state, k, x.v, None) | {"collected": found}
        return out.astype(q.dtype), state, left

    def recur(*_: Any) -> NoReturn:
        raise AssertionError("no layer has a state")

    memory = Memory(at.pos, attend, recur, held)
    return decode_layers(params, tokens, config, memory, (NOTHING,) * len(layers_of_groups(params)))
