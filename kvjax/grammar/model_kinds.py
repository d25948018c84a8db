"""Kinds of words that act on a model's weights, on adjacent layers, or on where pages lie."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from jaxtyping import Array, Bool, Float

from kvjax.grammar.facts import Stating
from kvjax.state.codes import Codec, Codes


class Make(Stating):
    """The base class of rewrites of a model's weights before anything is read.

    The method then acts on the new model's cache.

    A frozen dataclass like all words: a model remembers what this word made of it, and the fingerprint of the
    new model is that of the old one and the word's `repr`.

    >>> from kvjax.make.stored_inputs import StoredInputs
    >>> isinstance(StoredInputs(), Make)
    True
    """

    @abstractmethod
    def config(self, config: Any) -> Any:
        """Return the config of the rewritten model. Raises ValueError if a model of `Config` has none."""
        raise NotImplementedError

    @abstractmethod
    def params(self, params: dict[str, Any], config: Any) -> dict[str, Any]:
        """Rewrite the parameters of a model of this `Config`."""
        raise NotImplementedError


class Stacking(Stating):
    """The base class of words that merge adjacent layers after a prefill (`Method.stack`).

    most: how many tokens of a KV head at most stay unmerged in both layers (a `kvjax.grammar.Budget`).

    >>> from kvjax.store.merged import MergedLayers
    >>> isinstance(MergedLayers(), Stacking)
    True
    """

    most: Any

    @abstractmethod
    def first(self, layers: int) -> int:
        """Return the lowest layer that may be merged, in a model of `layers` layers."""
        raise NotImplementedError

    @abstractmethod
    def codecs(self, codec: Codec | None) -> tuple[Codec, Codec]:
        """Return the codecs of merged rows in the lower and in the upper layer, if `codec` encodes slots.

        A codec that `borrows` keeps arrays in the codes of the layer below
        (`kvjax.state.code_forms.completed`).
        """
        raise NotImplementedError

    @abstractmethod
    def apart(
        self,
        k: tuple[Float[Array, "*b S H"], Float[Array, "*b S H"]],
        v: tuple[Float[Array, "*b S V"], Float[Array, "*b S V"]],
        live: Bool[Array, "*b S"],
    ) -> Float[Array, "*b S"]:
        """How much a token should stay unmerged, from its rows in two layers; -inf: not at all."""
        raise NotImplementedError

    @abstractmethod
    def merge(
        self, low: Float[Array, "*b S H"], high: Float[Array, "*b S H"], codec: Codec | None
    ) -> tuple[Codes, Codes]:
        """Merge the same rows of two layers into codes of each, by `codecs`."""
        raise NotImplementedError


class Residence(Stating):
    """The base class of words that say which pages in host memory the device also holds.

    `values_alone`: whether keys stay on the device.

    >>> from kvjax.place.host import Host
    >>> isinstance(Host(), Residence)
    True
    """

    values_alone: bool = False

    @abstractmethod
    def places(self, slots: int, page: int, visited: int) -> int:
        """How many pages of `slots` slots the device holds; a step visits `visited` of them (static)."""
        raise NotImplementedError
