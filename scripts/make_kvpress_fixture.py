"""Trims a dump of what kvpress computes to the presses that kvjax has: tests/fixtures/kvpress_tiny_llama.npz.

The dump holds, for one tiny random Llama and one prompt, the weights and per press the scores, the kept
positions and the logits of the next token (kvpress 0.5.5, transformers 5.2.0, float32, half of the tokens
removed). tests/methods/test_kvpress.py reads the fixture and needs neither kvpress nor torch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

OUT = Path(__file__).parents[1] / "tests" / "fixtures" / "kvpress_tiny_llama.npz"
PREFILL = (
    "random",
    "knorm",
    "keydiff",
    "cur",
    "cap",
    "leverage",
    "non_causal",
    "compactor",
    "qfilter",
    "snapkv",
    "tova",
    "streaming_llm",
    "observed_attention",
    "pyramidkv",
    "adakv_snapkv",
    "adakv_knorm",
    "expected_attention",
    "expected_attention_eps",
    "expected_attention_nocov",
    "expected_attention_stats",
    "kvzip",
    "kvzip_layerwise",
    "kvzip_plus",
    "kvgrad",
    "restorekv",
    "per_layer_knorm",
    "chunk_knorm",
    "block_keydiff",
    "merging_knorm",
    "entropy_chunkkv_snapkv",
)
DECODING = ("dec_knorm", "dec_tova", "prefill_dec_snapkv_knorm")
# Per press; a press has those that apply to it.
ARRAYS = (
    "scores", "keep", "logits_next", "x/repeat_ids_0", "x/randn", "x/q_filters", "x/mu", "x/cov",
    "cont_ids", "x/steps", "logits_steps", "cache_len_steps", "slot_positions",
)  # fmt: skip


def trim(dump: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the test reads, with the press arguments in `meta`."""
    meta = json.loads(str(dump["meta"]))
    presses = {name: meta["presses"][name]["press"] for name in (*PREFILL, *DECODING)}
    config = meta["config"]
    out = {"meta": np.array(json.dumps({"presses": presses, "config": config, "kvpress": meta["kvpress"]}))}
    out |= {name: dump[name] for name in ("ids", "cont_id", "ref/logits_last", "ref/logits_next")}
    out |= {name: array for name, array in dump.items() if name.startswith("w/")}
    for press in presses:
        out |= {f"{press}/{n}": dump[f"{press}/{n}"] for n in ARRAYS if f"{press}/{n}" in dump}
    out["restorekv/x/memory"] = restore_tokens(int(meta["seed"]), config["hidden_size"])
    return out


def restore_tokens(seed: int, width: int) -> np.ndarray:
    """The embeddings of restore tokens, which the dump does not hold: torch draws them as it did there."""
    import torch

    return (0.1 * torch.randn(8, width, generator=torch.Generator().manual_seed(seed + 1008))).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dump", type=Path, help="the .npz with everything")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    with np.load(args.dump) as dump:
        np.savez_compressed(args.out, **trim(dict(dump)))
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
