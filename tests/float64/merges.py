"""Merges of evicted slots into kept ones, in float64 over the slots of `tests.float64.reference.Row`.

A layer's memory counts under True what was merged, and under False what was dropped.
"""

import jax.numpy as jnp
import numpy as np
from scipy.special import erf

from kvjax.grammar.kinds import AttentionSpec, Observed, View
from kvjax.keep.scores.score import RandomScore
from kvjax.ops.base.rope import Rope
from tests.float64.reference import rope


def stays_and_leaves(slots, gone):
    left = set(np.asarray(gone).tolist())
    return [s for i, s in enumerate(slots) if i not in left], [slots[i] for i in sorted(left)]


def turned(slots, theta):
    return rope(np.stack([s["k"] for s in slots]), [s["pos"] for s in slots], theta)


def d2o(theta, beta=0.7):
    """D2O (arXiv:2406.13035), keys compared and averaged as they are rotated."""

    def leave(memory, lists, gone):
        pairs, cosines = [], []
        for slots, some in zip(lists, gone, strict=True):
            stay, old = stays_and_leaves(slots, some)
            if not old:
                continue
            k, e = turned(stay, theta), turned(old, theta)
            unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
            cosine = unit(e) @ unit(k).T
            pairs.append((stay, k, old, e, cosine.argmax(-1), cosine.max(-1)))
            cosines += cosine.max(-1).tolist()
        if not cosines:
            return
        mean = np.mean(cosines)
        memory["tau"] = beta * mean + (1 - beta) * memory["tau"] if "tau" in memory else mean
        for stay, k, old, e, nearest, cosine in pairs:
            for c, slot in enumerate(stay):
                join = np.flatnonzero((nearest == c) & (cosine >= memory["tau"]))
                if not len(join):
                    continue
                w = np.exp(np.array([1.0, *cosine[join]]))
                w /= w.sum()
                slot["v"] = w @ np.stack([slot["v"], *(old[i]["v"] for i in join)])
                key = w @ np.stack([k[c], *e[join]])
                slot["k"] = rope(key[None], [-slot["pos"]], theta)[0]
            for merges in (cosine >= memory["tau"]).tolist():
                memory[merges] = memory.get(merges, 0) + 1

    return leave


def drawn(seed, layer, head, pos):
    """Draw the library's uniform draw of a slot."""
    at = jnp.full((1, head + 1, 1), pos, jnp.int32)
    empty = jnp.zeros((*at.shape, 1))
    one = jnp.ones(1, jnp.int32)
    seen = Observed({}, None, one, one, layer, AttentionSpec(1.0, None, Rope()))
    return float(RandomScore(seed)(View(empty, empty, at, None, {}), seen)[0, head, 0])


def cam(following, seed=0):
    """CaM (ICML 2024): values alone, to the next `following` slots that stay.

    The draws are the library's; tests/methods/test_published.py holds the chance to the authors' code.
    """

    def leave(memory, lists, gone):
        for head, (slots, some) in enumerate(zip(lists, gone, strict=True)):
            stay, old = stays_and_leaves(slots, some)
            stay.sort(key=lambda s: s["pos"])
            values = [s["v"].copy() for s in stay]
            for slot in old:
                after = [i for i, s in enumerate(stay) if s["pos"] > slot["pos"]][:following]
                p = min(slot["mass"] / np.mean([stay[i]["mass"] for i in after]), 1) if after else 0
                merges = drawn(seed, slot["layer"], head, slot["pos"]) < p
                memory[merges] = memory.get(merges, 0) + 1
                for i in after if merges else ():
                    values[i] += slot["v"] / len(after)
            for slot, value in zip(stay, values, strict=True):
                slot["v"] = value

    leave.at_prompts = False
    return leave


def cam_by_the_newest(following, seed=0):
    """CaM as in the authors' modify_llama_cam.py: the newest query decides, among all slots that follow.

    The next `following` get the value over that number, however few they are.
    """

    def leave(memory, lists, gone):
        for head, (slots, some) in enumerate(zip(lists, gone, strict=True)):
            stay, old = stays_and_leaves(slots, some)
            stay.sort(key=lambda s: s["pos"])
            for slot in old:
                after = [s for s in stay if s["pos"] > slot["pos"]]
                p = min(slot["now"] / np.mean([s["now"] for s in after]), 1)
                merges = drawn(seed, slot["layer"], head, slot["pos"]) < p
                memory[merges] = memory.get(merges, 0) + 1
                for taker in after[:following] if merges else ():
                    taker["v"] = taker["v"] + slot["v"] / following

    leave.at_prompts = False
    return leave


class Less:
    """LESS (arXiv:2402.09398): H and z of evicted slots per KV head, which queries read beside the slots.

    arrays: the kernels, as `kvjax.keep.merges.residue.Residue` names them.
    """

    def __init__(self, arrays, theta):
        self.arrays = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
        self.theta = theta

    def features(self, x, first, second):
        gelu = lambda y: y * (1 + erf(y / np.sqrt(2))) / 2  # noqa: E731
        return gelu(gelu(x @ first) @ second)

    def psi(self, k, layer, head):
        a = {name: x[layer][head] for name, x in self.arrays.items() if name[0] != "q"}
        u = np.abs(a["scale"]) * self.features(k, a["k1"], a["k2"])
        return np.abs(u + (u @ a["mix"]) * a["scale_mix"])

    def phi(self, q, layer, head):
        return np.abs(self.features(q, self.arrays["q1"][layer][head], self.arrays["q2"][layer][head]))

    def __call__(self, memory, lists, gone):
        for head, (slots, some) in enumerate(zip(lists, gone, strict=True)):
            _, old = stays_and_leaves(slots, some)
            for slot, k in zip(old, turned(old, self.theta) if old else (), strict=True):
                psi = self.psi(k, slot["layer"], head)
                h, z = memory.get(head, (0.0, 0.0))
                memory[head] = h + np.outer(psi, slot["v"]), z + psi

    def answer(self, memory, layer, head, q):
        """Sum what rotated queries q [G, H] of a list's heads get of what left it: sums and weights."""
        h, z = memory.get(head, (0.0, 0.0))
        if np.ndim(z) == 0:
            return 0.0, 0.0
        phi = np.stack([self.phi(x, layer, head * len(q) + i) for i, x in enumerate(q)])
        return phi @ h, (phi @ z)[:, None]


class Compensated:
    """RazorAttention (arXiv:2407.15891): all evicted slots of a KV head become one token, their mean."""

    def __init__(self, theta):
        self.theta = theta

    def __call__(self, memory, lists, gone):
        for head, (slots, some) in enumerate(zip(lists, gone, strict=True)):
            old = stays_and_leaves(slots, some)[1]
            pairs = zip(turned(old, self.theta) if old else (), (s["v"] for s in old), strict=True)
            memory.setdefault(head, []).extend(pairs)

    def answer(self, memory, layer, head, q):
        """Return sums and weights that rotated queries q [G, H] of a list's heads get of what has left it."""
        if not memory[head]:
            return 0.0, 0.0
        k, v = (np.mean(x, 0) for x in zip(*memory[head], strict=True))
        weight = len(memory[head]) * np.exp(q @ k / np.sqrt(len(k)))[:, None]
        return weight * v, weight


def take_up(slot, key, others, weights, keys, theta):
    """Merge `others` into a slot, whose rotated key is `key`, weighted by counts and weights."""
    n = np.array(
        [slot.get("votes", 1), *(o.get("votes", 1) * w for o, w in zip(others, weights, strict=True))]
    )
    slot["v"] = n @ np.stack([slot["v"], *(o["v"] for o in others)]) / n.sum()
    mean = n @ np.stack([key, *keys]) / n.sum()
    slot["k"] = rope(mean[None], [-slot["pos"]], theta)[0]
    slot["votes"] = slot.get("votes", 1) + sum(o.get("votes", 1) for o in others)


def faded(slot, rate):
    """Fade the attention that a slot received by a factor `rate` for every newer query."""
    return sum(p * rate**age for age, p in enumerate(reversed(slot["given"])))


def counted(theta, count, threshold=-1.0, takers=1.0, newest=0.0, fading=1.0, bonus=1.0, largest=False):
    """ZeroMerge (arXiv:2503.10714) and EMS (arXiv:2412.08521): what leaves joins the most similar taker.

    `takers` and `newest` are shares of the slots that `count` says; newest tokens become no takers. largest:
    a slot that takes up others has received as much as the one of them that received most.
    """

    def leave(memory, lists, gone):
        for slots, some in zip(lists, gone, strict=True):
            stay, old = stays_and_leaves(slots, some)
            if not old:
                continue
            read = 1 + max(s["pos"] for s in slots)
            many = max(int(count(read) * takers + 1e-9), 1)
            young = read - int(count(read) * newest + 1e-9)
            old_enough = [i for i, s in enumerate(stay) if s["pos"] < young or s.get("votes", 1) > 1]
            mass = [faded(s, fading) for s in stay]
            order = sorted(old_enough, key=lambda i, s=stay, m=mass: (s[i].get("votes", 1) == 1, m[i]))
            able = sorted(order[:many]) if takers < 1 else range(len(stay))
            k, e = turned(stay, theta), turned(old, theta)
            unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
            cosine = np.full((len(old), len(stay)), -np.inf)
            cosine[:, able] = (unit(e) @ unit(k).T)[:, able]
            to = np.where(cosine.max(-1) >= threshold, cosine.argmax(-1), -1)
            for i, slot in enumerate(stay):
                mine = np.flatnonzero(to == i)
                if len(mine):
                    take_up(slot, k[i], [old[j] for j in mine], np.ones(len(mine)), e[mine], theta)
                    slot["bonus"] = bonus
                    if largest:
                        slot["given"] = [max(mass[i], *(faded(old[j], fading) for j in mine))]
            for joins in (to >= 0).tolist():
                memory[joins] = memory.get(joins, 0) + 1

    return leave


def runs(k, mass, threshold, sinks, window):
    """KVMerger's runs of a prompt's tokens by their rotated keys [T, H], and the pivot of each token."""
    t, found = len(k), []
    unit = k / np.linalg.norm(k, axis=-1, keepdims=True)
    free = (np.arange(t) >= sinks) & (np.arange(t) < t - window)
    for j in range(t):
        if j and free[j] and free[j - 1] and unit[j] @ unit[j - 1] > threshold:
            found[-1].append(j)
        else:
            found.append([j])
    pivot = np.zeros(t, int)
    for run in found:
        pivot[run] = run[int(np.argmax(mass[run]))]
    return pivot


def kvmerger(theta, threshold, sinks, window):
    """KVMerger (arXiv:2407.08454): the tokens of a run that leave a prompt join its pivot."""

    def leave(memory, lists, gone):
        for slots, some in zip(lists, gone, strict=True):
            k = turned(slots, theta)
            pivot = runs(k, np.array([s["mass"] for s in slots]), threshold, sinks, window)
            for p in np.unique(pivot):
                mine = [j for j in some if pivot[j] == p]
                if p in some or not mine:
                    continue
                apart = np.linalg.norm(k[mine] - k[p], axis=-1)
                sigma = apart.mean() / np.sqrt(2)
                weights = np.exp(-(apart**2) / (2 * sigma**2))
                take_up(slots[p], k[p], [slots[j] for j in mine], weights, k[mine], theta)
                memory["joined"] = memory.get("joined", 0) + len(mine)

    return leave


class Compressive:
    """Compressive Transformer (arXiv:1911.05507): older slots become the mean of `rate` of them, in place."""

    def __init__(self, count, theta, *, rate, recent):
        self.count, self.theta, self.rate, self.recent = count, theta, rate, recent

    def stays(self, pos, length):
        """Which of these positions stay: the newest, then the newest ends of groups."""
        n = self.count(length)
        first = max(length - int(n * self.recent), 0) // self.rate * self.rate
        able = (pos >= first) | (pos % self.rate == self.rate - 1)
        newest = np.sort(pos[able])[::-1][:n]
        return np.isin(pos, newest)

    def kept(self, prompt):
        stays = self.stays(np.arange(prompt.length), prompt.length)
        return [np.tile(stays, (len(k), 1)) for k in prompt.k]

    def victims(self, lists, length, queries):
        out = []
        for slots in lists:
            due = len(slots) >= self.count(length) + self.rate
            stays = self.stays(np.array([s["pos"] for s in slots]), length)
            out.append(np.flatnonzero(~stays) if due else None)
        return out

    def leave(self, memory, lists, gone):
        for slots, some in zip(lists, gone, strict=True):
            stay, old = stays_and_leaves(slots, some)
            for slot in stay:
                mine = [s for s in old if s["pos"] // self.rate == slot["pos"] // self.rate]
                if mine:
                    both = [slot, *mine]
                    memory[True] = memory.get(True, 0) + len(mine)
                    slot["v"] = np.mean([s["v"] for s in both], 0)
                    slot["k"] = rope(turned(both, self.theta).mean(0)[None], [-slot["pos"]], self.theta)[0]


def matched(theta, last, turns=2):
    """Attention Matching (arXiv:2602.16284): least squares over the last queries, which see all slots."""

    def leave(memory, lists, gone):
        for slots, some in zip(lists, gone, strict=True):
            left = np.isin(np.arange(len(slots)), some)
            if not left.any():
                continue
            order = np.argsort([s["pos"] for s in slots])[-last:]
            q = np.concatenate([slots[i]["asked"] for i in order])
            e = np.exp(q @ turned(slots, theta).T / np.sqrt(q.shape[-1]))
            v = np.stack([s["v"] for s in slots])
            # A query's row may be multiplied by anything: the library divides by its largest number.
            e /= e.max(-1, keepdims=True)
            near, total = e[:, ~left], e.sum(-1)
            w = 1 + np.linalg.pinv(near, 1e-2) @ (total - near.sum(-1))
            step = 1 / np.linalg.norm(near, 2) ** 2
            for again in range(turns + 1):
                w = np.clip(w if again == 0 else w - step * near.T @ (near @ w - total), np.e**-3, np.e**3)
            p = near * w / (near @ w)[:, None]
            c = v[~left] + np.linalg.pinv(p, 1e-2) @ (e @ v / total[:, None] - p @ v[~left])
            for i, j in enumerate(np.flatnonzero(~left)):
                slots[j]["votes"], slots[j]["v"] = w[i], c[i]

    return leave
