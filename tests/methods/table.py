"""One row per method: how it is built, what it must keep, what it must cost. `test_battery.py` does the rest.

A new method needs one `Row` in ROWS. Give it the numbers of its paper: `kept` as numpy over a float64 prompt
(see `tests/reference.py`), `nbytes` as arithmetic over `Sizes`. What does not apply stays at its default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy.special import erf

import kvjax
from kvjax.fitted import Fitted
from kvjax.grammar import Method
from kvjax.methods import takes_budget
from kvjax.ops.base.rope import Rope
from tests import dynamic, layers, merges, reads, stacks
from tests.layers import shared_out
from tests.reference import (
    Lag,
    Prompt,
    best,
    h2o_victim,
    pool,
    rkv_kept,
    rkv_victims,
    rope,
    sink_victim,
    softmax,
    tova_victim,
    window_score,
)

WINDOW, KERNEL, PAGE = 4, 3, 4
SNAP = dict(window=WINDOW, kernel=KERNEL)
THETA = Rope().theta
HASH = dict(planes=3, tables=4, sinks=2, newest=4)


class Sizes(NamedTuple):
    """What bytes are a function of: rows, KV heads, query heads, head dim, layers, prompt tokens, room."""

    b: int
    k: int
    n: int
    h: int
    layers: int
    tokens: int
    room: int


def count(length: int) -> int:
    """Slots that the budget of 0.5, which all rows use, leaves of `length` tokens."""
    return max(1, length // 2)


@dataclasses.dataclass(frozen=True)
class Row:
    """What the battery knows about one configuration of a method.

    build: chain of (id, hyper-parameters). kept: prompt -> per layer, boolean [lists, T]; None keeps all.
    nbytes: Sizes -> bytes of the cache. whole: hyper-parameters under which it keeps everything exactly.
    error: what its logits may be off by, relative to the largest, once the kept tokens are given; None where
    no slots describe it (merging, reading in part). victim: what leaves at a decode step. leave: what that
    changes in the other slots (`tests.reference.Row`). phase: what slots
    are rotated by. model: which tiny model. moves: whether slots of its cache may be permuted. counted:
    whether how many slots stay follows from the data. narrow: (prompt, layer) -> the tokens that go on, where
    upper layers see fewer (as `Prompt` takes it). reread: prompt -> the tokens that are read of it. attends:
    what a step gives the queries, where it does not attend to all slots (as `tests.reference.Row` takes it).
    stored: prompt -> the same with the keys and values that its cache holds in place of its own. stacks:
    whether layers may be stacked. looks_ahead: whether chunks of a prompt are told what comes behind them.
    """

    label: str
    build: tuple[tuple[str, dict[str, Any]], ...]
    nbytes: Callable[[Sizes], int]
    kept: Callable[[Prompt], list[np.ndarray]] | None = None
    whole: tuple[tuple[str, dict[str, Any]], ...] | None = None
    error: float | None = 3e-5
    victim: Callable | None = None
    leave: Callable | None = None
    phase: str | int = "position"
    model: str = "4/2"
    moves: bool = True
    counted: bool = False
    narrow: Callable | None = None
    reread: Callable | None = None
    attends: Callable | None = None
    stored: Callable | None = None
    stacks: bool = True
    looks_ahead: bool = False

    def method(self, parts: tuple[tuple[str, dict[str, Any]], ...] | None = None) -> Method:
        made = [kvjax.method(id, **hyper) for id, hyper in parts or self.build]
        return made[0] if len(made) == 1 else kvjax.chain(*made)

    @property
    def evicts(self) -> bool:
        """Whether decoding drops tokens, too."""
        return self.victim is not None or self.label == "keepkv"

    def read(self, prompt: Prompt) -> Prompt:
        """A prompt as the method reads it."""
        if self.reread is not None:
            return Prompt(prompt.decoder, self.reread(prompt))
        if self.stored is not None:
            return self.stored(prompt)
        farthest = self.phase if isinstance(self.phase, int) else None
        if self.narrow is None and farthest is None:
            return prompt
        return Prompt(prompt.decoder, prompt.tokens, self.narrow, farthest)

    @property
    def reads_all(self) -> bool:
        """Whether all layers see all tokens of a prompt, and steps attend to all slots."""
        return self.reread is None and self.narrow is None and self.attends is None


def row(label, nbytes, id=None, *, hyper=None, whole=None, **more):
    """A row of one method; where it takes a budget, that is 0.5, and 1.0 where it keeps everything."""
    id, hyper = id or label, dict(hyper or {})
    if takes_budget(id):
        whole, hyper = ((id, hyper | {"budget": 1.0} | (whole or {})),), hyper | {"budget": 0.5}
    return Row(label, ((id, hyper),), nbytes, whole=whole, **more)


def chained(label, nbytes, *parts, **more):
    return Row(label, tuple(parts), nbytes, **more)


# --- bytes ---------------------------------------------------------------------------------------------


def plain(s: Sizes) -> int:
    """Bytes of a slot: float32 keys and values, an int32 position."""
    return 2 * s.h * 4 + 4


def dense(slots, heads=None, slot=plain, extra=0):
    """Every head of every layer holds `slots` slots; 4 bytes per row for the next position."""
    return lambda s: s.layers * s.b * (heads or s.k) * slots(s) * (slot(s) + extra) + 4 * s.b


def everything(s: Sizes) -> int:
    return s.tokens + s.room


MINI, MINI_MOST = dict(t=0.6, gamma=0.3), 0.125


def minicache_bytes(direction):
    """One layer of three keeps everything. The others have a body for the prompt, and a tail for an eighth.

    In the body, a direction of keys and one of values, two lengths in each layer, and its positions.
    """

    def total(s):
        shared = s.tokens * (2 * direction(s) + 2 * (2 * 4 + 4))
        tails = 2 * (int(MINI_MOST * s.tokens) + s.room) * plain(s)
        return s.b * s.k * (everything(s) * plain(s) + shared + tails) + 4 * s.b

    return total


def half(s: Sizes) -> int:
    return count(s.tokens) + s.room


def half_and_one(s: Sizes) -> int:
    """Evicting at every step: the budget of all that may come, and the token that is just attended."""
    return count(s.tokens + s.room) + 1


def due_by_2(s: Sizes) -> int:
    """The budget of all that may come, and two tokens more, which are then given up."""
    return count(s.tokens + s.room) + 2


def queries_of(window):
    """Bytes of the last queries that rows carry in every layer, with their positions."""
    return lambda s: s.layers * s.b * window * (s.n * s.h + 1) * 4


def paged(kept_per_layer, heads=lambda s: s.k, slot=plain, one_pool=False):
    """Pools that hold kept_per_layer(s, layer) slots per row in any split over the heads, and dense room."""

    def total(s: Sizes) -> int:
        lists = s.b * heads(s)
        slots = [s.b * kept_per_layer(s, i) for i in range(s.layers)]
        pools = [(sum(slots), lists * s.layers)] if one_pool else [(x, lists) for x in slots]
        found = 4 * s.b + s.layers * lists * s.room * slot(s)
        for held, owners in pools:
            pages = (held + owners * (PAGE - 1)) // PAGE
            # A page: its slots and its owner. A list: its row of the table and its length.
            found += pages * (PAGE * slot(s) + 4) + owners * (s.tokens // PAGE * 4 + 4)
        return found

    return total


def split(slots, granule, residual, body_granule, body_slot):
    """An encoded body of whole granules and a tail of residual + granule plain slots."""

    def total(s: Sizes) -> int:
        granules = max((slots(s) - residual) // granule, 1)
        body = granules * (body_granule(s) + granule * body_slot(s))
        return s.layers * s.b * s.k * (body + (residual + granule) * plain(s)) + 4 * s.b

    return total


def coded(bits: int, groups: int = 1):
    """Bytes of a slot whose tokens are encoded one by one, with a float16 scale and zero per group."""
    return lambda s: 2 * (s.h * bits // 8 + 4 * groups) + 4


def turboquant_bytes(s: Sizes) -> int:
    """A slot of 4 bits: a key's words of 2, 1 and 1 bits and two float16, a value's of 4 bits and one."""
    key = sum(4 * -(-s.h * bits // 32) for bits in (2, 1, 1)) + 4
    return key + 4 * -(-s.h * 4 // 32) + 2 + 4


def kivi_bytes(bits, slots=everything, group=16, residual=16):
    # Keys: per granule and channel, `group` codes and two float16. Values: per token, h codes, two per group.
    return split(
        slots, group, residual,
        lambda s: s.h * (group * bits // 8 + 4), lambda s: s.h * bits // 8 + 4 * (s.h // group) + 4,
    )  # fmt: skip


def gear_bytes(bits, rank, group=16):
    """KIVI's codes; a number and an index for one outlier at each end; two float16 matrices per granule."""
    ends, matrices = 2 * (4 + 1), lambda s: (group + s.h) * rank * 2
    return split(
        everything, group, 0,
        lambda s: s.h * (group * bits // 8 + 4 + ends) + 2 * matrices(s),
        lambda s: s.h * bits // 8 + 4 * (s.h // group) + ends + 4,
    )  # fmt: skip


def mikv_bytes(s: Sizes) -> int:
    """Half of the tokens, and the one just attended, in 8 bits; the others in 4; all with their masses."""
    most = s.tokens + s.room
    first, second = half_and_one(s) * (coded(8)(s) + 4), (most - count(most)) * (coded(4, 2)(s) + 4)
    return s.layers * s.b * s.k * (first + second) + 4 * s.b


def kvquant_bytes(s: Sizes) -> int:
    """A row's first token as it is; of others 4 bits, an outlier of a key, two and a range of a value."""
    slot = 2 * (s.h * 4 // 8) + (4 + 1) + (2 * (4 + 1) + 4) + 4
    return s.layers * s.b * s.k * (plain(s) + (everything(s) - 1) * slot) + 4 * s.b


def quest_bytes(s: Sizes) -> int:
    """The first two layers as they are; the others in pages of 8 with two bounds per channel."""
    rest = s._replace(layers=s.layers - 2)
    first = dense(everything)(s._replace(layers=2))
    return first - 4 * s.b + split(everything, 8, 0, lambda s: 2 * s.h * 4, plain)(rest)


def infllm_bytes(s: Sizes) -> int:
    """Blocks of 4 with a key each behind a tail of 8 and 4 more with a score each; copies on the device.

    The device has places for the blocks that a step reads: one of sinks, and half of all, 2 bytes more for
    which they are and when each was read.
    """
    blocks = (s.tokens + s.room - 8) // 4
    places = 1 + -(-(blocks * 4 // 2) // 4)
    near = s.layers * s.b * s.k * places * (4 * plain(s) + 8)
    return split(everything, 4, 8, lambda s: s.h * 4, plain)(s) + near + s.layers * s.b * s.k * 12 * 4


def sparq_bytes(s: Sizes) -> int:
    """Slots one by one, a tail of the newest 4 and one more, and a float32 sum of the values of each list."""
    sums = s.layers * s.b * s.k * s.h * 4
    return split(everything, 1, 4, lambda s: 0, plain)(s) + sums


def magicpig_bytes(s: Sizes) -> int:
    """Slots one by one, each with a word of 4 codes of 3 bits, a tail as SparQ's, a float32 centre a list."""
    centres = s.layers * s.b * s.k * s.h * 4
    return split(everything, 1, 4, lambda s: 4, plain)(s) + centres


def mustafar_bytes(s: Sizes) -> int:
    """Behind 4 whole tokens and one more, half of a slot's numbers, a bit for each, and its position."""
    slot = lambda s: 2 * (s.h // 2 * 4 + -(-s.h // 32) * 4) + 4  # noqa: E731
    return split(everything, 1, 4, lambda s: 0, slot)(s)


# --- kept sets -----------------------------------------------------------------------------------------


def each_layer(score, protect=lambda prompt: np.zeros(prompt.length, bool), skip=0):
    """The count(length) best of every list by score(prompt, layer) [lists, T]; `skip` first layers whole."""

    def kept(prompt: Prompt) -> list[np.ndarray]:
        found = []
        for i in range(len(prompt.p)):
            s = np.where(protect(prompt), np.inf, score(prompt, i))
            found.append(
                np.ones_like(s, bool) if i < skip else best(s, np.full(len(s), count(prompt.length)))
            )
        return found

    return kept


def chooses(rule, due=1):
    """What a prompt and steps leave where `rule` (`tests.dynamic`) scores the slots of a list."""
    return dict(kept=dynamic.kept(count, rule), victim=dynamic.victims(count, rule, THETA, due))


def kv_lists(prompt):
    return len(prompt.k[0])


def random_score(prompt, layer):
    key = jax.random.fold_in(jax.random.key(0), layer)
    draw = lambda h, j: jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, h), j))  # noqa: E731
    heads, slots = np.indices((kv_lists(prompt), prompt.length))
    return np.asarray(jax.vmap(draw)(heads.reshape(-1), slots.reshape(-1))).reshape(heads.shape)


def position_score(prompt, layer):
    return np.broadcast_to(np.arange(prompt.length, dtype=float), (kv_lists(prompt), prompt.length))


def norm_score(prompt, layer):
    return -np.sqrt((prompt.k[layer] ** 2).sum(-1))


FORGETTING = 0.7


def faded(prompt, layer):
    """A2SF: what every query gives a token, times 0.7 for every query behind it."""
    weight = FORGETTING ** np.arange(prompt.length)[::-1]
    return np.einsum("nts,t->ns", prompt.p[layer], weight).reshape(kv_lists(prompt), -1, prompt.length).sum(1)


def faded_slot(slot):
    return sum(p * FORGETTING**age for age, p in enumerate(reversed(slot["given"])))


def received(prompt, layer):
    """All the attention a token has received from the prompt, summed over a group."""
    return prompt.p[layer].sum(1).reshape(-1, prompt.group, prompt.length).sum(1)


def value_size(prompt, layer):
    return np.abs(prompt.v[layer]).sum(-1)


def valued_mass(slot):
    return slot["mass"] * np.abs(slot["v"]).sum()


def critical_score(prompt, layer, share=0.5, epsilon=1e-4):
    """Half of the budget by the window's attention, the rest by that times what the slot can write."""
    attention, c = window_score(prompt, layer, WINDOW, KERNEL), prompt.decoder.config
    older = np.where(np.isinf(attention), pooled_into_window(prompt, layer), attention)
    out = prompt.decoder.layers[layer]["o"].reshape(c.kv_heads, prompt.group, c.head_dim, -1)
    written = np.abs(np.einsum("ksv,kgvd->kgsd", prompt.v[layer], out)).sum(-1).mean(1)
    first = best(older, np.full(len(older), int(count(prompt.length) * share)))
    return np.where(first | np.isinf(attention), np.inf, (older + epsilon) * written)


def pooled_into_window(prompt, layer):
    """What smoothing leaves in the window's own slots, which have no attention of their own."""
    p = prompt.p[layer][:, -WINDOW:].sum(1).reshape(-1, prompt.group, prompt.length).mean(1)
    p[:, -WINDOW:] = 0
    return pool(p, KERNEL, "max")


def critical_across_heads(prompt):
    """Ada-KV's budgets over these scores."""
    return adakv_kept(prompt, score=critical_score)


def made_up_gate(layers=2, width=32, hidden=8, heads=2):
    """A gate that nobody fitted: one hidden layer of GELUs, for the model "4/2"."""
    rng = np.random.default_rng(7)
    shapes = {"in": (width, hidden), "in_bias": (hidden,), "out": (hidden, heads), "out_bias": (heads,)}
    arrays = {name: rng.normal(size=(layers, *s)).astype(np.float32) for name, s in shapes.items()}
    return Fitted(arrays, "HiddenGate", "")


GATE, GATE_THRESHOLD = made_up_gate(), 0.4


def made_up_kernels(layers=2, heads=4, kv_heads=2, width=16, hidden=6, rank=3):
    """LESS's kernels that nobody fitted, for the model "4/2"."""
    rng = np.random.default_rng(8)
    shapes = {
        "q1": (heads, width, hidden), "q2": (heads, hidden, rank), "k1": (kv_heads, width, hidden),
        "k2": (kv_heads, hidden, rank), "mix": (kv_heads, rank, rank), "scale": (kv_heads, rank),
        "scale_mix": (kv_heads, rank),
    }  # fmt: skip
    arrays = {name: rng.normal(size=(layers, *s)).astype(np.float32) for name, s in shapes.items()}
    return Fitted(arrays, "Residue", "")


KERNELS = made_up_kernels()


def made_up_levels(layers=2, heads=2, width=16, bits=4):
    """KVQuant's ranges and levels that nobody fitted, for the model "4/2"."""
    rng, shape = np.random.default_rng(9), (layers, heads, width)
    even = np.linspace(-1, 1, 2**bits)
    arrays = {
        "key centre": rng.normal(size=shape) / 4, "key range": rng.uniform(1.8, 3, shape),
        "key levels": np.stack([even, even * np.abs(even) ** 0.3]),
        "value levels": np.stack([even * np.abs(even) ** 0.2, even]),
    }  # fmt: skip
    return Fitted({name: x.astype(np.float32) for name, x in arrays.items()}, "Levels", "")


LEVELS = made_up_levels()


def gate_of(hidden, layer):
    """What the gate says of hidden states [.., D], for every head [.., K]."""
    a = {name: np.asarray(x[layer], np.float64) for name, x in GATE.arrays.items()}
    x = hidden @ a["in"] + a["in_bias"]
    return x * (1 + erf(x / np.sqrt(2))) / 2 @ a["out"] + a["out_bias"]


def kvzap_kept(prompt):
    recent = np.arange(prompt.length) >= prompt.length - WINDOW
    return [recent | (gate_of(h, i).T >= GATE_THRESHOLD) for i, h in enumerate(prompt.hidden)]


def kvzap_leaves(lists, length, queries):
    """What is older than the window and scored low leaves, as many as there are."""
    low = lambda slot, head: gate_of(slot["hidden"], slot["layer"])[head] < GATE_THRESHOLD  # noqa: E731
    old = lambda slot: slot["pos"] < length - WINDOW  # noqa: E731
    return [[j for j, s in enumerate(slots) if old(s) and low(s, i)] for i, slots in enumerate(lists)]


def tova_score(prompt, layer):
    return np.broadcast_to(prompt.p[layer][:, -1].mean(0), (kv_lists(prompt), prompt.length))


def expected_score(prompt, layer, sinks=4, future=64):
    """Expected Attention: queries as Gaussian, RoPE as its average over the next positions (a matrix)."""
    theta, h = prompt.decoder.config.rope.theta, prompt.k[layer].shape[-1]
    turn = np.mean([rope(np.eye(h), np.full(h, prompt.length + i), theta) for i in range(future)], 0)
    found = []
    for i, k in enumerate(prompt.k[layer]):
        per_head = []
        for q in prompt.raw_q[layer][i * prompt.group : (i + 1) * prompt.group, sinks:]:
            mean, cov = q.mean(0) @ turn, turn.T @ np.cov(q.T, bias=True) @ turn
            s = k @ mean / np.sqrt(h) + np.einsum("sh,hj,sj->s", k, cov, k) / (2 * h)
            per_head.append(np.concatenate([np.zeros(sinks), softmax(s[sinks:])]))
        found.append(np.mean(per_head, 0) * np.sqrt((prompt.v[layer][i] ** 2).sum(-1)))
    return np.stack(found)


def keydiff_score(prompt, layer):
    unit = prompt.k[layer] / np.linalg.norm(prompt.k[layer], axis=-1, keepdims=True)
    return -np.einsum("kth,kh->kt", unit, unit.mean(1))


CUR_WINDOW = 5


def curdkv_score(prompt, layer):
    """The product of the shares that a key and a value have of the squared lengths in their window."""
    score = np.ones((kv_lists(prompt), prompt.length))
    for at in range(0, prompt.length, CUR_WINDOW):
        here = slice(at, at + CUR_WINDOW)
        for x in (prompt.k[layer], prompt.v[layer]):
            squares = (x[:, here] ** 2).sum(-1)
            score[:, here] *= squares / squares.sum(-1, keepdims=True)
    return score


COMPACT = dict(chunk=6, rank=5, sinks=2, newest=3)


def leverage(x, ridge, weights=None):
    """The diagonal of X (X' W X + ridge I)^-1 X' for rows x [T, R]."""
    weighed = x if weights is None else x * weights[:, None]
    return np.diag(x @ np.linalg.inv(weighed.T @ x + ridge * np.eye(x.shape[-1])) @ x.T)


def non_causal(prompt, layer, chunk):
    """What the tokens of each chunk give each other without 1 / sqrt(H), times the lengths of values."""
    found = np.zeros((kv_lists(prompt), prompt.length))
    for at in range(0, prompt.length, chunk):
        here = slice(at, at + chunk)
        for head, q in enumerate(prompt.q[layer]):
            k = prompt.k[layer][head // prompt.group, here]
            found[head // prompt.group, here] += softmax(q[here] @ k.T).sum(0) / prompt.group
    return found * np.linalg.norm(prompt.v[layer], axis=-1)


def compactor_score(prompt, layer):
    h, z = prompt.k[layer].shape[-1], lambda x: (x - x.mean()) / x.std(ddof=1)
    phi = np.asarray(jax.random.normal(jax.random.key(0), (h, COMPACT["rank"]))) / np.sqrt(COMPACT["rank"])
    outlying = np.stack([leverage((k - k.mean(0)) @ phi, 1e-2) for k in prompt.raw_k[layer]])
    return 0.5 * z(outlying) + z(pool(non_causal(prompt, layer, COMPACT["chunk"]), 3, "mean"))


def compactor_protects(prompt):
    at = np.arange(prompt.length)
    return (at < COMPACT["sinks"]) | (at >= prompt.length - COMPACT["newest"])


def capkv_score(prompt, layer, tau=5.0, sinks=4, future=64):
    """w v' (I + sum w v v')^-1 v by the cosine of keys and a mean query in the average rotation to come."""
    theta, h = prompt.decoder.config.rope.theta, prompt.k[layer].shape[-1]
    turn = np.mean([rope(np.eye(h), np.full(h, prompt.length + i), theta) for i in range(future)], 0)
    score = np.zeros((kv_lists(prompt), prompt.length))
    for head, q in enumerate(prompt.raw_q[layer][:, sinks:]):
        k, v = (x[layer][head // prompt.group, sinks:] for x in (prompt.k, prompt.v))
        mean = q.mean(0) @ turn
        cosine = k @ mean / np.linalg.norm(k, axis=-1) / np.linalg.norm(mean)
        w = np.exp(tau * (cosine - cosine.max()))
        score[head // prompt.group, sinks:] += w * leverage(v, 1.0, w + 1e-6) / prompt.group
    return score


FILTERS = Fitted(
    {"filters": np.random.default_rng(5).normal(size=(2, 2, 16)).astype(np.float32)}, "QueryFilters", ""
)


def filtered_score(prompt, layer):
    return np.einsum("kth,kh->kt", prompt.k[layer], FILTERS.arrays["filters"][layer].astype(float))


def last_score(prompt, layer):
    """What the newest query gives, the mean over a group; its own token stays anyway."""
    return prompt.p[layer][:, -1].reshape(-1, prompt.group, prompt.length).mean(1)


SEMANTIC = Fitted(
    {"attention": np.array([[0.1, 0.7, 0.3, 0.2], [0.4, 0.0, 0.1, 0.9]], np.float32)}, "SemanticHeads", ""
)


def semantic_score(prompt, layer, heads=((1, 2), (0, 3))):
    """The mean over two query heads, for all KV heads of the layer."""
    given = prompt.p[layer][list(heads[layer]), -WINDOW:].sum(1).mean(0)
    given[-WINDOW:] = 0
    return np.broadcast_to(pool(given, KERNEL, "mean"), (kv_lists(prompt), prompt.length))


def ends(first, newest):
    return lambda p: (np.arange(p.length) < first) | (np.arange(p.length) >= p.length - newest)


NACL_SHARE = 0.5


def nacl_score(prompt, layer):
    """The best by attention, then draws: a token is drawn where score + Gumbel noise is largest."""
    proxies = prompt.p[layer][:, -WINDOW:].sum(1).reshape(-1, prompt.group, prompt.length).mean(1)
    proxies[:, -WINDOW:] = 0
    first = best(proxies, np.full(len(proxies), int(count(prompt.length) * NACL_SHARE)))
    return np.where(first, np.inf, proxies - np.log(-np.log(random_score(prompt, layer).astype(float))))


def kvcrush_kept(prompt, share=0.5):
    """The best n - r of a head, and evenly spaced ones of its others by the bits of all heads."""
    found, n = [], count(prompt.length)
    r = min(int(share * n), n - WINDOW)
    for i in range(len(prompt.p)):
        score = snap()(prompt, i)
        bits = best(score, np.full(len(score), n))
        distance = (bits != (np.arange(len(score)) % 2)[:, None]).sum(0)
        kept = best(score, np.full(len(score), n - r))
        for head in kept:
            others = np.flatnonzero(~head)
            others = others[np.argsort(distance[others], kind="stable")]
            head[others[:: len(others) // r][:r]] = True
        found.append(kept)
    return found


LAZY = dict(threshold=0.19, last=3, sinks=2, window=WINDOW)


def simlayer_kept(prompt):
    """Layers whose last queries look at the ends keep these alone."""
    near = ends(LAZY["sinks"], WINDOW)(prompt)
    lazy = [p[:, -LAZY["last"] :, near].sum(-1).mean() > LAZY["threshold"] for p in prompt.p]
    whole = np.ones_like(near)
    return [np.tile(near if is_lazy else whole, (kv_lists(prompt), 1)) for is_lazy in lazy]


def snap(per_query_head=False, **kind):
    return lambda p, i: window_score(p, i, WINDOW, KERNEL, per_query_head=per_query_head, **kind)


def finch_score(prompt, layer):
    """What the last queries give, times how many positions stand before each; they themselves stay."""
    given = prompt.p[layer][:, -WINDOW:] * np.arange(prompt.length - WINDOW, prompt.length)[:, None]
    score = given.mean(1).reshape(-1, prompt.group, prompt.length).mean(1)
    score[:, -WINDOW:] = np.inf
    return score


def grouped_score(prompt, layer):
    """SnapKV for a group of query heads: what the window gives a token in all of them, then the maximum."""
    given = prompt.p[layer][:, -WINDOW:].sum(1)
    given[:, -WINDOW:] = 0
    groups = given.reshape(-1, prompt.group, prompt.length).sum(1)
    edged = np.pad(groups, [(0, 0), (KERNEL // 2,) * 2])
    score = np.max([edged[:, i : i + prompt.length] for i in range(KERNEL)], 0)
    score[:, -WINDOW:] = np.inf
    return score


def sinks(prompt):
    return np.arange(prompt.length) < 4


def recent_half(prompt):
    return np.arange(prompt.length) >= prompt.length - count(prompt.length) // 2


def pyramid_counts(length, layers, beta=20):
    """Linear in depth around the mean, the first at most the whole prompt; running totals are rounded."""
    spare = max(count(length) - WINDOW, 0)
    high = min(2 * spare - spare / beta, length - WINDOW)
    shares = np.linspace(high, 2 * spare - high, layers)
    return np.diff(np.round(np.cumsum(shares)), prepend=0).astype(int) + min(count(length), WINDOW)


def pyramid_kept(**kind):
    def kept(prompt: Prompt) -> list[np.ndarray]:
        counts = pyramid_counts(prompt.length, len(prompt.p))
        scores = [snap(**kind)(prompt, i) for i in range(len(counts))]
        return [best(s, np.full(len(s), c)) for s, c in zip(scores, counts, strict=True)]

    return kept


def to_older(prompt, layer):
    """What the last window's queries give to the tokens before it: [heads, WINDOW, T - WINDOW]."""
    return prompt.p[layer][:, -WINDOW:, :-WINDOW]


def cake_score(prompt, layer, gamma=200.0):
    p = to_older(prompt, layer)
    each = pool(p.mean(1) + gamma * p.var(1, ddof=1), KERNEL, "mean")
    score = each.reshape(-1, prompt.group, each.shape[-1]).mean(1)
    return np.pad(score, [(0, 0), (0, WINDOW)], constant_values=np.inf)


def cake_counts(prompt, tau1, tau2):
    """Slots of a head, per layer: the window, and shares by entropy and variance of all that is left."""
    maps = [to_older(prompt, i) for i in range(len(prompt.p))]
    entropy = np.array([-(p * np.log(p + 1e-10)).sum() for p in maps])
    prefer = entropy ** (1 / tau1) * np.array([p.var(1, ddof=1).sum() for p in maps]) ** (1 / tau2)
    total, most = len(maps) * (count(prompt.length) - WINDOW), prompt.length - WINDOW
    return shared_out(prefer, total, most) + WINDOW


def cake_kept(prompt):
    counts = cake_counts(prompt, **CAKE)
    scores = [cake_score(prompt, i) for i in range(len(counts))]
    return [best(s, np.full(len(s), c)) for s, c in zip(scores, counts, strict=True)]


CAKE = dict(tau1=1.6, tau2=0.6)
ZIGZAG = dict(mass=0.7, least=0.4)
PREFIXES = dict(sinks=2, newest=2)


PROFILE = Fitted({"importance": np.array([[0.1, 0.7], [0.0, 0.4]], np.float32)}, "Profile", "")


def headkv_kept(prompt, beta=1.2):
    """A window and a base for every head; the pool that they leave, in proportion to the profile."""
    importance = PROFILE.arrays["importance"].astype(float)
    spare = count(prompt.length) - WINDOW
    given = int(spare / beta + 1e-9)
    base = count(prompt.length) - given
    more = shared_out(importance.ravel(), importance.size * given, prompt.length - base)
    counts = base + more.reshape(importance.shape)
    return [best(snap()(prompt, i), c) for i, c in enumerate(counts)]


GATES = Fitted({"gates": np.array([[0.2, 0.9], [0.6, 0.1]], np.float32)}, "HeadGates", "")
DUO_SINKS, RETRIEVES = 2, [[False, True], [True, False]]


def duo_kept(prompt):
    at = np.arange(prompt.length)
    near = (at < DUO_SINKS) | (at >= prompt.length - WINDOW)
    return [np.stack([near | whole for whole in heads]) for heads in RETRIEVES]


def duo_leaves(lists, length, queries):
    """What streaming heads hold between the sinks and the window leaves."""
    between = lambda slot: DUO_SINKS <= slot["pos"] < length - WINDOW  # noqa: E731
    streams = lambda slot, head: not RETRIEVES[slot["layer"]][head]  # noqa: E731
    return [[j for j, s in enumerate(x) if between(s) and streams(s, i)] for i, x in enumerate(lists)]


def flat_counts(scores, total):
    """How many of the `total` best of all lists' scores [lists, T] each list holds."""
    order = np.argsort(-scores, axis=None, kind="stable")[:total]
    return np.bincount(order // scores.shape[-1], minlength=len(scores))


def adakv_kept(prompt, floor=0.2, score=None):
    """Counts 0.8 * flat + 0.2 * n, rounded down, the rest of the total to the largest fractions."""
    found = []
    for i in range(len(prompt.p)):
        s, n = (score or snap())(prompt, i), count(prompt.length)
        exact = np.round((1 - floor) * flat_counts(s, len(s) * n) + floor * n, 9)
        counts = np.floor(exact).astype(int)
        short = len(s) * n - counts.sum()
        counts[np.argsort(-(exact - counts), kind="stable")[:short]] += 1
        found.append(best(s, counts))
    return found


PREFIX = (5, 7, 11)


def kvzip_kept(prompt):
    """The largest attention each token receives while an instruction and the prompt are read behind it."""
    again = Prompt(prompt.decoder, [*prompt.tokens, *PREFIX, *prompt.tokens])
    t = prompt.length
    scores = [p[:, t:, :t].reshape(-1, prompt.group, len(p[0]) - t, t).max((1, 2)) for p in again.p]
    scores = np.stack([np.where(sinks(prompt), np.inf, s) for s in scores])
    flat = scores.reshape(-1, t)
    return list(best(flat.reshape(1, -1), [len(flat) * count(t)]).reshape(scores.shape))


def kvcompose_kept(prompt):
    """Heads rank what the prompt, read once more, attends to; composite tokens say how many of them stay."""
    again, t = Prompt(prompt.decoder, [*prompt.tokens] * 2), prompt.length
    scores = np.stack([p[:, t:, :t].reshape(-1, prompt.group, t, t).max((1, 2)) for p in again.p])
    scores += scores.mean(1, keepdims=True)
    composite = -np.sort(-scores, -1).mean(1)
    composite[0] = composite.max(0)
    composite[:, 0] = np.inf
    counts = flat_counts(composite, len(composite) * count(t))
    return [best(s, np.full(len(s), c)) for s, c in zip(scores, counts, strict=True)]


def infinipot_score(prompt, layer):
    """Half of the budget by surprisal, the rest by the attention of an instruction behind the prompt."""
    before, seen = prompt.all_logits[:-1], np.asarray(prompt.tokens[1:])
    surprise = np.append(0, -np.log(softmax(before)[np.arange(len(seen)), seen]))
    p = Prompt(prompt.decoder, [*prompt.tokens, *PREFIX]).p[layer][:, prompt.length :, : prompt.length]
    asked = p.sum(1).reshape(-1, prompt.group, prompt.length).sum(1)
    return np.where(best(surprise, count(prompt.length) // 2), np.inf, asked)


def chunk_score(prompt, layer, chunk=3, reuse=2):
    """What the window gives a whole chunk, in the first of two layers."""
    given = (
        prompt.p[layer // reuse * reuse][:, -WINDOW:].sum(1).reshape(-1, prompt.group, prompt.length).mean(1)
    )
    given[:, -WINDOW:] = 0
    for start in range(0, prompt.length, chunk):
        given[:, start : start + chunk] = given[:, start : start + chunk].sum(1, keepdims=True)
    given[:, -WINDOW:] = np.inf
    return given


def gems(prompt):
    """The tokens of the largest logits of the last query at layer 0, over all heads, in their order."""
    keys = np.repeat(prompt.k[0], prompt.group, 0)
    logits = np.stack([k @ q for k, q in zip(keys, prompt.q[0][:, -1], strict=True)])
    score = pool(logits, KERNEL, "mean").sum(0)
    score[-1] = np.inf
    return [prompt.tokens[j] for j in np.flatnonzero(best(score, count(prompt.length)))]


LAST_WHOLE, PASSED = 1, 0.75


def fastkv_goes_on(prompt, layer):
    """As the authors: the attention of every query head smoothed, then summed; the window goes on, too."""
    if layer != LAST_WHOLE:
        return None
    score = window_score(prompt, layer, WINDOW, KERNEL, kind="mean", per_query_head=True).sum(0)
    return np.flatnonzero(best(score, max(WINDOW, int(prompt.length * PASSED))))


def fastkv_kept(prompt):
    """SnapKV in every layer, of the tokens that it saw."""
    found = []
    for i, at in enumerate(prompt.at):
        score = window_score(prompt, i, WINDOW, KERNEL, kind="mean")
        found.append(np.zeros((len(score), prompt.length), bool))
        found[-1][:, at] = best(score, np.full(len(score), count(prompt.length)))
    return found


def windowed(kept, windows):
    """Layers with a sliding window hold what the last token, asked again, sees of it, and no more."""

    def both(prompt):
        found = kept(prompt)
        for i, window in enumerate(windows):
            if window is not None:
                recent = np.arange(prompt.length) >= prompt.length - window
                found[i] = np.broadcast_to(recent, found[i].shape)
        return found

    return both


WINDOWS = (6, None, 6)
BUZZ = dynamic.Buzz(count, stride=3, sinks=2, recent=0.25)
LADDER = dynamic.LaCache(count, step=3, kept=1, sinks=2, newest=2)
WIDE = dynamic.LaCache(count, step=3, kept=2, sinks=2, newest=2)
# Shorter than a prompt and than what is kept of it.
DISTANCE = 7
LAG = Lag(count, THETA, lag=2, sinks=2)

ROWS = [
    row("full", dense(everything), whole=(("full", {}),)),
    row("renumbered", dense(everything), phase="rank"),
    chained(
        "adakv + renumbered", paged(lambda s, i: s.k * count(s.tokens)),
        ("adakv", SNAP | dict(budget=0.5, page=PAGE)), ("renumbered", {}), kept=adakv_kept, phase="rank",
    ),
    row("random", dense(half), kept=each_layer(random_score)),
    row(
        "sink-recent", dense(half_and_one), kept=each_layer(position_score, sinks), victim=sink_victim(count)
    ),
    row(
        "streamingllm", dense(half_and_one), kept=each_layer(position_score, sinks),
        victim=sink_victim(count), phase="rank",
    ),
    row(
        "hashevict", dense(half_and_one), hyper=dict(planes=12, sinks=2, newest=2),
        kept=dynamic.kept(count, dynamic.small_keys(2, 2)),
        victim=dynamic.victims(count, dynamic.hashevict(12, 2, 2), THETA),
    ),
    row(
        "pagedeviction", dense(due_by_2), hyper=dict(page=2),
        kept=dynamic.pagedeviction_kept(count, 2), victim=dynamic.pagedeviction_victims(count, 2),
    ),
    row(
        "lacache", dense(due_by_2, extra=4), hyper=LADDER.hyper, model="deep", phase="rank",
        kept=LADDER.kept, victim=LADDER.victims, leave=LADDER.leave, counted=True,
    ),
    row(
        "lacache wide", dense(due_by_2, extra=4), "lacache", hyper=WIDE.hyper, model="deep", phase="rank",
        kept=WIDE.kept, victim=WIDE.victims, leave=WIDE.leave, counted=True,
    ),
    row(
        "lm-infinite", dense(half_and_one), hyper=dict(sinks=4, distance=DISTANCE),
        kept=each_layer(position_score, sinks), victim=sink_victim(count), phase=DISTANCE,
        whole=dict(distance=64),
    ),
    row(
        "l2compress", lambda s: dense(half)(s) + 2 * s.b * s.k * (everything(s) - half(s)) * plain(s),
        hyper=dict(skip_layers=2), kept=each_layer(norm_score, skip=2), model="deep",
    ),
    row(
        "h2o", dense(half_and_one, extra=4), kept=each_layer(received, recent_half),
        victim=h2o_victim(count),
    ),
    row(
        "a2sf", dense(half_and_one, extra=4), hyper=dict(forgetting=FORGETTING), kept=each_layer(faded),
        victim=h2o_victim(count, recent=0, key=faded_slot),
    ),
    row("tova", dense(half_and_one), kept=each_layer(tova_score), victim=tova_victim(count)),
    row(
        "vatp", dense(half_and_one, extra=4), hyper=dict(sinks=2),
        kept=each_layer(
            lambda p, i: received(p, i) * value_size(p, i),
            lambda p: (np.arange(p.length) < 2) | recent_half(p),
        ),
        victim=h2o_victim(count, key=valued_mass, sinks=2),
    ),
    row(
        "morphkv", lambda s: dense(half_and_one)(s) + queries_of(WINDOW)(s), hyper=dict(window=WINDOW),
        **chooses(dynamic.morphkv(WINDOW, "sum")),
    ),
    row(
        "roco", dense(half_and_one, extra=8), hyper=dict(newest=2, steady=0.4),
        **chooses(dynamic.roco(2, 0.4)),
    ),
    row(
        "corm", lambda s: dense(half_and_one)(s) + queries_of(WINDOW)(s),
        hyper=dict(window=WINDOW, newest=3, threshold=2.5), whole=dict(threshold=0), counted=True,
        **chooses(dynamic.corm(WINDOW, 3, 2.5)),
    ),
    row(
        "buzz", dense(due_by_2, extra=8), hyper=BUZZ.hyper,
        kept=BUZZ.kept, victim=BUZZ.victims, leave=BUZZ.leave, counted=True,
    ),
    row(
        "scope", lambda s: dense(half_and_one, extra=4)(s) + queries_of(2)(s),
        hyper=dict(written=0.05, window=2, kernel=KERNEL), whole=dict(written=0.0),
        kept=dynamic.scope_kept(count, lambda p, i: window_score(p, i, 2, KERNEL), 0.05),
        victim=dynamic.scope_victims(count, 2),
    ),
    row("criticalkv", dense(half), hyper=SNAP, kept=each_layer(critical_score)),
    chained(
        "criticalkv + int4", paged(lambda s, i: s.k * count(s.tokens), slot=coded(4, 2)),
        ("criticalkv", SNAP | dict(budget=0.5, page=PAGE, across_heads=True)), ("int4", dict(group=8)),
        kept=critical_across_heads, error=0.3,
    ),
    row(
        "kvzap", lambda s: paged(lambda s, i: s.k * s.tokens, slot=lambda s: plain(s) + 4)(
            s._replace(room=s.room + WINDOW)
        ),
        hyper=dict(fitted=GATE, threshold=GATE_THRESHOLD, window=WINDOW, page=PAGE), kept=kvzap_kept,
        victim=kvzap_leaves, counted=True,
    ),
    row(
        "r-kv", lambda s: dense(due_by_2)(s) + queries_of(WINDOW)(s),
        hyper=SNAP | dict(buffer=2), kept=rkv_kept(count, **SNAP),
        victim=rkv_victims(count, 2, THETA, **SNAP),
    ),
    row(
        "snapkv", lambda s: dense(half, s.n)(s), hyper=SNAP | dict(variant="paper"),
        kept=each_layer(snap(per_query_head=True)),
    ),
    row(
        "snapkv kvpress", dense(half), "snapkv", hyper=SNAP | dict(variant="kvpress"), model="6/3",
        kept=each_layer(snap(reduce="mean", kind="mean")),
    ),
    row(
        "snapkv windowed", lambda s: dense(half)(s) - 2 * s.b * s.k * (half(s) - WINDOWS[0] - 1) * plain(s),
        "snapkv", hyper=SNAP | dict(variant="kvpress"), model="windowed",
        kept=windowed(each_layer(snap(reduce="mean", kind="mean")), WINDOWS),
    ),
    row(
        "pyramidkv", paged(lambda s, i: s.n * int(pyramid_counts(s.tokens, s.layers)[i]), lambda s: s.n),
        hyper=SNAP | dict(page=PAGE, variant="paper"), kept=pyramid_kept(per_query_head=True), model="deep",
    ),
    row(
        "fastkv", dense(half), hyper=SNAP | dict(tsp_layer=LAST_WHOLE, share=PASSED), kept=fastkv_kept,
        whole=dict(share=1.0), narrow=fastkv_goes_on, model="deep",
    ),
    row(
        "cake", paged(lambda s, i: s.k * count(s.tokens), one_pool=True),
        hyper=SNAP | CAKE | dict(page=PAGE), kept=cake_kept, model="deep",
    ),
    row(
        "zigzagkv", paged(lambda s, i: s.k * count(s.tokens), one_pool=True), model="deep",
        hyper=SNAP | ZIGZAG | dict(page=PAGE), kept=layers.zigzagkv(count, **SNAP, **ZIGZAG),
    ),
    row(
        "dynamickv", paged(lambda s, i: s.k * count(s.tokens), one_pool=True), model="deep",
        hyper=SNAP | dict(most=1.2, page=PAGE), kept=layers.dynamickv(count, **SNAP, most=1.2),
    ),
    row(
        "prefixkv",
        paged(lambda s, i: s.k * count(s.tokens), slot=lambda s: plain(s) + 4, one_pool=True), model="deep",
        hyper=PREFIXES | dict(page=PAGE), kept=layers.prefixkv(count, **PREFIXES),
    ),
    row(
        "headkv", paged(lambda s, i: s.k * count(s.tokens), one_pool=True),
        hyper=SNAP | dict(page=PAGE, fitted=PROFILE), kept=headkv_kept,
    ),
    row(
        "duoattention",
        lambda s: paged(lambda s, i: s.k * s.tokens)(s._replace(room=s.room + WINDOW)),
        hyper=dict(fitted=GATES, sinks=DUO_SINKS, window=WINDOW, page=PAGE), kept=duo_kept,
        victim=duo_leaves, counted=True,
    ),
    row(
        "gemfilter", dense(half), hyper=dict(filter_layer=0, kernel=KERNEL), reread=gems, stacks=False,
    ),
    row("adakv", paged(lambda s, i: s.k * count(s.tokens)), hyper=SNAP | dict(page=PAGE), kept=adakv_kept),
    row(
        "finch", dense(half), hyper=dict(question=WINDOW), kept=each_layer(finch_score), phase="rank",
        looks_ahead=True,
    ),
    row("snapkv grouped", dense(half), "snapkv", hyper=SNAP, model="6/3", kept=each_layer(grouped_score)),
    row(
        "pyramidkv grouped", paged(lambda s, i: s.k * int(pyramid_counts(s.tokens, s.layers)[i])),
        "pyramidkv", hyper=SNAP | dict(page=PAGE), kept=pyramid_kept(), model="deep",
    ),
    row(
        "expected-attention", dense(half), hyper=dict(future=64),
        kept=each_layer(expected_score, sinks),
    ),
    row("keydiff", dense(half), kept=each_layer(keydiff_score)),
    row("curdkv", dense(half), hyper=dict(window=CUR_WINDOW), kept=each_layer(curdkv_score, sinks)),
    row(
        "compactor", dense(half, extra=4), hyper=COMPACT,
        kept=each_layer(compactor_score, compactor_protects),
    ),
    row("capkv", dense(half), hyper=dict(future=64), kept=each_layer(capkv_score, sinks)),
    row(
        "q-filters", dense(half), hyper=dict(fitted=FILTERS, newest=3),
        kept=each_layer(filtered_score, ends(0, 3)),
    ),
    row(
        "sage-kv", dense(half), hyper=dict(sinks=1, window=WINDOW),
        kept=each_layer(last_score, ends(1, WINDOW)),
    ),
    row(
        "nacl", dense(half), hyper=dict(window=WINDOW, share=NACL_SHARE, sinks=1),
        kept=each_layer(nacl_score, ends(1, WINDOW)),
    ),
    row(
        "compresskv", dense(half), hyper=SNAP | dict(heads=2, fitted=SEMANTIC),
        kept=each_layer(semantic_score, ends(0, WINDOW)),
    ),
    row("kvcrush", dense(half), hyper=SNAP | dict(share=0.5), kept=kvcrush_kept, model="6/3"),
    row(
        "simlayerkv", paged(lambda s, i: s.k * s.tokens), hyper=LAZY | dict(page=PAGE), kept=simlayer_kept,
        model="deep", counted=True,
    ),
    row(
        "lagkv", dense(lambda s: half_and_one(s) - 1 + LAG.lag, extra=4),
        hyper=dict(lag=LAG.lag, sinks=LAG.sinks), kept=LAG.kept, victim=LAG.victims, leave=LAG.leave,
    ),
    row(
        "kvzip", paged(lambda s, i: s.k * count(s.tokens), one_pool=True),
        hyper=dict(page=PAGE, prefix=PREFIX), kept=kvzip_kept,
    ),
    row(
        "kvcompose", paged(lambda s, i: s.k * count(s.tokens), one_pool=True), hyper=dict(page=PAGE),
        kept=kvcompose_kept, model="deep",
    ),
    row(
        "infinipot", dense(half, extra=4), hyper=dict(share=0.5, prefix=PREFIX),
        kept=each_layer(infinipot_score), phase="rank",
    ),
    row(
        "chunkkv", dense(half), hyper=dict(chunk=3, window=WINDOW, reuse=2), kept=each_layer(chunk_score),
        model="deep",
    ),
    row("keepkv", dense(half_and_one, extra=8), kept=each_layer(received, recent_half), error=None),
    row(
        "d2o", lambda s: dense(half_and_one, extra=4)(s) + 4 * s.layers * s.b, hyper=dict(sinks=2),
        kept=each_layer(received, lambda p: (np.arange(p.length) < 2) | recent_half(p)),
        victim=h2o_victim(count, sinks=2), leave=merges.d2o(THETA),
    ),
    row(
        "cam", dense(half_and_one, extra=4), hyper=dict(following=3), kept=each_layer(received, recent_half),
        victim=h2o_victim(count), leave=merges.cam(3),
    ),
    row(
        "less", lambda s: dense(half_and_one, extra=4)(s) + 4 * s.layers * s.b * s.k * 3 * (s.h + 1),
        hyper=dict(fitted=KERNELS), kept=each_layer(received, recent_half), victim=h2o_victim(count),
        leave=merges.Less(KERNELS.arrays, THETA),
    ),
    # At full rank; tests/test_making.py has lower ones.
    row("palu", dense(everything), hyper=dict(rank=1.0, heads=1)),
    row(
        "minicache", minicache_bytes(lambda s: 4 * s.h), hyper=dict(MINI, most=MINI_MOST), model="deep",
        moves=False, stacks=False,
        stored=stacks.minicache(1, **MINI, most=lambda length: max(1, int(MINI_MOST * length))),
    ),
    row(
        "mustafar", mustafar_bytes, hyper=dict(residual=4), moves=False,
        whole=(("mustafar", dict(keys=1.0, values=1.0)),), attends=reads.mustafar(0.5, 4),
    ),
    row("int8", dense(everything, slot=coded(8)), error=0.02),
    row("int4", dense(everything, slot=coded(4, 2)), hyper=dict(group=8), error=0.3),
    row("fp8", dense(everything, slot=lambda s: 2 * (s.h + 2) + 4), error=0.2),
    row("turboquant", dense(everything, slot=turboquant_bytes), error=0.8),
    row("quarot", dense(everything, slot=coded(4)), error=0.3),
    row(
        "kivi", kivi_bytes(4), hyper=dict(bits=4, group=16, residual=16), error=0.3, moves=False
    ),
    row(
        "gear", gear_bytes(4, 2), hyper=dict(bits=4, group=16, rank=2, outliers=0.1), error=0.1, moves=False
    ),
    row("kvquant", kvquant_bytes, hyper=dict(bits=4, fitted=LEVELS), error=0.3),
    chained("mikv", mikv_bytes, ("mikv", dict(budget=0.5, low=4, group=8)), error=0.3),
    row("quest", quest_bytes, hyper=dict(page=8, skip_layers=2), error=None, moves=False, model="deep"),
    row(
        "infllm", infllm_bytes, hyper=dict(page=4, newest=8, sinks=4, keys=2), error=None, moves=False,
    ),
    row(
        "sparq", sparq_bytes, hyper=dict(channels=5, newest=4), moves=False,
        attends=reads.sparq(count, channels=5, newest=4),
    ),
    row(
        "tidaldecode", split(everything, 1, 4, lambda s: 0, plain),
        hyper=dict(skip_layers=0, reselect=1, newest=4), model="deep", moves=False, stacks=False,
        attends=reads.tidal(count, picks=(0, 1), newest=4),
    ),
    row(
        "magicpig", magicpig_bytes, hyper=HASH | dict(skip_layers=0), whole=dict(planes=1, tables=256),
        moves=False, attends=reads.magicpig(count, **HASH),
    ),
    chained(
        "snapkv + kivi", kivi_bytes(2, slots=half), ("snapkv", SNAP | dict(budget=0.5, variant="kvpress")),
        ("kivi", dict(bits=2, group=16, residual=16)), kept=each_layer(snap(reduce="mean", kind="mean")),
        error=0.8, moves=False,
    ),
    chained(
        "adakv + int4", paged(lambda s, i: s.k * count(s.tokens), slot=coded(4, 2)),
        ("adakv", SNAP | dict(budget=0.5, page=PAGE)), ("int4", dict(group=8)), kept=adakv_kept, error=0.3,
    ),
    chained(
        "h2o + int8", dense(half_and_one, slot=coded(8), extra=4), ("h2o", dict(budget=0.5)), ("int8", {}),
        kept=each_layer(received, recent_half), error=0.02, victim=h2o_victim(count),
    ),
]  # fmt: skip

BY_LABEL = {r.label: r for r in ROWS}
