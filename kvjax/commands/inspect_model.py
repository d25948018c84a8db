"""A model's shapes and the size of its caches under every method, from its config; reads no weights."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table
from rich.text import Text

from kvjax.base.errors import InputError
from kvjax.commands.options import LONGEST_DEFAULT
from kvjax.commands.terminal import BOX, console, pairs, print_text, size
from kvjax.eval.run.cellplan import ALWAYS, WELL_KNOWN
from kvjax.grammar import Method
from kvjax.io.checkpoint import MARKER, read_head
from kvjax.io.gin_bindings import load_preset
from kvjax.io.load import load, model_path
from kvjax.methods import METHODS
from kvjax.methods.parse import parse_method
from kvjax.models.block_transformer import BlockConfig
from kvjax.models.config import Config
from kvjax.models.feed_forward import NoMLP, mlp_of
from kvjax.models.files import read_json
from kvjax.models.gguf.load import config_of_gguf
from kvjax.models.gguf.reader import is_gguf, open_gguf
from kvjax.models.hf_config import config_from_hf
from kvjax.models.mixer import SlotShape
from kvjax.models.mixers.attention import Attention, mixer_of
from kvjax.models.mixers.rwkv import ChannelMix
from kvjax.models.quantised.settings import beside, quantisation_of
from kvjax.plan.cache_sizes import abstract_params, sizes_of

BUDGETS = (0.5, 0.25)


def print_model(name: str, context: int | None, dtype: str) -> None:
    """Print a model's shapes and the bytes of its caches at `context` tokens (None: as many as usual).

    Raises InputError if there is no such model, or it has fewer positions.
    """
    config, folder = find_config(name)
    tokens = context or min(config.max_positions, LONGEST_DEFAULT)
    if tokens > config.max_positions:
        raise InputError(
            f"--context is {tokens}, expected at most the model's {config.max_positions} positions: lower it"
        )
    out = console()
    out.print(pairs([("model", name), *model_rows(config, folder, dtype)]))
    with out.status(f"sizing caches of {tokens} tokens"):
        table, note = cache_table(config, dtype, tokens)
    out.print()
    out.print(f"Cache of one row after {tokens} tokens, {dtype}", style="bold")
    out.print(table)
    out.print()
    print_text(out, note, style="dim")


def find_config(name: str) -> tuple[Config | BlockConfig, Path | None]:
    """Return a model's config and, if it is on disk, its directory or GGUF file; read no weights.

    name: also that of a config.json under another name. Raises InputError if there is no such model.
    """
    if name.endswith(".json") and Path(name).is_file():
        return config_from_hf(read_json(Path(name))), None
    folder = None
    if os.path.lexists(name) or "/" not in name:
        folder = model_path(name)
    else:
        with contextlib.suppress(Exception):  # `load` below reports the error
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(name, allow_patterns=["*.json"]))
    if folder is None:
        return load(name).config, folder
    if is_gguf(folder):
        return config_of_gguf(open_gguf(folder)), folder
    if (folder / MARKER).is_file():
        return read_head(folder)[0], folder
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} is no model directory, expected a config.json in it: check the path")
    return config_from_hf(beside(folder, read_json(folder / "config.json"))), folder


def model_rows(config: Config | BlockConfig, folder: Path | None, dtype: str) -> list[tuple[str, str]]:
    """Return the fields of a config, described in words."""
    disk = "" if folder is None else _on_disk(folder)
    item = jnp.dtype(dtype).itemsize
    count = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(abstract_params(config, dtype)))
    parameters = ("parameters", f"{_count(count)}, {size(count * item)} in {dtype}{disk}")
    if isinstance(config, BlockConfig):
        return [*_block_rows(config, dtype), parameters]
    return [
        ("family", config.family),
        *_shape_rows(config),
        ("vocabulary", f"{config.vocab}{', tied embeddings' if config.tied else ''}"),
        parameters,
        *_slot_rows(config, dtype),
    ]


def _on_disk(folder: Path) -> str:
    """Return the size of a model's files, and their quantisation."""
    files = [folder] if folder.is_file() else list(folder.glob("*.safetensors"))
    config = folder / "config.json"
    how = quantisation_of(beside(folder, read_json(config))) if config.is_file() else None
    by = "" if how is None else f", quantised by {how.method}"
    return f" ({size(sum(f.stat().st_size for f in files))} on disk{by})" if files else ""


def _block_rows(config: BlockConfig, dtype: str) -> list[tuple[str, str]]:
    """Both decoders of a Block Transformer: what one caches per block, and the other for the open block."""
    n, inside = config.length, config.inside
    below, above = (_bytes_per_slot(c, dtype) for c in (config.blocks, config.tokens))
    both = [
        (f"{name}: {what}", text)
        for name, one, unit in (("blocks", config.blocks, "block"), ("tokens", config.tokens, "input"))
        for what, text in [*_shape_rows(one), *_slot_rows(one, dtype, unit)]
    ]
    return [
        ("family", f"Block Transformer: a decoder of blocks of {n} tokens, one of the tokens in a block"),
        ("vocabulary", str(config.vocab)),
        ("positions", f"{config.max_positions}, {n} per block"),
        (
            "KV per token",
            f"{size(below / n)} in {dtype}, {size(below)} per block; at most {size(inside * above)} for the "
            f"open block: {inside} slots in every layer, its prefix of {config.prefix} and {n - 1} tokens",
        ),
        *both,
        ("methods", "act on the slots of blocks, codecs on all; none can repeat the prompt's tokens"),
    ]


def _shape_rows(config: Config) -> list[tuple[str, str]]:
    """Sizes of the layers; without attention no heads and no rotation, without an MLP no width of it."""
    layers = range(config.layers)
    words = [mixer_of(config, i) for i in layers]
    wide = any(not isinstance(mlp_of(config, i), NoMLP) or isinstance(words[i], ChannelMix) for i in layers)
    shape = f"{config.layers} of width {config.d_model}{f', MLP {config.d_ff}' if wide else ''}"
    if all(word.slots(config) is None for word in words):
        return [("layers", shape), ("positions", str(config.max_positions))]
    still = sum(type(word) is Attention and not word.rotates for word in words)
    without = f", none in {_layers(still)}" if still else ""
    rope = f"rope {config.rope.kind}, theta {config.rope.theta:g}{without}"
    return [
        ("layers", shape),
        ("heads", f"{config.heads} query, {config.kv_heads} KV, {config.head_dim} channels each"),
        ("positions", f"{config.max_positions}, {rope}"),
    ]


def _own_slots(config: Config) -> list[SlotShape | None]:
    """Per layer, the slots it keeps itself."""
    mixers = [mixer_of(config, i) for i in range(config.layers)]
    return [None if "slots" in m.takes else m.slots(config) for m in mixers]


def _growing(config: Config) -> Counter[SlotShape]:
    """Return the kinds of slots that layers add for every token, and how many layers have each."""
    own = enumerate(_own_slots(config))
    return Counter(s for i, s in own if s is not None and not s.fixed and config.window(i) is None)


def _slot_bytes(slots: SlotShape, item: int) -> int:
    return slots.heads * (slots.key + (0 if slots.shared else slots.value)) * item


def _bytes_per_slot(config: Config, dtype: str) -> int:
    """Bytes that all layers together add for every token."""
    return sum(n * _slot_bytes(s, jnp.dtype(dtype).itemsize) for s, n in _growing(config).items())


def _slot_rows(config: Config, dtype: str, unit: str = "token") -> list[tuple[str, str]]:
    """Return what the layers cache for every `unit` that they read."""
    item = jnp.dtype(dtype).itemsize
    windows = [w for w in config.windows if w is not None]
    mixers, slots = [mixer_of(config, i) for i in range(config.layers)], _own_slots(config)
    per_layer = {s: _slot_bytes(s, item) for s in slots if s is not None}
    words = " + ".join(_layers_words(s, n, item) for s, n in _growing(config).items())
    rows = [
        (
            f"KV per {unit}",
            f"{size(_bytes_per_slot(config, dtype))} in {dtype}: {words or f'no layer keeps every {unit}'}",
        ),
    ]
    readers = [at for m in mixers if (at := m.source_of("slots")) is not None]
    if readers:
        owners = ", ".join(map(str, sorted(set(readers))))
        rows.append(("shared", f"{_layers(len(readers))} without own slots, reading those of {owners}"))
    contexts = [s for s in slots if s is not None and s.fixed]
    if contexts:
        costs = ", ".join(f"{s.key} channels, {size(per_layer[s])}" for s in contexts)
        rows.append(("context", f"per token of a context {costs} in {dtype}, whatever reads it"))
    states = [m.state(config) for m in mixers if m.state(config)]
    grown = [int(np.prod(shape[1:])) for m in mixers for n, shape in m.state(config).items() if n in m.grows]
    if grown:
        layers = sum(bool(m.grows) for m in mixers)
        numbers = f"{sum(grown)} numbers per {unit} and row"
        rows.append(("growing state", f"{_layers(layers)} with {numbers}, which no method compresses"))
    if states:
        numbers = sum(int(np.prod(shape)) for state in states for shape in state.values())
        rows.append(("state", f"{_layers(len(states))} with {numbers} numbers per row, whatever its length"))
    if windows:
        sizes = ", ".join(str(w) for w in sorted(set(windows)))
        own = {s for i, s in enumerate(slots) if s is not None and config.window(i) is not None}
        costs = ", ".join(size(x) for x in sorted({per_layer[s] for s in own}))
        rows.append(("windows", f"{_layers(len(windows))} of the newest {sizes} {unit}s only, {costs} each"))
    return rows


def acts_on(config: Config | BlockConfig) -> str:
    """Return the layers that a budget applies to, if these are not all."""
    if isinstance(config, BlockConfig):
        return ""
    acted, windows = sum(_growing(config).values()), sum(w is not None for w in config.windows)
    states = sum(bool(mixer_of(config, i).state(config)) for i in range(config.layers))
    if acted == config.layers or not windows + states:
        return ""
    if not acted:
        return " No layer keeps every token, so a budget changes nothing here."
    left = [f"the windows of {windows}"] * bool(windows) + [f"the states of {states}"] * bool(states)
    return (
        f" A budget is a share of what {acted} of {_layers(config.layers)} keep, which have every token; "
        f"{' and '.join(left)} stay as they are."
    )


def _layers(count: int) -> str:
    return f"{count} layer" if count == 1 else f"{count} layers"


def _layers_words(slots: SlotShape, layers: int, item: int) -> str:
    """How the bytes of some equal layers are computed, in words."""
    if slots.shared:
        kind = "in one array" if slots.factors else "latents"
        heads = f" x {slots.heads} heads" if slots.heads > 1 else ""
        return f"{_layers(layers)}{heads} x {slots.key} channels ({kind}) x {item} B"
    if slots.key == slots.value:
        return f"2 x {_layers(layers)} x {slots.heads} heads x {slots.key} channels x {item} B"
    return f"{_layers(layers)} x {slots.heads} heads x ({slots.key} + {slots.value}) channels x {item} B"


def _count(number: int) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return str(number)


def cache_table(config: Config | BlockConfig, dtype: str, tokens: int) -> tuple[Table, str]:
    """Return the table of bytes per well-known method and budget, and the note below it."""
    preset = "short" if tokens <= 1024 else "long"
    hyper = load_preset(preset)
    builders = {id: parse_method(id, hyper)[1] for id in METHODS if id in (*ALWAYS, *WELL_KNOWN)}
    columns = {
        id: {b: build(b) for b in (BUDGETS if build.takes_budget else (None,))}
        for id, build in builders.items()
    }
    sizes = sizes_of(config, dtype, tokens, [m for row in columns.values() for m in row.values()])
    full = sizes.nbytes(columns["full"][None])
    table = Table(box=BOX, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("method", no_wrap=True)
    for header in ("no budget", *(f"budget {b}" for b in BUDGETS)):
        table.add_column(header, justify="right", no_wrap=True)
    refused: dict[str, list[str]] = {}

    def cell(method: Method | None) -> Text:
        if method is None:
            return Text("")
        try:
            count = sizes.nbytes(method)
        except (ValueError, InputError) as error:
            who = refused.setdefault(str(error).removeprefix(method.id).lstrip(": "), [])
            who += [] if method.id in who else [method.id]
            return Text("–", style="dim")
        return Text.assemble(size(count), (f"{100 * count / full:7.1f}%", "dim"))

    for id, row in columns.items():
        table.add_row(Text(id, style="bold"), *(cell(row.get(b)) for b in (None, *BUDGETS)))
    note = (
        "Everything counts: codes, scales, positions, statistics, page tables; % of the full cache. Shapes "
        "are those of the real prefill, without room for new tokens. Read methods keep every token, their "
        f"budget is what a step visits. Hyper-parameters: preset {preset}. `kvjax explain METHOD` says "
        "what any other method weighs."
    )
    note += acts_on(config)
    return table, "\n".join([note, *(f"– {', '.join(who)}: {why}" for why, who in refused.items())])
