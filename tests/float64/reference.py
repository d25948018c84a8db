"""A second decoder with slots, in float64 numpy, row by row: the reference for methods.

Nothing here is shared with the code under test. Slots are lists of tokens; attention is a loop over heads.
"""

from typing import NamedTuple

import numpy as np

from tests.float64.ranges import Ranges


def float64_layers(params):
    """(one dict per layer, the rest of the parameters), whatever the layers' grouping."""
    layers = []
    for group in params["layers"]:
        for i in range(len(group["q"])):
            layers.append({name: np.asarray(w[i], np.float64) for name, w in group.items()})
    rest = {n: np.asarray(w, np.float64) for n, w in params.items() if n != "layers"}
    return layers, rest


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rope(x, pos, theta):
    """x [..., S, H] rotated by pos [S]; channel i pairs with channel i + H / 2."""
    half = x.shape[-1] // 2
    angle = np.asarray(pos, np.float64)[:, None] * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def softmax(s):
    w = np.exp(s - s.max(-1, keepdims=True))
    return w / w.sum(-1, keepdims=True)


class Decoder:
    """A Llama of `kvjax.models` in float64."""

    def __init__(self, model):
        self.config, (self.layers, self.rest) = model.config, float64_layers(model.params)

    def project(self, layer, x):
        """Unrotated queries [N, T, H], keys [K, T, H] and values of hidden states x [T, D]."""
        c = self.config
        h = rms_norm(x, layer["attn_norm"], c.norm_eps)
        split = lambda y, n: y.reshape(len(x), n, c.head_dim).swapaxes(0, 1)  # noqa: E731
        return (
            split(h @ layer["q"], c.heads),
            split(h @ layer["k"], c.kv_heads),
            split(h @ layer["v"], c.kv_heads),
        )

    def finish(self, layer, x, out):
        """Compute the residual stream after attention `out` [N, T, H] and the MLP."""
        x = x + out.swapaxes(0, 1).reshape(len(x), -1) @ layer["o"]
        h = rms_norm(x, layer["mlp_norm"], self.config.norm_eps)
        gate = h @ layer["gate"]
        return x + (gate / (1 + np.exp(-gate)) * (h @ layer["up"])) @ layer["down"]

    def logits(self, x):
        return rms_norm(x, self.rest["norm"], self.config.norm_eps) @ self.rest["unembed"]


class Prompt:
    """A prompt read with full attention: per layer q, raw_q [N, T, H], k, raw_k, v [K, T, H], p [N, T, T].

    hidden: per layer, its normalised input [T, D]. at: per layer, the positions of the tokens that it saw.
    narrow: (prompt, layer) -> indices of the tokens that go on from a layer, None where all of them do.
    farthest: the distance that larger ones count as. ranges: what tokens turn by instead of their positions,
    and what they attend to (`tests.float64.ranges.Ranges`). hides: (prompt, layer) -> boolean [T, T] or
    [N, T, T], which queries see which tokens no more.
    """

    def __init__(self, decoder, tokens, narrow=None, farthest=None, ranges=None, hides=None):
        c, self.decoder, self.tokens, self.length = decoder.config, decoder, list(tokens), len(tokens)
        self.group, pos = c.heads // c.kv_heads, np.arange(len(tokens))
        self.q, self.raw_q, self.k, self.raw_k, self.v, self.p = [], [], [], [], [], []
        self.hidden, self.at = [], []
        x = decoder.rest["embed"][np.asarray(tokens)]
        for i, layer in enumerate(decoder.layers):
            self.hidden.append(rms_norm(x, layer["attn_norm"], c.norm_eps))
            self.at.append(pos)
            raw_q, raw_k, v = decoder.project(layer, x)
            met = None if ranges is None else ranges.in_layer(i)
            turns = pos if met is None else met.phases(pos)
            q, k = rope(raw_q, turns, c.rope.theta), rope(raw_k, turns, c.rope.theta)
            s = q @ np.repeat(k, self.group, 0).swapaxes(1, 2) / np.sqrt(c.head_dim)
            if farthest is not None:
                at_most = rope(raw_q, np.full(len(pos), farthest), c.rope.theta)
                far = at_most @ np.repeat(raw_k, self.group, 0).swapaxes(1, 2) / np.sqrt(c.head_dim)
                s = np.where(pos[:, None] - pos[None] > farthest, far, s)
            window = c.windows[i] if c.windows else None
            hidden = pos[None] > pos[:, None]
            if window is not None:
                hidden |= pos[:, None] - pos[None] >= window
            for name, value in zip(("q", "raw_q", "k", "raw_k", "v"), (q, raw_q, k, raw_k, v), strict=True):
                getattr(self, name).append(value)
            if hides is not None:
                hidden = hidden | hides(self, i)
            s = np.where(hidden, -np.inf, s)
            p = softmax(s) if met is None else met.probabilities(s, pos, pos)
            self.p.append(p)
            x = decoder.finish(layer, x, p @ np.repeat(v, self.group, 0))
            on = None if narrow is None else narrow(self, i)
            x, pos = (x, pos) if on is None else (x[on], pos[on])
        self.all_logits = decoder.logits(x)


class At(NamedTuple):
    """Of a query's list: tokens that were stored before it, tokens of the prompt, its number of so many.

    layer: that of the list. queries: rotated, of the heads of its group and all tokens so far. tokens: of the
    prompt; surprise: -log of the probability of each, 0 for the first. foreseen: rotated queries [G, H] that
    the layer's weights make of the input of the layer below, of its own in the first layer.
    """

    stored: int
    prompt: int
    number: int
    lists: int
    layer: int
    queries: np.ndarray
    tokens: list
    surprise: np.ndarray
    foreseen: np.ndarray


class Row:
    """A row that decodes over explicit slots.

    kept: per layer, a boolean [lists, T] of the prompt's tokens that stay; lists are the KV heads, or the
    query heads where every one of them selects alone. phase: "position" or "rank" of a slot in its list, the
    distance that larger ones count as, or shared ranges (`tests.float64.ranges.Ranges`). leave(memory, lists,
    gone): what a layer's slots become when those numbered in `gone`, per list, leave; memory is a dict that
    the layer keeps; a slot's `votes` say how many tokens it stands for, and `bonus` times the log of that
    goes to its logits. A slot notes what every query has given it, in `given`, and in all (`mass`); that of a
    step also the `inputs` of its layer up to itself, that of the prompt its rotated queries (`asked`).
    leave.at_prompts, where it is False: what leaves the prompt is dropped. leave.answer(memory, layer, list,
    q), where it has one: sums and weights that the queries get beside those of the slots. attends(q, k, v,
    pos, at): what a group's queries get instead of their attention over a list; `at` says where (`At`).
    """

    def __init__(self, prompt, kept, phase="position", leave=None, attends=None):
        self.decoder, self.next, self.phase = prompt.decoder, prompt.length, phase
        self.attends, self.prompt_tokens = attends, prompt.length
        self.tokens = prompt.tokens
        self.surprise = np.zeros(prompt.length)
        if len(prompt.all_logits) == prompt.length:  # else upper layers read a part of the prompt
            chances = softmax(prompt.all_logits[:-1])[np.arange(prompt.length - 1), prompt.tokens[1:]]
            self.surprise[1:] = -np.log(chances)
        self.leave = leave if getattr(leave, "at_prompts", True) else None
        self.memory = [{} for _ in kept]
        self.slots = []
        # Rotated queries [N, T, H] of all tokens so far, per layer.
        self.queries = list(prompt.q)
        # The inputs [T, D] of all layers, of all tokens so far.
        self.inputs = list(prompt.hidden)
        for layer, keep in enumerate(kept):
            share = len(keep) // prompt.decoder.config.kv_heads
            at = prompt.at[layer]
            each = prompt.p[layer].reshape(len(keep), -1, len(at), len(at))
            given, squares = each.sum(1), (each**2).sum((1, 2))
            raw, v = prompt.raw_k[layer], prompt.v[layer]
            asked = prompt.q[layer].reshape(len(keep), -1, len(at), prompt.decoder.config.head_dim)
            self.slots.append([
                [
                    dict(
                        pos=at[j], k=raw[i // share][j], v=v[i // share][j], mass=given[i][:, j].sum(),
                        squares=squares[i][j], read=True, given=list(given[i][:, j]),
                        layer=layer, hidden=prompt.hidden[layer][j], token=prompt.tokens[j],
                        asked=asked[i][:, j],
                    )
                    for j in range(len(at))
                ]
                for i in range(len(keep))
            ])  # fmt: skip
            self.remove(layer, [np.flatnonzero(~keep[i][at]) for i in range(len(keep))])
        self.leave = leave

    def positions(self):
        """Per layer and list, the set of positions held."""
        return [[{s["pos"] for s in slots} for slots in lists] for lists in self.slots]

    def remove(self, layer, gone):
        """Take the slots numbered in `gone`, per list, out of a layer."""
        if self.leave is not None:
            self.leave(self.memory[layer], self.slots[layer], gone)
        for slots, leaves in zip(self.slots[layer], gone, strict=True):
            for index in sorted(leaves, reverse=True):
                del slots[index]

    def step(self, token, append=True, victim=None):
        """Logits of one token. victim(lists, length, queries) -> per list the slots that leave, or None.

        victim.first, where it has one: they leave before the token attends.
        """
        c, at = self.decoder.config, self.next if append else self.next - 1
        x = self.decoder.rest["embed"][[token]]
        below = rms_norm(x, self.decoder.layers[0]["attn_norm"], c.norm_eps)
        for number, (layer, lists) in enumerate(zip(self.decoder.layers, self.slots, strict=True)):
            raw_q, raw_k, v = self.decoder.project(layer, x)
            group, share = c.heads // len(lists), len(lists) // c.kv_heads
            foreseen = rope((below @ layer["q"]).reshape(c.heads, 1, -1), [at], c.rope.theta)[:, 0]
            below = rms_norm(x, layer["attn_norm"], c.norm_eps)
            outs, first = [], getattr(victim, "first", False)
            if append:
                turned = rope(raw_q, [at], c.rope.theta)
                self.queries[number] = np.concatenate([self.queries[number], turned], 1)
                new = rms_norm(x, layer["attn_norm"], c.norm_eps)
                self.inputs[number] = np.concatenate([self.inputs[number], new])
            for i, slots in enumerate(lists if append else ()):
                own = dict(pos=at, k=raw_k[i // share][0], v=v[i // share][0], layer=number, token=token)
                seen = dict(mass=0.0, squares=0.0, read=False, given=[])
                slots.append(own | seen | dict(hidden=new[0], inputs=self.inputs[number]))
            if append and first:
                self.remove(number, victim(lists, at + 1, self.queries[number]))
            for i, slots in enumerate(lists):
                q, k, pos = self.turned(slots, raw_q[i * group : (i + 1) * group], at)
                if self.attends is not None:
                    asked = self.queries[number][i * group : (i + 1) * group]
                    at_list = self.next, self.prompt_tokens, i, len(lists), number
                    mine = foreseen[i * group : (i + 1) * group]
                    where = At(*at_list, asked, self.tokens, self.surprise, mine)
                    outs.append((q, k, np.stack([s["v"] for s in slots]), pos, where))
                    continue
                outs.append(self.attended(slots, q, k, pos, at, number, i, append))
            if self.attends is not None:
                together = getattr(self.attends, "of_layer", None)
                outs = together(outs) if together else [self.attends(*one) for one in outs]
            if append and victim is not None and not first:
                found = victim(lists, at + 1, self.queries[number])
                self.remove(number, [np.atleast_1d([] if x is None else x).astype(int) for x in found])
            x = self.decoder.finish(layer, x, np.concatenate(outs)[:, None])
        self.next += append
        return self.decoder.logits(x)[0]

    def turned(self, slots, raw_q, at):
        """One KV head's query and keys, rotated as the phase says, and the positions of its slots."""
        theta, pos = self.decoder.config.rope.theta, np.array([s["pos"] for s in slots])
        phases, mine = pos, at
        if self.phase == "rank":
            phases, mine = pos.argsort().argsort(), (pos < at).sum()
        elif isinstance(self.phase, Ranges):
            phases, mine = self.phase.phases(pos), self.phase.phases([at])[0]
        elif self.phase != "position":
            phases = np.maximum(pos, at - self.phase)
        return rope(raw_q, [mine], theta)[:, 0], rope(np.stack([s["k"] for s in slots]), phases, theta), pos

    def attended(self, slots, q, k, pos, at, number, i, append):
        """Attention of one KV head's queries over its slots, which record what they receive."""
        c = self.decoder.config
        stands = [slot.get("bonus", 1.0) * np.log(slot.get("votes", 1)) for slot in slots]
        s = q @ k.T / np.sqrt(c.head_dim) + stands
        if c.windows and c.windows[number] is not None:
            s = np.where(at - pos >= c.windows[number], -np.inf, s)
        p = softmax(s)
        if isinstance(self.phase, Ranges):
            p = self.phase.probabilities(s[:, None], [at], pos)[:, 0]
        more, beside = 0.0, 0.0
        if hasattr(self.leave, "answer"):
            more, beside = self.leave.answer(self.memory[number], number, i, q)
        total = np.exp(s).sum(-1, keepdims=True)
        for slot, each in zip(slots, p.T, strict=True):
            slot["now"] = each.sum()
            slot["mass"] += slot["now"] if append else 0.0
            slot["squares"] += (each**2).sum() if append else 0.0
            slot["given"] += [slot["now"]] * append
        return (p @ np.stack([slot["v"] for slot in slots]) * total + more) / (total + beside)


# --- which slots of a prompt stay -----------------------------------------------------------------------


def best(score, count):
    """Boolean [.., S]: the `count` largest, the earlier of equal ones."""
    order = np.argsort(-score, axis=-1, kind="stable")
    rank = np.argsort(order, axis=-1, kind="stable")
    return rank < np.asarray(count)[..., None]


def pool(x, kernel, kind):
    """Smoothing over `kernel` neighbours, with zeros beyond the ends."""
    half = kernel // 2
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(half, half)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=-1)
    return windows.mean(-1) if kind == "mean" else windows.max(-1)


def window_score(prompt, layer, window, kernel, *, reduce="sum", kind="max", per_query_head=False):
    """SnapKV: what the last `window` queries give each older token, smoothed; infinite for the window."""
    p = getattr(prompt.p[layer][:, -window:], reduce)(1)
    if not per_query_head:
        p = p.reshape(-1, prompt.group, p.shape[-1]).mean(1)
    p[:, -window:] = 0
    score = pool(p, kernel, kind)
    score[:, -window:] = np.inf
    return score


# --- which slot leaves in a decode step -----------------------------------------------------------------


def _worst(slots, key, spared):
    """Find the slot with the lowest key among those not spared; of equals, the newer one."""
    able = [i for i, s in enumerate(slots) if not spared(s)]
    return min(able, key=lambda i: (key(slots[i]), -slots[i]["pos"]))


def h2o_victim(count, recent=0.5, key=lambda slot: slot["mass"], sinks=0):
    def victim(lists, length, queries):
        n = count(length)
        spared = lambda s: s["pos"] < sinks or s["pos"] >= length - int(n * recent)  # noqa: E731
        return [_worst(s, key, spared) if len(s) > n else None for s in lists]

    return victim


def tova_victim(count):
    """One token leaves all heads of a layer: the one that gets the least attention of the newest query."""

    def victim(lists, length, queries):
        if len(lists[0]) <= count(length):
            return [None] * len(lists)
        mean = np.mean([[slot["now"] for slot in slots] for slots in lists], axis=0)
        return [int(np.argmin(mean))] * len(lists)

    return victim


def sink_victim(count, sinks=4):
    def victim(lists, length, queries):
        return [
            _worst(s, lambda x: x["pos"], lambda x: x["pos"] < sinks) if len(s) > count(length) else None
            for s in lists
        ]

    return victim


# --- R-KV (arXiv:2505.24133) ----------------------------------------------------------------------------


def rkv_score(q, k, pos, *, window, kernel, importance=0.1, threshold=0.5):
    """Compute importance * I - (1 - importance) * R of slots in order of `pos`; infinite for the window.

    q: [G, T, H], all queries of a group; k: [S, H], rotated.
    """
    logits = (q[:, -window:] @ k.T / np.sqrt(k.shape[-1])).max(0)
    older = np.arange(len(k)) < len(k) - window
    attention = np.zeros(len(k))
    if older.any():
        attention[older] = softmax(logits[:, older]).mean(0)
    attention = pool(attention, kernel, "max")
    unit = k / np.linalg.norm(k, axis=-1, keepdims=True)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, 0)
    for row in cosine:
        alike = np.flatnonzero(row > threshold)
        if len(alike):
            row[alike[np.argmax(np.asarray(pos)[alike])]] = 0
    score = importance * attention - (1 - importance) * softmax(cosine.mean(0))
    return np.where(older, score, np.inf)


def rkv_kept(count, **hyper):
    def kept(prompt):
        found = []
        for q, k in zip(prompt.q, prompt.k, strict=True):
            groups = zip(q.reshape(len(k), -1, *q.shape[1:]), k, strict=True)
            scores = np.stack([rkv_score(*one, np.arange(prompt.length), **hyper) for one in groups])
            found.append(best(scores, [count(prompt.length)] * len(k)))
        return found

    return kept


def rkv_victims(count, buffer, theta, **hyper):
    """Nothing leaves until a list holds `buffer` slots more than its budget, then so many leave."""

    def victim(lists, length, queries):
        groups, out = queries.reshape(len(lists), -1, *queries.shape[1:]), []
        for slots, q in zip(lists, groups, strict=True):
            pos, n = [s["pos"] for s in slots], count(length)
            if len(slots) < n + buffer:
                out.append(None)
                continue
            k = rope(np.stack([s["k"] for s in slots]), pos, theta)
            out.append(np.flatnonzero(~best(rkv_score(q, k, pos, **hyper), n)).tolist())
        return out

    return victim


# --- LagKV (arXiv:2504.04704) ---------------------------------------------------------------------------


def lag_ranks(k, v, lag):
    """Ranks of tokens [T] whose partition and its next one are whole, and -1 for the others; k, v [T, H]."""
    ranks = np.full(len(k), -1.0)
    for start in range(0, len(k) // lag * lag - lag, lag):
        score = np.zeros(lag)
        for x in (k, v):
            mine, after = x[start : start + lag], x[start + lag : start + 2 * lag]
            relative = (mine - after.min(0)) / (after.max(0) - after.min(0))
            score += softmax(relative.std(-1, ddof=1)) / 2
        ranks[start : start + lag] = score.argsort().argsort() / lag
    return ranks


class Lag:
    """LagKV over explicit slots, whose ranks it notes in them."""

    def __init__(self, count, theta, *, lag, sinks):
        self.count, self.theta, self.lag, self.sinks = count, theta, lag, sinks

    def rank(self, slots):
        new = sorted(
            (s for s in slots if s["pos"] >= self.sinks and s.get("rank", -1) < 0), key=lambda s: s["pos"]
        )
        if new:
            k = rope(np.stack([s["k"] for s in new]), [s["pos"] for s in new], self.theta)
            for slot, rank in zip(new, lag_ranks(k, np.stack([s["v"] for s in new]), self.lag), strict=True):
                slot["rank"] = rank

    def best(self, slots, length):
        """Which slots stay, in position order; the newest before all that are ranked."""
        self.rank(slots)
        rank = np.array([s.get("rank", -1) for s in slots])
        pos = np.array([s["pos"] for s in slots])
        return best(np.where(pos < self.sinks, np.inf, np.where(rank < 0, 1 + pos, rank)), self.count(length))

    def kept(self, prompt):
        """Return what a prompt leaves, per layer."""
        found = []
        for raw, v in zip(prompt.raw_k, prompt.v, strict=True):
            lists = [
                [dict(pos=j, k=k[j], v=x[j]) for j in range(len(k))] for k, x in zip(raw, v, strict=True)
            ]
            found.append(np.stack([self.best(slots, prompt.length) for slots in lists]))
        return found

    def leave(self, memory, lists, gone):
        for slots, some in zip(lists, gone, strict=True):
            if len(some):
                self.rank(slots)

    def victims(self, lists, length, queries):
        """Nothing until a list holds `lag` slots more than its budget, then so many leave."""
        full = lambda slots: len(slots) >= self.count(length) + self.lag  # noqa: E731
        return [np.flatnonzero(~self.best(s, length)) if full(s) else None for s in lists]
