"""Exchange between layers: which layer takes what from which, and so what each layer publishes.

Nothing else is passed between layers, so nothing else is kept alive while the layers run.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvjax.models.config import Config
from kvjax.models.mixer import Take
from kvjax.models.mixers.attention import mixer_of


def takes_of(config: Config, layer: int) -> dict[str, Take]:
    """Return what a layer takes from others: {role in this layer: Take}; "input" is its mixer's input.

    >>> from kvjax.models.mixers.attention import Attention
    >>> sizes = dict(vocab=32, d_model=16, layers=2, heads=2, kv_heads=1, head_dim=8, d_ff=32)
    >>> takes_of(Config(mixers=(Attention(), Attention(source=0)), **sizes), 1)
    {'slots': Take(name='slots', layer=0)}
    """
    takes = mixer_of(config, layer).takes
    # A layer has its own values at hand; its own input is available before it runs.
    takes = {key: take for key, take in takes.items() if take.layer != layer or take.name == "input"}
    below = config.inputs[layer] if config.inputs else None
    return takes if below is None else takes | {"input": Take("input", below)}


def published(
    config: Config, more: Mapping[int, Mapping[str, Take]] = MappingProxyType({})
) -> dict[int, frozenset[str]]:
    """Name what layers publish, for each layer from which others take something.

    more: what layers take in addition to their mixers' takes.

    >>> from kvjax.models.mixers.attention import Attention
    >>> sizes = dict(vocab=32, d_model=16, layers=3, heads=2, kv_heads=1, head_dim=8, d_ff=32)
    >>> published(Config(mixers=(Attention(), Attention(source=0), Attention(source=0)), **sizes))
    {0: frozenset({'slots'})}
    """
    out: dict[int, frozenset[str]] = {}
    for layer in range(config.layers):
        for name, at in (*takes_of(config, layer).values(), *more.get(layer, {}).values()):
            if at is not None:
                out[at] = out.get(at, frozenset()) | {name}
    return out
