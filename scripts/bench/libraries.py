"""The two libraries of the benchmarks: kvjax, and transformers + kvpress, on one random Llama."""

from __future__ import annotations

from typing import Any

from scripts.bench.timing import pin, timed

# versions.py also imports `pin` and `timed` from this module of every checkout.
__all__ = ["LLAMA", "METHODS", "Ours", "Theirs", "measure", "pin", "theirs_can", "timed"]

METHODS = {
    "none": ("full", {}, None),
    "knorm": ("l2compress", {"skip_layers": 0}, "KnormPress"),
    "snapkv": ("snapkv", {"variant": "kvpress"}, "SnapKVPress"),
    "adakv": ("adakv", {"variant": "kvpress"}, "AdaKVPress"),
    "h2o": ("h2o", {}, "ObservedAttentionPress"),
    "kivi": ("kivi", {}, None),
    "quest": ("quest", {}, None),
}
LLAMA = dict(layers=8, d_model=512, heads=8, kv_heads=4, d_ff=1408, vocab=8192)


def method_of(name: str, ratio: float) -> Any:
    """Build kvjax's method of that name, with a share of the slots if it has a budget."""
    import kvjax
    from kvjax.methods import takes_budget

    id, hyper, _ = METHODS[name]
    return kvjax.method(id, **hyper, **({"budget": ratio} if takes_budget(id) else {}))


def greedy(rows: int) -> Any:
    """Return the settings of `write_slice` for greedy decoding without stop tokens."""
    import jax
    import jax.numpy as jnp

    from kvjax.api.decode_loop import Draws, padded_stop
    from kvjax.api.sampling import Sampler

    keys = jnp.broadcast_to(jax.random.key(0), (rows,))
    stop = padded_stop(jnp.asarray([-1], jnp.int32))
    return Draws(Sampler().settings, keys, stop, jnp.zeros((rows,), jnp.int32))


class Ours:
    """kvjax on the random Llama: prefill(method) and decode(cache)."""

    def __init__(self, ratio: float, decode: int):
        import jax

        from kvjax.models.config import Config
        from kvjax.models.model import Model
        from kvjax.models.params import init

        config = Config(head_dim=LLAMA["d_model"] // LLAMA["heads"], max_positions=65536, **LLAMA)
        self.model = Model(config, init(config, jax.random.key(0)), name="random-llama")
        self.ratio, self.decode_tokens = ratio, decode

    def prefill(self, name: str, tokens: Any) -> Any:
        import jax

        import kvjax

        logits, cache = kvjax.prefill(
            self.model, tokens, method=method_of(name, self.ratio), room=self.decode_tokens * 8
        )
        jax.block_until_ready((logits, cache))
        return cache

    def decode(self, name: str, cache: Any, start: int) -> Any:
        """Greedy decoding as a host loop over the jitted step; returns the cache that holds the tokens."""
        import jax.numpy as jnp

        from kvjax import steps
        from kvjax.api.prefill import bare_cache

        run = steps.Run(self.model.config, method_of(name, self.ratio).decode_part())
        token, append, state = jnp.asarray([3], jnp.int32), jnp.ones((1,), bool), bare_cache(cache)
        for _ in range(self.decode_tokens):
            logits, state = steps.step(run, self.model.params, state, token, append)
            token = jnp.argmax(logits, -1).astype(jnp.int32)
        token.block_until_ready()
        return state

    def bytes(self, cache: Any, name: str) -> int:
        import kvjax

        return kvjax.nbytes(cache)

    def weight_bytes(self) -> int:
        import kvjax

        return kvjax.nbytes(self.model.params) - self.model.params["embed"].nbytes


class Theirs:
    """transformers + kvpress on a Llama of the same shape."""

    def __init__(
        self, ratio: float, decode: int, threads: int,
        shape: dict[str, int] = LLAMA, device: str = "cpu", dtype: str = "float32", positions: int = 65536,
    ):  # fmt: skip
        import torch
        import transformers
        from transformers import LlamaConfig, LlamaForCausalLM

        transformers.logging.set_verbosity_error()
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=shape["vocab"],
            hidden_size=shape["d_model"],
            intermediate_size=shape["d_ff"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["kv_heads"],
            max_position_embeddings=positions,
        )
        config._attn_implementation = "sdpa"
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, dtype))
        with torch.device(device):
            self.model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(before)
        self.ratio, self.decode_tokens = ratio, decode

    def press(self, name: str) -> Any:
        import kvpress

        press = METHODS[name][2]
        if press is None:
            return None
        removed = 1 - self.ratio
        if press == "AdaKVPress":
            return kvpress.AdaKVPress(kvpress.SnapKVPress(removed))
        return getattr(kvpress, press)(removed)

    def prefill(self, name: str, tokens: Any) -> Any:
        import contextlib

        import torch
        from transformers import DynamicCache

        # Observed attention needs the attention map, which only the eager path has.
        self.model.set_attn_implementation("eager" if name == "h2o" else "sdpa")
        for layer in self.model.model.layers:
            layer.self_attn.masked_key_indices = None
        cache, press = DynamicCache(), self.press(name)
        with torch.no_grad(), contextlib.nullcontext() if press is None else press(self.model):
            ids = torch.tensor(tokens, device=self.model.device)
            self.model.model(input_ids=ids, past_key_values=cache)
        if ids.is_cuda:
            torch.cuda.synchronize()
        return cache

    def decode(self, name: str, cache: Any, start: int) -> Any:
        import torch

        device = self.model.device
        token = torch.full((cache.layers[0].keys.shape[0], 1), 3, device=device)
        with torch.no_grad():
            for i in range(self.decode_tokens):
                position = torch.full_like(token, start + i)
                out = self.model(input_ids=token, past_key_values=cache, position_ids=position)
                token = out.logits[:, -1].argmax(-1, keepdim=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return cache

    def bytes(self, cache: Any, name: str) -> int:
        return sum(x.untyped_storage().nbytes() for layer in cache.layers for x in (layer.keys, layer.values))


def theirs_can(name: str, tokens: int) -> bool:
    """Whether kvpress has the method, and memory for the attention maps that its observation needs."""
    import psutil

    if METHODS[name][2] is None:
        return name == "none"
    maps = 4 * LLAMA["heads"] * tokens**2 * 4  # logits, mask, probabilities and a copy, in float32
    return name != "h2o" or maps < psutil.virtual_memory().available


def measure(side: Any, name: str, tokens: Any, rounds: list[dict[str, Any]]) -> None:
    """One round: a prefill and a decode, each after a first call that compiles."""
    start = tokens.shape[1]
    found: dict[str, Any] = {}
    if not rounds:
        cache, found["first_prefill_s"] = timed(lambda: side.prefill(name, tokens))
        cache, found["first_decode_s"] = timed(lambda: side.decode(name, cache, start))
    cache, found["prefill_s"] = timed(lambda: side.prefill(name, tokens))
    found["bytes"] = side.bytes(cache, name)
    _, found["decode_s"] = timed(lambda: side.decode(name, cache, start))
    rounds.append(found)
