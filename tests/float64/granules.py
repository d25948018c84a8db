"""Granules of tokens under a keep that evicts while decoding, in float64 numpy, token by token.

Granules are codes of several tokens, or pages that a read chooses among. Written from the rules: KIVI
(arXiv:2402.02750, section 3.3) quantises `g` tokens at a time, keys by channel and values by token, and
leaves the newest tokens as they are; H2O (arXiv:2306.14048, section 4) gives up the token of the least
attention received so far, wherever it is stored; Quest (arXiv:2406.10774, section 3.3) ranks pages by the
channel-wise bounds of their keys, and what is not read receives no attention.
"""

import numpy as np

from tests.float64.codes import affine
from tests.float64.reads import sparq_guesses
from tests.float64.reference import rope, softmax


class Granules:
    """A row whose lists are granules of codes and a plain tail.

    kept: per layer, a boolean [lists, T] of the prompt's tokens that stay; lists are the KV heads, or the
    query heads where every one of them selects alone. places: how many granules a list has room for. bits:
    of codes; None where tokens stay as computed. attends(q [G, H], body, tail) -> out [G, V], the tokens that
    were read, and their attention [G, S]. worst(tokens, length) -> the index of the token that leaves, among
    dicts with "pos", "mass" and "now", or None. memory counts how often a granule was emptied (`emptied`) and
    was gathered (`gathered`).
    """

    def __init__(self, prompt, kept, *, bits, group, residual, places, worst, attends=None):
        self.attends = attends or everything
        self.decoder, self.length, self.worst = prompt.decoder, prompt.length, worst
        self.g, self.residual, self.places = group, residual, places
        plain = lambda x: x  # noqa: E731
        self.of_keys = plain if bits is None else affine(bits, group, channel=True)
        self.of_values = plain if bits is None else affine(bits, group)
        self.memory = dict(emptied=0, gathered=0)
        self.lists = []
        for layer, stays in enumerate(kept):
            mass = prompt.p[layer].reshape(len(stays), -1, *prompt.p[layer].shape[1:]).sum((1, 2))
            k, v = self.of_lists(len(stays), prompt.k[layer], prompt.v[layer])
            self.lists.append([
                dict(
                    body=[[] for _ in range(places)],
                    tail=[
                        dict(pos=j, mass=mass[head, j], k=k[head, j], v=v[head, j])
                        for j in np.flatnonzero(stays[head])
                    ],
                )
                for head in range(len(stays))
            ])  # fmt: skip
        for lists in self.lists:
            for one in lists:
                self.flush(one)

    def of_lists(self, lists, *rows):
        """Keys or values of KV heads, repeated for the lists that store them."""
        return [np.repeat(x, lists // self.decoder.config.kv_heads, axis=0) for x in rows]

    def encoded(self, tokens):
        keys = self.of_keys(np.stack([t["k"] for t in tokens]))
        values = self.of_values(np.stack([t["v"] for t in tokens]))
        bounds = dict(low=keys.min(0), high=keys.max(0))
        return [t | dict(k=k, v=v) | bounds for t, k, v in zip(tokens, keys, values, strict=True)]

    def flush(self, one):
        """Move the oldest g tokens of a tail of residual + g tokens into a granule, repeatedly."""
        while len(one["tail"]) >= self.residual + self.g:
            if all(one["body"]):
                self.gather(one)
            one["tail"].sort(key=lambda t: t["pos"])
            place = one["body"].index([])
            one["body"][place] = self.encoded(one["tail"][: self.g])
            one["tail"] = one["tail"][self.g :]

    def gather(self, one):
        """Compacts the sparsest granules that fit into one granule less."""
        order = sorted(range(self.places), key=lambda i: len(one["body"][i]))
        count = next(
            j
            for j in range(1, self.places + 1)
            if sum(len(one["body"][i]) for i in order[:j]) <= (j - 1) * self.g
        )
        places = sorted(order[:count])
        tokens = sorted((t for i in places for t in one["body"][i]), key=lambda t: t["pos"])
        for i, place in enumerate(places):
            some = tokens[i * self.g : (i + 1) * self.g]
            one["body"][place] = self.encoded(some) if some else []
        self.memory["gathered"] += 1

    def positions(self):
        return [[{t["pos"] for t in self.tokens(one)} for one in lists] for lists in self.lists]

    def tokens(self, one):
        return [t for granule in one["body"] for t in granule] + one["tail"]

    def step(self, token):
        """Logits of one token."""
        c, at = self.decoder.config, self.length
        self.length += 1
        x = self.decoder.rest["embed"][[token]]
        for layer, lists in zip(self.decoder.layers, self.lists, strict=True):
            q, k, v = self.decoder.project(layer, x)
            q, k = rope(q, [at], c.rope.theta), rope(k, [at], c.rope.theta)
            k, v = self.of_lists(len(lists), k, v)
            outs = []
            for head, one in enumerate(lists):
                one["tail"].append(dict(pos=at, mass=0.0, k=k[head, 0], v=v[head, 0]))
                tokens = self.tokens(one)
                mine = q.reshape(len(lists), -1, c.head_dim)[head]
                out, seen, p = self.attends(mine, [g for g in one["body"] if g], one["tail"])
                outs.append(out)
                for t in tokens:
                    t["now"] = 0.0
                for t, now in zip(seen, p.sum(0), strict=True):
                    t["now"], t["mass"] = now, t["mass"] + now
                gone = self.worst(tokens, self.length)
                if gone is not None:
                    self.remove(one, tokens[gone])
            for one in lists:
                self.flush(one)
            x = self.decoder.finish(layer, x, np.concatenate(outs)[:, None])
        return self.decoder.logits(x)[0]

    def remove(self, one, token):
        for held in (*one["body"], one["tail"]):
            if any(t is token for t in held):
                held[:] = [t for t in held if t is not token]
                self.memory["emptied"] += not held


def everything(q, body, tail):
    """Attention to all tokens."""
    seen = [*(t for granule in body for t in granule), *tail]
    keys, values = (np.stack([t[name] for t in seen]) for name in ("k", "v"))
    p = softmax(q @ keys.T / np.sqrt(q.shape[-1]))
    return p @ values, seen, p


def quest(count, page):
    """Attention to the pages whose keys could score highest for any query, and to the tail."""

    def attends(q, body, tail):
        bounds = [np.maximum(q * g[0]["low"], q * g[0]["high"]).sum(-1).max() for g in body]
        order = sorted(range(len(body)), key=lambda i: -bounds[i])
        most = -(-count(len(body) * page) // page) if body else 0
        return everything(q, [body[i] for i in order[:most]], tail)

    return attends


def sparq(count, channels):
    """SparQ (arXiv:2312.04985, section 4): the largest guesses, the tail, and a mean for the rest."""

    def attends(q, body, tail):
        old = [t for granule in body for t in granule]
        guesses, _ = sparq_guesses(q, np.stack([t["k"] for t in [*old, *tail]]), channels)
        order = sorted(range(len(old)), key=lambda i: -guesses[:, i].sum())
        read = sorted(order[: count(len(old))]) if old else []
        out, seen, p = everything(q, [[old[i] for i in read]], tail)
        chosen = [*read, *range(len(old), len(old) + len(tail))]
        alpha = softmax(guesses)[:, chosen].sum(-1, keepdims=True)
        mean = np.mean([t["v"] for t in [*old, *tail]], axis=0)
        return alpha * out + (1 - alpha) * mean, seen, p

    return attends


def heaviest(count, recent, name="mass"):
    """H2O: with more than `count` tokens, the one with the least mass leaves; the newest stay.

    name: "now" for what the newest query alone gives.
    """

    def worst(tokens, length):
        able = [i for i, t in enumerate(tokens) if t["pos"] < length - recent]
        return min(able, key=lambda i: (tokens[i][name], -tokens[i]["pos"])) if len(tokens) > count else None

    return worst
