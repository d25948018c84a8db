"""KIVI's codes under a keep that evicts while decoding, in float64 numpy, token by token.

Written from the rules: KIVI (arXiv:2402.02750, section 3.3) quantises `g` tokens at a time, keys by
channel and values by token, and leaves the newest tokens as they are; H2O (arXiv:2306.14048, section 4) gives
up the token of the least attention received so far, wherever it is stored.
"""

import numpy as np

from tests.float64.codes import affine
from tests.float64.reference import rope, softmax


class Granules:
    """A row whose lists are granules of codes and a plain tail.

    kept: per layer, a boolean [K, T] of the prompt's tokens that stay. places: how many granules a list has
    room for. worst(tokens, length) -> the index of the token that leaves, among dicts with "pos", "mass" and
    "now", or None. memory counts how often a granule was emptied (`emptied`) and was gathered (`gathered`).
    """

    def __init__(self, prompt, kept, *, bits, group, residual, places, worst):
        self.decoder, self.length, self.worst = prompt.decoder, prompt.length, worst
        self.g, self.residual, self.places = group, residual, places
        self.of_keys, self.of_values = affine(bits, group, channel=True), affine(bits, group)
        self.memory = dict(emptied=0, gathered=0)
        self.lists = []
        for layer, stays in enumerate(kept):
            mass = prompt.p[layer].reshape(len(stays), -1, *prompt.p[layer].shape[1:]).sum((1, 2))
            self.lists.append([
                dict(
                    body=[[] for _ in range(places)],
                    tail=[
                        dict(
                            pos=j, mass=mass[head, j], k=prompt.k[layer][head, j], v=prompt.v[layer][head, j]
                        )
                        for j in np.flatnonzero(stays[head])
                    ],
                )
                for head in range(len(stays))
            ])  # fmt: skip
        for lists in self.lists:
            for one in lists:
                self.flush(one)

    def encoded(self, tokens):
        keys = self.of_keys(np.stack([t["k"] for t in tokens]))
        values = self.of_values(np.stack([t["v"] for t in tokens]))
        return [t | dict(k=k, v=v) for t, k, v in zip(tokens, keys, values, strict=True)]

    def flush(self, one):
        """The oldest g tokens of a tail that holds residual + g of them become a granule, and so on."""
        while len(one["tail"]) >= self.residual + self.g:
            if all(one["body"]):
                self.gather(one)
            one["tail"].sort(key=lambda t: t["pos"])
            place = one["body"].index([])
            one["body"][place] = self.encoded(one["tail"][: self.g])
            one["tail"] = one["tail"][self.g :]

    def gather(self, one):
        """The fewest granules, from the sparsest on, that fit into one less."""
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
            outs = []
            for head, one in enumerate(lists):
                one["tail"].append(dict(pos=at, mass=0.0, k=k[head, 0], v=v[head, 0]))
                tokens = self.tokens(one)
                mine = q.reshape(len(lists), -1, c.head_dim)[head]
                p = softmax(mine @ np.stack([t["k"] for t in tokens]).T / np.sqrt(c.head_dim))
                outs.append(p @ np.stack([t["v"] for t in tokens]))
                for t, now in zip(tokens, p.sum(0), strict=True):
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


def heaviest(count, recent, name="mass"):
    """H2O: beyond `count` tokens the one of the least mass leaves, but for the newest.

    name: "now" for what the newest query alone gives.
    """

    def worst(tokens, length):
        able = [i for i, t in enumerate(tokens) if t["pos"] < length - recent]
        return min(able, key=lambda i: (tokens[i][name], -tokens[i]["pos"])) if len(tokens) > count else None

    return worst
