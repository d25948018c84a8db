"""The tables of docs/benchmarks.md that need an accelerator: `python scripts/bench.py --accelerator`.

Parts run one after the other, each in its own process, so that a library frees its memory before the next
starts. Every row is written to the file as soon as it is measured; a second run adds the rows that are
missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from scripts.bench.report import cell, table
from scripts.bench.rows import Rows
from scripts.docs_tables import DOCS, write_table

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("jax", "jaxlib", "torch", "transformers", "kvpress")
# (part, its module, the share of the total time by which it must have finished).
PARTS = (
    ("attention", "attention", 0.2),
    ("training", "flops", 0.35),
    ("kvjax", "prefill", 0.45),
    ("kvjax", "decode", 0.8),
    ("kvpress", "prefill", 0.86),
    ("kvpress", "decode", 1.0),
)
LABELS = {
    "none": "full cache",
    "snapkv": "SnapKV",
    "adakv": "Ada-KV",
    "kivi": "KIVI, 2 bit",
    "quest": "Quest",
}
PROBE = """
import jax, json
d = jax.devices()[0]
limit = (d.memory_stats() or {}).get("bytes_limit", 0)
print(json.dumps(dict(platform=d.platform, device=d.device_kind, count=jax.device_count(), bytes=limit,
                      runtime=d.client.platform_version.split(chr(10))[0])))
"""


def environment() -> dict[str, str]:
    """Return the parts' environment: jax allocates memory on demand, since two libraries share the GPU."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
    return os.environ | memory | {"PYTHONPATH": paths}


def probe() -> dict[str, Any]:
    """Find the device of jax, with versions; asked in a process that ends and so holds no memory."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"jax found no device to run on: {done.stderr.strip().splitlines()[-1]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return found | {"versions": {name: found_version(name) for name in PACKAGES}}


def found_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def run_parts(path: str, args: argparse.Namespace, device: dict[str, Any]) -> None:
    start, total = time.time(), 60.0 * args.minutes
    for part, module, share in PARTS:
        missing = [n for n in ("torch", "transformers", "kvpress") if device["versions"][n] is None]
        if part == "kvpress" and missing:
            print(f"without kvpress, for want of {', '.join(missing)}: install '.[parity]' to compare")
            continue
        until = start + share * total
        print(f"{part}, until {time.strftime('%H:%M:%S', time.localtime(until))}", flush=True)
        command = [
            sys.executable,
            "-m",
            f"scripts.bench.{module}",
            part,
            "--rows",
            path,
            "--until",
            str(until),
        ]
        command += ["--ratio", str(args.ratio), *(["--smoke"] if args.smoke else [])]
        try:
            # A part has a hard time limit, a row does not; rows measured so far are in the file.
            code = subprocess.run(
                command, env=environment(), timeout=max(1.0, until - time.time()) + 0.05 * total, check=False
            ).returncode
            if code:
                print(f"  {part} ended with {code}: its rows so far are kept, run again for the others")
        except subprocess.TimeoutExpired:
            print(f"  {part} was stopped in the middle of a row: run again for the others")


def attention_table(rows: list[dict[str, Any]]) -> str:
    errors = {r["name"]: r["error"] for r in rows if r["part"] == "error"}
    lines = []
    made = [r for r in rows if r["part"] == "attention"]
    for r in sorted(made, key=lambda r: (r["tokens"], r["side"] != "kvjax", r["name"])):
        error = errors.get(r["name"]) if r["side"] == "kvjax" else None
        lines.append([
            f"{r['tokens']}", r["name"] if r["side"] == "kvjax" else f"{r['name']}, {r['side']}",
            cell(r["bytes"] / 2**20), cell(r["us"]), cell(r["gb_per_s"]), cell(r["copy_gb_per_s"]),
            cell(100 * r["share"], ".0f", " %"), cell(error, ".1e"), cell(r["compile_s"]),
        ])  # fmt: skip
    head = ["tokens", "payload", "MiB read", "µs", "GB/s", "copy GB/s", "share", "error", "first call s"]
    return table(head, lines)


def decode_table(rows: list[dict[str, Any]]) -> str:
    made = {(r["tokens"], r["batch"], r["name"], r["side"]): r for r in rows if r["part"] == "decode"}
    copies = [r["copy_gb_per_s"] for r in rows if r["part"] == "attention"]
    lines = []
    cells = sorted({k[:2] for k in made})
    for tokens, batch in cells:
        for name, label in LABELS.items():
            ours, theirs = (made.get((tokens, batch, name, side), {}) for side in ("kvjax", "kvpress"))
            if not ours and not theirs:
                continue
            a, b = ours.get("tokens_per_s"), theirs.get("tokens_per_s")
            floor = None
            if copies and "read_bytes" in ours:
                floor = batch * max(copies) * 1e9 / ours["read_bytes"]
            lines.append([
                f"{tokens}", f"{batch}", label,
                ours.get("skipped") or cell(a), theirs.get("skipped") or cell(b),
                cell(a / b if a and b else None, ".2f", "x"), cell(floor),
                cell(ours["bytes"] / 2**30 if "bytes" in ours else None, ".2f"),
                cell(theirs["bytes"] / 2**30 if "bytes" in theirs else None, ".2f"),
                cell(ours.get("ms"), ".2f"), cell(ours.get("device_ms"), ".2f"), cell(ours.get("compile_s")),
            ])  # fmt: skip
    head = ["tokens", "batch", "method", "kvjax tok/s", "kvpress tok/s", "ratio", "floor tok/s"]
    head += ["cache GiB, kvjax", "kvpress", "kvjax ms a token", "of the device", "compile s"]
    return table(head, lines)


def prefill_table(rows: list[dict[str, Any]]) -> str:
    made = {(r["tokens"], r["name"], r["side"]): r for r in rows if r["part"] == "prefill"}
    lines = []
    for tokens in sorted({k[0] for k in made}):
        for name, label in LABELS.items():
            ours, theirs = (made.get((tokens, name, side), {}) for side in ("kvjax", "kvpress"))
            if not ours and not theirs:
                continue
            a, b, rate = ours.get("tokens_per_s"), theirs.get("tokens_per_s"), rate_of(rows)
            share = 100 * a * ours["flops"] / tokens / rate if a and rate else None
            lines.append([
                f"{tokens}", label, ours.get("skipped") or cell(a, ",.0f"),
                theirs.get("skipped") or cell(b, ",.0f"), cell(a / b if a and b else None, ".2f", "x"),
                cell(share, ".0f", " %"), cell(ours.get("compile_s")),
            ])  # fmt: skip
    head = ["tokens", "method", "kvjax tok/s", "kvpress tok/s", "ratio", "share of a product", "compile s"]
    return table(head, lines)


def rate_of(rows: list[dict[str, Any]]) -> float | None:
    """FLOPs per second of a large matrix product on the same device."""
    return max((r["flops_per_s"] for r in rows if r["part"] == "product"), default=None)


def whole_rows_error(rows: list[dict[str, Any]]) -> float | None:
    return next((r["error"] for r in rows if r["part"] == "error" and r["name"] == "whole rows"), None)


def training_table(rows: list[dict[str, Any]]) -> str:
    rate, lines = rate_of(rows), []
    for r in (r for r in rows if r["part"] == "training"):
        share = 100 * r["flops_per_s"] / rate if rate else None
        lines.append([
            f"{r['tokens']}", f"{r['batch']}", "computed again" if r["name"] == "remat" else "kept",
            f"{r['tokens_per_s']:,.0f}", cell(r["flops_per_s"] / 1e12), cell(rate / 1e12 if rate else None),
            cell(share, ".0f", " %"), cell(r["compile_s"]),
        ])  # fmt: skip
    head = ["tokens of a row", "rows", "activations", "tokens/s", "TFLOP/s", "of a product", "share"]
    return table([*head, "compile s"], lines)


def page(rows: list[dict[str, Any]], device: dict[str, Any]) -> str:
    """Return all tables, with the names of the hardware and the versions."""
    versions = ", ".join(f"{n} {v}" for n, v in device["versions"].items() if v)
    settings = {r["name"]: r["setting"] for r in rows if r["part"] == "attention" and r.get("setting")}
    tuned = "; ".join(f"{name} {tuple(s)}" for name, s in settings.items())
    return f"""{device["device"]}, {device["bytes"] / 2**30:.0f} GiB for jax; {device["runtime"]}; {versions}.

Decode attention over pages: one query of 32 heads over 8 KV heads of width 128, one sequence. The copy is one
of as many bytes on the same device, read and written; the error is the relative RMS against the plain form.
The choice of pages is Quest's, of half of the pages of 16 tokens, which reads their bounds.

{attention_table(rows)}

Settings (rows per step, warps, stages, programs): {tuned or "none to choose"}.

Decoding with Llama-8B's shape, random weights in bfloat16, tokens per second of all rows together. Methods
with a budget keep or read half of the slots. The floor reads the weights and the cache once, as fast as the
fastest copy of the table above reads and writes. What a token takes beyond the device's work is the host's.

{decode_table(rows)}

Prompts of the same model, one row, until the last token's logits and the compressed cache are there. The
share counts the operations of the model, attention's causal half among them.

{prefill_table(rows)}

Training a model of 154 million parameters in bfloat16 by the step of `kvjax train`. The share is of a large
product of matrices on the same device; activations are kept for the gradient or computed again, which counts
once. Attention and its gradients differ from the plain form's by a relative RMS of
{cell(whole_rows_error(rows), ".1e")}.

{training_table(rows)}"""


def main(args: argparse.Namespace) -> None:
    if args.smoke and args.write:
        raise SystemExit("--smoke measures nothing that belongs into the docs: leave out --write or --smoke")
    device = probe()
    if device["platform"] == "cpu" and not args.smoke:
        raise SystemExit(
            "--accelerator measures on a GPU or TPU, and jax sees only a CPU here: install jax[cuda13] or "
            "jax[tpu] on a machine that has one, or add --smoke to try every row on tiny shapes"
        )
    beside = DOCS / "accelerator.jsonl" if args.write else "accelerator.jsonl"
    path = args.json or ("smoke.jsonl" if args.smoke else str(beside))
    if args.again:
        Rows(path).drop(device=device["device"], smoke=args.smoke)
    print(f"{device['device']}, {args.minutes:g} minutes, rows go to {path}")
    run_parts(path, args, device)
    rows = [r for r in Rows(path).rows if r["device"] == device["device"] and r["smoke"] == args.smoke]
    text = page(rows, device)
    print("Tiny shapes: no figure below is what its text says.\n\n" * args.smoke + text)
    if args.write:
        write_table("benchmarks.md", "accelerator", text)
