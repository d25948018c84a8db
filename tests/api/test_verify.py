"""Several tokens in one pass are single steps: logits, caches, and what is refused because it is not so."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.api.rollback import rollback
from kvjax.api.verify import verify
from kvjax.base.errors import InputError
from kvjax.grammar.when import PREFILL_END
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.ops.base.rope import Rope
from kvjax.state.cache import check_alive, nbytes
from kvjax.steps import Run
from kvjax.words import Affine, Method, Store
from tests.compilation import optimised
from tests.float64.drafts import DRAFT, UNEVEN, WIDTH, close, same, started, stepped
from tests.methods.battery import BY_LABEL, MAIN, model
from tests.models.conversation import TEXTS
from tests.models.conversation import model as architecture
from tests.sweep import sweep


def row(label):
    """Return a row of the table of methods: the name of its model, and the method."""
    return BY_LABEL[label].model, BY_LABEL[label].method()


def at_end(label):
    """Evict slots at the end of prompts alone, and do the rest the same."""
    name, method = row(label)
    return name, dataclasses.replace(method, keep=dataclasses.replace(method.keep, when=PREFILL_END), spec=())


def by_layer(*labels):
    return "4/2", kvjax.by_layer([row(label)[1] for label in labels])


ROWS = (
    "full", "random", "l2compress", "snapkv", "snapkv windowed", "pyramidkv", "cake", "adakv", "kvzip",
    "int8", "int4", "kivi", "snapkv + kivi", "adakv + int4", "fastkv", "gemfilter", "turboquant",
    "quest", "adakv + quest", "rocketkv", "moba fitted", "nsa", "shadowkv", "tailorkv", "reattention",
    "sparq", "magicpig", "loki", "hcattention", "top-theta", "clusterkv", "retroinfer", "a2ats", "sentencekv",
)  # fmt: skip
ENDING = ("streamingllm", "h2o", "kvzap", "less", "keepkv", "mikv", "lagkv")
CASES = {
    **{label: (row, label) for label in ROWS},
    **{f"{label} at the end": (at_end, label) for label in ENDING},
    "granules below pages": (by_layer, "kivi", "adakv"),
    "codes below prompts": (by_layer, "int8", "criticalkv"),
    # Scales are powers of two: some float16 ones lie so near the edge between two that a last bit decides.
    "mxfp4 windowed": (lambda: ("windowed", kvjax.method("mxfp4", block=16)),),
}
ALWAYS = ("less at the end",)


def case(name):
    build, *labels = CASES[name]
    where, method = build(*labels)
    return model(where), method


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(CASES, *ALWAYS))
def test_a_pass_gives_the_logits_and_the_cache_of_single_steps(name):
    m, method = case(name)
    cache = started(m, method)
    want, walked = stepped(m, cache, DRAFT, UNEVEN)
    got, read = verify(m, cache, DRAFT, lengths=UNEVEN)
    drafted = np.arange(WIDTH) < UNEVEN[:, None]
    assert got.shape == want.shape
    close(np.asarray(got)[drafted], want[drafted])
    same(read, walked)


# Memories of every kind: states, latents, slots of other layers, windows.
STORED = [("tpa", "int8"), ("mla", "int8"), ("mixattention", "int8"), ("lckv", "int8"), ("clla", "kivi")]
READ = [(name, "quest") for name in ("mla", "mixattention", "lckv", "clla", "jamba", "sinks")]
OPTIONS = {"kivi": dict(group=2, residual=4), "quest": dict(budget=0.5, page=3, skip_layers=0)}
PLAIN = [
    (name, "full")
    for name in (
        "retnet", "mamba-2", "gsa", "infini", "rwkv-7", "goldfinch", "kimi linear", "jamba", "yoco", "lisa",
        "mixattention", "lckv", "svformer", "swiftkv", "attention dropped", "sinks", "log-linear mamba-2",
    )
]  # fmt: skip


@pytest.mark.rotating
@pytest.mark.parametrize(("name", "store"), sweep([*PLAIN, *STORED, *READ], ("jamba", "full")))
def test_every_memory_of_an_architecture_takes_several_tokens(name, store):
    m, counts = architecture(name), np.array([11, 6, 9])
    method = kvjax.method(store, **OPTIONS.get(store, {}))
    _, cache = kvjax.prefill(m, TEXTS[:3, :9], lengths=[9, 4, 7], method=method, room=24)
    want, walked = stepped(m, cache, TEXTS[:3, 9:20], counts)
    got, read = verify(m, cache, TEXTS[:3, 9:20], lengths=counts)
    drafted = np.arange(11) < counts[:, None]
    close(np.asarray(got)[drafted], want[drafted])
    same(read, walked)


@pytest.mark.rotating
@pytest.mark.parametrize("label", sweep(["quest", "adakv + quest", "reattention"], "quest"))
def test_copies_of_a_row_pick_what_each_of_them_reads(label):
    where, method = row(label)
    m, tokens = model(where), np.random.default_rng(0).integers(0, 60, (8, 6)).astype(np.int32)
    first = started(m, method, room=20)
    want, _ = stepped(m, kvjax.fork(first, 2), tokens, np.full(8, 6))
    got, _ = kvjax.verify(m, kvjax.fork(first, 2), tokens)
    close(got, want)


# --- programs, memory, room ---------------------------------------------------------------------------


@pytest.mark.rotating
def test_numbers_of_tokens_that_share_a_width_share_a_program():
    m = model("4/2")
    cache, before = started(m, None, room=40), steps.verify._cache_size()
    for count in (5, 7, 8, 6):
        logits, cache = kvjax.verify(m, cache, DRAFT[:, :count])
        assert logits.shape[1] == count
    assert steps.verify._cache_size() - before == 1


@pytest.mark.parametrize(
    ("method", "widths"),
    [
        (Method(store=Store(Affine(8), Affine(8), 4)), [1] * 7),
        (kvjax.method("kivi", group=2, residual=4), [2, 2, 2, 2]),
    ],
    ids=["granules of one", "granules of two"],
)
def test_a_pass_computes_no_more_tokens_than_fit_before_a_flush(method, widths, monkeypatch):
    m, computed, plain = model("4/2"), [], steps.verify
    _, cache = kvjax.prefill(m, MAIN.first, method=method, room=9)
    _, other = kvjax.prefill(m, MAIN.first, method=method, room=9)

    def counted(run, params, cache, tokens, lengths, picking):
        computed.append(tokens.shape[1])
        return plain(run, params, cache, tokens, lengths, picking)

    monkeypatch.setattr(steps, "verify", counted)
    got, _ = verify(m, cache, DRAFT[:, :7])
    want, _ = stepped(m, other, DRAFT[:, :7], np.full(len(DRAFT), 7))
    close(np.asarray(got), want)
    assert computed == widths


@pytest.mark.rotating
def test_a_pass_consumes_its_cache_and_hands_its_memory_on():
    m = model("4/2")
    cache = started(m, None)
    kvjax.verify(m, cache, DRAFT)
    with pytest.raises(InputError, match="was consumed by"):
        kvjax.verify(m, cache, DRAFT)
    large = Config(vocab=32, d_model=16, layers=2, heads=2, kv_heads=2, head_dim=16, d_ff=16)
    shape, params = jax.ShapeDtypeStruct, jax.eval_shape(lambda: init(large, jax.random.key(0)))
    text, length = shape((1, 8192), jnp.int32), shape((1,), jnp.int32)
    run = Run(large, kvjax.method("full"))
    _, cache = jax.eval_shape(
        lambda p, t, n: steps.prefill(run, p, t, n, None, tokens_bound=8192, room=8, compress=True),
        params, text, length,
    )  # fmt: skip
    run = run._replace(method=run.method.decode_part())
    with optimised(True):
        compiled = steps.verify.lower(run, params, cache, shape((1, 8), jnp.int32), length).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= 0.99 * nbytes(cache)


@pytest.mark.rotating
@pytest.mark.parametrize("label", sweep(["full", "kivi", "adakv"], "full"))
def test_a_pass_takes_what_fits_and_refuses_one_token_more(label):
    m, method = model("4/2"), row(label)[1]
    cache = started(m, method)
    fit = int(
        np.asarray(kvjax.api.chunks.tokens_that_fit(Run(m.config, method).groups(m.params), cache)).min()
    )
    tokens = np.resize(DRAFT, (4, fit + 1))
    with pytest.raises(InputError, match=rf"{fit + 1} tokens .* room for {fit} more: .*room="):
        kvjax.verify(m, cache, tokens)
    _, cache = kvjax.verify(m, cache, tokens[:, :1])
    _, cache = kvjax.verify(m, cache, tokens[:, 1:fit])
    with pytest.raises(InputError, match="the cache is full"):
        kvjax.step(m, cache, tokens[:, fit])


# --- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "why"),
    sweep(
        [
            ("h2o", "slots leave while tokens are added"),
            ("r-kv", "slots leave while tokens are added"),
            ("recycled-attention", "what a token reads depends on what the tokens before it read"),
            ("specache", "what a token reads depends on what the tokens before it read"),
            ("h2o + quest", "what slots receive is recorded after every token"),
            ("tidaldecode", "layers read what other layers pick"),
            ("infinigen", "layers pick by what enters the layers below"),
        ],
        ("h2o", "slots leave while tokens are added"),
    ),
)
def test_methods_of_which_one_pass_is_not_single_steps_are_refused_before_anything_runs(label, why):
    where, method = row(label)
    m, cache = model(where), started(model(where), method)
    with pytest.raises(
        InputError, match=rf"{re.escape(label)} cannot take 12 tokens in one pass: .*{why}.*kvjax.step"
    ):
        kvjax.verify(m, cache, DRAFT)
    check_alive(cache)


@pytest.mark.rotating
def test_a_read_beside_an_indexer_is_refused():
    m = architecture("indexed latents")
    _, cache = kvjax.prefill(m, TEXTS[:1, :9], method=kvjax.method("quest", **OPTIONS["quest"]), room=8)
    with pytest.raises(InputError, match="an indexer picks tokens before the read does"):
        kvjax.verify(m, cache, TEXTS[:1, 9:12])


@pytest.mark.rotating
def test_encoded_states_and_rotations_that_grow_are_refused():
    m = architecture("retnet")
    _, cache = kvjax.prefill(m, TEXTS[:1, :4], method="int8", room=8)
    with pytest.raises(InputError, match="a step encodes the states of recurrent layers"):
        kvjax.verify(m, cache, TEXTS[:1, 4:6])
    config = dataclasses.replace(model("4/2").config, rope=Rope(kind="dynamic", factor=2.0, original_max=20))
    growing = Model(config, model("4/2").params)
    _, cache = kvjax.prefill(growing, [[1] * 16], room=8)
    logits, cache = kvjax.verify(growing, kvjax.fork(cache, 1), DRAFT[:1, :4])
    with pytest.raises(InputError, match="beyond 20 tokens this model's rotation grows"):
        kvjax.verify(growing, cache, DRAFT[:1, :1])


def test_wrong_tokens_are_refused():
    m = model("4/2")
    cache = started(m, None)
    with pytest.raises(InputError, match=r"1 rows of \[2\] tokens, the cache 4 rows"):
        kvjax.verify(m, cache, [[1, 2]])
    with pytest.raises(InputError, match=r"\[0, 0, 0, 0\] tokens, .*at least one token"):
        kvjax.verify(m, cache, DRAFT, lengths=[0] * 4)
    with pytest.raises(InputError, match="token id 64 is outside the vocabulary"):
        kvjax.verify(m, cache, [[64]] * 4)
    short = Model(dataclasses.replace(m.config, max_positions=36), m.params)
    with pytest.raises(
        InputError, match="12 tokens were given and the model has 4 positions after this cache"
    ):
        kvjax.verify(short, kvjax.prefill(short, MAIN.first, room=12)[1], DRAFT)


# --- drafts that are taken back -----------------------------------------------------------------------


def test_one_token_and_a_draft_of_which_some_is_taken_back_are_a_plain_loop():
    m, method = case("snapkv")
    first = started(m, method, room=WIDTH + 8)
    want, plain = stepped(m, first, DRAFT[:, :5], [5] * 4)
    _, cache = kvjax.step(m, first, DRAFT[:, 0])
    got, cache = kvjax.verify(m, cache, DRAFT[:, 1:4])
    close(got, want[:, 1:4])
    wrong, cache = kvjax.verify(m, cache, (DRAFT[:, 4:7] + 1) % 64)
    cache = rollback(cache, 3)
    logits, cache = kvjax.step(m, cache, DRAFT[:, 4])
    close(logits, want[:, 4])
    assert np.abs(np.asarray(wrong)[:, 0] - want[:, 4]).max() > 0.1
    same(cache, plain)
