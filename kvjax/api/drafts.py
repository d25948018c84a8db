"""Drafts for `kvjax.speculate`: by a model with its own cache, over part of the one that checks, or text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.api.prefill import bare_cache, prefill
from kvjax.api.rollback import more_added, rollback
from kvjax.api.sampling import GREEDY, Settings, chosen, filtered
from kvjax.api.step import stepping
from kvjax.api.types import Step
from kvjax.api.verify import one_pass_refused, verify
from kvjax.base.checks import whole_number
from kvjax.base.errors import InputError
from kvjax.grammar import Method
from kvjax.methods.parse import as_method, chain
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.pure import decoding
from kvjax.state.cache import Cache
from kvjax.state.codes import Codec, Codes
from kvjax.store.residual import FirstPart, Residual


class Proposal(NamedTuple):
    """Tokens that may follow; the first `counts` of each row are used.

    probabilities: those with which each token was drawn; None if a draft is deterministic.
    """

    tokens: Int[np.ndarray, "B k"]
    counts: Int[np.ndarray, "B"]
    probabilities: Float[Array, "B k V"] | None = None


@runtime_checkable
class DraftSource(Protocol):
    """A source of draft tokens for each text of a batch."""

    def propose(
        self, texts: list[list[int]], most: Int[np.ndarray, "B"], k: int, keys: Array, cache: Cache
    ) -> tuple[Proposal, Cache]:
        """Propose tokens to follow each text: at most k, and at most `most`. keys: one per row.

        cache: that of the model that checks, which holds the texts without their last tokens; it is returned
        as it was, in other arrays if a draft reads it.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Drafts from the text itself: the tokens that followed an earlier occurrence of its last n tokens.

    "Prompt Lookup Decoding" (Saxena, 2023). If the last n tokens occurred nowhere before, fewer are looked
    up; the latest occurrence counts, and a text without one has no draft.

    Args:
        n: how many of the last tokens to look up.

    Raises:
        InputError: for `n` below 1.

    >>> Lookup(2).after([7, 8, 9, 1, 7, 8], 3)
    [9, 1, 7]
    """

    n: int = 3

    def __post_init__(self):
        whole_number("n", self.n, 1, "tokens to look up")

    def after(self, text: list[int], most: int) -> list[int]:
        for n in range(min(self.n, len(text) - 1), 0, -1):
            for i in range(len(text) - n - 1, -1, -1):
                if text[i : i + n] == text[-n:]:
                    return text[i + n : i + n + most]
        return []

    def propose(
        self, texts: list[list[int]], most: Int[np.ndarray, "B"], k: int, keys: Array, cache: Cache
    ) -> tuple[Proposal, Cache]:
        found = [self.after(text, min(k, int(n))) if n else [] for text, n in zip(texts, most, strict=True)]
        tokens = np.array([[*row, *[0] * (k - len(row))] for row in found], np.int32)
        return Proposal(tokens, np.array([len(row) for row in found], np.int32)), cache


@dataclasses.dataclass(frozen=True)
class FirstCodes:
    """Drafts by the model itself, over the first part of its cache's codes (QuantSpec, arXiv:2502.10424).

    The method's codes have two parts, the second of the error of the first: `quantspec`, `gear`. Drafts read
    the first part, and the model that checks reads both, of one cache in memory.

    >>> import kvjax
    >>> from kvjax.models.config import Config
    >>> from kvjax.models.params import init
    >>> config = Config(vocab=16, d_model=16, layers=1, heads=2, kv_heads=1, head_dim=8, d_ff=16)
    >>> model = Model(config, init(config, jax.random.key(0)))
    >>> method = kvjax.method("quantspec", group=8, residual=8)
    >>> how = dict(draft=FirstCodes(), k=3, max_new_tokens=5, stop=[])
    >>> out = kvjax.speculate(model, [[1, 2, 3] * 8], method=method, **how)
    >>> out.passes < 5
    True
    """


@dataclasses.dataclass(frozen=True)
class FewerSlots:
    """Drafts by the model itself, over the slots that a read picks of the cache that checks.

    As in TriForce (arXiv:2404.11912) and MagicDec (arXiv:2408.11049), a drafted token attends to few slots of
    the cache, and the model that checks to all of them: there is one cache in memory. A step moves whole
    pages of the newest tokens to those that are ranked, and drafts end before that.

    Args:
        read: a method that is a read and nothing else, and picks pages of 3 tokens or more, or its text:
            "quest(budget=0.1)". A place in host memory may belong to it.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> read = FewerSlots("quest(budget=8, page=8, skip_layers=0)")
    >>> out = kvjax.speculate(model, [list(range(3, 60))], draft=read, k=3, max_new_tokens=6, stop=[])
    >>> plain = kvjax.generate(model, [list(range(3, 60))], max_new_tokens=6, stop=[])
    >>> bool((out.tokens == plain.tokens).all())
    True
    """

    read: Method | str

    def beside(self, method: Method | str | None) -> Method:
        """Build the method of the one cache: `method`, and the read of the drafts.

        InputError for a read that picks single tokens, or for other parts than a read.
        """
        own = as_method(self.read)
        read = own.read
        if read is None or dataclasses.replace(own, read=None, host=None, spec=()) != Method():
            raise InputError(
                f"FewerSlots was given {own.id}, expected a method that is a read and nothing else, such as "
                "quest(budget=0.1): give what is kept and how it is stored as the method of the model that "
                "checks"
            )
        if read.granule < 3:
            raise InputError(
                f"{own.id} picks {'single tokens' if read.granule == 1 else 'pages of 2 tokens'}, and drafts "
                "end before a step moves tokens to those that are ranked: give a read of larger pages, such "
                "as quest(budget=0.1)"
            )
        return own if method is None else chain(as_method(method), own)


class SameCacheDrafts:
    """What drafts over the cache that checks. It holds no cache: it steps on the one that it is given.

    method: under which it steps. first_codes: whether it reads the first of two codes alone.
    """

    def __init__(self, model: Model, method: Method | None, how: Settings, first_codes: bool):
        self.how, self.first_codes = how, first_codes
        self.step, self.params = stepping(model, method, None)

    def propose(
        self, texts: list[list[int]], most: Int[np.ndarray, "B"], k: int, keys: Array, cache: Cache
    ) -> tuple[Proposal, Cache]:
        if not most.any():
            return _nothing(len(texts), k), cache
        labels = dict(method=cache.method, model=cache.model, on_mesh=cache.on_mesh)
        added = more_added(cache.added, most)
        state, found, how_likely = bare_cache(cache), [], []
        if self.first_codes:
            state = _recoded(state, Residual, FirstPart)
        token = jnp.asarray([text[-1] for text in texts], jnp.int32)
        for i in range(k):
            logits, state = _one(self.step, self.params, state, token, jnp.asarray(most > i))
            token, p = _drawn(self.how, logits, jax.vmap(partial(jax.random.fold_in, data=i))(keys))
            found.append(token)
            how_likely.append(p)
        proposed = _proposal(found, how_likely, most)
        spare = cache.spare - int(most.max())
        if self.first_codes:
            state = _recoded(state, FirstPart, lambda codec: codec.of)
        # The drafted tokens lie in the cache, with keys and values that what drafts led to.
        return proposed, rollback(dataclasses.replace(state, spare=spare, added=added, **labels), most)


class ModelDrafts:
    """Drafts by a model with a cache of its own, which holds the texts without the drafts."""

    def __init__(
        self, model: Model, method: Method | str | None, tokens: list[list[int]], how: Settings, room: int
    ):
        _, self.cache = prefill(model, tokens, method=method, room=room)
        self.model, self.how = model, how
        self.have = np.array([len(row) for row in tokens])
        run = decoding(model, self.cache.method, None)
        self.by_steps = bool(one_pass_refused(model, run, self.cache, np.ones_like(self.have)))
        self.step, self.params = stepping(model, self.cache.method, None)

    def propose(
        self, texts: list[list[int]], most: Int[np.ndarray, "B"], k: int, keys: Array, cache: Cache
    ) -> tuple[Proposal, Cache]:
        if not most.any():
            return _nothing(len(texts), k), cache
        new = [text[n:] if m else [] for text, n, m in zip(texts, self.have, most, strict=True)]
        logits = self._read_by_steps(new) if self.by_steps else self._read(new)
        self.have += [len(row) for row in new]
        mine, found, how_likely = jax.tree.map(jnp.copy, bare_cache(self.cache)), [], []
        for i in range(k):
            token, p = _drawn(self.how, logits, jax.vmap(partial(jax.random.fold_in, data=i))(keys))
            found.append(token)
            how_likely.append(p)
            if i + 1 < k:
                logits, mine = _one(self.step, self.params, mine, token, jnp.asarray(most > i + 1))
        return _proposal(found, how_likely, most), cache

    def _read(self, new: list[list[int]]) -> Float[Array, "B V"]:
        """Read tokens in one pass; return the logits after the last token of each row."""
        counts = np.array([len(row) for row in new], np.int32)
        width = max(int(counts.max()), 1)
        tokens = np.array([[*row, *[0] * (width - len(row))] for row in new], np.int32)
        logits, self.cache = verify(self.model, self.cache, tokens, lengths=counts)
        return jnp.take_along_axis(logits, jnp.asarray(np.maximum(counts - 1, 0))[:, None, None], axis=1)[
            :, 0
        ]

    def _read_by_steps(self, new: list[list[int]]) -> Float[Array, "B V"]:
        """`_read`, token by token: for methods that evict, or pick what they read, in every step."""
        cache, out = bare_cache(self.cache), None
        for i in range(max(map(len, new))):
            there = jnp.asarray([i < len(row) for row in new])
            token = jnp.asarray([row[i] if i < len(row) else 0 for row in new], jnp.int32)
            logits, cache = _one(self.step, self.params, cache, token, there)
            out = logits if out is None else jnp.where(there[:, None], logits, out)
        self.cache = dataclasses.replace(cache, method=self.cache.method, model=self.cache.model)
        assert out is not None
        return out


def _nothing(rows: int, k: int) -> Proposal:
    return Proposal(np.zeros((rows, k), np.int32), np.zeros(rows, np.int32))


def _proposal(tokens: list[Array], probabilities: list[Array], most: Int[np.ndarray, "B"]) -> Proposal:
    """Return what was drawn in up to `most` steps of each row."""
    drawn = np.stack([np.asarray(t) for t in tokens], axis=1)
    return Proposal(drawn, most.astype(np.int32), jnp.stack(probabilities, axis=1))


def _first_part(method: Method | None) -> Method:
    """Build a method that decodes the first part of what `method` encodes; InputError if it has no parts."""
    store = None if method is None else method.store
    if method is None or store is None or not {type(store.keys), type(store.values)} & {Residual}:
        raise InputError(
            f"{'full' if method is None else method.id} has no codes of two parts, of which a draft could "
            "read the first: choose the method quantspec, or another draft"
        )
    keys, values = (FirstPart(c) if isinstance(c, Residual) else c for c in (store.keys, store.values))
    return dataclasses.replace(method, store=dataclasses.replace(store, keys=keys, values=values))


def _recoded(cache: Cache, kind: type, change: Callable[[Any], Codec]) -> Cache:
    """Change every codec of a kind in the same arrays."""

    def one(x: Any) -> Any:
        found = isinstance(x, Codes) and isinstance(x.codec, kind)
        return dataclasses.replace(x, codec=change(x.codec)) if found else x

    return jax.tree.map(one, cache, is_leaf=lambda x: isinstance(x, Codes))


def drafting(
    draft: object,
    model: Model,
    tokens: list[list[int]],
    how: Settings,
    room: int,
    method: Method | None = None,
) -> DraftSource:
    """Build the source of drafts for `draft`, with the prompts read; method: of the model that checks."""
    if isinstance(draft, Lookup):
        return draft
    if isinstance(draft, FirstCodes):
        return SameCacheDrafts(model, _first_part(method), how, first_codes=True)
    if isinstance(draft, FewerSlots):
        return SameCacheDrafts(model, method, how, first_codes=False)
    if isinstance(draft, str | Method):
        return ModelDrafts(model, draft, tokens, how, room)
    if not isinstance(draft, Model):
        raise InputError(
            f"draft is {draft!r:.80}, expected a method of the model itself such as 'int4', another model, "
            "kvjax.Lookup(), kvjax.FirstCodes() or kvjax.FewerSlots('quest(budget=0.1)')"
        )
    if draft.config.vocab != model.config.vocab:
        raise InputError(
            f"the draft has {draft.config.vocab} tokens and the model {model.config.vocab}, expected models "
            "of one tokenizer: a token must mean the same to both"
        )
    if other := _other_word(draft.tokenizer, model.tokenizer):
        raise InputError(
            f"token {other[0]} is {other[1]!r} to the draft and {other[2]!r} to the model, expected models "
            "of one tokenizer: a token must mean the same to both"
        )
    return ModelDrafts(draft, None, tokens, how, room)


def _other_word(one: Any, other: Any) -> tuple[int, str, str] | None:
    """Find the first token that two tokenizers write differently; None if there is none, or no tokenizer.

    Tokens that are added to a vocabulary may have other names: a model that chats renames unused ones.
    """
    if one is None or other is None or one is other:
        return None
    mine, its = ({i: word for word, i in t.get_vocab(with_added_tokens=False).items()} for t in (one, other))
    added = {*one.get_added_tokens_decoder(), *other.get_added_tokens_decoder()}
    both = sorted((mine.keys() & its.keys()) - added)
    return next(((i, mine[i], its[i]) for i in both if mine[i] != its[i]), None)


def probabilities(how: Settings, logits: Float[Array, "*b V"]) -> Float[Array, "*b V"]:
    """Compute the distribution of the next token: 1 for the likeliest one if the settings are greedy."""
    flat = logits.reshape(-1, logits.shape[-1])
    greedy = jax.nn.one_hot(jnp.argmax(flat, axis=-1), flat.shape[-1])
    found = jnp.where(how.kind == GREEDY, greedy, jax.nn.softmax(filtered(how, flat)))
    return found.reshape(logits.shape)


@jax.jit
def _drawn(how: Settings, logits: Float[Array, "B V"], keys: Array) -> tuple[Array, Array]:
    return chosen(how, logits, keys), probabilities(how, logits)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _one(
    step: Step, params: Params, cache: Cache, token: Int[Array, "B"], there: Bool[Array, "B"]
) -> tuple[Float[Array, "B V"], Cache]:
    return step(params, cache, token, there)
