"""Turns weights of the recall recipe (.npz, fused matrices, [out, in]) into a Hugging Face Llama directory.

    python scripts/import_recall.py weights.npz models/zoo/recall-tiny

The directory loads like any other checkpoint, here and in transformers.
"""

import argparse
import json

import jax.numpy as jnp
import numpy as np

from kvjax.eval import recall
from kvjax.models.hf import save_hf
from kvjax.models.model import Model
from kvjax.models.transformer import Config, Params
from kvjax.ops.rope import Rope

MAX_POSITIONS = 2048  # the longest sequences of the training


def read(path: str) -> tuple[Config, Params]:
    """Config and parameters (float16, one group per layer) of an .npz file of the recipe."""
    with np.load(path) as file:
        data = {name: file[name] for name in file.files}
    sizes = json.loads(str(data.pop("__config__")))
    if sizes["qk_norm"]:
        raise ValueError("the recipe's QK-norm has no place in a Llama directory; train without --qk_norm")
    config = Config(
        vocab=sizes["vocab"],
        d_model=sizes["d"],
        layers=sizes["layers"],
        heads=sizes["heads"],
        kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        d_ff=sizes["ffn"],
        rope=Rope(theta=sizes["theta"]),
        norm_eps=1e-6,
        tied=True,
        max_positions=MAX_POSITIONS,
    )
    layers = tuple(_layer(data, f"blocks.{i}.", config) for i in range(config.layers))
    return config, {"embed": jnp.asarray(data["emb"]), "norm": jnp.asarray(data["nf"]), "layers": layers}


def _layer(data: dict[str, np.ndarray], prefix: str, config: Config) -> Params:
    n, k = config.heads * config.head_dim, config.kv_heads * config.head_dim
    q, key, v = np.split(data[prefix + "wqkv"], [n, n + k])
    gate, up = np.split(data[prefix + "w13"], 2)
    matrices = {"q": q, "k": key, "v": v, "gate": gate, "up": up}
    matrices |= {"o": data[prefix + "wo"], "down": data[prefix + "w2"]}
    norms = {"attn_norm": data[prefix + "n1"], "mlp_norm": data[prefix + "n2"]}
    leaves = {name: w.T for name, w in matrices.items()} | norms
    return {name: jnp.asarray(w)[None] for name, w in leaves.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("npz", help="weights written by the recipe")
    parser.add_argument("out", help="directory to write, for example models/zoo/recall-tiny")
    args = parser.parse_args()
    config, params = read(args.npz)
    special = {"bos_token": recall.WORDS[recall.BOS], "pad_token": recall.WORDS[recall.PAD]}
    special["repeat_prompt"] = recall.WORDS[recall.COPY]
    save_hf(Model(config, params, tokenizer=recall.tokenizer(), special_tokens=special), args.out)


if __name__ == "__main__":
    main()
