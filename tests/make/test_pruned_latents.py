"""Eigen Attention's directions and KVPruner's channels, against float64 and models of other weights."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.grammar.fitted import Fitted
from kvjax.make.pruned_channels import largest
from kvjax.models.config import Config
from kvjax.models.mixers.attention import Attention
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.ops.base.rope import Rope
from tests.methods.battery import off

# Groups of query heads, biases, and a layer that rotates half of its channels.
CONFIG = Config(
    vocab=64, d_model=32, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=24, qkv_bias=True,
    windows=(None, 9), rope_local=Rope(theta=50.0, rotary_dim=4),
)  # fmt: skip
TEXT = np.random.default_rng(8).integers(0, 64, (2, 30))


@cache
def plain() -> Model:
    return Model(CONFIG, jax.tree.map(lambda x: 2 * x, init(CONFIG, jax.random.key(3))))


def weights(layer):
    return {n: np.asarray(plain().params["layers"][layer][n][0], np.float64) for n in "qkvo"}


def with_weights(changed):
    """Give the model other W_k and W_v in its layers."""
    layers = tuple(
        {**p, **{n: jnp.asarray(x[None], jnp.float32) for n, x in new.items()}}
        for p, new in zip(plain().params["layers"], changed, strict=True)
    )
    return dataclasses.replace(plain(), params={**plain().params, "layers": layers})


def answers(method):
    """Compute the logits of the last token of two prompts, and of one more."""
    logits, cache = kvjax.prefill(plain(), TEXT[:, :-1], method=method, room=4)
    return np.asarray(logits), np.asarray(kvjax.step(plain(), cache, TEXT[:, -1])[0])


def check(method, dense):
    whole = np.asarray(dense(TEXT))
    for got, want in zip(answers(method), (whole[:, -2], whole[:, -1]), strict=True):
        assert off(got, want) < 2e-5
        assert off(np.asarray(plain()(TEXT))[:, -1], whole[:, -1]) > 1e-3


@pytest.fixture(scope="module")
def inputs():
    """Made-up inputs of both layers, and their second moments."""
    draw = np.random.default_rng(6)
    x = draw.normal(size=(2, 50, 32)) * np.linspace(0.1, 2, 32) ** np.array([1, 8])[:, None, None]
    y = {n: [x[i] @ weights(i)[n[0]] for i in range(2)] for n in ("keys", "values")}
    moments = {n: np.stack([z.T @ z / 50 for z in each]).astype(np.float32) for n, each in y.items()}
    return y, Fitted(moments, "GroupedLowRank", "")


def main_directions(rows, threshold):
    """Right singular vectors of rows, and how many of them are kept."""
    _, s, v = np.linalg.svd(rows, full_matrices=False)
    return v, int(np.argmax(np.cumsum(s) / s.sum() >= threshold)) + 1


@pytest.mark.rotating
def test_eigen_attention_stores_the_main_directions_of_layers_keys_and_of_heads_values(inputs):
    y, fitted = inputs
    method = kvjax.method("eigen-attention", threshold=0.8, fitted=fitted)
    changed, ranks = [], []
    for layer in range(2):
        keys, values = (np.split(y[n][layer], 2, 1) for n in ("keys", "values"))
        v, r = main_directions(np.concatenate(keys), 0.8)
        each = [main_directions(x, 0.8) for x in values]
        most = max(n for _, n in each)
        ranks.append((r, most))
        w = weights(layer)
        by = [u[:most].T @ u[:most] for u, _ in each]
        changed.append({
            "k": np.concatenate([h @ v[:r].T @ v[:r] for h in np.split(w["k"], 2, 1)], 1),
            "v": np.concatenate([h @ p for h, p in zip(np.split(w["v"], 2, 1), by, strict=True)], 1),
        })  # fmt: skip
    made = kvjax.prepare(plain(), method)
    assert [(m.group, m.key_rank, m.value_rank) for m in made.config.mixers] == [(1, *r) for r in ranks]
    assert len(set(ranks)) > 1 and max(max(r) for r in ranks) < 8
    check(method, with_weights(changed))


def stays(layer, many):
    """KVPruner's channels, found one by one."""
    w = weights(layer)
    half = (8, 4)[layer] // 2
    out = {"k": [], "v": []}
    for head in range(2):
        norm = lambda x: np.sqrt((x**2).sum())  # noqa: E731
        mine = [8 * n for n in (2 * head, 2 * head + 1)]
        key = [
            norm(w["k"][:, 8 * head + c]) * norm(np.stack([w["q"][:, n + c] for n in mine])) for c in range(8)
        ]
        value = [
            norm(w["v"][:, 8 * head + c]) * norm(np.stack([w["o"][n + c] for n in mine])) for c in range(8)
        ]
        pairs = [(c, c + half) for c in range(half)] + [(c,) for c in range(2 * half, 8)]
        pairs.sort(key=lambda unit: -np.mean([key[c] for c in unit]))
        kept = []
        for unit in pairs:
            kept += unit if len(kept) + len(unit) <= many else ()
        out["k"] += [sorted(kept)]
        out["v"] += [sorted(np.argsort(-np.array(value), kind="stable")[:many].tolist())]
    return out


def without(many):
    """Remove all but so many channels of a head from the model's layers; None leaves a layer as it is."""
    changed = []
    for layer, n in enumerate(many):
        w, new = weights(layer), {}
        for name, kept in ({} if n is None else stays(layer, n)).items():
            mask = np.zeros((2, 8), bool)
            for head, some in enumerate(kept):
                mask[head, some] = True
            new[name] = w[name] * mask.reshape(-1)
        changed.append(new)
    return with_weights(changed)


@pytest.mark.rotating
def test_kvpruner_is_the_model_without_the_channels_of_least_weight():
    check(kvjax.method("kvpruner", keep=0.5), without((4, 4)))


def perplexity(model):
    logits = np.asarray(model(TEXT), np.float64)[:, :-1]
    said = np.take_along_axis(logits, TEXT[:, 1:, None], -1)[..., 0]
    return np.exp((np.log(np.exp(logits).sum(-1)) - said).mean())


def test_kvpruner_leaves_more_channels_to_layers_without_which_perplexity_grows_more():
    fitted = kvjax.fit(plain(), "kvpruner:keep=0.5", TEXT.tolist())
    whole, grown = perplexity(plain()), fitted.arrays["perplexity"]
    want = [perplexity(without(one)) - whole for one in ((4, None), (None, 4))]
    np.testing.assert_allclose(grown, want, rtol=1e-3, atol=1e-3)
    for grows, channels in (((1, 3), (2, 6)), ((5, 1), (6, 2)), ((-1, 2), (2, 6)), ((1, 100), (2, 6))):
        known = Fitted({"perplexity": np.array(grows, np.float32)}, "PrunedChannels", "")
        made = kvjax.prepare(plain(), kvjax.method("kvpruner", keep=0.5, fitted=known))
        assert tuple(m.key_rank for m in made.config.mixers) == channels, grows


def test_partners_stay_together_and_single_channels_fill_what_is_left():
    importance = np.array([9.0, 1.0, 0.0, 8.0, 7.0, 6.0])
    # 0 and 2, 1 and 3 are pairs: of means 4.5 and 4.5, and 7 and 6 alone.
    other = np.array([2, 3, 0, 1, 4, 5])
    assert largest(importance, other, 2) == [4, 5]
    assert largest(importance, other, 4) == [0, 2, 4, 5]
    assert largest(importance, other, 6) == [0, 1, 2, 3, 4, 5]


def test_what_cannot_be_pruned_is_refused(inputs):
    with pytest.raises(ValueError, match="threshold"):
        kvjax.method("eigen-attention", threshold=0.0)
    with pytest.raises(ValueError, match="keep"):
        kvjax.method("kvpruner", keep=1.5)
    with pytest.raises(InputError, match="kvjax fit eigen-attention --model"):
        kvjax.prefill(plain(), TEXT, method="eigen-attention")
    _, fitted = inputs
    small = Fitted({n: x[:, :8, :8] for n, x in fitted.arrays.items()}, "GroupedLowRank", "")
    with pytest.raises(InputError, match=r"the \(layers, channels, channels\) of its moments are"):
        kvjax.prefill(plain(), TEXT, method=kvjax.method("eigen-attention", fitted=small))
    other = Fitted({"perplexity": np.ones(3, np.float32)}, "PrunedChannels", "")
    with pytest.raises(InputError, match=r"the \(layers\) of its sensitivities are"):
        kvjax.prefill(plain(), TEXT, method=kvjax.method("kvpruner", fitted=other))
    gated = dataclasses.replace(CONFIG, mixers=(Attention(), Attention(gate=True)))
    with pytest.raises(InputError, match="of plain attention, and layer 1 is Attention"):
        kvjax.prefill(Model(gated, init(gated, jax.random.key(0))), TEXT, method="kvpruner")
