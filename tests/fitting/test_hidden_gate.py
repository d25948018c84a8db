"""Fitted words: a gate fitted to KVzip's scores, its file, and the caches of methods that have one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import kvjax
from kvjax.base.errors import InputError
from kvjax.eval.tasks.sample import ForcedSample
from kvjax.fitting.gates.head_gates import distilled
from kvjax.fitting.merges.residue import ResidueBatch, missed
from kvjax.fitting.statistics.levels import felt
from kvjax.grammar import Method
from kvjax.grammar.fitted import SHIPPED, Fitted
from kvjax.keep.gates.gate import gated
from kvjax.methods import takes
from kvjax.steps.shared.run import Run
from tests.float64.merges import Less
from tests.float64.reference import Prompt, rms_norm, rope, softmax
from tests.methods.battery import MAIN, decoder, model, positions
from tests.methods.expected import GATE, GATE_THRESHOLD, GATES, KERNELS, PROFILE
from tests.methods.rows import PAGE, WINDOW

ROWS = [*MAIN.first, *MAIN.second]


def by_hand(rows):
    """Per layer the inputs [tokens, D] and the log of KVzip's scores [tokens, K], in float64."""
    inputs, targets = [[], []], [[], []]
    for row in rows:
        prompt, again = Prompt(decoder("4/2"), row), Prompt(decoder("4/2"), [*row, *row])
        t = len(row)
        for layer, p in enumerate(again.p):
            inputs[layer].append(prompt.hidden[layer])
            targets[layer].append(np.log(p[:, t:, :t].reshape(-1, prompt.group, t, t).max((1, 2))).T)
    return [np.concatenate(x) for x in inputs], [np.concatenate(y) for y in targets]


def test_a_linear_gate_is_the_least_squares_fit_to_the_logarithm_of_kvzips_scores():
    found = kvjax.fit(model("4/2"), "kvzap", ROWS, batch=8, ridge=0.0)
    for layer, (x, y) in enumerate(zip(*by_hand(ROWS), strict=True)):
        wide = np.concatenate([x, np.ones_like(x[:, :1])], 1)
        want = np.linalg.lstsq(wide, y, rcond=None)[0]
        got = np.vstack([found.arrays["out"][layer], found.arrays["out_bias"][layer]])
        np.testing.assert_allclose(wide @ got, wide @ want, atol=2e-3)


@pytest.mark.rotating
def test_a_gate_with_a_hidden_layer_learns_more_than_a_constant():
    found = kvjax.fit(model("4/2"), "kvzap", ROWS, batch=8, hidden=16, epochs=60, rate=1e-2)
    for layer, (x, y) in enumerate(zip(*by_hand(ROWS), strict=True)):
        arrays = {name: jnp.asarray(a[layer]) for name, a in found.arrays.items()}
        left = np.square(np.asarray(gated(arrays, jnp.asarray(x, jnp.float32))) - y).mean()
        assert left < 0.8 * y.var(0).mean()


def questions():
    """Three questions about contexts of MAIN, with answers of unequal length; what they need is made up."""
    contexts, spans = MAIN.first[:3], [((2, 5), (9, 11)), ((0, 4),), ((7, 8),)]
    answers = [(5, 6, 7), (9,), (3, 1)]
    each = zip(contexts, answers, spans, strict=True)
    return [ForcedSample("", "get", tuple(c), (4, 8), a, s) for c, a, s in each]


def test_a_retrieval_score_counts_answers_tokens_that_a_head_copies_from_what_they_need():
    m, rng = model("4/2"), np.random.default_rng(3)
    contexts = [tuple(rng.integers(0, 6, 20).tolist()) for _ in range(12)]
    samples = [ForcedSample("", "get", c, (4,), (c[1], c[2], c[7]), ((0, 4), (6, 14))) for c in contexts]
    found = kvjax.fit(m, "retrieval-head", samples).arrays["importance"]
    copied = np.zeros((2, 4))
    for one in samples:
        tokens = [*one.context, *one.question, *one.answer]
        prompt = Prompt(decoder("4/2"), tokens[:-1])
        for layer, head, i in np.ndindex(2, 4, 3):
            at = prompt.p[layer][head, len(tokens) - 4 + i].argmax()
            needed = any(start <= at < end for start, end in one.spans)
            copied[layer, head] += (needed and tokens[at] == one.answer[i]) / 3 / len(samples)
    assert (copied > 0).any() and len(np.unique(copied)) > 2
    np.testing.assert_allclose(found, copied.reshape(2, 2, 2).max(2), rtol=1e-5)


def test_heads_that_look_back_attend_to_the_same_token_or_to_what_followed_it():
    texts, repeats = [MAIN.first[0][:9], MAIN.first[1][:5]], 3
    found = kvjax.fit(model("4/2"), "razorattention", texts, tokens=7, repeats=repeats, seed=1).arrays
    rng, echo, induction = np.random.default_rng(1), np.zeros((2, 4)), np.zeros((2, 4))
    for text in texts:
        period = rng.permutation(np.asarray(text)[:7])
        t, prompt = len(period), Prompt(decoder("4/2"), np.tile(period, repeats).tolist())
        for layer in range(2):
            for i in range(t, repeats * t):
                earlier = np.arange(i - t, -1, -t)
                p = prompt.p[layer][:, i]
                echo[layer] += p[:, earlier].sum(-1) / (repeats - 1) / t / 2
                after = earlier + 1 if i % t < t - 1 else np.arange(i + 1 - t, -1, -t)
                induction[layer] += p[:, after].sum(-1) / (repeats - 1) / t / 2
    np.testing.assert_allclose(found["echo"], echo, rtol=1e-4)
    np.testing.assert_allclose(found["induction"], induction, rtol=1e-4)


@pytest.mark.rotating
def test_a_profile_is_the_attention_that_answers_pay_to_what_they_need():
    found = kvjax.fit(model("4/2"), "headkv", questions(), batch=2)
    want, all_of_it = np.zeros((2, 2)), np.zeros((2, 4))
    for one in questions():
        prompt = Prompt(decoder("4/2"), [*one.context, *one.question, *one.answer[:-1]])
        needed = [j for start, end in one.spans for j in range(start, end)]
        first = len(one.context) + len(one.question) - 1
        for layer, head, query in np.ndindex(2, 4, len(one.answer)):
            p = prompt.p[layer][head, first + query]
            most = np.argsort(-p)[: len(needed)]
            want[layer, head // 2] += p[np.intersect1d(most, needed)].sum() / len(needed) / 2
            all_of_it[layer, head] += p[needed].mean()
    assert (want > 0).all()
    np.testing.assert_allclose(found.arrays["importance"], want / 3, rtol=1e-5)
    assert kvjax.method("headkv", budget=0.5, fitted=found).id == "headkv"
    # CompressKV's heads: all attention to what is needed counts, for every query head.
    found = kvjax.fit(model("4/2"), "compresskv", questions(), batch=2)
    np.testing.assert_allclose(found.arrays["attention"], all_of_it / 3, rtol=1e-5)


def gated_by_hand(tokens, gates, sinks, recent):
    """Compute the last hidden states behind the norm, of a decoder whose heads are gated, in float64."""
    d = decoder("4/2")
    x, pos = d.rest["embed"][np.asarray(tokens)], np.arange(len(tokens))
    later, far = pos[None] > pos[:, None], (pos[:, None] - pos[None] >= recent) & (pos[None] >= sinks)
    for layer, gate in zip(d.layers, gates, strict=True):
        q, k, v = d.project(layer, x)
        q, k = (rope(y, pos, d.config.rope.theta) for y in (q, k))
        s = q @ np.repeat(k, 2, 0).swapaxes(1, 2) / np.sqrt(d.config.head_dim)
        whole, part = (softmax(np.where(hidden, -np.inf, s)) for hidden in (later, later | far))
        gate = np.repeat(gate, 2)[:, None, None]
        x = d.finish(layer, x, (gate * whole + (1 - gate) * part) @ np.repeat(v, 2, 0))
    return rms_norm(x, d.rest["norm"], d.config.norm_eps)


def test_gated_heads_change_hidden_states_as_much_as_by_hand():
    gates, rows = np.array([[0.2, 0.9], [0.6, 0.0]]), [r[:20] for r in MAIN.first[:3]]
    said = np.arange(20)[None] >= np.array([[17], [12], [19]])
    got = jax.jit(distilled, static_argnums=(0, 1))(
        model("4/2").config, (2, 5), model("4/2").params, jnp.asarray(gates, jnp.float32),
        jnp.asarray(rows, jnp.int32), jnp.full((3,), 20, jnp.int32), jnp.asarray(said),
    )  # fmt: skip
    apart = [gated_by_hand(r, gates, 2, 5) - gated_by_hand(r, np.ones((2, 2)), 2, 5) for r in rows]
    want = np.square(apart).mean(-1)[said].mean()
    assert want > 1e-4 and abs(got / want - 1) < 1e-3


@pytest.mark.rotating
def test_gates_close_where_nothing_is_missed_and_stay_open_without_a_penalty():
    options = dict(batch=3, epochs=3, rate=0.5, sinks=2)
    found = kvjax.fit(model("4/2"), "duoattention", questions(), recent=3, penalty=0.0, **options)
    assert (found.arrays["gates"] == 1).all()
    wide = kvjax.fit(model("4/2"), "duoattention", questions(), recent=99, **options)
    assert (wide.arrays["gates"] == 0).all()
    assert kvjax.method("duoattention", fitted=wide).keep.score.gates.fitted == wide


def missed_by_hand(tokens, cut, kept, kernels=None):
    """Per layer, what its output misses of the queries from `cut` on: means of squares, in float64.

    kept: per layer, boolean [K, cut]. kernels: those of a residue, for what is not kept.
    """
    prompt, found = Prompt(decoder("4/2"), tokens), []
    less = None if kernels is None else Less(kernels, prompt.decoder.config.rope.theta)
    for layer, weights in enumerate(prompt.decoder.layers):
        error = np.zeros((prompt.length - cut, 4, 16))
        for head, t in np.ndindex(4, prompt.length - cut):
            q, k, v = prompt.q[layer][head, cut + t], prompt.k[layer][head // 2], prompt.v[layer][head // 2]
            weight = np.exp(k[: cut + t + 1] @ q / 4)
            whole, weight[:cut][~kept[layer][head // 2]] = weight / weight.sum() @ v[: cut + t + 1], 0
            if less is not None:
                psi = np.stack([less.psi(x, layer, head // 2) for x in k[:cut]])
                asked = psi @ less.phi(q, layer, head)
                weight[:cut] = np.where(kept[layer][head // 2], weight[:cut], asked)
            error[t, head] = weight / weight.sum() @ v[: cut + t + 1] - whole
        found.append(np.square(error.reshape(len(error), -1) @ weights["o"]).mean())
    return np.array(found)


@pytest.mark.rotating
def test_what_kernels_miss_is_what_it_is_by_hand():
    row, cut, rng = [*MAIN.first[0], *MAIN.second[0]], 12, np.random.default_rng(1)
    kept = rng.random((2, 1, 2, len(row))) < 0.4
    batch = ResidueBatch(
        jnp.asarray([row], jnp.int32), jnp.asarray([len(row)], jnp.int32), jnp.asarray([cut], jnp.int32),
        jnp.asarray(kept),
    )  # fmt: skip
    m = model("4/2")
    got = jax.jit(missed, static_argnums=0)(Run(m.config, Method()), m.params, dict(KERNELS.arrays), batch)
    want = missed_by_hand(row, cut, kept[:, 0, :, :cut], KERNELS.arrays)
    assert (want > 1e-4).all()
    np.testing.assert_allclose(got, want, rtol=2e-4)


@pytest.mark.rotating
def test_fitted_kernels_miss_less_than_eviction_and_the_cut_is_what_the_method_keeps():
    text = [*MAIN.first[0], *MAIN.second[0]]
    options = dict(budget=0.25, hidden=16, rank=4, rate=1e-2)
    kernels = kvjax.fit(model("4/2"), "less", [text], epochs=60, **options)
    cut = len(text) // 2
    cache = kvjax.prefill(model("4/2"), [text[:cut]], method=kvjax.method("h2o", budget=0.25))[1]
    kept = [
        np.stack([np.isin(np.arange(cut), sorted(held)) for held in lists[0]]) for lists in positions(cache)
    ]
    after = missed_by_hand(text, cut, kept, kernels.arrays)
    assert (after < 0.7 * missed_by_hand(text, cut, kept)).all()


def test_kernels_are_fitted_under_the_budget_that_is_given():
    with pytest.raises(InputError, match=r"less has the budget 1\.0 .* as in budget=0\.25"):
        kvjax.fit(model("4/2"), "less", ROWS)
    with pytest.raises(InputError, match="kvzap does not depend on a budget"):
        kvjax.fit(model("4/2"), "kvzap", ROWS, budget=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(hidden=0), "hidden is 0, expected at least 1"),
        (dict(rank=1.5), "rank is 1.5"),
        (dict(epochs=0), "epochs is 0"),
        (dict(rate=float("nan")), "rate"),
        pytest.param(
            dict(rate=1e30, epochs=3, hidden=4), "is not finite: lower rate=", marks=pytest.mark.rotating
        ),
        (dict(budget=4000), "from what leaves heads of equal budgets, of 24 tokens at most"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        kvjax.fit(model("4/2"), "less", ROWS, **dict(budget=0.5) | options)


def test_a_gate_reads_the_contexts_of_questions():
    of_texts = kvjax.fit(model("4/2"), "kvzap", [q.context for q in questions()])
    assert kvjax.fit(model("4/2"), "kvzap", questions()) == of_texts


def test_a_fit_comes_back_from_its_file_and_is_told_from_others(tmp_path):
    kvjax.save_fitted(tmp_path / "gate.safetensors", GATE)
    assert kvjax.load_fitted(tmp_path / "gate.safetensors") == GATE
    other = dict(GATE.arrays) | {"out_bias": GATE.arrays["out_bias"] + 1e-6}
    assert Fitted(other, "HiddenGate", "") != GATE
    method = kvjax.method("kvzap", fitted=str(tmp_path / "gate.safetensors"))
    assert method.keep == kvjax.method("kvzap", fitted=GATE).keep


def without(arrays, name):
    return {n: x for n, x in arrays.items() if n != name}


CRAFTED = {
    "an axis more": (
        "kvzap",
        lambda a, n: a | {n: a[n][..., None]},
        "the arrays of .* are not those that",
    ),
    "a channel less": (
        "ccm",
        lambda a, n: a | {n: a[n][..., :-1]},
        "the arrays of .* are not those that",
    ),
    "one array less": ("attention-gate", without, "not those that its words read .KeyError: 'k'"),
    "more layers": (
        "dms",
        lambda a, n: a | {n: np.concatenate([a[n]] * 2)},
        "expected 1 or 4 layers first|are .8",
    ),
    "no numbers": ("duoattention", lambda a, n: a | {n: a[n] * np.nan}, "holds values that are no numbers"),
}


@pytest.mark.parametrize(("method", "change", "message"), CRAFTED.values(), ids=CRAFTED.keys())
def test_arrays_that_a_word_does_not_read_are_refused_in_one_line(method, change, message, tmp_path):
    known = kvjax.load_fitted(SHIPPED / f"recall-tiny/{method}.safetensors")
    arrays = change(dict(known.arrays), min(known.arrays))
    kvjax.save_fitted(tmp_path / "x.safetensors", dataclasses.replace(known, arrays=arrays))
    tiny = kvjax.load("recall-tiny")
    with pytest.raises(InputError, match=message) as caught:
        given = {"budget": 0.5} if takes(method, "budget") else {}
        given |= {"fitted": str(tmp_path / "x.safetensors")}
        kvjax.prefill(tiny, [list(range(3, 67))], method=kvjax.method(method, **given))
    assert "\n" not in str(caught.value)


def test_a_file_of_fitted_arrays_without_its_texts_is_refused(tmp_path):
    save_file({"a": np.zeros(3)}, tmp_path / "x.safetensors", {"kind": "kvjax fitted arrays"})
    with pytest.raises(InputError, match="holds no fitted arrays, expected what `kvjax fit` writes"):
        kvjax.load_fitted(tmp_path / "x.safetensors")


@pytest.fixture
def filled(tmp_path):
    """Fill a cache whose method has a gate from a file; return it and that file."""
    path = tmp_path / "gate.safetensors"
    kvjax.save_fitted(path, GATE)
    method = kvjax.method("kvzap", fitted=str(path), threshold=GATE_THRESHOLD, window=WINDOW, page=PAGE)
    return kvjax.prefill(model("4/2"), MAIN.first, method=method, room=4)[1], path


@pytest.mark.rotating
def test_a_saved_cache_finds_its_gate_again_and_refuses_another_one(filled, tmp_path):
    cache, path = filled
    kvjax.save_cache(tmp_path / "a.cache", cache)
    assert kvjax.load_cache(tmp_path / "a.cache").method == cache.method
    kvjax.save_fitted(path, dataclasses.replace(GATE, model="another"))
    with pytest.raises(InputError, match="was filled with other fitted arrays"):
        kvjax.load_cache(tmp_path / "a.cache")


@pytest.mark.rotating
def test_a_loop_of_ones_own_is_given_the_arrays(filled):
    cache, _ = filled
    static = kvjax.pure.static(model("4/2"), cache.method)
    step = jax.jit(kvjax.pure.step, static_argnums=0)
    tokens, fitted = jnp.asarray(MAIN.steps[0], jnp.int32), kvjax.pure.fitted(cache.method)
    got, _ = step(static, model("4/2").params, cache, tokens, fitted=fitted)
    want, _ = kvjax.step(model("4/2"), cache, MAIN.steps[0])
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.rotating
def test_how_much_stays_follows_from_the_text():
    """Pools hold as many pages as the lists of this text fill."""

    def bytes_at(threshold):
        method = kvjax.method("kvzap", fitted=GATE, threshold=threshold, window=WINDOW, page=PAGE)
        return kvjax.nbytes(kvjax.prefill(model("4/2"), MAIN.first, method=method, room=4)[1])

    sizes = [bytes_at(t) for t in (-90.0, GATE_THRESHOLD, 90.0)]
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.parametrize(
    ("method", "rows", "message"),
    [
        ("full", ROWS, "full has no word that is fitted, expected a method such as kvzap"),
        ("xquant", ROWS, "xquant has no word that is fitted, expected a method such as kvzap"),
        ("kvzap", [[]], "no tokens were given to fit on"),
        ("headkv", ROWS, "headkv learns from questions with answers .* fit it on tasks such as get"),
    ],
)
def test_what_cannot_be_fitted_is_refused(method, rows, message):
    with pytest.raises(InputError, match=message):
        kvjax.fit(model("4/2"), method, rows)


def test_an_option_that_a_fit_does_not_have_is_refused():
    with pytest.raises(InputError, match="what is fitted for headkv has no option 'hidden', it takes none"):
        kvjax.fit(model("4/2"), "headkv", questions(), hidden=8)


@pytest.mark.parametrize(
    ("method", "hyper"),
    [
        ("kvzap", {}),
        ("headkv", dict(budget=8, window=4)),
        ("duoattention", {}),
        ("less", dict(budget=8)),
        ("kvquant", {}),
    ],
)
def test_what_was_never_fitted_says_which_command_fits_it(method, hyper):
    with pytest.raises(InputError, match=f"run `kvjax fit {method}"):
        kvjax.prefill(model("4/2"), MAIN.first, method=kvjax.method(method, **hyper))


def test_a_gate_of_another_model_is_refused():
    with pytest.raises(InputError, match=r"another model: .* are \(2, 2\), this model's are \(2, 3\)"):
        kvjax.prefill(model("6/3"), MAIN.first, method=kvjax.method("kvzap", fitted=GATE))
    profiled = kvjax.method("headkv", budget=8, window=4, fitted=PROFILE)
    for method in (profiled, kvjax.method("duoattention", fitted=GATES)):
        with pytest.raises(InputError, match=r"another model: .* are \(2, 2\), this model's are \(2, 3\)"):
            kvjax.prefill(model("6/3"), MAIN.first, method=method)


@pytest.mark.parametrize("content", [None, b"x" * 20])
def test_a_file_that_holds_no_fit_is_refused(content, tmp_path):
    path = tmp_path / "gate.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match="gate.safetensors (does not exist|is damaged)"):
        kvjax.method("kvzap", fitted=str(path))


def loss_by_hand(tokens, where=None, layer=0, at=(), by=0.0):
    """Compute a text's -log p in float64, with `by` added to a number of a layer's k or v."""
    d, pos = decoder("4/2"), np.arange(len(tokens))
    x = d.rest["embed"][np.asarray(tokens)]
    for number, weights in enumerate(d.layers):
        q, k, v = (np.array(y) for y in d.project(weights, x))
        if number == layer and where is not None:
            dict(k=k, v=v)[where][at] += by
        q, k = (rope(y, pos, d.config.rope.theta) for y in (q, k))
        s = q @ np.repeat(k, 2, 0).swapaxes(1, 2) / np.sqrt(d.config.head_dim)
        p = softmax(np.where(pos[None] > pos[:, None], -np.inf, s))
        x = d.finish(weights, x, p @ np.repeat(v, 2, 0))
    said = softmax(d.logits(x))[pos[:-1], np.asarray(tokens)[1:]]
    return -np.log(said).sum()


@functools.cache
def felt_of(first):
    """Return what four texts feel of keys and values, in the shapes in which a fit reads them; and these."""
    m, rows = model("4/2"), MAIN.first if first else MAIN.second
    tokens = jnp.asarray([r + [0] * (32 - len(r)) for r in rows], jnp.int32)
    numbers, slope = felt(m.config, m.params, tokens, jnp.asarray([len(r) for r in rows], jnp.int32))
    return jax.tree.map(lambda x: np.asarray(x, np.float64), (numbers, slope))


def test_what_a_text_feels_of_keys_and_values_is_the_slope_of_its_likelihood():
    (numbers, slope), b = felt_of(True), 3
    row = MAIN.first[b]
    prompt = Prompt(decoder("4/2"), row)
    for layer in range(2):
        np.testing.assert_allclose(numbers.k[layer, b, :, : len(row)], prompt.raw_k[layer], atol=1e-5)
        for where, head, t, channel in (("k", 0, 2, 5), ("k", 1, 7, 0), ("v", 0, 0, 3), ("v", 1, 5, 9)):
            at, step = (head, t, channel), 1e-5
            ends = [loss_by_hand(row, where, layer, at, by) for by in (step, -step)]
            got = getattr(slope, where)[layer, b, head, t, channel]
            np.testing.assert_allclose(got, (ends[0] - ends[1]) / (2 * step), atol=1e-4)
    assert not slope.k[:, b, :, len(row) :].any()


def brought(x, feeling, layer, arrays):
    """Keys and values [B, K, T, H] of texts within [-1, 1], each with its weight: a pair of each per kind."""
    size = arrays["key range"][layer][:, None].astype(float)
    k = (x.k[layer] - arrays["key centre"][layer][:, None]) / size
    inner = np.sort(x.v[layer], -1)[..., 1:-1]
    spread = (inner[..., -1:] - inner[..., :1]) / 2
    v = (x.v[layer] - inner[..., :1]) / spread - 1
    pairs = {"key": (k, feeling.k[layer] * size), "value": (v, feeling.v[layer] * spread)}
    return {name: (y, w**2, np.abs(y) <= 1 + 1e-6) for name, (y, w) in pairs.items()}


def test_levels_are_fitted_to_what_lies_within_the_quantiles_by_what_is_felt():
    """First tokens do not count; of a channel's other numbers, 3 at each end are beyond its range."""
    found = kvjax.fit(model("4/2"), "kvquant", ROWS, bits=3, outliers=0.05).arrays
    assert int(0.025 * (sum(map(len, ROWS)) - len(ROWS))) == 3
    texts, sets = [felt_of(first) for first in (True, False)], {}
    live = [np.arange(1, 32)[None] < np.array([[len(r)] for r in rows]) for rows in (ROWS[:4], ROWS[4:])]
    for layer in range(2):
        k = [
            np.moveaxis(x.k[layer][:, :, 1:], 1, 2)[counts]
            for (x, _), counts in zip(texts, live, strict=True)
        ]
        k = np.sort(np.concatenate(k), 0)
        np.testing.assert_allclose(found["key centre"][layer], (k[-4] + k[3]) / 2, atol=1e-5)
        np.testing.assert_allclose(found["key range"][layer], (k[-4] - k[3]) / 2, atol=1e-5)
        for (x, feeling), counts in zip(texts, live, strict=True):
            for name, (y, w, inside) in brought(x, feeling, layer, found).items():
                y, w, inside = (np.moveaxis(a[:, :, 1:], 1, 2)[counts] for a in (y, w, inside))
                sets.setdefault((name, layer), []).append(np.stack([y[inside], w[inside]]))
    for (name, layer), pairs in sets.items():
        x, w = np.concatenate(pairs, 1)
        left = lambda levels, x=x, w=w: (w * np.square(x[:, None] - levels).min(1)).sum()  # noqa: E731
        mine, best = left(found[f"{name} levels"][layer]), np.inf
        for seed in range(4):
            levels = np.random.default_rng(seed).choice(x, 8, replace=False)
            for _ in range(30):
                nearest = np.abs(x[:, None] - levels).argmin(1)
                mass = np.bincount(nearest, w, 8)
                levels = np.where(mass > 0, np.bincount(nearest, w * x, 8) / np.maximum(mass, 1e-300), levels)
            best = min(best, left(levels))
        # No more than Lloyd's best of several starts, but for the bins.
        assert mine < 1.01 * best and mine < 0.9 * left(np.linspace(-1, 1, 8))
