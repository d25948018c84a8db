"""The table of checkpoint families, from the `Family` entries, in docs/how-to/models.md and the README.

    python -m scripts.site.families

writes both; a test compares them with the entries.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from kvjax.models.hf_families import FAMILIES
from kvjax.models.hf_left_out import LEFT_OUT
from scripts.docs_tables import with_table
from scripts.site.markdown import escaped, table

ROOT = Path(__file__).parents[2]
NAME = "families"
# Families that load from GGUF files, in both forms where a file's architecture holds two.
GGUF = (
    "llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "olmo3", "smollm3", "exaone4",
    "seed_oss", "ernie4_5", "cohere2", "glm4", "ministral3", "mixtral", "qwen3_moe", "deepseek_v2",
    "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "mamba2", "glm4_moe", "minimax_m2", "lfm2",
    "gemma4_text", "llama4_text", "lfm2_moe", "ernie4_5_moe", "nemotron_h", "granite", "granitemoehybrid",
    "gpt_oss", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "falcon_h1", "jamba", "bamba",
    "gemma3n_text", "kimi_linear", "rwkv7",
)  # fmt: skip


def family_table() -> str:
    """Write a row per entry: title, `model_type`s, differences from Llama, and whether GGUF loads it.

    Below them, those that are left out, with the reason.
    """
    rows = [
        (row.title, ", ".join(f"`{n}`" for n in (name, *row.within)), escaped(row.special), _gguf(name))
        for name, row in FAMILIES.items()
    ]
    rows += [
        (one.title, ", ".join(f"`{n}`" for n in one.names), f"does not load: {one.reason}", "")
        for one in LEFT_OUT
    ]
    return table(("family", "`model_type`", "how it differs from Llama", "GGUF"), rows)


def _gguf(name: str) -> str:
    return "yes" if name in GGUF else ""


def family_names() -> str:
    """Return all titles in one paragraph, wrapped like the README."""
    names = ", ".join(row.title for row in FAMILIES.values())
    return textwrap.fill(f"These load: {names}.", 150, break_on_hyphens=False)


PAGES = {"docs/how-to/models.md": family_table, "README.md": family_names}


def main() -> None:
    """Write the table and the paragraph."""
    for page, made in PAGES.items():
        text = (ROOT / page).read_text()
        (ROOT / page).write_text(with_table(text, NAME, made()))


if __name__ == "__main__":
    main()
