"""`kvjax generate`: streams text or token ids after a prompt, then prints time and memory."""

from __future__ import annotations

import argparse
import difflib
from typing import TYPE_CHECKING, Any

from kvjax.base.errors import InputError
from kvjax.commands.options import add_dtype, add_hosts, add_mesh, add_model, mesh_options, whole
from kvjax.commands.programs import keep_programs
from kvjax.commands.texts import text_of_file

if TYPE_CHECKING:
    from kvjax.grammar import Method

HELP = "continue a prompt over a compressed cache, and say what the cache took"
SAMPLE = "<bos> the <set> brave otter 17 4 52 <.> road to <set> calm fox 1 2 3 <.> a hill <get> brave otter"
EXAMPLE = f"""examples:
  kvjax generate --max-new-tokens 3 --prompt "{SAMPLE}"
  kvjax generate --model smollm2-135m --chat --method snapkv:window=4 --budget 0.5
  kvjax generate --model Qwen/Qwen2.5-0.5B-Instruct --chat --prompt "Name a prime."
  kvjax generate --model smollm2-135m --prompt "One, two, three," --draft lookup
  kvjax generate --model path/to/model --file book.txt --method snapkv+kivi --budget 256"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_dtype(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt")
    prompt.add_argument("--file", metavar="F", help="a text file to continue; - reads standard input")
    prompt.add_argument("--tokens", metavar="1,2,3", help="the prompt as token ids")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="put the prompt into the model's chat template; without a prompt, converse: a question per line "
        "of standard input",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system's message of a conversation")
    parser.add_argument(
        "--method", metavar="METHOD", help="such as snapkv:window=16 (default: the full cache)"
    )
    parser.add_argument(
        "--budget", metavar="BUDGET", help="what is kept: a fraction of the tokens, or slots per head"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=whole(1),
        metavar="N",
        help="stop after N tokens (default: 64, in a conversation 256)",
    )
    _add_sampling(parser)
    parser.add_argument(
        "--draft",
        metavar="METHOD|MODEL",
        help="speculative decoding: a method under which the model drafts (int4), another model, lookup, "
        "which drafts what followed the same words before, first-codes (--method quantspec), or "
        "fewer-slots:METHOD, over what a read such as quest(budget=0.1) picks of the same cache",
    )
    parser.add_argument(
        "--drafted", type=whole(1), metavar="K", help="tokens of a draft at most (default: 4)"
    )
    parser.add_argument("--seed", type=whole(0), default=0, metavar="S", help="of the draws (default: 0)")
    add_mesh(parser)
    add_hosts(parser)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    """Options of how tokens are drawn, and where a text ends."""
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="0 takes the likeliest token (default: 0)"
    )
    parser.add_argument("--top-k", type=whole(1), metavar="N", help="draw from the N likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="draw from the fewest tokens of probability P"
    )
    parser.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="draw from tokens at least P times as likely as the likeliest",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="above 1: make tokens that came before less likely",
    )
    parser.add_argument(
        "--frequency-penalty",
        type=float,
        metavar="X",
        help="lower a token's logit by X per time it came before",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end after TEXT; may be given several times",
    )


def run(args: argparse.Namespace) -> None:
    converses = args.chat and args.prompt is None and args.file is None and args.tokens is None
    given = None if converses else _read_prompt(args)
    _check_chat(args, converses)
    method = _method(args)
    if args.temperature == 0 and (args.top_k or args.top_p or args.min_p):
        raise InputError(
            "--top-k, --top-p or --min-p was given at temperature 0, expected a draw: add --temperature 1"
        )
    _check_draft(args, converses)
    keep_programs()
    from kvjax.api.logit_processors import FrequencyPenalty, RepetitionPenalty
    from kvjax.api.sampling import Sampler
    from kvjax.commands.generate_stream import encode, stream
    from kvjax.io.load import load

    penalties = ((RepetitionPenalty, args.repetition_penalty), (FrequencyPenalty, args.frequency_penalty))
    try:
        sampler = Sampler(args.temperature, args.top_k, args.top_p, args.min_p)
        processors = tuple(word(amount) for word, amount in penalties if amount is not None)
    except ValueError as error:
        raise InputError(f"{error}: see `kvjax generate --help`") from error
    model = load(args.model, dtype=args.dtype, **mesh_options(args))
    if given is None:
        from kvjax.commands.generate_chat import converse, options_of

        return converse(model, method, options_of(args, sampler, processors))
    ids = given if isinstance(given, list) else encode(model, given, args.chat)
    new = args.max_new_tokens or 64
    if args.draft is not None:
        from kvjax.commands.generate_stream import stream_drafts

        draft = _drafting(args)
        return stream_drafts(model, ids, method, new, args.seed, draft, args.drafted or 4, sampler=sampler)
    options = dict(sampler=sampler, processors=processors, stop_strings=args.stop)
    stream(model, ids, method, new, args.seed, **options)


def _check_draft(args: argparse.Namespace, converses: bool) -> None:
    """Raise InputError for options that drafts do not go with."""
    others = {
        "a conversation": converses,
        "--stop": bool(args.stop),
        "--repetition-penalty": args.repetition_penalty is not None,
        "--frequency-penalty": args.frequency_penalty is not None,
    }
    if args.draft is not None and (given := [name for name, there in others.items() if there]):
        raise InputError(
            f"--draft was given with {' and '.join(given)}, expected one of both: leave the other out"
        )
    if args.drafted is not None and args.draft is None:
        raise InputError("--drafted was given without --draft, expected both: add --draft int4")


def _drafting(args: argparse.Namespace) -> Any:
    """Choose what drafts tokens: the text itself, a loaded model, or a method."""
    from kvjax.api.drafts import FewerSlots, FirstCodes, Lookup
    from kvjax.io.load import load
    from kvjax.methods.parse import parse_method

    words, (name, _, read) = {"lookup": Lookup, "first-codes": FirstCodes}, args.draft.partition(":")
    if args.draft in words:
        return words[args.draft]()
    if name == "fewer-slots":
        return FewerSlots(parse_method(read)[1](None))
    try:
        _, build = parse_method(args.draft)
    except (InputError, ValueError) as unknown:
        try:
            return load(args.draft, dtype=args.dtype, **mesh_options(args))
        except InputError:
            near = difflib.get_close_matches(args.draft, [*words, "fewer-slots:METHOD"], 1)
            hint = f"did you mean {near[0]}?" if near else unknown
            raise InputError(
                f"--draft is {args.draft!r}, expected lookup, first-codes, fewer-slots:METHOD, a method or a "
                f"model: {hint}"
            ) from None
    return build(None)


def _check_chat(args: argparse.Namespace, converses: bool) -> None:
    """Raise InputError for --system without a conversation."""
    if args.system is not None and not converses:
        raise InputError("--system was given, expected a conversation: add --chat without a prompt")


def _read_prompt(args: argparse.Namespace) -> str | list[int]:
    """Read the prompt's text or token ids, as far as that can be said without the model."""
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
        text = text_of_file(args.file)
    if text is None:
        raise InputError(
            "no prompt was given, expected --prompt TEXT, --file F or --tokens 1,2,3: "
            f'try kvjax generate --prompt "{SAMPLE}"'
        )
    if not text.strip():
        raise InputError("the prompt is empty, expected some text: give --prompt or --file with words in it")
    return text


def _method(args: argparse.Namespace) -> Method | None:
    """Return the method that was asked for; None for the full cache."""
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
            f"method {label} was given without a budget, expected a fraction or a number of slots: "
            "add --budget 0.25"
        )
    return build(budget)
