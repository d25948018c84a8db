"""What methods with learned gates leave of a prompt, and what leaves in steps, in float64 numpy.

Nobody fitted their arrays. They are for the model "4/2" of `tests.methods.battery`: 2 layers of width 32,
with 4 query heads and 2 KV heads of 16 channels.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy.special import erf

from kvjax.grammar.fitted import Fitted
from tests.float64.merges import stays_and_leaves
from tests.float64.ranges import Chunks
from tests.float64.reference import best, rms_norm, rope, softmax
from tests.methods.expected import ends
from tests.methods.rows import THETA, WINDOW, count

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
    """Apply the gate to hidden states [T, D], head by head: [K, T]."""
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
    """Keep the best of the whole stack, behind what stays anyway."""
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
    """Apply the gate to the unrotated keys [T, H] of one head, at their positions."""
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
    """Evict what is older than the window and was not admitted, as many as there are."""

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
    """Mix what leaves into the slots of the least attention."""
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
    """Compute the log-odds that tokens with inputs x [T, D], which are read together, stay: [K, T]."""
    a, logit = of_layer(ATTENTION_GATE, layer), 0.0
    for j in range(GATE_HEADS):
        q, k, v = (x @ a[name][:, j] for name in "qkv")
        logit = logit + softmax(q @ k.T / np.sqrt(GATE_RANK)) @ v @ a["out"][j]
    return (logit + a["out_bias"]).T


def attention_gate_kept(prompt):
    """Keep what its gates let stay, and the best of every head."""
    odds = [attention_odds(x, layer) for layer, x in enumerate(prompt.hidden)]
    return [best(x, np.maximum((x >= 0).sum(-1), 1)) for x in odds]


INTERACTS = 3
DROPPING = made_up("Dropping", {"query": (WIDTH, INTERACTS), "key": (WIDTH, INTERACTS), "bias": (1,)}, 18)
# Tokens drop about one of twenty.
DROPPING = dataclasses.replace(DROPPING, arrays=DROPPING.arrays | {"bias": DROPPING.arrays["bias"] + 20})


def dcp_interactions(x, older, layer):
    """[T, S] of the inputs x [T, D] of tokens and those of older ones [S, D]."""
    a = of_layer(DROPPING, layer)
    return (x @ a["query"]) @ (older @ a["key"]).T / np.sqrt(INTERACTS) + a["bias"]


def dcp_hides(prompt, layer):
    """Hide a token from the first one behind it that drops it, and from all later ones."""
    x = prompt.hidden[layer]
    stays = (dcp_interactions(x, x, layer) > 0) | np.triu(np.ones((len(x), len(x)), bool))
    return np.cumprod(stays, 0) == 0


def dcp_kept(prompt):
    """Keep what the last token sees."""
    return [np.stack([~dcp_hides(prompt, layer)[-1]] * KV_HEADS) for layer in range(LAYERS)]


def dcp_leaves(lists, length, queries):
    """Evict what the newest token drops, before it attends."""
    gone = []
    for slots in lists:
        (newest,) = (slot for slot in slots if slot["pos"] == length - 1)
        found = dcp_interactions(
            newest["hidden"], np.stack([slot["hidden"] for slot in slots]), newest["layer"]
        )
        gone.append([j for j, s in enumerate(found) if s < 0 and slots[j] is not newest])
    return gone


dcp_leaves.first = True


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
    """Join the newest token to another one that was written."""

    def leaves(slots, head, j):
        slot = slots[j]
        others = any(s["pos"] < slot["pos"] and not s["read"] for s in slots)
        joining = joins(slot["hidden"][None], slot["layer"])[head, 0]
        return slot["pos"] == length - 1 and others and joining

    return [[j for j in range(len(slots)) if leaves(slots, i, j)] for i, slots in enumerate(lists)]


def runs_merge(memory, lists, gone):
    """Join what leaves to the slot before it: means of unrotated keys and values by weights."""
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


# HOMER on the model "deep", which has three layers: a level in each of the lower two. A prompt of 32 tokens
# is longer than prefix and chunks, one of 13 ends in a chunk.
CHUNKS = dict(shared_prefix=3, chunk=6, height=2)
MERGING = Chunks(**CHUNKS, lasts=(0, 1))
BIAS = Fitted({"bias": np.random.default_rng(23).normal(size=(3, 5)).astype(np.float32) * 3}, "Hierarchy", "")
homer_goes_on = MERGING.goes_on(BIAS.arrays["bias"].astype(np.float64))


def homer_kept(prompt):
    """Keep what reached the uppermost layer, in all layers."""
    stays = np.isin(np.arange(prompt.length), prompt.at[-1])
    return [np.broadcast_to(stays, (KV_HEADS, prompt.length))] * len(prompt.at)


def homer_left(s):
    """Slots: two halves of chunks, what stands before and behind them, and room."""
    chunk = CHUNKS["chunk"]
    return s.tokens - 4 * chunk + 2 * (chunk // 2) + s.room


# Neurocache, on the model "deep": 3 layers, of which the upper two attend to states of 4 channels.
PAST = dict(window=5, top=3, layer=1)


def _states():
    """Draw what Neurocache is taught: a projection and its norm; per upper layer keys, values and a LoRA."""
    rng, c, rank, inner = np.random.default_rng(23), WIDTH // 8, 2, 48
    heads, groups = HEADS * CHANNELS, KV_HEADS * CHANNELS
    sizes = {"q": (WIDTH, heads), "o": (heads, WIDTH), "gate": (WIDTH, inner), "up": (WIDTH, inner)}
    shapes = {"compress": (1, WIDTH, c), "norm": (1, c), "norm_bias": (1, c)}
    shapes |= {name: (2, c, groups) for name in "kv"}
    for name, (rows, columns) in (sizes | {"down": (inner, WIDTH)}).items():
        shapes |= {f"{name}_down": (2, rows, rank), f"{name}_up": (2, rank, columns)}
    arrays = {name: 0.3 * rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return Fitted(arrays | {"norm": arrays["norm"] + 1}, "HiddenStateCache", "")


STATES = _states()


def past_bytes(s):
    """Windows of three layers and the token that is attended, and one state per token for all of them."""
    slots = 3 * s.k * (PAST["window"] + 1) * (2 * s.h * 4 + 4)
    return s.b * (slots + (s.tokens + s.room) * WIDTH // 8 * 4 + 4 + 4)


def past_kept(prompt):
    """Keep the window of every layer; no slots where states are kept."""
    window = np.arange(prompt.length) >= prompt.length - PAST["window"]
    slots, none = np.stack([window] * KV_HEADS), np.zeros((0, prompt.length), bool)
    return [slots, none, slots, slots]
