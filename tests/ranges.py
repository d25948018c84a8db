"""Contexts that share a range of positions, in float64 numpy: what APE is held against."""

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
