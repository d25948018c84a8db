"""Grammar: a method as a value (`Method` of `Keep`, `Store`, `Budget`), and the protocols of its words."""

from kvjax.grammar.chains import chain, check
from kvjax.grammar.sentence import Budget, Keep, Method, Store

__all__ = ["Budget", "Keep", "Method", "Store", "chain", "check"]
