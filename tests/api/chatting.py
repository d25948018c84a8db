"""A small model that chats in letters, with a template of one line, and how often programs were compiled."""

from __future__ import annotations

import contextlib
from functools import cache

import jax
import jax.numpy as jnp
from jax import monitoring

from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.train.data.byte_tokenizer import END, byte_tokenizer

STOP = 256
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    + END
    + "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def letters(logits, tokens):
    """Allow small letters alone, and the stop token where a text is a multiple of 11 tokens long."""
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
    ends = ((tokens >= 0).sum(-1) % 11 == 0)[:, None]
    allowed = jnp.where(ends, ids == STOP, (ids >= 97) & (ids < 123))
    return jnp.where(allowed, logits, -jnp.inf)


@cache
def talker(template: str | None = TEMPLATE, **more) -> Model:
    sizes = dict(layers=1, heads=2, kv_heads=1, head_dim=32, d_ff=16, max_positions=4096) | more
    config = Config(vocab=STOP + 1, d_model=16, **sizes)
    params = init(config, jax.random.key(0))
    return Model(
        config, params, tokenizer=byte_tokenizer(), chat_template=template, stop_ids=(STOP,), name="talker"
    )


def plain_render(model, messages, add_generation_prompt=True):
    """Render a conversation as TEMPLATE does, without the sandbox's process."""
    text = "".join(f"[{m['role']}]{m['content']}{END}" for m in messages)
    return text + "[assistant]" * add_generation_prompt


@contextlib.contextmanager
def compilations():
    """Yield a list to which the name of every program compiled in the block is added."""
    found = []

    def listen(event, duration_secs, **more):
        if event.endswith("backend_compile_duration"):
            found.append(more.get("fun_name", ""))

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        monitoring.unregister_event_duration_listener(listen)
