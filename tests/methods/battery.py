"""The inputs of tests of methods, computed once: compressed prompts of all rows, conversations of some."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from functools import cache, cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import steps
from kvjax.api.prepare import made
from kvjax.compat.layout_class import LayoutClass, layout_class
from kvjax.compress.group import GroupMethod
from kvjax.grammar import Method
from kvjax.grammar.calls import hiding_of
from kvjax.grammar.fitted import with_fitted
from kvjax.make.stored_inputs import StoredInputs
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.pure import bind
from kvjax.state.cache import Cache, kept_positions
from kvjax.steps import Run
from kvjax.steps.prefilling.narrowing import new_positions
from tests.float64.reference import Decoder, Prompt
from tests.methods.expected import WINDOWS
from tests.methods.rows import Row
from tests.methods.table import BY_LABEL, ROWS

B, T, ROOM, VOCAB = 4, 32, 32, 64

# Two layers compile fast; "deep" is for methods that treat layers differently.
CONFIGS = {
    "4/2": dict(layers=2, heads=4, kv_heads=2),
    "6/3": dict(layers=2, heads=6, kv_heads=3),
    "deep": dict(layers=3, heads=4, kv_heads=2),
    "windowed": dict(layers=3, heads=4, kv_heads=2, windows=WINDOWS),
}


@cache
def model(name: str) -> Model:
    config = Config(vocab=VOCAB, d_model=32, head_dim=16, d_ff=48, **CONFIGS[name])
    return Model(config, init(config, jax.random.key(1)))


@cache
def decoder(name: str) -> Decoder:
    return Decoder(model(name))


class Batch(NamedTuple):
    """Two turns of unequal length, and the tokens of some steps between them."""

    first: list[list[int]]
    steps: np.ndarray
    second: list[list[int]]


def draw(seed: int, first: list[int], second: list[int]) -> Batch:
    rng = np.random.default_rng(seed)
    turn = lambda lengths: [rng.integers(0, VOCAB, n).tolist() for n in lengths]  # noqa: E731
    return Batch(turn(first), rng.integers(0, VOCAB, (3, len(first))), turn(second))


MAIN = draw(0, [32, 27, 20, 16], [32, 9, 5, 12])
SHARED = 2  # the row of MAIN that stands among other companions in OTHER
OTHER = draw(1, [17, 32, 20, 30], [3, 32, 5, 20])
OTHER.first[SHARED], OTHER.second[SHARED] = MAIN.first[SHARED], MAIN.second[SHARED]
OTHER.steps[:, SHARED] = MAIN.steps[:, SHARED]
ALONE = 3  # the row of MAIN that also runs alone, in a smaller bucket
BATCHES = {
    "main": MAIN,
    "other": OTHER,
    "alone": Batch([MAIN.first[ALONE]], MAIN.steps[:, ALONE:], [MAIN.second[ALONE]]),
}


# --- compressed prompts: every row ------------------------------------------------------------------------

# The rows of MAIN, and one of them again in another batch.
PACKED = [*MAIN.first, MAIN.first[SHARED]]
# Empty slots may hold any finite numbers.
GARBAGE = 1e3


@dataclasses.dataclass(frozen=True)
class Packed:
    """The rows PACKED, compressed by a method on a model, and the logits [B, V] of the prompt."""

    name: str
    logits: jax.Array
    cache: Cache

    @cached_property
    def asked(self) -> jax.Array:
        """The logits [B, V] of the last tokens, asked again."""
        last = [row[-1] for row in PACKED]
        return step(made(model(self.name), self.cache.method), self.cache, last, append=False)[0]


_observe = jax.jit(steps.observe, static_argnames=("run", "needs"))
_probed = jax.jit(steps.probed, static_argnames=("run", "probe"))
_settle = jax.jit(steps.settle, static_argnames=("run", "tokens", "room", "compress"))


def needs(row: Row) -> frozenset:
    return steps.needs_of(Run(model(row.model).config, row.method()), model(row.model).params)


@cache
def params(name: str) -> dict[str, Any]:
    """Return a model's parameters, with the arrays of all fitted words that the table has on it."""
    rows = [row for row in ROWS if row.model == name]
    whole = (row.method(row.whole) for row in rows if row.whole is not None)
    return with_fitted(model(name).params, *(row.method() for row in rows), *whole)


def reads_apart(method: Method) -> bool:
    keep = method.keep
    own = keep is not None and (keep.narrow is not None or not keep.phase.first_alike)
    own = own or any(hiding_of(one.keep) is not None for one in method.sentences)
    own = own or any(one.read_prompt is not None for one in method.sentences)
    return own or method.reread is not None or method.make is not None


def _params(name: str, method: Method | None) -> dict[str, Any]:
    """Return the parameters that a method runs on."""
    return params(name) if method is None or method.make is None else made(model(name), method).params


@cache
def wanted(name: str) -> frozenset:
    """All that the rows on a model observe."""
    return frozenset().union(*(needs(row) for row in ROWS if row.model == name))


@cache
def observed(name: str, own: Method | None = None, asked: frozenset | None = None) -> steps.PrefillOutputs:
    """PACKED read by a model, with all that the rows on it observe; padding holds garbage.

    own: a method that reads this prompt in its own way. asked: what is observed instead.
    """
    m = made(model(name), own)
    run = Run(m.config, own or Method())
    asked = asked or (wanted(name) if m is model(name) else steps.needs_of(run, m.params))
    tokens = np.zeros((len(PACKED), T), np.int32)
    for i, row in enumerate(PACKED):
        tokens[i, : len(row)] = row
    lengths = jnp.asarray([len(row) for row in PACKED], jnp.int32)
    prompt = _observe(run, _params(name, own), jnp.asarray(tokens), lengths, None, asked)

    def soiled(x: jax.Array | None, gm: GroupMethod) -> jax.Array | None:
        if x is None:
            return None  # one array is both keys and values
        pos, some = prompt.positions.pos, prompt.narrowed
        pos = pos if some is None else new_positions(run, gm, pos, some)
        return jnp.where((pos >= 0)[None, :, None, :, None], x, GARBAGE)

    def stained(f: Any, gm: GroupMethod) -> Any:
        # A state has no padding.
        return f if isinstance(f, dict) else f._replace(k=soiled(f.k, gm), v=soiled(f.v, gm))

    fresh = tuple(stained(f, gm) for gm, f in zip(run.groups(m.params), prompt.fresh, strict=True))
    return prompt._replace(fresh=fresh)


@cache
def packed(label: str, whole: bool = False) -> Packed:
    """Compress the prompt of a row of the table; whole: with hyper-parameters that keep everything."""
    row = BY_LABEL[label]
    return compressed(row.model, row.method(row.whole if whole else None))


def compressed(name: str, method: Method) -> Packed:
    """Compress the prompt PACKED on a model by a method."""
    run, prompt = to_settle(name, method)
    cache = _settle(run, _params(name, method), prompt, None, tokens=T, room=ROOM, compress=True)
    cache = dataclasses.replace(cache, method=method)
    return Packed(name, prompt.logits, cache)


def to_settle(name: str, method: Method) -> tuple[Run, steps.PrefillOutputs]:
    """PACKED as a method has it read, to be compressed; shared with all that have it read so."""
    m = made(model(name), method)
    run = Run(m.config, bind(method, m))
    own, asked = run.method if reads_apart(run.method) else None, steps.needs_of(run, m.params)
    prompt = observed(name, own, None if asked <= wanted(name) or m is not model(name) else asked)
    probe = run.method.keep.probe if run.method.keep is not None else None
    if probe is not None:
        prompt = _probed(Run(m.config, Method()), params(name), prompt, probe)
    return run, prompt


# --- whole conversations: one row of every class of layout -----------------------------------------------


def class_of(row: Row) -> tuple[LayoutClass, bool]:
    """Return the class of layout of a row; windows of layers are one more way in which layouts differ."""
    return layout_class(row.method()), row.model == "windowed"


@cache
def first_of_each_class() -> tuple[str, ...]:
    """Return the label of the first row of every class of layout."""
    first: dict[tuple[LayoutClass, bool], str] = {}
    for row in ROWS:
        first.setdefault(class_of(row), row.label)
    return tuple(first.values())


# Whose conversation in test_battery.py runs every time, because their steps do what no other's do: evict by
# position or by mass, see a window, read pages, write into pages or into granules of codes. (What answers for
# slots that are not read or have left is in `tests/read/test_channels.py` and `tests/keep/test_residue.py`;
# what samples slots, in `tests/read/test_hashed.py`.)
PLAIN = (
    "streamingllm", "h2o", "snapkv windowed", "adakv", "kivi", "quest",
)  # fmt: skip


def attends_as(row: Row) -> Hashable:
    """Return what attention in a step depends on: rows alike in it differ only in what slots exist and where.

    Layout classes cover where slots are; their conversations are in test_battery.py.
    """
    method, keep = row.method(), row.method().keep
    of_prompt = None if keep is None else (keep.merge, keep.narrow is not None)
    return method.store, method.read, method.stack, method.make, of_prompt


def step(model: Model, cache: Cache, token: Any, append: bool) -> tuple[jax.Array, Cache]:
    """Read one token without donating the cache, so that a test may use it again."""
    model = made(model, cache.method)
    run = Run(model.config, cache.method.decode_part())
    bare = dataclasses.replace(cache, method=None, model="")
    token = jnp.asarray(token, jnp.int32)
    logits, new = steps.step_keeping(
        run, with_fitted(model.params, cache.method), bare, token, jnp.full(token.shape, append)
    )
    return logits, dataclasses.replace(new, method=cache.method, model=cache.model)


def positions(cache: Cache) -> list[list[list[set[int]]]]:
    """Positions held per layer, row and list."""
    return [
        [[set(p[p >= 0].tolist()) for p in lists] for lists in layer]
        for layer in jax.device_get(kept_positions(cache))
    ]


class Talk(NamedTuple):
    """The logits [B, V] and the cache after each part of a conversation."""

    prompt: tuple[jax.Array, Cache]
    asked: jax.Array
    steps: list[tuple[jax.Array, Cache]]
    second: tuple[jax.Array, Cache]


@cache
def talk(label: str, batch: str = "main") -> Talk:
    """Read a prompt, its last token asked again, some steps, and, apart from those, a second turn."""
    row, data = BY_LABEL[label], BATCHES[batch]
    m = model(row.model)
    prompt = kvjax.prefill(m, data.first, method=row.method(), room=ROOM)
    asked, _ = step(m, prompt[1], [r[-1] for r in data.first], append=False)
    walked, state = [], prompt[1]
    for token in data.steps:
        logits, state = step(m, state, token, append=True)
        walked.append((logits, state))
    second = kvjax.prefill(m, data.second, cache=prompt[1], room=8)
    return Talk(prompt, asked, walked, second)


@cache
def prompt_of(name: str, batch: str, row: int) -> Prompt:
    """Read the float64 prompt of one row."""
    return Prompt(decoder(name), BATCHES[batch].first[row])


def kept_of(label: str, prompt: Prompt) -> list[np.ndarray]:
    """Return what the table says a prompt leaves: per layer, boolean [lists, T]."""
    row = BY_LABEL[label]
    if row.kept is None:
        return [np.ones((len(k), prompt.length), bool) for k in prompt.k]
    return row.kept(prompt)


def stored(row: Any, lists: list[Any]) -> list[Any]:
    """Return the lists of a layer's KV heads that a cache stores: inputs of layers have one for all heads."""
    return lists[:1] if isinstance(row.method().make, StoredInputs) else lists


def off(got: Any, want: Any) -> float:
    """Find the largest difference, relative to the largest value."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.abs(got - want).max() / np.abs(want).max())
