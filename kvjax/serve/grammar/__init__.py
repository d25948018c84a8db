"""A system as a value: words, and `System`, which refuses those that do not go together."""

from kvjax.serve.grammar.system import System

__all__ = ["System"]
