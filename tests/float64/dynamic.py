"""Methods that select after every token, in float64 over explicit slots (`tests.float64.reference.Row`).

A rule gives the scores of the slots of one list: it sees their positions, rotated keys, values, the rotated
queries of all tokens so far, and what the slots have received.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.float64.reference import best, rope, softmax


class Held(NamedTuple):
    """The slots of a KV head, in position order.

    pos [S]; k, v [S, H], keys rotated; q [G, T, H], all queries; mass, squares [S]: sums of p and of p^2 over
    the heads of a group and all queries since the slot came. n: slots that stay. layer, head: of the list.
    """

    pos: np.ndarray
    k: np.ndarray
    v: np.ndarray
    q: np.ndarray
    mass: np.ndarray
    squares: np.ndarray
    n: int
    layer: int
    head: int

    @property
    def length(self):
        return self.q.shape[1]


def probabilities(held, last):
    """p [G, last, S] of the newest queries over the slots that they may see, and their positions."""
    at = np.arange(max(held.length - last, 0), held.length)
    s = held.q[:, at] @ held.k.T / np.sqrt(held.k.shape[-1])
    return softmax(np.where(held.pos[None] > at[:, None], -np.inf, s)), at


def kept(count, rule):
    """Find the slots of a prompt that stay, per layer: the best by rule(held), except those of score -inf."""

    def of(prompt):
        found = []
        for i, k in enumerate(prompt.k):
            p = prompt.p[i].reshape(len(k), -1, prompt.length, prompt.length)
            lists = []
            for head, q in enumerate(prompt.q[i].reshape(len(k), -1, *prompt.q[i].shape[1:])):
                held = Held(
                    np.arange(prompt.length), k[head], prompt.v[i][head], q,
                    p[head].sum((0, 1)), (p[head] ** 2).sum((0, 1)), count(prompt.length), i, head,
                )  # fmt: skip
                score = rule(held)
                lists.append(best(score, held.n) & (score > -np.inf))
            found.append(np.stack(lists))
        return found

    return of


def victims(count, rule, theta, due=1):
    """Find the slots that leave KV heads `due` slots beyond their budget, and all slots of score -inf."""

    def victim(lists, length, queries):
        out = []
        groups = queries.reshape(len(lists), -1, *queries.shape[1:])
        for head, (slots, q) in enumerate(zip(lists, groups, strict=True)):
            order = np.argsort([s["pos"] for s in slots])
            each = [slots[i] for i in order]
            pos = np.array([s["pos"] for s in each])
            held = Held(
                pos, rope(np.stack([s["k"] for s in each]), pos, theta), np.stack([s["v"] for s in each]), q,
                *(np.array([s[name] for s in each]) for name in ("mass", "squares")),
                count(length), each[0]["layer"], head,
            )  # fmt: skip
            score = rule(held)
            stays = best(score, held.n) if len(slots) >= held.n + due else np.ones(len(slots), bool)
            out.append(order[~stays | (score == -np.inf)])
        return out

    return victim


def morphkv(window, fusion):
    """MorphKV: attention of the window to older tokens, from logits summed over a group."""

    def rule(held):
        at, older = np.arange(held.length)[-window:], held.pos < held.length - window
        s = (held.q[:, at] @ held.k.T / np.sqrt(held.k.shape[-1])).sum(0)
        score = np.full(len(held.pos), np.inf)
        if older.any():
            score[older] = getattr(softmax(s[:, older]), fusion)(0)
        return score

    return rule


def roco(newest, sinks, steady):
    """Mean attention; infinite for the first and newest tokens and those of the largest deviation."""

    def rule(held):
        queries = (held.length - held.pos) * len(held.q)
        mean, square = held.mass / queries, held.squares / queries
        deviation = np.sqrt(np.maximum(square - mean**2, 0))
        ends = (held.pos < sinks) | (held.pos >= held.length - newest)
        deviation[ends] = np.inf
        stays = best(deviation, int(held.n * steady)) | ends
        return np.where(stays, np.inf, mean)

    return rule


def corm(window, recent, threshold=1.0):
    """CORM: slots to which no query of the window gives an even share leave, however many there are."""

    def rule(held):
        p, at = probabilities(held, window)
        share = (p * (at + 1)[:, None]).max((0, 1))
        share[held.pos >= held.length - recent] = np.inf
        return np.where(best(share, held.n) & (share >= threshold), share, -np.inf)

    return rule


def small_keys(sinks, newest):
    """Minus the norm of a key; equal tokens have equal norms, whatever their rotation."""

    def rule(held):
        stays = (held.pos < sinks) | (held.pos >= held.length - newest)
        return np.where(stays, np.inf, -np.linalg.norm(held.k, axis=-1).round(9))

    return rule


def hashevict(bits, sinks, recent, seed=0):
    """Minus the number of bits in which a key's code differs from those of a group's newest queries."""

    def rule(held):
        planes = np.random.RandomState([seed, held.k.shape[-1]]).standard_normal((held.k.shape[-1], bits))
        differs = (held.k @ planes > 0)[None] != (held.q[:, -1] @ planes > 0)[:, None]
        stays = (held.pos < sinks) | (held.pos >= held.length - recent)
        return np.where(stays, np.inf, -differs.sum((0, 2)).astype(float))

    return rule


def pagedeviction_kept(count, page):
    """Of a prompt, the tokens of the largest ||v|| / ||k|| in every head beside the newest page."""

    def rule(held):
        ratio = np.linalg.norm(held.v, axis=-1) / np.linalg.norm(held.k, axis=-1)
        # Equal tokens have equal norms, whatever their rotation.
        return np.where(held.pos >= held.length - page, np.inf, ratio.round(9))

    return kept(count, rule)


def pagedeviction_victims(count, page):
    """Find the full page that leaves a layer's heads: of the lowest mean, with none of the newest tokens."""

    def victim(lists, length, queries):
        if len(lists[0]) < count(length) + page:
            return [None] * len(lists)
        orders = [np.argsort([s["pos"] for s in slots]) for slots in lists]
        norm = np.linalg.norm
        ratio = np.array([
            [norm(slots[i]["v"]) / norm(slots[i]["k"]) for i in order]
            for slots, order in zip(lists, orders, strict=True)
        ])  # fmt: skip
        pos = np.array([[s["pos"] for s in slots] for slots in lists])
        able = {}
        for at in range(0, len(lists[0]) - page + 1, page):
            held = [pos[i][order[at : at + page]] for i, order in enumerate(orders)]
            if np.max(held) < length - page:
                able[at] = ratio[:, at : at + page].mean()
        worst = min(able, key=able.get)
        return [order[worst : worst + page] for order in orders]

    return victim


class Noting:
    """A method over explicit slots that notes in them what it decided (`leaving`).

    A list gives up what leaves when it holds two slots more than its budget.
    """

    def __init__(self, count, **hyper):
        self.count, self.hyper = count, hyper

    def leaving(self, slots, length):
        """Return the numbers of slots that leave of one list; slots have pos, mass and layer."""
        raise NotImplementedError

    def kept(self, prompt):
        found = []
        for i in range(len(prompt.k)):
            mass = prompt.p[i].reshape(len(prompt.k[i]), -1, prompt.length).sum(1)
            found.append(np.ones(mass.shape, bool))
            for keep, each in zip(found[-1], mass, strict=True):
                slots = [dict(pos=j, mass=m, layer=i) for j, m in enumerate(each)]
                keep[self.leaving(slots, prompt.length)] = False
        return found

    def leave(self, memory, lists, gone):
        """Record what is noted of a prompt, of which `kept` has decided on other slots."""
        if "read" not in memory:
            for slots in lists:
                self.leaving(slots, 1 + max(s["pos"] for s in slots))
        memory["read"] = True

    def victims(self, lists, length, queries):
        full = lambda slots: len(slots) >= self.count(length) + 2  # noqa: E731
        return [self.leaving(slots, length) if full(slots) else None for slots in lists]


class Buzz(Noting):
    def leaving(self, slots, length):
        n, stride, sinks = self.count(length), self.hyper["stride"], self.hyper["sinks"]
        window = int(n * self.hyper["recent"])
        order = sorted(range(len(slots)), key=lambda i: slots[i]["pos"])
        between = [i for i in order if sinks <= slots[i]["pos"] < length - window]
        if len(between) <= n - sinks - window:
            return []
        old = [i for i in between if slots[i].get("sample")]
        new = [i for i in between if not slots[i].get("sample")]
        stays = old[:: -(-stride // 2)]
        for at in range(0, len(new), stride):
            stays.append(max(new[at : at + stride], key=lambda i: slots[i]["mass"]))
        for i in stays:
            slots[i]["sample"] = True
        # What still does not fit: the least attention, the newer of equal ones.
        stays.sort(key=lambda i: (-slots[i]["mass"], slots[i]["pos"]))
        return sorted(set(between) - set(stays[: n - sinks - window]))


class LaCache(Noting):
    def leaving(self, slots, length):
        n, size, kept = self.count(length), self.hyper["step"], self.hyper["kept"]
        order, layer, gone = sorted(range(len(slots)), key=lambda i: slots[i]["pos"]), slots[0]["layer"], []
        many, first = len(order) - n, sum(s["pos"] < self.hyper["sinks"] for s in slots)
        if many <= 0:
            return []

        def thin(order, at, size, number, by):
            """Cuts `number` steps from the place `at` on; what is left of them is noted."""
            off, out = layer % (by * (self.hyper["step"] - kept) + 1), []
            for start in range(at, at + number * size, size):
                step = order[start : start + size]
                stays = step[off : off + by * kept : by]
                out += [i for i in step if i not in stays]
                for i in stays:
                    slots[i]["rung"] = True
            return out

        at = first + sum(s.get("rung", False) for s in slots)
        free = len(order) - self.hyper["newest"]
        able = min((n - self.hyper["newest"] - at) // kept, (free - at) // size)
        number = min(int(np.ceil(many / (size - kept))), max(able, 0))
        gone += thin(order, at, size, number, 1)
        more = many - len(gone)
        if more > 0:
            for s in slots:
                s["rung"] = False
            order = [i for i in order if i not in gone]
            able = max((n - first - self.hyper["newest"]) // kept, 1) * (size - kept)
            by = int(np.ceil(more / able))
            longer = size + (by - 1) * (size - 1)
            free = max(len(order) - self.hyper["newest"] - first, 0)
            number = min(int(np.ceil(more / (longer - kept))), free // longer)
            gone += thin(order, first, longer, number, by)
        # What still does not fit: the oldest.
        rest = [i for i in order if i not in gone]
        return gone + rest[first : first + max(len(rest) - n, 0)]


def scope_kept(count, score, written):
    """Find the best of a prompt by `score`, infinite for its window, in the prompt's share of the budget."""

    def of(prompt):
        share = int(count(prompt.length) * (1 - written) + 1e-9)
        return [best(score(prompt, i), np.full(len(k), share)) for i, k in enumerate(prompt.k)]

    return of


def ring_victims(count, window):
    """Find the oldest of the written tokens before the window."""

    def victim(lists, length, queries):
        out = []
        for slots in lists:
            able = [i for i, s in enumerate(slots) if not s["read"] and s["pos"] < length - window]
            full = len(slots) > count(length)
            out.append(min(able, key=lambda i, s=slots: s[i]["pos"]) if full else None)
        return out

    return victim


def scope_victims(count, window):
    """Of written tokens before the window, the one to which the newest query attends least."""

    def victim(lists, length, queries):
        out = []
        for slots in lists:
            able = [i for i, s in enumerate(slots) if not s["read"] and s["pos"] < length - window]
            full = len(slots) > count(length)
            out.append(min(able, key=lambda i, s=slots: s[i]["now"]) if full else None)
        return out

    return victim
