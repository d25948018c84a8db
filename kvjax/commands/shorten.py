"""`kvjax shorten`: removes tokens, sentences or documents from texts before a model reads them."""

from __future__ import annotations

import argparse
import ast
from typing import Any

from kvjax.commands.options import add_dtype, add_model
from kvjax.commands.programs import keep_programs

HELP = "shorten a prompt by a language model's surprise (LLMLingua and others), for any model to read"
EXAMPLE = """examples:
  kvjax get smollm2-135m
  kvjax shorten --model smollm2-135m --file notes.txt --keep 0.5 > shorter.txt
  kvjax shorten --model smollm2-135m --file a.txt b.txt c.txt --question "Who wrote it?" --by longllmlingua
  kvjax shorten --model smollm2-135m --file notes.txt --question "Who wrote it?" --by cpc --keep 0.25
  kvjax shorten --model smollm2-135m --file notes.txt --set segment=200

The text goes to the standard output, its counts to the standard error. From Python: kvjax.shorten."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, default="smollm2-135m")
    add_dtype(parser)
    parser.add_argument(
        "--file",
        nargs="+",
        metavar="F",
        required=True,
        help="text files, each a document; - reads standard input",
    )
    parser.add_argument("--question", default="", metavar="TEXT", help="what is asked about them")
    parser.add_argument(
        "--keep",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="the share of tokens that stay (default: 0.5)",
    )
    parser.add_argument(
        "--by",
        default="llmlingua",
        metavar="NAME",
        help="llmlingua, longllmlingua or cpc (default: llmlingua)",
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="options of --by, such as segment=200"
    )


def run(args: argparse.Namespace) -> None:
    import kvjax
    from kvjax.commands.terminal import console, print_part
    from kvjax.commands.texts import text_of_file
    from kvjax.prompts.shorten import checked

    options = dict(_option(word) for word in args.set)
    checked(args.by, args.keep, args.question, options)
    texts = [text_of_file(name) for name in args.file]
    keep_programs()
    model = kvjax.load(args.model, dtype=args.dtype)
    short = kvjax.shorten(model, texts, keep=args.keep, question=args.question, by=args.by, **options)
    print_part(short.text + "\n")
    documents = f" of {len(short.kept)} of {len(texts)} documents" if len(texts) > 1 else ""
    told = f"kept {short.tokens} of {short.given} tokens ({short.tokens / short.given:.0%}){documents}"
    console(stderr=True).print(told, style="dim", highlight=False)


def _option(word: str) -> tuple[str, Any]:
    from kvjax.base.errors import InputError

    name, sign, value = word.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError) as error:
        raise InputError(f"--set was given {word!r}, expected a number, as in segment=200") from error
