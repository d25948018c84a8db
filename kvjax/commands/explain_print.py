"""Prints what `kvjax explain` reports: the words of a method, then the bytes of its cache for a model."""

from __future__ import annotations

import textwrap
from typing import Any

from rich.console import Console
from rich.text import Text

from kvjax.base.errors import InputError
from kvjax.commands.explain_sentences import Statement, at_each_step, at_prefill, called, inside, said
from kvjax.commands.inspect_model import acts_on, find_config
from kvjax.commands.terminal import console, size
from kvjax.compat.model_fit import check_budget
from kvjax.compat.shipped_fits import ready
from kvjax.grammar import Method
from kvjax.grammar.to_text import written
from kvjax.io.load import SHIPPED, load
from kvjax.place.trim import counted
from kvjax.plan.cache_sizes import CacheSizes, sizes_of
from kvjax.state.shardings import heavier

_COLUMNS = 110
# The cache size is reported again after this many generated tokens.
_WRITTEN = 256


def print_explanation(method: Method, model: str, context: int, dtype: str) -> None:
    """Print what `method` does with a prompt of `context` tokens, and the size of its cache for a model.

    Raises InputError if there is no such model, it has fewer positions, or the slots that must be kept exceed
    the
    budget.
    """
    config, folder = find_config(model)
    if folder is not None and folder.parent == SHIPPED:
        # The fitted arrays that ship with kvjax are for these small models alone, which load at once.
        method = ready(load(model), method)
    if context > config.max_positions:
        raise InputError(
            f"--context is {context}, expected at most the model's {config.max_positions} positions: lower it"
        )
    check_budget(method, [context])
    out = console()
    out.print(Text(written(method)), soft_wrap=True)
    for sentence in method.sentences:
        layers = [str(i) for i, one in enumerate(method.layers) if one == sentence]
        where = f", layers {', '.join(layers)}" if layers else ""
        _print_part(out, f"At the end of a prompt{where}", at_prefill(sentence, context))
        _print_part(out, f"At each step{where}", at_each_step(sentence))
    out.print()
    out.print(Text(f"The bytes of one row on {model} in {dtype}", style="bold"))
    if (note := acts_on(config)) and any(one.keep is not None for one in method.sentences):
        _print(out, note.strip(), 2)
    for line in weight(method, config, context, dtype):
        _print(out, line, 2)


def _print_part(out: Console, head: str, told: list[Statement]) -> None:
    out.print()
    out.print(Text(head, style="bold"))
    known: set[Any] = set()
    for number, one in enumerate(told, 1):
        _print(out, f"{number}. {one.text}", 2)
        for word in one.words:
            _print_word(out, word, 5, known)


def _print_word(out: Console, word: Any, depth: int, known: set[Any]) -> None:
    """Print a word's explanation, and the words it contains below it; explain each word only once."""
    if word in known:
        _print(out, f"{called(word)}: as above.", depth)
        return
    known.add(word)
    _print(out, f"{called(word)}: {said(word) or 'no description.'}", depth)
    for one in inside(word):
        _print_word(out, one, depth + 2, known)


def _print(out: Console, text: str, depth: int) -> None:
    indent = " " * depth
    columns = min(out.width, _COLUMNS)
    # Words are never broken: calls are to be copied.
    options: dict[str, Any] = dict(break_long_words=False, break_on_hyphens=False)
    out.print(Text(textwrap.fill(text, columns, initial_indent=indent, subsequent_indent=indent, **options)))


def weight(method: Method, config: Any, tokens: int, dtype: str) -> list[str]:
    """Sentences about the bytes of a method's cache: after a prompt, and when some tokens are written."""
    share = lambda part, whole: f"{100 * part / whole:.1f}%"  # noqa: E731
    sizes = sizes_of(config, dtype, tokens, [Method(), method])
    try:
        held = sizes.nbytes(method)
    except (ValueError, InputError) as error:
        return [f"The bytes are unknown: {error}."]
    full, most = sizes.nbytes(Method()), "at most " if counted(method) else ""
    lines = [
        f"After {tokens} tokens: {most}{size(held)}, {share(held, full)} of the full cache's {size(full)}. "
        "Codes, scales, positions and statistics are counted; capacity for more tokens is not."
    ]
    grown = sizes.nbytes(method, _WRITTEN), sizes.nbytes(Method(), _WRITTEN)
    lines.append(
        f"With capacity for {_WRITTEN} more tokens: {most}{size(grown[0])}, {share(*grown)} of the "
        f"full cache's {size(grown[1])}."
    )
    if heavy := heavier(held, full, "such a cache"):
        why = "what is stored beside the slots, such as statistics, pages and sums, exceeds what is saved"
        lines.append(f"Note: {heavy}: {why}.")
    if method.read is not None and isinstance(sizes, CacheSizes):
        read = sizes.read_bytes(method)
        lines.append(f"A step reads {size(read)} of it, {share(read, full)} of the full cache.")
    return lines
