"""What the methods of `table_selection.py` leave of a prompt, and what leaves in steps, in float64 numpy."""

from __future__ import annotations

import jax
import numpy as np

from kvjax.fitted import Fitted
from tests.methods.expected import ends, kv_lists, received
from tests.methods.rows import THETA, WINDOW, count
from tests.reference import best, rope, softmax

PROFILE = Fitted({"importance": np.array([[0.1, 0.7], [0.0, 0.4]], np.float32)}, "CopyProfile", "")
# Of 2 layers and 4 query heads: two for what followed, one for the token itself: three KV heads of four.
LOOKS_BACK = Fitted(
    {
        "induction": np.array([[0.1, 0.2, 0.0, 0.0], [0.3, 0.1, 0.1, 0.0]], np.float32),
        "echo": np.array([[0.0, 0.1, 0.1, 0.1], [0.3, 0.3, 0.9, 0.1]], np.float32),
    },
    "RepeatingHeads",
    "",
)
RAZOR = dict(induction=0.25, echo=0.125, sinks=2, window=3, share=0.4)
LOOKING_BACK = [[True, False], [True, True]]


def razor_kept(prompt):
    near = ends(RAZOR["sinks"], max(RAZOR["window"], int(RAZOR["share"] * prompt.length + 1e-9)))(prompt)
    assert RAZOR["window"] < RAZOR["share"] * prompt.length
    return [np.stack([near | whole for whole in heads]) for heads in LOOKING_BACK]


SEPARATORS = tuple(range(1, 64, 5))


def separators_first(prompt, layer):
    """More than any position for a separator, and newer tokens before older ones."""
    at = np.arange(prompt.length) + 1e6 * np.isin(prompt.tokens, SEPARATORS)
    return np.broadcast_to(at, (kv_lists(prompt), prompt.length))


def sepllm_victim(lists, length, queries, sinks=2, window=3):
    """The oldest of the tokens that are no separators; where there is none, the oldest separator."""
    out = []
    for slots in lists:
        able = [i for i, s in enumerate(slots) if sinks <= s["pos"] < length - window]
        worst = min(able, key=lambda i, s=slots: (s[i]["token"] in SEPARATORS, s[i]["pos"]), default=None)
        out.append(worst if len(slots) > count(length) else None)
    return out


LADDER = dict(recover=0.5, frequent=0.3, local=0.2, sinks=1, window=WINDOW)


def fastgen_kept(prompt):
    at, t, found = np.arange(prompt.length), prompt.length, []
    for layer, p in enumerate(prompt.p):
        given = p[:, -WINDOW:].mean(1).reshape(-1, prompt.group, t).mean(1)
        often = best(received(prompt, layer), int(LADDER["frequent"] * t + 1e-9))
        keeps = []
        for mine, heavy in zip(given, often, strict=True):
            slots = at < LADDER["sinks"]
            more = [np.isin(prompt.tokens, SEPARATORS), heavy, at >= t - int(LADDER["local"] * t + 1e-9)]
            for one in (*more, np.ones(t, bool)):
                if mine[slots].sum() >= LADDER["recover"]:
                    break
                slots = slots | one
            keeps.append(slots)
        found.append(np.stack(keeps))
    return found


def sirllm_score(prompt, layer, decay=0.5, turn=9):
    before, seen = prompt.all_logits[:-1], np.asarray(prompt.tokens[1:])
    surprise = np.append(0, -np.log(softmax(before)[np.arange(len(seen)), seen]))
    aged = surprise * decay ** (np.arange(prompt.length)[::-1] / turn)
    return np.broadcast_to(aged, (kv_lists(prompt), prompt.length))


class Keyformer:
    """Keyformer over explicit slots, which remember all the noisy attention that they received."""

    def __init__(self, *, tau, tau_end, horizon, recent):
        self.hyper = dict(tau=tau, tau_end=tau_end, horizon=horizon, recent=recent)
        self.tau = lambda at: tau + (tau_end - tau) * np.minimum(at / horizon, 1)

    def given(self, q, at, k, pos, head):
        """What the queries q [G, T, H] at positions `at` give slots: [S]."""
        draw = lambda p: jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(KEY, head), p))  # noqa: E731
        noise = np.array([float(draw(p)) for p in pos])
        s = (q @ k.T / np.sqrt(k.shape[-1]) + noise) / self.tau(at)[:, None]
        return softmax(np.where(pos[None] > at[:, None], -np.inf, s)).sum((0, 1))

    def kept(self, prompt):
        found, at = [], np.arange(prompt.length)
        for q, k in zip(prompt.q, prompt.k, strict=True):
            groups = q.reshape(len(k), -1, *q.shape[1:])
            each = [self.given(groups[i], at, k[i], at, i) for i in range(len(k))]
            score = np.where(
                at >= prompt.length - int(count(prompt.length) * self.hyper["recent"]), np.inf, each
            )
            found.append(best(score, np.full(len(k), count(prompt.length))))
        return found

    def leave(self, memory, lists, gone):
        """Before any leaves, slots of a prompt note which others there were."""
        for slots in lists:
            whole = list(slots)
            for slot in slots:
                slot.setdefault("among", whole)

    def victims(self, lists, length, queries):
        out = []
        for head, slots in enumerate(lists):
            q = queries.reshape(len(lists), -1, *queries.shape[1:])[head]
            first = [s for s in slots if "noisy" not in s and s["read"]]
            if first:
                whole, at = first[0]["among"], np.arange(len(first[0]["among"]))
                k = rope(np.stack([s["k"] for s in whole]), at, THETA)
                for slot, mass in zip(whole, self.given(q[:, at], at, k, at, head), strict=True):
                    slot["noisy"] = mass
            pos = np.array([s["pos"] for s in slots])
            k = rope(np.stack([s["k"] for s in slots]), pos, THETA)
            for slot, mass in zip(
                slots, self.given(q[:, -1:], pos.max(keepdims=True), k, pos, head), strict=True
            ):
                slot["noisy"] = slot.get("noisy", 0.0) + mass
            able = [i for i in range(len(pos)) if pos[i] < length - int(count(length) * self.hyper["recent"])]
            out.append(min(able, key=lambda i, s=slots: s[i]["noisy"]) if len(pos) > count(length) else None)
        return out


KEY = jax.random.key(0)
KEYFORMER = Keyformer(tau=0.8, tau_end=2.5, horizon=24, recent=0.3)
