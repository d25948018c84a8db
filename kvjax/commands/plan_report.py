"""The output of `kvjax plan`: tables of bytes per device, a model of time, and what would fit."""

from __future__ import annotations

import argparse
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.table import Table

from kvjax.base.atomic_files import check_file, write_named
from kvjax.commands.inspect_model import find_config
from kvjax.commands.terminal import BOX, console, pairs, print_text, size
from kvjax.plan.layouts import read_rules
from kvjax.plan.named import NamedModel, named, names
from kvjax.plan.picture import curve, tokens_in_words, write_picture
from kvjax.plan.planning import Planner, PlanRequest
from kvjax.plan.topologies import topology_of

# The default host link, in bytes per second: PCIe 4 with 16 lanes.
HOST_LINK = 32e9


def list_models() -> int:
    """Print the models known by name, and the sources of their shapes."""
    out = console()
    table = Table(box=BOX, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("model", "layers", "heads", "KV heads", "positions", "from"):
        table.add_column(name, no_wrap=name == "model", overflow="fold")
    for name in names():
        one = named(name)
        c = one.config
        about = f" ({one.about})" if one.about else ""
        figures = (str(n) for n in (c.layers, c.heads, c.kv_heads, c.max_positions))
        table.add_row(name, *figures, f"{one.source}{about}")
    out.print(table)
    return 0


def plan_all(args: argparse.Namespace) -> int:
    """Plan the requested settings for each of the methods; return the exit code."""
    for path in (args.json, args.picture):
        check_file(path)
    topology, changed = topology_of(args.topology), read_rules(args.rule)
    model = find_model(args.model)
    asked = [
        PlanRequest(
            model.name, model.config, topology, args.context, args.batch, method, args.preset, args.mesh,
            changed, args.dtype, args.chunk,
        )
        for method in args.method or ["full"]
    ]  # fmt: skip
    out = console()
    planners, plans = [], []
    with out.status("sizing") as status:
        # All planners are built first, so that a mistake in the last is reported before the first compiles.
        planners = [Planner(one) for one in asked]
        for planner in planners:
            label = planner.asked.label
            plans.append(
                planner.plan(
                    not args.no_compile,
                    not args.no_largest,
                    lambda text, label=label: status.update(f"{label}: {text}"),
                )
            )
        curves = {p.asked.label: curve(p) for p in planners} if args.picture else {}
    if args.json:
        report = {"plans": plans, "versions": _versions()}
        write_named(Path(args.json), (json.dumps(report, indent=1) + "\n").encode())
    _print(model, planners, plans)
    if args.picture:
        write_picture(args.picture, curves, *_titles(plans[0]))
    return int(any(plan["fits"] is False or _failed(plan) for plan in plans))


def find_model(name: str) -> NamedModel:
    """Find a model by its name here, or else as `kvjax inspect` does. InputError if there is none."""
    if not os.path.lexists(name) and "/" not in name:
        from kvjax.io.load import shipped

        if name not in shipped():
            return named(name)
    config, folder = find_config(name)
    return NamedModel(name, config, "" if folder is None else str(folder))  # type: ignore[arg-type]


def _print(model: NamedModel, planners: list[Planner], plans: list[dict[str, Any]]) -> None:
    out, first = console(), plans[0]
    memory = "memory is not known" if first["memory"] is None else f"{size(first['memory'])} each"
    rows = [
        ("model", f"{model.name}, {first['parameters'] / 1e9:.2f} B parameters in {first['dtype']}"),
        ("", f"{model.source}{f': {model.about}' if model.about else ''}"),
        ("devices", f"{first['devices']} devices of {first['topology']}, {memory}"),
        ("asked", f"{first['batch']} rows of {tokens_in_words(first['context'])} tokens"),
    ]
    labels = [plan["method"] for plan in plans]
    rows += [
        (f"split {label}" if len(plans) > 1 else "split", p.layout.words)
        for label, p in zip(labels, planners, strict=True)
    ]
    out.print(pairs([row for row in rows if row[1]]))
    out.print()
    out.print("On every device", style="bold")
    out.print(_table(plans))
    out.print()
    for plan in plans:
        for line in _lines(plan):
            print_text(out, f"{plan['method']}: {line}")
    for note in dict.fromkeys(note for plan in plans for note in plan["notes"]):
        print_text(out, f"Note: {note}.")
    if any(_step(plan).get("roofline") for plan in plans):
        print_text(out, first["roofline_note"], style="dim")


def _table(plans: list[dict[str, Any]]) -> Table:
    table = Table(box=BOX, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True)
    for name in ("weights", "cache", "temporaries", "needs", "fits", "collectives", "seconds"):
        table.add_column(name, justify="right")
    for plan in plans:
        held = (size(plan["weights"]), size(plan["cache"]))
        if plan["decode"] is None:
            fits = {True: "yes, but for temporaries", False: "no", None: "-"}[plan["fits"]]
            table.add_row(plan["method"], *held, "-", size(plan["weights"] + plan["cache"]), fits, "-", "-")
        for name, words in (("decode", "step"), ("prefill", "chunk")):
            if plan[name] is not None:
                table.add_row(f"{plan['method']}, {words}", *held, *_figures(plan[name]))
    return table


def _figures(found: dict[str, Any]) -> tuple[str, ...]:
    """temporaries, needs, fits, collectives, seconds."""
    fits = {True: "yes", False: "no", None: "-"}[found["fits"]]
    needs = "-" if found.get("needs") is None else size(found["needs"])
    seconds = f"{found['compile_seconds']:.0f}" if "compile_seconds" in found else "-"
    if "error" in found:
        return "-", needs, fits if found.get("too_large") else "see below", "-", seconds
    sent = "; ".join(f"{n} {kind} {size(count)}" for kind, n, count in found["collectives"])
    return size(found["temporaries"]), needs, fits, sent or "none", seconds


def _lines(plan: dict[str, Any]) -> list[str]:
    """Return the lines below the table, for values without a column."""
    out = []
    for name, words in (("decode", "the step"), ("prefill", "the chunk")):
        found = plan[name]
        if found is not None and "error" in found:
            out.append(f"{words} was not compiled: {found['error']}")
    out += [f"the chunk, {line}" for line in plan["prompt"]]
    least = _step(plan).get("roofline")
    if least:
        rate = 1e3 * plan["batch"] / least["ms"]
        out.append(
            f"roofline {least['ms']:.1f} ms a step, {rate:.0f} tokens a second (hbm {least['hbm']:.1f}, mxu "
            f"{least['mxu']:.1f}, links {least['links']:.1f})"
        )
    if plan["host"]:
        ms = 1e3 * plan["host"] / HOST_LINK
        out.append(
            f"{size(plan['host'])} of the cache lie in host memory beside every device, and a step brings "
            f"them from there: {ms:.0f} ms at {HOST_LINK / 1e9:.0f} GB/s, which the roofline leaves out"
        )
    seconds = (plan["prefill"] or {}).get("prompt_seconds")
    if seconds is not None:
        out.append(f"roofline {seconds:.0f} s a prompt, in such chunks")
    most = plan["largest"]
    if most is not None:
        how = {True: "compiled", False: "by sizes"}
        rows, tokens = (how[most[f"{name}_confirmed"]] for name in ("rows", "tokens"))
        out.append(
            f"at most {most['rows']} rows of {tokens_in_words(plan['context'])} tokens ({rows}), or "
            f"{plan['batch']} rows of {tokens_in_words(most['tokens'])} tokens ({tokens})"
        )
    return out


def _titles(plan: dict[str, Any]) -> tuple[str, tuple[int, int], str]:
    """Return the picture's title, settings and caption."""
    how = "temporaries as compiled" if plan["decode"] is not None else "weights and caches alone"
    title = f"{plan['model']} in {plan['dtype']} on {plan['topology']}: what fits"
    return title, (plan["context"], plan["batch"]), f"By sizes, {how}; meshes as for what was asked."


def _step(plan: dict[str, Any]) -> dict[str, Any]:
    return plan["decode"] or {}


def _failed(plan: dict[str, Any]) -> bool:
    return any("error" in (plan[name] or {}) for name in ("decode", "prefill"))


def _versions() -> dict[str, str]:
    """Return the versions of the packages that made the plan."""
    found = {}
    for name in ("jax", "libtpu", "jax-cuda13-plugin"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
