"""Baselines: the methods that papers compare with, and others without a paper."""

from __future__ import annotations

from typing import Literal

from kvjax.grammar import Budget, Keep, Method, Store
from kvjax.grammar.phase import ByRank
from kvjax.grammar.when import STEP
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.patterns import Sink
from kvjax.keep.scores.score import Position, RandomScore
from kvjax.methods.papers import Press, paper
from kvjax.methods.shared import Amount, Group, Seed, Tokens
from kvjax.place.host import Host
from kvjax.store.affine import Affine, Float8
from kvjax.store.symmetric import Symmetric


@paper("Full cache", family="baseline")
def full() -> Method:
    """Baseline: every token, as computed."""
    return Method()


@paper("Random eviction", family="baseline", kvpress=Press("RandomPress", same="no: other random numbers"))
def random(budget: Amount, *, seed: Seed = 0) -> Method:
    """Baseline: a uniformly random set of tokens per head, the same for a row alone and in a batch."""
    return Method(Keep(RandomScore(seed), Budget(budget), Uniform()))


@paper(
    "Sinks and recent tokens",
    family="baseline",
    kvpress=Press("StreamingLLMPress", same="the same set, at the end of the prompt; acts in decoding too"),
    aliases=("sinkrecent",),
)
def sink_recent(budget: Amount, *, sinks: Tokens = 4) -> Method:
    """Baseline: the first `sinks` and the newest tokens, at their own positions, also while decoding."""
    return Method(Keep(Position(), Budget(budget), Uniform(), (Sink(sinks),), when=STEP))


@paper(
    "Positions without gaps",
    family="baseline",
    kvpress=Press("KeyRerotationPress", same="yes, chained with the method of the press inside it"),
    aliases=("rerotated",),
)
def renumbered() -> Method:
    """Baseline: keys are rotated by their ranks in the cache, as if the evicted tokens had never existed.

    Chained with a method that drops tokens (`snapkv + renumbered`), it gives kept keys new positions without
    gaps, and the next tokens those that follow.
    """
    return Method(Keep(None, Budget(1.0), Uniform(), phase=ByRank()))


@paper("Per-token int8", family="baseline")
def int8() -> Method:
    """Baseline: min-max int8 per token and head, keys and values alike."""
    return Method(store=Store(Affine(8), Affine(8)))


@paper("Per-token int4", family="baseline")
def int4(*, group: Group | None = 32, keys: Literal["token", "channel"] = "token") -> Method:
    """Baseline: min-max int4 per token in groups of `group` channels (None: a whole head).

    keys="channel": keys per channel instead, in groups of `group` tokens, which are encoded once they are
    complete (as `kivi:bits=4,residual=0`, whose values are packed otherwise).
    """
    of_keys = Affine(4, group=group) if keys == "token" else Affine(4, axis="channel", group=group)
    return Method(store=Store(of_keys, Affine(4, group=group)))


@paper("Scales per token and head", family="baseline", aliases=("per-token-per-head",))
def per_token_head(*, bits: Literal[8, 4] = 8) -> Method:
    """Baseline: symmetric integers with a float32 scale per token and KV head, as serving engines store.

    code = round(x (2^(bits - 1) - 1) / max |x|): with 8 bits, vLLM's `int8_per_token_head`. `fp8` is the same
    with float8, and `int8` has a zero point beside the scale.
    """
    codec = Symmetric(bits)
    return Method(store=Store(codec, codec))


@paper("Per-token float8", family="baseline")
def fp8(*, kind: Literal["e4m3", "e5m2"] = "e4m3") -> Method:
    """Baseline: float8 with one scale per token and head."""
    return Method(store=Store(Float8(kind), Float8(kind)))


@paper("Offloaded cache", family="baseline")
def offloaded() -> Method:
    """Baseline: every token, in host memory, from which a step fetches the layers one by one.

    Chained with a store (`kivi + offloaded`) or with a method that drops tokens after prompts (`snapkv +
    offloaded`), it puts the rest there. FlexGen (arXiv:2303.06865) does this with caches and weights.
    """
    return Method(host=Host())
