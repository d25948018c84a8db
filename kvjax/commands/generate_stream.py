"""The output of `kvjax generate`: text token by token, with compile time measured separately."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import monitoring

from kvjax.api.generate import generate
from kvjax.api.speculate import speculate
from kvjax.api.streamed_text import Decoding
from kvjax.base.checks import check_text
from kvjax.base.errors import InputError
from kvjax.commands.terminal import console, pairs, print_part, size
from kvjax.eval.report.figures import rounded
from kvjax.grammar import Method
from kvjax.grammar.to_text import name_of
from kvjax.hosts.messages import is_first
from kvjax.models.model import Model
from kvjax.models.tokenizer import chat as encode_chat
from kvjax.plan.cache_sizes import sizes_of
from kvjax.state.cache import Cache, nbytes
from kvjax.state.shardings import heavier


def stream(model: Model, ids: list[int], method: Method | None, new: int, seed: int, **options: Any) -> None:
    """Stream up to `new` tokens after `ids`, then print time and memory; options: those of `generate`."""
    with Clock() as clock:
        printer = Printer(model, clock)
        out = generate(
            model,
            [ids],
            method=method,
            max_new_tokens=new,
            key=jax.random.key(seed),
            on_token=printer,
            **options,
        )
    printer.finish()
    _print_report(model, len(ids), new, printer, out.cache)


def stream_drafts(
    model: Model,
    ids: list[int],
    method: Method | None,
    new: int,
    seed: int,
    draft: Any,
    k: int,
    **options: Any,
) -> None:
    """`stream` by `kvjax.speculate`: the same text, and how many drafted tokens were accepted."""
    with Clock() as clock:
        printer = Printer(model, clock)
        count = iter(range(new))

        def show(_: int, tokens: list[int]) -> None:
            for token in tokens:
                printer(next(count), np.array([token]))

        out = speculate(
            model, [ids], method=method, draft=draft, k=k, max_new_tokens=new, key=jax.random.key(seed),
            on_tokens=show, **options,
        )  # fmt: skip
    printer.finish()
    taken = f"{out.accepted} of {out.drafted} drafted tokens taken, in {out.passes} passes of the model"
    _print_report(model, len(ids), new + k + 1, printer, out.cache, [("drafts", taken)])


def encode(model: Model, text: str, chat: bool) -> list[int]:
    """Return the token ids of a prompt, or of a conversation that it opens."""
    if model.tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer, expected token ids: pass them as --tokens 1,2,3")
    try:
        if chat:
            return encode_chat(model, [{"role": "user", "content": text}])
        check_text(text)
        return model.tokenizer.encode(text).ids
    except InputError:
        raise
    except Exception as error:  # the library raises bare Exception
        words = sorted(model.tokenizer.get_vocab().items(), key=lambda item: item[1])
        unknown = next((w for w in text.split() if model.tokenizer.token_to_id(w) is None), None)
        what = f"knows no word {unknown!r}" if unknown else f"cannot read this prompt ({error})"
        some = ", ".join([w for w, _ in words if w.isalpha()][:6])
        raise InputError(
            f"the tokenizer of {model.name} {what}, expected words such as {some}: "
            "see `kvjax generate --help`"
        ) from error


class Clock:
    """Measures the seconds since its block began, and those spent on tracing and compiling.

    on_traced: called with the seconds of every program's trace, before it compiles.
    """

    on_traced: Callable[[float], None] | None = None

    def __enter__(self) -> Clock:
        self.start, self.compiling = time.perf_counter(), 0.0
        monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: object) -> None:
        if event.startswith("/jax/core/compile/"):
            self.compiling += duration_secs
        if event.endswith("jaxpr_trace_duration") and self.on_traced is not None:
            self.on_traced(duration_secs)

    def running(self) -> float:
        """Seconds since the start, without compilation."""
        return time.perf_counter() - self.start - self.compiling


class Printer:
    """Prints every token as it comes and notes when it did."""

    def __init__(self, model: Model, clock: Clock):
        self.model, self.clock = model, clock
        self.seconds: list[float] = []
        self.text = None if model.tokenizer is None else Decoding(model.tokenizer)

    def __call__(self, index: int, token: np.ndarray) -> None:
        self.seconds.append(self.clock.running())
        id = int(token[0])
        if self.text is None:
            piece = f"{',' if index else ''}{id}"
        else:
            piece = "" if id in self.model.stop_ids else self.text.add(id)
        print_part(piece)

    def finish(self) -> None:
        """Print the text that is still held back, and end the line."""
        print_part("" if self.text is None else self.text.rest())
        print(flush=True)


def _print_report(
    model: Model, prompt: int, new: int, printer: Printer, cache: Cache, more: Sequence[tuple[str, str]] = ()
) -> None:
    """Print token counts, compile time and memory on standard error: standard output has the text alone."""
    seconds = printer.seconds
    speed = f", {_speed(seconds)} tokens/s" if len(seconds) > 1 else ""
    dtype = jax.tree.leaves(model.params)[0].dtype
    full = sizes_of(model.config, dtype, prompt, [Method()]).nbytes(Method(), room=new)
    kept = nbytes(cache)
    held = f"{size(kept)}, {100 * kept / full:.1f}% of the full cache's {size(full)}"
    rows = [
        ("read", f"{_tokens(prompt)}, the first answer after {1000 * seconds[0]:.0f} ms"),
        ("wrote", f"{_tokens(len(seconds))}{speed}"),
        *more,
        ("compiled", f"in {printer.clock.compiling:.1f} s, not counted above"),
        ("cache", f"{held} ({name_of(cache.method.spec)})"),
    ]
    if note := heavier(kept, full):
        rows.append(("note", f"{note}: compare budgets and methods with kvjax explain"))
    out = console(stderr=True, quiet=not is_first())
    out.print()
    out.print(pairs(rows))


def _speed(seconds: list[float]) -> str:
    """Tokens per second after the first; two digits, because it is a single timing."""
    return rounded((len(seconds) - 1) / (seconds[-1] - seconds[0]), 2)


def _tokens(count: int) -> str:
    return f"{count} token{'s' if count != 1 else ''}"
