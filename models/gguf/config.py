"""Metadata of a GGUF file, converted to the config.json that the model has on the Hugging Face hub.

Settings that llama.cpp derives from the architecture (windows of every second layer, gates of experts)
are written out here.
"""

from __future__ import annotations

from collections.abc import Callable

from kvjax.base.errors import InputError
from kvjax.models.gguf import dense, experts, hybrids
from kvjax.models.gguf.fields import Json, depth
from kvjax.models.gguf.gemma3n import gemma3n
from kvjax.models.gguf.gemma4 import gemma4
from kvjax.models.gguf.reader import Gguf
from kvjax.models.hf_left_out import why_not

_SIZES = {"hidden_size": "embedding_length", "max_position_embeddings": "context_length"}


def config_of(file: Gguf) -> Json:
    """Build the config.json of a file's model. Raises InputError for an unsupported architecture."""
    if (kind := file.get("general.type", "model")) != "model":
        raise InputError(
            f"{file.path} is a GGUF of the type {kind!r}, expected a whole model: give the model's file"
        )
    if file.architecture not in READ:
        raise InputError(
            f"{file.path} is of the architecture {file.architecture!r}, which "
            f"{why_not(file.architecture, READ)}: expected one of {', '.join(READ)}"
        )
    if "token_embd.weight" not in file.tensors:
        raise InputError(f"{file.path} has no token_embd.weight: it holds no language model")
    data: Json = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "num_hidden_layers": depth(file),
        **{name: file.need(key) for name, key in _SIZES.items()},
    }
    return data | READ[file.architecture](file)


READ: dict[str, Callable[[Gguf], Json]] = {
    "llama": dense.llama,
    "llama4": experts.llama4,
    "mistral3": dense.ministral3,
    "qwen2": dense.qwen("qwen2"),
    "qwen3": dense.qwen("qwen3"),
    "qwen3moe": experts.qwen3_moe,
    "gemma2": dense.gemma2,
    "gemma3": dense.gemma3,
    "gemma3n": gemma3n,
    "gemma4": gemma4,
    "phi3": dense.phi3,
    "olmo2": dense.olmo2,
    "smollm3": dense.smollm3,
    "exaone4": dense.exaone4,
    "seed_oss": dense.seed_oss,
    "ernie4_5": dense.ernie,
    "ernie4_5-moe": experts.ernie_moe,
    "glm4": dense.glm4,
    "glm4moe": experts.glm4_moe,
    "granite": dense.granite,
    "cohere2": dense.cohere2,
    "gpt-oss": experts.gpt_oss,
    "minimax-m2": experts.minimax_m2,
    "deepseek2": experts.deepseek2,
    "qwen3next": hybrids.gated_delta("qwen3_next"),
    "qwen35": hybrids.gated_delta("qwen3_5_text"),
    "qwen35moe": hybrids.gated_delta("qwen3_5_moe_text"),
    "granitehybrid": hybrids.granite_hybrid,
    "lfm2": hybrids.lfm2,
    "lfm2moe": hybrids.lfm2,
    "deepseek32": experts.indexed("deepseek_v32"),
    "glm-dsa": experts.indexed("glm_moe_dsa"),
    "nemotron_h": hybrids.nemotron_h,
    "nemotron_h_moe": hybrids.nemotron_h,
    "falcon-h1": hybrids.falcon_h1,
    "jamba": hybrids.jamba,
    "kimi-linear": hybrids.kimi_linear,
    "mamba2": hybrids.mamba2,
    "rwkv7": hybrids.rwkv7,
}
"""Every architecture that is read, by its name in GGUF."""
