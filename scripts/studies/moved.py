"""Methods whose code has changed since the leaderboard's data was measured, and how."""

from __future__ import annotations

from collections.abc import Iterable

MARK = "†"
MOVED = {
    "sirllm": "entropy fading by 0.9 per 256 tokens; by default it does not",
    "keyformer": "noise drawn once for a token; the library draws it for every query, key, head and layer",
    "roco": "no protected tokens at the start; the library protects 4",
    "nacl": "a share of the whole budget; the library's is of the slots beside protected ones",
    "criticalkv": "a first stage without the window; the library counts it",
    "finch": "a set of tokens for each KV head; the library has one for a layer",
    "citrus": "half of the slots chosen by the newest tokens; in the library the instruction alone chooses",
    "chunkkv": "every second of four layers copying; in the library every layer chooses",
    "windowkv": "every second of four layers copying; in the library every layer chooses",
    "gemfilter": "layer 0 choosing; in the library layer 1 of four does",
    "cam": "a value shared out among the next 32 tokens; the library's default is 16",
    "zeromerge": "scores that do not fade; in the library they do, and one slot takes up evicted ones",
}


def marked(method: str) -> str:
    """Mark a method's name; empty if its numbers were measured with the present code."""
    return f" {MARK}" if method in MOVED else ""


def changes(methods: Iterable[str]) -> str:
    """How these methods differed when they were measured; empty if they did not."""
    mine = [f"{method}: {MOVED[method]}" for method in dict.fromkeys(methods) if method in MOVED]
    if not mine:
        return ""
    return f"{MARK} Measured in another form. {'; '.join(mine)}."
