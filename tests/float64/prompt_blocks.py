"""Which tokens of a prompt sparse reads leave out, in float64 numpy: loops over heads, segments and blocks.

Each gives `hides` of `tests.float64.reference.Prompt`: (prompt, layer) -> boolean [N, T, T]. `count` says how
many tokens a budget leaves of so many.
"""

import numpy as np

from tests.float64.reference import softmax


def spans(tokens, size):
    """List the tokens of every block."""
    return [np.arange(a, min(a + size, tokens)) for a in range(0, tokens, size)]


def causal(scores):
    """Compute the softmax of queries [T, S] over keys at and before each, the last query at the last key."""
    t, s = scores.shape
    late = np.arange(s)[None] > np.arange(s - t, s)[:, None]
    return softmax(np.where(late, -np.inf, scores))


def logits(prompt, layer, head, newest=None):
    q, k = prompt.q[layer][head], prompt.k[layer][head // prompt.group]
    return q[-(newest or len(q)) :] @ k.T / np.sqrt(q.shape[1])


def largest(values, count):
    """Find the places of the `count` largest, of equal ones the first."""
    return np.argsort(-np.asarray(values, float), kind="stable")[:count]


def fewest(values, most):
    """Find the fewest of the largest whose sum reaches `most`."""
    order = largest(values, len(values))
    before = np.cumsum(values[order]) - values[order]
    return order[(before < most) & (values[order] > 0)]


def critiprefill(count, segment, block, below, skip_layers=0):
    """arXiv:2409.12490, and `cache_profilling` of its authors' code."""

    def hides(prompt, layer):
        n, t = len(prompt.q[layer]), prompt.length
        hidden = np.zeros((n, t, t), bool)
        if layer < skip_layers:
            return hidden
        segments, blocks = spans(t, segment), spans(t, block)
        shares = np.zeros((n // prompt.group, len(segments), len(blocks)))
        for head in range(len(shares)):
            k = prompt.k[layer][head]
            for i, mine in enumerate(segments):
                old = [j for j, b in enumerate(blocks) if b[-1] < mine[0]]
                scores = []
                for j in old:
                    of_group = []
                    for q in prompt.q[layer][head * prompt.group : (head + 1) * prompt.group]:
                        ends = q[mine].max(0), q[mine].min(0)
                        high = np.mean([e @ k[blocks[j]].max(0) for e in ends])
                        low = np.mean([e @ k[blocks[j]].min(0) for e in ends])
                        of_group.append(max(high, low))
                    scores.append(np.mean(of_group))
                if old:
                    shares[head, i, old] = softmax(np.array(scores))
        held = vars(prompt).setdefault("shares", {})
        if layer - 1 in held:
            shares = below * held[layer - 1] + (1 - below) * shares
        held[layer] = shares
        for i, mine in enumerate(segments[:-1]):
            old = [j for j, b in enumerate(blocks) if b[-1] < mine[0]]
            for head in range(n):
                wanted = -(-count(int(mine[0])) // block) if old else 0
                best = largest(shares[head // prompt.group, i, old], wanted)
                for j in set(old) - {old[x] for x in best}:
                    hidden[head][np.ix_(mine, blocks[j])] = True
        return hidden

    return hides


def xattention(covered, stride, block):
    """arXiv:2503.16428, section 2.1 and 2.2, tile by tile."""

    def hides(prompt, layer):
        n, t = len(prompt.q[layer]), prompt.length
        hidden = np.zeros((n, t, t), bool)
        blocks, tiles, each = spans(t, block), -(-t // stride), block // stride
        for head in range(n):
            q, k = prompt.q[layer][head], prompt.k[layer][head // prompt.group]
            tile = np.full((tiles, tiles), -np.inf)
            for a in range(tiles):
                for b in range(a + 1):
                    along = [(a * stride + stride - 1 - s, b * stride + s) for s in range(stride)]
                    found = [q[x] @ k[y] for x, y in along if x < t and y < t]
                    tile[a, b] = sum(found) / stride / np.sqrt(q.shape[1])
            p = softmax(tile)
            for i, mine in enumerate(blocks):
                mass = [p[i * each : (i + 1) * each, j * each : (j + 1) * each].sum() for j in range(i + 1)]
                mass, always = np.array(mass), {0, i}
                others = np.array([0.0 if j in always else mass[j] for j in range(i + 1)])
                most = covered * mass.sum() - sum(mass[j] for j in always)
                picked = always | set(fewest(others, most).tolist())
                for j in set(range(i + 1)) - picked:
                    hidden[head][np.ix_(mine, blocks[j])] = True
        return hidden

    return hides


def diagonals(p):
    """Sum the attention to the key `d` before each query over queries, for every d; p [W, T]."""
    w, t = p.shape
    return np.array([sum(p[i, t - w + i - d] for i in range(w) if t - w + i - d >= 0) for d in range(t)])


def divergence(p, q):
    middle = (p + q) / 2
    each = [np.sum(x[x > 0] * np.log(x[x > 0] / middle[x > 0])) for x in (p, q)]
    return np.sqrt(sum(each) / 2)


def flexprefill(covered, threshold, least, block, seen=None):
    """arXiv:2502.20766, algorithms 1 to 4, in blocks as in `get_active_blocks` of its authors' code.

    seen: a list that gets whether each head picks by means.
    """

    def hides(prompt, layer):
        n, t = len(prompt.q[layer]), prompt.length
        hidden = np.zeros((n, t, t), bool)
        few = -(-least // block)
        if t <= max(2 * block, few * block):
            return hidden
        blocks = spans(t, block)
        for head in range(n):
            q, k = prompt.q[layer][head], prompt.k[layer][head // prompt.group]
            p = causal(logits(prompt, layer, head, block))
            vertical, slash = p.mean(0), diagonals(p) / len(p)
            means = np.stack([k[b].mean(0) for b in blocks])
            by_means = softmax(q[-block:].mean(0) @ means.T / np.sqrt(q.shape[1]))
            alike = divergence(by_means, np.array([vertical[b].sum() for b in blocks])) < threshold
            picked = np.zeros((len(blocks), len(blocks)), bool)

            def best(x, alike=alike):
                some = few if alike else max(few, len(fewest(x, covered)) // block + 1)
                each = [x[b].sum() for b in blocks]
                return largest([np.inf, *each[1:]], some)

            picked[:, best(vertical)] = True
            for d in best(slash):
                picked[np.arange(d, len(blocks)), np.arange(len(blocks) - d)] = True
            if alike:
                maps = causal(np.stack([q[b].mean(0) for b in blocks]) @ means.T / np.sqrt(q.shape[1]))
                picked.reshape(-1)[fewest(maps.reshape(-1), covered * len(blocks))] = True
            if seen is not None:
                seen.append(alike)
            hidden[head] = ~np.kron(picked, np.ones((block, block), bool))[:t, :t]
        return hidden

    return hides


def vertical_slash(vertical, slash, block, asked, first, nearest):
    """arXiv:2407.02490, algorithm 2; what shares a block with a key on a diagonal is seen."""

    def seen(prompt, layer, head):
        t = prompt.length
        p = causal(logits(prompt, layer, head, asked))
        columns = largest(np.where(np.arange(t) < first, np.inf, p.sum(0)), max(vertical, first))
        lines = largest(np.where(np.arange(t) < nearest, np.inf, diagonals(p)), slash)
        found = np.zeros((t, t), bool)
        found[:, columns] = True
        for mine in spans(t, block):
            for keys in spans(t, block):
                # Blocks are whole where diagonals are sought: the last one of a prompt, too.
                apart = (mine[0] + np.arange(block))[:, None] - (keys[0] + np.arange(block))
                if np.isin(apart, lines).any() or mine[0] == keys[0]:
                    found[np.ix_(mine, keys)] = True
        return found

    return seen


def a_shape(first, newest, block):
    def seen(prompt, layer, head):
        t = prompt.length
        found = np.zeros((t, t), bool)
        found[:, :first] = True
        for mine in spans(t, block):
            for keys in spans(t, block):
                least = mine[0] - keys[0] - block + 1
                found[np.ix_(mine, keys)] |= least < newest
        return found

    return seen


def best_blocks(count, block):
    def seen(prompt, layer, head):
        t = prompt.length
        q, k = prompt.q[layer][head], prompt.k[layer][head // prompt.group]
        blocks, found = spans(t, block), np.zeros((t, t), bool)
        for i, mine in enumerate(blocks):
            scores = [q[mine].mean(0) @ k[b].mean(0) for b in blocks[: i + 1]]
            for j in {*largest(scores, count).tolist(), i}:
                found[np.ix_(mine, blocks[j])] = True
        return found

    return seen


def minference(patterns, chosen=None):
    """patterns: (prompt, layer, head) -> boolean [T, T], what is seen; chosen [L, N]: the head's pattern."""

    def hides(prompt, layer):
        which = np.zeros(len(prompt.q[layer]), int) if chosen is None else chosen[layer]
        return np.stack([~patterns[i](prompt, layer, head) for head, i in enumerate(which)])

    return hides
