"""The table of checkpoint families, from the `Family` entries, in docs/how-to/models.md and the README.

    python -m scripts.site.families

writes both; a test compares them with the entries.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from kvjax.models.hf_families import FAMILIES
from scripts.docs_tables import with_table
from scripts.site.markdown import escaped, table

ROOT = Path(__file__).parents[2]
NAME = "families"
# Families that load from GGUF files: `kvjax.models.gguf.config` makes their config.json.
GGUF = (
    "llama", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3", "olmo2",
    "deepseek_v2", "deepseek_v3", "mamba2",
)  # fmt: skip


def family_table() -> str:
    """A row per entry: its title, its `model_type`s, its differences from Llama, and whether GGUF loads."""
    rows = [
        (row.title, ", ".join(f"`{n}`" for n in (name, *row.within)), escaped(row.special), _gguf(name))
        for name, row in FAMILIES.items()
    ]
    return table(("family", "`model_type`", "how it differs from Llama", "GGUF"), rows)


def _gguf(name: str) -> str:
    return "yes" if name in GGUF else ""


def family_names() -> str:
    """All titles in one paragraph, wrapped like the README."""
    names = ", ".join(row.title for row in FAMILIES.values())
    return textwrap.fill(f"These load: {names}.", 150, break_on_hyphens=False)


PAGES = {"docs/how-to/models.md": family_table, "README.md": family_names}


def main() -> None:
    """Writes the table and the paragraph."""
    for page, made in PAGES.items():
        text = (ROOT / page).read_text()
        (ROOT / page).write_text(with_table(text, NAME, made()))


if __name__ == "__main__":
    main()
