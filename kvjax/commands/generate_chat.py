"""A conversation at the terminal: streams answers, and prints the size of the cache after every turn."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from kvjax.api.chat import Chat, chat
from kvjax.base.errors import InputError
from kvjax.base.interrupts import ends_a_part
from kvjax.base.streams import escaped
from kvjax.commands.generate_stream import Clock
from kvjax.commands.terminal import print_part, size
from kvjax.eval.report.figures import rounded
from kvjax.grammar import Method
from kvjax.grammar.to_text import name_of
from kvjax.io.chat_file import save_chat
from kvjax.models.model import Model
from kvjax.plan.cache_sizes import sizes_of
from kvjax.state.cache import kept_positions, nbytes

HELP = "/cache shows what each layer keeps, /save FILE keeps the conversation, /reset forgets it, /exit ends"
# A program that is traced for so long is a decoder's, and takes many times that to compile.
_LONG = 0.2


def converse(model: Model, method: Method | None, options: dict[str, Any]) -> None:
    """Read questions from standard input, one per line, and print answers until the input ends.

    options: those of `kvjax.chat`. At a terminal, an error in a question leaves the conversation unchanged.
    """
    if jax.process_count() > 1:
        raise InputError("several hosts take no conversation, expected a prompt: add --prompt TEXT")
    talk = chat(model, method, **options)
    attended = is_attended()
    if attended:
        _tell(f"{talk.model.name}, {name_of(talk.method.spec)}. {HELP}; Ctrl-C ends an answer.")
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing for input())
    while (line := _line(attended)) is not None:
        try:
            if line.startswith("/"):
                if not _obeyed(talk, line):
                    return
            elif line:
                _answer(talk, line)
        except InputError as error:
            if not attended:
                raise
            _tell(f"{error} (/reset begins anew)")


def is_attended() -> bool:
    """Whether a user types at a terminal."""
    return sys.stdin.isatty()


def _line(attended: bool) -> str | None:
    """Read the next line, stripped; None at the end of the input."""
    try:
        if attended:
            return input("> ").strip()
        line = sys.stdin.readline()
        return line.strip() if line else None
    except EOFError:
        print()
        return None
    except UnicodeDecodeError as error:
        raise InputError("standard input is no UTF-8 text, expected a question per line") from error


def _obeyed(talk: Chat, line: str) -> bool:
    """Execute a line that begins with /; return whether the conversation continues."""
    word, _, rest = line.partition(" ")
    if word in ("/exit", "/quit"):
        return False
    if word == "/reset":
        talk.reset()
    elif word == "/cache":
        import kvjax

        _tell("nothing was read yet" if talk.cache is None else str(kvjax.summary(talk.cache)))
    elif word == "/save":
        _save(talk, rest.strip())
    else:
        _tell(HELP if word == "/help" else f"{word} is no command: {HELP}")
    return True


def _save(talk: Chat, path: str) -> None:
    if not path or talk.cache is None:
        _tell("nothing was read yet" if path else "/save needs a file's name: /save talk.cache")
        return
    save_chat(path, talk)
    _tell(f"saved: go on with kvjax.load_chat({path!r}, model)")


def _answer(talk: Chat, question: str) -> None:
    """Stream an answer, which Ctrl-C stops, and print the turn's time and memory."""
    with ends_a_part() as enough, Clock() as clock, _status(clock) as status:
        pieces, seconds = talk.stream(question), []
        for piece in pieces:
            status("")
            seconds.append(clock.running())
            print_part(piece)
            if enough.is_set():
                break
        pieces.close()  # type: ignore[attr-defined]
        status("")
    print(flush=True)
    _report(talk, seconds, clock)


@contextlib.contextmanager
def _status(clock: Clock) -> Any:
    """Show a status on standard error while a decoder compiles; return the context whose exit removes it."""
    shown, attended = [], sys.stderr.isatty()

    def show(text: str) -> None:
        if text and not shown:
            shown.append(text)
            _tell(text, end="" if attended else "\n")
        elif not text and shown:
            if attended:
                _tell("\r\x1b[K", end="", raw=True)
            shown.clear()

    def traced(seconds: float) -> None:
        if seconds > _LONG:
            show("compiling for a cache of this size; what is compiled is kept on disk ...")

    clock.on_traced = traced
    yield show


def _report(talk: Chat, seconds: list[float], clock: Clock) -> None:
    """Print the turn's time and the size of the cache on standard error."""
    assert talk.cache is not None
    turn, tokens = talk.turns[-1], int(np.asarray(talk.cache.next)[0])
    parts = [f"read {turn.read}, wrote {turn.written}"]
    if turn.written > 2 and seconds[-1:] > seconds[:1]:
        speed = (turn.written - 1) / (seconds[-1] - seconds[0])
        parts[0] += f" ({rounded(speed, 2)} tokens/s)"
    if turn.again:
        parts.append("the template rewrote earlier turns, so all was read again")
    held = nbytes(talk.cache)
    kept = _kept(talk)
    parts.append(f"keeps {kept} of {tokens} tokens" if kept else f"has seen {tokens} tokens")
    full = _full_bytes(talk)
    share = "" if held == full else f", {100 * held / full:.1f}% of the full cache's {size(full)}"
    parts.append(f"cache {size(held)}{share}, made for {talk.capacity} tokens")
    if clock.compiling > 0.1:
        parts.append(f"compiled in {clock.compiling:.1f} s")
    _tell("[" + "; ".join(parts) + "]")


def _full_bytes(talk: Chat) -> int:
    """Bytes of the full cache that is made for as many tokens."""
    dtype = talk.model.params["embed"].dtype
    return sizes_of(talk.model.config, dtype, talk.capacity, [Method()]).nbytes(Method())


def _kept(talk: Chat) -> str:
    """How many tokens a KV head keeps on average; empty if no layer has slots."""
    assert talk.cache is not None
    counts = [(pos >= 0).sum(-1).ravel() for pos in kept_positions(talk.cache)]
    found = np.concatenate(counts)
    return f"{found.mean():.1f}".removesuffix(".0") if found.size else ""


def _tell(text: str, end: str = "\n", raw: bool = False) -> None:
    """Write to standard error, if possible: standard output has the answers alone."""
    with contextlib.suppress(OSError):
        sys.stderr.write((text if raw else escaped(text)) + end)
        sys.stderr.flush()


def options_of(args: argparse.Namespace, sampler: Any, processors: tuple[Callable[..., Any], ...]) -> dict:
    """Return the arguments of `kvjax.chat` that the command's options give."""
    return dict(
        system=args.system, max_new_tokens=args.max_new_tokens or 256, sampler=sampler,
        processors=processors, stop_strings=args.stop, key=jax.random.key(args.seed),
    )  # fmt: skip
