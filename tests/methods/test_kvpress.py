"""Parity with kvpress on a recorded run: scores, kept sets and logits of one tiny Llama (see scripts/).

kvpress removes a share of the tokens and keeps int(T * (1 - ratio)) of them; here half stays. Not compared:
`dec_streaming_llm`, which counts slots where the method means positions, so that from the second compression
on it drops recent tokens; masking presses while decoding, which never shrink.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.compress.select import score_slots, union
from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.fitted import Fitted, with_fitted
from kvjax.grammar.keys import key_of
from kvjax.keep.algebra import Word, standardised
from kvjax.keep.budgets.budget import AcrossHeads, Uniform
from kvjax.keep.observations.observe import Mass
from kvjax.keep.patterns import Recent
from kvjax.keep.scores.chunk_wise import EntropyGated
from kvjax.keep.scores.geometry import Leverage
from kvjax.keep.scores.score import KeyNorm, WindowAttention
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.state.cache import NOTHING
from kvjax.steps import Run
from kvjax.steps.prefilling.scored import scored
from scripts.studies import presses as beside_kvpress
from tests.sweep import sweep

FIXTURE = Path(__file__).parents[1] / "fixtures" / "kvpress_tiny_llama.npz"
T, ROOM = 256, 32


@cache
def recorded():
    with np.load(FIXTURE) as arrays:
        return dict(arrays)


@cache
def model() -> Model:
    data, c = recorded(), json.loads(str(recorded()["meta"]))["config"]
    config = Config(
        vocab=c["vocab_size"], d_model=c["hidden_size"], layers=c["num_hidden_layers"],
        heads=c["num_attention_heads"], kv_heads=c["num_key_value_heads"], head_dim=c["head_dim"],
        d_ff=c["intermediate_size"], norm_eps=c["rms_norm_eps"],
    )  # fmt: skip
    layers = tuple(
        {
            ours: jnp.asarray(data[f"w/model.layers.{i}.{theirs}.weight"].T)[None]
            for ours, theirs in {
                "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
                "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
                "down": "mlp.down_proj", "attn_norm": "input_layernorm",
                "mlp_norm": "post_attention_layernorm",
            }.items()
        }
        for i in range(config.layers)
    )  # fmt: skip
    params = {
        "embed": jnp.asarray(data["w/model.embed_tokens.weight"]),
        "norm": jnp.asarray(data["w/model.norm.weight"]),
        "unembed": jnp.asarray(data["w/lm_head.weight"].T),
        "layers": layers,
    }
    return Model(config, params)


@dataclasses.dataclass(frozen=True)
class Recorded(Word):
    """The scores of one of kvpress' presses, position by position."""

    press: str = "random"

    def __call__(self, view, seen):
        draws = jnp.asarray(recorded()[f"{self.press}/scores"])[seen.layer]
        return jnp.take_along_axis(draws, jnp.maximum(view.pos, 0), axis=-1)


@dataclasses.dataclass(frozen=True)
class Sketched(Leverage):
    """Leverage with the draws of kvpress, which has others for every layer and head."""

    def sketch(self, seen, width):
        return jnp.asarray(recorded()["leverage/x/randn"])[seen.layer, 0] / self.rank**0.5


def half(score, allocate=None, *protect) -> Method:
    return Method(Keep(score, Budget(0.5), allocate or Uniform(), protect))


def beside(press: str, **hyper) -> Method:
    """Return the sentence that docs/beside-kvpress.md has beside a press on a real model, at another size."""
    return beside_kvpress.PRESSES[press].ours(0.5, **hyper)


def knorm() -> Method:
    return beside("knorm")


def kvzip(**hyper) -> Method:
    return beside("kvzip", page=16, prefix=repeat_prefix(), **hyper)


def layer_shares() -> list[float]:
    """Return what kvpress removes of each layer, as shares of a half that stay."""
    removed = json.loads(str(recorded()["meta"]))["presses"]["per_layer_knorm"]["args"]["compression_ratios"]
    return [2 * (1 - r) for r in removed]


PRESSES = {
    "random": lambda: half(Recorded()),
    **{
        press: partial(beside, press)
        for press in (
            "knorm", "snapkv", "tova", "streaming_llm", "observed_attention", "expected_attention", "keydiff",
            "cur", "cap",
        )
    },
    "pyramidkv": lambda: beside("pyramidkv", window=32, page=16),
    "adakv_snapkv": lambda: beside("adakv_snapkv", page=16),
    "adakv_knorm": lambda: half(KeyNorm(), AcrossHeads(0.2, blend=False)),
    "expected_attention_eps": lambda: beside("expected_attention", epsilon=1e-2),
    "expected_attention_nocov": lambda: beside("expected_attention", covariance=False, value_norm=False),
    "expected_attention_stats": lambda: beside("expected_attention", fitted=statistics()),
    "leverage": lambda: half(standardised(Sketched())),
    "non_causal": lambda: beside("non_causal", chunk=64),
    "qfilter": lambda: kvjax.method("q-filters", budget=0.5, newest=0, fitted=filters()),
    "kvzip": lambda: kvzip(),
    "kvzip_layerwise": lambda: kvzip(over="layer"),
    "kvzip_plus": lambda: kvzip(normalised=True),
    "kvgrad": lambda: kvjax.method("kvgrad", budget=0.5, page=16, prefix=repeat_prefix()),
    "restorekv": lambda: kvjax.method(
        "restorekv", budget=0.5, page=16, prefix=repeat_prefix(), fitted=restore_tokens()
    ),
    "per_layer_knorm": lambda: kvjax.per_layer(knorm(), layer_shares(), page=16),
    "chunk_knorm": lambda: kvjax.in_chunks(knorm(), T // 4),
    "block_keydiff": lambda: kvjax.in_blocks(beside("keydiff"), T // 8),
    "merging_knorm": lambda: kvjax.merging(knorm()),
    "entropy_chunkkv_snapkv": lambda: half(EntropyGated(Recorded("entropy_chunkkv_snapkv"))),
}  # fmt: skip
# kvpress averages over a group where we sum, or over what we leave as 0 and 1.
SCALE = {"observed_attention": lambda c: c.kv_heads / c.heads}
# Here ours is the position and theirs is 1 or 0: the same set, other numbers.
UNSCORED = {"streaming_llm", "chunk_knorm", "block_keydiff", "entropy_chunkkv_snapkv"}
TIED = "entropy_chunkkv_snapkv"
each = pytest.mark.parametrize("press", [press for press in PRESSES if press != TIED])


def repeat_prefix() -> tuple[int, ...]:
    """Return the instruction that kvpress puts before the repeated context."""
    ids = recorded()["kvzip/x/repeat_ids_0"][0].astype(int)
    assert (ids[-T:] == recorded()["ids"][0]).all()
    return tuple(ids[:-T].tolist())


def statistics() -> Fitted:
    mean, covariance = (recorded()[f"expected_attention_stats/x/{name}"] for name in ("mu", "cov"))
    return Fitted({"mean": mean, "covariance": covariance}, "QueryStatistics", "")


def filters() -> Fitted:
    """Return the filters that kvpress was given; it keeps the smallest products with them."""
    return Fitted({"filters": -recorded()["qfilter/x/q_filters"]}, "QueryFilters", "")


def restore_tokens() -> Fitted:
    """Return the embeddings that kvpress was given, and a LoRA as it begins, without any effect."""
    c, memory = model().config, recorded()["restorekv/x/memory"]
    q, k = c.heads * c.head_dim, c.kv_heads * c.head_dim
    arrays = {"memory": memory[None]}
    for name, (width, out) in {
        "q": (c.d_model, q),
        "k": (c.d_model, k),
        "v": (c.d_model, k),
        "o": (q, q),
    }.items():
        arrays[f"{name}_down"] = np.ones((c.layers, width, 1), np.float32)
        arrays[f"{name}_up"] = np.zeros((c.layers, 1, out), np.float32)
    return Fitted(arrays, "RestoreTokens", "")


@cache
def scores(press: str) -> np.ndarray:
    """Our scores [L, K, T]; infinite where a pattern protects."""
    run, m = Run(model().config, PRESSES[press]()), model()
    if run.method.keep.probe is not None:
        weighted = press in ("kvzip_plus", "kvgrad")
        return weighted_scores(run) if weighted else probe_scores(run)

    @jax.jit
    def go(params, tokens, lengths):
        prompt = steps.observe(run, params, tokens, lengths, None, steps.needs_of(run, params))
        pos, length = prompt.positions
        return [
            score_slots(gm, union(gm, NOTHING, (), fresh, pos), fresh, length, run.attention_spec(gm.first))
            for gm, fresh in zip(run.groups(params), prompt.fresh, strict=True)
        ]

    tokens = jnp.asarray(recorded()["ids"], jnp.int32)
    params = with_fitted(m.params, run.method)
    return np.concatenate(go(params, tokens, jnp.asarray([T], jnp.int32)))[:, 0]


def probe_scores(run: Run) -> np.ndarray:
    """Compute the largest attention that the probe, read behind the whole cache, gives each token."""
    _, cache = kvjax.prefill(model(), recorded()["ids"], room=0)
    tokens, lengths = run.method.keep.probe.tokens(
        jnp.asarray(recorded()["ids"], jnp.int32), jnp.asarray([T], jnp.int32)
    )
    bare = dataclasses.replace(cache, method=None, model="")
    needs = frozenset({Mass("max")})
    plain = Run(run.config, Method())
    read = jax.jit(lambda p, c: steps.observe(plain, p, tokens, lengths, c, needs).fresh)
    reading = [f.masses[0][key_of(Mass("max"))] for f in read(model().params, bare)]
    found = np.concatenate(reading)[:, 0]
    found[..., :4] = np.inf  # sinks
    return found


def weighted_scores(run: Run) -> np.ndarray:
    """Compute the same by the method's own words, which see what the probe's queries came from."""

    @jax.jit
    def go(params, tokens):
        prompt = steps.observe(run, params, tokens, jnp.full(1, T), None, steps.needs_of(run, params))
        return scored(run, params, prompt)

    found = go(model().params, jnp.asarray(recorded()["ids"], jnp.int32))
    return np.concatenate([found[i] for i in sorted(found)])[:, 0]


@cache
def compressed(press: str):
    return kvjax.prefill(model(), recorded()["ids"], method=PRESSES[press](), room=ROOM)


def kept(cache) -> np.ndarray:
    """Boolean [L, K, T]."""
    held = np.zeros((model().config.layers, model().config.kv_heads, T), bool)
    for layer, lists in enumerate(kvjax.kept_positions(cache)):
        for head, pos in enumerate(np.asarray(lists)[0]):
            held[layer, head, pos[(pos >= 0) & (pos < T)]] = True
    return held


def close(logits, want):
    np.testing.assert_allclose(logits, want, atol=2e-4 * np.abs(want).max(), rtol=0)


@pytest.mark.rotating
def test_the_model_is_the_one_that_kvpress_ran():
    logits, cache = kvjax.prefill(model(), recorded()["ids"], room=ROOM)
    close(logits, recorded()["ref/logits_last"])
    close(kvjax.step(model(), cache, recorded()["cont_id"][None])[0], recorded()["ref/logits_next"])


@pytest.mark.rotating
@pytest.mark.parametrize(
    "press",
    sweep(
        [p for p in PRESSES if p not in UNSCORED],
        "tova", "observed_attention", "adakv_knorm",
    ),
)  # fmt: skip
def test_scores_equal_those_of_kvpress(press):
    ours, theirs = scores(press), recorded()[f"{press}/scores"][:, 0]
    free = np.isfinite(ours)
    # What we protect without a score, kvpress scores above everything.
    protected = theirs[:0] if PRESSES[press]().keep.probe else theirs[~free]
    assert not protected.size or protected.min() >= theirs[free].max()
    ours = ours * SCALE.get(press, lambda c: 1)(model().config)
    assert free.mean() > 0.7
    np.testing.assert_allclose(ours[free], theirs[free], rtol=1e-5, atol=1e-5 * np.abs(theirs[free]).max())


def decided(press: str) -> np.ndarray:
    """Boolean [L, K, T]: tokens that lie further from their cut than our scores are off."""
    keep = recorded()[f"{press}/keep"][:, 0, :, :T]
    if press in UNSCORED:
        # SnapKV's window has one score for all, of which torch keeps any.
        return np.arange(T)[None, None] + 0 * keep < (T - 64 if press == TIED else T)
    theirs = recorded()[f"{press}/scores"][:, 0].astype(np.float64)
    ours = scores(press) * SCALE.get(press, lambda c: 1)(model().config)
    free = np.isfinite(ours)
    error = np.abs(np.where(free, ours - theirs, 0)).max()
    theirs = np.where(free, theirs, np.inf)
    # The cut lies within a head, a layer or the stack, as the method chooses.
    axes = {
        "adakv_snapkv": (1, 2),
        "adakv_knorm": (1, 2),
        "kvzip": (0, 1, 2),
        "kvzip_plus": (0, 1, 2),
        "kvzip_layerwise": (1, 2),
        "kvgrad": (0, 1, 2),
        "restorekv": (0, 1, 2),
    }.get(press, (2,))
    worst_kept = np.where(keep, theirs, np.inf).min(axes, keepdims=True)
    best_gone = np.where(keep, -np.inf, theirs).max(axes, keepdims=True)
    return (theirs > best_gone + 2 * error) | (theirs < worst_kept - 2 * error)


@pytest.mark.parametrize("press", sweep(PRESSES, "streaming_llm"))
def test_kept_sets_equal_those_of_kvpress(press):
    ours, theirs, sure = kept(compressed(press)[1]), recorded()[f"{press}/keep"][:, 0, :, :T], decided(press)
    assert ours.sum() == theirs.sum()
    np.testing.assert_array_equal(ours[sure], theirs[sure])
    assert sure.mean() > (0.7 if press == TIED else 0.99)


@pytest.mark.rotating
@each
def test_the_next_token_sees_what_it_sees_in_kvpress(press):
    logits, cache = compressed(press)
    close(logits, recorded()["ref/logits_last"])
    token = jnp.asarray(recorded()["cont_id"][None], jnp.int32)
    run = Run(model().config, cache.method.decode_part())
    bare = dataclasses.replace(cache, method=None, model="")
    next_logits, _ = steps.step_keeping(run, model().params, bare, token, jnp.asarray([True]))
    close(next_logits, recorded()[f"{press}/logits_next"])


# --- decoding: every 8 steps down to 128 slots -----------------------------------------------------------

KNORM = lambda: kvjax.method("l2compress", budget=128, skip_layers=0)  # noqa: E731
DECODING = {
    "dec_knorm": (None, KNORM),
    "dec_tova": (
        None,
        lambda: Method(
            Keep(WindowAttention(1, heads="layer", hide_window=False), Budget(128), Uniform(), (Recent(1),))
        ),
    ),
    "prefill_dec_snapkv_knorm": (PRESSES["snapkv"], KNORM),
}


@pytest.mark.rotating
@pytest.mark.parametrize("press", DECODING)
def test_compressing_now_and_then_while_decoding_equals_kvpress(press):
    before, during = DECODING[press]
    method = during()
    _, cache = kvjax.prefill(
        model(), recorded()["ids"], method=before() if before else method, room=8, compress=before is not None
    )
    cache = dataclasses.replace(cache, method=method)
    want = dict(
        zip(recorded()[f"{press}/x/steps"].tolist(), recorded()[f"{press}/logits_steps"], strict=True)
    )
    for i, token in enumerate(recorded()[f"{press}/cont_ids"][0].tolist()):
        if i % 8 == 7:
            logits, cache = kvjax.prefill(model(), [[token]], cache=cache, room=8)
        else:
            logits, cache = kvjax.step(model(), cache, [token])
        if i in want:
            close(logits, want[i])
        live = {int((np.asarray(p)[0] >= 0).sum(-1).max()) for p in kvjax.kept_positions(cache)}
        assert live == set(recorded()[f"{press}/cache_len_steps"][i].tolist())
    theirs = recorded()[f"{press}/slot_positions"][:, 0]
    for lists, positions in zip(kvjax.kept_positions(cache), theirs, strict=True):
        for held, those in zip(np.asarray(lists)[0], positions, strict=True):
            assert set(held[held >= 0].tolist()) == set(those.tolist())
