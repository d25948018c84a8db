"""`kvjax generate`: text or token ids from a prompt, as they come, then what that took."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from kvjax.commands.options import add_dtype, add_model, whole
from kvjax.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from kvjax.cache import Cache
    from kvjax.grammar import Method
    from kvjax.models.model import Model

HELP = "continue a prompt over a compressed cache, and say what the cache took"
SAMPLE = "<bos> the <set> brave otter 17 4 52 <.> road to <set> calm fox 1 2 3 <.> a hill <get> brave otter"
EXAMPLE = f"""examples (the second one needs a chat model):
  kvjax generate --prompt "{SAMPLE}" --max-new-tokens 3
  kvjax generate --model Qwen/Qwen2.5-0.5B-Instruct --chat --prompt "Name a prime." --method snapkv --budget 0.5
  kvjax generate --file book.txt --method snapkv:window=16+kivi --budget 256"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_dtype(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt")
    prompt.add_argument("--file", metavar="F", help="a text file to continue; - reads standard input")
    prompt.add_argument("--tokens", metavar="1,2,3", help="the prompt as token ids")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument(
        "--method", metavar="METHOD", help="such as snapkv:window=16 (default: the full cache)"
    )
    parser.add_argument(
        "--budget", metavar="BUDGET", help="what is kept: a fraction of the tokens, or slots per head"
    )
    parser.add_argument(
        "--max-new-tokens", type=whole(1), default=64, metavar="N", help="stop after N tokens (default: 64)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="0 takes the likeliest token (default: 0)"
    )
    parser.add_argument("--top-k", type=whole(1), metavar="N", help="draw from the N likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="draw from the fewest tokens of probability P"
    )
    parser.add_argument("--seed", type=whole(0), default=0, metavar="S", help="of the draws (default: 0)")


def run(args: argparse.Namespace) -> None:
    given = _read_prompt(args)
    method = _method(args)
    import jax

    import kvjax

    if args.temperature == 0 and (args.top_k or args.top_p):
        raise InputError(
            "--top-k or --top-p was given at temperature 0, expected a draw: add --temperature 1"
        )
    try:
        sampler = kvjax.Sampler(args.temperature, args.top_k, args.top_p)
    except ValueError as error:
        raise InputError(f"{error}: see `kvjax generate --help`") from error
    model = kvjax.load(args.model, dtype=args.dtype)
    ids = given if isinstance(given, list) else _encode(model, given, args.chat)
    with Clock() as clock:
        stream = Stream(model, clock)
        out = kvjax.generate(
            model,
            [ids],
            method=method,
            max_new_tokens=args.max_new_tokens,
            sampler=sampler,
            key=jax.random.key(args.seed),
            on_token=stream,
        )
    print(flush=True)
    _print_report(args, model, len(ids), stream, out.cache)


def _read_prompt(args: argparse.Namespace) -> str | list[int]:
    """The prompt's text or token ids, as far as that can be said without the model."""
    if args.tokens is not None:
        if args.chat:
            raise InputError("--chat was given with --tokens, expected a text: use --prompt or --file")
        try:
            return [int(word) for word in args.tokens.replace(",", " ").split()]
        except ValueError:
            raise InputError(
                f"--tokens is {args.tokens!r}, expected token ids: write them like 1,2,3"
            ) from None
    text = args.prompt
    if args.file is not None:
        try:
            text = sys.stdin.read() if args.file == "-" else open(args.file, encoding="utf-8").read()
        except OSError as error:
            raise InputError(
                f"{args.file} cannot be read ({error.strerror}), expected a text file: check the path"
            ) from error
        except UnicodeDecodeError as error:
            raise InputError(
                f"{args.file} is no UTF-8 text, expected a text file: convert it first"
            ) from error
    if text is None:
        raise InputError(
            "no prompt was given, expected --prompt TEXT, --file F or --tokens 1,2,3: "
            f'try kvjax generate --prompt "{SAMPLE}"'
        )
    if not text.strip():
        raise InputError("the prompt is empty, expected some text: give --prompt or --file with words in it")
    return text


def _method(args: argparse.Namespace) -> Method | None:
    from kvjax.methods.parse import parse_budget, parse_method

    budget = None if args.budget is None else parse_budget(args.budget)
    if args.method is None:
        if budget is not None:
            raise InputError(
                f"--budget {args.budget} was given without a method, expected both: add --method snapkv"
            )
        return None
    label, build = parse_method(args.method)
    if budget is None and build.takes_budget:
        raise InputError(
            f"method {label} was given without a budget, expected a fraction or a number of slots: add --budget 0.25"
        )
    return build(budget)


def _encode(model: Model, text: str, chat: bool) -> list[int]:
    """The token ids of a prompt, or of a conversation that it opens."""
    if model.tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer, expected token ids: pass them as --tokens 1,2,3")
    try:
        if chat:
            from kvjax.models.tokenizer import chat as encode_chat

            return encode_chat(model, [{"role": "user", "content": text}])
        return model.tokenizer.encode(text).ids
    except InputError:
        raise
    except Exception as error:  # the library raises bare Exception
        words = sorted(model.tokenizer.get_vocab().items(), key=lambda item: item[1])
        unknown = next((w for w in text.split() if model.tokenizer.token_to_id(w) is None), None)
        what = f"knows no word {unknown!r}" if unknown else f"cannot read this prompt ({error})"
        some = ", ".join([w for w, _ in words if w.isalpha()][:6])
        raise InputError(
            f"the tokenizer of {model.name} {what}, expected words such as {some}: see `kvjax generate --help`"
        ) from error


class Clock:
    """Seconds since its block began, and how many of them went into tracing and compiling."""

    def __enter__(self) -> Clock:
        from jax import monitoring

        self.start, self.compiling = time.perf_counter(), 0.0
        monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        from jax import monitoring

        monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            self.compiling += duration

    def running(self) -> float:
        """Seconds since the start without those of compiling."""
        return time.perf_counter() - self.start - self.compiling


class Stream:
    """Prints every token as it comes and notes when it did."""

    def __init__(self, model: Model, clock: Clock):
        self.model, self.clock = model, clock
        self.seconds: list[float] = []
        self.decoder: Any = None
        if model.tokenizer is not None:
            from tokenizers.decoders import DecodeStream

            self.decoder = DecodeStream(skip_special_tokens=True)

    def __call__(self, index: int, token: np.ndarray) -> None:
        self.seconds.append(self.clock.running())
        id = int(token[0])
        if self.decoder is None:
            piece = f"{',' if index else ''}{id}"
        else:
            piece = "" if id in self.model.stop_ids else self.decoder.step(self.model.tokenizer, id)
        print(piece or "", end="", flush=True)


def _print_report(args: argparse.Namespace, model: Model, prompt: int, stream: Stream, cache: Cache) -> None:
    from rich.console import Console

    from kvjax.cache import nbytes
    from kvjax.commands.sizes import Sizes
    from kvjax.commands.terminal import pairs, size
    from kvjax.grammar import Method

    seconds = stream.seconds
    speed = f", {(len(seconds) - 1) / (seconds[-1] - seconds[0]):.0f} tokens/s" if len(seconds) > 1 else ""
    full = Sizes(model.config, args.dtype, prompt, [Method()]).nbytes(Method(), room=args.max_new_tokens)
    kept = nbytes(cache)
    name = args.method or "full cache"
    budget = "" if args.budget is None else f", budget {args.budget}"
    rows = [
        ("read", f"{_tokens(prompt)}, the first answer after {1000 * seconds[0]:.0f} ms"),
        ("wrote", f"{_tokens(len(seconds))}{speed}"),
        ("compiled", f"in {stream.clock.compiling:.1f} s, not counted above"),
        (
            "cache",
            f"{size(kept)}, {100 * kept / full:.1f}% of the full cache's {size(full)} ({name}{budget})",
        ),
    ]
    out = Console(stderr=True, highlight=False)
    out.print()
    out.print(pairs(rows))


def _tokens(count: int) -> str:
    return f"{count} token{'s' if count != 1 else ''}"
