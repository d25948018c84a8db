"""Recurrent layers against their equations in float64: sums over tokens where the layers keep a state."""

import dataclasses

import numpy as np
import pytest

from kvjax.models.mixers.infini import Infini
from kvjax.models.mixers.log_linear import LogLinearDelta, LogLinearMamba2
from kvjax.models.mixers.recurrent import GatedSlot
from tests.models.single import CONFIG, D, T, close, drawn, run, sigmoid


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.log1p(np.exp(x))


def rms(x, weight, eps=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def convolved(x, weight, bias=0.0):
    """Causal, per channel, zeros before the first token."""
    width = len(weight)
    line = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
    return np.stack([(line[t : t + width] * weight).sum(0) + bias for t in range(len(x))])


def level_weights(p, x, heads, levels):
    return softplus((x @ p["level"]).reshape(T, heads, levels) * p["level_scale"])


def level(t, s, levels):
    return min((t ^ s).bit_length(), levels - 1)


def test_gated_slots_are_their_equation_token_by_token(rng):
    heads, keys, values, count = 2, 3, 4, 5
    mixer = GatedSlot(heads, keys, values, count=count)
    p, x = drawn(mixer, rng), rng.standard_normal((T, D))
    slot_keys, slot_values = np.zeros((heads, keys, count)), np.zeros((heads, count, values))
    out = []
    for now in x:
        q, k, v = (silu(now @ p[n]).reshape(heads, -1) for n in "qkv")
        f = sigmoid(now @ p["forget"]).reshape(heads, count) ** (1 / 8)
        o = []
        for h in range(heads):
            slot_keys[h] = slot_keys[h] @ np.diag(f[h]) + np.outer(k[h], 1 - f[h])
            slot_values[h] = np.diag(f[h]) @ slot_values[h] + np.outer(1 - f[h], v[h])
            weight = np.exp(slot_keys[h].T @ q[h])
            o.append(slot_values[h].T @ (weight / weight.sum()))
        out.append(rms(silu(np.concatenate(o)), p["out_norm"]) @ p["o"])
    close(run(mixer, p, x), np.stack(out))


@pytest.mark.rotating
@pytest.mark.parametrize("parts", [1, 4])
def test_log_linear_mamba2_is_its_sum_over_levels(parts, rng):
    heads, keys, values, levels = 2, 3, 4, 3
    mixer = LogLinearMamba2(heads, keys, values, groups=1, norm_groups=parts, levels=levels)
    p, x = drawn(mixer, rng), rng.standard_normal((T, D))
    inner = heads * values
    y = silu(convolved(x @ p["xbc"], p["conv"], p["conv_bias"]))
    v = y[:, :inner].reshape(T, heads, values)
    b, c = y[:, inner : inner + keys], y[:, inner + keys :]
    dt = softplus(x @ p["dt"] + p["dt_bias"])
    g, weight = -np.exp(p["a_log"]) * dt, level_weights(p, x, heads, levels)
    o = p["skip"][None, :, None] * v
    for t in range(T):
        for s in range(t + 1):
            share = weight[t, :, level(t, s, levels)] * np.exp(g[s + 1 : t + 1].sum(0)) * (c[t] @ b[s])
            o[t] += (share * dt[s])[:, None] * v[s]
    gated = (o.reshape(T, -1) * silu(x @ p["z"])).reshape(T, parts, -1)
    want = rms(gated, p["out_norm"].reshape(parts, -1)).reshape(T, -1) @ p["o"]
    close(run(mixer, p, x), want)


def test_channels_that_no_norm_divides_are_refused():
    mixer = LogLinearMamba2(2, 3, 4, norm_groups=3)
    with pytest.raises(ValueError, match="8 channels cannot be normalised in 3 equal parts"):
        dataclasses.replace(CONFIG, mixers=(mixer,))


def test_log_linear_deltanet_is_its_product_of_transitions_over_levels(rng):
    heads, keys, values, levels = 2, 3, 4, 3
    mixer = LogLinearDelta(heads, keys, values, levels=levels)
    p, x = drawn(mixer, rng), rng.standard_normal((T, D))
    flat = np.concatenate([x @ p[n] for n in "qkv"], 1)
    q, k, v = np.split(silu(convolved(flat, p["conv"])), [heads * keys, 2 * heads * keys], axis=1)
    q, k, v = (a.reshape(T, heads, -1) for a in (q, k, v))
    q, k = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
    beta = sigmoid(x @ p["beta"])
    g = -np.exp(p["a_log"]) * softplus(x @ p["decay"] + p["dt_bias"])
    weight, o = level_weights(p, x, heads, levels), np.zeros((T, heads, values))
    for t in range(T):
        for h in range(heads):
            reading = q[t, h]
            for s in range(t, -1, -1):
                share = weight[t, h, level(t, s, levels)] * beta[s, h] * (reading @ k[s, h])
                o[t, h] += share * v[s, h]
                erased = reading - beta[s, h] * (reading @ k[s, h]) * k[s, h]
                reading = np.exp(g[s, h]) * erased
    gate = silu(x @ p["out_gate"]).reshape(T, heads, values)
    want = (rms(o, p["out_norm"]) * gate).reshape(T, -1) @ p["o"]
    close(run(mixer, p, x), want)


def rotated(x, theta=10_000.0):
    """[T, H] with channels i and i + H / 2 turned by t theta^(-2 i / H)."""
    half = x.shape[1] // 2
    angle = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    low, high = x[:, :half], x[:, half:]
    turned = [low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)]
    return np.concatenate(turned, 1)


@pytest.mark.rotating
@pytest.mark.parametrize("delta", [True, False])
def test_infini_attention_is_its_equation_segment_by_segment(rng, delta):
    heads, keys, values, segment = 2, 4, 3, 4
    mixer = Infini(heads, keys, values, segment=segment, delta=delta)
    p, x = drawn(mixer, rng), rng.standard_normal((T, D))
    out = np.zeros((T, heads, values))
    for h in range(heads):
        q, k, v = ((x @ p[n]).reshape(T, heads, -1)[:, h] for n in "qkv")
        near_q, near_k = rotated(q), rotated(k)
        phi_q, phi_k = (np.where(a > 0, a + 1, np.exp(a)) for a in (q, k))
        memory, z, share = np.zeros((keys, values)), np.zeros(keys), sigmoid(p["memory_share"][h])
        for first in range(0, T, segment):
            here = range(first, min(first + segment, T))
            for t in here:
                weight = np.exp(near_k[first : t + 1] @ near_q[t] / np.sqrt(keys))
                near = weight @ v[first : t + 1] / weight.sum()
                far = phi_q[t] @ memory / (phi_q[t] @ z) if first else 0.0
                out[t, h] = share * far + (1 - share) * near
            known = [phi_k[t] @ memory / (phi_k[t] @ z) if first and delta else 0.0 for t in here]
            memory = memory + sum(np.outer(phi_k[t], v[t] - a) for t, a in zip(here, known, strict=True))
            z = z + phi_k[here].sum(0)
    close(run(mixer, p, x), out.reshape(T, -1) @ p["o"])


@pytest.mark.parametrize("wrong", [dict(groups=1), dict(segment=0), dict(key_dim=3)])
def test_infini_attention_says_what_it_needs(wrong):
    fields = dict(heads=2, key_dim=4, value_dim=3) | wrong
    with pytest.raises(ValueError, match="every head has a memory of its own"):
        Infini(**fields).check(CONFIG)


def test_slots_are_not_shared_between_heads():
    with pytest.raises(ValueError, match="every head has slots of its own"):
        GatedSlot(2, 4, 3, groups=1).check(CONFIG)
