"""Bytes per token in every family of checkpoints, by kind of layer, from shapes alone.

    python -m scripts.studies.family_bytes [FAMILY...]  # measures what is missing, or these
    python -m scripts.studies.family_bytes table        # writes docs/family-bytes.md

A family is represented by its well-known model in `kvjax plan`. Caches are traced in bfloat16 and counted
completely, with positions, scales and statistics.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import kvjax
from kvjax.base.atomic_files import write_atomic
from kvjax.base.errors import InputError
from kvjax.compat.model_fit import check_fit
from kvjax.grammar import Method
from kvjax.models.config import Config
from kvjax.models.feed_forward import NoMLP
from kvjax.models.hf_families import FAMILIES
from kvjax.models.mixer import Mixer
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.mixers.indexed_latent import IndexedLatent
from kvjax.models.mixers.latent import Latent
from kvjax.models.mixers.rwkv import Rwkv7
from kvjax.plan.cache_sizes import CacheSizes
from kvjax.plan.named import named
from kvjax.state.cache import nbytes
from scripts.docs_tables import DOCS, data_text, write_table
from scripts.site.markdown import table

FILE = DOCS / "family-bytes.json"
LENGTHS = (2**13, 2**17, 2**20)
METHODS = (
    "snapkv(budget=0.25)", "streamingllm(budget=0.25)", "int8", "kivi(bits=2)",
    "snapkv(budget=0.25) + kivi(bits=2)",
)  # fmt: skip
NAMED = {
    "llama": "llama-3.1-8b", "mistral": "mistral-7b", "qwen2": "qwen2.5-7b", "qwen3": "qwen3-8b",
    "gemma2": "gemma-2-9b", "gemma3_text": "gemma-3-27b", "phi3": "phi-4", "olmo2": "olmo-2-13b",
    "olmo3": "olmo-3-32b", "smollm3": "smollm3-3b", "exaone4": "exaone-4-32b", "seed_oss": "seed-oss-36b",
    "cohere2": "command-r7b", "ministral3": "ministral-3-8b", "mixtral": "mixtral-8x7b",
    "qwen3_moe": "qwen3-235b-a22b", "deepseek_v2": "deepseek-v2", "deepseek_v3": "deepseek-v3",
    "deepseek_v32": "deepseek-v3.2",
    "glm_moe_dsa": "glm-5", "glm4_moe_lite": "glm-4.7-flash", "kimi_linear": "kimi-linear-48b",
    "glm4_moe": "glm-4.5", "minimax_m2": "minimax-m2", "rwkv7": "rwkv-7-2.9b", "falcon_h1": "falcon-h1-7b",
    "gemma3n_text": "gemma-3n-e4b", "gemma4_text": "gemma-4-31b", "llama4_text": "llama-4-scout",
    "lfm2_moe": "lfm2-8b-a1b", "ernie4_5_moe": "ernie-4.5-21b-a3b", "bamba": "bamba-9b",
    "jamba": "jamba-mini", "nemotron_h": "nemotron-h-8b", "granitemoehybrid": "granite-4-h-small",
    "gpt_oss": "gpt-oss-120b", "qwen3_next": "qwen3-next-80b-a3b", "qwen3_5_text": "qwen3.5-27b",
    "qwen3_5_moe_text": "qwen3.5-35b-a3b", "ernie4_5": "ernie-4.5-0.3b", "glm": "glm-4-9b",
    "glm4": "glm-4-9b-0414", "mamba2": "mamba2-2.7b", "lfm2": "lfm2-1.2b", "granite": "granite-3.3-8b",
    "gemma4_unified_text": "gemma-4-12b",
}  # fmt: skip
KINDS = ("all tokens", "windows", "states")


def read() -> dict[str, Any]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def write(data: Mapping[str, Any]) -> None:
    write_atomic(FILE, (data_text({n: data[n] for n in FAMILIES if n in data}) + "\n").encode())


def kind_of(config: Config, layer: int) -> str:
    """Say what limits the slots that a layer keeps."""
    if mixer_of(config, layer).slots(config) is None:
        return "states"
    return "all tokens" if config.window(layer) is None else "windows"


def by_itself(word: Mixer) -> Mixer:
    """Make a mixer that keeps the same, without what it takes of other layers."""
    if isinstance(word, Rwkv7):
        return dataclasses.replace(word, v_rank=None)
    if isinstance(word, IndexedLatent) and word.index_source is not None:
        return Latent(**{f.name: getattr(word, f.name) for f in dataclasses.fields(Latent)})
    return word


def alone(config: Config, layer: int) -> Config:
    """Make a model of one layer, whose cache is that of the layer."""
    windows = (config.window(layer),) if config.windows else ()
    mixers = (by_itself(mixer_of(config, layer)),)
    one = dict(layers=1, vocab=32, mixers=mixers, mlps=(NoMLP(),), windows=windows)
    plain = dict(inputs=(), layer_embeddings=0, layer_scales=False, layer_vocab=0, streams=1, laurel=0)
    return dataclasses.replace(config, norms="pre", **plain, **one)


def layers_of(config: Config) -> dict[tuple[str, Config], int]:
    """How many layers there are of each kind that keeps something, with a model of one such layer."""
    own = [i for i in range(config.layers) if "slots" not in mixer_of(config, i).takes]
    own = [i for i in own if mixer_of(config, i).slots(config) or mixer_of(config, i).state(config)]
    return dict(Counter((kind_of(config, i), alone(config, i)) for i in own))


def cache_bytes(config: Config, method: Method, tokens: int) -> dict[str, int]:
    """Bytes of a row's cache by kind of layer, as the sum over single layers.

    A keep acts on slots alone, so it is ignored in layers that keep a state.
    """
    out = dict.fromkeys(KINDS, 0)
    for (kind, one), count in layers_of(config).items():
        used = dataclasses.replace(method, keep=None) if kind == "states" else method
        cache = CacheSizes(one, "bfloat16", tokens, [used]).cache(used)
        out[kind] += count * (nbytes(cache.groups) + nbytes(cache.pools))
    return out


def measured(config: Config) -> dict[str, Any]:
    """Bytes by kind of layer at every length without a method, and under the methods at the second length."""
    full = kvjax.method("full")
    bytes_of = {str(tokens): cache_bytes(config, full, tokens) for tokens in LENGTHS}
    found: dict[str, int | str] = {}
    for spelled in METHODS:
        method = kvjax.method(spelled)
        try:
            check_fit(method, config)
            found[spelled] = sum(cache_bytes(config, method, LENGTHS[1]).values())
        except (InputError, ValueError) as error:
            found[spelled] = str(error)
    return {"layers": config.layers, "bytes": bytes_of, "methods": found}


def measure(families: list[str]) -> None:
    """Measure families, and write the file after each."""
    data = read()
    for family in families or [n for n in NAMED if n not in data]:
        data[family] = measured(named(NAMED[family]).config)
        write(data)


# --- the page ----------------------------------------------------------------------------------------


def tables(data: Mapping[str, Any]) -> tuple[str, str]:
    """Tables: bytes per token by kind of layer and length, and shares of the full cache under the methods."""
    mid = str(LENGTHS[1])
    first, second = [], []
    for family in sorted(NAMED, key=[*FAMILIES].index):
        row, title = data[family], f"{FAMILIES[family].title}: {NAMED[family]}"
        cells = [_kib(sum(row["bytes"][str(t)].values()) / t) for t in LENGTHS]
        cells += [_share(row["bytes"][mid][kind], row["bytes"][mid]) for kind in KINDS]
        first.append((title, *cells))
        full = sum(row["bytes"][mid].values())
        found = [row["methods"][m] for m in METHODS]
        second.append((title, *(f"{100 * x / full:.1f}" if isinstance(x, int) else "–" for x in found)))
    heads = ("family: model", "8k", "128k", "1M", *(f"{kind}, %" for kind in KINDS))
    return table(heads, first), table(("family: model", *(f"`{m}`" for m in METHODS)), second)


def _kib(count: float) -> str:
    return f"{count / 1024:.1f}" if count >= 1024 else f"{count / 1024:.2f}"


def _share(part: int, parts: Mapping[str, int]) -> str:
    return f"{100 * part / sum(parts.values()):.1f}" if part else ""


def main() -> None:
    """Measure families, or write the page's tables."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("what", nargs="*", metavar="FAMILY", help="or 'table'")
    what = asked.parse_args().what
    if unknown := sorted({*what} - {"table", *NAMED}):
        asked.error(f"{', '.join(unknown)}: expected 'table', or some of {', '.join(NAMED)}")
    if what == ["table"]:
        for name, made in zip(("family bytes", "family methods"), tables(read()), strict=True):
            write_table("family-bytes.md", name, made)
    else:
        measure(what)


if __name__ == "__main__":
    main()
