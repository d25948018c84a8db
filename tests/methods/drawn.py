"""Methods composed of randomly drawn words, and the properties that every one of them must have.

The words are those of the table's rows, each in every place where it may stand, so a new method's words are
drawn from its first day. What the grammar refuses of a draw is replaced by its plain form, part by part,
until the rest is legal; so every draw gives a sentence, and the refusals on the way to it.
"""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from kvjax import steps
from kvjax.commands.explain_sentences import inside
from kvjax.compat.model_fit import check_budget, check_fit
from kvjax.grammar import Budget, Keep, Method, chain
from kvjax.grammar.fitted import fitted_words
from kvjax.grammar.phase import BY_POSITION, ByRank
from kvjax.grammar.when import PREFILL_END, Every, WhenFull
from kvjax.keep.algebra import Staged
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.patterns import Recent, Sink
from kvjax.keep.scores.crush import Representatives
from kvjax.state.cache import nbytes
from kvjax.steps import Run
from tests.methods.battery import (
    CONFIGS,
    PACKED,
    ROOM,
    SHARED,
    B,
    T,
    compressed,
    model,
    off,
    params,
    positions,
    reads_apart,
    step,
    wanted,
)
from tests.methods.table import PAGE, ROWS

# The plain word that replaces a part which the grammar refuses.
PLAIN: dict[str, Any] = dict(
    merge=None, lower=None, narrow=None, phase=BY_POSITION, per_query_head=False, skip_layers=0, reuse=1,
    protect=(), allocate=Uniform(), when=PREFILL_END, budget=Budget(0.5), store=None, read=None,
)  # fmt: skip
_LENGTHS = [len(row) for row in PACKED]
_TWIN = len(PACKED) - 1


class Drawn(NamedTuple):
    """A sentence on a model, and why parts of the draw were refused on the way to it."""

    model: str
    method: Method
    refusals: tuple[str, ...]


@cache
def words(name: str) -> dict[str, list[Any]]:
    """Collect the table's words by the part of a sentence in which they stand; fitted ones on their model."""
    found: dict[str, dict[Any, None]] = {part: {} for part in ("score", *PLAIN)}
    for row in ROWS:
        method = row.method()
        parts = {} if method.keep is None or method.keep.score is None else _parts(method.keep)
        for part, word in (parts | {"store": method.store, "read": method.read}).items():
            if word is not None and (row.model == name or not any(True for _ in fitted_words(word))):
                found[part][word] = None
    more: dict[str, list[Any]] = dict(
        budget=[Budget(0.25), Budget(0.5), Budget(10), Budget(1.0)], per_query_head=[True], skip_layers=[1],
        protect=[(), (Sink(2), Recent(4)), (Recent(0.5),)], when=[Every(3), WhenFull(14)],
        phase=[ByRank()], reuse=[2],
    )  # fmt: skip
    return {part: [*dict.fromkeys([*of_table, *more.get(part, [])])] for part, of_table in found.items()}


def _parts(keep: Keep) -> dict[str, Any]:
    """Split a keep into its words; a score stands with its probe."""
    parts = {
        part: getattr(keep, part) for part in PLAIN if hasattr(keep, part) and part not in ("store", "read")
    }
    return parts | {"score": (keep.score, keep.probe)}


# One of so many draws has another word than the plain one in these parts; in all others, every second one.
_SELDOM = dict(merge=4, lower=6, narrow=8, phase=5, per_query_head=8, skip_layers=6, reuse=8, read=4)


def draws() -> st.SearchStrategy[Random]:
    """Return what `legal` draws with: hypothesis' own choices come in runs of the same words."""
    return st.randoms(use_true_random=True)


def legal(random: Random) -> Drawn:
    """Draw a sentence on one of the models of the battery: parts are made plain until nothing refuses it."""
    name = random.choice(["4/2", "4/2", "4/2", *CONFIGS])
    known = words(name)
    drawn = {"score": random.choice(known["score"])}
    for part, plain in PLAIN.items():
        other = known[part] and random.randrange(_SELDOM.get(part, 2)) == 0
        drawn[part] = random.choice(known[part]) if other else plain
    refusals = []
    for part in ("", *random.sample(sorted(PLAIN), len(PLAIN))):
        drawn = drawn | ({part: PLAIN[part]} if part else {})
        try:
            method = sentence(drawn)
            check_fit(method, model(name).config)
            check_budget(method, _LENGTHS)
            return Drawn(name, method, tuple(refusals))
        except ValueError as error:
            refusals += [str(error)] if str(error) not in refusals else []
    raise AssertionError(f"a score by itself is refused: {drawn['score']}: {refusals[-1]}")


def sentence(drawn: dict[str, Any]) -> Method:
    """Build the sentence of these words; ValueError where it cannot work."""
    score, probe = drawn["score"]
    of_keep = {part: word for part, word in drawn.items() if part not in ("score", "store", "read")}
    keep = Keep(score, probe=probe, page=PAGE, **of_keep)
    return chain(keep, *(word for word in (drawn["store"], drawn["read"]) if word is not None))


# --- what must be true ------------------------------------------------------------------------------


def is_one_sentence(refusal: str) -> bool:
    """Whether a refusal is a line that says what is wrong and what to do, and not a traceback of jax."""
    return "\n" not in refusal and 30 < len(refusal) < 500 and "Traceback" not in refusal


def traced(drawn: Drawn) -> None:
    """Trace a prompt and a step, which leaves the cache's shapes as they are: one program serves all."""
    m, own = model(drawn.model), params(drawn.model)
    assert drawn.method.keep is not None
    run = Run(m.config, drawn.method)
    sizes: dict[str, Any] = dict(room=ROOM, compress=True)
    apart = reads_apart(drawn.method) or not steps.needs_of(run, m.params) <= wanted(drawn.model)

    def prompt_of(given: Any) -> Any:
        if apart:
            return steps.prefill(run, own, *given, None, tokens_bound=T, **sizes)[1]
        return steps.settle(run, own, given, None, tokens=T, **sizes)

    def both(given: Any) -> tuple[Any, Any]:
        cache = prompt_of(given)
        decode = Run(run.config, drawn.method.decode_part())
        token = jnp.zeros(len(PACKED), jnp.int32)
        return cache, steps.step(decode, own, cache, token, jnp.ones(len(PACKED), bool))[1]

    whole = jnp.zeros((len(PACKED), T), jnp.int32), jnp.asarray(_LENGTHS, jnp.int32)
    given = whole if apart else _reading(drawn.model, drawn.method.keep.probe)
    before, after = jax.eval_shape(both, given)
    shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(cache)] for cache in (before, after)]
    assert shapes[0] == shapes[1] and nbytes(before) > 0


@cache
def _reading(name: str, probe: Any) -> steps.PrefillOutputs:
    """Trace PACKED as a model reads it, with all that the rows on it observe; nothing is compiled."""
    run = Run(model(name).config, Method())
    if probe is not None:
        read = lambda own, prompt: steps.probed(run, own, prompt, probe)  # noqa: E731
        return jax.eval_shape(read, params(name), _reading(name, None))
    read = lambda own, *texts: steps.observe(run, own, *texts, None, wanted(name))  # noqa: E731
    lengths = jnp.asarray(_LENGTHS, jnp.int32)
    return jax.eval_shape(read, params(name), jnp.zeros((len(PACKED), T), jnp.int32), lengths)


def ran(drawn: Drawn) -> None:
    """Run a prompt of unequal rows, which leaves what it may, and steps that go on from there."""
    m, keep = model(drawn.model), drawn.method.keep
    assert keep is not None
    done = compressed(drawn.model, drawn.method)
    found = positions(done.cache)
    assert np.isfinite(done.asked).all()
    # Counts that follow from sums over a stack may differ by one where these are rounded otherwise.
    twins = [pair for lists in found for pair in zip(lists[_TWIN], lists[SHARED], strict=True)]
    apart = max(len(a ^ b) for a, b in twins)
    assert apart <= (0 if keep.allocate.uniform else 2)
    assert apart or off(done.asked[_TWIN], done.asked[SHARED]) < 1e-5
    for b in range(B):
        check_kept(drawn, [lists[b] for lists in found], _LENGTHS[b])
    if keep.budget == Budget(1.0) and _changes_nothing(drawn.method):
        full = compressed(drawn.model, Method())
        assert off(done.asked, full.asked) < 1e-4
    cache = done.cache
    for token in (3, 5):
        logits, cache = step(m, cache, [token] * len(PACKED), append=True)
        assert np.isfinite(logits).all()
    check_steps(drawn, found, positions(cache))


def _changes_nothing(method: Method) -> bool:
    """Whether a method that keeps all tokens leaves answers as they are."""
    keep = method.keep
    assert keep is not None
    rotates_alike = keep.phase in (BY_POSITION, ByRank())
    stays = (
        type(keep.allocate) is Uniform
        and not _leaves_more(keep.score)
        and keep.narrow is None
        and keep.lower is None
    )
    return (method.store, method.read) == (None, None) and rotates_alike and stays


def _chooses(drawn: Drawn) -> list[int]:
    """Find the layers in which the keep chooses."""
    config, keep = model(drawn.model).config, drawn.method.keep
    assert keep is not None
    return [i for i in range(config.layers) if i >= keep.skip_layers and config.window(i) is None]


def _n(keep: Keep, length: int) -> int:
    """Count the slots of a row's lists, as the paper of every budget counts them."""
    amount = keep.budget.amount
    return (
        min(amount, length) if isinstance(amount, int) else max(1, int(round(amount * 1000) * length // 1000))
    )


def _leaves_more(score: Any) -> bool:
    """Whether a score says, in its words, that slots leave although there is room."""
    return any("-inf" in (type(word).__doc__ or "") for word in _within(score))


def _within(word: Any) -> list[Any]:
    """Yield a word and all that it is made of."""
    return [word, *(deep for one in inside(word) for deep in _within(one))]


def check_kept(drawn: Drawn, lists: list[list[set[int]]], length: int) -> None:
    """Check, per layer and KV head, that kept tokens are the row's own and within the budget."""
    config, keep = model(drawn.model).config, drawn.method.keep
    assert keep is not None
    n, everything = _n(keep, length), set(range(length))
    for i, layer in enumerate(lists):
        windowed = config.window(i) is not None
        assert len(layer) == (config.heads if keep.per_query_head and not windowed else config.kv_heads)
        assert all(kept and kept <= everything for kept in layer)
        if (
            keep.narrow is None
            and config.window(i) is None
            and (i < keep.skip_layers or keep.lower is not None)
        ):
            assert all(kept == everything for kept in layer)
    if keep.lower is not None or keep.narrow is not None or hasattr(keep.allocate, "threshold"):
        return
    chosen = [kept for i in _chooses(drawn) for kept in lists[i]]
    if not keep.allocate.uniform:
        assert sum(map(len, chosen)) <= n * len(chosen)
        return
    assert all(len(kept) <= n for kept in chosen)
    if type(keep.allocate) is Uniform and not _leaves_more(keep.score):
        assert all(len(kept) == n for kept in chosen)
    if any(isinstance(word, Staged | Representatives) for word in _within(keep.score)):
        return  # what the score itself sets to infinity stays as protected slots do, the older first
    pos = np.arange(length, dtype=np.int32)[None, None]
    for pattern in keep.protect:
        mask = np.asarray(pattern(pos, np.array([length], np.int32), np.array([n], np.int32)))[0, 0]  # type: ignore[arg-type]
        assert all(set(np.flatnonzero(mask).tolist()) <= kept for kept in chosen)


def check_steps(drawn: Drawn, before: Any, after: Any) -> None:
    """Check that after two steps KV heads hold their slots and the new ones, or their budget."""
    keep = drawn.method.keep
    assert keep is not None
    bounded = type(keep.allocate) is Uniform and keep.lower is None and keep.narrow is None
    for i in _chooses(drawn):
        for b in range(B):
            new = {_LENGTHS[b], _LENGTHS[b] + 1}
            for old, now in zip(before[i][b], after[i][b], strict=True):
                assert now <= old | new
                if not keep.when.in_steps:
                    assert now == old | new
                elif bounded:
                    assert len(now) <= keep.when.due_at(_n(keep, _LENGTHS[b] + 2))
