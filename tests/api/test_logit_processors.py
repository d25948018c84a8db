"""Penalties, min-p, processors and stop strings: against float64 numpy and transformers' definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.api.logit_processors import FrequencyPenalty, RepetitionPenalty, history, process, put
from kvjax.api.sampling import Sampler
from kvjax.api.stop_strings import StopStrings
from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from tests.sweep import sweep

PROMPTS = [[3, 1, 4, 1, 5], [2, 7]]


@pytest.fixture(scope="module")
def model():
    config = Config(vocab=16, d_model=16, layers=1, heads=2, kv_heads=1, head_dim=8, d_ff=16)
    return Model(config, init(config, jax.random.key(5)))


def repetition(logits, row, penalty):
    """As transformers' RepetitionPenaltyLogitsProcessor gathers and scatters it."""
    ids = np.array([t for t in row if t >= 0])
    score = logits[ids]
    out = logits.copy()
    out[ids] = np.where(score < 0, score * penalty, score / penalty)
    return out


def frequency(logits, row, penalty):
    """OpenAI's: mu[j] - c[j] * alpha."""
    return logits - penalty * np.array([sum(t == j for t in row) for j in range(len(logits))])


@pytest.mark.parametrize("penalty, word, formula", [
    (1.3, RepetitionPenalty, repetition), (0.7, RepetitionPenalty, repetition),
    (0.4, FrequencyPenalty, frequency), (-0.4, FrequencyPenalty, frequency),
])  # fmt: skip
def test_penalties_are_what_others_define(penalty, word, formula, rng):
    logits, tokens = rng.normal(size=(3, 8)), rng.integers(-1, 8, (3, 6))
    want = [formula(x, row, penalty) for x, row in zip(logits, tokens.tolist(), strict=True)]
    got = process((word(penalty),), jnp.asarray(logits, jnp.float32), jnp.asarray(tokens, jnp.int32))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert np.abs(want - logits).max() > 0.1


def test_min_p_keeps_what_transformers_keeps(rng):
    logits = rng.normal(size=(5, 9)) * 2
    for temperature, p in ((1.0, 0.1), (0.5, 0.3), (2.0, 1.0), (1.0, 0.0)):
        scaled = logits / temperature
        probs = np.exp(scaled) / np.exp(scaled).sum(-1, keepdims=True)
        removed = probs < p * probs.max(-1, keepdims=True)
        got = Sampler(temperature, min_p=p)._filtered(jnp.asarray(logits, jnp.float32))
        np.testing.assert_array_equal(np.asarray(got) == -np.inf, removed)
        # Up to a constant per row, which no probability depends on.
        want = scaled - scaled.max(-1, keepdims=True)
        np.testing.assert_allclose(np.asarray(got)[~removed], want[~removed], rtol=1e-5, atol=1e-6)


def test_tokens_so_far_are_the_prompts_and_the_written_ones():
    past = history(jnp.array([[3, 1, 4], [2, 0, 0]], jnp.int32), jnp.array([3, 1], jnp.int32), 2)
    past = put(put(past, jnp.array([5, 0], jnp.int32)), jnp.array([6, -1], jnp.int32))
    assert past.tolist() == [[3, 1, 4, 5, 6], [2, 0, -1, -1, -1]]


@pytest.mark.rotating
def test_generation_draws_from_processed_logits_and_reports_the_models_probabilities(model):
    penalties = (RepetitionPenalty(1.5), FrequencyPenalty(0.3))
    out = kvjax.generate(model, PROMPTS, max_new_tokens=5, processors=penalties)
    plain = kvjax.generate(model, PROMPTS, max_new_tokens=5)
    for row, prompt in enumerate(PROMPTS):
        text = list(prompt)
        for token, logprob in zip(out.tokens[row].tolist(), out.logprobs[row], strict=True):
            logits = np.asarray(model(np.array([text])), np.float64)[0, -1]
            assert token == frequency(repetition(logits, text, 1.5), text, 0.3).argmax()
            np.testing.assert_allclose(logprob, logits[token] - np.log(np.exp(logits).sum()), atol=1e-4)
            text.append(token)
    assert (out.tokens != plain.tokens).any()


@pytest.mark.rotating
def test_a_plain_function_is_a_processor_and_one_of_another_shape_is_refused(model):
    banned = lambda logits, tokens: logits.at[:, ::2].set(-jnp.inf)  # noqa: E731
    out = kvjax.generate(model, PROMPTS, max_new_tokens=4, processors=(banned,))
    assert (out.tokens % 2 == 1).all()
    with pytest.raises(InputError, match=r"returned float32\[2\], expected float32\[2, 16\]"):
        kvjax.generate(model, PROMPTS, max_new_tokens=2, processors=(lambda logits, tokens: logits[:, 0],))
    with pytest.raises(InputError, match="returned None, expected logits"):
        kvjax.generate(model, PROMPTS, max_new_tokens=2, processors=(lambda logits, tokens: None,))


def nothing(logits, tokens):
    """No token is left once three were written."""
    return jnp.where(((tokens >= 0).sum(-1) >= 5)[:, None], -jnp.inf, logits)


def no_numbers(logits, tokens):
    return logits * jnp.nan


@pytest.mark.rotating
@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize(("processor", "step"), sweep([(nothing, 3), (no_numbers, 0)], (no_numbers, 0)))
def test_processors_that_leave_no_token_are_refused(model, processor, step, beams):
    with pytest.raises(InputError, match=f"processors leave no token to choose at step {step}: .* allow at"):
        kvjax.generate(model, [[1, 2]], max_new_tokens=5, processors=[processor], beams=beams, stop=[])


@pytest.mark.parametrize("build, message", [
    (lambda: RepetitionPenalty(0.0), "repetition penalty must be > 0"),
    (lambda: RepetitionPenalty(float("nan")), "repetition penalty must be > 0"),
    (lambda: FrequencyPenalty(float("inf")), "frequency penalty must be a finite number"),
    (lambda: Sampler(1.0, min_p=1.5), r"min_p is 1.5, expected a finite number >= 0 and <= 1"),
])  # fmt: skip
def test_numbers_that_mean_nothing_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# --- stop strings -----------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of the letters a, b, ...; every fourth is two of them."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(97 + i) * (2 if i % 4 == 0 else 1) for i in ids)


@pytest.mark.rotating
def test_a_row_ends_with_the_token_that_completes_a_stop_string(model):
    free = np.asarray(kvjax.generate(model, PROMPTS, max_new_tokens=6).tokens)
    speaking = kvjax.Model(model.config, model.params, tokenizer=Letters())
    text = Letters().decode(free[0, :3])
    out = kvjax.generate(speaking, PROMPTS, max_new_tokens=6, stop_strings=[text[-2:]])
    for row, tokens in enumerate(free.tolist()):
        ends = [i for i in range(6) if text[-2:] in Letters().decode(tokens[: i + 1])]
        size = ends[0] + 1 if ends else 6
        assert out.tokens[row].tolist()[:size] == tokens[:size] and out.lengths[row] == size
        assert out.texts[row] == Letters().decode(tokens[:size])
        assert int(out.cache.next[row]) == len(PROMPTS[row]) + size
    assert out.lengths[0] < 6


def test_stop_strings_need_a_tokenizer_and_some_text(model):
    with pytest.raises(InputError, match="has no tokenizer, so it writes no text: give stop="):
        kvjax.generate(model, PROMPTS, max_new_tokens=2, stop_strings=["a"])
    speaking = kvjax.Model(model.config, model.params, tokenizer=Letters())
    for strings in ("ab", [""]):
        with pytest.raises(InputError, match="expected a list of texts"):
            StopStrings(speaking, strings, 1)
