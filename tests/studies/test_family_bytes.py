"""The page of bytes per token shows its data, which are those of whole models."""

import dataclasses
import json

import kvjax
from kvjax.plan.cache_sizes import CacheSizes
from kvjax.state.cache import nbytes
from scripts.docs_tables import DOCS, with_table
from scripts.studies.family_bytes import FILE, KINDS, cache_bytes, tables
from tests.models.architectures import TABLE

DATA = json.loads(FILE.read_text())


def test_the_page_shows_its_data():
    text = (DOCS / "family-bytes.md").read_text()
    for name, made in zip(("family bytes", "family methods"), tables(DATA), strict=True):
        assert with_table(text, name, made) == text


def test_layers_one_by_one_are_the_cache_of_the_whole_model():
    config = dataclasses.replace(TABLE["jamba"].config, layers=2, windows=(None, 6))
    full = kvjax.method("full")
    found = cache_bytes(config, full, 64)
    cache = CacheSizes(config, "bfloat16", 64, [full]).cache(full)
    assert sum(found.values()) == nbytes(cache.groups) and found.keys() == {*KINDS}
    assert found["states"] and found["windows"] and not found["all tokens"]


def test_published_figures_are_met():
    """DeepSeek-V3, 70,272 bytes (arXiv:2505.09343, table 1), and 2 x 32 x 8 x 128 numbers of Llama-3.1-8B."""
    for family, lists, published in (("deepseek_v3", 61, 70272), ("llama", 32 * 8, 2 * 32 * 8 * 128 * 2)):
        for tokens, found in DATA[family]["bytes"].items():
            assert sum(found.values()) == int(tokens) * (published + 4 * lists)
