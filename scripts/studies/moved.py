"""Methods that changed after the leaderboard's data was measured, and what changed."""

from __future__ import annotations

from collections.abc import Iterable

MARK = "†"
MOVED = {
    "sirllm": "entropy no longer fades by default (0.9 per 256 tokens before)",
    "keyformer": "noise is drawn for every query, key, head and layer (once for a token before)",
    "roco": "the first 4 tokens stay",
    "nacl": "its share is of what is left beside protected tokens, so that a large window leaves draws",
    "criticalkv": "its first stage counts the window",
    "finch": "one set of tokens for a layer (one for a KV head before)",
    "citrus": "the instruction alone chooses, one set for a layer (half by the newest tokens before)",
    "chunkkv": "every layer chooses (every second of four layers copied before)",
    "windowkv": "every layer chooses (every second of four layers copied before)",
    "gemfilter": "layer 1 of four chooses (layer 0 before)",
    "cam": "a value is shared out among the next 16 tokens (32 before)",
    "zeromerge": "scores fade, and one slot takes up what leaves, with the largest score of it",
}


def marked(method: str) -> str:
    """The mark after a method's name; empty where its numbers were measured with the present code."""
    return f" {MARK}" if method in MOVED else ""


def changes(methods: Iterable[str]) -> str:
    """What changed in those of these methods that have moved; empty where none has."""
    mine = [f"{method}: {MOVED[method]}" for method in dict.fromkeys(methods) if method in MOVED]
    if not mine:
        return ""
    return f"{MARK} Measured before the method was changed. {'; '.join(mine)}."
