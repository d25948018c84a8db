"""What the layers of a model keep, as methods ask for it, and the error for a method that does not fit."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

from kvjax.base.errors import InputError
from kvjax.grammar import Method
from kvjax.models.config import Config
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.mixers.bidirectional import Bidirectional


class LayerFacts(NamedTuple):
    """What the layers of a model keep, as far as methods ask for it.

    encoder: whether a layer attends in both directions. slots: the shape of the slots of each layer that has
    slots of its own, in a number that grows. all_slots: the same, and that of layers whose number of slots is
    fixed or that read another layer's slots. takes: names of what layers take from others. clipped: whether a
    layer's softmax is clipped. chunked: whether queries of a layer see only their own chunk. picking: whether
    queries of a layer pick tokens themselves. windowed: whether all layers with slots have a window.
    """

    encoder: bool
    slots: tuple[Any, ...]
    all_slots: tuple[Any, ...]
    takes: frozenset[str]
    clipped: bool
    chunked: bool
    picking: bool
    windowed: bool

    @property
    def factors(self) -> bool:
        """Whether a layer stores factors, from which keys are computed."""
        return any(s.factors for s in self.slots)

    @property
    def latent(self) -> bool:
        """Whether a layer stores one array that is both its keys and its values."""
        return any(s.shared for s in self.slots)

    @property
    def shared_slots(self) -> bool:
        """Whether at least one layer reads the slots of another layer."""
        return "slots" in self.takes


def facts_of(config: Config) -> LayerFacts:
    """Return what the layers of a model keep."""
    own = [mixer_of(config, i) for i in range(config.layers)]
    kinds = [(m, s) for m in own if (s := m.slots(config)) is not None]
    return LayerFacts(
        encoder=any(isinstance(m, Bidirectional) for m in own),
        slots=tuple(s for m, s in kinds if "slots" not in m.takes and not s.fixed),
        all_slots=tuple(s for _, s in kinds),
        takes=frozenset(name for m in own for name in m.takes),
        clipped=any(m.clip is not None for m in own),
        chunked=any(m.chunked for m in own),
        picking=any(m.picks for m in own),
        windowed=all(config.window(i) is not None for i, m in enumerate(own) if m.slots(config) is not None),
    )


def refuse(method: Method, why: str, instead: str) -> NoReturn:
    """Raise InputError for a method that does not fit the model: why, and what to use in its place."""
    raise InputError(f"{method.id} does not fit this model: {why}. Use {instead} here")
