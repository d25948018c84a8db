"""RWKV's mixes against their equations in float64, written token by token."""

import dataclasses

import numpy as np
import pytest

from kvjax.models.feed_forward import NoMLP
from kvjax.models.mixer import Take
from kvjax.models.mixers.rwkv import ChannelMix, Rwkv6, Rwkv7
from tests.models.single import CONFIG, D, T, close, drawn, run, sigmoid


def head_norms(o, p, heads, eps=64e-5):
    """Each head less its mean, over its deviation; then the weight and bias of all channels."""
    parts = []
    for head in np.split(o, heads):
        centred = head - head.mean()
        parts.append(centred / np.sqrt((centred**2).mean() + eps))
    return np.concatenate(parts) * p["out_norm"] + p["out_norm_bias"]


def finch(p, x, heads, width):
    """RWKV-6, arXiv:2404.05892: data-dependent shifts, and a state that is read before it decays."""
    states = np.zeros((heads, width, width))
    last, out = np.zeros(D), []
    for now in x:
        delta = last - now
        low = np.split(np.tanh((now + delta * p["mix_x"]) @ p["mix_down"]), 5)
        mixed = {n: now + delta * (p[f"mix_{n}"] + low[i] @ p["mix_up"][i]) for i, n in enumerate("wkvrg")}
        w = np.tanh(mixed["w"] @ p["decay_down"]) @ p["decay_up"] + p["decay_up_bias"]
        r, k, v = (mixed[n] @ p[n] for n in "rkv")
        g = mixed["g"] @ p["out_gate"]
        o = np.zeros(heads * width)
        for h in range(heads):
            at = slice(h * width, (h + 1) * width)
            kv = np.outer(k[at], v[at])
            o[at] = (states[h] + np.diag(p["bonus"][h]) @ kv).T @ r[at]
            states[h] = np.diag(np.exp(-np.exp(w[at]))) @ states[h] + kv
        out.append((head_norms(o, p, heads) * g * sigmoid(g)) @ p["o"])
        last = now
    return np.stack(out)


def goose(p, x, heads, width, first_values=None):
    """RWKV-7, arXiv:2503.14456: plain shifts, and an erase along another key than is written to."""
    states = np.zeros((heads, width, width))
    last, out = np.zeros(D), []
    for t, now in enumerate(x):
        mixed = {n: now + (last - now) * p[f"mix_{n}"] for n in "rwkvag"}
        w = np.tanh(mixed["w"] @ p["decay_down"]) @ p["decay_up"] + p["decay_up_bias"]
        r, k, v = (mixed[n] @ p[n] for n in "rkv")
        if first_values is not None:
            low = mixed["v"] @ p["first_down"] @ p["first_up"] + p["first_up_bias"]
            v = v + (first_values[t] - v) * sigmoid(low)
        a = sigmoid(mixed["a"] @ p["rate_down"] @ p["rate_up"] + p["rate_up_bias"])
        g = sigmoid(mixed["g"] @ p["out_gate_down"]) @ p["out_gate_up"]
        erase, k = k * p["erase_norm"], k * (1 + (a - 1) * p["key_rate"])
        decay = np.exp(-np.exp(-0.5) * sigmoid(w))
        o, bonus = np.zeros(heads * width), np.zeros(heads * width)
        for h in range(heads):
            at = slice(h * width, (h + 1) * width)
            kk = erase[at] / np.linalg.norm(erase[at])
            states[h] = (np.diag(decay[at]) - np.outer(a[at] * kk, kk)) @ states[h] + np.outer(k[at], v[at])
            o[at] = states[h].T @ r[at]
            bonus[at] = (r[at] * p["bonus"][h] * k[at]).sum() * v[at]
        out.append(((head_norms(o, p, heads) + bonus) * g) @ p["o"])
        last = now
    return np.stack(out)


def channels(p, x, gate):
    last, out = np.zeros(D), []
    for now in x:
        key = np.maximum((now + (last - now) * p["mix_k"]) @ p["k"], 0) ** 2
        share = sigmoid((now + (last - now) * p["mix_r"]) @ p["r"]) if gate else 1.0
        out.append(share * (key @ p["v"]))
        last = now
    return np.stack(out)


def test_rwkv6_is_its_equation_token_by_token(rng):
    mixer = Rwkv6(heads=3, head_dim=4, mix_rank=2, decay_rank=3)
    p, x = drawn(mixer, rng), rng.standard_normal((T, D))
    close(run(mixer, p, x), finch(p, x, 3, 4))


@pytest.mark.rotating
@pytest.mark.parametrize("v_rank", [None, 2])
def test_rwkv7_is_its_equation_token_by_token(rng, v_rank):
    mixer = Rwkv7(heads=3, head_dim=4, decay_rank=2, rate_rank=3, gate_rank=5, v_rank=v_rank)
    p, x = drawn(mixer, rng), rng.standard_normal((T, D))
    first = None if v_rank is None else rng.standard_normal((T, 12))
    got = run(mixer, p, x, None if first is None else first[None])
    close(got, goose(p, x, 3, 4, first))


@pytest.mark.parametrize("gate", [True, False])
def test_the_channel_mix_is_its_equation_token_by_token(rng, gate):
    mixer = ChannelMix(gate=gate)
    p, x = drawn(mixer, rng), rng.standard_normal((T, D))
    close(run(mixer, p, x), channels(p, x, gate))


def test_values_of_layer_0_need_a_layer_0_that_has_them():
    inner, mlps = Rwkv7(heads=2, head_dim=4, v_rank=2), (NoMLP(), NoMLP())
    outer = Rwkv7(heads=2, head_dim=4)
    two = dataclasses.replace(CONFIG, layers=2, mixers=(outer, inner), mlps=mlps)
    assert two.mixers[1].takes == {"first values": Take("values", 0)}
    for first in (inner, Rwkv7(heads=3, head_dim=4), ChannelMix()):
        with pytest.raises(ValueError, match="v_rank=2 adds the values of layer 0, expected a Rwkv7 there"):
            dataclasses.replace(two, mixers=(first, inner))
