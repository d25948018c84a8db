"""What ADORE's controller leaves of a prompt, and what it releases in steps, in float64 numpy."""

from __future__ import annotations

import numpy as np

from tests.methods.learned import KV_HEADS, WIDTH, made_up, of_layer
from tests.methods.rows import count, dense, half_and_one

STATES, KNOWN, KEEPS = 5, 3, 2
CONTROLLER = made_up(
    "Controller",
    {
        "in": (WIDTH, 3 * STATES), "in_bias": (3 * STATES,), "state": (STATES, 3 * STATES),
        "state_bias": (3 * STATES,), "ask": (STATES, KV_HEADS, KNOWN), "ask_bias": (KV_HEADS, KNOWN),
        "told": (WIDTH, KV_HEADS, KNOWN),
    },
    22,
)  # fmt: skip


def adore_bytes(s):
    """Slots that are known by some numbers; a row's states, and what its heads ask for."""
    return dense(half_and_one, extra=4 * KNOWN)(s) + 4 * s.layers * s.b * (STATES + s.k * KNOWN)


def states(x, a):
    """Compute the states of a GRU after every token with inputs x [T, D]."""
    z, found, sigmoid = np.zeros(STATES), [], lambda y: 1 / (1 + np.exp(-y))
    for token in x:
        (r, u, n), (s, v, m) = (
            np.split(y, 3) for y in (token @ a["in"] + a["in_bias"], z @ a["state"] + a["state_bias"])
        )
        r, u = sigmoid(r + s), sigmoid(u + v)
        z = (1 - u) * np.tanh(n + r * m) + u * z
        found.append(z)
    return np.stack(found)


def wanted(x, known, layer, head):
    """Compute what the controller expects behind inputs x of tokens with the inputs `known` [J, D]."""
    a = of_layer(CONTROLLER, layer)
    asked = states(x, a)[-1] @ a["ask"][:, head] + a["ask_bias"][head]
    return known @ a["told"][:, head] @ asked


def adore_score(prompt, layer):
    x = prompt.hidden[layer]
    return np.stack([wanted(x, x, layer, head) for head in range(KV_HEADS)])


def adore_leaves(lists, length, queries):
    """Find what the controller expects least, behind the newest token, in a list that holds too many."""

    def leaves(slots, head):
        if len(slots) <= count(length):
            return None
        newest = max(slots, key=lambda slot: slot["pos"])
        known = np.stack([slot["hidden"] for slot in slots])
        score = wanted(newest["inputs"], known, newest["layer"], head)
        pos = np.array([slot["pos"] for slot in slots])
        score = np.where(pos >= length - KEEPS, np.inf, score)
        # In the lowest layer a token that is written twice is wanted alike: the older one stays.
        return int(np.argmax(np.where(np.isclose(score, score.min(), rtol=1e-9), pos, -1)))

    return [leaves(slots, i) for i, slots in enumerate(lists)]
