"""Contexts that share a range of positions, in float64 numpy: the reference for APE and HOMER."""

import numpy as np


class Ranges:
    """APE's positions and attention (arXiv:2502.05431, section 4), query by query."""

    def __init__(self, shared_prefix, contexts, temperature, scale):
        self.temperature, self.scale, prefix = temperature, scale, shared_prefix
        self.part, self.phase = [0] * prefix, list(range(prefix))
        for number, length in enumerate(contexts, 1):
            self.part += [number] * length
            self.phase += list(range(prefix, prefix + length))
        self.behind, self.next = len(contexts) + 1, prefix + max(contexts)

    def in_layer(self, layer):
        """Return the same in one layer of a prompt."""
        return self

    def parts(self, pos):
        return np.array([self.part[p] if p < len(self.part) else self.behind for p in pos])

    def phases(self, pos):
        known = len(self.phase)
        return np.array([self.phase[p] if p < known else self.next + p - known for p in pos])

    def probabilities(self, s, q_pos, k_pos):
        """Of logits [.., T, S], -inf where a key is hidden."""
        whose, out = self.parts(k_pos), np.zeros_like(s)
        inside = (whose > 0) & (whose < self.behind)
        for t, mine in enumerate(self.parts(q_pos)):
            if mine < self.behind:
                own = np.where(~inside | (whose == mine), s[..., t, :], -np.inf)
                w = np.exp(own - own.max(-1, keepdims=True))
                out[..., t, :] = w / w.sum(-1, keepdims=True)
                continue
            of_contexts = np.where(inside, np.exp(s[..., t, :] / self.temperature), 0.0)
            others = np.where(inside, 0.0, np.exp(s[..., t, :]))
            total = of_contexts.sum(-1, keepdims=True)
            weight = total ** (self.scale * self.temperature)
            shares = of_contexts / np.where(total == 0, 1, total)
            out[..., t, :] = (shares * weight + others) / (weight + others.sum(-1, keepdims=True))
        return out


class Chunks(Ranges):
    """HOMER's positions and attention (arXiv:2404.10308, section 3): blocks that merge behind some layers."""

    def __init__(self, shared_prefix, chunk, height, lasts, level=None):
        super().__init__(shared_prefix, (chunk,) * 2**height, 1.0, 1.0)
        self.args, self.lasts = (shared_prefix, chunk, height, lasts), lasts
        self.chunk, self.level = chunk, height if level is None else level

    def in_layer(self, layer):
        return Chunks(*self.args, sum(last < layer for last in self.lasts))

    def blocks(self, pos):
        """Return the number of each position's block, 0 for what is in none."""
        parts = self.parts(pos)
        inside = (parts > 0) & (parts < self.behind)
        return np.where(inside, 1 + (parts - 1) // 2**self.level, 0)

    def probabilities(self, s, q_pos, k_pos):
        mine, other = self.blocks(q_pos)[:, None], self.blocks(k_pos)[None]
        s = np.where((mine > 0) & (other > 0) & (mine != other), -np.inf, s)
        w = np.exp(s - s.max(-1, keepdims=True))
        return w / w.sum(-1, keepdims=True)

    def goes_on(self, bias):
        """(prompt, layer) -> the tokens that go on: half a chunk of every block, by max_n q_n k - bias[d]."""

        def chosen(prompt, layer):
            if layer not in self.lasts:
                return None
            at, c = prompt.at[layer], prompt.decoder.config
            keys = np.repeat(prompt.k[layer], prompt.group, 0)
            score = np.einsum("nh,nth->nt", prompt.q[layer][:, -1], keys).max(0) / np.sqrt(c.head_dim)
            apart = np.clip(self.phases(at[-1:]) - self.phases(at), 0, bias.shape[1] - 1)
            score = score - bias[layer][apart]
            score[-1] = np.inf
            blocks = self.in_layer(layer).blocks(at)
            on = [*np.flatnonzero(blocks == 0)]
            for block in set(blocks) - {0}:
                those = np.flatnonzero(blocks == block)
                on += [*those[np.argsort(-score[those], kind="stable")[: self.chunk // 2]]]
            return np.sort(on)

        return chosen
