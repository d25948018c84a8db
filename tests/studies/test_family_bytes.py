"""The page of bytes per token shows its data, which are those of whole models."""

import dataclasses
import json

import pytest

import kvjax
from kvjax.models.hf_families import FAMILIES
from kvjax.plan.cache_sizes import CacheSizes
from kvjax.plan.named import named
from kvjax.state.cache import nbytes
from scripts.docs_tables import DOCS, with_table
from scripts.studies.family_bytes import FILE, KINDS, NAMED, cache_bytes, tables
from tests.models.architectures import TABLE

DATA = json.loads(FILE.read_text())


def test_the_page_shows_its_data():
    text = (DOCS / "family-bytes.md").read_text()
    for name, made in zip(("family bytes", "family methods"), tables(DATA), strict=True):
        assert with_table(text, name, made) == text


def test_every_row_is_of_a_model_of_its_family():
    assert DATA.keys() == NAMED.keys() <= FAMILIES.keys()
    assert all(named(name).config.family == family for family, name in NAMED.items())


def test_layers_one_by_one_are_the_cache_of_the_whole_model():
    config = dataclasses.replace(TABLE["jamba"].config, layers=2, windows=(None, 6))
    full = kvjax.method("full")
    found = cache_bytes(config, full, 64)
    cache = CacheSizes(config, "bfloat16", 64, [full]).cache(full)
    assert sum(found.values()) == nbytes(cache.groups) and found.keys() == {*KINDS}
    assert found["states"] and found["windows"] and not found["all tokens"]


@pytest.mark.parametrize(
    ("family", "lists", "published"),
    [
        # arXiv:2505.09343, table 1.
        ("deepseek_v3", 61, 70272),
        # 2 x 32 x 8 x 128 numbers.
        ("llama", 32 * 8, 2 * 32 * 8 * 128 * 2),
        # arXiv:2403.19887, table 1: 32, 32 and 4 GB at 256k tokens.
        ("mistral", 32 * 8, 32 * 2**30 // 2**18),
        ("mixtral", 32 * 8, 32 * 2**30 // 2**18),
        ("jamba", 4 * 8, 4 * 2**30 // 2**18),
    ],
)
def test_published_figures_are_met(family, lists, published):
    for tokens, found in DATA[family]["bytes"].items():
        assert found["all tokens"] == int(tokens) * (published + 4 * lists)


def test_a_token_of_llama_405b_has_the_published_bytes():
    """516,096 bytes (arXiv:2505.09343, table 1)."""
    found = cache_bytes(named("llama-3.1-405b").config, kvjax.method("full"), 64)
    assert sum(found.values()) == 64 * (516_096 + 4 * 126 * 8)
