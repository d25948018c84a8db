"""`kvjax inspect`: a model's shapes and what its caches take, or what a saved cache holds. No weights are read."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.commands.options import add_dtype, whole
from kvjax.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from kvjax.models.transformer import Config

HELP = "show a model's shapes and the bytes of its caches under every method, or what a saved cache holds"
EXAMPLE = """examples:
  kvjax inspect recall-tiny
  kvjax inspect path/to/model --context 32768 --dtype bfloat16
  kvjax inspect saved.cache"""
BUDGETS = (0.5, 0.25)
LONGEST_DEFAULT = 8192


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        metavar="DIR|NAME|CACHE_FILE",
        help="a model directory, a shipped model, org/name of the hub, or a file of kvjax.save_cache",
    )
    parser.add_argument(
        "--context",
        type=whole(1),
        metavar="N",
        help=f"tokens for which the caches are sized (default: the model's positions, at most {LONGEST_DEFAULT})",
    )
    add_dtype(parser)


def run(args: argparse.Namespace) -> None:
    if Path(args.what).is_file():
        from kvjax.commands.inspect_cache import print_cache

        print_cache(args.what)
    else:
        _print_model(args)


def _print_model(args: argparse.Namespace) -> None:
    from kvjax.commands.terminal import console, pairs

    config, folder = find_config(args.what)
    tokens = args.context or min(config.max_positions, LONGEST_DEFAULT)
    if tokens > config.max_positions:
        raise InputError(
            f"--context is {tokens}, expected at most the model's {config.max_positions} positions: lower it"
        )
    out = console()
    out.print(pairs([("model", args.what), *model_rows(config, folder, args.dtype)]))
    with out.status(f"sizing caches of {tokens} tokens"):
        table, note = cache_table(config, args.dtype, tokens)
    out.print()
    out.print(f"[bold]Cache of one row after {tokens} tokens, {args.dtype}[/]")
    out.print(table)
    out.print()
    out.print(note, style="dim")


def find_config(name: str) -> tuple[Config, Path | None]:
    """A model's config and, where it lies on disk, its directory; weights are read only of kvjax checkpoints.

    Raises InputError where there is no such model.
    """
    from kvjax.checkpoint import MARKER
    from kvjax.models.files import check_folder, read_json
    from kvjax.models.hf_config import config_from_hf
    from kvjax.models.load import SHIPPED, load, shipped

    folder = None
    if os.path.lexists(name):
        folder = check_folder(name)
    elif name in shipped():
        folder = SHIPPED / name
    elif "/" in name:
        with contextlib.suppress(Exception):  # `load` below says what is wrong
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(name, allow_patterns=["*.json"]))
    if folder is None or (folder / MARKER).is_file():
        return load(name).config, folder
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} is no model directory, expected a config.json in it: check the path")
    return config_from_hf(read_json(folder / "config.json")), folder


def model_rows(config: Config, folder: Path | None, dtype: str) -> list[tuple[str, str]]:
    """What a config says, in words."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from kvjax.commands.sizes import abstract_params
    from kvjax.commands.terminal import size

    item = jnp.dtype(dtype).itemsize
    count = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(abstract_params(config, dtype)))
    files = list(folder.glob("*.safetensors")) if folder else []
    disk = f" ({size(sum(f.stat().st_size for f in files))} on disk)" if files else ""
    windows = [w for w in config.windows if w is not None]
    whole = config.layers - len(windows)
    per_layer = 2 * config.kv_heads * config.head_dim * item
    rows = [
        ("family", config.family),
        ("layers", f"{config.layers} of width {config.d_model}, MLP {config.d_ff}"),
        ("heads", f"{config.heads} query, {config.kv_heads} KV, {config.head_dim} channels each"),
        ("vocabulary", f"{config.vocab}{', tied embeddings' if config.tied else ''}"),
        ("positions", f"{config.max_positions}, rope {config.rope.kind}, theta {config.rope.theta:g}"),
        ("parameters", f"{_count(count)}, {size(count * item)} in {dtype}{disk}"),
        (
            "KV per token",
            f"{size(whole * per_layer)} in {dtype}: 2 x {whole} layers x {config.kv_heads} heads x {config.head_dim} "
            f"channels x {item} B",
        ),
    ]
    if windows:
        sizes = ", ".join(str(w) for w in sorted(set(windows)))
        rows.append(
            ("windows", f"{len(windows)} layers keep the newest {sizes} tokens only, {size(per_layer)} each")
        )
    return rows


def _count(number: int) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return str(number)


def cache_table(config: Config, dtype: str, tokens: int) -> tuple[Table, str]:
    """The table of bytes per method and budget, and the note below it."""
    from rich.table import Table
    from rich.text import Text

    from kvjax.commands.sizes import Sizes
    from kvjax.commands.terminal import BOX, size
    from kvjax.gin_bindings import load_preset
    from kvjax.methods import TABLE
    from kvjax.methods.parse import parse_method

    preset = "short" if tokens <= 1024 else "long"
    hyper = load_preset(preset)
    builders = {id: parse_method(id, hyper)[1] for id in TABLE}
    columns = {
        id: {b: build(b) for b in (BUDGETS if build.takes_budget else (None,))}
        for id, build in builders.items()
    }
    sizes = Sizes(config, dtype, tokens, [m for row in columns.values() for m in row.values()])
    full = sizes.nbytes(columns["full"][None])
    table = Table(box=BOX, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("method", no_wrap=True)
    for header in ("no budget", *(f"budget {b}" for b in BUDGETS)):
        table.add_column(header, justify="right", no_wrap=True)
    refused: list[str] = []

    def cell(method: Any) -> Text:
        if method is None:
            return Text("")
        try:
            count = sizes.nbytes(method)
        except ValueError as error:
            refused.append(f"{method.id}: {error}")
            return Text("–", style="dim")
        return Text.assemble(size(count), (f"{100 * count / full:7.1f}%", "dim"))

    for id, row in columns.items():
        table.add_row(Text(id, style="bold"), *(cell(row.get(b)) for b in (None, *BUDGETS)))
    note = (
        "Everything counts: codes, scales, positions, statistics, page tables; % of the full cache. Shapes are those "
        "of the real prefill, without room for new tokens. Read methods keep every token, their budget is what a step "
        f"visits. Hyper-parameters: preset {preset}."
    )
    return table, "\n".join([note, *(f"– {line}" for line in dict.fromkeys(refused))])
