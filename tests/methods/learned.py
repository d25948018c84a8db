"""What methods with learned gates leave of a prompt, and what leaves in steps, in float64 numpy.

Nobody fitted their arrays. They are for the model "4/2" of `tests.methods.battery`: 2 layers of width 32,
with 4 query heads and 2 KV heads of 16 channels.
"""

from __future__ import annotations

import numpy as np
from scipy.special import erf

from kvjax.fitted import Fitted
from tests.merges import stays_and_leaves
from tests.methods.expected import ends
from tests.methods.rows import THETA, WINDOW, count
from tests.reference import best, rms_norm, rope, softmax

LAYERS, WIDTH, HEADS, KV_HEADS, CHANNELS = 2, 32, 4, 2, 16


def made_up(word, shapes, seed):
    rng = np.random.default_rng(seed)
    arrays = {name: rng.normal(size=(LAYERS, *shape)).astype(np.float32) for name, shape in shapes.items()}
    return Fitted(arrays, word, "")


def of_layer(fitted, layer):
    return {name: x[layer if len(x) > 1 else 0].astype(np.float64) for name, x in fitted.arrays.items()}


RETAINING = made_up("RetainingHead", {"in": ((HEADS + 2 * KV_HEADS) * CHANNELS, 6), "out": (6, KV_HEADS)}, 11)


def retaining_score(prompt, layer):
    """silu([q, k, v] W1) W2 of unrotated queries and keys, all heads of a token in a row."""
    a = of_layer(RETAINING, layer)
    each = [x.swapaxes(0, 1).reshape(prompt.length, -1) for x in (
        prompt.raw_q[layer], prompt.raw_k[layer], prompt.v[layer]
    )]  # fmt: skip
    x = np.concatenate(each, 1) @ a["in"]
    return (x / (1 + np.exp(-x)) @ a["out"]).T


RANK, SINKS = 5, 3
SINK_GATE = made_up(
    "SinkGate",
    {
        "q": (WIDTH, KV_HEADS, HEADS // KV_HEADS, RANK), "q_bias": (KV_HEADS, HEADS // KV_HEADS, RANK),
        "q_norm": (RANK,), "k": (WIDTH, KV_HEADS, RANK), "k_norm": (RANK,),
        "sinks": (KV_HEADS, SINKS, RANK), "bias": (KV_HEADS, HEADS // KV_HEADS),
    },
    12,
)  # fmt: skip
FAST = dict(window=3, sinks=1)


def sink_gate(x, layer):
    """The gate on hidden states [T, D], head by head: [K, T]."""
    a, found = of_layer(SINK_GATE, layer), []
    for head in range(KV_HEADS):
        each = []
        for i in range(HEADS // KV_HEADS):
            q = rms_norm(x @ a["q"][:, head, i] + a["q_bias"][head, i], a["q_norm"], 1e-6)
            k = rms_norm(x @ a["k"][:, head], a["k_norm"], 1e-6)
            mine = (q * k).sum(-1) / np.sqrt(RANK) + a["bias"][head, i]
            sinks = q @ a["sinks"][head].T / np.sqrt(RANK)
            each.append(1 / (1 + np.exp(sinks - mine[:, None]).sum(-1)))
        found.append(np.mean(each, 0))
    return np.stack(found)


def fast_kvzip_kept(prompt):
    """The best of the whole stack, behind what stays anyway."""
    stays = ends(FAST["sinks"], FAST["window"])(prompt)
    scores = np.stack([np.where(stays, np.inf, sink_gate(x, i)) for i, x in enumerate(prompt.hidden)])
    flat = scores.reshape(1, -1)
    return list(best(flat, [len(scores) * KV_HEADS * count(prompt.length)]).reshape(scores.shape))


WRITE_GATE = made_up(
    "WriteGate",
    {
        "norm": (2, CHANNELS), "in": (KV_HEADS, 2 * CHANNELS, 7), "in_bias": (KV_HEADS, 7),
        "out": (KV_HEADS, 7), "out_bias": (KV_HEADS,),
    },
    13,
)  # fmt: skip
ADMITS = 0.3


def write_gate(raw, pos, layer, head):
    """The gate on the unrotated keys [T, H] of one head, at their positions."""
    a = of_layer(WRITE_GATE, layer)
    keys = zip((raw, rope(raw, pos, THETA)), a["norm"], strict=True)
    x = np.concatenate([rms_norm(k, w, 1e-6) for k, w in keys], -1) @ a["in"][head] + a["in_bias"][head]
    x = x * (1 + erf(x / np.sqrt(2))) / 2
    return np.maximum(1 / (1 + np.exp(-(x @ a["out"][head] + a["out_bias"][head]))), 1e-3)


def wg_kv_kept(prompt):
    recent, at = ends(0, WINDOW)(prompt), np.arange(prompt.length)
    each = [
        [write_gate(raw, at, layer, head) for head, raw in enumerate(keys)]
        for layer, keys in enumerate(prompt.raw_k)
    ]
    return [recent | (np.stack(g) >= ADMITS) for g in each]


def wg_kv_leaves(lists, length, queries):
    """What is older than the window and was not admitted leaves, as many as there are."""

    def leaves(slot, head):
        admitted = write_gate(slot["k"][None], [slot["pos"]], slot["layer"], head)[0] >= ADMITS
        return slot["pos"] < length - WINDOW and not admitted

    return [[j for j, slot in enumerate(slots) if leaves(slot, i)] for i, slots in enumerate(lists)]


MIXTURES, NEIGHBOURS, NEWEST = 3, 5, 2
CONV = made_up(
    "ConvMerge", {"conv": (NEIGHBOURS, 2 * CHANNELS, MIXTURES), "conv_bias": (MIXTURES,), "share": ()}, 14
)


def by_attention(held):
    """LoCoCo's heavy hitters, behind the newest tokens."""
    return np.where(held.pos >= held.length - NEWEST, np.inf, held.mass)


def mix(rows, takes, layer):
    """Rows [R, 2 H] of which those at `takes` are mixtures: a convolution by loops."""
    a, half = of_layer(CONV, layer), NEIGHBOURS // 2
    logits = np.zeros((MIXTURES, len(rows)))
    for s in range(len(rows)):
        near = [(w, s + w - half) for w in range(NEIGHBOURS) if 0 <= s + w - half < len(rows)]
        logits[:, s] = sum(rows[at] @ a["conv"][w] for w, at in near) + a["conv_bias"]
    logits = np.maximum(logits, 0)
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    new = rows.copy()
    for i, at in enumerate(takes):
        new[at] += a["share"] * (weight[i] @ rows - rows[at])
    return new


def conv_leave(memory, lists, gone):
    """The slots of the least attention become mixtures of themselves and what leaves."""
    for slots, some in zip(lists, gone, strict=True):
        stay, old = stays_and_leaves(slots, some)
        if not old:
            continue
        length = 1 + max(slot["pos"] for slot in slots)
        able = sorted((s for s in stay if s["pos"] < length - NEWEST), key=lambda s: s["mass"])
        taking = able[:MIXTURES]
        each = sorted([*taking, *old], key=lambda s: s["pos"])
        rows = np.stack([np.concatenate([s["k"], s["v"]]) for s in each])
        takes = [i for i, s in enumerate(each) if any(s is t for t in taking)]
        new = mix(rows, takes, each[0]["layer"])
        for i in takes:
            each[i]["k"], each[i]["v"] = new[i, :CHANNELS], new[i, CHANNELS:]
            memory[True] = memory.get(True, 0) + 1


EVICTION = made_up("EvictionGate", {"out": (WIDTH, KV_HEADS), "out_bias": (KV_HEADS,)}, 15)


def stays_by_dms(x, layer):
    """Which tokens with inputs x [T, D] no head's decision takes out of its window: [K, T]."""
    a = of_layer(EVICTION, layer)
    return np.round(1 / (1 + np.exp(-(x @ a["out"] + a["out_bias"])))).T == 0


def dms_kept(prompt):
    recent = ends(0, WINDOW)(prompt)
    return [recent | stays_by_dms(x, layer) for layer, x in enumerate(prompt.hidden)]


def dms_leaves(lists, length, queries):
    def leaves(slot, head):
        stays = stays_by_dms(slot["hidden"][None], slot["layer"])[head, 0]
        return slot["pos"] < length - WINDOW and not stays

    return [[j for j, slot in enumerate(slots) if leaves(slot, i)] for i, slots in enumerate(lists)]


GATE_HEADS, GATE_RANK = 3, 4
ATTENTION_GATE = made_up(
    "AttentionGate",
    {name: (WIDTH, GATE_HEADS, GATE_RANK) for name in "qkv"}
    | {"out": (GATE_HEADS, GATE_RANK, KV_HEADS), "out_bias": (KV_HEADS,)},
    16,
)


def attention_odds(x, layer):
    """The log-odds that tokens with inputs x [T, D], which are read together, stay: [K, T]."""
    a, logit = of_layer(ATTENTION_GATE, layer), 0.0
    for j in range(GATE_HEADS):
        q, k, v = (x @ a[name][:, j] for name in "qkv")
        logit = logit + softmax(q @ k.T / np.sqrt(GATE_RANK)) @ v @ a["out"][j]
    return (logit + a["out_bias"]).T


def attention_gate_kept(prompt):
    """What its gates let stay, and the best of every head."""
    odds = [attention_odds(x, layer) for layer, x in enumerate(prompt.hidden)]
    return [best(x, np.maximum((x >= 0).sum(-1), 1)) for x in odds]


RUNS = made_up(
    "Opening",
    {
        "join": (WIDTH, KV_HEADS), "join_bias": (KV_HEADS,),
        "weight": (WIDTH, KV_HEADS), "weight_bias": (KV_HEADS,),
    },
    17,
)  # fmt: skip


def joins(x, layer):
    """Which tokens with inputs x [T, D] join the slot before them: [K, T]."""
    a = of_layer(RUNS, layer)
    return np.round(1 / (1 + np.exp(-(x @ a["join"] + a["join_bias"])))).T == 1


def weighs(x, layer, head):
    a = of_layer(RUNS, layer)
    return 1 / (1 + np.exp(-(x @ a["weight"][:, head] + a["weight_bias"][head])))


def dmc_kept(prompt):
    first = np.arange(prompt.length) == 0
    return [first | ~joins(x, layer) for layer, x in enumerate(prompt.hidden)]


def dmc_leaves(lists, length, queries):
    """The newest token joins another one that was written."""

    def leaves(slots, head, j):
        slot = slots[j]
        others = any(s["pos"] < slot["pos"] and not s["read"] for s in slots)
        joining = joins(slot["hidden"][None], slot["layer"])[head, 0]
        return slot["pos"] == length - 1 and others and joining

    return [[j for j in range(len(slots)) if leaves(slots, i, j)] for i, slots in enumerate(lists)]


def runs_merge(memory, lists, gone):
    """What leaves joins the slot before it: means of unrotated keys and values by weights."""
    for head, (slots, some) in enumerate(zip(lists, gone, strict=True)):
        stay, old = stays_and_leaves(slots, some)
        stay.sort(key=lambda s: s["pos"])
        for slot in sorted(old, key=lambda s: s["pos"]):
            to = [s for s in stay if s["pos"] < slot["pos"]][-1]
            first, mine = (weighs(s["hidden"], s["layer"], head) for s in (to, slot))
            have, more = first * to.get("votes", 1), mine * slot.get("votes", 1)
            for name in "kv":
                to[name] = (have * to[name] + more * slot[name]) / (have + more)
            to["votes"] = (have + more) / first
            memory[True] = memory.get(True, 0) + 1


# --- marked tokens and memory tokens ------------------------------------------------------------------------

LOW = 3
ADAPTER = {
    **{f"{name}_down": (WIDTH, LOW) for name in "qkv"},
    "o_down": (HEADS * CHANNELS, LOW), "o_up": (LOW, HEADS * CHANNELS),
    "q_up": (LOW, HEADS * CHANNELS), "k_up": (LOW, KV_HEADS * CHANNELS), "v_up": (LOW, KV_HEADS * CHANNELS),
}  # fmt: skip


def of_all_layers(word, shapes, more, seed):
    """Arrays of every layer, and some of which one row stands for all layers."""
    rng, arrays = np.random.default_rng(seed + 100), made_up(word, shapes, seed).arrays
    arrays = {name: 0.3 * x for name, x in arrays.items()}
    return Fitted(
        arrays | {n: rng.normal(size=(1, *s)).astype(np.float32) for n, s in more.items()}, word, ""
    )


SCORER_LAYER = 1
DISTILLED = of_all_layers(
    "TokenScorer", ADAPTER, {"in": (WIDTH, 6), "in_bias": (6,), "out": (6, 1), "out_bias": (1,)}, 18
)


# Where all tokens stay, only weights without effect leave them as they are.
WITHOUT_EFFECT = Fitted(
    {n: x * (not n.endswith("_up")) for n, x in DISTILLED.arrays.items()}, "TokenScorer", ""
)


def scorer(x):
    """A scorer's numbers of tokens with inputs x [T, D] of its layer."""
    a = {name: y[0].astype(np.float64) for name, y in DISTILLED.arrays.items()}
    h = x @ a["in"] + a["in_bias"]
    return (h * (1 + erf(h / np.sqrt(2))) / 2 @ a["out"] + a["out_bias"])[:, 0]


class Read:
    """What a reading leaves, as `tests.reference.Prompt` says it.

    x: the embeddings of what is read, in rows. at: their positions. sees: which of them a query attends to
    [T, T]. marked: which of them have the weights of `fitted`.
    """

    def __init__(self, decoder, x, at, sees, marked, fitted, past=None):
        c, self.decoder = decoder.config, decoder
        self.raw_q, self.raw_k, self.v, self.q, self.k, self.p, self.hidden = ([] for _ in range(7))
        heads = lambda y: y.reshape(len(x), -1, CHANNELS).swapaxes(0, 1)  # noqa: E731
        for layer, weights in enumerate(decoder.layers):
            h, a = rms_norm(x, weights["attn_norm"], c.norm_eps), of_layer(fitted, layer)
            more = (heads(marked[:, None] * (h @ a[f"{n}_down"] @ a[f"{n}_up"])) for n in "qkv")
            raw_q, raw_k, v = (y + z for y, z in zip(decoder.project(weights, x), more, strict=True))
            q, k = rope(raw_q, at, THETA), rope(raw_k, at, THETA)
            keys, values = (k, v) if past is None else (
                np.concatenate([old[layer], new], 1) for old, new in zip(past, (k, v), strict=True)
            )  # fmt: skip
            s = q @ np.repeat(keys, c.heads // c.kv_heads, 0).swapaxes(1, 2) / np.sqrt(CHANNELS)
            p = softmax(np.where(sees, s, -np.inf))
            for name in ("raw_q", "raw_k", "v", "q", "k", "p"):
                getattr(self, name).append(locals()[name])
            self.hidden.append(h)
            out = p @ np.repeat(values, c.heads // c.kv_heads, 0)
            flat = out.swapaxes(0, 1).reshape(len(x), -1)
            x = decoder.finish(weights, x, out + heads(marked[:, None] * (flat @ a["o_down"] @ a["o_up"])))
        self.all_logits = decoder.logits(x)


def distilled(prompt):
    """The prompt read again, in which what was chosen has weights of its own; its last token has none."""
    chosen = distilled_tokens(prompt)
    marked = chosen & (np.arange(prompt.length) < prompt.length - 1)
    at = np.arange(prompt.length)
    x = prompt.decoder.rest["embed"][np.asarray(prompt.tokens)]
    found = Read(prompt.decoder, x, at, at[None] <= at[:, None], marked, DISTILLED)
    found.tokens, found.length, found.at, found.group = prompt.tokens, prompt.length, prompt.at, prompt.group
    found.chosen = chosen
    return found


def distilled_tokens(prompt):
    score = scorer(prompt.hidden[SCORER_LAYER])
    score[-1] = np.inf
    return best(score, count(prompt.length))


def distilled_kept(found):
    return [np.tile(found.chosen, (KV_HEADS, 1)) for _ in range(LAYERS)]


def memory_of(tokens, by, seed):
    return of_all_layers("MemoryTokens", ADAPTER, {"memory": (tokens, WIDTH)}, seed)


class Remembers:
    """Prompts of which memory tokens stay: read chunk by chunk, and their last token behind all."""

    def __init__(self, fitted, tokens, chunk=None, mean=False):
        self.fitted, self.tokens, self.chunk, self.mean = fitted, tokens, chunk, mean

    def __call__(self, prompt):
        """What stays, as a prompt of memory tokens and the last token."""
        d, g, text = prompt.decoder, self.tokens, prompt.tokens[:-1]
        embed, size = d.rest["embed"], self.chunk or max(len(text), 1)
        memory = self.fitted.arrays["memory"][0].astype(np.float64)
        raw, values, chunks = [], [], [text[i : i + size] for i in range(0, len(text), size)]
        for ids in chunks:
            x = np.concatenate([embed[np.asarray(ids)], memory])
            old = self.held(raw, values)
            many = 0 if old is None else old[0][0].shape[1]
            at = many + np.arange(len(x))
            sees = np.concatenate([np.ones((len(x), many), bool), at[None] <= at[:, None]], 1)
            marked = np.arange(len(x)) >= len(ids)
            read = Read(d, x, at, sees, marked, self.fitted, self.turned(old))
            raw.append([y[:, -g:] for y in read.raw_k])
            values.append([y[:, -g:] for y in read.v])
        old = self.held(raw, values)
        many = 0 if old is None else old[0][0].shape[1]
        sees = np.ones((1, many + 1), bool)
        last = embed[np.asarray(prompt.tokens[-1:])]
        found = Read(d, last, [many], sees, np.zeros(1), self.fitted, self.turned(old))
        return self.joined(prompt, found, old, many)

    def held(self, raw, values):
        """Unrotated keys and values of the memory, per layer; None where there is none yet."""
        if not raw:
            return None
        join = (lambda xs: np.mean(xs, 0)) if self.mean else (lambda xs: np.concatenate(xs, 1))
        return [[join([one[i] for one in each]) for i in range(LAYERS)] for each in (raw, values)]

    def turned(self, old):
        if old is None:
            return None
        return [[rope(k, np.arange(k.shape[1]), THETA) for k in old[0]], old[1]]

    def joined(self, prompt, found, old, many):
        if old is not None:
            found.raw_k = [np.concatenate(pair, 1) for pair in zip(old[0], found.raw_k, strict=True)]
            found.v = [np.concatenate(pair, 1) for pair in zip(old[1], found.v, strict=True)]
        found.length, found.group = many + 1, prompt.group
        found.tokens = [0] * many + prompt.tokens[-1:]
        found.at = [np.arange(many + 1)] * LAYERS
        wide = lambda x, n: np.zeros((*x.shape[:-n], *[many + 1] * n))  # noqa: E731
        found.p = [wide(x, 2) for x in found.p]
        found.q = [np.zeros((HEADS, many + 1, CHANNELS)) for _ in found.q]
        found.hidden = [np.zeros((many + 1, WIDTH)) for _ in found.hidden]
        return found


GISTS, COMPS, CHUNK = 3, 2, 5
GIST = memory_of(GISTS, "gisting", 19)
COMP = memory_of(COMPS, "ccm", 20)
