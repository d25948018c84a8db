"""Answers over encoded slots, against float64 numpy that encodes the same slots by the papers' equations."""

import numpy as np
import pytest

import kvjax
from kvjax.grammar import Method, Store
from kvjax.state.cache import nbytes
from kvjax.store.affine import Affine
from kvjax.store.rotate import Rotate
from tests.float64.reference import Row, rope
from tests.methods.battery import MAIN, ROOM, model, off, prompt_of, step
from tests.sweep import sweep

GROUP, RANK, BITS = 8, 2, 4


def hadamard_by_hand(width, seed=0):
    """Put the library's signs on the matrix of entries (-1)^popcount(i & j) / sqrt(width)."""
    matrix = np.array([[(-1.0) ** (i & j).bit_count() for j in range(width)] for i in range(width)])
    matrix /= np.sqrt(width)
    signs = np.sign(Rotate(seed=seed).matrix(width)[0] * matrix[0])
    return matrix * signs


def float16(x):
    return x.astype(np.float16).astype(float)


def quantised(x, axis, clip=1.0):
    """x [.., n, H] from codes between the least and the largest along an axis, which float16 rounds."""
    low, high = clip * x.min(axis, keepdims=True), clip * x.max(axis, keepdims=True)
    zero, step = float16(low), float16((high - low) / (2**BITS - 1))
    return np.clip(np.rint((x - zero) / step), 0, 2**BITS - 1) * step + zero


def per_token(x, clip=1.0):
    """Quantise groups of GROUP channels of a token."""
    return quantised(x.reshape(*x.shape[:-1], -1, GROUP), -1, clip).reshape(x.shape)


def per_channel(x):
    """Quantise a channel of GROUP tokens; x is one such granule."""
    return quantised(x, -2)


def gear_by_hand(x, axis, code):
    """D + L + S of one granule [GROUP, H]: S one number at each end along an axis, L of rank RANK."""
    place = x.argsort(axis).argsort(axis)
    ends = (place == 0) | (place == x.shape[axis] - 1)
    d = code(np.where(ends, np.mean(x, axis, where=~ends, keepdims=True), x))
    near = np.where(ends, x, d)
    u, b = None, Rotate("orthogonal").matrix(x.shape[-1])[:, :RANK]
    for _ in range(3):
        u = np.linalg.qr((x - near) @ b)[0]
        b = (x - near).T @ u
    return near + float16(u) @ float16(b).T


def rotated(code):
    return lambda x: code(x @ (r := hadamard_by_hand(x.shape[-1])).T) @ r


ROTATED_KIVI = Method(
    store=Store(
        Rotate() >> Affine(BITS, axis="channel", group=GROUP),
        Rotate() >> Affine(BITS, group=GROUP, together=GROUP),
    )
)
ROTATED_KEYS = Method(
    store=Store(Rotate() >> Affine(BITS, group=GROUP, clip=0.95), Affine(BITS, group=GROUP, together=GROUP))
)
KIVI = kvjax.method("kivi", bits=BITS, group=GROUP, residual=0)
# A method, how a granule of its keys and of its values comes back, and the tokens of a granule.
CASES = {
    "quarot": (
        kvjax.method("quarot", group=GROUP),
        rotated(lambda x: per_token(x, 0.95)), rotated(lambda x: per_token(x, 0.95)), 1,
    ),
    "gear": (
        kvjax.method("gear", bits=BITS, group=GROUP, rank=RANK),
        lambda x: gear_by_hand(x, -2, per_channel), lambda x: gear_by_hand(x, -1, per_token), GROUP,
    ),
    "quarot before kivi": (ROTATED_KIVI, rotated(per_channel), rotated(per_token), GROUP),
    "quarot keys, kivi values": (
        ROTATED_KEYS, rotated(lambda x: per_token(x, 0.95)), per_token, GROUP
    ),
}  # fmt: skip


def encoded(prompt, keys, values, granule):
    """Make a row whose oldest whole granules hold what comes back of them."""
    row = Row(prompt, [np.ones((len(k), prompt.length), bool) for k in prompt.k])
    theta = prompt.decoder.config.rope.theta
    for layer, lists in enumerate(row.slots):
        for head, slots in enumerate(lists):
            for start in range(0, prompt.length - granule + 1, granule):
                block = slice(start, start + granule)
                at = np.arange(start, start + granule)
                # Keys are encoded behind their rotation by position; the row turns them itself.
                k = rope(keys(prompt.k[layer][head, block]), -at, theta)
                v = values(prompt.v[layer][head, block])
                for slot, one_k, one_v in zip(slots[block], k, v, strict=True):
                    slot |= dict(k=one_k, v=one_v)
    return row


@pytest.mark.parametrize("name", sweep(CASES, "gear"))
@pytest.mark.rotating
def test_the_last_token_asked_again_attends_to_what_comes_back_of_the_codes(name):
    method, keys, values, granule = CASES[name]
    _, cache = kvjax.prefill(model("4/2"), MAIN.first, method=method, room=ROOM)
    asked, _ = step(model("4/2"), cache, [row[-1] for row in MAIN.first], append=False)
    prompts = [prompt_of("4/2", "main", b) for b in range(len(MAIN.first))]
    want = [
        encoded(prompt, keys, values, granule).step(prompt.tokens[-1], append=False) for prompt in prompts
    ]
    # In float32, a number between two codes may become the other one.
    assert off(asked, np.stack(want)) < 2e-3
    assert off(asked, np.stack([prompt.all_logits[-1] for prompt in prompts])) > 1e-2


@pytest.mark.rotating
def test_a_rotation_before_kivi_costs_no_byte():
    plain, turned = (kvjax.prefill(model("4/2"), MAIN.first, method=m)[1] for m in (KIVI, ROTATED_KIVI))
    assert nbytes(turned) == nbytes(plain)
