"""What the methods of `table_selection.py` leave of a prompt, and what leaves in steps, in float64 numpy."""

from __future__ import annotations

import jax
import numpy as np

from kvjax.grammar.fitted import Fitted
from kvjax.keep.scores.keyformer import NoisyMass
from tests.float64 import dynamic, merges
from tests.float64.frequency import FreqKV
from tests.float64.layers import shared_out
from tests.float64.reference import Prompt, best, h2o_victim, pool, rope, softmax
from tests.methods.expected import (
    each_layer,
    ends,
    expected_score,
    faded,
    flat_counts,
    headkv_kept,
    kv_lists,
    last_score,
    received,
)
from tests.methods.rows import KERNEL, THETA, WINDOW, count, paged

PROFILE = Fitted({"importance": np.array([[0.1, 0.7], [0.0, 0.45]], np.float32)}, "CopyProfile", "")
# Of 2 layers and 4 query heads: two for what followed, one for the token itself: three KV heads of four.
LOOKS_BACK = Fitted(
    {
        "induction": np.array([[0.1, 0.2, 0.0, 0.0], [0.3, 0.1, 0.1, 0.0]], np.float32),
        "echo": np.array([[0.0, 0.1, 0.1, 0.1], [0.3, 0.3, 0.9, 0.1]], np.float32),
    },
    "RepeatingHeads",
    "",
)
RAZOR = dict(induction=0.25, echo=0.125, sinks=2, window=3, share=0.4)
LOOKING_BACK = [[True, False], [True, True]]


def razor_kept(prompt):
    near = ends(RAZOR["sinks"], max(RAZOR["window"], int(RAZOR["share"] * prompt.length + 1e-9)))(prompt)
    assert RAZOR["window"] < RAZOR["share"] * prompt.length
    return [np.stack([near | whole for whole in heads]) for heads in LOOKING_BACK]


SEPARATORS = tuple(range(1, 64, 5))


def separators_first(prompt, layer):
    """More than any position for a separator, and newer tokens before older ones."""
    at = np.arange(prompt.length) + 1e6 * np.isin(prompt.tokens, SEPARATORS)
    return np.broadcast_to(at, (kv_lists(prompt), prompt.length))


def sepllm_victim(lists, length, queries, sinks=2, window=3):
    """Find the oldest of the tokens that are no separators; where there is none, the oldest separator."""
    out = []
    for slots in lists:
        able = [i for i, s in enumerate(slots) if sinks <= s["pos"] < length - window]
        worst = min(able, key=lambda i, s=slots: (s[i]["token"] in SEPARATORS, s[i]["pos"]), default=None)
        out.append(worst if len(slots) > count(length) else None)
    return out


LADDER = dict(recover=0.5, frequent=0.3, local=0.2, sinks=1, window=WINDOW)


def fastgen_kept(prompt):
    at, t, found = np.arange(prompt.length), prompt.length, []
    for layer, p in enumerate(prompt.p):
        given = p[:, -WINDOW:].mean(1).reshape(-1, prompt.group, t).mean(1)
        often = best(received(prompt, layer), int(LADDER["frequent"] * t + 1e-9))
        keeps = []
        for mine, heavy in zip(given, often, strict=True):
            slots = at < LADDER["sinks"]
            more = [np.isin(prompt.tokens, SEPARATORS), heavy, at >= t - int(LADDER["local"] * t + 1e-9)]
            for one in (*more, np.ones(t, bool)):
                if mine[slots].sum() >= LADDER["recover"]:
                    break
                slots = slots | one
            keeps.append(slots)
        found.append(np.stack(keeps))
    return found


def sirllm_score(prompt, layer, decay=0.5, turn=9):
    before, seen = prompt.all_logits[:-1], np.asarray(prompt.tokens[1:])
    surprise = np.append(0, -np.log(softmax(before)[np.arange(len(seen)), seen]))
    aged = surprise * decay ** (np.arange(prompt.length)[::-1] / turn)
    return np.broadcast_to(aged, (kv_lists(prompt), prompt.length))


_draws = jax.jit(NoisyMass.draws, static_argnames=("self", "heads"))


def drawn(noise, at, pos, heads, layer):
    """Draw the library's noise [heads, T, S], by one program for many lengths: draws depend on no others."""
    longer = lambda x, of: np.pad(np.asarray(x, np.int32), (0, -len(x) % of))  # noqa: E731
    lists = np.tile(longer(pos, 32), (1, heads, 1))
    z = _draws(noise, longer(at, 1 if len(at) == 1 else 32)[None], lists, heads, np.int32(layer))
    return np.asarray(z[0], np.float64)[:, : len(at), : len(pos)]


class Keyformer:
    """Keyformer over explicit slots, which remember all the noisy attention that they received.

    The noise is the library's; tests/keep/test_keyformer.py says what it must be.
    """

    def __init__(self, *, tau, tau_end, horizon, recent):
        self.hyper = dict(tau=tau, tau_end=tau_end, horizon=horizon, recent=recent)
        self.noise = NoisyMass(seed=0)
        self.tau = lambda at: tau + (tau_end - tau) * np.minimum(at / horizon, 1)

    def given(self, q, at, k, pos, layer, head):
        """Compute what the queries q [G, T, H] at positions `at` give slots: [S]."""
        z = drawn(self.noise, at, pos, (head + 1) * len(q), layer)[-len(q) :]
        s = (q @ k.T / np.sqrt(k.shape[-1]) + z) / self.tau(at)[:, None]
        return softmax(np.where(pos[None] > at[:, None], -np.inf, s)).sum((0, 1))

    def kept(self, prompt):
        found, at = [], np.arange(prompt.length)
        for layer, (q, k) in enumerate(zip(prompt.q, prompt.k, strict=True)):
            groups = q.reshape(len(k), -1, *q.shape[1:])
            each = [self.given(groups[i], at, k[i], at, layer, i) for i in range(len(k))]
            score = np.where(
                at >= prompt.length - int(count(prompt.length) * self.hyper["recent"]), np.inf, each
            )
            found.append(best(score, np.full(len(k), count(prompt.length))))
        return found

    def leave(self, memory, lists, gone):
        """Before any leaves, slots of a prompt note which others there were."""
        for slots in lists:
            whole = list(slots)
            for slot in slots:
                slot.setdefault("among", whole)

    def victims(self, lists, length, queries):
        out = []
        for head, slots in enumerate(lists):
            q = queries.reshape(len(lists), -1, *queries.shape[1:])[head]
            layer = slots[0]["layer"]
            first = [s for s in slots if "noisy" not in s and s["read"]]
            if first:
                whole, at = first[0]["among"], np.arange(len(first[0]["among"]))
                k = rope(np.stack([s["k"] for s in whole]), at, THETA)
                for slot, mass in zip(whole, self.given(q[:, at], at, k, at, layer, head), strict=True):
                    slot["noisy"] = mass
            pos = np.array([s["pos"] for s in slots])
            k = rope(np.stack([s["k"] for s in slots]), pos, THETA)
            for slot, mass in zip(
                slots, self.given(q[:, -1:], pos.max(keepdims=True), k, pos, layer, head), strict=True
            ):
                slot["noisy"] = slot.get("noisy", 0.0) + mass
            able = [i for i in range(len(pos)) if pos[i] < length - int(count(length) * self.hyper["recent"])]
            out.append(min(able, key=lambda i, s=slots: s[i]["noisy"]) if len(pos) > count(length) else None)
        return out


KEYFORMER = Keyformer(tau=0.8, tau_end=2.5, horizon=24, recent=0.3)


def zeromerge(share, recent=0.4, fading=0.98, bonus=0.6):
    """ZeroMerge: H2O by faded attention, in which what stands for several tokens stays."""
    newest = lambda p: np.arange(p.length) >= p.length - int(count(p.length) * recent)  # noqa: E731
    received = lambda slot: (slot.get("votes", 1) > 1, merges.faded(slot, fading))  # noqa: E731
    return dict(
        kept=each_layer(lambda p, i: faded(p, i, fading), newest),
        victim=h2o_victim(count, recent, received),
        leave=merges.counted(
            THETA, count, takers=share, newest=recent, fading=fading, bonus=bonus, largest=True
        ),
    )


def passages(score, which, most=0):
    """Average scores [.., T] over the tokens of the same number, or over the `most` best of them."""
    out = np.zeros_like(score)
    for number in np.unique(which):
        mine = np.flatnonzero(which == number)
        ranked = -np.sort(-score[..., mine], axis=-1)
        out[..., mine] = ranked[..., : most or None].mean(-1, keepdims=True)
    return out


def in_layer(prompt, layer, window=WINDOW):
    """Compute what the last window gives each older token, the mean over all heads of a layer."""
    given = prompt.p[layer][:, -window:].sum(1).mean(0)
    given[-window:] = 0
    return np.broadcast_to(given, (kv_lists(prompt), prompt.length))


PIECES = dict(size=5, reuse=2)


def windowkv_score(prompt, layer):
    pieces = np.arange(prompt.length) // PIECES["size"]
    return passages(in_layer(prompt, layer // PIECES["reuse"] * PIECES["reuse"]), pieces, PIECES["size"] // 2)


def shotkv_score(prompt, layer):
    """Infinite for the window; a separator ends its shot."""
    marks = np.isin(prompt.tokens, SEPARATORS)
    score = passages(in_layer(prompt, layer, 2), np.cumsum(marks) - marks)
    return np.where(ends(0, 2)(prompt), np.inf, score)


AHEAD = 3


def laq_score(prompt, layer):
    """Compute what the queries of the likeliest tokens behind a prompt give its tokens."""
    if not hasattr(prompt, "ahead"):
        tokens, logits = list(prompt.tokens), prompt.all_logits
        for _ in range(AHEAD):
            tokens.append(int(logits[-1].argmax()))
            prompt.ahead = Prompt(prompt.decoder, tokens)
            logits = prompt.ahead.all_logits
    q, k = prompt.ahead.q[layer][:, prompt.length :], np.repeat(prompt.k[layer], prompt.group, 0)
    p = softmax(q @ k.swapaxes(1, 2) / np.sqrt(k.shape[-1])).sum(1)
    return pool(p.reshape(-1, prompt.group, prompt.length).mean(1), KERNEL, "max")


LAZY_LAYER = 1


def lazy_goes_on(prompt, layer, share=0.6):
    if layer != LAZY_LAYER:
        return None
    score = last_score(prompt, layer).sum(0)
    score[-1] = np.inf
    return np.flatnonzero(best(score, max(1, int(prompt.length * share + 1e-9))))


def lazy_kept(prompt):
    found = []
    for at in prompt.at:
        found.append(np.zeros((kv_lists(prompt), prompt.length), bool))
        found[-1][:, at] = True
    return found


def kv_compress_kept(prompt):
    scores = []
    for p in prompt.p:
        score = (p[:, -WINDOW:] ** 2).sum(1).reshape(-1, prompt.group, prompt.length).mean(1)
        scores.append(np.where(ends(0, WINDOW)(prompt), np.inf, score))
    flat = np.concatenate(scores)
    counts = flat_counts(flat, len(flat) * count(prompt.length)).reshape(len(scores), -1)
    return [best(s, c) for s, c in zip(scores, counts, strict=True)]


LOSS = 0.2


def dbudgetkv_kept(prompt, sinks=2):
    """Tokens leave from the oldest behind the sinks on, as long as the norm of what stays is enough."""
    found = []
    for p in prompt.p:
        start = sinks
        while start < prompt.length - 1:
            stays = np.r_[0:sinks, start + 1 : prompt.length]
            if np.linalg.norm(p[:, :, stays]) < (1 - LOSS) * np.linalg.norm(p):
                break
            start += 1
        kept = (np.arange(prompt.length) < sinks) | (np.arange(prompt.length) >= start)
        found.append(np.tile(kept, (kv_lists(prompt), 1)))
    return found


def neglect(history, recent):
    """Scissorhands: minus how often the newest queries gave a slot less than an even share."""

    def rule(held):
        p, at = dynamic.probabilities(held, history)
        low = (p < 1 / (at[:, None] + 1)) & (held.pos[None] <= at[:, None])
        score = -low.sum(1).mean(0)
        return np.where(held.pos >= held.length - recent, np.inf, score)

    return rule


def looked_at(window, recent):
    """ALISA: what the newest queries give a slot, in sum."""

    def rule(held):
        score = dynamic.probabilities(held, window)[0].sum(1).mean(0)
        return np.where(held.pos >= held.length - int(held.n * recent), np.inf, score)

    return rule


LEAN = dict(high=8, low=4, group=16)


def lean_bytes(s):
    """Pages of either tier, which may hold all tokens of a list but one, and a tail of the first tier."""
    codes = lambda bits, groups: s.h * bits // 8 + 4 * groups  # noqa: E731
    first = codes(8, 1) + codes(4, s.h // 16) + 8
    second = codes(4, s.h // 16) + codes(2, s.h // 16) + 8
    tier = lambda most, slot: paged(lambda s, i: s.k * most, slot=lambda _: slot)  # noqa: E731
    bare = s._replace(room=0)
    return tier(s.tokens, first)(s) + tier(s.tokens - 1, second)(bare) - 4 * s.b


def ems_score(prompt, layer, window=3):
    """Score by the attention of all queries and that of the last ones, smoothed, both over their largest."""
    local = prompt.p[layer][:, -window:].sum(1).reshape(-1, prompt.group, prompt.length).mean(1)
    local[:, -window:] = 0
    each = received(prompt, layer), pool(local, KERNEL, "max")
    return sum(x / x.max(-1, keepdims=True) for x in each)


KVMERGER = dict(threshold=0.5, sinks=1, window=3)


def kvmerger_score(prompt, layer):
    mass, t = received(prompt, layer), prompt.length
    rank = np.argsort(np.argsort(-mass, axis=-1, kind="stable"), axis=-1)
    pivots = np.stack([merges.runs(k, m, **KVMERGER) for k, m in zip(prompt.k[layer], mass, strict=True)])
    return t * (pivots == np.arange(t)) - rank


SEARCHED = Fitted({"importance": np.array([[0.3, 0.3], [1.0, 1.0]], np.float32)}, "SearchedProfile", "")


def evolkv_kept(prompt):
    """Keep the window, and what the stack has beside it in proportion to what was searched for."""
    return headkv_kept(prompt, beta=1.0, profile=SEARCHED)


OWN_LAYERS = Fitted({"source": np.arange(3, dtype=np.int32)}, "SharedLayers", "")


COMPRESSIVE = merges.Compressive(count, THETA, rate=3, recent=0.4)
FREQUENCIES = dict(every=2, sinks=1, newest=2)
FREQKV = FreqKV(count, **FREQUENCIES)
GATED = dict(chunk=5, few=2)


def gated_kept(prompt):
    """Run the entropy gate's greedy pass over chunks, behind the window, which stays."""
    found, t, size = [], prompt.length, GATED["chunk"]
    for layer in range(len(prompt.p)):
        given = prompt.p[layer][:, -WINDOW:].mean(1).reshape(-1, prompt.group, t).mean(1)
        given[:, -WINDOW:] = 0
        score = pool(given, KERNEL, "mean").sum(0)
        chunks = [np.arange(at, min(at + size, t)) for at in range(0, t, size)]
        means = np.array([score[c].mean() for c in chunks])
        shares = [score[c] / (score[c].sum() + 1e-8) for c in chunks]
        spread = [-(p * np.log(p + 1e-8)).sum() / np.log(max(len(p), 2)) for p in shares]
        spread = np.array(
            [np.clip(e, 0, 1) if len(c) > 1 else 0 for e, c in zip(spread, chunks, strict=True)]
        )
        lower = lambda x: np.sort(x)[(len(x) - 1) // 2]  # noqa: E731
        spiky, order, rest = (means >= lower(means)) & (spread < lower(spread)), [], []
        for i in np.argsort(-means, kind="stable"):
            best_first = chunks[i][np.argsort(-score[chunks[i]], kind="stable")]
            most = GATED["few"] if spiky[i] else len(best_first)
            order, rest = order + best_first[:most].tolist(), rest + best_first[most:].tolist()
        order += sorted(rest, key=lambda j: (-score[j], j))
        window = range(t - WINDOW, t)
        stays = [*window, *[j for j in order if j not in window][: count(t) - WINDOW]]
        found.append(np.tile(np.isin(np.arange(t), stays), (kv_lists(prompt), 1)))
    return found


DRIFTS = Fitted({"importance": np.array([[0.9, 0.9], [0.2, 0.2]], np.float32)}, "DriftProfile", "")
EPISODE = (9, 2, 30)


def epicache_kept(prompt):
    """Keep a quarter of the budget per layer, the rest by how far keys drift; the best by an episode."""
    t, sinks = prompt.length, 2
    given = int((n := count(t)) / 1.333 + 1e-9)
    importance = DRIFTS.arrays["importance"].astype(float)
    more = shared_out(importance.ravel(), importance.size * given, t - (n - given)).reshape(2, 2)
    found, again = [], Prompt(prompt.decoder, [*prompt.tokens, *EPISODE])
    for layer, p in enumerate(again.p):
        score = p[:, t:, :t].reshape(-1, prompt.group, len(EPISODE), t).max((1, 2))
        score[:, :sinks] = np.inf
        found.append(best(score, n - given + more[layer]))
    return found


CURVES = Fitted(
    {"kept": np.linspace([[0.9, 0.6], [1.0, 0.8]], [[0.1, 0.0], [0.3, 0.1]], 99, axis=-1).astype(np.float32)},
    "CurveProfile",
    "",
)


def lukv_kept(prompt):
    """Of Expected Attention's best, the shares of a curve at the percentage that leaves."""
    t, n = prompt.length, count(prompt.length)
    shares = CURVES.arrays["kept"][..., round(100 - 100 * n / t) - 1].astype(float)
    more = shared_out(shares.ravel(), shares.size * (n - 5), t - 5)
    counts = 5 + more.reshape(shares.shape)
    found = []
    for layer, c in enumerate(counts):
        size = np.linalg.norm(prompt.v[layer], axis=-1)
        score = expected_score(prompt, layer, future=64) + 0.05 * size
        score[:, ends(4, 1)(prompt)] = np.inf
        found.append(best(score, c))
    return found


PYRAMID = dict(window=WINDOW, decay=0.6, recency=1.5, sinks=1)


def pyramidinfer_kept(prompt):
    """Keep what the newest queries attend to, newer ones weighing more; fewer tokens in every layer."""
    t, layers = prompt.length, len(prompt.p)
    rates = [0.6 + 0.4 * (np.cos(np.pi * i / layers) + 1) / 2 for i in range(layers)]
    base, left = min(WINDOW + 1, count(t)), np.cumprod([1.0, *rates[:-1]])
    counts = base + shared_out(left, layers * (count(t) - base), t - base)
    weight, found = np.linspace(1, 1.5, WINDOW), []
    for layer, n in enumerate(counts):
        given = np.einsum("nwt,w->t", prompt.p[layer][:, -WINDOW:], weight)
        given[ends(1, WINDOW)(prompt)] = np.inf
        found.append(best(np.tile(given, (kv_lists(prompt), 1)), np.full(kv_lists(prompt), n)))
    return found


CENTRES = Fitted(
    {
        "mean": (rng := np.random.default_rng(11)).normal(size=(2, 4, 16)).astype(np.float32),
        "size": rng.uniform(1.5, 3, (2, 4, 8)).astype(np.float32),
    },
    "QueryCentres",
    "",
)


def triattention(farthest):
    """TriAttention: a cosine series in the distances to come, and what the lengths of queries add."""
    omega, ahead = THETA ** (-np.arange(8) / 8), 2 ** np.arange(farthest.bit_length())
    pairs = lambda x: x[..., :8] + 1j * x[..., 8:]  # noqa: E731

    def rule(held):
        group, head = len(held.q), held.head
        k = pairs(rope(held.k, -held.pos, THETA))
        each = []
        for n in range(head * group, (head + 1) * group):
            centre = pairs(CENTRES.arrays["mean"][held.layer][n].astype(float))
            phase = np.angle(centre * k.conj())
            apart = (held.length - held.pos)[:, None] + ahead[None]
            waves = np.cos(apart[..., None] * omega + phase[:, None])
            series = (np.abs(centre) * np.abs(k))[:, None] * waves
            beside = (CENTRES.arrays["size"][held.layer][n] - np.abs(centre)) * np.abs(k)
            score = series.sum(-1).mean(1) + beside.sum(-1)
            each.append((score - score.mean()) / score.std())
        return np.max(each, 0)

    return rule


OWN_HEADS = Fitted({"source": np.tile(np.arange(4, dtype=np.int32), (2, 1))}, "ClusteredHeads", "")


def matched_score(prompt, layer, last=WINDOW):
    """Compute the root mean square of the attention of the last queries, which see all tokens."""
    q, k = prompt.q[layer][:, -last:], prompt.k[layer]
    grouped = q.reshape(len(k), -1, q.shape[-1])
    return np.sqrt((softmax(grouped @ k.swapaxes(1, 2) / np.sqrt(k.shape[-1])) ** 2).mean(1))
