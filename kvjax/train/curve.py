"""The picture of a run: its losses over the training tokens."""

from __future__ import annotations

import io
import json
from pathlib import Path


def draw_losses(log: Path) -> bytes:
    """Draw the losses in a log.jsonl, of the batches and of held-out texts, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    records = [json.loads(line) for line in log.read_text().splitlines()]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([r["tokens"] for r in records], [r["loss"] for r in records], lw=1, label="batches")
    held = [r for r in records if "held_out_loss" in r]
    if held:
        at, loss = [r["tokens"] for r in held], [r["held_out_loss"] for r in held]
        axes.plot(at, loss, "o-", ms=4, label=f"held out ({held[-1]['bits_per_byte']:.3f} bits per byte)")
    axes.set(xlabel="tokens read", ylabel="loss, nats per token")
    axes.grid(alpha=0.3)
    if records:
        axes.legend()
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    plt.close(figure)
    return file.getvalue()
