"""Layer merging: which layers of a model may be stored as one."""

from __future__ import annotations

from kvjax.grammar.model_kinds import Stacking
from kvjax.models.config import Config
from kvjax.models.exchange import published, takes_of
from kvjax.models.mixers.attention import mixer_of


def pairs_of(stack: Stacking, config: Config) -> tuple[int, ...]:
    """Return the lower layer of every pair; a layer without a partner above it is not merged.

    >>> from kvjax.store.merged import MergedLayers
    >>> sizes = dict(vocab=32, d_model=16, heads=2, kv_heads=1, head_dim=8, d_ff=32)
    >>> pairs_of(MergedLayers(), Config(layers=9, **sizes))
    (4, 6)
    """
    found: list[int] = []
    layer = stack.first(config.layers)
    while layer + 1 < config.layers:
        both = _may_merge(config, layer) and _may_merge(config, layer + 1)
        alike = mixer_of(config, layer).slots(config) == mixer_of(config, layer + 1).slots(config)
        found += [layer] if both and alike else []
        layer += 2 if both and alike else 1
    return tuple(found)


def _may_merge(config: Config, layer: int) -> bool:
    """Whether a layer stores keys and values of all tokens, unencoded and for itself alone."""
    slots = mixer_of(config, layer).slots(config)
    if slots is None or slots.fixed or slots.shared or slots.factors or slots.ids:
        return False
    exchanged = {take.name for take in takes_of(config, layer).values()} | published(config).get(layer, set())
    return config.window(layer) is None and not exchanged & {"slots", "logits"}
