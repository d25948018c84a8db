"""FreqKV (arXiv:2505.00570) in float64: scipy's DCT along tokens between the first and the newest ones."""

import numpy as np
from scipy.fft import dct, idct


def low_pass(x, fewer):
    """Compute the lowest frequencies of x [N, ...], as `fewer` numbers."""
    return idct(dct(x, axis=0, norm="ortho")[:fewer], axis=0, norm="ortho") * np.sqrt(fewer / len(x))


class FreqKV:
    """What stays: the first `sinks` and the `newest` tokens, and between them as many slots as are left."""

    def __init__(self, count, *, every, sinks, newest):
        self.count, self.every, self.sinks, self.newest = count, every, sinks, newest

    def stays(self, pos, length):
        ends = (pos < self.sinks) | (pos >= length - self.newest)
        left = max(self.count(length) - ends.sum(), 0)
        return ends | np.isin(pos, np.sort(pos[~ends])[:left])

    def kept(self, prompt):
        stays = self.stays(np.arange(prompt.length), prompt.length)
        return [np.tile(stays, (len(k), 1)) for k in prompt.k]

    def victims(self, lists, length, queries):
        out = []
        for slots in lists:
            due = len(slots) >= self.count(length) + self.every
            stays = self.stays(np.array([s["pos"] for s in slots]), length)
            out.append(np.flatnonzero(~stays) if due else None)
        return out

    def leave(self, memory, lists, gone):
        for slots, some in zip(lists, gone, strict=True):
            if not len(some):
                continue
            length, leaves = max(s["pos"] for s in slots) + 1, {slots[i]["pos"] for i in some}
            between = [s for s in slots if self.sinks <= s["pos"] < length - self.newest]
            between.sort(key=lambda s: s["pos"])
            stay = [s for s in between if s["pos"] not in leaves]
            for name in "kv":
                fewer = low_pass(np.stack([s[name] for s in between]), len(stay)) if stay else ()
                for slot, x in zip(stay, fewer, strict=True):
                    slot[name] = x
            memory[True] = memory.get(True, 0) + len(leaves)
