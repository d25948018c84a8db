"""Speculative decoding: a cheap draft proposes tokens, and one pass of the model verifies them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import steps
from kvjax.api.drafts import DraftSource, FewerSlots, FirstCodes, Lookup, drafting, probabilities
from kvjax.api.nan_checks import refuse_prompt, refuse_step
from kvjax.api.prefill import PaddedTokens, bare_cache, check_reach, padded, prefill
from kvjax.api.rollback import rollback
from kvjax.api.sampling import Sampler, Settings, chosen
from kvjax.api.types import Lengths, TokenIds
from kvjax.api.verify import one_pass_refused, over_slots, pass_over_all_refused
from kvjax.base.checks import prng_key, stop_ids, whole_number
from kvjax.base.errors import InputError
from kvjax.compress.group import GroupMethod
from kvjax.grammar import Method
from kvjax.hosts.arrays import fetch
from kvjax.models.model import Model, check_single
from kvjax.pure import decoding
from kvjax.state.cache import Cache


class Speculated(NamedTuple):
    """tokens [B, max_new_tokens], -1 after a row's last token; how many each row wrote; the cache.

    texts: the rows as text, None if the model has no tokenizer. passes: how often the model ran. drafted,
    accepted: how many draft tokens it read, and how many of them it accepted.
    """

    tokens: Int[np.ndarray, "B M"]
    lengths: Int[np.ndarray, "B"]
    cache: Cache
    texts: list[str] | None
    passes: int
    drafted: int
    accepted: int

    @property
    def acceptance(self) -> float:
        """The share of drafted tokens that were accepted."""
        return self.accepted / max(self.drafted, 1)


def speculate(
    model: Model,
    tokens: TokenIds,
    *,
    draft: Method | str | Model | Lookup | FirstCodes | FewerSlots,
    k: int = 4,
    method: Method | str | None = None,
    lengths: Lengths | None = None,
    max_new_tokens: int = 64,
    sampler: Sampler | None = None,
    stop: Sequence[int] | None = None,
    key: Array | None = None,
    on_tokens: Callable[[int, list[int]], None] | None = None,
) -> Speculated:
    """Generate what `kvjax.generate` would, from drafts of up to k tokens that the model checks in one pass.

    Greedy texts are those of greedy decoding; drawn ones have the sampler's distribution exactly (Leviathan
    et al., 2022, arXiv:2211.17192, algorithm 1: a token is accepted with probability min(1, p / q), else
    another is drawn from max(0, p - q)).

    Args:
        model: a model of one decoder.
        tokens: token ids [B, T], padded on the right, or a list of lists.
        draft: a method, under which the model itself drafts over a smaller cache of its own ("int4",
            "snapkv(budget=0.25)", "h2o(budget=0.1)"); another model of the same tokenizer;
            `kvjax.Lookup()`, which drafts from the text itself; or a part of the cache that checks:
            `kvjax.FirstCodes()`, the first part of its codes, or `kvjax.FewerSlots("quest(budget=0.1)")`, the
            slots that a read picks.
        k: the most tokens of a draft.
        method: compresses the cache of the model that checks.
        lengths: tokens of each row [B], where rows are padded.
        max_new_tokens: the most tokens that a row generates.
        sampler: how tokens are drawn; None takes the likeliest.
        stop: as in `generate`.
        key: as in `generate`.
        on_tokens: called with (row, tokens) as they are generated, several at a time.

    Returns:
        A `Speculated`: tokens [B, max_new_tokens], texts, the cache, and how many drafted tokens were
            accepted. Under FewerSlots the cache is one of `kvjax.chain(method, read)`: later steps read few
            of its slots, while prefills and `speculate` read all of them.

    Raises:
        InputError: for what `prefill` refuses, a method under which several tokens cannot be read in one pass
            or removed again (those that evict in steps, recurrent states), a draft of another
            vocabulary, and NaN in logits.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> out = kvjax.speculate(model, [[1, 2, 3], [4, 5]], draft="int8", k=3, max_new_tokens=6, stop=[])
    >>> plain = kvjax.generate(model, [[1, 2, 3], [4, 5]], max_new_tokens=6, stop=[])
    >>> bool((out.tokens == plain.tokens).all()), out.passes < 6, out.acceptance > 0.9
    (True, True, True)
    """
    check_single(model, "write with kvjax.generate")
    k, new = (
        whole_number("k", k, 1, "drafted tokens"),
        whole_number("max_new_tokens", max_new_tokens, 1, "tokens"),
    )
    how = (sampler or Sampler()).settings
    ends = {i for i in stop_ids(model.stop_ids if stop is None else stop) if i >= 0}
    batch = padded(model, tokens, lengths)
    method = draft.beside(method) if isinstance(draft, FewerSlots) else method
    logits, cache = prefill(model, tokens, method=method, lengths=lengths, room=new + k + 1)
    check_reach(model, int(batch.lengths.max()) + new + k + 1, cache.method)
    # Slots that a draft leaves out are those that its check reads.
    picking = not isinstance(draft, FewerSlots)
    _check(model, cache, one_pass_refused if picking else pass_over_all_refused)
    verified = partial(over_slots, model, picking=picking)
    prompts = [row[:n].tolist() for row, n in zip(np.asarray(batch.tokens), batch.lengths, strict=True)]
    writer = drafting(draft, model, prompts, how, new + 2 * k + 1, cache.method)
    keys = jax.random.split(jax.random.key(0) if key is None else prng_key(key), len(prompts))
    if np.isnan(np.asarray(logits)).any():
        refuse_prompt(model, *batch)
    first = np.asarray(chosen(how, logits, jax.vmap(partial(jax.random.fold_in, data=0))(keys)))
    texts = _Texts([[] for _ in prompts], prompts, new, ends, [True] * len(prompts), on_tokens)
    for b, token in enumerate(first.tolist()):
        texts.add(b, [token])
    counts = np.zeros(3, int)
    while texts.left().any():
        cache, judged = _round(model, cache, writer, texts, how, keys, k, int(counts[0]), verified)
        counts += (1, *judged)
    return _finished(model, cache, texts, counts, verified)


# Reads padded tokens over a cache: their logits, and the cache with them.
Verified = Callable[[Cache, PaddedTokens], tuple[Float[Array, "B T V"], Cache]]


@dataclasses.dataclass
class _Texts:
    """What rows have generated. pending: the rows whose last token is in no cache yet."""

    written: list[list[int]]
    prompts: list[list[int]]
    new: int
    ends: set[int]
    pending: list[bool]
    told: Callable[[int, list[int]], None] | None = None

    def add(self, row: int, tokens: list[int]) -> None:
        self.written[row].extend(tokens)
        if self.told is not None:
            self.told(row, tokens)

    def left(self) -> Int[np.ndarray, "B"]:
        """How many more tokens each row may generate; 0 for rows that have ended."""
        done = [row[-1] in self.ends for row in self.written]
        return np.array([0 if d else self.new - len(r) for r, d in zip(self.written, done, strict=True)])

    def whole(self) -> list[list[int]]:
        return [[*a, *b] for a, b in zip(self.prompts, self.written, strict=True)]

    def cut(self, row: Sequence[int]) -> list[int]:
        """Tokens up to the first one that ends a text."""
        end = next((i for i, token in enumerate(row) if token in self.ends), len(row))
        return list(row[: end + 1])


def _round(
    model: Model,
    cache: Cache,
    writer: DraftSource,
    texts: _Texts,
    how: Settings,
    keys: Array,
    k: int,
    number: int,
    verified: Verified,
) -> tuple[Cache, tuple[int, int]]:
    """Drafts and verifies once; returns the cache, and how many drafted tokens were read and accepted."""
    left, start = texts.left(), fetch(cache.next)
    most = np.minimum(np.maximum(left - 1, 0), np.minimum(k, _before_flush(cache) - 2))
    most = np.maximum(most, 0)
    keys = jax.vmap(partial(jax.random.fold_in, data=number + 1))(keys)
    drawn_by = jax.vmap(partial(jax.random.fold_in, data=0))(keys)
    found, cache = writer.propose(texts.whole(), most, k, drawn_by, cache)
    # A row that has ended reads nothing; the others append their last token, and the draft.
    count = np.where(left > 0, found.counts + 1, 0).astype(np.int32)
    last = np.array([row[-1] for row in texts.written], np.int32)[:, None]
    read = padded(model, np.concatenate([last, found.tokens], 1), count, least=0)
    logits, cache = verified(cache, read)
    taken, following, bad = jax.tree.map(
        np.asarray,
        _judged(how, _of_width(logits, k + 1), *found, jax.vmap(partial(jax.random.fold_in, data=1))(keys)),
    )
    if (bad & (left > 0)).any():
        refuse_step(min(map(len, texts.written)), "full" if cache.method is None else cache.method.id)
    stays = np.zeros_like(start)
    for b in range(len(start)):
        if left[b]:
            more = texts.cut([*found.tokens[b, : taken[b]].tolist(), int(following[b])])
            texts.pending[b] = len(more) > taken[b]
            stays[b] = 1 + min(taken[b], len(more))
            texts.add(b, more)
    return rollback(cache, count - stays), (int(found.counts.sum()), int(taken[left > 0].sum()))


def _of_width(logits: Float[Array, "B t V"], width: int) -> Float[Array, "B width V"]:
    """Logits padded to `width` places, so that rounds with shorter drafts share a program."""
    logits = logits[:, :width]
    return jnp.pad(logits, [(0, 0), (0, width - logits.shape[1]), (0, 0)])


@jax.jit
def _judged(
    how: Settings, logits: Float[Array, "B t V"], tokens: Int[Array, "B k"], counts: Int[Array, "B"],
    drawn_by: Float[Array, "B k V"] | None, keys: Array,
) -> tuple[Int[Array, "B"], Int[Array, "B"], Array]:  # fmt: skip
    """How many tokens of each draft are accepted, the token after them, and rows with NaN logits."""
    b, k = tokens.shape
    p = probabilities(how, logits)
    q = jax.nn.one_hot(tokens, p.shape[-1]) if drawn_by is None else drawn_by
    one = lambda x: jnp.take_along_axis(x, tokens[..., None], axis=-1)[..., 0]  # noqa: E731
    chance = jax.vmap(lambda key: jax.random.uniform(key, (k,)))(keys)
    there = jnp.arange(k, dtype=jnp.int32)[None] < counts[:, None]
    right = there & (chance * one(q) < one(p[:, :k]))
    taken = jnp.cumprod(right, axis=1, dtype=jnp.int32).sum(1)
    at = taken[:, None, None]
    ours = jnp.take_along_axis(p, at, axis=1)[:, 0]
    theirs = jnp.take_along_axis(jnp.pad(q, [(0, 0), (0, 1), (0, 0)]), at, axis=1)[:, 0]
    # After a fully accepted draft, the next token is drawn from the model's own distribution.
    rest = jnp.where((taken < counts)[:, None], jnp.maximum(ours - theirs, 0.0), ours)
    rest = jnp.where(rest.sum(-1, keepdims=True) > 0, rest, ours)
    following = jax.vmap(jax.random.categorical)(
        jax.vmap(partial(jax.random.fold_in, data=1))(keys), jnp.log(rest)
    )
    seen = jnp.arange(logits.shape[1], dtype=jnp.int32)[None] <= counts[:, None]
    bad = (jnp.isnan(logits).any(-1) & seen).any(1)
    return taken, following.astype(jnp.int32), bad


def _before_flush(cache: Cache) -> Int[np.ndarray, "B"]:
    """How many tokens each row can take before a granule is encoded, which no rollback undoes."""
    assert cache.added is not None
    gms: tuple[GroupMethod, ...] = cache.added.groups
    return fetch(steps.until_flush(gms, bare_cache(cache)))


def _check(model: Model, cache: Cache, refused: Callable[..., str]) -> None:
    """Raise InputError if drafts cannot be read in one pass, or not be removed again."""
    run, name = decoding(model, cache.method, None), "full" if cache.method is None else cache.method.id
    why = refused(model, run, cache, np.ones(cache.next.shape, int))
    if any(gm.kind == "state" for gm in run.groups(model.params)):
        why = why or "what recurrent layers carry cannot be taken back"
    if any(gm.traces or gm.carried for gm in run.groups(model.params)):
        why = why or "what it remembers of slots and rows cannot be taken back"
    if why:
        raise InputError(
            f"{name} cannot judge drafts: {why}; write with kvjax.generate, or use it as the draft of "
            "another method"
        )


def _finished(
    model: Model, cache: Cache, texts: _Texts, counts: Int[np.ndarray, "3"], verified: Verified
) -> Speculated:
    """Finish the rows, and append each row's last token to the cache."""
    if any(texts.pending):
        last = np.array([row[-1:] for row in texts.written], np.int32)
        pending = padded(model, last, np.array(texts.pending, np.int32), least=0)
        _, cache = verified(cache, pending)
    sizes = np.array([len(row) for row in texts.written], np.int32)
    tokens = np.array([[*row, *[-1] * (texts.new - len(row))] for row in texts.written], np.int32)
    texts_of = None
    if model.tokenizer is not None:
        plain = [[i for i in row if i not in texts.ends] for row in texts.written]
        texts_of = [model.tokenizer.decode(row, skip_special_tokens=True) for row in plain]
    return Speculated(tokens, sizes, cache, texts_of, *(int(x) for x in counts))
