"""Grammar: a method as a value (`Method` of `Keep`, `Store`, `Budget`), and what its words provide."""

from kvjax.grammar.sentence import Budget, Keep, Method, Store, chain, check

__all__ = ["Budget", "Keep", "Method", "Store", "chain", "check"]
