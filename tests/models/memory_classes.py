"""What distinguishes the memories of architectures, computed from their configs, and who stands for each.

Two architectures of one class hold their past in the same kinds of segments and hand it on in the same ways,
so a whole conversation with one of them says what a conversation with the other would.
"""

from kvjax.models.config import Config
from kvjax.models.mixers.attention import mixer_of


def layer_memory(config: Config, layer: int) -> str:
    """Return what one layer keeps, and what it reads or takes of other layers' memory."""
    mixer, window = mixer_of(config, layer), config.window(layer)
    slots = mixer.slots(config)
    if slots is None:
        words = ["state" if mixer.state(config) else "nothing"]
        words += ["in place"] if mixer.in_place else []
        words += ["growing"] if mixer.grows else []
    else:
        words = ["slots", *(kind for kind in ("factors", "fixed", "ids", "shared") if getattr(slots, kind))]
    words += ["window"] if window is not None else []
    words += [f"{use} from {_where(take.layer, layer)}" for use, take in mixer.takes.items()]
    return ", ".join(words)


def _where(source: int | None, layer: int) -> str:
    if source is None:
        return "the decoder"
    return "here" if source == layer else "above" if source > layer else "below"


def memory_class(config: Config) -> frozenset[str]:
    """Return the kinds of memory that an architecture's layers have."""
    return frozenset(layer_memory(config, i) for i in range(config.layers))


# One architecture of every class; where some can be stacked, one of those.
REPRESENTATIVES = (
    "gqa", "sinks", "mla", "gqkva", "retnet", "mamba-2", "goldfinch", "kimi linear", "jamba", "mlkv", "yoco",
    "lckv", "clla", "svformer", "swiftkv", "attention dropped", "lisa", "mixattention",
    "yoco, gated retention", "cepe", "rwkv-7", "resformer", "forgetting", "pod", "neurocache", "key as value",
    "indexed latents",
)  # fmt: skip

# In the plain suite: these have among them every kind of memory that a layer keeps. (Layers that read a
# context are in test_context.py.)
PLAIN = (
    "mixattention", "gqkva", "clla", "svformer", "resformer", "attention dropped", "lisa", "pod",
    "indexed latents",
)  # fmt: skip
# Mixers that none of those has and that keep something of their own.
OWN = ("tpa", "retnet", "gsa", "infini", "log-linear mamba-2")
