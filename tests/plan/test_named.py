"""Models by name have as many parameters as their makers say, and shapes that their papers name."""

import math

import jax
import pytest

from kvjax.base.errors import InputError
from kvjax.models.mixers.recurrent import KimiDelta
from kvjax.models.params import plan, shapes
from kvjax.plan.named import ALIASES, named, names

# Billions, from the models' cards and papers: of Gemma 3 1.416 of embeddings and 25.6 others
# (arXiv:2503.19786, table 1), of gpt-oss arXiv:2508.10925, table 1; of the others what the hub counts.
PUBLISHED = {
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.6,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "llama-3.1-405b": 405.9,
    "qwen3-8b": 8.19,
    "qwen3-32b": 32.8,
    "qwen3-235b-a22b": 235.1,
    "deepseek-v3": 671.0,
    "kimi-linear-48b": 49.1,
    "gemma-3-27b": 27.016,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_named_model_has_the_published_number_of_parameters(name):
    config = named(name).config
    tree = shapes(config, plan(config, stacked=True))
    is_shape = lambda x: isinstance(x, tuple) and bool(x) and isinstance(x[0], int)  # noqa: E731
    count = sum(math.prod(shape) for shape in jax.tree.leaves(tree, is_leaf=is_shape))
    assert count / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


def test_every_name_says_where_its_shape_is_from():
    assert set(PUBLISHED) == set(names()) - {"yoco-3b"} and set(ALIASES.values()) <= set(names())
    assert all(named(name).source.startswith("https://") for name in names())


def test_layers_that_are_no_plain_attention_are_where_they_should_be():
    kimi = named("kimi-linear-48b").config
    assert [i + 1 for i, m in enumerate(kimi.mixers) if not isinstance(m, KimiDelta)] == [
        4,
        8,
        12,
        16,
        20,
        24,
        27,
    ]
    gemma = named("gemma-3-27b").config
    assert [i for i, window in enumerate(gemma.windows) if window is None] == list(range(5, 62, 6))
    oss = named("gpt-oss-20b").config
    assert oss.windows == (128, None) * 12 and all(m.sink for m in oss.mixers)
    assert all((m.experts, m.top, m.limit) == (32, 4, 7.0) for m in oss.mlps)
    yoco = named("yoco-3b").config
    sources = [m.source_of("slots") for m in yoco.mixers]
    assert sources == [None] * 14 + [13] * 12 and yoco.windows == (1024,) * 13 + (None,) * 13


def test_an_unknown_name_is_told_the_nearest():
    with pytest.raises(InputError, match="no model named 'lama-3-70b'.*did you mean llama-3-70b?"):
        named("lama-3-70b")
