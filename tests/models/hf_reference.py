"""Random checkpoints built and run by transformers (eager attention, float32)."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM


def build(case: dict[str, Any], folder: Path, seed: int = 0) -> Any:
    """Build a model of the class config.json `case` names, with random weights; write its config.json."""
    (folder / "config.json").write_text(json.dumps(case))
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    # The fused form refuses matrices as small as these in bfloat16.
    model.config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(seed)
    # Gemma 2 and 3 add one to the weights of norms.
    gemma = case["model_type"] in ("gemma2", "gemma3_text")
    oss = case["model_type"] == "gpt_oss"
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 2:
                # Steep attention and spread logits: a wrong mask or angle must show.
                value = noise * (1.0 if "embed" in name else 1.5) * weight.shape[-1] ** -0.5
            else:
                value = 0.3 * noise + (1.0 if ("norm" in name or "scale" in name) and not gemma else 0.0)
            if oss and name.endswith("experts.gate_up_proj"):
                value *= 4.0  # Beyond the limits of its clamps.
            weight.copy_(value.to(torch.bfloat16).float())
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                noise = 1 + 0.3 * torch.randn(buffer.shape, generator=generator)
                buffer.copy_(noise.to(torch.bfloat16).float())
            if name.endswith("e_score_correction_bias"):
                noise = 0.2 * torch.randn(buffer.shape, generator=generator)
                buffer.copy_(noise.to(torch.bfloat16).float())
    return model


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] in float32."""
    _norm_by_group(model)
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long(), use_cache=False).logits.float().numpy()


def _norm_by_group(model: Any) -> None:
    """Mamba-2's gated norm over each group's channels, as in the authors' mamba2.py and transformers 5.24.

    In 5.2 the module takes all channels together.
    """

    def forward(norm: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        gated = x.float() * torch.nn.functional.silu(gate.float())
        parts = gated.unflatten(-1, (model.config.n_groups, -1))
        scale = (parts.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
        return norm.weight * (parts / scale).flatten(-2).to(x.dtype)

    for module in model.modules():
        if type(module).__name__ == "MambaRMSNormGated" and not hasattr(module, "group_size"):
            module.forward = functools.partial(forward, module)


def greedy(model: Any, tokens: np.ndarray, count: int) -> np.ndarray:
    """`tokens` [B, T] with `count` greedy tokens behind them."""
    for _ in range(count):
        best = logits(model, tokens)[:, -1].argmax(-1)
        tokens = np.concatenate([tokens, best[:, None].astype(tokens.dtype)], axis=1)
    return tokens
