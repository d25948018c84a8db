"""Generation: the loop, the sampler, stop tokens, and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.api.chunks import bucket
from kvjax.api.sampling import Sampler
from kvjax.base.errors import InputError
from kvjax.commands.main import main
from kvjax.grammar.fitted import SHIPPED, is_fitted
from kvjax.io.gin_bindings import load_preset
from kvjax.methods import takes_budget
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from tests.sweep import sweep

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2]]


@pytest.fixture(scope="module")
def model():
    config = Config(
        vocab=32, d_model=32, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=48, max_positions=64
    )
    return Model(config, init(config, jax.random.key(5)))


@pytest.fixture(scope="module")
def greedy(model):
    return kvjax.generate(model, PROMPTS, max_new_tokens=6)


def test_buckets_hold_the_tokens_and_waste_little():
    sizes = np.arange(1, 3000)
    buckets = np.array([bucket(int(n)) for n in sizes])
    assert (buckets >= sizes).all() and (np.diff(buckets) >= 0).all()
    assert (buckets - sizes < np.maximum(16, sizes / 7)).all()
    assert len(set(buckets)) < 60


@pytest.mark.rotating
def test_greedy_generation_is_the_argmax_of_the_whole_text_at_every_token(model, greedy):
    for prompt, tokens, logprobs in zip(PROMPTS, greedy.tokens, greedy.logprobs, strict=True):
        text = [*prompt, *np.asarray(tokens).tolist()]
        logits = np.asarray(model(np.array([text])), np.float64)[0, len(prompt) - 1 : -1]
        np.testing.assert_array_equal(logits.argmax(-1), tokens)
        shifted = logits - logits.max(-1, keepdims=True)
        want = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        np.testing.assert_allclose(logprobs, want[np.arange(len(tokens)), tokens], atol=1e-4)


@pytest.mark.rotating
def test_a_row_writes_the_same_alone(model, greedy):
    alone = kvjax.generate(model, PROMPTS[1:], max_new_tokens=6)
    np.testing.assert_array_equal(alone.tokens[0], greedy.tokens[1])


def test_a_row_ends_at_its_stop_token_which_is_in_the_cache(model, greedy):
    tokens = np.asarray(greedy.tokens)
    at, stop = 1, int(tokens[0, 1])
    assert stop not in tokens[0, :at] and stop not in tokens[1]
    out = kvjax.generate(model, PROMPTS, max_new_tokens=6, stop=[stop])
    np.testing.assert_array_equal(out.tokens[0], [*tokens[0, : at + 1], *[stop] * (5 - at)])
    assert out.lengths.tolist() == [at + 1, 6] and out.texts is None
    np.testing.assert_array_equal(out.tokens[1], tokens[1])
    assert (out.logprobs[0, at + 1 :] == 0).all()
    assert out.cache.next.tolist() == [len(PROMPTS[0]) + at + 1, len(PROMPTS[1]) + 6]


@pytest.mark.rotating
def test_generation_ends_early_when_every_row_has_stopped(model, greedy):
    seen, tokens = [], np.asarray(greedy.tokens)
    stop = [int(tokens[0, 1]), int(tokens[1, 2])]
    out = kvjax.generate(
        model, PROMPTS, max_new_tokens=6, stop=stop, on_token=lambda i, t: seen.append((i, t.tolist()))
    )
    assert [i for i, _ in seen] == [0, 1, 2] and out.tokens.shape == (2, 6)
    assert out.lengths.tolist() == [2, 3] and seen[-1][1][0] == -1
    assert [t[1] for _, t in seen] == np.asarray(out.tokens)[1, :3].tolist()


@pytest.mark.rotating
def test_a_conversation_goes_on_with_the_cache_of_what_was_written(model, greedy):
    more = [[1, 2, 3], [4]]
    again = kvjax.generate(model, more, cache=greedy.cache, max_new_tokens=2)
    whole = [[*p, *np.asarray(t).tolist(), *m] for p, t, m in zip(PROMPTS, greedy.tokens, more, strict=True)]
    fresh = kvjax.generate(model, whole, max_new_tokens=2)
    np.testing.assert_array_equal(again.tokens, fresh.tokens)


# --- sampling -----------------------------------------------------------------------------------------


def keys(count):
    return jax.vmap(lambda i: jax.random.fold_in(jax.random.key(7), i))(jnp.arange(count))


def frequencies(sampler, logits, draws=4000):
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (draws, len(logits)))
    tokens, logprobs = jax.jit(lambda x, k: sampler(x, k))(rows, keys(draws))
    want = np.asarray(logits) - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(logprobs, want[np.asarray(tokens)], atol=1e-5)
    return np.bincount(np.asarray(tokens), minlength=len(logits)) / draws


LOGITS = np.array([0.5, 2.0, 1.5, -1.0, 1.0])


def softmax(x):
    return np.exp(x) / np.exp(x).sum()


@pytest.mark.rotating
@pytest.mark.parametrize(
    "sampler, allowed",
    [
        (Sampler(1.0), [0, 1, 2, 3, 4]),
        (Sampler(0.5), [0, 1, 2, 3, 4]),
        (Sampler(1.0, top_k=2), [1, 2]),
        # The two likeliest have 0.72 of the mass: the third is needed to reach 0.75, the fourth is not.
        (Sampler(1.0, top_p=0.75), [1, 2, 4]),
        (Sampler(2.0, top_k=3, top_p=0.99), [1, 2, 4]),
    ],
    ids=str,
)
def test_draws_follow_the_filtered_softmax(sampler, allowed):
    mask = np.isin(np.arange(5), allowed)
    p = softmax(np.where(mask, LOGITS / sampler.temperature, -np.inf))
    found = frequencies(sampler, LOGITS)
    assert (found[~mask] == 0).all()
    assert (np.abs(found - p) < 4 * np.sqrt(p * (1 - p) / 4000) + 1e-9).all()


@pytest.mark.rotating
@pytest.mark.parametrize("temperature", sweep([1e-10, 1e-37, 1e-40, 1e-300], 1e-40))
def test_a_temperature_near_zero_takes_the_likeliest(temperature):
    logits = jnp.asarray([[0.5, 3.0, -1.0, 2.9], [-9.0, -7.0, -0.5, -jnp.inf]])
    for sampler in (Sampler(temperature), Sampler(temperature, top_k=3, top_p=0.9)):
        for seed in range(5):
            token, logprob = sampler(logits, jax.random.split(jax.random.key(seed), 2))
            assert token.tolist() == [1, 2] and np.isfinite(logprob).all()


def test_temperature_zero_takes_the_likeliest():
    assert frequencies(Sampler(), LOGITS, draws=10)[1] == 1


@pytest.mark.rotating
def test_draws_are_reproducible_and_differ_between_rows_and_keys(model):
    same = [PROMPTS[0]] * 3
    draw = lambda key: np.asarray(  # noqa: E731
        kvjax.generate(model, same, max_new_tokens=6, sampler=Sampler(1.0), key=jax.random.key(key)).tokens
    )
    first = draw(0)
    np.testing.assert_array_equal(first, draw(0))
    assert (first != draw(1)).any() and len({tuple(row) for row in first.tolist()}) == 3


@pytest.mark.parametrize("wrong", [dict(temperature=-1.0), dict(top_k=0), dict(top_p=0.0), dict(top_p=1.5)])
def test_samplers_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampler(**wrong)


# --- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens, options, message",
    [
        ([[1, 99]], {}, r"token id 99 is outside the vocabulary \[0, 32\)"),
        ([[1, -2]], {}, "token id -2 is outside"),
        ([[1], []], {}, "a prompt here is empty"),
        (np.zeros((0, 3), int), {}, "at least one token"),
        (np.array([1, 2]), {}, r"wrap a single prompt as \[\[...\]\]"),
        (np.array([[0.5]]), {}, "must be integers"),
        ([[1] * 65], {}, "position 65, this model's last is 64"),
        (np.ones((2, 3), int), dict(lengths=[4, 1]), "at most T = 3"),
        ([[1, 2]], dict(lengths=[2]), "lengths= goes with a padded array"),
        ([[1] * 20], dict(method="snapkv"), "budget"),
        ([[1] * 20], dict(chunk=0), "chunk is 0, expected at least 1"),
    ],
)
def test_prompts_that_cannot_be_read_say_why(model, tokens, options, message):
    with pytest.raises(ValueError, match=message):
        kvjax.prefill(model, tokens, **options)


def test_a_window_larger_than_the_budget_is_refused(model):
    with pytest.raises(InputError, match=r"16 of 20 tokens must stay .* more than the budget of 10"):
        kvjax.prefill(model, [[1] * 20], method=kvjax.method("snapkv", budget=0.5, window=16))


def test_a_cache_stays_with_its_model_and_its_method(model, greedy):
    other = Model(model.config, init(model.config, jax.random.key(1)))
    with pytest.raises(InputError, match="filled by another model"):
        kvjax.prefill(other, [[1], [2]], cache=greedy.cache)
    with pytest.raises(InputError, match="a cache continues with"):
        kvjax.prefill(model, [[1], [2]], cache=greedy.cache, method=kvjax.method("h2o", budget=4))
    kvjax.prefill(model, [[1], [2]], cache=greedy.cache, method=kvjax.method("full"))
    kvjax.prefill(model, [[1], [2]], cache=greedy.cache, method="full")


def test_more_tokens_than_positions_are_refused_before_the_prompt_is_read(model, greedy, monkeypatch):
    says = "would reach position {}, this model's last is 64: lower max_new_tokens to {}"
    longer = kvjax.prefill(model, [[1] * 20] * 2)[1]
    monkeypatch.setattr("kvjax.api.generate.read_prompt", None)
    with pytest.raises(InputError, match=says.format(70, 44)):
        kvjax.generate(model, [[1] * 20], max_new_tokens=50)
    with pytest.raises(InputError, match=says.format(75, 39)):
        kvjax.generate(model, [[1] * 5, [1]], cache=longer, max_new_tokens=50)
    with pytest.raises(InputError, match="the prompt reaches position 65, this model's last is 64"):
        kvjax.generate(model, [[1] * 65], max_new_tokens=1)


@pytest.mark.rotating
def test_padding_decodes_and_texts_leave_stop_tokens_out():
    model = kvjax.load("bytes-tiny")
    prompts = [model.tokenizer.encode(text).ids for text in ("def f(x):\n    return", "import")]
    free = np.asarray(kvjax.generate(model, prompts, max_new_tokens=6).tokens)
    stop = int(next(i for i in free[0, 1:] if i not in free[1]))
    out = kvjax.generate(model, prompts, max_new_tokens=6, stop=[stop])
    size = free[0].tolist().index(stop) + 1
    assert out.lengths.tolist() == [size, 6] and out.tokens.shape == (2, 6)
    assert out.tokens[0].tolist() == [*free[0, :size].tolist(), *[stop] * (6 - size)]
    model.tokenizer.decode(out.tokens[0].tolist())
    assert out.texts == [
        model.tokenizer.decode(free[0, : size - 1].tolist()),
        model.tokenizer.decode(free[1].tolist()),
    ]
    padded = dataclasses.replace(model, special_tokens={"pad_token": "<|end|>"})
    assert kvjax.generate(padded, prompts, max_new_tokens=6, stop=[stop]).tokens[0, -1] == 256


SHIPPED_FITS = sorted(path.stem for path in (SHIPPED / "recall-tiny").glob("*.safetensors"))
# They make another model of the given one, and `generate` hands that to `prefill`.
MAKING = ("chai", "kvsharer", "neurocache")


@pytest.fixture(scope="module")
def recall():
    return kvjax.load("recall-tiny")


def fitted_method(id):
    given = load_preset("short").get(id, {}) | ({"budget": 0.75} if takes_budget(id) else {})
    return kvjax.method(id, **given)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "id", [*MAKING, *(pytest.param(x, marks=pytest.mark.rotating) for x in SHIPPED_FITS if x not in MAKING)]
)
def test_a_method_with_a_shipped_fit_writes_what_its_prefill_expects(recall, id):
    tokens = np.random.default_rng(3).integers(3, 200, (1, 64))
    method = fitted_method(id)
    out = kvjax.generate(recall, tokens, method=method, max_new_tokens=2, stop=())
    logits, cache = kvjax.prefill(recall, tokens, method=method, room=2)
    assert out.tokens[0, 0] == logits[0].argmax()
    assert out.cache.method == cache.method and is_fitted(cache.method)


@pytest.mark.parametrize("id", MAKING)
def test_a_model_that_a_shipped_fit_made_takes_the_method_by_its_name(recall, id):
    made = kvjax.prepare(recall, id)
    assert made.made_by == kvjax.pure.static(made, id).method.make
    assert kvjax.prepare(made, id) is made


@pytest.mark.rotating
@pytest.mark.parametrize(
    "id", ["chai", *(pytest.param(x, marks=pytest.mark.rotating) for x in SHIPPED_FITS if x != "chai")]
)
def test_a_method_with_a_shipped_fit_is_generated_with_from_the_shell(id, capsys):
    tokens, method = ",".join(map(str, range(3, 67))), repr(fitted_method(id))
    assert main(["generate", "--tokens", tokens, "--method", method, "--max-new-tokens", "2"]) == 0
    assert id in capsys.readouterr().err
