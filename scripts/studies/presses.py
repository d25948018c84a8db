"""Presses of kvpress, and the methods here that keep the same slots, for comparisons of the two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import kvjax
from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.kinds import Pattern
from kvjax.keep.algebra import Word
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.patterns import Recent
from kvjax.keep.scores.score import AccumulatedAttention

NONE: Mapping[str, Any] = MappingProxyType({})
# The scope of a selection: the slots of a head, of a layer, or of the whole stack.
Over = Literal["head", "layer", "stack"]


class Press(NamedTuple):
    """A press and kvjax's method for it, each with its own defaults except for the fields below.

    name: of the press, as its users write it. theirs: (the module kvpress, share removed) -> the press.
    method: a method's id, or a score that no method uses alone. protect: further protected slots. over: the
    scope of the selection. eager: whether the press needs the attention map. repeats: whether both read the
    prompt again after an instruction, `prefix`. per_layer: whether layers keep different numbers of slots.
    multiple: contexts are cut to multiples of so many tokens.
    """

    name: str
    theirs: Callable[[Any, float], Any]
    method: str | Word
    hyper: Mapping[str, Any] = NONE
    protect: tuple[Pattern, ...] = ()
    over: Over = "head"
    eager: bool = False
    repeats: bool = False
    per_layer: bool = False
    multiple: int = 1

    def ours(self, budget: float, **hyper: Any) -> Method:
        """Build the method for a share of the slots; `hyper` in addition to the press's hyper-parameters."""
        if not isinstance(self.method, str):
            return Method(Keep(self.method, Budget(budget), Uniform(), self.protect))
        made = kvjax.method(self.method, budget=budget, **{**self.hyper, **hyper})
        return made.protecting(*self.protect) if self.protect else made

    def says(self) -> str:
        """Write the method as text, without its budget.

        >>> PRESSES["snapkv"].says(), PRESSES["tova"].says()
        ('snapkv(variant=kvpress)', 'tova, protecting Recent(tokens=1)')
        """
        if not isinstance(self.method, str):
            return f"a keep with {self.method!r}"
        hyper = ", ".join(f"{name}={value}" for name, value in self.hyper.items())
        protect = ", ".join(map(repr, self.protect))
        return self.method + (f"({hyper})" if hyper else "") + (f", protecting {protect}" if protect else "")


KVPRESS = MappingProxyType({"variant": "kvpress"})
ATTENTION_IN_CHUNKS = MappingProxyType({"blend": 0, "chunk": 256, "sinks": 0, "newest": 0})
PRESSES: Mapping[str, Press] = {
    "knorm": Press("KnormPress", lambda k, r: k.KnormPress(r), "l2compress", {"skip_layers": 0}),
    "keydiff": Press("KeyDiffPress", lambda k, r: k.KeyDiffPress(r), "keydiff"),
    "snapkv": Press("SnapKVPress", lambda k, r: k.SnapKVPress(r), "snapkv", KVPRESS),
    # kvpress never drops the newest token, though the paper does not say so.
    "tova": Press("TOVAPress", lambda k, r: k.TOVAPress(r), "tova", protect=(Recent(1),)),
    "streaming_llm": Press("StreamingLLMPress", lambda k, r: k.StreamingLLMPress(r), "sink-recent"),
    "expected_attention": Press(
        "ExpectedAttentionPress", lambda k, r: k.ExpectedAttentionPress(r), "expected-attention"
    ),
    "pyramidkv": Press(
        "PyramidKVPress", lambda k, r: k.PyramidKVPress(r), "pyramidkv", KVPRESS, per_layer=True
    ),
    "adakv_snapkv": Press(
        "AdaKVPress(SnapKVPress)", lambda k, r: k.AdaKVPress(k.SnapKVPress(r)), "adakv", KVPRESS, over="layer"
    ),
    "criticalkv_snapkv": Press(
        "CriticalKVPress(SnapKVPress)", lambda k, r: k.CriticalKVPress(k.SnapKVPress(r)),
        "criticalkv", KVPRESS,
    ),
    "lagkv": Press("LagKVPress", lambda k, r: k.LagKVPress(r), "lagkv"),
    "cur": Press("CURPress", lambda k, r: k.CURPress(r), "curdkv"),
    "cap": Press("CapPress", lambda k, r: k.CapPress(r), "capkv"),
    "observed_attention": Press(
        "ObservedAttentionPress", lambda k, r: k.ObservedAttentionPress(r),
        AccumulatedAttention(per_query=True), eager=True,
    ),
    "kvzip": Press("KVzipPress", lambda k, r: k.KVzipPress(r), "kvzip", over="stack", repeats=True),
    "non_causal": Press(
        "NonCausalAttnPress", lambda k, r: k.NonCausalAttnPress(r),
        "compactor", ATTENTION_IN_CHUNKS,
    ),
    "non_causal_whole": Press(
        "NonCausalAttnPress, contexts of whole chunks", lambda k, r: k.NonCausalAttnPress(r),
        "compactor", ATTENTION_IN_CHUNKS, multiple=256,
    ),
}  # fmt: skip
