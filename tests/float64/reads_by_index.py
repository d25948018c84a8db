"""Decode steps that read by an index of a prompt, in float64 numpy; see `tests.float64.reads`."""

import numpy as np

from tests.float64.reference import best, rope, softmax


def near_for_queries(k, queries, count, turns):
    """Lloyd's centroids of keys in the distance sqrt(E[(q (k - c))^2]), from evenly spaced rows on."""
    if not len(k):
        return np.zeros((count, k.shape[1]))
    apart = lambda c: (((k[:, None] - c[None]) @ queries.T) ** 2).mean(-1)  # noqa: E731
    centroids = k[(2 * np.arange(count) + 1) * len(k) // (2 * count)].copy()
    for _ in range(turns):
        mine = apart(centroids).argmin(1)
        for i in np.unique(mine):
            centroids[i] = k[mine == i].mean(0)
    return centroids


def retrievalattention(count, *, scan, clusters, turns, window, sinks, newest, seen=None):
    """RetrievalAttention (arXiv:2409.10516): exact products of the keys that an index for queries scans.

    seen: a list that is told how many older slots each step scanned, how many it read, and how many there
    were.
    """

    def attends(q, k, v, pos, at):
        old, of_prompt = pos < at.stored - newest, (pos < at.prompt - newest) & (pos >= sinks)
        asked = at.queries[:, max(at.prompt - window, 0) : at.prompt].reshape(-1, q.shape[-1])
        centroids = near_for_queries(k[of_prompt], asked, clusters, turns)
        mine = (((k[:, None] - centroids[None]) @ asked.T) ** 2).mean(-1).argmin(1)
        scanned = np.argsort(-(centroids @ q.sum(0)), kind="stable")[: int(np.ceil(scan * clusters))]
        able = old & (np.isin(mine, scanned) | (pos < sinks))
        read = ~old
        if able.any():
            score = np.where(pos < sinks, np.inf, k @ q.sum(0))
            read = read | (able & best(np.where(able, score, -np.inf), count(old.sum())))
        if seen is not None:
            seen.append((int(able.sum()), int((read & old).sum()), int(old.sum())))
        return softmax(q @ k[read].T / np.sqrt(k.shape[-1])) @ v[read]

    return attends


def a2ats(count, *, clusters, turns, window, sinks, newest, theta):
    """A2ATS (arXiv:2502.12665): codes of unrotated keys, which stand `newest` tokens before every query."""

    def attends(q, k, v, pos, at):
        raw_q, raw_k = rope(q[:, None], [-pos.max()], theta)[:, 0], rope(k, -pos, theta)
        old, of_prompt = pos < at.stored - newest, (pos < at.prompt - newest) & (pos >= sinks)
        asked = np.arange(max(at.prompt - window, 0), at.prompt)
        asked = rope(at.queries[:, asked], newest - asked, theta).reshape(-1, q.shape[-1])
        centroids = near_for_queries(raw_k[of_prompt], asked, clusters, turns)
        mine = (((raw_k[:, None] - centroids[None]) @ asked.T) ** 2).mean(-1).argmin(1)
        far = rope(raw_q[:, None], [newest], theta)[:, 0]
        read = ~old
        if old.any():
            score = np.where(pos < sinks, np.inf, centroids[mine] @ far.sum(0))
            read = read | best(np.where(old, score, -np.inf), count(old.sum()))
        s = np.where(old, far @ raw_k.T, q @ k.T) / np.sqrt(k.shape[-1])
        return softmax(s[:, read]) @ v[read]

    return attends


def modularity(a, cut):
    """Newman and Girvan's, of the two communities [:cut] and [cut:] of a graph with weights `a`."""
    twice_edges = a.sum()
    excess = a - np.outer(a.sum(0), a.sum(1)) / twice_edges
    return (excess[:cut, :cut].sum() + excess[cut:, cut:].sum()) / (2 * twice_edges)


def events_of(surprise, keys, *, gamma, least):
    """Where events begin (EM-LLM, arXiv:2407.09450): keys [heads, S, H] and surprisals of S tokens."""
    known = surprise[surprise > 0]
    borders = np.flatnonzero(surprise > known.mean() + gamma * known.std(ddof=1)) if len(known) > 1 else []
    similar, found, before = np.einsum("kth,ksh->ts", keys, keys), [0], 0
    for b in borders:
        if b == 0 or b - before < least:
            continue
        half = (b - before) // 2
        low, high = max(before - half, 0), min(b + half, len(surprise))
        cuts = np.arange(before + least, b + 1)
        scores = [modularity(similar[low:high, low:high], t - low) for t in cuts]
        before = cuts[np.argmax(scores)]
        found.append(before)
    return found


class Recalled:
    """EM-LLM (arXiv:2407.09450): events by representative keys, and then their neighbours.

    Neighbours are joined where there are more than `events` of them.
    seen: a list that is told how many events each step's layer has, and how many it recalls for themselves
    and as neighbours.
    """

    def __init__(self, count, *, gamma, keys, beside, least, events, sinks, newest, seen=None):
        self.count, self.gamma, self.keys, self.beside = count, gamma, keys, beside
        self.least, self.sinks, self.newest, self.events, self.seen = least, sinks, newest, events, seen

    def of_layer(self, lists):
        """Compute what all lists' queries get; lists: (q, k, v, pos, at) of each, with the same positions."""
        pos, at = lists[0][3], lists[0][4]
        order = np.argsort(pos)
        held = max(at.prompt - self.newest, 0)
        begins = [0]
        if held:
            keys = np.stack([k[order[:held]] for _, k, *_ in lists])
            begins = events_of(at.surprise[:held], keys, gamma=self.gamma, least=self.least)
            begins = begins[:: -(-len(begins) // self.events)]
        event = np.searchsorted(begins, pos, side="right") - 1
        old = pos < at.stored - self.newest
        able, room = old & (pos >= self.sinks), 0
        if old.any():
            room = self.count(old.sum()) - (old & (pos < self.sinks)).sum()
        met = np.array([sum(self._met(e, begins, held, *one) for one in lists) for e in range(len(begins))])
        sizes = np.array([(able & (event == e)).sum() for e in range(len(begins))])
        turn = [e for e in np.argsort(-met, kind="stable") if sizes[e]]
        similar, filled = [], 0
        for e in turn:
            if filled < room - int(self.beside * room):
                similar.append(e)
            filled += sizes[e]
        near = sorted(
            (min(similar.index(n) for n in (e - 1, e + 1) if n in similar), e)
            for e in turn
            if e not in similar and {e - 1, e + 1} & {*similar}
        )
        rest = [e for e in turn if e not in similar and e not in [e for _, e in near]]
        if self.seen is not None:
            self.seen.append((len(turn), len(similar), len(near)))
        # Events beside the same one are read together, the older first.
        read = ~old | (old & (pos < self.sinks))
        in_turn = [*similar, *(e for _, e in near), *rest]
        ranked = [j for e in in_turn for j in order if able[j] and event[j] == e]
        read[ranked[: max(room, 0)]] = True
        return [softmax(q @ k[read].T / np.sqrt(k.shape[-1])) @ v[read] for q, k, v, *_ in lists]

    def _met(self, e, begins, held, q, k, v, pos, at):
        """Compute the products of a list's queries with the mean of an event's representative keys."""
        end = begins[e + 1] if e + 1 < len(begins) else held
        own = [j for j in range(len(pos)) if begins[e] <= pos[j] < end]
        if not own:
            return 0.0

        def local(j):
            after = range(pos[j] + 1, min(pos[j] + self.newest + 1, at.prompt))
            return sum(at.queries[:, i].sum(0) @ k[j] for i in after)

        own = sorted(own, key=lambda j: (-local(j), pos[j]))[: self.keys]
        return q.sum(0) @ k[own].mean(0)


def sentencekv(count, *, separators, sinks, newest):
    """SentenceKV (arXiv:2504.00970): of the slots that stay, sentences by the products of their mean keys."""

    def attends(q, k, v, pos, at):
        order = np.argsort(pos)
        stored, of_prompt = (pos < at.stored).sum(), (pos < at.prompt).sum()
        old, learnt = order[: max(stored - newest, 0)], order[: max(of_prompt - newest, 0)]
        ends = np.isin(at.tokens, separators)
        number = np.concatenate([[0], np.cumsum(ends)])[np.minimum(pos, at.prompt - 1)]
        number = np.where(np.isin(np.arange(len(pos)), learnt), number, number[learnt].max(initial=0))
        means = {n: k[[j for j in learnt if number[j] == n]].mean(0) for n in {*number[learnt]}}
        read = np.ones(len(pos), bool)
        read[old] = False
        if len(old):
            score = [np.inf if pos[j] < sinks else q.sum(0) @ means[number[j]] for j in old]
            read[old[best(np.array(score), count(len(old)))]] = True
        return softmax(q @ k[read].T / np.sqrt(k.shape[-1])) @ v[read]

    return attends


def infinigen(count, *, alpha, columns, window, newest, skip, seen=None):
    """InfiniGen (arXiv:2406.19707): slots near the largest logit of what the layer below foretells.

    seen: a list that is told how many older slots each step read, and how many there were.
    """

    def attends(q, k, v, pos, at):
        old, read = pos < at.stored - newest, np.ones(len(pos), bool)
        if at.layer >= skip and old.any():
            asked = at.queries[:, max(at.prompt - window, 0) : at.prompt].reshape(-1, q.shape[-1])
            skew = np.linalg.svd(asked)[2].T
            skew = skew[:, np.argsort(-np.abs(asked @ skew).sum(0), kind="stable")[:columns]]
            s = (at.foreseen @ skew) @ (k @ skew).T / np.sqrt(k.shape[-1])
            below = (s - s[:, old].max(1, keepdims=True)).max(0)
            many = min((below[old] >= -alpha).sum(), count(old.sum()))
            read = ~old | best(np.where(old, below, -np.inf), many)
            if seen is not None:
                seen.append((int((read & old).sum()), int(old.sum())))
        return softmax(q @ k[read].T / np.sqrt(k.shape[-1])) @ v[read]

    return attends


def shadowkv(count, *, rank, segment, chunk, outliers, newest, theta, seen=None):
    """ShadowKV (arXiv:2410.21465): chunks by landmarks and outliers, of keys rebuilt from few directions.

    seen: a list that is told how many older slots each step read, and how many there were.
    """

    def attends(q, k, v, pos, at):
        order, k = np.argsort(pos), k.copy()
        older = order[: max((pos < at.stored).sum() - newest, 0) // segment * segment]
        for block in older.reshape(-1, segment):
            u, s, vt = np.linalg.svd(rope(k[block], -pos[block], theta))
            k[block] = rope((u[:, :rank] * s[:rank]) @ vt[: min(rank, segment)], pos[block], theta)
        chunks = older.reshape(-1, chunk)
        read = np.ones(len(pos), bool)
        read[older] = False
        if len(older):
            means = k[chunks].mean(1)
            cosine = np.einsum("pth,ph->pt", k[chunks], means)
            cosine = cosine / np.linalg.norm(k[chunks], axis=-1) / np.linalg.norm(means, axis=-1)[:, None]
            apart = best(-cosine.min(1), outliers)
            read[chunks[apart]] = True
            if not apart.all():
                p = softmax(np.where(apart, -np.inf, q @ means.T / np.sqrt(k.shape[-1]))).max(0)
                wanted = best(np.where(apart, -np.inf, p), -(-count(len(older)) // chunk))
                read[chunks[wanted & ~apart]] = True
        if seen is not None:
            seen.append((int(read[older].sum()), len(older)))
        return softmax(q @ k[read].T / np.sqrt(k.shape[-1])) @ v[read]

    return attends


def hcattention(count, *, mass, newest, code, seen=None):
    """HCAttention (arXiv:2507.19823): weights from codes of keys, and as few values as hold the mass.

    seen: a list that is told how many older values each step read, and how many there were.
    """

    def attends(q, k, v, pos, at):
        old, k = pos < at.stored - newest, k.copy()
        read = ~old
        if old.any():
            k[old] = code(k[old])
            votes = softmax(q @ k[old].T / np.sqrt(k.shape[-1])).sum(0)
            order, share = np.argsort(-votes, kind="stable"), np.cumsum(np.sort(votes)[::-1]) / votes.sum()
            least = min(int(np.argmax(share >= mass)) + 1, count(old.sum()))
            read[np.flatnonzero(old)[order[:least]]] = True
            if seen is not None:
                seen.append((least, int(old.sum())))
        return (softmax(q @ k.T / np.sqrt(k.shape[-1])) * read) @ v

    return attends


def tailorkv(count, *, quantised, coded, channels, window, newest):
    """TailorKV (arXiv:2505.19586): codes in the first layers, products in few channels in the others.

    coded: what the queries of the first layers get.
    """

    def attends(q, k, v, pos, at):
        if at.layer < quantised:
            return coded(q, k, v, pos, at)
        old, of_prompt = pos < at.stored - newest, pos < at.prompt - newest
        read = ~old
        if old.any():
            asked = at.queries[:, max(at.prompt - window, 0) : at.prompt]
            weight = np.abs(asked).sum((0, 1)) * np.abs(k[of_prompt]).max(0, initial=0)
            c = np.argsort(-weight, kind="stable")[:channels]
            read = read | best(np.where(old, k[:, c] @ q[:, c].sum(0), -np.inf), count(old.sum()))
        return softmax(q @ k[read].T / np.sqrt(k.shape[-1])) @ v[read]

    return attends


def specache(count, *, code, newest, seen=None):
    """SpeCache (arXiv:2503.16163): exact slots that the token before ranked best, and codes of the others.

    seen: a list that is told how many of the slots that a step selects were read in it, and how many it read.
    """
    held = {}

    def attends(q, k, v, pos, at):
        row, now = (at.queries[:, 0].tobytes(), at.layer, at.number), pos.max()
        old, k_code, v_code = pos < at.stored - newest, k.copy(), v.copy()
        if not old.any():
            return softmax(q @ k.T / np.sqrt(k.shape[-1])) @ v
        k_code[old], v_code[old] = code(k[old]), code(v[old])
        votes = softmax(q @ k_code[old].T / np.sqrt(k.shape[-1])).sum(0)
        own = set(pos[old][best(votes, count(old.sum()))])
        by, before = held.get(row, (None, None))
        chosen = before if by == now - 1 else own
        if at.stored == now:
            held[row] = now, own | set(pos[~old])
        exact = ~old | np.isin(pos, list(chosen))
        if seen is not None:
            seen.append((len(own & chosen), len(own)))
        keys, values = np.where(exact[:, None], k, k_code), np.where(exact[:, None], v, v_code)
        return softmax(q @ keys.T / np.sqrt(k.shape[-1])) @ values

    return attends
