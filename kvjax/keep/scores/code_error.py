"""Scores by how well a slot can be quantised."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float

from kvjax.grammar.kinds import Observed, Trace, View
from kvjax.keep.algebra import Word
from kvjax.keep.observations.code_error import CodeError
from kvjax.keep.observations.trace import ConstantTrace
from kvjax.state.codes import Codec


@dataclasses.dataclass(frozen=True)
class EncodingAccuracy(Word):
    """score[j] = max(1 - e_j, 0), where e_j is the quantisation error when token j was read (`CodeError`)."""

    codec: Codec

    looks = False

    @property
    def error(self) -> Trace:
        return ConstantTrace(CodeError(self.codec))

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset({self.error})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        return (1.0 - view.of(self.error)).clip(min=0.0)
