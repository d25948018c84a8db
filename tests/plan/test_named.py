"""Models by name have as many parameters as their makers say, and shapes that their papers name."""

import math

import jax
import pytest

from kvjax.base.errors import InputError
from kvjax.models.hf_families import FAMILIES
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.mixers.recurrent import KimiDelta
from kvjax.models.params import plan, shapes
from kvjax.plan.named import ALIASES, named, names

# Billions, from the models' cards and papers: of Gemma 3 1.416 of embeddings and 25.6 others
# (arXiv:2503.19786, table 1), of gpt-oss arXiv:2508.10925, table 1, of Gemma 3n and Llama 4 the language
# model alone; of the others what the hub or the card counts.
PUBLISHED = {
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.6,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "llama-3.1-405b": 405.9,
    "qwen3-8b": 8.19,
    "qwen3-32b": 32.8,
    "qwen3-235b-a22b": 235.1,
    "deepseek-v2": 235.7,
    "deepseek-v3": 671.0,
    "kimi-linear-48b": 49.1,
    "gemma-3-27b": 27.016,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
    "mistral-7b": 7.25,
    "mixtral-8x7b": 46.7,
    "qwen2.5-7b": 7.62,
    "gemma-2-9b": 9.24,
    "phi-4": 14.7,
    "command-r7b": 8.03,
    "smollm3-3b": 3.08,
    "olmo-3-32b": 32.2,
    "seed-oss-36b": 36.2,
    "exaone-4-32b": 32.0,
    "ernie-4.5-21b-a3b": 21.8,
    "gemma-3n-e2b": 4.46,
    "gemma-3n-e4b": 6.87,
    "gemma-4-31b": 30.7,
    "llama-4-scout": 107.8,
    "llama-4-maverick": 400.7,
    "glm-4.5": 355,
    "glm-5": 744,
    "minimax-m2": 229,
    "kimi-k2": 1026,
    "deepseek-v3.2": 671,
    "qwen3-next-80b-a3b": 80,
    "granite-4-h-small": 32.2,
    "lfm2-8b-a1b": 8.34,
    "bamba-9b": 9.78,
    "jamba-mini": 51.6,
    "falcon-h1-7b": 7.59,
    "falcon-h1-34b": 33.6,
    "nemotron-h-8b": 8.1,
    "rwkv-7-2.9b": 2.948,
    "qwen3.5-27b": 27,
    "qwen3.5-35b-a3b": 35,
    "olmo-2-7b": 7.30,
    "olmo-2-13b": 13.7,
    "glm-4.7-flash": 30,
    # Between 8.4 and 8.5: the card rounds down.
    "ministral-3-8b": 8.45,
    # 1.07 without embeddings, and one table of 102,400 rows.
    "exaone-4-1.2b": 1.28,
    "ernie-4.5-0.3b": 0.36,
    "glm-4-9b": 9.4,
    "glm-4-9b-0414": 9.4,
    "mamba2-2.7b": 2.7,
    "mamba-codestral-7b": 7.29,
    "lfm2-1.2b": 1.17,
    "granite-3.3-8b": 8.17,
    "gemma-4-12b": 11.95,
    "olmo-2-32b": 32.2,
    "ministral-3-3b": 3.43,
    "ministral-3-14b": 13.5,
    # Of the card's 5.1, 0.15 see and 0.3 hear.
    "gemma-4-e2b": 4.65,
    # In the class of transformers 5.24 without encoders; the card says 8 with them.
    "gemma-4-e4b": 7.463,
    "gemma-4-26b-a4b": 25.2,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_named_model_has_the_published_number_of_parameters(name):
    config = named(name).config
    tree = shapes(config, plan(config, stacked=True))
    is_shape = lambda x: isinstance(x, tuple) and bool(x) and isinstance(x[0], int)  # noqa: E731
    count = sum(math.prod(shape) for shape in jax.tree.leaves(tree, is_leaf=is_shape))
    assert count / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


def test_every_name_is_of_a_family():
    assert {named(name).config.family for name in names()} <= {*FAMILIES, "yoco"}


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


# Numbers of a token that all layers without a window keep, from the sizes that papers and cards name.
KEPT = {
    "mistral-7b": 2 * 32 * 8 * 128, "qwen2.5-7b": 2 * 28 * 4 * 128, "phi-4": 2 * 40 * 10 * 128,
    "gemma-2-9b": 2 * 21 * 8 * 256, "command-r7b": 2 * 8 * 8 * 128, "smollm3-3b": 2 * 36 * 4 * 128,
    "olmo-3-32b": 2 * 16 * 8 * 128, "exaone-4-32b": 2 * 16 * 8 * 128, "gemma-3n-e4b": 2 * 4 * 2 * 256,
    "gemma-4-31b": 10 * 4 * 512, "llama-4-scout": 2 * 12 * 8 * 128, "glm-4.5": 2 * 92 * 8 * 128,
    "kimi-k2": 61 * (512 + 64), "deepseek-v3.2": 61 * (512 + 64 + 128), "minimax-m2": 2 * 62 * 8 * 128,
    "qwen3-next-80b-a3b": 2 * 12 * 2 * 256, "jamba-mini": 2 * 4 * 8 * 128, "bamba-9b": 2 * 3 * 8 * 128,
    "nemotron-h-8b": 2 * 4 * 8 * 128, "granite-4-h-small": 2 * 4 * 8 * 128, "lfm2-8b-a1b": 2 * 6 * 8 * 64,
    "falcon-h1-7b": 2 * 44 * 2 * 128, "falcon-h1-34b": 2 * 72 * 4 * 128,
    "qwen3.5-27b": 2 * 16 * 4 * 256, "qwen3.5-35b-a3b": 2 * 10 * 2 * 256, "olmo-2-13b": 2 * 40 * 40 * 128,
    "glm-4.7-flash": 47 * (512 + 64), "ministral-3-8b": 2 * 34 * 8 * 128, "exaone-4-1.2b": 2 * 30 * 8 * 64,
    "ernie-4.5-0.3b": 2 * 18 * 2 * 128, "glm-4-9b": 2 * 40 * 2 * 128, "glm-4-9b-0414": 2 * 40 * 2 * 128,
    "mamba2-2.7b": 0, "lfm2-1.2b": 2 * 6 * 8 * 64, "granite-3.3-8b": 2 * 40 * 8 * 128,
    "gemma-4-12b": 8 * 512, "olmo-2-32b": 2 * 64 * 8 * 128, "ministral-3-3b": 2 * 26 * 8 * 128,
    "ministral-3-14b": 2 * 40 * 8 * 128, "gemma-4-e2b": 2 * 3 * 512, "gemma-4-e4b": 2 * 4 * 2 * 512,
    "gemma-4-26b-a4b": 5 * 2 * 512,
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_a_token_of_a_named_model_keeps_as_many_numbers_as_published(name):
    config = named(name).config
    words = [mixer_of(config, i) for i in range(config.layers) if config.window(i) is None]
    slots = [s for m in words if "slots" not in m.takes and (s := m.slots(config)) is not None]
    assert sum(s.heads * (s.key + (0 if s.shared else s.value)) for s in slots) == KEPT[name]


def test_an_unknown_name_is_told_the_nearest():
    with pytest.raises(InputError, match="no model named 'lama-3-70b'.*did you mean llama-3-70b?"):
        named("lama-3-70b")
