"""What the methods of `table.py` keep of a prompt, in float64 over `tests.float64.reference.Prompt`."""

from __future__ import annotations

import jax
import numpy as np
from scipy.special import erf

from kvjax.grammar.fitted import Fitted
from tests.float64 import dynamic
from tests.float64.layers import shared_out
from tests.float64.reference import Lag, Prompt, best, pool, rope, softmax, window_score
from tests.methods.rows import (
    KERNEL,
    THETA,
    WINDOW,
    count,
)

# The score of slots that must stay: less than the infinity of protected slots.
STAYS = 1e30


def each_layer(score, protect=lambda prompt: np.zeros(prompt.length, bool), skip=0):
    """Find each list's count(length) best by score(prompt, layer) [lists, T]; `skip` first layers whole."""

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
    """Return the kept slots of a prompt and of steps if `rule` (`tests.float64.dynamic`) scores slots."""
    return dict(kept=dynamic.kept(count, rule), victim=dynamic.victims(count, rule, THETA, due))


def kv_lists(prompt):
    return len(prompt.k[0])


def random_score(prompt, layer):
    # As many as the longest prompt has: one program draws for all.
    heads, slots = np.indices((kv_lists(prompt), max(128, prompt.length)))
    return np.asarray(_uniform(layer, heads, slots))[:, : prompt.length]


@jax.jit
def _uniform(layer, heads, slots):
    key = jax.random.fold_in(jax.random.key(0), layer)
    draw = lambda h, j: jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, h), j))  # noqa: E731
    return jax.vmap(jax.vmap(draw))(heads, slots)


def position_score(prompt, layer):
    return np.broadcast_to(np.arange(prompt.length, dtype=float), (kv_lists(prompt), prompt.length))


def norm_score(prompt, layer):
    return -np.sqrt((prompt.k[layer] ** 2).sum(-1))


FORGETTING = 0.7


def faded(prompt, layer, rate=FORGETTING):
    """A2SF: what every query gives a token, times `rate` for every later query."""
    weight = rate ** np.arange(prompt.length)[::-1]
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


def critical_score(prompt, layer, share=0.5, epsilon=1e-4, counts=None):
    """Half of the budget for the window and its attention, the rest by that times what a slot can write."""
    attention, c = window_score(prompt, layer, WINDOW, KERNEL), prompt.decoder.config
    out = prompt.decoder.layers[layer]["o"].reshape(c.kv_heads, prompt.group, c.head_dim, -1)
    written = np.abs(np.einsum("ksv,kgvd->kgsd", prompt.v[layer], out)).sum(-1).mean(1)
    n = np.full(len(attention), count(prompt.length)) if counts is None else counts
    first = best(attention, (n * share).astype(int))
    bound = np.where(first, STAYS, (attention + epsilon) * written)
    return np.where(np.isinf(attention), np.inf, bound)


def critical_across_heads(prompt):
    """Ada-KV's budgets by attention, and both stages within each."""
    found = []
    for i in range(len(prompt.p)):
        counts = adakv_counts(window_score(prompt, i, WINDOW, KERNEL), count(prompt.length))
        found.append(best(critical_score(prompt, i, counts=counts), counts))
    return found


def made_up_gate(layers=2, width=32, hidden=8, heads=2):
    """Draw a random gate with one hidden layer of GELUs, for the model "4/2"."""
    rng = np.random.default_rng(7)
    shapes = {"in": (width, hidden), "in_bias": (hidden,), "out": (hidden, heads), "out_bias": (heads,)}
    arrays = {name: rng.normal(size=(layers, *s)).astype(np.float32) for name, s in shapes.items()}
    return Fitted(arrays, "HiddenGate", "")


GATE, GATE_THRESHOLD = made_up_gate(), 0.4


def made_up_kernels(layers=2, heads=4, kv_heads=2, width=16, hidden=6, rank=3):
    """Random LESS kernels, for the model "4/2"."""
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
    """Random KVQuant ranges and levels, for the model "4/2"."""
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
    """Compute what the gate says of hidden states [.., D], for every head [.., K]."""
    a = {name: np.asarray(x[layer], np.float64) for name, x in GATE.arrays.items()}
    x = hidden @ a["in"] + a["in_bias"]
    return x * (1 + erf(x / np.sqrt(2))) / 2 @ a["out"] + a["out_bias"]


def kvzap_kept(prompt):
    recent = np.arange(prompt.length) >= prompt.length - WINDOW
    return [recent | (gate_of(h, i).T >= GATE_THRESHOLD) for i, h in enumerate(prompt.hidden)]


def kvzap_leaves(lists, length, queries):
    """KVzap: slots older than the window with a low score leave, however many they are."""
    low = lambda slot, head: gate_of(slot["hidden"], slot["layer"])[head] < GATE_THRESHOLD  # noqa: E731
    old = lambda slot: slot["pos"] < length - WINDOW  # noqa: E731
    return [[j for j, s in enumerate(slots) if old(s) and low(s, i)] for i, slots in enumerate(lists)]


def tova_score(prompt, layer):
    return np.broadcast_to(prompt.p[layer][:, -1].mean(0), (kv_lists(prompt), prompt.length))


def expected_score(prompt, layer, sinks=4, future=64):
    """Score by Expected Attention: queries as Gaussian, RoPE averaged over the next positions (a matrix)."""
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
    """Multiply the shares that a key and a value have of the squared lengths in their window."""
    score = np.ones((kv_lists(prompt), prompt.length))
    for at in range(0, prompt.length, CUR_WINDOW):
        here = slice(at, at + CUR_WINDOW)
        for x in (prompt.k[layer], prompt.v[layer]):
            squares = (x[:, here] ** 2).sum(-1)
            score[:, here] *= squares / squares.sum(-1, keepdims=True)
    return score


COMPACT = dict(chunk=6, rank=5, sinks=2, newest=3)


def leverage(x, ridge, weights=None):
    """Compute the diagonal of X (X' W X + ridge I)^-1 X' for rows x [T, R]."""
    weighed = x if weights is None else x * weights[:, None]
    return np.diag(x @ np.linalg.inv(weighed.T @ x + ridge * np.eye(x.shape[-1])) @ x.T)


def non_causal(prompt, layer, chunk):
    """Sum what tokens of each chunk give each other without 1 / sqrt(H), times the lengths of values."""
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
    """Compute what the newest query gives, the mean over a group; its own token stays anyway."""
    return prompt.p[layer][:, -1].reshape(-1, prompt.group, prompt.length).mean(1)


SEMANTIC = Fitted(
    {"attention": np.array([[0.1, 0.7, 0.3, 0.2], [0.4, 0.0, 0.1, 0.9]], np.float32)}, "SemanticHeads", ""
)


def semantic_score(prompt, layer, heads=((1, 2), (0, 3))):
    """Average over two query heads, for all KV heads of the layer."""
    given = prompt.p[layer][list(heads[layer]), -WINDOW:].sum(1).mean(0)
    given[-WINDOW:] = 0
    return np.broadcast_to(pool(given, KERNEL, "mean"), (kv_lists(prompt), prompt.length))


def ends(first, newest):
    return lambda p: (np.arange(p.length) < first) | (np.arange(p.length) >= p.length - newest)


NACL_SHARE = 0.5


def nacl_score(prompt, layer):
    """Beside what is protected: the best by attention, then draws by clocks that ring at rates exp(score)."""
    older = np.flatnonzero(~ends(1, WINDOW)(prompt))
    left = max(count(prompt.length) - (prompt.length - len(older)), 0)
    proxies = prompt.p[layer][:, -WINDOW:].sum(1).reshape(-1, prompt.group, prompt.length).mean(1)
    clocks = -np.log(random_score(prompt, layer).astype(float)) / np.exp(proxies)
    order = np.full(proxies.shape, -np.inf)
    for head, score in enumerate(proxies):
        ranked = older[np.argsort(-score[older], kind="stable")]
        first, others = np.split(ranked, [int(left * NACL_SHARE)])
        order[head, first], order[head, others] = 0, -1 - clocks[head, others]
    return order


def kvcrush_kept(prompt, share=0.5):
    """Keep the best n - r of a head, and evenly spaced ones of its others by the bits of all heads."""
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
            head[others[:: len(others) // max(r, 1)][:r]] = True
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
    """Score by the authors' form: all heads' attention of the question times how many tokens a query sees."""
    question = np.arange(prompt.length)[-WINDOW:]
    asked = prompt.p[layer].sum(0)[question]
    return for_all_heads(prompt, (asked * (question + 1)[:, None]).sum(0))


def citrus_score(prompt, layer):
    """Average over all heads and all of the instruction's queries."""
    return for_all_heads(prompt, prompt.p[layer][:, -WINDOW:].mean((0, 1)))


def for_all_heads(prompt, score):
    """One set for all heads of a layer, and with it the newest tokens, which asked for it."""
    newest = np.arange(prompt.length) >= prompt.length - WINDOW
    return np.tile(np.where(newest, np.inf, score), (kv_lists(prompt), 1))


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
    """Linear in depth around the mean, the first at most the whole prompt; running totals are rounded.

    All alike where a prompt is shorter than twice what is shared; `test_recorded.py` has the authors' counts.
    """
    spare = max(count(length) - WINDOW, 0)
    high = spare if length < 2 * spare else min(2 * spare - spare / beta, length - WINDOW)
    shares = np.linspace(high, 2 * spare - high, layers)
    return np.diff(np.round(np.cumsum(shares)), prepend=0).astype(int) + min(count(length), WINDOW)


def pyramid_kept(**kind):
    def kept(prompt: Prompt) -> list[np.ndarray]:
        counts = pyramid_counts(prompt.length, len(prompt.p))
        scores = [snap(**kind)(prompt, i) for i in range(len(counts))]
        return [best(s, np.full(len(s), c)) for s, c in zip(scores, counts, strict=True)]

    return kept


def to_older(prompt, layer):
    """Return what the last window's queries give to the tokens before it: [heads, WINDOW, T - WINDOW]."""
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


PROFILE = Fitted({"importance": np.array([[0.1, 0.7], [0.0, 0.45]], np.float32)}, "Profile", "")


def headkv_kept(prompt, beta=1.2, profile=PROFILE):
    """Keep a window and a base for every head; the pool that they leave, in proportion to the profile."""
    importance = profile.arrays["importance"].astype(float)
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
    """Evict what streaming heads hold between the sinks and the window."""
    between = lambda slot: DUO_SINKS <= slot["pos"] < length - WINDOW  # noqa: E731
    streams = lambda slot, head: not RETRIEVES[slot["layer"]][head]  # noqa: E731
    return [[j for j, s in enumerate(x) if between(s) and streams(s, i)] for i, x in enumerate(lists)]


def flat_counts(scores, total):
    """How many of the `total` best of all lists' scores [lists, T] each list holds."""
    order = np.argsort(-scores, axis=None, kind="stable")[:total]
    return np.bincount(order // scores.shape[-1], minlength=len(scores))


def adakv_counts(s, n, floor=0.2):
    """0.8 * flat + 0.2 * n, rounded down, the rest of the total to the largest fractions."""
    exact = np.round((1 - floor) * flat_counts(s, len(s) * n) + floor * n, 9)
    counts = np.floor(exact).astype(int)
    short = len(s) * n - counts.sum()
    counts[np.argsort(-(exact - counts), kind="stable")[:short]] += 1
    return counts


def adakv_kept(prompt, floor=0.2, score=None):
    scores = [(score or snap())(prompt, i) for i in range(len(prompt.p))]
    return [best(s, adakv_counts(s, count(prompt.length), floor)) for s in scores]


PREFIX = (5, 7, 11)


def kvzip_kept(prompt):
    """Keep by largest attention each token gets while an instruction and the prompt are read behind it."""
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
    """Sum what the window gives a whole chunk, in the first of two layers."""
    given = (
        prompt.p[layer // reuse * reuse][:, -WINDOW:].sum(1).reshape(-1, prompt.group, prompt.length).mean(1)
    )
    given[:, -WINDOW:] = 0
    for start in range(0, prompt.length, chunk):
        given[:, start : start + chunk] = given[:, start : start + chunk].sum(1, keepdims=True)
    given[:, -WINDOW:] = np.inf
    return given


def gems(prompt):
    """Find the tokens of the largest logits of the last query at layer 0, over all heads, in their order."""
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
