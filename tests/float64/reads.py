"""Decode steps that read only some slots, in float64 numpy, as `tests.float64.reference.Row` takes them."""

import numpy as np
from scipy.stats import binom

from tests.float64.reference import best, rope, softmax


def sparq_guesses(q, k, channels):
    """Logits [G, S] by the largest channels of a group's queries q [G, H], and which channels these are."""
    c = np.argsort(-np.abs(q).sum(0), kind="stable")[:channels]
    found = []
    for one in q:
        heat = np.sqrt(len(one) * np.abs(one[c]).sum() / np.abs(one).sum())
        found.append(k[:, c] @ one[c] / heat)
    return np.stack(found), c


def sparq_chosen(guesses, pos, stored, *, count, newest):
    """Boolean [S]: the newest tokens, and of the others the `count` largest sums over the group."""
    old = pos < stored - newest
    if not old.any():
        return ~old
    return ~old | best(np.where(old, guesses.sum(0), -np.inf), count(old.sum()))


def sparq(count, *, channels, newest):
    """SparQ (arXiv:2312.04985): alpha * attention over the chosen slots + (1 - alpha) * mean value."""

    def attends(q, k, v, pos, at):
        guesses, _ = sparq_guesses(q, k, channels)
        chosen, outs = sparq_chosen(guesses, pos, at.stored, count=count, newest=newest), []
        for one, guess in zip(q, guesses, strict=True):
            alpha = softmax(guess)[chosen].sum()
            p = softmax(k[chosen] @ one / np.sqrt(len(one)))
            outs.append(alpha * (p @ v[chosen]) + (1 - alpha) * v.mean(0))
        return np.stack(outs)

    return attends


def mustafar(share, newest):
    """Mustafar (arXiv:2505.22913): of keys and values behind the newest ones, the largest numbers alone."""

    def pruned(x, old):
        largest = best(np.abs(x), np.full(len(x), int(share * x.shape[-1])))
        return np.where(largest | ~old[:, None], x, 0)

    def attends(q, k, v, pos, at):
        old = pos < at.stored - newest
        return softmax(q @ pruned(k, old).T / np.sqrt(q.shape[-1])) @ pruned(v, old)

    return attends


def normals(width, *, planes, tables, seed=0):
    """Draw the hyperplanes [H, L, K] that belong to a seed."""
    drawn = np.random.RandomState([seed, width]).standard_normal((width, tables * planes))
    return drawn.reshape(width, tables, planes)


def drawn_by(q, k, planes):
    """Whether each of q [G, H] meets each of k [S, H] in two tables or more, by the definition: [G, S]."""
    code = lambda x: np.einsum("sh,hlk->slk", x, planes) > 0  # noqa: E731
    met = (code(q)[:, None] == code(k)[None]).all(-1)
    return met.sum(-1) >= 2


def chances(q, k, *, planes, tables):
    """u = P(Binomial(L, p^K) >= 2) with p = 1 - angle / pi: [G, S]."""
    cosine = q @ k.T / np.linalg.norm(q, axis=-1)[:, None] / np.linalg.norm(k, axis=-1)
    return binom.sf(1, tables, (1 - np.arccos(cosine) / np.pi) ** planes)


def lot(pos, turn):
    """Draw the random number by which a position is chosen among drawn ones, in exact integers."""

    def mixed(x):
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        return x ^ x >> 16

    return mixed(int(pos) ^ mixed(int(turn))) >> 8


def magicpig(count, *, planes, tables, sinks, newest):
    """MagicPIG (arXiv:2410.16179): softmax(s_j - log u_j) over drawn slots, the others as they are."""

    def attends(q, k, v, pos, at):
        body = pos < at.stored - newest
        hashed = body & (pos >= sinks)
        of_prompt = k[(pos >= sinks) & (pos < at.prompt - newest)]
        centred = k - (of_prompt.mean(0) if len(of_prompt) else 0.0)
        drawn = drawn_by(q, centred, normals(k.shape[-1], planes=planes, tables=tables)) & hashed
        found, room = np.flatnonzero(drawn.any(0)), count(body.sum())
        lots = [lot(pos[j], (pos.max() + 1) * at.lists + at.number) for j in found]
        first = sorted(zip([-x for x in lots], found, strict=True))[:room]
        seen = np.isin(np.arange(len(pos)), [j for _, j in first])
        u = chances(q, centred, planes=planes, tables=tables) * min(1, room / max(len(found), 1))
        s = q @ k.T / np.sqrt(k.shape[-1])
        s = np.where(hashed, np.where(drawn & seen, s - np.log(u), -np.inf), s)
        return softmax(s) @ v

    return attends


def tidal(count, *, picks, newest, skip=0, seen=None):
    """TidalDecode (arXiv:2410.05076): layers in `picks` rank all tokens, the others read what was picked.

    seen: a dict that is told which positions each list of each layer read.
    """
    held = {}

    def attends(q, k, v, pos, at):
        logits = k @ q.T / np.sqrt(k.shape[-1])
        old = pos < at.stored - newest
        if at.layer in picks and old.any():
            ranked = np.where(old, logits.sum(1), -np.inf)
            held[at.number] = set(pos[best(ranked, count(old.sum()))])
        elif at.layer in picks:
            held[at.number] = set()
        whole = at.layer < skip or at.layer in picks
        read = np.array([whole or not o or p in held[at.number] for o, p in zip(old, pos, strict=True)])
        if seen is not None:
            seen[at.layer, at.number] = set(pos[read])
        return softmax(logits[read].T) @ v[read]

    return attends


def ranked(score, count, newest, *, sinks=0):
    """Read the newest tokens and the `count` best older ones, by score(q [G, H], k, prompt's keys)."""

    def attends(q, k, v, pos, at):
        old = pos < at.stored - newest
        s = score(q, k, k[pos < at.prompt - newest])
        chosen = ~old
        if old.any():
            chosen = chosen | best(np.where(old, np.where(pos < sinks, np.inf, s), -np.inf), count(old.sum()))
        return softmax(q @ k[chosen].T / np.sqrt(k.shape[-1])) @ v[chosen]

    return attends


def principal(rank):
    """Loki (arXiv:2406.02542): q and keys in the largest principal components of the prompt's keys."""

    def score(q, k, of_prompt):
        _, _, components = np.linalg.svd(of_prompt - of_prompt.mean(0))
        return (k @ components[:rank].T) @ (q.sum(0) @ components[:rank].T)

    return score


def heavy(channels):
    """Double Sparsity (arXiv:2408.07092): q and keys where the prompt's keys are largest."""

    def score(q, k, of_prompt):
        c = np.argsort(-(of_prompt**2).sum(0), kind="stable")[:channels]
        return k[:, c] @ q[:, c].sum(0)

    return score


def lloyd(x, count, turns):
    """Centroids after some turns of Lloyd's algorithm, from evenly spaced rows on; zeros of no rows."""
    if not len(x):
        return np.zeros((count, x.shape[1]))
    centroids = x[(2 * np.arange(count) + 1) * len(x) // (2 * count)].copy()
    for _ in range(turns):
        mine = np.linalg.norm(x[:, None] - centroids[None], axis=-1).argmin(1)
        for i in np.unique(mine):
            centroids[i] = x[mine == i].mean(0)
    return centroids


def product_codes(parts, bits, turns):
    """PQCache (arXiv:2407.12820): every part of a key counts as the nearest centroid of the prompt's."""

    def score(q, k, of_prompt):
        found = 0.0
        for mine, part, prompt in zip(*(np.split(x, parts, -1) for x in (q, k, of_prompt)), strict=True):
            centroids = lloyd(prompt, 2**bits, turns)
            nearest = np.linalg.norm(part[:, None] - centroids[None], axis=-1).argmin(1)
            found = found + centroids[nearest] @ mine.sum(0)
        return found

    return score


def clusters(count, turns):
    """ClusterKV (arXiv:2412.03213): a key counts as the centroid of its cluster of directions."""

    def score(q, k, of_prompt):
        unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
        centroids = lloyd(unit(of_prompt), count, turns)
        nearest = np.linalg.norm(unit(k)[:, None] - centroids[None], axis=-1).argmin(1)
        return centroids[nearest] @ q.sum(0)

    return score


class Elected:
    """TokenSelect (arXiv:2411.02886): all lists of a layer read the older tokens with the most votes."""

    def __init__(self, count, *, newest, sinks):
        self.count, self.newest, self.sinks = count, newest, sinks

    def of_layer(self, lists):
        """Compute what the queries of all lists get; lists: (q, k, v, pos, at) of each."""
        q, k, _, pos, at = lists[0]
        old = pos < at.stored - self.newest
        chosen = ~old
        if old.any():
            votes = sum(softmax(q @ k[old].T / np.sqrt(k.shape[-1])).sum(0) for q, k, *_ in lists)
            votes[pos[old] < self.sinks] = np.inf
            chosen[np.flatnonzero(old)[best(votes, self.count(old.sum()))]] = True
        return [softmax(q @ k[chosen].T / np.sqrt(k.shape[-1])) @ v[chosen] for q, k, v, *_ in lists]


def voted(count, *, newest, sinks):
    """TokenSelect (arXiv:2411.02886) after a keep: the votes of a list's own queries alone."""
    elected = Elected(count, newest=newest, sinks=sinks)
    return lambda *one: elected.of_layer([one])[0]


def rocket(count, *, page, channels):
    """RocketKV (arXiv:2502.14051): of the slots that stay, the pages with the best bounds in few channels.

    count: of slots in whole pages, how many are read.
    """

    def attends(q, k, v, pos, at):
        order = np.argsort(pos)
        full = (pos < at.stored).sum() // page
        c = np.argsort(-np.abs(q).sum(0), kind="stable")[:channels]
        pages = k[order[: full * page]].reshape(full, page, -1)[:, :, c]
        ends = np.stack([pages.min(1), pages.max(1)])
        bounds = np.maximum(*(q[:, None, c] * ends[:, None])).sum(-1).max(0) if full else np.zeros(0)
        read = np.flatnonzero(best(bounds, -(-count(full * page) // page))) if full else []
        slots = [j for p in read for j in range(p * page, (p + 1) * page)] + [*range(full * page, len(pos))]
        chosen = order[slots]
        return softmax(q @ k[chosen].T / np.sqrt(k.shape[-1])) @ v[chosen]

    return attends


def weighed_clusters(count, turns):
    """Squeezed Attention (arXiv:2411.09688): shares of softmax over means, which count as their keys do."""

    def score(q, k, of_prompt):
        unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
        directions = lloyd(unit(of_prompt), count, turns)
        nearest = lambda x: np.linalg.norm(unit(x)[:, None] - directions[None], axis=-1).argmin(1)  # noqa: E731
        mine = np.eye(count)[nearest(of_prompt)]
        counts = mine.sum(0)
        e = np.exp(q @ (mine.T @ of_prompt / np.maximum(counts, 1)[:, None]).T / np.sqrt(q.shape[-1]))
        return (e / (e @ counts)[:, None]).mean(0)[nearest(k)] if counts.any() else np.zeros(len(k))

    return score


def top_values(count, newest):
    """KCache (arXiv:2404.18057): probabilities over all slots, times the values that are read."""

    def attends(q, k, v, pos, at):
        s, old = q @ k.T / np.sqrt(k.shape[-1]), pos < at.stored - newest
        read = ~old
        if old.any():
            votes = np.zeros(len(pos))
            votes[old] = softmax(s[:, old]).sum(0)
            read = read | best(np.where(old, votes, -np.inf), count(old.sum()))
        return (softmax(s) * read) @ v

    return attends


def recycled(count, *, stride, newest, seen=None):
    """Recycled Attention (arXiv:2411.05787): one token of `stride` reads all, the others what it selected.

    seen: a list that is told which positions each step read of each list, as (row, layer, list, positions).
    """
    held = {}

    def attends(q, k, v, pos, at):
        row = (at.queries[:, 0].tobytes(), at.layer, at.number)
        # A token that is asked again reads what it read before.
        by, selected = held.get(row, (None, set()))
        s, old = q @ k.T / np.sqrt(k.shape[-1]), pos < at.stored - newest
        now, stored = pos.max(), at.stored == pos.max()
        due = by is None or now <= by or now - by >= stride
        read = np.array([due or p in selected or p > by for p in pos])
        if due and stored:
            best_old = set()
            if old.any():
                shares = np.where(old, softmax(np.where(old, s, -np.inf)).sum(0), -np.inf)
                best_old = set(pos[best(shares, count(old.sum()))])
            held[row] = now, best_old | set(pos[~old])
        if seen is not None:
            seen.append((*row, set(pos[read])))
        return softmax(s[:, read]) @ v[read]

    return attends


def top_theta(count, *, window, room, newest, seen=None):
    """Top-Theta (arXiv:2502.08363): values of logits above thresholds, and the mean of all for the others.

    seen: a list that is told how many older slots each step read, and how many there were.
    """

    def attends(q, k, v, pos, at):
        body, old = pos < at.prompt - newest, pos < at.stored - newest
        asked = range(max(at.prompt - window, 0), at.prompt)
        read, beyond = ~old, np.full(len(pos), -np.inf)
        for one, queries in zip(q, at.queries, strict=True):
            last = []
            for i in asked:
                s = np.sort(k[body & (pos <= i)] @ queries[i])[::-1]
                if len(s):
                    last.append(s[count(len(s)) - 1] if count(len(s)) < len(s) else -np.inf)
            beyond = np.maximum(beyond, k @ one - (np.mean(last) if last else -np.inf))
        above = old & (beyond >= 0)
        if old.any():
            most = min(above.sum(), room * count(old.sum()))
            read = read | best(np.where(above, beyond, -np.inf), most)
        if seen is not None:
            seen.append((int((read & old).sum()), int(old.sum())))
        p = softmax(q @ k.T / np.sqrt(k.shape[-1]))
        return (p * read) @ v + (1 - (p * read).sum(1, keepdims=True)) * v.mean(0)

    return attends


def retroinfer(count, *, clusters, turns, estimate, sinks, newest, seen=None):
    """RetroInfer (arXiv:2505.02922): whole clusters within the budget, the next ones as their means.

    seen: a list that is told how many older slots each step read, estimated and left out.
    """

    def attends(q, k, v, pos, at):
        old, of_prompt = pos < at.stored - newest, (pos < at.prompt - newest) & (pos >= sinks)
        centre = k[of_prompt].mean(0) if of_prompt.any() else np.zeros(k.shape[1])
        unit = lambda x: (x - centre) / np.linalg.norm(x - centre, axis=-1, keepdims=True)  # noqa: E731
        directions = lloyd(unit(k[of_prompt]), clusters, turns)
        mine = np.linalg.norm(unit(k)[:, None] - directions[None], axis=-1).argmin(1)
        member = old & (pos >= sinks)
        groups = [np.flatnonzero(member & (mine == c)) for c in range(clusters)]
        groups = sorted((g for g in groups if len(g)), key=lambda g: -(q.sum(0) @ k[g].mean(0)))
        room = (count(old.sum()) if old.any() else 0) - (old & ~member).sum()
        whole = int((np.cumsum([len(g) for g in groups]) <= room).sum())
        some = groups[whole : whole + int(np.ceil(estimate * clusters))]
        read = np.flatnonzero(~member | np.isin(np.arange(len(pos)), [j for g in groups[:whole] for j in g]))
        if seen is not None:
            numbers = sum(map(len, groups[:whole])), sum(map(len, some))
            seen.append((*numbers, int(member.sum()) - sum(numbers)))
        keys = np.concatenate([k[read], *(k[g].mean(0)[None] for g in some)])
        values = np.concatenate([v[read], *(v[g].mean(0)[None] for g in some)])
        sizes = np.log([*np.ones(len(read)), *map(len, some)])
        return softmax(q @ keys.T / np.sqrt(k.shape[-1]) + sizes) @ values

    return attends


def reattention(count, *, page, newest, sinks, theta, seen=None):
    """ReAttention (arXiv:2407.15176): segments by unrotated products, closed up before the newest tokens.

    seen: a list that is told how far each step's oldest slot stands from its query.
    """

    def attends(q, k, v, pos, at):
        order, now = np.argsort(pos), pos.max()
        raw_q, raw_k = rope(q[:, None], [-now], theta)[:, 0], rope(k, -pos, theta)[order]
        held = pos[order]
        full = max((held < at.stored).sum() - newest, 0) // page
        read = np.zeros(0, int)
        if full:
            score = (raw_q @ raw_k[: full * page].T).max(0).reshape(full, page).max(1)
            of_sinks = -(-sinks // page)
            score[held[: full * page : page] < of_sinks * page] = np.inf
            wanted = min(of_sinks - (-count(full * page) // page), full)
            read = np.flatnonzero(best(score, wanted))
            # Keys of equal tokens are equal in the first layer, and a tie has no right answer.
            ranked = np.sort(score)[::-1]
            assert wanted >= full or ranked[wanted - 1] == np.inf or -np.diff(ranked)[wanted - 1] > 1e-6
        old = np.array([j for p in read for j in range(p * page, (p + 1) * page)], int)
        tail = np.arange(full * page, len(pos))
        stand = np.concatenate([held[full * page] - len(old) + np.arange(len(old)), held[tail]])
        chosen = np.concatenate([old, tail])
        if seen is not None:
            seen.append(now - stand.min())
        s = q @ rope(raw_k[chosen], stand, theta).T / np.sqrt(k.shape[-1])
        return softmax(s) @ v[order[chosen]]

    return attends
