"""The grammar: a method is a sentence of keep, store and read, made of small hashable words.

Words are frozen dataclasses: equal sentences are equal values, so they compile once and print as they were
written. This module defines the sentence. The protocols of its words are in `kvjax.grammar.kinds`, and
the words themselves in `kvjax.keep`, `kvjax.store`, `kvjax.read`.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.grammar.kinds import Allocation, Answering, Merge, Pattern, Score
from kvjax.grammar.model_kinds import Residence, Stacking
from kvjax.grammar.part_facts import KeepFacts, StoreFacts
from kvjax.grammar.phase import BY_POSITION, Phase
from kvjax.grammar.prompt_reads import PromptRead
from kvjax.grammar.read_kinds import Read, Reusing
from kvjax.grammar.to_text import NAMELESS, constructor, name_of, written
from kvjax.grammar.validate import (
    check_codecs,
    check_narrow,
    check_parts,
    check_phase,
    check_when,
    check_words,
)
from kvjax.grammar.when import PREFILL_END, When
from kvjax.state.codes import Codec


@dataclasses.dataclass(frozen=True)
class Budget:
    """How many slots each head keeps.

    Args:
        amount: a fraction of the tokens seen (float in (0, 1]) or a number of slots (int >= 1).

    Raises:
        ValueError: for another amount.

    >>> Budget(0.25).amount
    0.25
    """

    amount: float | int
    # A budget of 1 slot differs from 1.0, which is everything, though the numbers are equal.
    kind: type = dataclasses.field(init=False, repr=False)

    def __post_init__(self):
        if isinstance(self.amount, np.generic):
            object.__setattr__(self, "amount", self.amount.item())
        a = self.amount
        object.__setattr__(self, "kind", type(a))
        whole = isinstance(a, int) and not isinstance(a, bool) and a >= 1
        if not (whole or (isinstance(a, float) and 0.0 < a <= 1.0)):
            large = isinstance(a, float) and 1 < a < math.inf
            hint = f": did you mean {int(a)} slots or a fraction such as 0.25?" if large else ""
            raise ValueError(
                "budget must be a fraction in (0, 1] (float) or a number of slots >= 1 (int), "
                f"got {a!r}{hint}"
            )

    @property
    def says(self) -> str:
        return f"{self.amount} slots." if self.ratio is None else f"{float(self.ratio):g} of all slots."

    @property
    def ratio(self) -> Fraction | None:
        """The fraction in thousandths or simpler, so that counts are exact integer arithmetic."""
        if isinstance(self.amount, int):
            return None
        return max(Fraction(self.amount).limit_denominator(1000), Fraction(1, 1000))

    def capacity(self, tokens: int) -> int:
        """Return the largest number of slots that a head keeps of `tokens` tokens."""
        if self.ratio is None:
            return min(int(self.amount), tokens)
        return max(1, tokens * self.ratio.numerator // self.ratio.denominator)

    def count(self, length: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """max(1, floor(ratio * length)) per row or KV head, and never more than its length."""
        if self.ratio is None:
            return jnp.minimum(length, min(int(self.amount), 2**30))
        return jnp.maximum(1, length * self.ratio.numerator // self.ratio.denominator)

    def reach(self, slots: int) -> int:
        """Find the most tokens of which a head keeps at most `slots`; 2^30 if there is no limit."""
        if self.ratio is None:
            return 2**30 if int(self.amount) <= slots else slots
        return ((slots + 1) * self.ratio.denominator - 1) // self.ratio.numerator


@dataclasses.dataclass(frozen=True)
class Keep(KeepFacts):
    """Which slots stay, and when the others are evicted.

    Args:
        score: how much each slot matters; None evicts nothing.
        budget: slots per head.
        allocate: divides the budget between layers and heads.
        protect: patterns of slots that stay whatever their score.
        when: at the end of a prefill, or also while decoding (`kvjax.grammar.when`; the cache then exceeds
            the budget by at most what that word allows).
        per_query_head: selects for every query head alone, so the cache holds K = N heads.
        skip_layers: how many of the first layers keep everything.
        phase: what keys and queries are rotated by (`kvjax.grammar.phase`).
        probe: extra tokens whose queries feed the scores.
        merge: what kept slots take from evicted ones.
        lower: a second tier: slots are not evicted but stored so.
        page: slots per page if heads have unequal budgets; None chooses (`kvjax.compress.pages.page_of`).
        narrow: which tokens of a prompt the upper layers read (`kvjax.keep.prompts.narrow`).
        reuse: how many layers in a row keep what the first of them selects.
        restore: learned tokens that read a prompt before slots of it are evicted, and stay
            (`kvjax.keep.prompts.restore`).

    >>> from kvjax.words import KeyNorm, Recent, Uniform
    >>> Keep(KeyNorm(), Budget(64), Uniform(), protect=(Recent(8),)).when.in_steps
    False
    """

    score: Score | None
    budget: Budget
    allocate: Allocation
    protect: tuple[Pattern, ...] = ()
    when: When = PREFILL_END
    per_query_head: bool = False
    skip_layers: int = 0
    phase: Phase = BY_POSITION
    probe: Any = None
    merge: Merge | None = None
    lower: Store | None = None
    page: int | None = None
    narrow: Any = None
    reuse: int = 1
    restore: Any = None

    def __post_init__(self):
        check_words(self.score, self.allocate, self.protect, self.merge)
        check_phase(self.phase)
        check_when(self.when)
        check_narrow(self.narrow)
        if isinstance(self.reuse, bool) or not isinstance(self.reuse, int) or self.reuse < 1:
            raise ValueError(f"reuse is a number of layers that keep alike, at least 1, got {self.reuse!r}")
        if not isinstance(self.budget, Budget):
            raise ValueError(f"a keep's budget must be a Budget, got {self.budget!r}: write Budget(0.25)")


@dataclasses.dataclass(frozen=True)
class Store(StoreFacts):
    """How slots are encoded: keys and values each by a codec (None = as computed).

    Args:
        keys: the codec of keys.
        values: the codec of values.
        residual: how many of the newest tokens stay unencoded; older ones are encoded `granule` at a time.
        sinks: how many of the first tokens of every row always stay unencoded.
        unrotated: stores keys as they are before RoPE, and rotates them whenever they are read.

    >>> from kvjax.words import Affine
    >>> Store(Affine(4), Affine(4), residual=32).keys.granule
    1
    """

    keys: Codec | None = None
    values: Codec | None = None
    residual: int = 0
    sinks: int = 0
    unrotated: bool = False

    def __post_init__(self):
        check_codecs(self.keys, self.values)
        if isinstance(self.sinks, bool) or not isinstance(self.sinks, int) or self.sinks < 0:
            raise ValueError(f"sinks is a number of first tokens, at least 0, got {self.sinks!r}")

    @property
    def granule(self) -> int:
        return max((c.granule for c in (self.keys, self.values) if c is not None), default=1)


def read_after(keep: Keep | None, read: Any) -> Any:
    """Return a read as it acts after a keep: each KV head holds other tokens, and picks for itself."""
    if keep is None or read is None or read.by_head:
        return read
    return dataclasses.replace(read, by_head=True)


@dataclasses.dataclass(frozen=True, repr=False)
class Method:
    """A method as a value: which slots stay, how they are encoded, where they are, which a query reads.

    Its `repr` is the text that builds it, for `kvjax.method` and every `method=`: `snapkv(budget=0.25)` if it
    has a name, and a constructor if it was written by hand or changed. `words` is the constructor.

    Args:
        keep: which slots stay; None keeps all.
        store: how slots are encoded; None stores them as computed.
        read: which slots a query attends to; None is all of them.
        spec: how to build the method again (`kvjax.grammar.to_text`), mostly (id, hyper-parameters).
        reread: which tokens of a prompt are read at all, or alone are stored (`kvjax.keep.prompts.reread`,
            `distilled` and `memory_tokens` there).
        layers: a method for every layer of the model, in place of all other parts.
        make: rewrites the model's weights, as `kvjax.prepare` shows.
        stack: which layers are stored as one (`kvjax.store.merged`).
        host: which of the slots in host memory the device also holds (`kvjax.place.host`).
        read_prompt: which blocks of a first prompt its queries attend to; None is all of them
            (`kvjax.grammar.prompt_reads`).

    >>> from kvjax.words import KeyNorm, Uniform
    >>> Method(Keep(KeyNorm(), Budget(0.5), Uniform())).id
    'custom'
    """

    keep: Keep | None = None
    store: Store | None = None
    read: Read | None = None
    spec: tuple[Any, ...] = ()
    reread: Any = None
    layers: tuple[Method, ...] = ()
    make: Any = None
    stack: Stacking | None = None
    host: Residence | None = None
    read_prompt: PromptRead | None = None

    def __post_init__(self):
        check_parts(self)
        parts = (self.keep, self.store, self.read)
        parts += () if self.reread is None else (self.reread,)
        parts += (self.layers,) if self.layers else ()
        parts += () if self.make is None else (self.make,)
        parts += () if self.stack is None else (self.stack,)
        parts += () if self.host is None else (self.host,)
        parts += () if self.read_prompt is None else (self.read_prompt,)
        if not self.spec:
            full = parts == (None,) * 3
            object.__setattr__(self, "spec", ("full", ()) if full else ("custom", ()))
            object.__setattr__(self, "_named", full)

    @property
    def id(self) -> str:
        return self.spec[0]

    def called(self, spec: tuple[Any, ...]) -> Method:
        """Return the same method with this `spec`, which must build it."""
        new = dataclasses.replace(self, spec=spec)
        # Not a field: a copy changed by `dataclasses.replace` is no longer what its spec builds.
        object.__setattr__(new, "_named", spec[0] not in NAMELESS)
        return new

    @property
    def words(self) -> str:
        """The method word by word, as Python code, in lines."""
        return written(self)

    def __repr__(self) -> str:
        return name_of(self.spec) if getattr(self, "_named", False) else constructor(self)

    @property
    def restore(self) -> Any:
        """The learned tokens that read its prompts before slots are evicted, if any."""
        return None if self.keep is None else self.keep.restore

    @property
    def sentences(self) -> tuple[Method, ...]:
        """The method itself, or the distinct methods of its layers."""
        return tuple(dict.fromkeys(self.layers)) or (self,)

    @property
    def aligned(self) -> bool:
        """Whether a slot holds the same token in all layers, so that picks of one are valid in others."""
        return not self.layers and self.keep is None

    @property
    def shared_positions(self) -> int:
        """By how much a text's tokens exceed its positions, because some tokens share positions."""
        return 0 if self.keep is None else self.keep.phase.shared

    def at(self, layer: int) -> Method:
        """Return the method of a layer."""
        return self.layers[layer] if self.layers else self

    def decode_part(self) -> Method:
        """Return what a decode step depends on of a method: methods with equal parts share one program."""
        if self.layers:
            return Method(layers=tuple(one.decode_part() for one in self.layers), spec=("decode", ()))
        keep = None
        if self.keep is not None:
            k = self.keep
            # Decode steps query such a merge for slots evicted earlier.
            answering = k.merge if isinstance(k.merge, Answering) else None
            if k.when.in_steps:
                keep = dataclasses.replace(k, probe=None, narrow=None)
            elif k.score is not None and (k.score.traces or answering is not None):
                bare: dict[str, Any] = dict(protect=(), probe=None, merge=answering, lower=None, narrow=None)
                bare["reuse"] = 1
                keep = dataclasses.replace(k, budget=Budget(1.0), **bare)
            elif k.phase != BY_POSITION or k.per_query_head or isinstance(self.read, Reusing):
                keep = Keep(None, Budget(1.0), k.allocate, per_query_head=k.per_query_head, phase=k.phase)
        return Method(keep, self.store, read_after(self.keep, self.read), ("decode", ()), host=self.host)

    def protecting(self, *patterns: Pattern) -> Method:
        """Protect more slots in the same method (they count against the budget)."""
        if self.layers:
            return dataclasses.replace(self, layers=tuple(one.protecting(*patterns) for one in self.layers))
        if self.keep is None:
            return self
        return dataclasses.replace(
            self, keep=dataclasses.replace(self.keep, protect=(*self.keep.protect, *patterns))
        )
